//! The serving loop: continuous batching of many streams over one engine.
//!
//! ```text
//! admit    waiting and preempted streams, while rows and pages allow
//! plan     one new token of every generating stream, and a chunk of the uncomputed prompts
//! launch   the runner starts the step
//! collect  the runner waits for the step's tokens
//! accept   keep accepted drafts, commit the step, fork samples, append tokens, end finished streams,
//!          complete the step
//! ```
//!
//! With overlap, the loop plans and launches the next step before it collects a step. The next step's inputs refer to
//! the uncollected tokens by their draw's index. The loop therefore reads a stop token one step late and drops the
//! stream's token of the next step. If a step fails, the loop aborts it and the next step, and plans both again. This
//! is possible because streams receive tokens only in `accept`. When pages run out, the loop preempts the youngest
//! stream.
//!
//! A [`Runner`] computes steps.

mod drafts;
mod limits;
mod plan;
mod step;
mod stores;
mod turns;

use std::collections::VecDeque;
use std::time::Instant;

use kvarena::{Engine, EngineError, Extend, StepId, StepScratch};
use slotmap::SlotMap;

use crate::clock::{Clock, Part};
use crate::draft::Drafting;
use crate::error::{Error, Result, with_cause};
use crate::request::Request;
use crate::runner::{Runner, Work};
use crate::shaping::Edit;
use crate::stores::Stores;
use crate::stream::{Finish, RequestKey, Stream, StreamKey};
use crate::tally::Tally;

use drafts::Branches;
pub use limits::{Limits, longest};

/// Number of consecutive failed steps that end a run.
const FAILURES_MAX: u32 = 4;

/// Options of batching.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Policy {
    /// Maximum number of prompt tokens computed in one step, over all prompts. Tokens that a stream computes again
    /// after a preemption count as prompt tokens.
    pub chunk: u32,
    /// Maximum number of streams at a time.
    pub concurrency: u32,
    /// Whether the loop plans a step before it has the tokens of the previous step.
    pub overlap: bool,
    /// Makes every n-th collected step fail, to test the retry.
    pub fail_every: Option<u64>,
    /// Whether a stream waits while a running stream computes the same prompt. The length of the wait depends on
    /// `overlap`. The rows of later steps, and the last bits of products on a GPU, depend on the length of the wait.
    pub wait_for_leaders: bool,
    /// Drafts that a step checks together with each stream's next token. They exclude `overlap`, which plans before
    /// that token exists.
    pub drafts: Option<Drafting>,
}

impl Policy {
    /// Returns the maximum number of tokens by which plans are ahead of a stream's published tokens. This is
    /// [`EngineConfig::promise_ahead`](kvarena::EngineConfig) for a pool with groups of layers and this page size.
    pub fn promise_ahead(&self, page_size: u32) -> u32 {
        let drafts = self.drafts.map_or(0, |drafts| drafts.tokens);
        let step = self.chunk.max(drafts + 1);
        step.saturating_mul(1 + u32::from(self.overlap)).saturating_add(page_size - 1)
    }

    /// Returns an upper bound of the tokens of a step, including padding. This is
    /// [`EngineConfig::max_step_tokens`](kvarena::EngineConfig).
    pub fn step_tokens(&self) -> u32 {
        /// Padding adds at most 256 rows of one token, and then rounds the tokens up by fewer than 256.
        const PADDING: u32 = 512;
        let drafts = self.drafts.map_or(0, |drafts| drafts.tokens);
        let decode = self.concurrency.saturating_mul(drafts.saturating_add(1));
        self.chunk.saturating_add(decode).saturating_add(PADDING)
    }
}

/// Receives the events of streams.
pub trait Sink {
    /// Receives a stream with a new token, and the logits of the choice (empty if the runner does not keep logits).
    fn token(&mut self, _stream: &Stream, _logits: &[f32]) {}

    /// Receives the logits from which token number `position` of a stream's prompt would have been chosen, if
    /// requested. The calls are in order and precede the stream's first token.
    fn prompt(&mut self, _stream: &Stream, _position: u32, _logits: &[f32]) {}

    /// Receives an ended stream; `last` marks the last stream of its request.
    fn done(&mut self, _stream: &Stream, _last: bool) {}

    /// Returns a reason to end the stream now, if any: its client has disconnected or needs no more tokens. The loop
    /// calls this before every step.
    fn ends(&mut self, _stream: &Stream) -> Option<Finish> {
        None
    }
}

