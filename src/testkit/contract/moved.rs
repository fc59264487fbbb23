//! Saves, loads and leases between and during the steps of a run (B12 to B16).
//!
//! Loads write only pages that no plan contains yet: free pages, and pages of new sequences.

use std::thread;

use super::TestBackend;
use super::run::World;
use super::swap_shadow::SwapShadow;
use crate::backend::Moved;
use crate::id::{MoveId, PageId, SwapPageId};
use crate::plan::PageMove;
use crate::testkit::planner::shuffle;

impl<B: TestBackend> World<'_, B> {
    /// Does nothing in at least half of the calls. Otherwise saves some of `pages` and of the free pages, or loads swap
    /// pages to some free pages, up to four times.
    pub fn move_pages(&mut self, pages: &[PageId]) {
        if self.swap.pages.is_empty() || self.rng.one_in(2) {
            return;
        }
        for _ in 0..self.rng.within(1, 4) {
            let free = self.planner.free_pages().to_vec();
            if self.rng.one_in(2) { self.save([pages, &free].concat()) } else { self.load(free) }
        }
        if self.rng.one_in(4) {
            self.check_invalid_moves();
        }
        self.watch();
    }

    /// Returns the pages of live sequences that are full of tokens. No step writes them while their sequences live.
    pub fn whole_pages(&self) -> Vec<PageId> {
        let size = self.case.layout.page_size();
        let live = self.planner.live();
        let planned = live.iter().filter_map(|&sequence| self.planner.sequence(sequence));
        planned.flat_map(|planned| planned.whole_pages(size)).collect()
    }

    fn save(&mut self, mut sources: Vec<PageId>) {
        let mut targets = self.swap.free();
        shuffle(&mut self.rng, &mut sources);
        shuffle(&mut self.rng, &mut targets);
        let pairs = sources.into_iter().zip(targets);
        let moves: Vec<_> = pairs.map(|(device, swap)| PageMove { device, swap }).collect();
        let moves = &moves[..self.rng.below(moves.len() as u64 + 1) as usize];
        let id = self.swap.next();
        self.backend.save_pages(id, moves).expect("pages that exist");
        for PageMove { device, swap } in moves {
            self.swap.pages[swap.index()] = Some(self.shadow[device.index()].clone());
            self.swap.busy[swap.index()] = Moved { saved: id, loaded: id };
        }
        self.swap.last.saved = id;
    }

    fn load(&mut self, mut targets: Vec<PageId>) {
        let full = self.swap.full();
        if full.is_empty() {
            return;
        }
        shuffle(&mut self.rng, &mut targets);
        targets.truncate(self.rng.within(0, 4) as usize);
        // One swap page may have several targets.
        let moves: Vec<_> = targets.into_iter().map(|device| PageMove { device, swap: self.rng.pick(&full) }).collect();
        self.load_moves(&moves);
    }

    fn load_moves(&mut self, moves: &[PageMove]) {
        let id = self.swap.next();
        self.backend.load_pages(id, moves).expect("pages that exist");
        for PageMove { device, swap } in moves {
            let bytes = self.swap.pages[swap.index()].clone();
            self.shadow[device.index()] = bytes.expect("its bytes are defined");
            self.swap.busy[swap.index()].loaded = id;
        }
        self.swap.last.loaded = id;
    }

    /// Writes the shadow's bytes to pages that no plan contains, through leases and loads. Does nothing in at least
    /// half of the calls. Returns whether it wrote the pages.
    pub fn load_shadow(&mut self, pages: &[PageId]) -> bool {
        if self.swap.pages.is_empty() || self.rng.one_in(2) {
            return false;
        }
        self.backend.synchronize().expect("nothing failed");
        let swaps = self.swap.free();
        for pages in pages.chunks(swaps.len().max(1)) {
            if swaps.is_empty() {
                return false;
            }
            self.backend.synchronize().expect("nothing failed");
            let pairs = pages.iter().zip(&swaps);
            let moves: Vec<_> = pairs.map(|(&device, &swap)| PageMove { device, swap }).collect();
            for PageMove { device, swap } in &moves {
                self.write(*swap, self.shadow[device.index()].clone());
            }
            self.load_moves(&moves);
        }
        true
    }

    /// Writes a swap page through a lease, sometimes on another thread.
    fn write(&mut self, swap: SwapPageId, bytes: Vec<u8>) {
        let mut lease = self.backend.lease_mut(swap);
        match self.rng.one_in(4) {
            true => thread::scope(|scope| {
                let bytes = &bytes;
                let writer = scope.spawn(move || lease.as_mut().copy_from_slice(bytes));
                writer.join().expect("a page's bytes");
            }),
            false => lease.as_mut().copy_from_slice(&bytes),
        }
        self.swap.pages[swap.index()] = Some(bytes);
    }

    /// Ends some read leases and begins others, and checks their bytes. Leases continue while other pages move.
    pub fn lease_some(&mut self) {
        self.swap.reads.retain(|_, (lease, bytes)| {
            assert!((*lease).as_ref() == bytes.as_slice(), "a leased page has changed");
            self.rng.one_in(2)
        });
        let moved = self.watch();
        for swap in self.swap.full() {
            let bytes = self.swap.pages[swap.index()].clone().expect("its bytes are defined");
            if self.swap.busy[swap.index()].saved <= moved.saved && self.rng.one_in(4) {
                let lease = self.backend.lease(swap);
                assert!(lease.as_ref() == bytes, "seed {}: swap page {swap:?} differs", self.seed);
                self.swap.reads.insert(swap.raw(), (lease, bytes));
            }
        }
    }

    /// Checks that the watermark never falls and never passes the last call.
    fn watch(&mut self) -> Moved {
        let moved = self.backend.moved().expect("nothing failed");
        let SwapShadow { seen, last, .. } = &mut self.swap;
        assert!(moved.saved >= seen.saved && moved.loaded >= seen.loaded, "{moved:?} {seen:?}");
        assert!(moved.saved <= last.saved && moved.loaded <= last.loaded, "{moved:?} {last:?}");
        *seen = moved;
        moved
    }

    /// Compares the swap pages whose bytes are defined. All calls are complete.
    pub fn compare_swap(&mut self) {
        if self.swap.pages.is_empty() {
            return;
        }
        assert_eq!(self.watch(), self.swap.last, "B14: synchronize waits for moves");
        for swap in self.swap.full() {
            let lease = self.backend.lease(swap);
            let same = Some(lease.as_ref()) == self.swap.pages[swap.index()].as_deref();
            assert!(same, "seed {} {:?}: {swap:?} differs", self.seed, self.case);
        }
    }

    /// Checks that the backend rejects moves of pages that do not exist, and numbers that do not rise. Later
    /// comparisons check that nothing moved.
    fn check_invalid_moves(&mut self) {
        let (pages, swaps) = (self.case.layout.page_count(), self.swap.pages.len() as u32);
        let pair = |device, swap| PageMove { device: PageId::new(device), swap: SwapPageId::new(swap) };
        let (next, last) = (self.swap.next(), MoveId::new(self.swap.next().raw() - 1));
        for (id, moves) in [(next, [pair(pages, 0)]), (next, [pair(0, swaps)]), (last, [pair(0, 0)])] {
            let seed = self.seed;
            assert!(self.backend.save_pages(id, &moves).is_err(), "seed {seed}: {id:?} {moves:?}");
            assert!(self.backend.load_pages(id, &moves).is_err(), "seed {seed}: {id:?} {moves:?}");
        }
    }
}
