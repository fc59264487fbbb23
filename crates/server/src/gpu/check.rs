//! Compares the tokens of the GPU with those of the CPU: `kvarena-server --check`.
//!
//! ```text
//! settings     how requests are served and sampled
//! distance     distance of the device's logits from the reference's, and its bounds
//! shaped       checks of edits of logits and of min-p, with the device's own logits
//! report       runs all checks and prints their outcomes
//! ```

mod distance;
mod report;
mod settings;
mod shaped;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::rc::Rc;

use kvarena::backend::cuda::Cuda;
use kvarena::{Capacity, Engine, EngineConfig, Groups, KvDtype, LabelChannels, PoolConfig, PrefixMode};

use super::setup::wait_for_swap_pages;
use crate::args::Shape;
use crate::built_in::QWEN3_TINY;
use crate::setup::{config_of, no_engine, unusable};
use kvarena_host::checkpoint;
use kvarena_host::config::ModelConfig;
use kvarena_host::contiguous;
use kvarena_host::error::{Error, Result};
use kvarena_host::fields::{parse_json, read_json};
use kvarena_host::gpu::device::Device;
use kvarena_host::gpu::forward::InjectedFault;
use kvarena_host::gpu::ranks::{RanksRunner, WeightSource};
use kvarena_host::gpu::runner::{GpuOptions, GpuRunner, OnGpu};
use kvarena_host::gpu::shape::check_shape;
use kvarena_host::gpu::sparse::{Reading, first_channels};
use kvarena_host::gpu::sums::Transport;
use kvarena_host::gpu::weights::{Share, Weights};
use kvarena_host::model::Model;
use kvarena_host::request::{Defaults, Request};
use kvarena_host::sample::{Sampling, splitmix};
use kvarena_host::server::{Policy, Server, Sink};
use kvarena_host::source::Random;
use kvarena_host::sparse::channels::Measured;
use kvarena_host::stream::Stream;
use serde_json::Value;

pub use distance::{Distance, EXPERTS_BOUND, FEW_LOGITS_BOUND, FEW_TOKEN_BOUND, LOGITS_BOUND, TOKEN_BOUND};
pub use report::run;
pub use settings::{ALL, SCHEDULES, Schedule, Setting, samplings, settings};

const NEW_TOKENS: u32 = 20;
/// Label channels of a head, if streams read sparsely.
const CHANNELS: u32 = 16;

/// A model on the CPU and on the GPU, with prompts.
pub struct Case {
    /// Name for messages.
    pub name: String,
    device: Rc<Device>,
    model: Model,
    weights: Rc<Weights>,
    source: WeightSource,
    /// Number of GPUs.
    pub ranks: usize,
    /// Transport of sums.
    pub sums: Option<Transport>,
    golden: Golden,
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
    tokens: BTreeMap<(usize, u32), Vec<u32>>,
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
    /// Returns the built-in Qwen3 model with its golden prompts.
    ///
    /// # Errors
    /// The GPU cannot serve.
    pub fn golden(device: &Rc<Device>) -> Result<Self> {
        let model = Model::build(QWEN3_TINY.config()?, &mut QWEN3_TINY.checkpoint()?)?;
        let source = WeightSource::InMemory(QWEN3_TINY.weights);
        Self::new(QWEN3_TINY.name, device, model, source, Golden::parse_bytes(QWEN3_PROMPTS)?)
    }

    /// Returns a seeded Llama with heads of 64, with the golden prompts of llama-tiny.
    ///
    /// # Errors
    /// See [`Case::golden`].
    pub fn seeded(device: &Rc<Device>) -> Result<Self> {
        let (config, mut random) = (config_of(Shape::LlamaTiny64)?, Random { seed: 64 });
        let model = Model::build(config, &mut random)?;
        let golden = Golden { tokens: Vec::new(), ..Golden::parse_bytes(LLAMA_PROMPTS)? };
        Self::new("llama-tiny-64", device, model, WeightSource::Random(64), golden)
    }

