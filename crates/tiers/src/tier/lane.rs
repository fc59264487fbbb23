//! A store with its queue of jobs, its breakers and its write rate.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::alarm::after;
use super::breaker::{Breaker, Rate};
use super::jobs::{Job, Put};
use super::options::{Counters, StoreOptions, TierOptions, add};
use crate::lock::lock;
use crate::store::{Store, StoreError};

/// A call of a store.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Call {
    /// A question for which requests wait.
    Ask,
    /// Another call that does not add a record.
    Other,
    Put,
}

/// A store with its queue.
pub(super) struct Lane<R, W> {
    pub options: StoreOptions,
    pub counters: Counters,
    /// Time for which requests wait for an answer.
    patience: Duration,
    /// Time for which puts wait for a store that makes no progress.
    put_patience: Duration,
    state: Mutex<State<R, W>>,
    changed: Condvar,
}

struct State<R, W> {
    /// Reads go first.
    reads: VecDeque<Job<R, W>>,
    puts: VecDeque<Put<R>>,
    is_closed: bool,
    /// Number of calls that run, and when the last call has begun or ended.
    running: usize,
    progress: Instant,
    rate: Rate,
    breaker: Breaker,
    /// Stops questions, if the answers come too late.
    ask_breaker: Breaker,
    /// Stops puts, if the store is full.
    put_breaker: Breaker,
}

impl<R, W> Lane<R, W> {
    pub fn new(options: StoreOptions, of_tier: &TierOptions, largest_put: u64) -> Self {
        let put_patience = of_tier.put_deadline.saturating_add(2 * options.put_time(largest_put as f64));
        let state = State {
            reads: VecDeque::new(),
            puts: VecDeque::new(),
            is_closed: false,
            running: 0,
            progress: Instant::now(),
            rate: Rate::new(options.write_rate),
            breaker: Breaker::default(),
            ask_breaker: Breaker::default(),
            put_breaker: Breaker::default(),
        };
        let (counters, state, changed) = (Counters::default(), Mutex::new(state), Condvar::new());
        Self { options, counters, patience: of_tier.deadline, put_patience, state, changed }
    }

    pub fn close(&self) {
        lock(&self.state).is_closed = true;
        self.changed.notify_all();
    }

    pub fn queue(&self) -> usize {
        let state = lock(&self.state);
        state.reads.len() + state.puts.len()
    }

    pub fn push(&self, job: Job<R, W>) {
        self.push_all([job]);
    }

    /// Wakes threads once for all jobs: a wake costs more than a job.
    pub fn push_all(&self, jobs: impl IntoIterator<Item = Job<R, W>>) {
        let (mut state, mut count) = (lock(&self.state), 0);
        for job in jobs {
            count += 1;
            match job {
                Job::Put(put) => state.puts.push_back(put),
                job => state.reads.push_back(job),
            }
        }
        drop(state); // a woken thread would wait for it
        match count {
            0 => {}
            1 => self.changed.notify_one(),
            _ => self.changed.notify_all(),
        }
    }

    /// Removes the limit of the write rate.
    pub fn hurry(&self) {
        lock(&self.state).rate = Rate::new(None);
        self.changed.notify_all();
    }

    /// Returns the end of a stop of puts.
    pub fn stopped(&self, now: Instant) -> Option<Instant> {
        let state = lock(&self.state);
        state.breaker.stopped(now).or_else(|| state.put_breaker.stopped(now))
    }

    /// Returns whether a request would wait for this store in vain: questions are stopped, or all threads are in calls
    /// that take longer than requests wait.
    pub fn is_out(&self, now: Instant) -> bool {
        let state = lock(&self.state);
        let is_stopped = state.breaker.stopped(now).or(state.ask_breaker.stopped(now)).is_some();
        is_stopped || self.hangs(&state, now, self.patience)
    }

    /// Returns whether all threads are in calls, of which none has begun or ended for `time`.
    fn hangs(&self, state: &State<R, W>, now: Instant, time: Duration) -> bool {
        state.running >= self.options.threads && now.saturating_duration_since(state.progress) >= time
    }

