//! [`Tier`]: the stores of an engine. It finds prompts in stores, fetches their records, and puts new records.
//!
//! ```text
//! find    --> lookup --[chain, have: threads of the stores]--> fetch --[get]--> fetched --> report
//! turn    --> puts --[have, put]--> put_done
//! confirm --[have]--> restate_puts --> turn: the last put_done --> report
//! ```
//!
//! The host calls [`Tier::find`] before it admits a prompt, and [`Tier::turn`] once in each step. Both only read and
//! write queues; threads of the stores compute hashes and checks and move bytes.
//!
//! Records lie in the [space](crate::name::Space) of their namespace's names. [`Tier::forget`] removes a namespace from
//! all stores.
//!
//! Over several ranks, each rank's part of a record is a record under its own fingerprint: see [`RankMemory`].
//!
//! A record that a reader does not accept is a miss: the host computes its tokens. A deadline ends the wait of a
//! request, but the fetch keeps its pages until the store has returned all of them.

mod alarm;
mod breaker;
mod confirm;
mod fetch;
mod jobs;
mod lane;
mod options;
mod pieces;
mod ranks;
mod repeat;
mod rounds;
mod work;

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvarena::backend::SwapMemory;
use kvarena::hash::NamespaceNames;
use kvarena::id::{Namespace, StepId, TokenId};
use kvarena::moves::Put;
use kvarena::{Engine, EngineError};

use alarm::{Alarm, after};
use confirm::Confirms;
use fetch::{Fetching, Request};
pub use jobs::Forgotten;
use jobs::{Ask, Done, Job, Key};
use lane::Lane;
pub use options::{LoadRule, StoreOptions, StoreStats, TierOptions};
use pieces::Pieces;
pub use ranks::RankMemory;
use repeat::Repeat;
use work::Shared;

use crate::lock::lock;
use crate::miss::{Miss, Misses};
use crate::name::{Name, Space};

/// Time between two looks at copies that are not complete.
const PAUSE: Duration = Duration::from_millis(2);
/// Number of looks without a put, after which only another step can bring one.
const LOOKS_MAX: u32 = 4;
/// The same in [`Tier::flush`].
const FLUSH_LOOKS: u32 = 20;

/// The result of [`Tier::find`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Find {
    /// No store can have more of the prompt than the engine: the host admits it.
    Ready,
    /// [`Tier::turn`] reports when the host can admit the prompt.
    Waiting,
}

/// Waits of requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct WaitStats {
    /// Number of requests that waited.
    pub waited: u64,
    /// Of these, requests that reached their deadline.
    pub late: u64,
    /// Time of all waits.
    pub time: Duration,
    /// Pages of group 0 that fetches brought.
    pub pages: u64,
    /// Number of prompts of which [`Tier::confirm`] found records.
    pub confirmed: u64,
    /// Of these, prompts that the stores do not have whole: a store failed, was full, or took too long.
    pub unconfirmed: u64,
    /// Number of comparisons of such prompts with the cache: about one for each, after its last put.
    pub compared: u64,
}

/// The stores of an engine.
pub struct Tier<B: SwapMemory> {
    shared: Arc<Shared<B::Read, B::Write>>,
    options: TierOptions,
    received: Receiver<Done>,
    alarm: Alarm,
    requests: HashMap<u64, Request>,
    confirms: Confirms,
    fetches: HashMap<u64, Fetching>,
    /// Names of the records of open fetches.
    loading: HashMap<Name, u64>,
    /// Names that count as absent, and until when.
    negative: HashMap<Name, Instant>,
    /// Spaces that were forgotten and not searched since. Nothing is put there.
    forgotten: HashSet<Space>,
    open_puts: usize,
    /// Number of looks for puts in a row that found none, open or new.
    fruitless: u32,
    /// The end of a stop of all stores, at which the alarm wakes the host.
    retry: Option<Instant>,
    /// When the alarm wakes the host to look for stores that hang.
    watch: Option<Instant>,
    /// The newest step of the last turn, and the number of later looks for puts that found none.
    step: StepId,
    looks: u32,
    next: u64,
    waits: WaitStats,
}

