//! Continuous batching: many requests run at a time, and each step computes a few tokens of each.
//!
//! A step, in order:
//! 1. Admit: preempted requests first, then waiting ones, then new ones in the order of arrival, while pages are
//!    available and the step has tokens left for them. Each request is promised the pages of its known tokens. If a
//!    running request is computing the prefix of a prompt, the prompt waits for it as its leader, and later requests
//!    may overtake. When the leader is done or preempted, the scheduler tries the prompt again.
//! 2. Batch: one token of every decoding request, then chunks of prompts until the step's tokens are used up.
//! 3. Plan: if pages run out, the youngest running request is preempted, and the batch is built again.
//! 4. Commit and complete (there is no GPU to wait for), append the sampled tokens, finish requests that are done.
//!
//! Requests keep the order of their first admission: a preempted request is younger than all running ones, and returns
//! before any new one. The oldest request can always continue, because a request that does not fit the pool alone is
//! never admitted. A prompt waits only for running requests. So all requests end.

use kvarena::plan::Leader;
use kvarena::{EngineError, Error, Extend, Keep, SeqKey, TokenId};

use crate::host::{Host, NAMESPACE, ServeError, refused};
use crate::request::Request;

/// Limits of concurrency.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of running requests, at least 1.
    pub running: usize,
    /// Maximum number of tokens computed in a step, at least 1.
    pub step_tokens: u32,
    /// Whether prompts wait for a running request that computes their prefix.
    pub follow: bool,
}

/// Maximum number of requests that wait for leaders.
const FOLLOWERS_MAX: usize = 256;

/// Serves all requests.
pub fn serve(host: &mut Host<'_>, requests: &[Request], limits: Limits) -> Result<(), ServeError> {
    let mut scheduler = Scheduler::new(requests, limits);
    while scheduler.has_work() {
        scheduler.step(host)?;
    }
    Ok(())
}

/// A request in flight.
struct Running {
    seq: SeqKey,
    /// Index in the workload.
    request: usize,
    /// Number of sampled tokens.
    sampled: u32,
    /// Number of known tokens: the prompt, and the sampled and appended tokens.
    known: u32,
    /// Known tokens that have K and V, or will have them after the current step.
    planned: u32,
}

impl Running {
    fn left(&self) -> u32 {
        self.known - self.planned
    }

    fn decodes(&self) -> bool {
        self.sampled > 0 && self.left() == 1
    }
}

/// A request that waits for a leader to compute its prefix.
struct Follower {
    request: usize,
    leader: Leader,
    /// Tokens of the prompt that were cached when the request began to wait.
    cached_len: u32,
}

/// Result of an attempt to admit a request.
enum Attempt {
    Admitted {
        seq: SeqKey,
        hit: u32,
        /// The tokens of `hit` that were in swap memory.
        swap_hit: u32,
    },
    /// The request should wait for a leader; `cached_len` tokens are cached now.
    Follow { leader: Leader, cached_len: u32 },
    /// Pages are not available.
    Refused,
}

struct Scheduler<'a> {
    requests: &'a [Request],
    limits: Limits,
    /// Running requests, oldest first.
    running: Vec<Running>,
    /// Preempted requests, youngest first, so that the oldest is popped first. All are younger than the running ones.
    preempted: Vec<Running>,
    /// Waiting requests, in the order of arrival; they precede `next`.
    followers: Vec<Follower>,
    /// The next request that has never run.
    next: usize,
    /// The last prompt that was tried: that of request `prompt_of`.
    prompt: Vec<TokenId>,
    prompt_of: Option<usize>,
    /// Spare pages when the next request was rejected. The scheduler tries it again when there are more, or no request
    /// runs.
    refused_at: Option<i64>,
    batch: Vec<Extend>,
    /// Index in `running` of each item's request.
    batch_of: Vec<usize>,
    sampled: Vec<(SeqKey, TokenId)>,
    finished: Vec<SeqKey>,
}

impl<'a> Scheduler<'a> {
    fn new(requests: &'a [Request], limits: Limits) -> Self {
        Self {
            requests,
            limits,
            running: Vec::new(),
            preempted: Vec::new(),
            followers: Vec::new(),
            next: 0,
            prompt: Vec::new(),
            prompt_of: None,
            refused_at: None,
            batch: Vec::new(),
            batch_of: Vec::new(),
            sampled: Vec::new(),
            finished: Vec::new(),
        }
    }

    fn has_work(&self) -> bool {
        let waiting = self.preempted.len() + self.followers.len();
        !self.running.is_empty() || waiting > 0 || self.next < self.requests.len()
    }