    /// Returns when the store hangs, if all threads are in calls and no call begins or ends before.
    pub fn hangs_at(&self) -> Option<Instant> {
        let state = lock(&self.state);
        (state.running >= self.options.threads).then(|| after(state.progress, self.put_patience))
    }

    /// Returns whether the store serves confirmations: it is not stopped and does not hang.
    pub fn confirms(&self, now: Instant) -> bool {
        self.stopped(now).is_none() && !self.hangs(&lock(&self.state), now, self.put_patience)
    }

    /// Returns whether records can be put.
    pub fn takes_puts(&self, now: Instant) -> bool {
        self.options.writes && self.confirms(now)
    }

    /// Returns the puts and the questions of confirmations that wait, if the store hangs: its calls keep their pages,
    /// but not those of other stores.
    pub fn give_up(&self, now: Instant) -> VecDeque<Job<R, W>> {
        let mut state = lock(&self.state);
        if !self.hangs(&state, now, self.put_patience) {
            return VecDeque::new();
        }
        let is_given_up = |job: &Job<R, W>| matches!(job, Job::Ask(ask) if ask.is_exact);
        let (mut jobs, reads): (VecDeque<_>, _) = std::mem::take(&mut state.reads).into_iter().partition(is_given_up);
        state.reads = reads;
        add(&self.counters.passed_over, state.puts.len() as u64);
        jobs.extend(state.puts.drain(..).map(Job::Put));
        jobs
    }

    /// Returns whether a request for these tokens and bytes would gain by an answer of this store.
    pub fn has_use(&self, (tokens, bytes): (u64, u64), now: Instant) -> bool {
        self.options.rule.is_worth(tokens, bytes) && !self.is_out(now)
    }

    /// Waits for the next job. `bytes` returns those of a put.
    pub fn next(&self, bytes: impl Fn(&Put<R>) -> u64) -> Option<Job<R, W>> {
        let mut state = lock(&self.state);
        while !state.is_closed {
            if let Some(job) = state.reads.pop_front() {
                return Some(job);
            }
            let mut pause = Duration::from_secs(3600);
            if let Some(put) = state.puts.front().map(&bytes) {
                match state.rate.take(put, Instant::now()) {
                    Ok(()) => return state.puts.pop_front().map(Job::Put),
                    Err(time) => pause = time,
                }
            }
            state = self.changed.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner).0;
        }
        None
    }

    /// Makes a call, unless the breaker stops it, and counts its failure.
    pub fn call<T>(&self, kind: Call, call: impl FnOnce(&dyn Store) -> Result<T, StoreError>) -> Result<T, StoreError> {
        let begin = Instant::now();
        let mut state = lock(&self.state);
        let is_allowed = state.breaker.allows(begin)
            && match kind {
                Call::Ask => state.ask_breaker.allows(begin),
                Call::Other => true,
                Call::Put => state.put_breaker.allows(begin),
            };
        if !is_allowed {
            return Err(StoreError::Gone { text: "stopped after failures".to_owned() });
        }
        (state.running, state.progress) = (state.running + 1, begin);
        drop(state);
        let called = call(&*self.options.store);
        let (mut state, now) = (lock(&self.state), Instant::now());
        (state.running, state.progress) = (state.running - 1, now);
        match &called {
            Ok(_) => {
                state.breaker.succeeded();
                match kind {
                    Call::Ask if now - begin > self.patience => state.ask_breaker.failed(now, false),
                    Call::Ask => state.ask_breaker.succeeded(),
                    Call::Other => {}
                    Call::Put => state.put_breaker.succeeded(),
                }
            }
            // The store works, but takes nothing.
            Err(StoreError::Full | StoreError::ReadOnly) => state.put_breaker.failed(now, true),
            Err(StoreError::TooLarge { .. }) => {}
            Err(_) => state.breaker.failed(now, false),
        }
        called.inspect_err(|_| add(&self.counters.failed, 1))
    }
}
