//! The serving loop: continuous batching of many streams over one engine.
//!
//! ```text
//! admit    waiting and preempted streams, while rows and pages allow
//! plan     one new token of every stream that generates, and a chunk of the prompts that are not computed yet
//! execute  the model, attention through the engine's backend
//! accept   commit and complete the step, choose tokens, fork samples, finish what has ended
//! ```
//!
//! With overlap, step n + 1 is planned before step n is executed; tokens still unknown are filled in when it is n + 1's
//! turn. A step that fails is aborted, with the one planned after it, and planned again: streams change only in
//! `accept`. When pages run out, the youngest stream is preempted.
//!
//! Not here: the model (`model.rs`), where rows go (`memory.rs`), what is printed (`output.rs`).

use std::collections::VecDeque;
use std::time::Instant;

use kvarena::{
    Attend, Engine, EngineError, EngineShape, Extend, Keep, OwnedPlan, StepId, StepScratch, TokenId,
};

use crate::clock::{Clock, Part};
use crate::error::{Error, Result};
use crate::memory::{BackendError, Memory, Paged, StepError};
use crate::model::{Model, Pass, Workspace};
use crate::request::Request;
use crate::sample::Sampler;
use crate::stream::{Finish, Stream};
use crate::tally::Tally;

/// New tokens where a request does not say how many.
const USUAL_NEW_TOKENS: u32 = 128;
/// Failures in a row after which a run gives up.
const FAILURES_MAX: u32 = 4;

/// How to batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Policy {
    /// Most prompt tokens computed in one step, over all prompts.
    pub chunk: u32,
    /// Most streams at a time.
    pub concurrency: u32,
    /// Plan a step before the last one's tokens are known.
    pub overlap: bool,
    /// Let every so manieth step fail, to see it retried.
    pub fail_every: Option<u64>,
}

/// Who hears of tokens.
pub trait Sink {
    /// A stream said its newest token, chosen from these logits.
    fn token(&mut self, _stream: &Stream, _logits: &[f32]) {}

    /// A stream ended; whether it was the last of its request.
    fn done(&mut self, _stream: &Stream, _last: bool) {}

    /// Whether the stream's client has gone away; asked before every step.
    fn cancelled(&mut self, _stream: &Stream) -> bool {
        false
    }
}

/// A planned step.
#[derive(Default)]
struct Flight {
    plan: OwnedPlan,
    step: StepId,
    /// The stream of each of the plan's rows.
    streams: Vec<usize>,
    /// Rows whose last row's logits choose a token.
    sampled: Vec<usize>,
}

/// A model, an engine and the streams between them.
pub struct Server<'m, M: Memory> {
    engine: Engine<M::Backend>,
    memory: M,
    model: &'m Model,
    policy: Policy,
    requests: Vec<Request>,
    /// For each request, its streams that have not ended.
    open: Vec<u32>,
    streams: Vec<Stream>,
    /// Streams without a sequence, first come first served.
    waiting: VecDeque<usize>,
    /// Streams that take part in steps, oldest first.
    running: Vec<usize>,
    /// Streams whose sequence is preempted, oldest first.
    preempted: VecDeque<usize>,
    ages: u64,
    /// The last step planned, by a batch or a fork.
    last_step: StepId,
    work: Workspace,
    scratch: StepScratch,
    extends: Vec<Extend>,
    tokens: Vec<u32>,
    wanted: Vec<usize>,
    clock: Clock,
    tally: Tally,
}