    fn step(&mut self, host: &mut Host<'_>) -> Result<(), ServeError> {
        self.resume(host)?;
        self.admit_followers(host)?;
        self.admit(host)?;
        if self.running.is_empty() {
            // `admit` skipped all remaining requests.
            return Ok(());
        }
        let before = host.engine.stats();
        let step = self.plan(host)?;
        let planned = host.engine.stats();
        self.collect();
        let Host { engine, core, .. } = &mut *host;
        let (sampled, finished) = (&self.sampled, &self.finished);
        core.measure(|| {
            engine.commit(step)?;
            engine.complete(step)?;
            for &(seq, token) in sampled {
                engine.append(seq, &[token])?;
            }
            finished.iter().try_for_each(|&seq| engine.finish(seq))
        })
        .map_err(refused(self.running[0].request))?;
        host.work.computed_tokens = self.batch.iter().map(|item| u64::from(item.len)).sum();
        host.work.evicted_pages = planned.evicted_pages - before.evicted_pages;
        let running = self.running.len();
        let request = self.running[0].request;
        self.retire(host);
        host.save_ahead().map_err(|source| ServeError::Engine { request, source })?;
        host.end_step(planned, running);
        Ok(())
    }

    /// Returns the number of available pages, minus one page for each running request to decode into.
    fn spare_pages(&self, host: &Host<'_>) -> i64 {
        i64::from(host.engine.available()) - self.running.len() as i64
    }

    /// Returns whether one more request may run, and the step has a token left for it.
    fn has_room(&self) -> bool {
        let left: u64 = self.running.iter().map(|running| u64::from(running.left())).sum();
        self.running.len() < self.limits.running && left < u64::from(self.limits.step_tokens)
    }

    /// Resumes preempted requests, oldest first.
    fn resume(&mut self, host: &mut Host<'_>) -> Result<(), ServeError> {
        while self.has_room() {
            let Some(oldest) = self.preempted.last() else { break };
            let page_size = host.engine.shape().layout.page_size();
            // All its pages are wanted: idle cached pages of the request count as available until it is resumed.
            let wanted = i64::from(oldest.known.div_ceil(page_size));
            if wanted > self.spare_pages(host) && !self.running.is_empty() {
                return Ok(());
            }
            let (seq, request, known) = (oldest.seq, oldest.request, oldest.known);
            let Host { engine, core, .. } = &mut *host;
            let hit = core
                .measure(|| {
                    engine.resume(seq, known)?;
                    engine.cached_len(seq)
                })
                .map_err(refused(request))?;
            host.tally.resume_hit_tokens += u64::from(hit);
            host.work.admitted += 1;
            host.work.admitted_tokens += u64::from(oldest.known);
            let resumed = self.preempted.pop().map(|oldest| Running { planned: hit, ..oldest });
            self.running.extend(resumed);
        }
        Ok(())
    }

    /// Tries to admit the followers whose leader is done or preempted.
    fn admit_followers(&mut self, host: &mut Host<'_>) -> Result<(), ServeError> {
        let mut index = 0;
        while index < self.followers.len() && self.preempted.is_empty() && self.has_room() {
            let Follower { request, leader, cached_len } = self.followers[index];
            if host.core.measure(|| host.engine.is_leading(&leader)) {
                index += 1;
                continue;
            }
            match self.try_admit(host, request)? {
                Attempt::Admitted { seq, hit, swap_hit } => {
                    host.tally.followers += 1;
                    host.tally.awaited_tokens += u64::from(hit.saturating_sub(cached_len));
                    self.start(host, request, seq, [hit, swap_hit]);
                    self.followers.remove(index);
                }
                Attempt::Follow { leader, .. } => self.followers[index].leader = leader,
                Attempt::Refused => return Ok(()),
            }
        }
        Ok(())
    }

    /// Admits new requests in the order of arrival.
    fn admit(&mut self, host: &mut Host<'_>) -> Result<(), ServeError> {
        while self.preempted.is_empty() && self.has_room() && self.followers.len() < FOLLOWERS_MAX {
            let Some(request) = self.requests.get(self.next) else { break };
            if !host.fits(request) {
                host.skip();
                self.next += 1;
                continue;
            }
            let spare = self.spare_pages(host);
            if self.refused_at.is_some_and(|at| spare <= at) && !self.running.is_empty() {
                return Ok(());
            }
            let request = self.next;
            match self.try_admit(host, request)? {
                Attempt::Admitted { seq, hit, swap_hit } => {
                    self.start(host, request, seq, [hit, swap_hit]);
                }
                Attempt::Follow { leader, cached_len } => {
                    self.followers.push(Follower { request, leader, cached_len });
                }
                Attempt::Refused => {
                    self.refused_at = Some(spare);
                    return Ok(());
                }
            }
            self.next += 1;
            self.refused_at = None;
        }
        Ok(())
    }

