//! Steps on a GPU, as a `Runner` of the serving loop: graphs, and steps in flight.
//!
//! A decode step (one token of each stream, and its drafts) is padded to one of a few sizes. With
//! [`GpuOptions::graphs`], its launches are captured as a graph at the first step of that size, and again if steps of
//! that size use other kernels. Other steps are launched kernel by kernel. The chosen tokens stay on the device for the
//! next step, which can be launched before the host has received them.

mod options;
mod times;

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;

use kvarena::backend::cuda::{Cuda, CudaGraph, CudaOptions, GraphKey, Prepare};
use kvarena::plan::PlanSize;
use kvarena::{BatchPlan, Extend};

use super::device::Device;
use super::edits::Shapes;
use super::error::{GpuError, GpuResult};
use super::forward::{Forward, Parts, StepAddresses, StepLimits};
use super::image::Images;
use super::kept::KeptLogits;
use super::kernels::DeviceDraw;
use super::products::padded_rows;
use super::sparse::Reading;
use super::sums::Link;
use super::weights::Weights;
use crate::clock::{Clock, Part};
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::runner::{Draw, Runner, Work};
use crate::sparse::channels::Measured;
pub use options::GpuOptions;
use options::padded_step;
pub use times::StepTime;

/// Draws of a step in addition to those of the largest padded decode step.
const MORE_DRAWS: usize = 4096;
/// The same for a runner that keeps logits. The pinned memory grows by `STAGING_BUFFERS` rows of logits for each draw.
const MORE_KEPT_DRAWS: usize = 256;
/// Maximum number of rows of logits computed at a time, unless there are more streams.
const DRAFT_LOGITS_MAX: usize = 1024;

/// A step in flight.
#[derive(Clone, Copy, Debug)]
struct LaunchedStep {
    number: u64,
    tokens: usize,
    decode: bool,
    draws: usize,
    /// Whether the times of this step are measured from the end of the previous one.
    follows: bool,
}

/// Runs a model on a GPU.
pub struct GpuRunner {
    device: Rc<Device>,
    forward: Forward,
    images: Images,
    shapes: Shapes,
    options: GpuOptions,
    /// Graphs. The key contains the staged plan's key, whether a draw filters tokens, and whether a draw is shaped.
    graphs: HashMap<(GraphKey, bool, bool), CudaGraph>,
    draws: Vec<DeviceDraw>,
    /// Number of the last launched step.
    number: u64,
    launched: VecDeque<LaunchedStep>,
    /// Whether the next step has no predecessor from which its times are measured.
    fresh: bool,
    /// The selection of the positions that generating streams read on this rank. `None`: they read all positions.
    reading: Option<Reading>,
    kept: Option<KeptLogits>,
    logits: Vec<f32>,
    times: Vec<StepTime>,
    /// The runner measures the parts of the next decode step that has this many tokens.
    measured: Option<usize>,
    parts: Option<[f32; 4]>,
}

impl GpuRunner {
    /// Creates a runner, with memory for the steps that the options allow.
    ///
    /// # Errors
    /// A shape that no kernel supports, too little memory, or an error of the driver or cublasLt.
    pub fn new(device: Rc<Device>, config: ModelConfig, weights: Rc<Weights>, options: GpuOptions) -> GpuResult<Self> {
        Self::of_rank(device, config, weights, options, None)
    }

    /// Creates the runner of a rank's share of a model, with its link to the other ranks.
    ///
    /// # Errors
    /// As [`GpuRunner::new`].
    pub fn of_rank(
        device: Rc<Device>,
        config: ModelConfig,
        weights: Rc<Weights>,
        options: GpuOptions,
        link: Option<Link>,
    ) -> GpuResult<Self> {
        let rows = padded_rows(options.concurrency as usize);
        let (_, decode) = options.decode_max();
        let tokens = options.chunk as usize + decode;
        let draws = decode + if options.keep_logits { MORE_KEPT_DRAWS } else { MORE_DRAWS };
        let limits = StepLimits { tokens, logits: decode.min(rows.max(DRAFT_LOGITS_MAX)), draws };
        let images = Images::new(&device, padded_rows(tokens), draws)?;
        let shapes = Shapes::new(&device, draws, config.vocab)?;
        let kept = options.keep_logits.then(|| KeptLogits::new(&device, draws, config.vocab)).transpose()?;
        let forward = Forward::new(&device, config, weights, limits, options.choice, link)?;
        Ok(Self {
            device,
            forward,
            images,
            shapes,
            options,
            graphs: HashMap::new(),
            draws: Vec::new(),
            number: 0,
            launched: VecDeque::new(),
            fresh: true,
            reading: None,
            kept,
            logits: Vec::new(),
            times: Vec::new(),
            measured: None,
            parts: None,
        })
    }

