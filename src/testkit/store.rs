//! A stand-in for a page store, of unlimited size. It remembers the keys of pages but not their bytes.

use std::collections::HashSet;

use crate::backend::Backend;
use crate::engine::Engine;
use crate::error::EngineError;
use crate::hash::{NamespaceNames, PageHash};
use crate::id::{Namespace, TokenId};

/// Maximum number of puts in one call of the engine.
const PUTS: usize = 256;

/// The keys of stored pages.
#[derive(Clone, Debug, Default)]
pub struct KeyStore {
    keys: HashSet<PageHash>,
    /// Number of pages that were put for the first time.
    pub put_pages: u64,
    /// Number of pages that [`KeyStore::fetch`] has fetched.
    pub fetched_pages: u64,
}

impl KeyStore {
    /// Fetches the stored pages that follow the cached pages of a prompt. Returns their number. The namespace must have
    /// no [names](NamespaceNames), because the page keys are computed without them.
    ///
    /// # Errors
    /// As [`Engine::fetch`].
    pub fn fetch<B: Backend>(
        &mut self,
        engine: &mut Engine<B>,
        namespace: Namespace,
        prompt: &[TokenId],
    ) -> Result<u32, EngineError<B::Error>> {
        let shape = engine.shape();
        let Some(hashing) = shape.hashing else { return Ok(0) };
        let page_size = shape.layout.page_size();
        let matchable = &prompt[..prompt.len().saturating_sub(1)];
        let keys = hashing.chain(&NamespaceNames::default(), matchable, page_size);
        let cached = engine.match_prefix(namespace, prompt).pages() as usize;
        let stored = keys[cached..].iter().take_while(|key| self.keys.contains(*key)).count() as u32;
        if stored == 0 {
            return Ok(0);
        }
        let fetch = engine.fetch(namespace, prompt, stored)?;
        let Some((id, count)) = fetch.map(|fetch| (fetch.id, fetch.pages.len() as u32)) else {
            return Ok(0);
        };
        assert!(engine.fetched(id, count), "the fetch is open");
        self.fetched_pages += u64::from(count);
        Ok(count)
    }

    /// Stores all pages that [`Engine::puts`] passes to its sink, until a call passes none.
    ///
    /// # Errors
    /// As [`Engine::puts`].
    pub fn take<B: Backend>(&mut self, engine: &mut Engine<B>) -> Result<(), EngineError<B::Error>> {
        let mut ids = Vec::new();
        loop {
            engine.puts(PUTS, |put| {
                self.put_pages += u64::from(self.keys.insert(put.key));
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
