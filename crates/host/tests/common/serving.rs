//! Serves the golden prompts in a setting and records the streams.

use std::collections::BTreeMap;

use kvarena::backend::OpenBackend;
use kvarena::config::PrefixMode;
use kvarena::layout::{Groups, KvScales, Layout, Scaling};
use kvarena::stats::Stats;
use kvarena::{Capacity, Cpu, CpuOptions, Engine, EngineConfig, KvDtype, PoolConfig};
use kvarena_host::cpu::CpuRunner;
use kvarena_host::draft::Drafting;
use kvarena_host::model::Model;
use kvarena_host::request::{Defaults, Request};
use kvarena_host::runner::Runner;
use kvarena_host::sample::Sampling;
use kvarena_host::server::{Policy, Server, Sink};
use kvarena_host::stream::Stream;
use kvarena_host::tally::Tally;

use super::Case;

/// A combination of the number of streams at a time, the chunks of prompts, and the size of the pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Schedule {
    OneByOne,
    AllAtOnce,
    ChunksOf7,
    /// The pool has memory for the longest request only.
    SmallPool,
}

pub const SCHEDULES: [Schedule; 4] =
    [Schedule::OneByOne, Schedule::AllAtOnce, Schedule::ChunksOf7, Schedule::SmallPool];

#[derive(Clone, Copy, Debug)]
pub struct Setting {
    pub dtype: KvDtype,
    pub page_size: u32,
    pub layout: Layout,
    pub prefix: PrefixMode,
    pub schedule: Schedule,
    /// Prompt tokens of a step, if `schedule` sets no number.
    pub chunk: u32,
    /// Streams at a time, if `schedule` sets no number.
    pub concurrency: u32,
    pub overlap: bool,
    pub fail_every: Option<u64>,
    pub drafts: Option<Drafting>,
    /// Whether layers with a window or a chunk keep only its tokens.
    pub groups: bool,
    /// Pages of swap memory.
    pub swap_pages: u32,
}

impl Default for Setting {
    fn default() -> Self {
        Self {
            dtype: KvDtype::F32,
            page_size: 16,
            layout: Layout::PageFirst,
            prefix: PrefixMode::Radix,
            schedule: Schedule::AllAtOnce,
            chunk: 512,
            concurrency: 16,
            overlap: false,
            fail_every: None,
            drafts: None,
            groups: true,
            swap_pages: 0,
        }
    }
}

/// Records the tokens of streams, their cached tokens, and the first logits of each request.
#[derive(Default)]
pub struct CollectedStreams {
    pub tokens: BTreeMap<(usize, u32), Vec<u32>>,
    pub cached: Vec<u32>,
    pub first_logits: BTreeMap<usize, Vec<f32>>,
}

impl Sink for CollectedStreams {
    fn token(&mut self, stream: &Stream, logits: &[f32]) {
        self.first_logits.entry(stream.request).or_insert_with(|| logits.to_vec());
    }

    fn done(&mut self, stream: &Stream, _: bool) {
        self.tokens.insert((stream.request, stream.sample), stream.tokens.clone());
        self.cached.push(stream.cached_tokens);
    }
}

pub struct Ran {
    pub collected: CollectedStreams,
    pub stats: Stats,
    pub tally: Tally,
}

pub fn requests(cases: &[Case]) -> Vec<Request> {
    let defaults = Defaults { max_new_tokens: Some(20), samples: 1, sampling: Sampling::default(), stop: Vec::new() };
    cases.iter().map(|case| defaults.request(case.prompt.clone())).collect()
}

/// Serves on the CPU. The backend has one thread, because the tests run in parallel.
pub fn serve(model: &Model, requests: &[Request], setting: Setting) -> Ran {
    serve_by(CpuRunner::new(model), requests, setting, Scaling::Static, None).0
}

/// Serves with any runner and either kind of scales.
pub fn serve_by<R: Runner<Backend = Cpu>>(
    runner: R,
    requests: &[Request],
    setting: Setting,
    scaling: Scaling,
    scales: Option<KvScales>,
) -> (Ran, Server<R>) {
    let mut server = server(runner, requests, setting, scaling, scales);
    for request in requests {
        server.submit(request.clone()).expect("the request fits");
    }
    let mut collected = CollectedStreams::default();
    server.run(&mut collected).unwrap_or_else(|error| panic!("{setting:?}: {error}"));
    server.engine().verify().unwrap_or_else(|broken| panic!("{setting:?}: {broken}"));
    let tally = server.tally().0.clone();
    (Ran { collected, stats: server.engine().stats(), tally }, server)
}

/// Creates a server in a setting, with memory for these requests.
pub fn server<R: Runner<Backend = Cpu>>(
    runner: R,
    requests: &[Request],
    setting: Setting,
    scaling: Scaling,
    scales: Option<KvScales>,
) -> Server<R> {
    let options = CpuOptions { scales, ..CpuOptions::with_threads(1) };
    server_on(runner, requests, setting, scaling, options)
}

/// Creates a server on any backend.
pub fn server_on<R: Runner>(
    runner: R,
    requests: &[Request],
    setting: Setting,
    scaling: Scaling,
    options: impl OpenBackend<Backend = R::Backend>,
) -> Server<R> {
    let model = runner.config();
    let longest = requests.iter().map(|r| r.prompt.len() as u32 + 20 - 1).max();
    let tokens = longest.filter(|_| setting.schedule == Schedule::SmallPool).unwrap_or(4096);
    let policy = Policy {
        chunk: if setting.schedule == Schedule::ChunksOf7 { 7 } else { setting.chunk },
        concurrency: if setting.schedule == Schedule::OneByOne { 1 } else { setting.concurrency },
        overlap: setting.overlap,
        fail_every: setting.fail_every,
        wait_for_leaders: true,
        drafts: setting.drafts,
    };
    let mut pool = PoolConfig {
        layers: model.layers as u32,
        groups: if setting.groups { model.groups() } else { Groups::ONE },
        shape: model.kv_shape(),
        dtype: setting.dtype,
        scaling,
        page_size: setting.page_size,
        capacity: Capacity::Pages(2),
        layout: setting.layout,
        swap_pages: setting.swap_pages,
        ..PoolConfig::default()
    };
    let promise_ahead = policy.promise_ahead(setting.page_size);
    let limits = EngineConfig { promise_ahead, ..EngineConfig::from(pool) };
    let limits = limits.shape().expect("the config is sound");
    let null_page = u64::from(limits.layout.state().is_some());
    pool.capacity = Capacity::Pages((limits.most_pages(tokens) + null_page) as u32);
    let config = EngineConfig {
        promise_ahead,
        state_margin: 0, // The prompts are short.
        prefix: setting.prefix,
        max_sequences: 16,
        max_sequence_len: 2048,
        max_tokens: 16 * 2048,
        max_steps: 20,
        ..EngineConfig::from(pool)
    };
    let engine = Engine::new(config, options).expect("the config is sound");
    Server::new(runner, engine, policy)
}
