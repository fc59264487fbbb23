//! Moves of the model between the device and host memory: pages are found by looking at all of them.

use std::collections::BTreeSet;

use super::open_moves::Path;
use super::tree::Tree;
use super::{Model, PageIs};
use crate::error::Error;
use crate::id::{HostPageId, PageId, Scope, SeqKey, TokenId};

impl Tree {
    /// A host page: a free one, or that of the page that is in host memory alone for the longest time.
    pub(super) fn take_host(&mut self) -> Option<HostPageId> {
        loop {
            if let Some(page) = self.hosts.take() {
                return Some(page);
            }
            let host_only =
                self.pages.iter().filter(|(_, held)| held.users == 0 && held.page.is_none());
            let path = host_only.min_by_key(|(_, held)| held.idle_since)?.0.clone();
            self.hosts.evicted += 1;
            self.lose(&path);
        }
    }

    /// Removes a page for want of room. Returns that of the device.
    fn lose(&mut self, path: &Path) -> Option<PageId> {
        self.hosts.lost += u64::from(!self.pages[path].stored);
        self.remove(path)
    }

    /// Saves an idle page, if there is a host page for it.
    fn save(&mut self, path: &Path) -> bool {
        let Some(host) = self.take_host() else { return false };
        let held = self.pages.get_mut(path).expect("it is cached");
        held.host = Some(host);
        self.hosts.saves.push((held.page.expect("it is on the device"), host));
        self.hosts.saved_by[host.index()] = self.hosts.moves + 1;
        self.hosts.saved += 1;
        true
    }

    /// The device page of an idle page goes. It stays in host memory, if there is room.
    pub(super) fn evict_to_host(&mut self, path: &Path) -> PageId {
        if self.pages[path].host.is_none() {
            if !self.save(path) {
                return self.lose(path).expect("it is on the device");
            }
            self.hosts.forced += 1;
        }
        self.pages.get_mut(path).and_then(|held| held.page.take()).expect("it is on the device")
    }

    /// `Engine::save_ahead`
    pub(super) fn save_ahead(&mut self, ahead: u32) {
        let idle = self.pages.iter().filter(|(_, held)| held.users == 0 && held.page.is_some());
        let mut idle: Vec<_> = idle.map(|(path, held)| (held.idle_since, path.clone())).collect();
        idle.sort();
        for (_, path) in idle.into_iter().take(ahead as usize) {
            if self.pages[&path].host.is_none() && !self.save(&path) {
                break;
            }
        }
    }

    /// Removes a page from both tiers. Returns that of the device.
    pub(super) fn remove(&mut self, path: &Path) -> Option<PageId> {
        let held = self.pages.remove(path).expect("it was found");
        held.host.into_iter().for_each(|host| self.hosts.free(host));
        held.page
    }

    /// Idle pages on the device that host memory has too.
    pub(super) fn clean(&self) -> u32 {
        let clean = self.pages.values().filter(|held| held.page.is_some() && held.host.is_some());
        clean.count() as u32
    }

    /// Saves failed: pages that are in host memory alone by them go, with all behind them, and the others are on the
    /// device alone again.
    pub(super) fn fail_saves(&mut self) {
        let hosts: BTreeSet<_> = self.hosts.saves.iter().map(|save| save.1).collect();
        self.hosts.failed += self.hosts.saves.len() as u64;
        let failed =
            self.pages.iter().filter(|(_, held)| held.host.is_some_and(|h| hosts.contains(&h)));
        for path in failed.map(|(path, _)| path.clone()).collect::<Vec<_>>() {
            let Some(held) = self.pages.get_mut(&path) else { continue };
            if held.page.is_some() {
                let host = held.host.take().expect("it was just saved");
                self.hosts.free(host);
                continue;
            }
            let below = self.pages.keys().filter(|below| {
                (below.0, below.1) == (path.0, path.1) && below.2.starts_with(&path.2)
            });
            for below in below.cloned().collect::<Vec<_>>() {
                self.hosts.lost += 1;
                assert_eq!(self.remove(&below), None, "what is below is in host memory");
            }
        }
    }
}

impl Model {
    /// How many of the first `pages` of a path are on the device.
    pub(super) fn on_device(&self, scope: Scope, tokens: &[TokenId], pages: usize) -> usize {
        self.tree.matched(scope, &tokens[..pages * self.page_size()]).len()
    }

    /// Tells which of the next saves and loads fail.
    pub fn expect_moves(&mut self, failures: Vec<bool>) {
        self.move_failures = failures.into();
    }

    /// Whether the last plan or fork was refused because its load failed.
    pub fn take_load_failed(&mut self) -> bool {
        std::mem::take(&mut self.load_failed)
    }