/// A planned step.
#[derive(Default)]
struct InflightStep {
    work: Work,
    step: StepId,
    /// Stream of each row of the plan.
    streams: Vec<StreamKey>,
    /// Samples that receive tokens, in the order of their draws.
    pending: Vec<PendingSample>,
    /// Draws that only provide logits.
    scores: Vec<Score>,
    /// Scratch of the edits of a draw.
    changes: Vec<Edit>,
    /// The age of the first stream whose edits or draws did not fit; 0 if all fit.
    capacity_turn: u64,
}

/// Prompt tokens whose logits a step provides.
#[derive(Clone, Copy, Debug)]
struct Score {
    stream: StreamKey,
    /// First token, by its index in the prompt.
    position: u32,
    /// Draw of its logits; later tokens have the following draws.
    draw: usize,
    count: u32,
}

/// Owner of draws: the stream itself, or a sample that will be forked from it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct PendingSample {
    stream: StreamKey,
    sample: u32,
    /// First draw. Each draft of the stream has one more draw.
    draw: usize,
}

/// A request with a running or waiting stream.
struct ActiveRequest {
    request: Request,
    /// Tokens of the prompt, sorted and without duplicates, if the request has a repetition penalty.
    prompt_tokens: Vec<u32>,
    /// Group of the request. The groups take turns (`turns.rs`).
    group: u64,
    /// Number of streams that have not ended.
    open: u32,
}

/// The last stream of a request whose prompt the stores do not have yet.
struct HandOver {
    key: StreamKey,
    stream: Stream,
    is_done: bool,
}

/// Numbers of a server's streams.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StreamCounts {
    /// Streams that wait to be admitted or resumed.
    pub waiting: usize,
    /// Streams that take part in steps.
    pub running: usize,
}

/// A runner, an engine and the streams between them.
pub struct Server<R: Runner> {
    engine: Engine<R::Backend>,
    runner: R,
    policy: Policy,
    /// Stores of K and V, if any.
    stores: Option<Box<dyn Stores<R::Backend>>>,
    /// Whether a request ends only when the stores have its prompt.
    hands_over: bool,
    /// The last streams of requests that wait for it.
    hand_overs: Vec<HandOver>,
    /// Number of requests submitted.
    submitted: usize,
    /// Requests and streams that have not ended. Ended ones are removed, so a server may run indefinitely.
    requests: SlotMap<RequestKey, ActiveRequest>,
    streams: SlotMap<StreamKey, Stream>,
    /// Streams without a sequence. Within a group, the loop admits the first one that does not wait for a leader.
    waiting: VecDeque<StreamKey>,
    /// Streams that take part in steps, oldest first.
    running: Vec<StreamKey>,
    /// Streams whose sequence is preempted, oldest first.
    preempted: VecDeque<StreamKey>,
    ages: u64,
    /// Streams of this age and above receive edits and draws first. It is the age of the first stream that exceeded the
    /// last step's capacity.
    capacity_turn: u64,
    /// Step that was planned and launched before the last step was collected.
    ahead: Option<InflightStep>,
    /// Number of consecutive failed steps.
    failures: u32,
    /// The end of the last step; `None` if the server has been idle since.
    step_ended: Option<Instant>,
    /// The last planned step, of a batch or a fork.
    last_step: StepId,
    /// Finished steps, whose memory is reused.
    spare: Vec<InflightStep>,
    scratch: StepScratch,
    extends: Vec<Extend>,
    tokens: Vec<u32>,
    /// The accepted branch of each pending sample of the step in `accept`.
    branches: Branches,
    clock: Clock,
    tally: Tally,
}

