//! Pages of host memory in the model.

use crate::id::{HostPageId, PageId};

/// All pages of host memory, and what has happened to them.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Hosts {
    /// Whether each page is taken, and the one to look at next.
    taken: Vec<bool>,
    next: usize,
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
        Self { taken: vec![false; count as usize], ..Self::default() }
    }

    /// Whether there is host memory.
    pub fn exists(&self) -> bool {
        !self.taken.is_empty()
    }

    /// Taken and free pages.
    pub fn counts(&self) -> (u32, u32) {
        let taken = self.taken.iter().filter(|taken| **taken).count();
        (taken as u32, (self.taken.len() - taken) as u32)
    }

    /// The next free page in turn.
    pub fn take(&mut self) -> Option<HostPageId> {
        let count = self.taken.len();
        let page = (0..count).map(|i| (self.next + i) % count).find(|&page| !self.taken[page])?;
        self.next = page + 1;
        self.taken[page] = true;
        Some(HostPageId::new(page as u32))
    }

    /// A page is free again; a save to it that waits is not made.
    pub fn free(&mut self, page: HostPageId) {
        assert!(std::mem::take(&mut self.taken[page.index()]), "the model frees {page:?} twice");
        self.saves.retain(|save| save.1 != page);
    }
}