impl<B> Tier<B>
where
    B: RankMemory,
{
    /// Creates the stores' threads for an engine.
    ///
    /// # Errors
    /// With `InvalidInput` if the engine hashes no pages, or by hashes of less than 32 bytes: collisions of shorter
    /// ones can be made. Also if the options lack one fingerprint for each rank. If a thread cannot be started.
    pub fn new(options: TierOptions, engine: &Engine<B>) -> io::Result<Self> {
        let shape = engine.shape();
        if shape.hashing.is_none_or(|hashing| hashing.width() < 32) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "stores need page hashes of 32 bytes"));
        }
        if options.fingerprints.len() != engine.backend().ranks() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "stores need a fingerprint for each rank"));
        }
        let (results, received) = channel();
        let groups: Vec<_> =
            (0..shape.layout.groups().count()).map(|group| Pieces::new(&shape.layout, group)).collect();
        let pages = |group: usize| if group == 0 { shape.record_pages as usize } else { groups[group].pages() };
        let largest = (0..groups.len()).map(|group| groups[group].page_bytes * pages(group)).max().unwrap_or(0);
        let of = &options.fingerprints;
        let distinct: Vec<_> = (0..of.len()).filter(|&rank| !of[..rank].contains(&of[rank])).collect();
        let largest_put = (largest * distinct.len()) as u64;
        let lane = |store: &StoreOptions| Lane::new(store.clone(), &options, largest_put);
        let shared = Arc::new(Shared {
            lanes: options.stores.iter().map(lane).collect(),
            fingerprints: options.fingerprints.clone(),
            distinct,
            part: B::part,
            part_mut: B::part_mut,
            secret: options.secret.clone(),
            page_size: shape.layout.page_size(),
            record_pages: shape.record_pages,
            groups,
            largest_put,
            has_cells: shape.layout.groups().limited().next().is_some() || shape.layout.state_pages() > 0,
            misses: Misses::default(),
            forgets: Mutex::default(),
            results,
            sent: AtomicU64::new(0),
            wake: Arc::clone(&options.wake),
        });
        let alarm = Alarm::new(Arc::clone(&options.wake))?;
        let tier = Self {
            shared,
            options,
            received,
            alarm,
            requests: HashMap::new(),
            confirms: Confirms::default(),
            fetches: HashMap::new(),
            loading: HashMap::new(),
            negative: HashMap::new(),
            forgotten: HashSet::new(),
            open_puts: 0,
            fruitless: 0,
            retry: None,
            watch: None,
            step: engine.newest_step(),
            looks: 0,
            next: 0,
            waits: WaitStats::default(),
        };
        for (index, store) in tier.options.stores.iter().enumerate() {
            for _ in 0..store.threads {
                let shared = Arc::clone(&tier.shared);
                let name = format!("kvarena-{}", store.name);
                std::thread::Builder::new().name(name).spawn(move || shared.serve(index))?;
            }
        }
        Ok(tier)
    }

    /// Searches the stores for the part of a prompt that the engine lacks. `id` identifies the request for
    /// [`Tier::turn`]. O(prompt).
    pub fn find(&mut self, id: u64, engine: &Engine<B>, namespace: Namespace, prompt: &[TokenId]) -> Find {
        let Ok(Some(lookup)) = engine.lookup(namespace, prompt) else { return Find::Ready };
        if !self.forgotten.is_empty() {
            self.forgotten.remove(&self.shared.space(lookup.names()));
        }
        let now = Instant::now();
        let wanted = lookup.wanted();
        if wanted.is_empty() || self.shared.lanes.iter().all(|lane| lane.is_out(now)) {
            return Find::Ready;
        }
        let bytes = |&(group, _): &(u32, u32)| self.record_bytes(group);
        let pages = (prompt.len() as u32 - 1) / self.shared.page_size - lookup.hit();
        let most = (u64::from(pages * self.shared.page_size), wanted.iter().map(bytes).sum());
        let (serial, prompt) = (self.next, Arc::<[TokenId]>::from(prompt));
        self.next += 1;
        let space = self.shared.space(lookup.names());
        let ask = Box::new(Ask::new(serial, space, lookup, Arc::clone(&prompt), most, wanted));
        let deadline = after(now, self.options.deadline.max(self.options.patience));
        let repeat = Repeat::new(now, self.options.patience);
        let (ask_of, fetch, pages) = (None, None, 0);
        let request = Request { id, namespace, prompt, begin: now, deadline, ask: ask_of, fetch, pages, most, repeat };
        self.requests.insert(serial, request);
        self.alarm.set(deadline);
        self.shared.ask(0, ask);
        Find::Waiting
    }

    /// Ends the waits of a request that the host has cancelled. Its fetch and its puts continue.
    pub fn cancel(&mut self, id: u64) {
        self.requests.retain(|_, request| request.id != id);
        self.confirms.cancel(id);
    }

    /// Removes all records of a namespace from all stores. Returns the stores' answers; the caller need not wait for
    /// them. Puts that are open leave no record: their stores remove it, if they have put it already.
    ///
    /// Until the next [`Tier::find`] in the namespace, nothing is put there. Pages that the engine passes meanwhile
    /// count as stored. Later they are put only if they are computed again, or if [`Tier::confirm`] finds after that
    /// find that the stores lack them. Other servers may put records that they have cached.
    pub fn forget(&mut self, names: &NamespaceNames) -> Receiver<Forgotten> {
        let space = self.shared.space(names);
        self.forgotten.insert(space);
        *lock(&self.shared.forgets).entry(space).or_default() += 1;
        let (answer, answers) = channel();
        for lane in &self.shared.lanes {
            lane.push(Job::Forget { space, answer: answer.clone() });
        }
        answers
    }

    /// Ends fetches and puts, begins others, and calls `report` with the id of each request that does not wait any
    /// more, and the number of pages by which its hit has grown (0 for [`Tier::confirm`]). The host calls it once in
    /// each step.
    ///
    /// # Errors
    /// [`EngineError::Backend`] if a copy for a put failed. A later call tries it again.
    pub fn turn(
        &mut self,
        engine: &mut Engine<B>,
        mut report: impl FnMut(u64, u32),
    ) -> Result<(), EngineError<B::Error>> {
        let mut ready = Vec::new();
        while let Ok(done) = self.received.try_recv() {
            self.take(engine, done, &mut ready);
        }
        self.repeat(engine, &mut ready);
        self.end_waits(&mut ready, &mut report);
        let now = Instant::now();
        for (&serial, request) in self.requests.iter().filter(|(_, request)| now >= request.deadline) {
            self.shared.misses.add(Miss::Late);
            self.waits.late += 1;
            ready.push((serial, request.pages));
            if let Some(fetch) = request.fetch.and_then(|(fetch, _)| self.fetches.get_mut(&fetch)) {
                fetch.is_late = true;
            }
        }
        self.end_waits(&mut ready, &mut report);
        let mut confirmed = Vec::new();
        self.end_confirms(engine, &mut confirmed);
        confirmed.into_iter().for_each(|id| report(id, 0));
        self.begin_puts(engine).map(drop)
    }

    /// Reports the requests that do not wait any more, and the pages by which their hits have grown.
    fn end_waits(&mut self, ready: &mut Vec<(u64, u32)>, report: &mut impl FnMut(u64, u32)) {
        for (serial, pages) in ready.drain(..) {
            if let Some(request) = self.requests.remove(&serial) {
                self.waits.waited += 1;
                self.waits.time += request.begin.elapsed();
                report(request.id, pages);
            }
        }
    }

    /// Puts all records that no store has, without a limit of the rate, for at most `limit`. The host calls it before
    /// it ends. Returns whether nothing is left.
    ///
    /// # Errors
    /// As [`Tier::turn`].
    pub fn flush(&mut self, engine: &mut Engine<B>, limit: Duration) -> Result<bool, EngineError<B::Error>> {
        let end = after(Instant::now(), limit);
        self.shared.lanes.iter().for_each(Lane::hurry);
        let mut looks = 0;
        while Instant::now() < end {
            self.turn(engine, |_, _| ())?;
            looks = if self.open_puts > 0 || !self.fetches.is_empty() { 0 } else { looks + 1 };
            if looks >= FLUSH_LOOKS {
                return Ok(self.shared.writer(0).is_some());
            }
            if let Ok(done) = self.received.recv_timeout(PAUSE) {
                let mut ready = Vec::new();
                self.take(engine, done, &mut ready);
                ready.iter().for_each(|(serial, _)| drop(self.requests.remove(serial)));
            }
        }
        Ok(false)
    }

    /// Returns whether [`Tier::turn`] has results to take. The host also calls it after `wake`.
    pub fn has_results(&self) -> bool {
        self.shared.sent.load(Ordering::Acquire) > 0
    }

    /// Returns whether nothing is open, and only another step or a store that is tried again brings work.
    pub fn is_idle(&self) -> bool {
        let writes = self.shared.lanes.iter().any(|lane| lane.options.writes);
        self.open() == (0, 0, 0) && self.confirms.is_empty() && (self.looks >= LOOKS_MAX || !writes)
    }

    /// Returns the number of requests, fetches and puts that are open.
    pub fn open(&self) -> (usize, usize, usize) {
        (self.requests.len(), self.fetches.len(), self.open_puts)
    }

    /// Returns the counters of each store, in order.
    pub fn stats(&self) -> Vec<StoreStats> {
        let now = Instant::now();
        let lanes = self.shared.lanes.iter();
        let of = |lane: &Lane<_, _>| lane.counters.stats(&lane.options.name, lane.queue(), lane.stopped(now).is_some());
        lanes.map(of).collect()
    }

    /// Returns the misses by reason.
    pub fn misses(&self) -> &Misses {
        &self.shared.misses
    }

    /// Returns the waits of requests.
    pub fn waits(&self) -> WaitStats {
        self.waits
    }

    fn record_bytes(&self, group: u32) -> u64 {
        let pages =
            if group == 0 { self.shared.record_pages as usize } else { self.shared.groups[group as usize].pages() };
        self.shared.bytes(group, pages, self.shared.fingerprints.len())
    }

    /// Takes the end of a job that was received.
    fn take(&mut self, engine: &mut Engine<B>, done: Done, ready: &mut Vec<(u64, u32)>) {
        self.shared.sent.fetch_sub(1, Ordering::Relaxed);
        match done {
            Done::Asked(ask) => {
                let serial = ask.find;
                if let Some(request) = self.requests.get_mut(&serial) {
                    request.ask = Some(ask);
                    self.advance(engine, serial, ready);
                } else {
                    self.restate(engine, &ask);
                }
            }
            Done::Got { fetch, index, name, got } => {
                if got.is_err() {
                    self.negative.insert(name, after(Instant::now(), self.options.negative));
                }
                let Some(fetching) = self.fetches.get_mut(&fetch) else { return };
                fetching.results[index] = Some(got.is_ok());
                fetching.open -= 1;
                if fetching.open == 0 {
                    self.end_fetch(engine, fetch, ready);
                }
            }
            Done::Put { id, name, is_stored } => {
                self.open_puts -= 1;
                engine.put_done(id, is_stored);
                if is_stored {
                    self.confirms.put(name.key);
                    self.negative.remove(&name);
                } else {
                    self.looks = 0;
                }
            }
        }
    }

    /// Passes records to the stores. Returns their number.
    fn begin_puts(&mut self, engine: &mut Engine<B>) -> Result<usize, EngineError<B::Error>> {
        if self.open_puts > 0 || !self.confirms.is_empty() {
            self.shared.give_up();
            self.watch();
        }
        let Some(store) = self.shared.writer(0) else {
            let now = Instant::now();
            let end = self.shared.lanes.iter().filter_map(|lane| lane.stopped(now)).min();
            if end != self.retry {
                end.into_iter().for_each(|end| self.alarm.set(end));
                self.retry = end;
            }
            return Ok(0);
        };
        let room = self.options.puts_max.saturating_sub(self.open_puts);
        if room == 0 {
            return Ok(0);
        }
        self.look(engine.newest_step());
        let mut puts = Vec::new();
        engine.puts(room, |put| puts.push((put.id, key_of(&put, self.shared.space(put.names)), put.pages.to_vec())))?;
        self.fruitless = if puts.is_empty() && self.open_puts == 0 { self.fruitless + 1 } else { 0 };
        let (count, mut begun) = (puts.len(), Vec::new());
        if count == 0 {
            return Ok(0);
        }
        let all: Vec<_> = puts.iter().flat_map(|(_, _, pages)| pages).copied().collect();
        let mut leases = engine.backend_mut().lease_all(&all).into_iter();
        for (id, key, pages) in puts {
            let pages: Vec<_> = leases.by_ref().take(pages.len()).collect();
            if self.forgotten.contains(&key.space) {
                drop(pages);
                // The engine shall not pass the record again.
                engine.put_done(id, true);
                self.confirms.put(key.key.to_digest());
                continue;
            }
            let is_forced = self.negative.contains_key(&self.shared.name(&key));
            let forgets = self.shared.forgets(key.space);
            begun.push(Job::Put(jobs::Put { id, key, pages, is_forced, is_stored: false, forgets }));
            self.open_puts += 1;
        }
        self.shared.count_passed_over(0..store, begun.len());
        self.shared.lanes[store].push_all(begun);
        self.looks = 0;
        Ok(count)
    }

    /// Sets the alarm for the time at which a store hangs, if it makes no progress until then.
    fn watch(&mut self) {
        let now = Instant::now();
        if self.watch.is_none_or(|at| at <= now) {
            let times = self.shared.lanes.iter().filter_map(Lane::hangs_at).filter(|at| *at > now);
            let at = times.min().unwrap_or_else(|| after(now, self.options.put_deadline));
            self.watch = Some(at);
            self.alarm.set(at);
        }
    }

    /// Sets the alarm for another look: a put appears after its copy, and a refused one after a look without puts. A
    /// prompt that waits for its puts does not wait for another step.
    fn look(&mut self, newest: StepId) {
        if newest != self.step || !self.confirms.is_empty() {
            (self.step, self.looks) = (newest, 0);
        }
        if self.looks < LOOKS_MAX {
            self.looks += 1;
            self.alarm.set(Instant::now() + PAUSE);
        }
    }
}

fn key_of(put: &Put, space: Space) -> Key {
    Key {
        space,
        group: put.group,
        first: put.first,
        parent: put.parent.map(|parent| parent.to_digest()),
        key: put.key,
        tokens: put.tokens.into(),
        range: 0..put.tokens.len(),
    }
}

impl<B: SwapMemory> Drop for Tier<B> {
    fn drop(&mut self) {
        // The threads end after their present call, which a store may delay.
        self.shared.lanes.iter().for_each(Lane::close);
    }
}
