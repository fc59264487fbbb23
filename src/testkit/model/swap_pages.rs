//! Pages of swap memory in the model.

use std::collections::BTreeSet;

use crate::id::{PageId, SwapPageId};

/// All pages of swap memory, and the counters of their moves.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Swap {
    /// Whether each page is taken.
    pub(super) taken: Vec<bool>,
    /// The page at which the next search begins.
    next: usize,
    /// Pages that puts read, once for each put.
    pub(super) reading: Vec<SwapPageId>,
    /// Pages of `reading` that no longer belong to an entry. They become free at the end of their put.
    pub(super) leaving: BTreeSet<SwapPageId>,
    /// Pages that fetches write.
    pub(super) filling: BTreeSet<SwapPageId>,
    /// Number of batches of moves that the backend has received.
    pub moves: u64,
    /// By page, the last batch that saves to it.
    pub(super) saved_by: Vec<u64>,
    /// By page, the last batch that loads from it.
    pub(super) loaded_by: Vec<u64>,
    /// Saves that the backend has not received yet.
    pub saves: Vec<(PageId, SwapPageId)>,
    /// Pages saved.
    pub saved: u64,
    /// Pages saved only when they were evicted.
    pub forced: u64,
    /// Pages loaded.
    pub loaded: u64,
    /// Pages evicted from swap memory.
    pub evicted: u64,
    /// Pages lost.
    pub lost: u64,
    /// Pages whose save failed.
    pub failed: u64,
}

impl Swap {
    /// Creates `count` free pages.
    pub fn new(count: u32) -> Self {
        let (taken, none) = (vec![false; count as usize], vec![0; count as usize]);
        Self { taken, saved_by: none.clone(), loaded_by: none, ..Self::default() }
    }

    /// Returns whether there is swap memory.
    pub fn exists(&self) -> bool {
        !self.taken.is_empty()
    }

    /// Returns the number of pages that entries or cells have, and the number of free pages.
    pub fn counts(&self) -> (u32, u32) {
        let taken = self.taken.iter().filter(|taken| **taken).count();
        let stores = self.leaving.len() + self.filling.len();
        ((taken - stores) as u32, (self.taken.len() - taken) as u32)
    }

    /// Takes the next free page in turn.
    pub fn take(&mut self) -> Option<SwapPageId> {
        self.take_if(|_, _| true)
    }

    /// Takes the next free page in turn for which `is_one` is true.
    pub fn take_if(&mut self, is_one: impl Fn(&Self, SwapPageId) -> bool) -> Option<SwapPageId> {
        let count = self.taken.len() as u32;
        let mut pages = (0..count).map(|i| SwapPageId::new((self.next as u32 + i) % count));
        let page = pages.find(|&page| !self.taken[page.index()] && is_one(self, page))?;
        self.next = page.index() + 1;
        self.taken[page.index()] = true;
        Some(page)
    }

    /// Frees a page, or marks it so that the end of its put frees it. A waiting save to the page is cancelled.
    pub fn free(&mut self, page: SwapPageId) {
        assert!(self.taken[page.index()], "the model frees {page:?} twice");
        if self.reading.contains(&page) {
            assert!(self.leaving.insert(page), "the model frees {page:?} twice");
        } else {
            self.taken[page.index()] = false;
        }
        self.saves.retain(|save| save.1 != page);
    }
}
