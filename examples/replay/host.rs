//! The state that both schedules share: the engine, its core time, and the counters. `sequential.rs` and `batching.rs`
//! schedule the requests.

use std::convert::Infallible;
use std::fmt;

use indicatif::ProgressBar;
use kvarena::plan::{BatchRow, SharedSpan};
use kvarena::stats::Stats;
use kvarena::testkit::store::KeyStore;
use kvarena::testkit::tiers::Figures;
use kvarena::{BatchPlan, Engine, EngineConfig, EngineError, Error, Namespace, Null, PoolConfig, StepScratch, TokenId};

use crate::core_time::CoreTime;
use crate::request::Request;

/// Namespace of all requests: one tenant, no adapters.
pub const NAMESPACE: Namespace = Namespace::new(0);

/// Approximate number of points of the plot.
const SAMPLES: usize = 400;

/// Reason why serving stopped.
#[derive(Debug)]
pub enum ServeError {
    /// The engine could not be created.
    Start(EngineError<Infallible>),
    /// The engine rejected a valid call.
    Engine { request: usize, source: EngineError<Infallible> },
}

impl fmt::Display for ServeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Start(_) => write!(f, "the engine cannot start"),
            Self::Engine { request, .. } => write!(f, "request {request} cannot be served"),
        }
    }
}

impl std::error::Error for ServeError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Start(source) | Self::Engine { source, .. } => Some(source),
        }
    }
}

/// Counters of a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    /// Requests served to the end.
    pub requests: u64,
    /// Requests that cannot fit the pool even alone.
    pub skipped: u64,
    /// Prompt tokens of the requests that have started.
    pub input_tokens: u64,
    /// Number of sampled tokens.
    pub output_tokens: u64,
    /// Tokens of `input_tokens` that were cached when their request first started.
    pub hit_tokens: u64,
    /// Tokens that were hit on the device, before a fetch from the store.
    pub device_hit_tokens: u64,
    /// Tokens by which fetches from the store have made hits longer. A fetch that fails may make a hit shorter.
    pub store_hit_tokens: u64,
    /// Pages that the store took.
    pub put_pages: u64,
    /// Tokens of `input_tokens` that were cached in group 0; counted only with several groups of layers.
    pub full_hit_tokens: u64,
    /// Tokens that were cached when a preempted request was resumed.
    pub resume_hit_tokens: u64,
    pub preemptions: u64,
    /// Requests that waited for another request to compute their prefix.
    pub followers: u64,
    /// Tokens that followers hit and that were not cached yet when the follower began to wait.
    pub awaited_tokens: u64,
    /// Maximum number of pages that running requests used at a time.
    pub peak_pages: u32,
    /// Maximum number of requests running at a time.
    pub peak_running: usize,
    /// Tokens that decode reads from the cache if each sequence is read separately.
    pub decode_tokens_flat: u64,
    /// Tokens that decode reads from the cache if shared spans are read once.
    pub decode_tokens_shared: u64,
}

impl Tally {
    /// Returns the tokens of `hit_tokens` that were in swap memory alone before a fetch from the store.
    pub fn swap_hit_tokens(&self) -> u64 {
        self.hit_tokens.saturating_sub(self.device_hit_tokens + self.store_hit_tokens)
    }

    /// Counts the reads of decode in a step.
    pub fn count_decode(&mut self, plan: &BatchPlan<'_>) {
        let decodes = |row: &&BatchRow| row.extend_len == 1;
        let flat: u64 = plan.rows.iter().filter(decodes).map(|row| u64::from(row.kv_len)).sum();
        let again = |span: &SharedSpan| {
            let members = plan.shared.members[span.range()].iter();
            let readers = members.filter(|&&row| decodes(&&plan.rows[row as usize])).count();
            readers.saturating_sub(1) as u64 * u64::from(span.end - span.begin)
        };
        self.decode_tokens_flat += flat;
        self.decode_tokens_shared += flat - plan.shared.spans.iter().map(again).sum::<u64>();
    }
}

/// Work of a step, which explains its core time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepWork {
    pub step: u64,
    /// Minimum over all runs.
    pub core_ns: u64,
    /// Maximum over all runs; its excess over the minimum is noise of the machine.
    pub most_ns: u64,
    pub admitted: u32,
    /// Tokens of the requests that were admitted or resumed, cached or not.
    pub admitted_tokens: u64,
    pub computed_tokens: u64,
    pub evicted_pages: u64,
    pub preempted: u32,
    pub finished: u32,
}

