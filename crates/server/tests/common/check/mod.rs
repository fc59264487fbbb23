//! Compares the tokens of a GPU with those of the CPU.
//!
//! ```text
//! settings     how requests are served and sampled
//! distance     distance of the device's logits from the reference's, and its bounds
//! shaped       checks of edits of logits and of min-p, with the device's own logits
//! ```

#![allow(dead_code, unused_imports)] // each test uses a part

mod distance;
mod settings;
mod shaped;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::rc::Rc;

use kvarena::backend::cuda::Cuda;
use kvarena::config::PrefixMode;
use kvarena::layout::{Groups, LabelChannels};
use kvarena::{Capacity, Engine, EngineConfig, KvDtype, PoolConfig};
use kvarena_host::config::ModelConfig;
use kvarena_host::gpu::device::Device;
use kvarena_host::gpu::forward::InjectedFault;
use kvarena_host::gpu::ranks::{RanksRunner, WeightSource};
use kvarena_host::gpu::runner::{GpuOptions, GpuRunner, OnGpu};
use kvarena_host::gpu::shape::check_shape;
use kvarena_host::gpu::sparse::{Reading, first_channels};
use kvarena_host::gpu::sums::Transport;
use kvarena_host::gpu::weights::{Share, Weights};
use kvarena_host::model::Model;
use kvarena_host::model_files::ModelFiles;
use kvarena_host::request::{Defaults, Request};
use kvarena_host::sample::{Sampling, splitmix};
use kvarena_host::server::{Policy, Server, Sink};
use kvarena_host::source::Random;
use kvarena_host::sparse::channels::Measured;
use kvarena_host::stream::Stream;
use kvarena_server::args::Shape;
use kvarena_server::gpu::setup::wait_for_swap_pages;
use kvarena_server::setup::config_of;

use crate::common::{self, contiguous};
pub use distance::{EXPERTS_BOUND, LOGITS_BOUND};
pub use settings::{FAIL_EVERY, FEW, Schedule, Setting, samplings, settings};

const NEW_TOKENS: u32 = 20;
/// Label channels of a head, if streams read sparsely.
const CHANNELS: u32 = 16;

/// The tokens of streams, by request and sample.
pub type Tokens = BTreeMap<(usize, u32), Vec<u32>>;

/// A model on the CPU and on the GPU, with prompts.
pub struct Case {
    pub name: String,
    device: Rc<Device>,
    model: Model,
    weights: Rc<Weights>,
    source: WeightSource,
    /// Number of GPUs.
    pub ranks: usize,
    /// Transport of sums.
    pub sums: Option<Transport>,
    prompts: Vec<Vec<u32>>,
    /// The tokens that a reference implementation generates for each prompt; empty if they are not known.
    pub expected: Vec<Vec<u32>>,
    /// The tokens that follow each prompt. Drafts come from these tokens, so that some drafts are accepted.
    continuations: Vec<Vec<u32>>,
    /// Channels for labels, as the CPU measures them.
    labels: LabelChannels,
    /// Wrong channels, for [`InjectedFault::Labels`].
    wrong_labels: LabelChannels,
    /// The reference's logits of earlier streams, by their tokens and the number of positions that they read.
    reference: HashMap<(Vec<u32>, Option<u32>), Vec<f32>>,
}

/// The tokens of streams, and the logits from which they were chosen.
#[derive(Default)]
struct TokensAndLogits {
    /// Number of the first request.
    first: usize,
    tokens: Tokens,
    logits: BTreeMap<(usize, u32), Vec<f32>>,
}

impl Sink for TokensAndLogits {
    fn token(&mut self, stream: &Stream, logits: &[f32]) {
        let key = (stream.request - self.first, stream.sample);
        self.logits.entry(key).or_default().extend_from_slice(logits);
    }

    fn done(&mut self, stream: &Stream, _: bool) {
        let key = (stream.request - self.first, stream.sample);
        self.tokens.insert(key, stream.tokens.clone());
    }
}

impl Case {
    /// Returns the golden Qwen3.
    pub fn golden(device: &Rc<Device>) -> Self {
        Self::folder(device, &common::dir("qwen3-tiny"))
    }