    /// Makes generating streams read the positions that labels find, in backends opened from now on.
    pub fn read_sparsely(&mut self, reading: Reading) -> GpuResult<()> {
        let (rows, _) = self.options.decode_max();
        self.forward.read_sparsely(&self.device, reading.top, rows)?;
        self.reading = Some(reading);
        self.forget();
        Ok(())
    }

    /// Measures the importance of each channel of K in backends opened from now on. In each step, the
    /// host then waits for every layer.
    pub fn measure_channels(&mut self) -> GpuResult<()> {
        self.forget();
        self.forward.measure_channels(&self.device)
    }

    /// Ends the measurement and returns its result, if there was one.
    pub fn take_measured(&mut self) -> Option<Measured> {
        self.forget();
        self.forward.take_measured()
    }

    /// Drops the graphs, which contain addresses of the last backend, and the recorded times. The caller opens another
    /// backend.
    fn forget(&mut self) {
        self.graphs.clear();
        self.times.clear();
        self.fresh = true;
    }

    /// Returns the options of a backend for this runner's steps, on its stream.
    pub fn backend(&self) -> CudaOptions {
        let (rows, _) = self.options.decode_max();
        // Each stream counts its shared pages, so the sum over all streams may exceed the pool's tokens.
        let seen = u64::from(self.options.concurrency) * self.forward.config.max_len as u64;
        CudaOptions {
            labels: self.reading.as_ref().map(|reading| reading.labels.clone()),
            select_tokens: seen,
            stream: Some(self.device.stream.clone()),
            max_step_rows: rows as u32,
            ..CudaOptions::new(&self.device.gpu)
        }
    }

    /// Prepares all kernels of steps, and chooses the implementations of products. It chooses them for decode steps of
    /// these numbers of streams, without drafts and with the most drafts. It also chooses them for a whole chunk, alone
    /// and with the largest of these steps. Steps of other sizes choose theirs when they are launched.
    ///
    /// # Errors
    /// Heads that no kernel supports, or an error of the driver, cublasLt or NCCL.
    pub fn warm(&mut self, backend: &mut Cuda, streams: &[usize]) -> GpuResult<()> {
        let work = Prepare {
            decode_tokens: self.options.decode_tokens(),
            trees: self.options.trees,
            compactions: self.options.trees,
            ..Prepare::new(&[])
        };
        self.forward.prepare(backend, &work)?;
        self.forward.warm_sums(&self.device)?;
        let width = self.options.width();
        for (&streams, width) in streams.iter().flat_map(|streams| [(streams, 1), (streams, width)]) {
            let (_, tokens) = padded_step(streams, streams * width);
            let logits = tokens.min(self.forward.logits_rows());
            self.forward.choose_products(&self.device, (tokens, logits), true)?;
        }
        if let Some(most) = streams.iter().max() {
            let chunk = self.options.chunk as usize;
            for tokens in [chunk, chunk + most, chunk + most * width] {
                self.forward.choose_products(&self.device, (tokens, 0), true)?;
            }
        }
        Ok(())
    }

    /// Returns the GPU.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the model.
    pub fn forward(&self) -> &Forward {
        &self.forward
    }

    /// Drops the graphs and returns the model, to inject faults.
    pub fn forward_mut(&mut self) -> &mut Forward {
        self.graphs.clear();
        &mut self.forward
    }

    /// Returns the times of the steps on the device.
    pub fn times(&self) -> &[StepTime] {
        &self.times
    }

