//! The serving loop: continuous batching of many streams over one engine.
//!
//! ```text
//! admit    waiting and preempted streams, while rows and pages allow
//! plan     one new token of every stream that generates, and a chunk of the prompts that are not computed yet
//! launch   the runner starts the step
//! collect  the runner waits for its tokens
//! accept   commit and complete the step, take its tokens, fork samples, finish what has ended
//! ```
//!
//! With overlap, step n + 1 is planned and launched before step n is collected: a token that n will choose is named by
//! its place there. So whether a stream has said its stop token is seen a step late, and what n + 1 says for it is
//! dropped. A step that fails is aborted, with the one planned after it, and planned again: streams change only in
//! `accept`. When pages run out, the youngest stream is preempted.
//!
//! Not here: who computes (`runner.rs`), what is printed (`output.rs`).

mod plan;
mod step;

use std::collections::VecDeque;
use std::time::Instant;

use kvarena::{Engine, EngineError, EngineShape, Extend, StepId, StepScratch};

use crate::clock::{Clock, Part};
use crate::error::{Error, Result};
use crate::request::Request;
use crate::runner::{Runner, Work};
use crate::stream::Stream;
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
    /// Let a stream wait for a running one that computes its prompt. How long it waits depends on `overlap`, and so do
    /// the rows of the steps after it, and the last bits of products on a GPU.
    pub wait_for_leaders: bool,
}

/// Who hears of tokens.
pub trait Sink {
    /// A stream said its newest token, chosen from these logits (empty where the runner does not keep them).
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
    work: Work,
    step: StepId,
    /// The stream of each of the plan's rows.
    streams: Vec<usize>,
    /// Whose each draw of the work is.
    says: Vec<Say>,
}

/// Whose a draw is: the stream itself, or a sample that is forked from it then.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Say {
    stream: usize,
    sample: u32,
}

/// A runner, an engine and the streams between them.
pub struct Server<R: Runner> {
    engine: Engine<R::Backend>,
    runner: R,
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
    /// Steps that are over, to be planned into again.
    spare: Vec<Flight>,
    scratch: StepScratch,
    extends: Vec<Extend>,
    tokens: Vec<u32>,
    clock: Clock,
    tally: Tally,
}

impl<R: Runner> Server<R> {
    /// A server without requests.
    pub fn new(runner: R, engine: Engine<R::Backend>, policy: Policy) -> Self {
        Self {
            engine,
            runner,
            policy,
            requests: Vec::new(),
            open: Vec::new(),
            streams: Vec::new(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            preempted: VecDeque::new(),
            ages: 0,
            last_step: StepId::default(),
            spare: Vec::new(),
            scratch: StepScratch::new(),
            extends: Vec::new(),
            tokens: Vec::new(),
            clock: Clock::default(),
            tally: Tally::default(),
        }
    }

    /// The engine.
    pub fn engine(&self) -> &Engine<R::Backend> {
        &self.engine
    }

    /// Who computes its steps.
    pub fn runner(&self) -> &R {
        &self.runner
    }

    /// Who computes its steps.
    pub fn runner_mut(&mut self) -> &mut R {
        &mut self.runner
    }

    /// Changes how many streams run at a time.
    pub fn set_concurrency(&mut self, streams: u32) {
        self.policy.concurrency = streams;
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
        let stream = Stream::new(number, 0, now);
        self.tally.prompt_tokens += request.prompt.len() as u64;
        self.waiting.push_back(self.streams.len());
        self.streams.push(stream);
        self.requests.push(request);
        self.open.push(1);
        Ok(number)
    }

    fn check(&self, mut request: Request) -> std::result::Result<Request, String> {
        let (vocab, positions) = (self.runner.config().vocab, self.runner.config().max_len);
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
                None => self.plan(None)?,
            };
            let Some(flight) = planned else { return self.check_idle() };
            next = if self.policy.overlap { self.plan(Some(&flight))? } else { None };
            self.clock.lap(Part::Engine);
            match self.collect(&flight) {
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
                    self.runner.settle(self.engine.backend_mut())?;
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