impl<'m, M: Memory> Server<'m, M> {
    /// A server without requests.
    pub fn new(model: &'m Model, engine: Engine<M::Backend>, memory: M, policy: Policy) -> Self {
        Self {
            engine,
            memory,
            model,
            policy,
            requests: Vec::new(),
            open: Vec::new(),
            streams: Vec::new(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            preempted: VecDeque::new(),
            ages: 0,
            last_step: StepId::default(),
            work: Workspace::default(),
            scratch: StepScratch::new(),
            extends: Vec::new(),
            tokens: Vec::new(),
            wanted: Vec::new(),
            clock: Clock::default(),
            tally: Tally::default(),
        }
    }

    /// The engine.
    pub fn engine(&self) -> &Engine<M::Backend> {
        &self.engine
    }

    /// All streams so far.
    pub fn streams(&self) -> &[Stream] {
        &self.streams
    }

    /// What was done so far, and where the time went.
    pub fn tally(&self) -> (&Tally, &Clock) {
        (&self.tally, &self.clock)
    }

    /// Takes a request; its number is the count of requests before it.
    ///
    /// # Errors
    /// It can never be served: an empty prompt, a token that the model does not have, more tokens than the model has
    /// positions or the pool has slots.
    pub fn submit(&mut self, request: Request) -> Result<usize> {
        let number = self.requests.len();
        let request = self
            .check(request)
            .map_err(|what| Error::request(format!("request {number}: {what}")))?;
        let now = Instant::now();
        let stream = Stream::new(number, 0, Sampler::new(request.sampling, 0), now);
        self.tally.prompt_tokens += request.prompt.len() as u64;
        self.waiting.push_back(self.streams.len());
        self.streams.push(stream);
        self.requests.push(request);
        self.open.push(1);
        Ok(number)
    }

    fn check(&self, mut request: Request) -> std::result::Result<Request, String> {
        let (vocab, positions) = (self.model.config.vocab, self.model.config.max_len);
        if request.prompt.is_empty() {
            return Err("the prompt has no tokens".into());
        }
        let foreign = request.prompt.iter().find(|token| token.index() >= vocab);
        if let Some(token) = foreign {
            let token = token.raw();
            return Err(format!("token {token} is past the model's vocabulary of {vocab} tokens"));
        }
        if request.samples == 0 {
            return Err("n is 0 but must be at least 1".into());
        }
        let sampling = request.sampling;
        if !(sampling.temperature >= 0.0 && sampling.temperature.is_finite()) {
            return Err(format!("temperature {} is not 0 or more", sampling.temperature));
        }
        if !(sampling.top_p > 0.0 && sampling.top_p <= 1.0) {
            return Err(format!("top_p {} is not above 0 and at most 1", sampling.top_p));
        }
        let shape = self.engine.shape();
        let pool = shape.max_sequence_len as usize;
        let prompt = request.prompt.len();
        // The last new token is never fed back, so it needs no K and V.
        let room = (positions.min(pool) + 1).saturating_sub(prompt);
        let wanted = request.max_new_tokens.map_or(1, |n| n.max(1)) as usize;
        if wanted > room {
            let limit = if pool < positions { pool_limit(shape) } else { model_limit(positions) };
            return Err(format!(
                "a prompt of {prompt} tokens and {wanted} new ones need K and V of {} tokens, but {limit}",
                prompt + wanted - 1
            ));
        }
        request.max_new_tokens.get_or_insert(USUAL_NEW_TOKENS.min(room as u32));
        Ok(request)
    }

    /// Serves until every stream has ended.
    ///
    /// # Errors
    /// Steps keep failing, or the engine refuses what should work.
    pub fn run(&mut self, sink: &mut impl Sink) -> Result<()> {
        let begun = Instant::now();
        self.clock.start();
        let outcome = self.serve(sink);
        self.tally.seconds += begun.elapsed().as_secs_f64();
        outcome
    }

    fn serve(&mut self, sink: &mut impl Sink) -> Result<()> {
        let mut failures = 0;
        let mut next = None;
        loop {
            self.cancel(sink)?;
            let planned = match next.take() {
                Some(flight) => Some(flight),
                None => self.plan(false)?,
            };
            let Some(mut flight) = planned else { return self.check_idle() };
            next = if self.policy.overlap { self.plan(true)? } else { None };
            self.clock.lap(Part::Engine);
            match self.execute(&mut flight) {
                Ok(()) => {
                    failures = 0;
                    self.accept(flight, next.is_some(), sink)?;
                }
                Err(error) => {
                    failures += 1;
                    if failures == FAILURES_MAX {
                        let what =
                            format!("{FAILURES_MAX} steps in a row failed, the last one: {error}");
                        return Err(Error::run(what));
                    }
                    // Takes the step planned after it along.
                    self.engine.abort(flight.step).map_err(refused)?;
                    self.engine.complete(self.last_step).map_err(refused)?;
                    self.tally.aborted_steps += 1 + u64::from(next.take().is_some());
                }
            }
        }
    }

    /// Nothing could be planned: fine only if nothing is left.
    fn check_idle(&self) -> Result<()> {
        let left = self.waiting.len() + self.preempted.len() + self.running.len();
        if left == 0 {
            return Ok(());
        }
        let available = self.engine.available();
        Err(Error::run(format!(
            "{left} streams wait, but none fits the {available} pages available"
        )))
    }

    /// Admits streams while there are rows and pages: preempted ones first, since they are older.
    fn admit(&mut self) -> Result<()> {
        while self.running.len() < self.policy.concurrency as usize {
            let index = if let Some(&index) = self.preempted.front() {
                let seq = self.streams[index].seq.expect("a preempted stream has a sequence");
                if let Err(error) = self.engine.resume(seq) {
                    return later(error);
                }
                self.preempted.pop_front();
                index
            } else if let Some(&index) = self.waiting.front() {
                if !self.admit_new(index)? {
                    return Ok(());
                }
                self.waiting.pop_front();
                index
            } else {
                return Ok(());
            };
            let age = self.streams[index].age;
            let place = self.running.partition_point(|&other| self.streams[other].age < age);
            self.running.insert(place, index);
        }
        Ok(())
    }

    /// Admits a stream that has no sequence; false if there is no room.
    fn admit_new(&mut self, index: usize) -> Result<bool> {
        let stream = &mut self.streams[index];
        let request = &self.requests[stream.request];
        let said = TokenId::wrap(&stream.tokens);
        let known = [&request.prompt[..], said].concat();
        let seq = match self.engine.admit(request.namespace, &known) {
            Ok(seq) => seq,
            Err(error) => return later(error).map(|()| false),
        };
        stream.seq = Some(seq);
        self.ages += 1;
        stream.age = self.ages;
        if !stream.admitted {
            stream.admitted = true;
            stream.cached_tokens = self.engine.cached_len(seq).map_err(refused)?;
        }
        Ok(true)
    }

    /// Plans a step. `ahead`: while another is in flight; then nobody is preempted for it.
    fn plan(&mut self, ahead: bool) -> Result<Option<Flight>> {
        self.admit()?;
        let mut flight = Flight::default();
        loop {
            self.select(ahead, &mut flight.streams)?;
            if flight.streams.is_empty() {
                return Ok(None);
            }
            let shortage = match self.engine.plan_batch(&mut self.scratch, &self.extends) {
                Ok(plan) => {
                    flight.plan.copy_from(&plan);
                    flight.step = plan.step();
                    self.last_step = flight.step;
                    return Ok(Some(flight));
                }
                Err(error @ EngineError::Core(kvarena::Error::OutOfPages { .. })) => error,
                Err(error) => return Err(failed(error)),
            };
            if ahead {
                return Ok(None);
            }
            if self.running.len() == 1 {
                return Err(failed(shortage));
            }
            self.preempt_youngest()?;
        }
    }

    /// Chooses what each running stream computes next, oldest first.
    fn select(&mut self, ahead: bool, streams: &mut Vec<usize>) -> Result<()> {
        let mut budget = self.policy.chunk;
        streams.clear();
        self.extends.clear();
        for &index in &self.running {
            let stream = &self.streams[index];
            let Some(seq) = stream.seq else { continue };
            let known = self.engine.token_count(seq).map_err(refused)?;
            let planned = self.engine.planned_len(seq).map_err(refused)?;
            let max_new = self.requests[stream.request].max_new_tokens.unwrap_or(0) as usize;
            let len = match known.saturating_sub(planned) {
                // The step in flight will say a token; the one after it is worth planning unless that is the last.
                0 => u32::from(ahead && planned == known && stream.tokens.len() + 1 < max_new),
                1 if !stream.tokens.is_empty() => 1,
                left => {
                    let len = left.min(budget);
                    budget -= len;
                    len
                }
            };
            if len > 0 {
                streams.push(index);
                self.extends.push(Extend { seq, len });
            }
        }
        Ok(())
    }

    fn preempt_youngest(&mut self) -> Result<()> {
        let index = self.running.pop().expect("more than one stream runs");
        let seq = self.streams[index].seq.expect("a running stream has a sequence");
        self.engine.preempt(seq, Keep::Publish).map_err(refused)?;
        // It is younger than the running ones and older than those preempted before it.
        self.preempted.push_front(index);
        self.tally.preemptions += 1;
        Ok(())
    }

    /// Runs the model over a planned step.
    fn execute(
        &mut self,
        flight: &mut Flight,
    ) -> std::result::Result<(), StepError<BackendError<M>>> {
        let plan = flight.plan.plan();
        self.tokens.clear();
        self.tokens.extend_from_slice(TokenId::peel(plan.tokens));
        self.wanted.clear();
        flight.sampled.clear();
        for (i, (&index, row)) in flight.streams.iter().zip(plan.rows).enumerate() {
            let stream = &self.streams[index];
            let last = (row.qo_start + row.extend_len - 1) as usize;
            if plan.tokens[last] == TokenId::PENDING {
                // Known by now, unless the stream ended; then any token will do.
                self.tokens[last] = stream.tokens.last().copied().unwrap_or(0);
            }
            // A stream that ended meanwhile has no sequence; one with more to compute says nothing yet.
            let known = stream.seq.and_then(|seq| self.engine.token_count(seq).ok());
            if known == Some(row.kv_len) {
                self.wanted.push(last);
                flight.sampled.push(i);
            }
        }
        let config = &self.model.config;
        let steps = self.tally.steps + self.tally.aborted_steps + 1;
        let fails = self.policy.fail_every.is_some_and(|n| steps.is_multiple_of(n));
        let mut attention = Paged {
            memory: &mut self.memory,
            backend: self.engine.backend_mut(),
            plan,
            attend: Attend::new(config.q_heads as u32, config.head_dim as u32),
            fail_at: fails.then_some(config.layers / 2),
        };
        let pass = Pass { tokens: &self.tokens, positions: plan.positions, wanted: &self.wanted };
        self.model.forward(pass, &mut attention, &mut self.work, &mut self.clock)
    }

    /// Takes over what a step computed.
    fn accept(&mut self, flight: Flight, ahead: bool, sink: &mut impl Sink) -> Result<()> {
        self.engine.commit(flight.step).map_err(refused)?;
        self.tally.steps += 1;
        let vocab = self.model.config.vocab;
        let logits = std::mem::take(&mut self.work.logits);
        for (&i, logits) in flight.sampled.iter().zip(logits.chunks_exact(vocab)) {
            let index = flight.streams[i];
            let stream = &self.streams[index];
            let request = &self.requests[stream.request];
            if stream.sample == 0 && stream.tokens.is_empty() {
                for sample in 1..request.samples.max(1) {
                    self.fork(index, sample, logits, sink)?;
                }
            }
            self.say(index, logits, sink)?;
        }
        self.work.logits = logits;
        // A fork's step comes after one planned ahead, and is completed with the step after that.
        let done = if ahead { flight.step } else { self.last_step };
        self.engine.complete(done).map_err(refused)?;
        self.clock.lap(Part::Engine);
        Ok(())
    }

    /// Makes another sample of a stream whose prompt is computed, sharing its pages; without room for it now, it waits.
    fn fork(
        &mut self,
        parent: usize,
        sample: u32,
        logits: &[f32],
        sink: &mut impl Sink,
    ) -> Result<()> {
        let Stream { request, submitted, seq, .. } = self.streams[parent];
        let sampler = Sampler::new(self.requests[request].sampling, sample);
        let mut stream = Stream::new(request, sample, sampler, submitted);
        let index = self.streams.len();
        let room = self.running.len() < self.policy.concurrency as usize;
        if let Some(parent) = seq.filter(|_| room) {
            match self.engine.fork(parent) {
                Ok(forked) => {
                    self.last_step = forked.step.unwrap_or(self.last_step);
                    stream.seq = Some(forked.child);
                    stream.admitted = true;
                    let cached = self.engine.cached_len(forked.child).map_err(refused)?;
                    stream.cached_tokens = cached;
                    self.ages += 1;
                    stream.age = self.ages;
                    self.running.push(index);
                    self.tally.forks += 1;
                }
                Err(EngineError::Core(error)) => later(error)?,
                Err(error) => return Err(failed(error)),
            }
        }
        if stream.seq.is_none() {
            self.waiting.push_front(index);
        }
        self.streams.push(stream);
        self.open[request] += 1;
        self.say(index, logits, sink)
    }

    /// Chooses a stream's next token, and ends the stream or goes on with it.
    fn say(&mut self, index: usize, logits: &[f32], sink: &mut impl Sink) -> Result<()> {
        self.clock.lap(Part::Engine);
        let stream = &mut self.streams[index];
        let request = &self.requests[stream.request];
        let token = stream.sampler.choose(logits);
        self.clock.lap(Part::Sampling);
        stream.tokens.push(token);
        stream.first_token_after.get_or_insert_with(|| stream.submitted.elapsed());
        self.tally.new_tokens += 1;
        sink.token(stream, logits);
        let finish = if request.stop.contains(&token) {
            Finish::Stop
        } else if stream.tokens.len() as u32 >= request.max_new_tokens.unwrap_or(0) {
            Finish::Length
        } else {
            return match stream.seq {
                Some(seq) => self.engine.append(seq, &[TokenId::new(token)]).map_err(refused),
                None => Ok(()),
            };
        };
        self.end(index, finish, sink)
    }

    /// Ends the streams whose clients have gone away.
    fn cancel(&mut self, sink: &mut impl Sink) -> Result<()> {
        let live =
            [&self.running[..], self.preempted.make_contiguous(), self.waiting.make_contiguous()];
        for index in live.concat() {
            let stream = &self.streams[index];
            let request = &self.requests[stream.request];
            let gone = request.cancel_after.is_some_and(|n| stream.tokens.len() as u32 >= n);
            if request.max_new_tokens == Some(0) {
                // Nothing is asked for: it ends before it takes part in a step.
                self.end(index, Finish::Length, sink)?;
            } else if gone || sink.cancelled(stream) {
                self.tally.cancelled += 1;
                self.end(index, Finish::Cancelled, sink)?;
            }
        }
        Ok(())
    }

    /// Ends a stream; its pages go back, its computed prefix stays.
    fn end(&mut self, index: usize, finish: Finish, sink: &mut impl Sink) -> Result<()> {
        let stream = &mut self.streams[index];
        stream.finish = Some(finish);
        self.running.retain(|&other| other != index);
        self.preempted.retain(|&other| other != index);
        self.waiting.retain(|&other| other != index);
        if let Some(seq) = stream.seq.take() {
            self.engine.finish(seq).map_err(refused)?;
        }
        let open = &mut self.open[stream.request];
        *open -= 1;
        sink.done(stream, *open == 0);
        Ok(())
    }
}

/// Passes over what is only a lack of room: it may work once others have ended.
fn later(error: kvarena::Error) -> Result<()> {
    use kvarena::Error::{OutOfPages, OutOfSequences, OutOfSteps, OutOfTokens};
    match error {
        OutOfPages { .. } | OutOfSequences { .. } | OutOfSteps { .. } | OutOfTokens { .. } => {
            Ok(())
        }
        other => Err(refused(other)),
    }
}

/// The engine refused what the loop takes for legal.
fn refused(error: kvarena::Error) -> Error {
    Error::run(format!("the engine refused: {error}"))
}

fn failed<E: std::error::Error + 'static>(error: EngineError<E>) -> Error {
    let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}"));
    Error::run(format!("{error}{}", cause.unwrap_or_default()))
}

fn model_limit(positions: usize) -> String {
    format!("the model has {positions} positions")
}

fn pool_limit(shape: &EngineShape) -> String {
    let (pages, size) = (shape.layout.page_count(), shape.layout.page_size());
    format!("the pool holds {} ({pages} pages of {size})", shape.max_sequence_len)
}
