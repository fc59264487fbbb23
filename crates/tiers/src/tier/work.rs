//! The threads of the stores.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use kvarena::hash::{NamespaceNames, PageHash};

use super::jobs::{Ask, Done, Get, Job, Key, Put};
use super::lane::{Call, Lane};
use super::options::add;
use super::pieces::Pieces;
use super::rounds::Rounds;
use crate::check::Secret;
use crate::lock::lock;
use crate::miss::{Miss, Misses};
use crate::name::{Fingerprint, Name, Space};
use crate::record::{PageChecks, Record};
use crate::store::{Buffers, Got, Store, StoreError};

/// The state that the threads and the host share.
pub(super) struct Shared<R, W> {
    pub lanes: Vec<Lane<R, W>>,
    /// The fingerprint of each rank.
    pub fingerprints: Vec<Fingerprint>,
    /// The first rank of each fingerprint. Ranks with equal fingerprints share their records.
    pub distinct: Vec<usize>,
    /// Returns a rank's bytes of a lease.
    pub part: fn(&R, usize) -> &[u8],
    /// Returns a rank's bytes of a lease, to write.
    pub part_mut: fn(&mut W, usize) -> &mut [u8],
    pub secret: Option<Secret>,
    pub page_size: u32,
    pub record_pages: u32,
    /// The used bytes of the pages of each group.
    pub groups: Vec<Pieces>,
    /// Maximum number of bytes of the pages that a put writes.
    pub largest_put: u64,
    /// Whether groups have cells: a fetch then arrives whole or not at all.
    pub has_cells: bool,
    pub misses: Misses,
    /// How often each space was forgotten.
    pub forgets: Mutex<HashMap<Space, u64>>,
    pub results: Sender<Done>,
    /// Results that were sent and not received.
    pub sent: AtomicU64,
    pub wake: Arc<dyn Fn() + Send + Sync>,
}

impl<R: Send + 'static, W: Send + 'static> Shared<R, W> {
    /// Serves the jobs of a store until it is closed.
    pub fn serve(&self, index: usize) {
        let lane = &self.lanes[index];
        while let Some(job) = lane.next(|put| self.bytes(put.key.group, put.pages.len(), self.distinct.len())) {
            match job {
                Job::Ask(ask) => self.have(index, ask),
                Job::Get(get) => {
                    let (fetch, index, name) = (get.fetch, get.index, self.name(&get.key));
                    let got = self.get(lane, get); // drops the leases
                    got.err().into_iter().for_each(|miss| self.misses.add(miss));
                    self.send(Done::Got { fetch, index, name, got });
                }
                Job::Put(put) => self.put(index, put),
                Job::Forget { space, answer } => {
                    let of = |&rank: &usize| &self.fingerprints[rank];
                    let remove = |of| lane.call(Call::Other, |store| store.remove_space(of, space));
                    let removed = self.distinct.iter().map(of).map(remove).fold(Ok(()), Result::and);
                    // The caller need not wait for the answer.
                    let _ = answer.send((lane.options.name.clone(), removed));
                }
            }
        }
    }

    /// Returns the bytes of pages of a group on this number of ranks.
    pub fn bytes(&self, group: u32, pages: usize, ranks: usize) -> u64 {
        (self.groups[group as usize].page_bytes * pages * ranks) as u64
    }

    /// Returns the name of the part of rank 0, which stands for the record.
    pub fn name(&self, key: &Key) -> Name {
        self.name_of(0, key.space, key.group, key.key)
    }

    /// Returns the name of a rank's part of a record.
    pub fn name_of(&self, rank: usize, space: Space, group: u32, key: PageHash) -> Name {
        Name::new(&self.fingerprints[rank], space, key.to_digest(), group as u16)
    }

    pub fn space(&self, names: &NamespaceNames) -> Space {
        Space::of(names, self.secret.as_ref())
    }

