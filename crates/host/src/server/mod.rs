//! The serving loop: continuous batching of many streams over one engine.
//!
//! ```text
//! admit    waiting and preempted streams, while rows and pages allow
//! plan     one new token of every stream that generates, and a chunk of the prompts that are not computed yet
//! launch   the runner starts the step
//! collect  the runner waits for its tokens
//! accept   keep the drafts that came true, commit and complete the step, take its tokens, fork samples, finish what
//!          has ended
//! ```
//!
//! With overlap, step n + 1 is planned and launched before step n is collected: a token that n will choose is named by
//! its index there. So whether a stream has said its stop token is seen a step late, and what n + 1 says for it is
//! dropped. A step that fails is aborted, with the one planned after it, and planned again: streams change only in
//! `accept`. When pages run out, the youngest stream is preempted.
//!
//! Not here: who computes (`runner.rs`), what is printed (`output.rs`).

mod drafts;
mod limits;
mod plan;
mod step;
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
use crate::stream::{Finish, RequestKey, Stream, StreamKey};
use crate::tally::Tally;

use drafts::Branches;
pub use limits::Limits;

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
    /// Check drafts beside each stream's next token; not with `overlap`, which plans before that token is known.
    pub drafts: Option<Drafting>,
}

/// Who hears of tokens.
pub trait Sink {
    /// A stream said its newest token, chosen from these logits (empty where the runner does not keep them).
    fn token(&mut self, _stream: &Stream, _logits: &[f32]) {}

    /// The logits that token number `position` of a stream's prompt was one of, where they are wanted: in order, before
    /// the stream says anything.
    fn prompt(&mut self, _stream: &Stream, _position: u32, _logits: &[f32]) {}

    /// A stream ended, and is forgotten then; whether it was the last of its request.
    fn done(&mut self, _stream: &Stream, _last: bool) {}

    /// Why the stream is to end now, if it is: its client has gone away, or has read enough. Asked before every step.
    fn ends(&mut self, _stream: &Stream) -> Option<Finish> {
        None
    }
}

/// A planned step.
#[derive(Default)]
struct Flight {
    work: Work,
    step: StepId,
    /// The stream of each of the plan's rows.
    streams: Vec<StreamKey>,
    /// Whose the draws of the work are, in order.
    says: Vec<Say>,
    /// Draws that are there for their logits alone.
    scores: Vec<Score>,
    /// Scratch of the edits of a draw.
    changes: Vec<Edit>,
    /// The age of the first stream whose edits had no room; 0 where all had.
    edits_turn: u64,
}

/// Tokens of a prompt whose logits a step gives.
#[derive(Clone, Copy, Debug)]
struct Score {
    stream: StreamKey,
    /// The first token, by its place in the prompt.
    position: u32,
    /// The draw of its logits; the tokens after it have the draws after that.
    draw: usize,
    count: u32,
}

/// Whose draws are: the stream itself, or a sample that is forked from it then.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Say {
    stream: StreamKey,
    sample: u32,
    /// The first draw; each of the stream's drafts has one more.
    draw: usize,
}

/// A request of which some stream has not ended.
struct Asked {
    request: Request,
    /// Tokens of the prompt in increasing order, each once, where the request has a repetition penalty.
    prompt_tokens: Vec<u32>,
    /// Whose turn it is when it runs: requests of a group share one.
    group: u64,
    /// Its streams that have not ended.
    open: u32,
}

/// How full a server is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Load {
    /// Streams that wait to be admitted, or to be resumed.
    pub waiting: usize,
    /// Streams that take part in steps.
    pub running: usize,
}

/// A runner, an engine and the streams between them.
pub struct Server<R: Runner> {
    engine: Engine<R::Backend>,
    runner: R,
    policy: Policy,
    /// Requests submitted so far.
    submitted: usize,
    /// Requests and streams that have not ended: those that have are forgotten, so that a server may run for ever.
    asked: SlotMap<RequestKey, Asked>,
    streams: SlotMap<StreamKey, Stream>,
    /// Streams without a sequence, first come first served.
    waiting: VecDeque<StreamKey>,
    /// Streams that take part in steps, oldest first.
    running: Vec<StreamKey>,
    /// Streams whose sequence is preempted, oldest first.
    preempted: VecDeque<StreamKey>,
    ages: u64,
    /// The age from which on streams get room for edits first: of the first one that had none in the last step.
    edits_turn: u64,
    /// The step planned and launched before the last one was collected.
    ahead: Option<Flight>,
    /// Steps in a row that failed.
    failures: u32,
    /// When the last step ended; none where there was nothing to do since.
    step_ended: Option<Instant>,
    /// The last step planned, by a batch or a fork.
    last_step: StepId,
    /// Steps that are over, to be planned into again.
    spare: Vec<Flight>,
    scratch: StepScratch,
    extends: Vec<Extend>,
    tokens: Vec<u32>,
    /// What came true of each stream's drafts in the step that is accepted.
    branches: Branches,
    clock: Clock,
    tally: Tally,
}