impl<R: Runner> Server<R> {
    /// Creates a server without requests.
    ///
    /// # Panics
    /// If the policy has both drafts and overlap, or at least as many drafts as the runner has draws.
    pub fn new(runner: R, engine: Engine<R::Backend>, policy: Policy) -> Self {
        assert!(!policy.overlap || policy.drafts.is_none(), "drafts exclude overlap");
        let drafts = policy.drafts.map_or(0, |drafts| drafts.tokens as usize);
        assert!(drafts < runner.draws_max(), "a step has a draw for each draft and one more");
        Self {
            engine,
            runner,
            policy,
            stores: None,
            hands_over: false,
            hand_overs: Vec::new(),
            submitted: 0,
            requests: SlotMap::with_key(),
            streams: SlotMap::with_key(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            preempted: VecDeque::new(),
            ages: 0,
            capacity_turn: 0,
            ahead: None,
            failures: 0,
            step_ended: None,
            last_step: StepId::default(),
            spare: Vec::new(),
            scratch: StepScratch::new(),
            extends: Vec::new(),
            tokens: Vec::new(),
            branches: Branches::default(),
            clock: Clock::default(),
            tally: Tally::default(),
        }
    }

    /// Returns the engine.
    pub fn engine(&self) -> &Engine<R::Backend> {
        &self.engine
    }

    /// Returns the engine, to drain its events. Other changes make the loop's state inconsistent.
    pub fn engine_mut(&mut self) -> &mut Engine<R::Backend> {
        &mut self.engine
    }

    /// Returns the runner.
    pub fn runner(&self) -> &R {
        &self.runner
    }

    /// Returns the runner.
    pub fn runner_mut(&mut self) -> &mut R {
        &mut self.runner
    }

    /// Returns the options of batching.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Returns the runner and drops the engine.
    pub fn into_runner(self) -> R {
        self.runner
    }

    /// Returns the numbers of streams.
    pub fn stream_counts(&self) -> StreamCounts {
        let waiting = self.waiting.len() + self.preempted.len();
        StreamCounts { waiting, running: self.running.len() }
    }

    /// Returns the limits of requests.
    pub fn limits(&self) -> Limits {
        Limits::new(self.runner.config(), self.engine.shape())
    }

    /// Returns the counters and the times by part.
    pub fn tally(&self) -> (&Tally, &Clock) {
        (&self.tally, &self.clock)
    }

    /// Accepts a request and returns its number, the count of earlier requests.
    ///
    /// # Errors
    /// [`Limits::check`] rejects the request, a step has too few draws for its samples, its edits of logits are
    /// invalid, or the runner does not support the edits or min-p.
    pub fn submit(&mut self, request: Request) -> Result<usize> {
        self.submit_since(request, Instant::now())
    }

    /// Does the same as [`Server::submit`]. The time to the first token starts at `since`.
    ///
    /// # Errors
    /// See [`Server::submit`].
    pub fn submit_since(&mut self, request: Request, since: Instant) -> Result<usize> {
        let number = self.submitted;
        let request = self
            .limits()
            .check(request)
            .and_then(|request| self.check_draws(request))
            .and_then(|request| self.check_edits(request))
            .map_err(|what| Error::request(format!("request {number}: {what}")))?;
        self.submitted += 1;
        self.tally.prompt_tokens += request.prompt.len() as u64;
        // Groups from hosts and requests without a group never collide.
        let group = request.group.map_or((number as u64) << 1, |group| group << 1 | 1);
        let prompt_tokens = prompt_tokens(&request);
        let request_key = self.requests.insert(ActiveRequest { request, prompt_tokens, group, open: 1 });
        let stream = self.streams.insert(Stream::new((request_key, number), 0, since));
        self.waiting.push_back(stream);
        Ok(number)
    }

    /// Returns the request if a step can draw the first tokens of all its samples.
    fn check_draws(&self, request: Request) -> std::result::Result<Request, String> {
        let (samples, most) = (request.samples, self.runner.draws_max());
        if samples as usize > most {
            return Err(format!("{samples} samples are more than the {most} draws of a step"));
        }
        Ok(request)
    }

    /// Returns the request if its edits of logits are valid, and the runner supports them and min-p.
    fn check_edits(&self, request: Request) -> std::result::Result<Request, String> {
        let (vocab, room) = (self.runner.config().vocab, self.runner.edits_max());
        if request.sampling.min_p > 0.0 && room == 0 {
            return Err("this backend does not support min_p".into());
        }
        let Some(shaping) = &request.shaping else { return Ok(request) };
        let rules = shaping.rules();
        if !(rules.repetition > 0.0 && rules.repetition.is_finite()) {
            return Err(format!("repetition_penalty {} is not above 0", rules.repetition));
        }
        if rules.bad_words.iter().any(Vec::is_empty) {
            return Err("a bad word has no tokens".into());
        }
        if let Some(token) = rules.tokens().find(|&token| token as usize >= vocab) {
            return Err(format!("token {token} is past the model's vocabulary of {vocab} tokens"));
        }
        if !shaping.allows_some(&request.stop, vocab) {
            return Err("the edits of logits allow no token".into());
        }
        let known = request.prompt.len() + request.max_new_tokens.unwrap_or(0) as usize;
        let most = shaping.edits_max(known, request.stop.len(), vocab);
        if most > room || room == 0 {
            return Err(format!("a step edits up to {most} logits, and the backend has room for {room}"));
        }
        Ok(request)
    }

    fn request(&self, stream: &Stream) -> &Request {
        &self.requests[stream.request_key].request
    }

    /// Serves until every stream has ended.
    ///
    /// # Errors
    /// See [`Server::step`].
    pub fn run(&mut self, sink: &mut impl Sink) -> Result<()> {
        while self.step(sink)? {}
        Ok(())
    }

    /// Serves one step; returns false if no stream is left. Requests may be submitted between any two steps.
    ///
    /// # Errors
    /// Steps keep failing, the runner cannot prepare, start or discard a step, or no waiting stream fits the pool. The
    /// engine rejects a valid call, or the backend fails in a call of the engine.
    pub fn step(&mut self, sink: &mut impl Sink) -> Result<bool> {
        let begun = match self.step_ended.take() {
            Some(ended) => ended,
            None => {
                self.clock.start();
                Instant::now()
            }
        };
        self.cancel(sink)?;
        self.turn_stores()?;
        self.end_hand_overs(sink);
        let planned = match self.ahead.take() {
            Some(flight) => Some(flight),
            None => self.plan(None)?,
        };
        let Some(flight) = planned else {
            return if self.await_stores() { Ok(true) } else { self.check_idle().map(|()| false) };
        };
        // `give_way` needs a moment without a step in flight, so no step is planned ahead.
        let ahead = self.policy.overlap && !self.is_unfair();
        self.ahead = if ahead { self.plan(Some(&flight))? } else { None };
        self.clock.lap(Part::Engine);
        match self.collect(&flight) {
            Ok(()) => {
                self.failures = 0;
                self.accept(flight, self.ahead.is_some(), sink)?;
            }
            Err(error) => self.retry(&flight, error)?,
        }
        let ended = Instant::now();
        self.tally.seconds += (ended - begun).as_secs_f64();
        self.tally.step_time.add(ended - begun);
        self.step_ended = Some(ended);
        Ok(true)
    }

    /// Aborts a failed step together with the step planned after it, so both are planned again.
    fn retry(&mut self, flight: &InflightStep, error: Error) -> Result<()> {
        self.failures += 1;
        self.tally.failed_steps += 1;
        if self.failures == FAILURES_MAX {
            let what = format!("{FAILURES_MAX} steps in a row failed, the last one: {error}");
            return Err(Error::run(what));
        }
        self.runner.settle(self.engine.backend_mut())?;
        // Also aborts the step planned after it.
        self.engine.abort(flight.step).map_err(refused)?;
        self.engine.complete(self.last_step).map_err(refused)?;
        self.withdraw(&flight.streams)?;
        self.preempt_lost()?;
        self.tally.aborted_steps += 1 + u64::from(self.ahead.take().is_some());
        Ok(())
    }

    /// Handles a plan without rows, which is valid only if no stream is left.
    fn check_idle(&self) -> Result<()> {
        let StreamCounts { waiting, running } = self.stream_counts();
        let left = waiting + running;
        if left == 0 {
            return Ok(());
        }
        let available = self.engine.available();
        Err(Error::run(format!("{left} streams wait, but none fits the {available} pages available")))
    }
}

/// Returns the tokens of a prompt, sorted and without duplicates; no tokens without a repetition penalty.
fn prompt_tokens(request: &Request) -> Vec<u32> {
    let mut tokens = Vec::new();
    if request.shaping.as_ref().is_some_and(|shaping| shaping.rules().repetition != 1.0) {
        tokens.extend(request.prompt.iter().map(|token| token.raw()));
        tokens.sort_unstable();
        tokens.dedup();
    }
    tokens
}

/// Ignores a shortage of pages, rows, steps or tokens: the call may succeed after other streams have ended.
fn ignore_shortage(error: kvarena::Error) -> Result<()> {
    if error.is_shortage() { Ok(()) } else { Err(refused(error)) }
}

/// Returns the error for a call that the engine rejects although it should be valid.
fn refused(error: kvarena::Error) -> Error {
    Error::run(format!("the engine refused: {error}"))
}

fn failed<E: std::error::Error + 'static>(error: EngineError<E>) -> Error {
    Error::run(with_cause(&error))
}
