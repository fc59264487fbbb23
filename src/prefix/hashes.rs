//! The column of the pages' hashes, by the numbers of the lists' entries.
//!
//! Not here: when pages are hashed (`chain.rs`), how a hash is computed (`hash/`).

use crate::hash::{Hashing, Named, Names, PageHash, PageHashes};
use crate::id::Namespace;
use crate::memory::{Memory, OutOfMemory};

use super::entry_list::EntryLists;

/// A hash for each entry of the lists' slab.
pub(super) struct Hashes {
    pub hashing: Hashing,
    width: usize,
    bytes: Vec<u8>,
}

impl Hashes {
    /// Creates the column for at most `page_count` pages.
    pub fn new(page_count: u32, hashing: Hashing, memory: &mut Memory) -> Result<Self, OutOfMemory> {
        let width = hashing.width();
        let bytes = u64::from(EntryLists::entry_count(page_count)) * width as u64;
        Ok(Self { hashing, width, bytes: memory.zeroed(bytes)? })
    }

    /// Returns the hash of an entry's page.
    pub fn of(&self, entry: u32) -> PageHash {
        let start = entry as usize * self.width;
        PageHash::from_bytes(&self.bytes[start..start + self.width])
    }

    /// Returns the hashes of a run of entries.
    pub fn of_run(&self, start: u32, len: u32) -> PageHashes<'_> {
        let bytes = start as usize * self.width..(start + len) as usize * self.width;
        PageHashes::new(self.hashing, &self.bytes[bytes])
    }

    pub fn set(&mut self, entry: u32, hash: PageHash) {
        let start = entry as usize * self.width;
        self.bytes[start..start + self.width].copy_from_slice(hash.bytes(self.width));
    }
}

/// Returns the names of a namespace whose prefixes are hashed.
pub(super) fn named(names: &Names, namespace: Namespace) -> &Named {
    names.get(namespace).expect("an admitted namespace has names")
}