impl<R: Runner> Server<R> {
    /// A server without requests.
    pub fn new(runner: R, engine: Engine<R::Backend>, policy: Policy) -> Self {
        assert!(!policy.overlap || policy.drafts.is_none(), "drafts follow a token that is known");
        Self {
            engine,
            runner,
            policy,
            submitted: 0,
            asked: SlotMap::with_key(),
            streams: SlotMap::with_key(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            preempted: VecDeque::new(),
            ages: 0,
            edits_turn: 0,
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

    /// The engine.
    pub fn engine(&self) -> &Engine<R::Backend> {
        &self.engine
    }

    /// The engine, to drain its events. Other changes break the loop's own state.
    pub fn engine_mut(&mut self) -> &mut Engine<R::Backend> {
        &mut self.engine
    }

    /// Who computes its steps.
    pub fn runner(&self) -> &R {
        &self.runner
    }

    /// Who computes its steps.
    pub fn runner_mut(&mut self) -> &mut R {
        &mut self.runner
    }

    /// How it batches.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Who computed its steps; the engine goes.
    pub fn into_runner(self) -> R {
        self.runner
    }

    /// Changes how many streams run at a time.
    pub fn set_concurrency(&mut self, streams: u32) {
        self.policy.concurrency = streams;
    }

    /// How full it is.
    pub fn load(&self) -> Load {
        let waiting = self.waiting.len() + self.preempted.len();
        Load { waiting, running: self.running.len() }
    }

    /// What requests may ask for.
    pub fn limits(&self) -> Limits {
        let (config, shape) = (self.runner.config(), self.engine.shape());
        Limits {
            vocab: config.vocab,
            positions: config.max_len,
            pool: shape.max_sequence_len as usize,
            pages: shape.layout.page_count(),
            page_size: shape.layout.page_size(),
        }
    }

    /// What was done so far, and where the time went.
    pub fn tally(&self) -> (&Tally, &Clock) {
        (&self.tally, &self.clock)
    }

    /// Takes a request; its number is the count of requests before it.
    ///
    /// # Errors
    /// It can never be served, as [`Limits::check`] says.
    pub fn submit(&mut self, request: Request) -> Result<usize> {
        self.submit_since(request, Instant::now())
    }

    /// As [`Server::submit`], for a request that came at `since`.
    ///
    /// # Errors
    /// As there.
    pub fn submit_since(&mut self, request: Request, since: Instant) -> Result<usize> {
        let number = self.submitted;
        let request = self
            .limits()
            .check(request)
            .and_then(|request| self.check_edits(request))
            .map_err(|what| Error::request(format!("request {number}: {what}")))?;
        self.submitted += 1;
        self.tally.prompt_tokens += request.prompt.len() as u64;
        // Groups of hosts and requests without one do not meet.
        let group = request.group.map_or((number as u64) << 1, |group| group << 1 | 1);
        let prompt_tokens = prompt_tokens(&request);
        let asked = self.asked.insert(Asked { request, prompt_tokens, group, open: 1 });
        let stream = self.streams.insert(Stream::new((asked, number), 0, since));
        self.waiting.push_back(stream);
        Ok(number)
    }

    /// The request, if the runner can ever change its logits as it wants them.
    fn check_edits(&self, request: Request) -> std::result::Result<Request, String> {
        let (vocab, room) = (self.runner.config().vocab, self.runner.edits_max());
        if request.sampling.min_p > 0.0 && room == 0 {
            return Err("min_p is not served by this backend".into());
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
        let known = request.prompt.len() + request.max_new_tokens.unwrap_or(0) as usize;
        let most = shaping.edits_max(known, request.stop.len(), vocab);
        match most > room || room == 0 {
            true => Err(format!(
                "a step edits up to {most} logits, and the backend has room for {room}"
            )),
            false => Ok(request),
        }
    }

    /// The request of a stream.
    fn request(&self, stream: &Stream) -> &Request {
        &self.asked[stream.asked].request
    }

    /// Serves until every stream has ended.
    ///
    /// # Errors
    /// As [`Server::step`].
    pub fn run(&mut self, sink: &mut impl Sink) -> Result<()> {
        while self.step(sink)? {}
        Ok(())
    }

    /// Serves one step; false where no stream was left. Requests may be submitted between any two steps.
    ///
    /// # Errors
    /// Steps keep failing, or the engine refuses what should work.
    pub fn step(&mut self, sink: &mut impl Sink) -> Result<bool> {
        let begun = match self.step_ended.take() {
            Some(ended) => ended,
            None => {
                self.clock.start();
                Instant::now()
            }
        };
        self.cancel(sink)?;
        let planned = match self.ahead.take() {
            Some(flight) => Some(flight),
            None => self.plan(None)?,
        };
        let Some(flight) = planned else { return self.check_idle().map(|()| false) };
        // A stream that gives way does so between two steps.
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

    /// Aborts a step that failed, with the one planned after it, so that both are planned again.
    fn retry(&mut self, flight: &Flight, error: Error) -> Result<()> {
        self.failures += 1;
        if self.failures == FAILURES_MAX {
            let what = format!("{FAILURES_MAX} steps in a row failed, the last one: {error}");
            return Err(Error::run(what));
        }
        self.runner.settle(self.engine.backend_mut())?;
        // Takes the step planned after it along.
        self.engine.abort(flight.step).map_err(refused)?;
        self.engine.complete(self.last_step).map_err(refused)?;
        self.withdraw(&flight.streams)?;
        self.tally.aborted_steps += 1 + u64::from(self.ahead.take().is_some());
        Ok(())
    }

    /// Nothing could be planned: fine only if nothing is left.
    fn check_idle(&self) -> Result<()> {
        let Load { waiting, running } = self.load();
        let left = waiting + running;
        if left == 0 {
            return Ok(());
        }
        let available = self.engine.available();
        Err(Error::run(format!(
            "{left} streams wait, but none fits the {available} pages available"
        )))
    }
}

/// Tokens of a prompt in increasing order, each once, where they are penalised.
fn prompt_tokens(request: &Request) -> Vec<u32> {
    let mut tokens = Vec::new();
    if request.shaping.as_ref().is_some_and(|shaping| shaping.rules().repetition != 1.0) {
        tokens.extend(request.prompt.iter().map(|token| token.raw()));
        tokens.sort_unstable();
        tokens.dedup();
    }
    tokens
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
    Error::run(with_cause(&error))
}