impl StepWork {
    /// Returns the excess of the slowest run over the fastest.
    pub fn machine_ns(&self) -> u64 {
        self.most_ns - self.core_ns
    }
}

/// One point of the plot.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// Requests done so far, including skipped ones.
    pub done: u64,
    pub tally: Tally,
    pub stats: Stats,
}

/// The host application around an engine.
pub struct Host<'a> {
    config: EngineConfig,
    pub engine: Engine<Null>,
    /// The counters of earlier engines.
    earlier: Stats,
    pub scratch: StepScratch,
    pub core: CoreTime,
    pub tally: Tally,
    /// Work of the current step.
    pub work: StepWork,
    /// Work of each earlier step.
    pub steps: Vec<StepWork>,
    pub samples: Vec<Sample>,
    /// Maximum number of pages that a step saves ahead of their eviction.
    ahead: u32,
    /// The store behind swap memory.
    pub store: Option<KeyStore>,
    /// Value of [`Sample::done`] at which the next sample is due.
    next_sample: u64,
    sample_stride: u64,
    progress: &'a ProgressBar,
}

/// Results of a run.
pub struct Outcome {
    pub tally: Tally,
    pub stats: Stats,
    pub steps: Vec<StepWork>,
    pub samples: Vec<Sample>,
    pub page_count: u32,
    pub page_size: u32,
    /// Bytes of K and V of one token in all layers.
    pub token_bytes: u64,
}

impl Outcome {
    /// Returns the totals of a run as the naive model counts them.
    pub fn totals(&self) -> Figures {
        let Self { tally, stats, .. } = self;
        Figures {
            skipped: tally.skipped,
            hit_tokens: tally.hit_tokens,
            full_hit_tokens: tally.full_hit_tokens,
            evicted_pages: stats.evicted_pages,
            evicted_cells: stats.evicted_cells,
            peak_pages: tally.peak_pages,
            device_hit_tokens: tally.device_hit_tokens,
            swap_hit_tokens: tally.swap_hit_tokens(),
            store_hit_tokens: tally.store_hit_tokens,
            saved_pages: stats.saved_pages,
            forced_pages: stats.forced_pages,
            loaded_pages: stats.loaded_pages,
            fetched_pages: stats.fetched_pages,
            swap_evicted_pages: stats.swap_evicted_pages,
            lost_pages: stats.lost_pages,
            put_pages: tally.put_pages,
        }
    }

    /// Updates the minimum and maximum time of each step. A replay is exact, so `again`, a run of the same requests,
    /// has the same steps; the longer time of a step contains noise.
    pub fn keep_least(&mut self, again: &Outcome) {
        assert_eq!(self.steps.len(), again.steps.len(), "a replay is exact");
        for (step, again) in self.steps.iter_mut().zip(&again.steps) {
            let core_ns = step.core_ns.min(again.core_ns);
            let most_ns = step.most_ns.max(again.most_ns);
            *step = StepWork { core_ns, most_ns, ..*step };
            assert_eq!(*step, StepWork { core_ns, most_ns, ..*again }, "a replay is exact");
        }
    }
}

impl<'a> Host<'a> {
    pub fn new(
        config: EngineConfig,
        request_count: usize,
        ahead: u32,
        progress: &'a ProgressBar,
    ) -> Result<Self, ServeError> {
        Ok(Self {
            config,
            engine: Engine::new(config, Null).map_err(ServeError::Start)?,
            earlier: Stats::default(),
            scratch: StepScratch::new(),
            core: CoreTime::default(),
            tally: Tally::default(),
            work: StepWork::default(),
            steps: Vec::new(),
            samples: Vec::new(),
            ahead,
            store: None,
            next_sample: 0,
            sample_stride: (request_count / SAMPLES).max(1) as u64,
            progress,
        })
    }

    /// Replaces the engine by a new one. The store stays.
    pub fn restart(&mut self) -> Result<(), ServeError> {
        self.earlier = self.earlier + self.engine.stats();
        self.engine = Engine::new(self.config, Null).map_err(ServeError::Start)?;
        Ok(())
    }

    /// Returns whether a request fits the empty pool.
    pub fn fits(&self, request: &Request) -> bool {
        let shape = self.engine.shape();
        let len = request.stored_len();
        u64::from(len) <= shape.layout.slot_count() && shape.most_pages(len) <= shape.usable_pages().into()
    }