    /// Returns the model of a directory, with the prompts of its `golden.json` or, without this file, random ones.
    ///
    /// # Errors
    /// The model cannot be used or has too few positions, or the GPU cannot serve it.
    pub fn folder(device: &Rc<Device>, dir: &Path) -> Result<Self> {
        let config = ModelConfig::read(dir)?;
        check_shape(&config)?;
        let path = dir.join("golden.json");
        let golden = match path.exists() {
            true => Golden::parse(&read_json(&path)?),
            false => Golden::random(&config)?,
        };
        let name = dir.file_name().unwrap_or(dir.as_os_str()).to_string_lossy();
        let model = Model::build(config, &mut *checkpoint::open(dir)?)?;
        Self::new(&name, device, model, WeightSource::Files(dir.into()), golden)
    }

    /// Returns the tokens that a reference implementation generates for each prompt; empty without `golden.json`.
    pub fn expected(&self) -> &[Vec<u32>] {
        &self.golden.tokens
    }

    fn new(name: &str, device: &Rc<Device>, model: Model, source: WeightSource, golden: Golden) -> Result<Self> {
        let device = device.clone();
        let weights = Rc::new(source.weights(&device, &model.config, Share::WHOLE)?);
        let labels = labels(&model, &golden.prompts)?;
        let wrong_labels = first_channels(&model.config, CHANNELS);
        let (continuations, reference) = (Vec::new(), HashMap::new());
        let (ranks, sums) = (1, None);
        Ok(Self {
            name: name.to_owned(),
            device,
            model,
            weights,
            source,
            ranks,
            sums,
            golden,
            continuations,
            labels,
            wrong_labels,
            reference,
        })
    }

    /// Returns the settings that the model's layers support. No backend supports trees of drafts in layers with a
    /// window, and the reference of sparse reads has no windows.
    pub fn settings(&self) -> Vec<Setting> {
        let has_windows = self.model.config.windows.iter().any(Option::is_some);
        let needs_all =
            |setting: &Setting| setting.sparse.is_some() || setting.drafts.is_some_and(|drafts| drafts.tree);
        settings().into_iter().filter(|setting| !(has_windows && needs_all(setting))).collect()
    }

    /// Serves the prompts with a setting.
    fn serve(&self, setting: Setting, sampling: Sampling) -> Result<TokensAndLogits> {
        if self.ranks == 1 {
            let (runner, engine, policy) = self.parts(setting)?;
            return self.serve_by(Server::new(runner, engine, policy), setting, sampling);
        }
        let (engine_config, policy, options) = self.sizes(setting)?;
        let config = &self.model.config;
        let mut runner = RanksRunner::new(config, &self.source, options, self.ranks)?;
        if let Some(reading) = self.reading(setting) {
            runner.read_sparsely(config, reading)?;
        }
        let mut engine = Engine::new(engine_config, runner.backend()).map_err(no_engine)?;
        runner.warm(engine.backend_mut(), &[])?;
        self.serve_by(Server::new(runner, engine, policy), setting, sampling)
    }

    fn serve_by(
        &self,
        mut server: Server<impl OnGpu>,
        setting: Setting,
        sampling: Sampling,
    ) -> Result<TokensAndLogits> {
        wait_for_swap_pages(server.engine_mut())?;
        let requests = self.requests(setting, sampling);
        let mut collected = TokensAndLogits::default();
        // The second time, pages of the prompts are in swap memory.
        for round in 0..1 + usize::from(setting.swap_pages) {
            let first = round * requests.len();
            collected = TokensAndLogits { first, ..TokensAndLogits::default() };
            for request in &requests {
                server.submit(request.clone())?;
            }
            server.run(&mut collected)?;
        }
        server.engine().verify().map_err(|broken| Error::run(format!("broken: {broken}")))?;
        // Streams that yield to other requests are finished and admitted again, not preempted.
        let preempted = server.engine().stats().preemptions > 0;
        if preempted != (setting.schedule == Schedule::Preempting) {
            return Err(Error::run(format!("{setting:?}: preempted {preempted}")));
        }
        let late = server.runner().late_modules(server.engine().backend());
        if late > 0 {
            return Err(Error::run(format!("{setting:?}: {late} modules loaded after the start")));
        }
        let engine = server.engine();
        if setting.swap_pages && engine.stats().loaded_pages == 0 {
            return Err(Error::run(format!("{setting:?}: no page was loaded")));
        }
        let greedy = sampling.temperature == 0.0;
        if setting.drafts.is_some() && greedy && server.tally().0.accepted == 0 {
            return Err(Error::run(format!("{setting:?}: no draft was accepted")));
        }
        Ok(collected)
    }