    /// Returns a seeded Llama with heads of 64, with the golden prompts of llama-tiny.
    pub fn seeded(device: &Rc<Device>) -> Self {
        let config = config_of(Shape::LlamaTiny64).expect("a shape");
        let model = Model::build(config, &mut Random { seed: 64 }).expect("a model");
        let prompts = common::cases("llama-tiny").into_iter().map(|case| (case.prompt, Vec::new()));
        let case = Self::new("llama-tiny-64", device, model, WeightSource::Random(64), prompts.collect());
        Self { expected: Vec::new(), ..case }
    }

    /// Returns the model of a directory, with the prompts of its `golden.json` or, without this file, random ones.
    pub fn folder(device: &Rc<Device>, dir: &Path) -> Self {
        let files = ModelFiles::open(dir).expect("a model");
        let config = files.config().expect("a config");
        check_shape(&config).expect("a shape that GPUs serve");
        let prompts = if dir.join("golden.json").exists() {
            let cases = common::cases(dir.to_str().expect("UTF-8"));
            cases.into_iter().map(|case| (case.prompt, case.tokens)).collect()
        } else {
            random_prompts(&config)
        };
        let name = dir.file_name().unwrap_or(dir.as_os_str()).to_string_lossy();
        let model = Model::build(config, &mut *files.weights().expect("weights")).expect("a model");
        Self::new(&name, device, model, WeightSource::Files(files.clone()), prompts)
    }

    fn new(
        name: &str,
        device: &Rc<Device>,
        model: Model,
        source: WeightSource,
        prompts: Vec<(Vec<u32>, Vec<u32>)>,
    ) -> Self {
        let (prompts, expected): (Vec<_>, Vec<_>) = prompts.into_iter().unzip();
        let mut measured = Measured::new(&model.config);
        prompts.iter().for_each(|prompt| contiguous::measure(&model, prompt, &mut measured));
        Self {
            name: name.to_owned(),
            device: device.clone(),
            weights: Rc::new(source.weights(device, &model.config, Share::WHOLE).expect("weights")),
            labels: measured.best(CHANNELS).expect("channels"),
            wrong_labels: first_channels(&model.config, CHANNELS),
            model,
            source,
            ranks: 1,
            sums: None,
            prompts,
            expected,
            continuations: Vec::new(),
            reference: HashMap::new(),
        }
    }

    /// Returns the settings that the model's layers support. No backend supports trees of drafts in layers with a
    /// window, and the reference of sparse reads has no windows.
    pub fn settings(&self) -> Vec<Setting> {
        let has_windows = self.model.config.windows.iter().any(Option::is_some);
        let needs_all =
            |setting: &Setting| setting.sparse.is_some() || setting.drafts.is_some_and(|drafts| drafts.tree);
        settings().into_iter().filter(|setting| !(has_windows && needs_all(setting))).collect()
    }

    /// Returns whether the vocabulary has the tokens whose logits are edited.
    pub fn can_be_shaped(&self) -> bool {
        self.model.config.vocab >= shaped::VOCAB_MIN
    }

    /// Serves the prompts with a setting.
    fn serve(&self, setting: Setting, sampling: Sampling) -> TokensAndLogits {
        if self.ranks == 1 {
            let (runner, engine, policy) = self.parts(setting);
            return self.serve_by(Server::new(runner, engine, policy), setting, sampling);
        }
        let (engine_config, policy, options) = self.sizes(setting);
        let config = &self.model.config;
        let mut runner = RanksRunner::new(config, &self.source, options, self.ranks).expect("ranks");
        if let Some(reading) = self.reading(setting) {
            runner.read_sparsely(config, reading).expect("memory");
        }
        let mut engine = Engine::new(engine_config, runner.backend()).expect("a pool");
        runner.warm(engine.backend_mut(), &[]).expect("kernels");
        self.serve_by(Server::new(runner, engine, policy), setting, sampling)
    }

