//! Pages of host memory in the model.

use std::collections::BTreeSet;

use crate::id::{HostPageId, PageId};

/// All pages of host memory, and what has happened to them.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Hosts {
    /// Whether each page is taken, and the one to look at next.
    pub(super) taken: Vec<bool>,
    next: usize,
    /// Pages that puts read, those of them that no entry has, and pages that fetches write.
    pub(super) reading: BTreeSet<HostPageId>,
    pub(super) leaving: BTreeSet<HostPageId>,
    pub(super) filling: BTreeSet<HostPageId>,
    /// Batches of moves that the backend was given, and the last one that saves to a page and that loads from it.
    pub moves: u64,
    pub(super) saved_by: Vec<u64>,
    pub(super) loaded_by: Vec<u64>,
    /// Saves that the backend has not been given.
    pub saves: Vec<(PageId, HostPageId)>,
    /// Pages saved, saved as they were evicted, loaded, evicted from host memory, and lost.
    pub saved: u64,
    pub forced: u64,
    pub loaded: u64,
    pub evicted: u64,
    pub lost: u64,
    /// Pages whose save failed.
    pub failed: u64,
}

impl Hosts {
    /// Free pages.
    pub fn new(count: u32) -> Self {
        let (taken, none) = (vec![false; count as usize], vec![0; count as usize]);
        Self { taken, saved_by: none.clone(), loaded_by: none, ..Self::default() }
    }

    /// Whether there is host memory.
    pub fn exists(&self) -> bool {
        !self.taken.is_empty()
    }

    /// Pages that entries have, and free pages.
    pub fn counts(&self) -> (u32, u32) {
        let taken = self.taken.iter().filter(|taken| **taken).count();
        let stores = self.leaving.len() + self.filling.len();
        ((taken - stores) as u32, (self.taken.len() - taken) as u32)
    }

    /// The next free page in turn.
    pub fn take(&mut self) -> Option<HostPageId> {
        let count = self.taken.len();
        let page = (0..count).map(|i| (self.next + i) % count).find(|&page| !self.taken[page])?;
        self.next = page + 1;
        self.taken[page] = true;
        Some(HostPageId::new(page as u32))
    }

    /// A page is free again, once no put reads it; a save to it that waits is not made.
    pub fn free(&mut self, page: HostPageId) {
        assert!(self.taken[page.index()], "the model frees {page:?} twice");
        if self.reading.contains(&page) {
            assert!(self.leaving.insert(page), "the model frees {page:?} twice");
        } else {
            self.taken[page.index()] = false;
        }
        self.saves.retain(|save| save.1 != page);
    }
}