    /// Adds an admitted request to the running ones. `hit` of its tokens were cached, `swap_hit` of these in swap
    /// memory.
    fn start(&mut self, host: &mut Host<'_>, request: usize, seq: SeqKey, [hit, swap_hit]: [u32; 2]) {
        let known = self.requests[request].input_len();
        host.started(&self.requests[request], hit, hit - swap_hit);
        self.running.push(Running { seq, request, sampled: 0, known, planned: hit });
    }

    /// Admits a request if its pages are available and, with `follow`, no running request computes its prefix.
    fn try_admit(&mut self, host: &mut Host<'_>, request: usize) -> Result<Attempt, ServeError> {
        if self.prompt_of != Some(request) {
            self.requests[request].write_prompt(&mut self.prompt);
            self.prompt_of = Some(request);
        }
        let (prompt, running, follow) = (&self.prompt, self.running.len(), self.limits.follow);
        let promise = prompt.len() as u32;
        // Without groups, each fetched page makes the hit longer.
        let fetched = host.fetch(&self.prompt).map_err(|source| ServeError::Engine { request, source })?;
        let page_size = host.engine.shape().layout.page_size();
        host.tally.store_hit_tokens += u64::from(fetched) * u64::from(page_size);
        let Host { engine, core, .. } = host;
        let result = core.measure(|| {
            let admission = engine.admission(NAMESPACE, prompt, promise)?;
            if let Some(leader) = admission.leader
                && follow
            {
                return Ok(Attempt::Follow { leader, cached_len: admission.cached_len });
            }
            // One page is left for each running request; a request alone may use all pages.
            let room = admission.available_pages as usize;
            if running > 0 && admission.lacking_pages as usize + running > room {
                return Ok(Attempt::Refused);
            }
            let seq = engine.admit(NAMESPACE, prompt, promise)?;
            let swap_hit = admission.swap_pages * engine.shape().layout.page_size();
            Ok(Attempt::Admitted { seq, hit: engine.cached_len(seq)?, swap_hit })
        });
        result.map_err(refused(request))
    }

    /// Plans the step, and preempts the youngest request until the pages suffice.
    fn plan(&mut self, host: &mut Host<'_>) -> Result<kvarena::StepId, ServeError> {
        loop {
            self.fill_batch();
            let (batch, oldest) = (&self.batch, self.running[0].request);
            let Host { engine, scratch, core, tally, .. } = &mut *host;
            match core.measure(|| engine.plan_batch(scratch, batch)) {
                Ok(plan) => {
                    let step = plan.step();
                    tally.count_decode(&plan);
                    for (item, &i) in self.batch.iter().zip(&self.batch_of) {
                        self.running[i].planned += item.len;
                    }
                    return Ok(step);
                }
                Err(EngineError::Core(Error::OutOfPages { .. })) if self.running.len() > 1 => {
                    self.preempt_youngest(host)?;
                }
                Err(source) => return Err(ServeError::Engine { request: oldest, source }),
            }
        }
    }

    fn preempt_youngest(&mut self, host: &mut Host<'_>) -> Result<(), ServeError> {
        let Some(youngest) = self.running.pop() else { return Ok(()) };
        let Host { engine, core, .. } = &mut *host;
        core.measure(|| engine.preempt(youngest.seq, Keep::Publish)).map_err(refused(youngest.request))?;
        host.tally.preemptions += 1;
        host.work.preempted += 1;
        self.preempted.push(Running { planned: 0, ..youngest });
        Ok(())
    }

    /// Fills the batch: one token of each decoding request, then chunks of prompts, oldest first.
    fn fill_batch(&mut self) {
        self.batch.clear();
        self.batch_of.clear();
        let mut budget = self.limits.step_tokens;
        for decoding in [true, false] {
            for (i, running) in self.running.iter().enumerate() {
                let len = running.left().min(budget);
                if running.decodes() == decoding && len > 0 {
                    self.batch.push(Extend { seq: running.seq, len });
                    self.batch_of.push(i);
                    budget -= len;
                }
            }
        }
    }

    /// Determines the requests that sample a token in this step, and those that are done.
    fn collect(&mut self) {
        self.sampled.clear();
        self.finished.clear();
        for &i in &self.batch_of {
            let running = &mut self.running[i];
            if running.left() > 0 {
                continue;
            }
            let request = &self.requests[running.request];
            running.sampled += 1;
            if running.sampled == request.output.len {
                self.finished.push(running.seq);
            } else {
                running.known += 1;
                self.sampled.push((running.seq, request.output_token(running.sampled - 1)));
            }
        }
    }

    fn retire(&mut self, host: &mut Host<'_>) {
        let requests = self.requests;
        self.running.retain(|running| {
            let done = running.sampled == requests[running.request].output.len;
            if done {
                host.served(&requests[running.request]);
            }
            !done
        });
    }
}