    fn serve_by(&self, mut server: Server<impl OnGpu>, setting: Setting, sampling: Sampling) -> TokensAndLogits {
        wait_for_swap_pages(server.engine_mut()).expect("pinned memory");
        let requests = self.requests(setting, sampling);
        let mut collected = TokensAndLogits::default();
        // The second time, pages of the prompts are in swap memory.
        for round in 0..1 + usize::from(setting.swap_pages) {
            collected = TokensAndLogits { first: round * requests.len(), ..TokensAndLogits::default() };
            for request in &requests {
                server.submit(request.clone()).expect("a request");
            }
            server.run(&mut collected).unwrap_or_else(|error| panic!("{}, {setting:?}: {error}", self.name));
        }
        let engine = server.engine();
        engine.verify().unwrap_or_else(|broken| panic!("{setting:?}: {broken}"));
        let stats = engine.stats();
        let keeps_states = engine.shape().layout.state().is_some();
        assert!(!keeps_states || stats.kept_states > 0, "{setting:?}: no state is cached");
        // Streams that yield to other requests are finished and admitted again, not preempted. A failed step loses
        // states, and preempts their streams.
        let loses_states = keeps_states && setting.fail_every.is_some();
        let preempts = setting.schedule == Schedule::Preempting;
        assert!(loses_states || (stats.preemptions > 0) == preempts, "{setting:?}: preemptions");
        assert_eq!(server.runner().late_modules(engine.backend()), 0, "{setting:?}: modules loaded after the start");
        assert!(!setting.swap_pages || stats.loaded_pages > 0, "{setting:?}: no page was loaded");
        let drafts = setting.drafts.is_some() && sampling.temperature == 0.0;
        assert!(!drafts || server.tally().0.accepted > 0, "{setting:?}: no draft was accepted");
        collected
    }

    /// Returns the prompts as requests.
    pub fn requests(&self, setting: Setting, sampling: Sampling) -> Vec<Request> {
        let samples = if setting.schedule == Schedule::Forked { 3 } else { 1 };
        let stop = setting.stop.into_iter().collect();
        let defaults = Defaults { max_new_tokens: Some(NEW_TOKENS), samples, sampling, stop };
        let mut requests: Vec<_> = self.prompts.iter().map(|prompt| defaults.request(prompt.clone())).collect();
        for ((request, prompt), tokens) in requests.iter_mut().zip(&self.prompts).zip(&self.continuations) {
            // Each prompt has two predictions with different mistakes, so that trees branch.
            for wrong in [5, 7] {
                let text = prompt.iter().chain(tokens).enumerate();
                let mistaken = text.map(|(i, &token)| token ^ u32::from(i % wrong == wrong - 1));
                request.prediction.extend(mistaken);
            }
        }
        if setting.shaped {
            shaped::shape(&mut requests);
        }
        requests
    }

    /// Returns the parts of a server on one GPU with a setting.
    pub fn parts(&self, setting: Setting) -> (GpuRunner, Engine<Cuda>, Policy) {
        let (engine_config, policy, options) = self.sizes(setting);
        let (device, weights) = (self.device.clone(), self.weights.clone());
        let mut runner = GpuRunner::new(device, self.model.config.clone(), weights, options).expect("memory");
        if let Some(reading) = self.reading(setting) {
            runner.read_sparsely(reading).expect("memory");
        }
        let mut engine = Engine::new(engine_config, runner.backend()).expect("a pool");
        runner.warm(engine.backend_mut(), &[]).expect("kernels");
        runner.forward_mut().fault = setting.fault;
        (runner, engine, policy)
    }

    /// Returns how generating streams select the positions that they read; `None` if they read all positions.
    fn reading(&self, setting: Setting) -> Option<Reading> {
        let wrong = setting.fault == InjectedFault::Labels;
        let labels = if wrong { &self.wrong_labels } else { &self.labels };
        setting.sparse.map(|top| Reading { top, labels: labels.clone() })
    }