    fn record<'a>(&self, key: &'a Key, pages: usize, rank: usize) -> Record<'a> {
        let page_bytes = self.groups[key.group as usize].page_bytes as u32;
        let (fingerprint, page_size, tokens) =
            (self.fingerprints[rank], self.page_size, &key.tokens[key.range.clone()]);
        let (space, first, parent) = (key.space, key.first, key.parent);
        let (group, pages, key) = (key.group as u16, pages as u32, key.key.to_digest());
        Record { fingerprint, space, group, page_size, first, pages, page_bytes, parent, key, tokens }
    }

    fn send(&self, done: Done) {
        // The host has dropped the tier if nothing receives.
        if self.results.send(done).is_ok() {
            self.sent.fetch_add(1, Ordering::Release);
            (self.wake)();
        }
    }

    /// Returns whether a request for these tokens and bytes would gain by an answer of any store.
    pub fn has_use(&self, most: (u64, u64), now: Instant) -> bool {
        self.lanes.iter().any(|lane| lane.has_use(most, now))
    }

    /// Passes a question to the first store from `index` on that is worth it, or ends it.
    pub fn ask(&self, index: usize, ask: Box<Ask>) {
        let now = Instant::now();
        let is_asked = |lane: &Lane<R, W>| match ask.is_exact {
            true => lane.confirms(now),
            false => lane.has_use(ask.most, now),
        };
        let located = ask.lookup.target(|group, place| ask.located.contains_key(&(group, place)));
        let missing = match ask.is_exact {
            true => ask.located.len() < ask.wanted.len() || ask.keys.is_empty(),
            false => located < ask.lookup.target(|_, _| true),
        };
        match self.lanes[index..].iter().find(|lane| missing && is_asked(lane)) {
            Some(lane) => lane.push(Job::Ask(ask)),
            None => self.send(Done::Asked(ask)),
        }
    }

    fn have(&self, index: usize, mut ask: Box<Ask>) {
        if ask.keys.is_empty() {
            ask.keys = ask.lookup.keys(&ask.prompt);
        }
        let missing = ask.wanted.iter().filter(|at| !ask.located.contains_key(at)).copied().collect();
        let lane = &self.lanes[index];
        let can_skip = lane.options.store.asks_one_by_one() && !ask.is_exact;
        let mut rounds = Rounds::new(missing, can_skip);
        // The reads after a find show whether the other ranks' parts are there.
        let ranks = if ask.is_exact { &self.distinct[..] } else { &[0] };
        loop {
            let mut round = rounds.next(&ask.lookup, &ask.located);
            if round.is_empty() || !ranks.iter().all(|&rank| self.have_of(lane, rank, &mut ask, &mut round)) {
                break;
            }
            ask.located.extend(round.into_iter().map(|at| (at, index)));
        }
        self.ask(index + 1, ask);
    }

    /// Removes the records from `round` that the store lacks on a rank. Returns whether the store has answered.
    fn have_of(&self, lane: &Lane<R, W>, rank: usize, ask: &mut Ask, round: &mut Vec<(u32, u32)>) -> bool {
        let name = |&(group, place): &(u32, u32)| self.name_of(rank, ask.space, group, ask.keys[place as usize]);
        let names: Vec<_> = round.iter().map(name).collect();
        if names.is_empty() {
            return true;
        }
        add(&lane.counters.asked, names.len() as u64);
        let is_exact = ask.is_exact;
        let have = |store: &dyn Store| if is_exact { store.have_now(&names) } else { store.have(&names) };
        // A confirmation has more time than a request: its time does not count for the store's speed.
        let (kind, begin) = (if is_exact { Call::Other } else { Call::Ask }, Instant::now());
        let have = lane.call(kind, have);
        ask.took += begin.elapsed();
        let Ok(have) = have else { return false };
        let mut has = have.into_iter();
        let denied = &mut ask.denied;
        round.retain(|at| {
            let has = has.next() == Some(true);
            denied.extend((is_exact && !has).then_some(*at));
            has
        });
        add(&lane.counters.found, round.len() as u64);
        true
    }

    /// Reads all parts of a record.
    fn get(&self, lane: &Lane<R, W>, mut get: Get<W>) -> Result<(), Miss> {
        (0..self.fingerprints.len()).try_for_each(|rank| self.get_part(lane, rank, &mut get))
    }

    fn get_part(&self, lane: &Lane<R, W>, rank: usize, get: &mut Get<W>) -> Result<(), Miss> {
        let pieces = &self.groups[get.key.group as usize];
        let of = if get.key.group == 0 { self.record_pages } else { get.pages.len() as u32 };
        let record = self.record(&get.key, of as usize, rank);
        let name = record.name();
        let mut head = vec![0; record.head_bytes()];
        let scratch = if pieces.is_whole() { 0 } else { pieces.page_bytes * get.pages.len() };
        let mut scratch = vec![0; scratch];
        let mut pages: Vec<&mut [u8]> = match pieces.is_whole() {
            true => get.pages.iter_mut().map(|page| (self.part_mut)(page, rank)).collect(),
            false => scratch.chunks_exact_mut(pieces.page_bytes).collect(),
        };
        let mut checks = PageChecks::new(pieces.page_bytes, self.secret.as_ref());
        let seen = &mut |piece: &[u8]| checks.update(piece);
        let into = &mut Buffers { first: get.first, of, head: &mut head, pages: &mut pages, seen };
        let got = lane.call(Call::Other, |store| store.get(&name, into));
        let checked = match got {
            Err(_) => Err(Miss::Failed),
            Ok(Got::Absent) => Err(Miss::Absent),
            Ok(Got::Foreign) => Err(Miss::Foreign),
            Ok(Got::Length) => Err(Miss::Length),
            Ok(Got::Read) => record
                .check_head(&head, self.secret.as_ref())
                .and_then(|()| checks.compare(&head, get.first as usize, pages.len())),
        };
        if let Err(miss) = checked {
            if miss.is_damage() && lane.options.removes_damage {
                let removed = lane.call(Call::Other, |store| store.remove(&[name]));
                add(&lane.counters.removed, removed.is_ok().into());
            }
            return Err(miss);
        }
        if !pieces.is_whole() {
            let used = scratch.chunks_exact(pieces.page_bytes);
            get.pages.iter_mut().zip(used).enumerate().for_each(|(at, (page, used))| {
                pieces.scatter(at, used, (self.part_mut)(page, rank));
            });
        }
        add(&lane.counters.read, 1);
        add(&lane.counters.read_bytes, (pieces.page_bytes * get.pages.len()) as u64);
        Ok(())
    }

    /// Puts a record into a store, and passes it to the next one.
    fn put(&self, index: usize, mut put: Put<R>) {
        let lane = &self.lanes[index];
        put.is_stored |= self.put_one(lane, &put).is_ok();
        self.pass(index, put);
    }

    /// Passes a put of a store to the next one, or ends it.
    fn pass(&self, index: usize, put: Put<R>) {
        let next = self.writer(index + 1);
        self.count_passed_over(index + 1..next.unwrap_or(self.lanes.len()), 1);
        match next {
            Some(next) => self.lanes[next].push(Job::Put(put)),
            None => {
                let Put { id, is_stored, .. } = put;
                let name = self.name(&put.key);
                drop(put.pages); // the leases
                self.send(Done::Put { id, name, is_stored });
            }
        }
    }

    /// Passes the puts and the questions of confirmations that wait for a store that hangs to the next one.
    pub fn give_up(&self) {
        let now = Instant::now();
        for (index, lane) in self.lanes.iter().enumerate() {
            for job in lane.give_up(now) {
                match job {
                    Job::Ask(ask) => self.ask(index + 1, ask),
                    Job::Put(put) => self.pass(index, put),
                    job => lane.push(job),
                }
            }
        }
    }

    /// Counts puts that do not go to these stores.
    pub fn count_passed_over(&self, stores: Range<usize>, puts: usize) {
        let lanes = self.lanes[stores].iter().filter(|lane| lane.options.writes);
        lanes.for_each(|lane| add(&lane.counters.passed_over, puts as u64));
    }

    /// Returns the first store from `index` on that is written, not stopped, and does not hang.
    pub fn writer(&self, index: usize) -> Option<usize> {
        let now = Instant::now();
        (index..self.lanes.len()).find(|&at| self.lanes[at].takes_puts(now))
    }

    /// Returns how often a space was forgotten.
    pub fn forgets(&self, space: Space) -> u64 {
        lock(&self.forgets).get(&space).copied().unwrap_or(0)
    }

    /// Puts all parts of a record into a store, that of rank 0 last. Of ranks with the same fingerprint, one puts.
    fn put_one(&self, lane: &Lane<R, W>, put: &Put<R>) -> Result<(), StoreError> {
        self.distinct.iter().rev().try_for_each(|&rank| self.put_part(lane, rank, put))
    }

    fn put_part(&self, lane: &Lane<R, W>, rank: usize, put: &Put<R>) -> Result<(), StoreError> {
        let record = self.record(&put.key, put.pages.len(), rank);
        let part = |page| (self.part)(page, rank);
        let name = record.name();
        let is_forgotten = || self.forgets(put.key.space) != put.forgets;
        if is_forgotten() {
            return Ok(());
        }
        if !put.is_forced && lane.call(Call::Other, |store| store.have(&[name]))? == [true] {
            add(&lane.counters.known, 1);
            return Ok(());
        }
        let pieces = &self.groups[put.key.group as usize];
        let gathered: Vec<_> = match pieces.is_whole() {
            true => Vec::new(),
            false => put.pages.iter().enumerate().map(|(at, page)| pieces.gather(at, part(page))).collect(),
        };
        let pages: Vec<&[u8]> = match pieces.is_whole() {
            true => put.pages.iter().map(part).collect(),
            false => gathered.iter().map(|page| &page[..]).collect(),
        };
        let head = record.write_head(&pages, self.secret.as_ref());
        match lane.call(Call::Put, |store| store.put(&name, &head, &pages)) {
            // It will never fit, so the engine shall not try it again.
            Err(StoreError::TooLarge { .. }) => return Ok(()),
            put => put?,
        }
        if is_forgotten() {
            // The removal may have visited the name before the put.
            return lane.call(Call::Other, |store| store.remove(&[name]));
        }
        add(&lane.counters.put, 1);
        add(&lane.counters.put_bytes, record.bytes());
        Ok(())
    }
}