    /// Returns the prompts as requests.
    pub fn requests(&self, setting: Setting, sampling: Sampling) -> Vec<Request> {
        let samples = if setting.schedule == Schedule::Forked { 3 } else { 1 };
        let stop = setting.stop.into_iter().collect();
        let defaults = Defaults { max_new_tokens: Some(NEW_TOKENS), samples, sampling, stop };
        let mut requests: Vec<_> = self.golden.prompts.iter().map(|prompt| defaults.request(prompt.clone())).collect();
        for ((request, prompt), tokens) in requests.iter_mut().zip(&self.golden.prompts).zip(&self.continuations) {
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

    /// Returns the parts of a server with a setting.
    ///
    /// # Errors
    /// The GPU cannot serve.
    pub fn parts(&self, setting: Setting) -> Result<(GpuRunner, Engine<Cuda>, Policy)> {
        let (engine_config, policy, options) = self.sizes(setting)?;
        let (device, weights) = (self.device.clone(), self.weights.clone());
        let mut runner = GpuRunner::new(device, self.model.config.clone(), weights, options)?;
        if let Some(reading) = self.reading(setting) {
            runner.read_sparsely(reading)?;
        }
        let mut engine = Engine::new(engine_config, runner.backend()).map_err(no_engine)?;
        runner.warm(engine.backend_mut(), &[])?;
        runner.forward_mut().fault = setting.fault;
        Ok((runner, engine, policy))
    }

    /// Returns how generating streams select the positions that they read; `None` if they read all positions.
    fn reading(&self, setting: Setting) -> Option<Reading> {
        let labels = match setting.fault {
            InjectedFault::Labels => &self.wrong_labels,
            _ => &self.labels,
        };
        setting.sparse.map(|top| Reading { top, labels: labels.clone() })
    }

    /// Returns the sizes of a server with a setting, on each GPU.
    fn sizes(&self, setting: Setting) -> Result<(EngineConfig, Policy, GpuOptions)> {
        let share = Share { rank: 0, ranks: self.ranks };
        let config = &share.of(&self.model.config)?;
        let longest = self.golden.prompts.iter().map(Vec::len).max().unwrap_or(1) as u32 + NEW_TOKENS - 1;
        let tokens = if setting.schedule == Schedule::Preempting { longest } else { 4096 };
        let policy = policy(setting);
        let has_groups = setting.groups && setting.sparse.is_none();
        let pool = PoolConfig {
            layers: config.layers as u32,
            groups: if has_groups { config.groups() } else { Groups::ONE },
            shape: config.kv_shape(),
            dtype: if setting.fp8 { KvDtype::Fp8E4M3 } else { KvDtype::Bf16 },
            page_size: setting.page_size,
            layout: setting.layout,
            label_channels: setting.sparse.map_or(0, |_| self.labels.channels()),
            ..PoolConfig::default()
        };
        let promise_ahead = policy.promise_ahead(setting.page_size);
        let alone = EngineConfig { promise_ahead, ..EngineConfig::from(pool) };
        let pages = match setting.schedule {
            Schedule::Preempting => {
                let most = alone.shape().map_err(unusable)?.most_pages(longest);
                u32::try_from(most).unwrap_or(u32::MAX)
            }
            _ => tokens.div_ceil(setting.page_size) * pool.layout().map_err(unusable)?.tracks(),
        };
        let swap_pages = if setting.swap_pages { 4096 / setting.page_size } else { 0 };
        let pool = PoolConfig { capacity: Capacity::Pages(pages), swap_pages, ..pool };
        let engine_config = EngineConfig {
            promise_ahead,
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
        Ok((engine_config, policy, options))
    }

    /// Returns the greedy tokens of streams with a setting, by request and sample.
    ///
    /// # Errors
    /// The run failed.
    pub fn tokens(&self, setting: Setting) -> Result<BTreeMap<(usize, u32), Vec<u32>>> {
        Ok(self.serve(setting, Sampling::default())?.tokens)
    }

    /// Records the tokens that follow the prompts, if the setting has drafts and no tokens are recorded yet.
    fn record_continuations(&mut self, setting: Setting) -> Result<()> {
        if setting.drafts.is_some() && self.continuations.is_empty() {
            self.continuations = self.tokens(Setting::default())?.into_values().collect();
        }
        Ok(())
    }

    /// Checks that sampled tokens are the same with and without overlap and graphs. Returns the number of tokens.
    ///
    /// # Errors
    /// The run failed, or draws differ.
    pub fn draws_agree(&mut self, sampling: Sampling) -> Result<usize> {
        let mut first: Option<BTreeMap<(usize, u32), Vec<u32>>> = None;
        for (graphs, overlap) in [(false, false), (false, true), (true, false), (true, true)] {
            let setting = Setting { graphs, overlap, ..Setting::default() };
            let tokens = self.serve(setting, sampling)?.tokens;
            match &first {
                Some(first) if *first != tokens => {
                    let what = format!("{sampling:?}: graphs {graphs}, overlap {overlap} differ");
                    return Err(Error::run(what));
                }
                _ => first = Some(tokens),
            }
        }
        Ok(first.unwrap_or_default().values().map(Vec::len).sum())
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

/// Returns the 16 most important channels of each head, measured while the CPU computes the prompts.
fn labels(model: &Model, prompts: &[Vec<u32>]) -> Result<LabelChannels> {
    let mut measured = Measured::new(&model.config);
    for prompt in prompts {
        contiguous::measure(model, prompt, &mut measured);
    }
    measured.best(CHANNELS)
}

/// Prompts, and the tokens that a reference implementation generates for each of them, if they are known.
struct Golden {
    prompts: Vec<Vec<u32>>,
    tokens: Vec<Vec<u32>>,
}

/// Golden prompts, and a reference's tokens, of the built-in model and of llama-tiny.
const QWEN3_PROMPTS: &[u8] = include_bytes!("../../../host/tests/data/qwen3-tiny/golden.json");
const LLAMA_PROMPTS: &[u8] = include_bytes!("../../../host/tests/data/llama-tiny/golden.json");

impl Golden {
    fn parse_bytes(golden: &[u8]) -> Result<Self> {
        Ok(Self::parse(&parse_json(Path::new("golden.json"), golden)?))
    }

    fn parse(golden: &Value) -> Self {
        let cases = golden["cases"].as_array().map_or(&[][..], Vec::as_slice);
        let ids = |case: &Value, field: &str| -> Vec<u32> {
            let ids = case[field].as_array().map_or(&[][..], Vec::as_slice);
            ids.iter().filter_map(|id| id.as_u64()).map(|id| id as u32).collect()
        };
        let of = |field| cases.iter().map(|case| ids(case, field)).collect();
        Self { prompts: of("prompt"), tokens: of("tokens") }
    }

    /// Returns random prompts of the golden ones' lengths. The longest stream has [`ALL`] positions.
    fn random(config: &ModelConfig) -> Result<Self> {
        if config.max_len < ALL as usize {
            let what = format!("--check needs {ALL} positions, but the model has {}", config.max_len);
            return Err(Error::model(what));
        }
        let mut state = 1;
        let mut token = || (splitmix(&mut state) % config.vocab as u64) as u32;
        let lengths = [1, 16, 17, 29, 53, 64, 73, 128];
        let prompts = lengths.map(|len| (0..len).map(|_| token()).collect()).into();
        Ok(Self { prompts, tokens: Vec::new() })
    }
}