    /// Returns the sizes of a server with a setting, on each GPU.
    fn sizes(&self, setting: Setting) -> (EngineConfig, Policy, GpuOptions) {
        let share = Share { rank: 0, ranks: self.ranks };
        let config = &share.of(&self.model.config).expect("heads for each rank");
        let policy = policy(setting);
        let has_groups = setting.groups && setting.sparse.is_none();
        let mut pool = PoolConfig {
            layers: config.layers as u32,
            groups: if has_groups { config.groups() } else { Groups::ONE },
            shape: config.kv_shape(),
            dtype: if setting.fp8 { KvDtype::Fp8E4M3 } else { KvDtype::Bf16 },
            page_size: setting.page_size,
            layout: setting.layout,
            label_channels: setting.sparse.map_or(0, |_| self.labels.channels()),
            swap_pages: if setting.swap_pages { 4096 / setting.page_size } else { 0 },
            ..PoolConfig::default()
        };
        let promise_ahead = policy.promise_ahead(setting.page_size);
        let limits = EngineConfig { promise_ahead, ..EngineConfig::from(pool) }.shape().expect("a pool");
        let null_page = u32::from(limits.layout.state().is_some());
        let longest = self.prompts.iter().map(Vec::len).max().unwrap_or(1) as u32 + NEW_TOKENS - 1;
        pool.capacity = Capacity::Pages(match setting.schedule {
            Schedule::Preempting => limits.most_pages(longest) as u32 + null_page,
            _ => 4096_u32.div_ceil(setting.page_size) * limits.layout.tracks() + 64 * limits.layout.state_pages(),
        });
        let engine_config = EngineConfig {
            promise_ahead,
            state_margin: 0, // The prompts are short.
            prefix: PrefixMode::Radix,
            max_sequences: policy.concurrency,
            max_sequence_len: config.max_len as u32,
            max_tokens: u64::from(policy.concurrency) * config.max_len as u64,
            max_steps: 2 * policy.concurrency,
            max_step_tokens: policy.step_tokens(),
            ..EngineConfig::from(pool)
        };
        let options = GpuOptions {
            chunk: policy.chunk,
            concurrency: policy.concurrency,
            drafts: setting.drafts.map_or(0, |rule| rule.tokens),
            trees: setting.drafts.is_some_and(|rule| rule.tree),
            graphs: setting.graphs,
            choice: setting.choice,
            sums: self.sums,
            keep_logits: true,
            keep_times: true,
        };
        (engine_config, policy, options)
    }

    /// Returns the greedy tokens of streams with a setting.
    pub fn tokens(&self, setting: Setting) -> Tokens {
        self.serve(setting, Sampling::default()).tokens
    }

    /// Records the tokens that follow the prompts, if the setting has drafts and no tokens are recorded yet.
    fn record_continuations(&mut self, setting: Setting) {
        if setting.drafts.is_some() && self.continuations.is_empty() {
            self.continuations = self.tokens(Setting::default()).into_values().collect();
        }
    }

    /// Checks that sampled tokens are the same with and without overlap and graphs.
    pub fn draws_agree(&self, sampling: Sampling) {
        let draws = [(false, false), (false, true), (true, false), (true, true)].map(|(graphs, overlap)| {
            let setting = Setting { graphs, overlap, ..Setting::default() };
            self.serve(setting, sampling).tokens
        });
        for tokens in &draws[1..] {
            assert_eq!(*tokens, draws[0], "{}: {sampling:?}", self.name);
        }
    }
}

fn policy(setting: Setting) -> Policy {
    Policy {
        chunk: match (setting.schedule, setting.sparse) {
            (Schedule::Chunked, _) => 7,
            // Some streams generate while the prompts of other streams are computed, in parts of several tokens.
            (_, Some(_)) => 100,
            _ => 512,
        },
        // With sparse reads all streams run at once. A sample that waited would find only whole pages in the cache,
        // and would compute the rest of the prompt together with its first token.
        concurrency: if setting.sparse.is_some() { 24 } else { 16 },
        overlap: setting.overlap,
        fail_every: setting.fail_every,
        // The check compares sampled tokens with and without overlap. If streams waited, steps would have other
        // rows, and logits would differ in their last bits.
        wait_for_leaders: false,
        drafts: setting.drafts,
    }
}

/// Returns random prompts of the golden ones' lengths.
fn random_prompts(config: &ModelConfig) -> Vec<(Vec<u32>, Vec<u32>)> {
    assert!(config.max_len >= settings::ALL as usize, "the longest stream has {} positions", settings::ALL);
    let mut state = 1;
    let mut token = || (splitmix(&mut state) % config.vocab as u64) as u32;
    let lengths = [1, 16, 17, 29, 53, 64, 73, 128];
    lengths.map(|len| ((0..len).map(|_| token()).collect(), Vec::new())).into()
}