    /// Counts the tokens of a prompt that are cached in group 0, if there are other groups. Call it before admission.
    pub fn count_full_hit(&mut self, prompt: &[TokenId]) {
        let layout = &self.engine.shape().layout;
        if layout.groups().count() > 1 {
            let found = self.engine.match_prefix(NAMESPACE, prompt);
            self.tally.full_hit_tokens += u64::from(found.full_pages()) * u64::from(layout.page_size());
        }
    }

    /// Counts a request that does not fit the pool.
    pub fn skip(&mut self) {
        self.tally.skipped += 1;
        self.progress.inc(1);
    }

    /// Fetches what the cached prefix of a prompt lacks, as far as the store has it. Returns the number of fetched
    /// pages.
    pub fn fetch(&mut self, prompt: &[TokenId]) -> Result<u32, EngineError<Infallible>> {
        let Self { engine, core, store: Some(store), .. } = self else { return Ok(0) };
        core.measure(|| store.fetch(engine, NAMESPACE, prompt))
    }

    /// Saves the oldest pages ahead of their eviction, and puts new pages into the store. A server does both while a
    /// step runs.
    pub fn save_ahead(&mut self) -> Result<(), EngineError<Infallible>> {
        let Self { engine, core, ahead, .. } = self;
        if *ahead > 0 {
            core.measure(|| engine.save_ahead(*ahead))?;
        }
        if let Some(store) = &mut self.store {
            core.measure(|| store.take(engine))?;
            self.tally.put_pages = store.put_pages;
        }
        Ok(())
    }

    /// Counts a started request with `hit` cached tokens, of which `on_device` were on the device before a fetch.
    pub fn started(&mut self, request: &Request, hit: u32, on_device: u32) {
        let input = u64::from(request.input_len());
        self.tally.input_tokens += input;
        self.tally.hit_tokens += u64::from(hit);
        self.tally.device_hit_tokens += u64::from(on_device);
        self.work.admitted += 1;
        self.work.admitted_tokens += input;
    }

    /// Counts a served request.
    pub fn served(&mut self, request: &Request) {
        self.tally.requests += 1;
        self.tally.output_tokens += u64::from(request.output.len);
        self.work.finished += 1;
        self.progress.inc(1);
    }

    /// Ends a step. `planned` contains the engine's counters after the plan took the step's pages.
    pub fn end_step(&mut self, planned: Stats, running: usize) {
        self.tally.peak_pages = self.tally.peak_pages.max(pages_in_use(&planned));
        self.tally.peak_running = self.tally.peak_running.max(running);
        self.work.step = self.steps.len() as u64 + 1;
        self.work.core_ns = self.core.end_step();
        self.work.most_ns = self.work.core_ns;
        self.steps.push(std::mem::take(&mut self.work));
        let done = self.tally.requests + self.tally.skipped;
        if done >= self.next_sample {
            self.next_sample = done + self.sample_stride;
            self.sample(planned);
        }
    }

    fn sample(&mut self, stats: Stats) {
        let done = self.tally.requests + self.tally.skipped;
        self.samples.push(Sample { done, tally: self.tally, stats: stats + self.earlier });
    }

    pub fn outcome(mut self) -> Outcome {
        self.sample(self.engine.stats());
        let stats = self.engine.stats() + self.earlier;
        let layout = &self.engine.shape().layout;
        let (page_count, page_size) = (self.engine.shape().usable_pages(), layout.page_size());
        let token_bytes = layout.page_bytes() / u64::from(page_size);
        Outcome {
            tally: self.tally,
            stats,
            steps: self.steps,
            samples: self.samples,
            page_count,
            page_size,
            token_bytes,
        }
    }
}

/// Returns the number of pages that sequences use.
pub fn pages_in_use(stats: &Stats) -> u32 {
    stats.private_pages + stats.protected_pages
}

/// Returns the error for a request that the engine rejected.
pub fn refused(request: usize) -> impl Fn(Error) -> ServeError {
    move |error| ServeError::Engine { request, source: error.into() }
}

/// Returns the config for a workload: `running` rows, and tokens for the `running` longest requests.
pub fn engine_config(
    pool: PoolConfig,
    prefix: kvarena::config::PrefixMode,
    requests: &[Request],
    running: u32,
) -> EngineConfig {
    let mut lens: Vec<u32> = requests.iter().map(Request::stored_len).collect();
    lens.sort_unstable_by(|a, b| b.cmp(a));
    let max_tokens = lens.iter().take(running as usize).map(|&len| u64::from(len)).sum();
    EngineConfig {
        prefix,
        max_sequences: running,
        max_sequence_len: lens.first().copied().unwrap_or(1),
        max_tokens,
        ..EngineConfig::from(pool)
    }
}