    pub(super) fn next_move_fails(&mut self) -> bool {
        self.move_failures.pop_front().unwrap_or(false)
    }

    /// The backend is given the saves that wait. Returns whether it failed.
    pub(super) fn flush_saves(&mut self) -> bool {
        let moves = !self.tree.hosts.saves.is_empty();
        self.tree.hosts.moves += u64::from(moves);
        let failed = moves && self.next_move_fails();
        if failed {
            self.tree.fail_saves();
        }
        self.tree.hosts.saves.clear();
        failed
    }

    /// Whether a sequence waits for pages in host memory.
    pub fn is_pending(&self, seq: SeqKey) -> bool {
        self.running(seq).is_ok_and(|sequence| sequence.pending > 0)
    }

    /// `Engine::save_ahead`. Returns the pages saved, or nothing if the backend failed.
    pub fn save_ahead(&mut self, ahead: u32) -> Option<u32> {
        if self.tree.hosts.exists() {
            self.tree.save_ahead(ahead);
        }
        let saved = self.tree.hosts.saves.len() as u32;
        (!self.flush_saves()).then_some(saved)
    }

    /// `Engine::load`. Returns whether the backend made the load.
    pub fn load(&mut self, seqs: &[SeqKey]) -> Result<bool, Error> {
        let loads = self.begin_load(seqs)?;
        self.flush_saves();
        let moves = !loads.is_empty();
        self.tree.hosts.moves += u64::from(moves);
        for (_, host) in &loads {
            self.tree.hosts.loaded_by[host.index()] = self.tree.hosts.moves;
        }
        let failed = moves && self.next_move_fails();
        self.end_load(seqs, &loads, failed);
        Ok(!failed)
    }

    fn begin_load(&mut self, seqs: &[SeqKey]) -> Result<Vec<(PageId, HostPageId)>, Error> {
        let (mut lacking, mut drawn) = (Vec::new(), 0);
        for &seq in seqs {
            let sequence = self.running(seq)?;
            let places = sequence.published..sequence.published + sequence.pending;
            // The deepest page first.
            let paths =
                places.rev().map(|at| self.tree.path(sequence.scope, &sequence.tokens, at + 1));
            let paths: Vec<_> = paths
                .filter(|path| self.tree.pages[path].page.is_none() && !lacking.contains(path))
                .collect();
            drawn += paths.len().min(self.promised(seq)? as usize);
            lacking.extend(paths);
        }
        self.check_pages(lacking.len(), drawn)?;
        let pages = self.take_pages(lacking.len());
        let loads = lacking.iter().zip(pages).map(|(path, page)| {
            let held = self.tree.pages.get_mut(path).expect("it is locked");
            held.page = Some(page);
            (page, held.host.expect("it is in host memory"))
        });
        Ok(loads.collect())
    }

    /// What a plan or a fork does first: loads what its sequences wait for.
    pub(super) fn load_first(&mut self, seqs: impl Iterator<Item = SeqKey>) -> Result<(), Error> {
        let waiting: Vec<_> = seqs.filter(|&seq| self.is_pending(seq)).collect();
        if !waiting.is_empty() {
            self.load_failed = !self.load(&waiting)?;
        }
        // Any error will do: the replay asks for the reason.
        if self.load_failed { Err(Error::EmptyBatch) } else { Ok(()) }
    }

    /// The backend has made the loads, or failed.
    fn end_load(&mut self, seqs: &[SeqKey], loads: &[(PageId, HostPageId)], failed: bool) {
        let pages: Vec<_> = loads.iter().map(|load| load.0).collect();
        self.pages.turn(
            &pages,
            PageIs::Private,
            if failed { PageIs::Free } else { PageIs::Cached },
        );
        for held in self.tree.pages.values_mut() {
            if held.page.is_some_and(|page| pages.contains(&page)) {
                match failed {
                    true => held.page = None,
                    false => {
                        self.tree.hosts.free(held.host.take().expect("it was loaded from there"))
                    }
                }
            }
        }
        if failed {
            return;
        }
        self.tree.hosts.loaded += loads.len() as u64;
        let page_size = self.page_size();
        for &seq in seqs {
            let sequence = self.sequences.get_mut(&seq).expect("it runs");
            let pending = std::mem::take(&mut sequence.pending);
            if pending == 0 {
                continue;
            }
            self.counters.host_hit_tokens += (pending * page_size) as u64;
            sequence.published += pending;
            let tokens = &sequence.tokens[..sequence.published * page_size];
            sequence.table = self.tree.matched(sequence.scope, tokens);
            self.look_at_front(seq, true);
        }
    }
}
