//! Saves, loads and leases between and during the steps of a run (B12 to B16).
//!
//! Loads write only pages that no plan contains yet: free pages, and pages of new sequences.

use std::thread;

use super::TestBackend;
use super::host_shadow::HostShadow;
use super::run::World;
use crate::backend::Moved;
use crate::id::{HostPageId, MoveId, PageId};
use crate::plan::PageMove;
use crate::testkit::planner::shuffle;

impl<B: TestBackend> World<'_, B> {
    /// Does nothing in at least half of the calls. Otherwise saves some of `pages` and of the free pages, or loads host
    /// pages to some free pages, up to four times.
    pub fn move_pages(&mut self, pages: &[PageId]) {
        if self.host.pages.is_empty() || self.rng.one_in(2) {
            return;
        }
        for _ in 0..self.rng.within(1, 4) {
            let free = self.planner.free_pages().to_vec();
            match self.rng.one_in(2) {
                true => self.save([pages, &free].concat()),
                false => self.load(free),
            }
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
        let mut targets = self.host.free();
        shuffle(&mut self.rng, &mut sources);
        shuffle(&mut self.rng, &mut targets);
        let pairs = sources.into_iter().zip(targets);
        let moves: Vec<_> = pairs.map(|(device, host)| PageMove { device, host }).collect();
        let moves = &moves[..self.rng.below(moves.len() as u64 + 1) as usize];
        let id = self.host.next();
        self.backend.save_pages(id, moves).expect("pages that exist");
        for PageMove { device, host } in moves {
            self.host.pages[host.index()] = Some(self.shadow[device.index()].clone());
            self.host.busy[host.index()] = Moved { saved: id, loaded: id };
        }
        self.host.last.saved = id;
    }

    fn load(&mut self, mut targets: Vec<PageId>) {
        let full = self.host.full();
        if full.is_empty() {
            return;
        }
        shuffle(&mut self.rng, &mut targets);
        targets.truncate(self.rng.within(0, 4) as usize);
        // One host page may have several targets.
        let moves: Vec<_> = targets.into_iter().map(|device| PageMove { device, host: self.rng.pick(&full) }).collect();
        self.load_moves(&moves);
    }

    fn load_moves(&mut self, moves: &[PageMove]) {
        let id = self.host.next();
        self.backend.load_pages(id, moves).expect("pages that exist");
        for PageMove { device, host } in moves {
            let bytes = self.host.pages[host.index()].clone();
            self.shadow[device.index()] = bytes.expect("its bytes are defined");
            self.host.busy[host.index()].loaded = id;
        }
        self.host.last.loaded = id;
    }

    /// Writes the shadow's bytes to pages that no plan contains, through leases and loads. Does nothing in at least
    /// half of the calls. Returns whether it wrote the pages.
    pub fn load_shadow(&mut self, pages: &[PageId]) -> bool {
        if self.host.pages.is_empty() || self.rng.one_in(2) {
            return false;
        }
        self.backend.synchronize().expect("nothing failed");
        let hosts = self.host.free();
        for pages in pages.chunks(hosts.len().max(1)) {
            if hosts.is_empty() {
                return false;
            }
            self.backend.synchronize().expect("nothing failed");
            let pairs = pages.iter().zip(&hosts);
            let moves: Vec<_> = pairs.map(|(&device, &host)| PageMove { device, host }).collect();
            for PageMove { device, host } in &moves {
                self.write(*host, self.shadow[device.index()].clone());
            }
            self.load_moves(&moves);
        }
        true
    }

    /// Writes a host page through a lease, sometimes on another thread.
    fn write(&mut self, host: HostPageId, bytes: Vec<u8>) {
        let mut lease = self.backend.lease_mut(host);
        match self.rng.one_in(4) {
            true => thread::scope(|scope| {
                let bytes = &bytes;
                let writer = scope.spawn(move || lease.as_mut().copy_from_slice(bytes));
                writer.join().expect("a page's bytes");
            }),
            false => lease.as_mut().copy_from_slice(&bytes),
        }
        self.host.pages[host.index()] = Some(bytes);
    }

    /// Ends some read leases and begins others, and checks their bytes. Leases continue while other pages move.
    pub fn lease_some(&mut self) {
        self.host.reads.retain(|_, (lease, bytes)| {
            assert!((*lease).as_ref() == bytes.as_slice(), "a leased page has changed");
            self.rng.one_in(2)
        });
        let moved = self.watch();
        for host in self.host.full() {
            let bytes = self.host.pages[host.index()].clone().expect("its bytes are defined");
            if self.host.busy[host.index()].saved <= moved.saved && self.rng.one_in(4) {
                let lease = self.backend.lease(host);
                assert!(lease.as_ref() == bytes, "seed {}: host page {host:?} differs", self.seed);
                self.host.reads.insert(host.raw(), (lease, bytes));
            }
        }
    }

    /// Checks that the watermark never falls and never passes the last call.
    fn watch(&mut self) -> Moved {
        let moved = self.backend.moved().expect("nothing failed");
        let HostShadow { seen, last, .. } = &mut self.host;
        assert!(moved.saved >= seen.saved && moved.loaded >= seen.loaded, "{moved:?} {seen:?}");
        assert!(moved.saved <= last.saved && moved.loaded <= last.loaded, "{moved:?} {last:?}");
        *seen = moved;
        moved
    }

    /// Compares the host pages whose bytes are defined. All calls are complete.
    pub fn compare_host(&mut self) {
        if self.host.pages.is_empty() {
            return;
        }
        assert_eq!(self.watch(), self.host.last, "B14: synchronize waits for moves");
        for host in self.host.full() {
            let lease = self.backend.lease(host);
            let same = Some(lease.as_ref()) == self.host.pages[host.index()].as_deref();
            assert!(same, "seed {} {:?}: {host:?} differs", self.seed, self.case);
        }
    }

    /// Checks that the backend rejects moves of pages that do not exist, and numbers that do not rise. Later
    /// comparisons check that nothing moved.
    fn check_invalid_moves(&mut self) {
        let (pages, hosts) = (self.case.layout.page_count(), self.host.pages.len() as u32);
        let of = |device, host| PageMove { device: PageId::new(device), host: HostPageId::new(host) };
        let (next, last) = (self.host.next(), MoveId::new(self.host.next().raw() - 1));
        for (id, moves) in [(next, [of(pages, 0)]), (next, [of(0, hosts)]), (last, [of(0, 0)])] {
            let seed = self.seed;
            assert!(self.backend.save_pages(id, &moves).is_err(), "seed {seed}: {id:?} {moves:?}");
            assert!(self.backend.load_pages(id, &moves).is_err(), "seed {seed}: {id:?} {moves:?}");
        }
    }
}
