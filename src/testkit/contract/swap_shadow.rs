//! The expected contents of the swap pages, after saves and leases.

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use super::TestBackend;
use crate::backend::Moved;
use crate::id::{MoveId, SwapPageId};

/// Maximum time in which a backend prepares a few swap pages.
const READY: Duration = Duration::from_secs(20);

/// The expected contents of the swap pages, and their users.
pub(super) struct SwapShadow<B: TestBackend> {
    /// The bytes of each page, if they are defined.
    pub pages: Vec<Option<Vec<u8>>>,
    /// The numbers of the last save and the last load.
    pub last: Moved,
    /// The last watermark of the backend.
    pub seen: Moved,
    /// For each page, the last save to it, and the last save or load that uses it.
    pub busy: Vec<Moved>,
    /// Read leases, with their expected bytes.
    pub reads: BTreeMap<u32, (B::Read, Vec<u8>)>,
}

impl<B: TestBackend> SwapShadow<B> {
    /// Waits until the backend has prepared all `count` pages.
    pub fn new(backend: &B, count: u32) -> Self {
        let start = Instant::now();
        while backend.swap_pages() < count {
            assert!(start.elapsed() < READY, "{} of {count} pages", backend.swap_pages());
            thread::yield_now();
        }
        let (pages, busy) = (vec![None; count as usize], vec![Moved::default(); count as usize]);
        let (last, seen) = (Moved::default(), Moved::default());
        Self { pages, last, seen, busy, reads: BTreeMap::new() }
    }

    /// Returns the number of the next save or load.
    pub fn next(&self) -> MoveId {
        MoveId::new(self.last.saved.max(self.last.loaded).raw() + 1)
    }

    /// Returns the swap pages that saves may write: those without a read lease.
    pub fn free(&self) -> Vec<SwapPageId> {
        let all = 0..self.pages.len() as u32;
        all.filter(|page| !self.reads.contains_key(page)).map(SwapPageId::new).collect()
    }

    /// Returns the swap pages whose bytes are defined.
    pub fn full(&self) -> Vec<SwapPageId> {
        let all = (0..self.pages.len() as u32).map(SwapPageId::new);
        all.filter(|page| self.pages[page.index()].is_some()).collect()
    }
}
