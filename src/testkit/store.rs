//! A stand-in for a store of unlimited size. It remembers the keys of records but not their bytes.

use std::collections::HashSet;

use crate::backend::Backend;
use crate::engine::Engine;
use crate::error::EngineError;
use crate::hash::PageHash;
use crate::id::{Namespace, TokenId};

/// Maximum number of puts in one call of the engine.
const PUTS: usize = 256;

/// The group and the key of each stored record.
#[derive(Clone, Debug, Default)]
pub struct KeyStore {
    records: HashSet<(u32, PageHash)>,
    /// Number of pages of the records that were put for the first time.
    pub put_pages: u64,
    /// Number of pages that [`KeyStore::fetch`] has fetched.
    pub fetched_pages: u64,
}

impl KeyStore {
    /// Fetches the stored records that make the cached prefix of a prompt longer. Returns the number of their pages.
    ///
    /// # Errors
    /// As [`Engine::fetch`].
    pub fn fetch<B: Backend>(
        &mut self,
        engine: &mut Engine<B>,
        namespace: Namespace,
        prompt: &[TokenId],
    ) -> Result<u32, EngineError<B::Error>> {
        let Some(lookup) = engine.lookup(namespace, prompt)? else { return Ok(0) };
        let keys = lookup.keys(prompt);
        let to = lookup.target(|group, place| self.records.contains(&(group, keys[place as usize])));
        let Some(fetch) = engine.fetch(namespace, prompt, to)? else { return Ok(0) };
        let (id, count) = (fetch.id, fetch.len());
        let pages = fetch.records().map(|record| record.pages.len() as u32).sum();
        assert!(engine.fetched(id, count), "the fetch is open");
        self.fetched_pages += u64::from(pages);
        Ok(pages)
    }

    /// Stores all records that [`Engine::puts`] passes to its sink, until a call passes none.
    ///
    /// # Errors
    /// As [`Engine::puts`].
    pub fn take<B: Backend>(&mut self, engine: &mut Engine<B>) -> Result<(), EngineError<B::Error>> {
        let mut ids = Vec::new();
        loop {
            engine.puts(PUTS, |put| {
                let is_new = self.records.insert((put.group, put.key));
                self.put_pages += if is_new { put.pages.len() as u64 } else { 0 };
                ids.push(put.id);
            })?;
            if ids.is_empty() {
                return Ok(());
            }
            for id in ids.drain(..) {
                assert!(engine.put_done(id, true), "the put is open");
            }
        }
    }
}