    /// Returns the times of the steps on the device since the last call.
    pub fn take_times(&mut self) -> Vec<StepTime> {
        std::mem::take(&mut self.times)
    }

    fn start(&mut self, backend: &mut Cuda, work: &Work, clock: &mut Clock) -> GpuResult<()> {
        let plan = work.plan.plan();
        // Rows of padding have a `kv_len` of 0.
        let lens = plan.rows.iter().filter(|row| row.kv_len > 0).map(|row| row.extend_len as usize);
        let (tokens, longest) = (lens.clone().sum(), lens.max());
        let draws = work.draws.len();
        if draws > self.images.draws_max() {
            return Err(GpuError::Draws { draws, max: self.images.draws_max() });
        }
        // The kernel for shaped draws also filters tokens.
        let filters = |draw: &Draw| draw.sampling.filters() && !draw.is_shaped();
        let filtered = work.draws.iter().any(filters);
        self.draws.clear();
        self.draws.extend(work.draws.iter().map(device_draw));
        let shaped = self.forward.leads() && self.shapes.list(work, &mut self.draws)?;
        // A decode step has at most one draw for each token; its draws are padded to one for each token.
        let most = plan.token_count();
        let decode = longest.is_some_and(|longest| longest <= self.options.width()) && draws <= most;
        let draw_count = if decode { most } else { draws };
        self.submit(backend, &plan, work, (decode, draw_count), (filtered, shaped))?;
        if decode && self.measured == Some(tokens) {
            self.measured = None;
            self.measure(backend, &plan)?;
        }
        self.images.end(&self.device, self.number)?;
        let follows = !std::mem::take(&mut self.fresh);
        self.launched.push_back(LaunchedStep { number: self.number, tokens, decode, draws, follows });
        clock.lap(Part::Launch);
        Ok(())
    }

    fn submit(
        &mut self,
        backend: &mut Cuda,
        plan: &BatchPlan<'_>,
        work: &Work,
        (decode, draw_count): (bool, usize),
        (filtered, shaped): (bool, bool),
    ) -> GpuResult<()> {
        let Self { device, forward, images, shapes, .. } = self;
        let tokens = plan.token_count();
        let rows = forward.logits_rows();
        forward.choose_products(device, (tokens, draw_count.min(rows)), false)?;
        if draw_count > rows {
            forward.choose_products(device, (tokens, draw_count % rows), false)?;
        }
        self.number += 1;
        let (number, logits) = (self.number, forward.logits_address());
        images.send(device, number, (&work.inputs, tokens), (&self.draws, draw_count))?;
        if shaped {
            shapes.send(device, number, &work.edits)?;
        }
        let addresses = StepAddresses {
            tokens: images.tokens(),
            draws: images.draws(),
            host_tokens: images.host_tokens(),
            draw_count,
            filtered,
            shapes: shaped.then(|| shapes.addresses()),
        };
        // The logits of a graph are copied after the end of the graph.
        let keeps = self.kept.is_none() || draw_count <= rows;
        if decode && self.options.graphs && keeps && !forward.is_measuring() {
            // `stage` waits for the loaded pages of all layers. Separate launches wait only for those of their layer.
            let key = (backend.stage(plan)?.graph, filtered, shaped);
            if let Entry::Vacant(entry) = self.graphs.entry(key) {
                let body = || forward.run(device, backend, plan, addresses, Parts::ALL, |_, _| Ok(()));
                entry.insert(device.stream.capture(body)?);
            }
            // SAFETY: all memory of the graph lives as long as this runner and the engine, and is accessed in the
            // stream's order; a plan with this key has just been staged.
            unsafe { self.graphs[&key].launch(&device.stream) }?;
            return match &mut self.kept {
                Some(kept) => kept.keep(device, number, logits, (0, draw_count)),
                None => Ok(()),
            };
        }
        let kept = &mut self.kept;
        forward.run(device, backend, plan, addresses, Parts::ALL, |first, count| match kept {
            Some(kept) => kept.keep(device, number, logits, (first, count)),
            None => Ok(()),
        })
    }

    fn finish(&mut self, tokens: &mut Vec<u32>, clock: &mut Clock) -> GpuResult<()> {
        let launched = self.launched.pop_front().expect("a step was launched");
        let LaunchedStep { number, decode, draws, follows, .. } = launched;
        tokens.clear();
        tokens.extend_from_slice(self.images.wait_for_tokens(number, draws)?);
        clock.lap(Part::Wait);
        let (mut period_ms, mut idle_ms) = (None, 0.0);
        if follows {
            let [idle, period] = self.images.times(number)?;
            (period_ms, idle_ms) = (Some(period), idle);
        }
        if self.options.keep_times {
            self.times.push(StepTime { tokens: launched.tokens, decode, period_ms, idle_ms });
        }
        if let Some(kept) = &self.kept {
            self.logits.clear();
            self.logits.extend(kept.logits(number, draws).iter().map(|x| x.to_f32()));
        }
        Ok(())
    }
}

/// A runner whose first GPU, which measures time and chooses tokens, belongs to a [`GpuRunner`].
pub trait OnGpu: Runner {
    /// Returns the runner of the first GPU.
    fn gpu(&self) -> &GpuRunner;

    /// Returns the runner of the first GPU.
    fn gpu_mut(&mut self) -> &mut GpuRunner;

    /// Returns the number of modules loaded since the first GPU's pool was prepared. A step waits for such a module.
    fn late_modules(&self, backend: &Self::Backend) -> usize;
}

impl OnGpu for GpuRunner {
    fn gpu(&self) -> &GpuRunner {
        self
    }

    fn gpu_mut(&mut self) -> &mut GpuRunner {
        self
    }

    fn late_modules(&self, backend: &Cuda) -> usize {
        backend.modules_after_prepare()
    }
}

/// Returns an error if the caller requested that the step fail.
pub(super) fn injected_failure(fail: bool) -> Result<()> {
    if fail { Err(Error::run("injected failure")) } else { Ok(()) }
}

fn device_draw(draw: &Draw) -> DeviceDraw {
    let Draw { row, sampling, .. } = *draw;
    let warm = sampling.temperature > 0.0;
    DeviceDraw {
        row: row as u32,
        inverse_temperature: if warm { 1.0 / sampling.temperature } else { 0.0 },
        top_p: sampling.top_p,
        top_k: sampling.top_k,
        key: draw.key(),
        shape: 0,
    }
}

impl Runner for GpuRunner {
    type Backend = Cuda;

    fn config(&self) -> &ModelConfig {
        &self.forward.config
    }

    fn step_size(&self, items: &[Extend]) -> Option<PlanSize> {
        let longest = items.iter().map(|item| item.len as usize).max()?;
        let tokens = items.iter().map(|item| item.len as usize).sum();
        let (rows, tokens) = padded_step(items.len(), tokens);
        (longest <= self.options.width()).then_some(PlanSize { rows, tokens })
    }

    fn before_plan(&mut self) -> Result<()> {
        Ok(self.images.begin(&self.device, self.number + 1)?)
    }

    fn launch(&mut self, backend: &mut Cuda, work: &Work, clock: &mut Clock) -> Result<()> {
        Ok(self.start(backend, work, clock)?)
    }

    fn collect(&mut self, _: &mut Cuda, _: &Work, fail: bool, tokens: &mut Vec<u32>, clock: &mut Clock) -> Result<()> {
        self.finish(tokens, clock)?;
        injected_failure(fail)
    }

    fn settle(&mut self, _: &mut Cuda) -> Result<()> {
        self.device.stream.synchronize().map_err(GpuError::from)?;
        self.launched.clear();
        self.fresh = true;
        Ok(())
    }

    fn draws_max(&self) -> usize {
        self.images.draws_max()
    }

    fn edits_max(&self) -> usize {
        self.shapes.edits_max()
    }

    fn keeps_logits(&self) -> bool {
        self.kept.is_some()
    }

    fn logits(&self, draw: usize) -> &[f32] {
        let vocab = self.forward.config.vocab;
        self.logits.get(draw * vocab..(draw + 1) * vocab).unwrap_or_default()
    }
}
