//! Converts the command line to a server on one GPU or several.

use std::rc::Rc;
use std::thread;
use std::time::Duration;

use kvarena::backend::cuda::CudaOptions;
use kvarena::layout::LabelChannels;
use kvarena::{Backend, Engine, EngineConfig, KvDtype};

use crate::args::{Args, Switch};
use crate::built_in;
use crate::setup::{self, Unread};
use kvarena_host::config::ModelConfig;
use kvarena_host::error::{Error, Result};
use kvarena_host::gpu::device::Device;
use kvarena_host::gpu::error::GpuError;
use kvarena_host::gpu::products::Choice;
use kvarena_host::gpu::ranks::{RanksRunner, WeightSource};
use kvarena_host::gpu::runner::{GpuOptions, GpuRunner};
use kvarena_host::gpu::shape::{check_dtype, check_shape};
use kvarena_host::gpu::sparse::{self, Reading, first_channels};
use kvarena_host::gpu::weights::Share;
use kvarena_host::runner::Runner;
use kvarena_host::server::{Policy, Server};
use kvarena_host::sparse::channels;
use kvarena_host::text::Text;

/// Page tables, plans and graphs get 1 / `RESERVE` of the memory that weights and activations leave.
const RESERVE: u64 = 16;

/// A model and the checked options, before the weights are read.
pub struct Loaded {
    /// Shape of the model.
    pub config: ModelConfig,
    source: WeightSource,
    /// Tokenizer and chat template of the model.
    pub text: Text,
    policy: Policy,
    reading: Option<Reading>,
}

impl Loaded {
    /// Checks the options, and reads all files except those of weights and scales.
    ///
    /// # Errors
    /// A model or an option that no GPU supports, or a file that cannot be read.
    pub fn new(args: &Args) -> Result<Self> {
        check_dtype(args.kv_dtype)?;
        let (Unread { files, config }, text) = setup::model_files(args)?;
        check_shape(&config)?;
        let source = match files {
            _ if args.random_model.is_some() => WeightSource::Random(args.seed),
            Some(files) => WeightSource::Files(files),
            None => WeightSource::InMemory(built_in::WEIGHTS),
        };
        let reading = reading(args, &config)?;
        let policy = setup::policy(args, &config)?;
        Ok(Self { config, source, text, policy, reading })
    }

    /// Creates the server on one GPU, ready to serve.
    ///
    /// # Errors
    /// See [`Loaded::runner`] and [`Loaded::server`].
    pub fn one(&mut self, args: &Args) -> Result<Server<GpuRunner>> {
        let (runner, reading) = (self.runner(args)?, self.reading.take());
        self.server(args, runner, reading)
    }

    /// Creates the server on several GPUs, ready to serve.
    ///
    /// # Errors
    /// See [`Loaded::one`]; too few GPUs, no NCCL, a model that cannot be divided among them, or scales from a file.
    pub fn ranks(&mut self, args: &Args) -> Result<Server<RanksRunner>> {
        if setup::scales(args)?.is_some() {
            return Err(Error::request("scales from a file are for one GPU"));
        }
        let config = &self.config;
        let mut runner = RanksRunner::new(config, &self.source, options(args), args.tp as usize)?;
        let reading = self.reading.take();
        let channels = reading.as_ref().map(|reading| reading.labels.channels());
        if let Some(reading) = reading {
            runner.read_sparsely(config, reading)?;
        }
        let config = engine_config(args, runner.config(), runner.free_memory()?, channels)?;
        let mut engine = Engine::new(config, runner.backend()).map_err(setup::no_engine)?;
        runner.warm(engine.backend_mut(), &sizes(args))?;
        Ok(Server::new(runner, engine, self.policy))
    }

    /// Opens a GPU and loads the weights.
    ///
    /// # Errors
    /// No GPU, no cublasLt, or weights that cannot be read or do not fit.
    pub fn runner(&self, args: &Args) -> Result<GpuRunner> {
        let device = Rc::new(Device::open()?);
        let weights = Rc::new(self.source.weights(&device, &self.config, Share::WHOLE)?);
        Ok(GpuRunner::new(device, self.config.clone(), weights, options(args))?)
    }

    /// Creates a server. Its generating streams read the positions that `reading` selects, or all positions if it is
    /// `None`.
    ///
    /// # Errors
    /// An option that the engine does not support, scales that cannot be read, a pool that cannot be created, or a
    /// failed start of the runner.
    pub fn server(&self, args: &Args, mut runner: GpuRunner, reading: Option<Reading>) -> Result<Server<GpuRunner>> {
        let channels = reading.as_ref().map(|reading| reading.labels.channels());
        if let Some(reading) = reading {
            runner.read_sparsely(reading)?;
        }
        let free = runner.device().gpu.free_memory().map_err(GpuError::from)?;
        let config = engine_config(args, &self.config, free, channels)?;
        let options = CudaOptions { scales: setup::scales(args)?, ..runner.backend() };
        let mut engine = Engine::new(config, options).map_err(setup::no_engine)?;
        runner.warm(engine.backend_mut(), &sizes(args))?;
        Ok(Server::new(runner, engine, self.policy))
    }
}

/// Waits until all swap pages of an engine are ready.
///
/// # Errors
/// The memory cannot be pinned.
pub fn wait_for_swap_pages<B: Backend>(engine: &mut Engine<B>) -> Result<()> {
    let wanted = engine.shape().layout.swap_region_pages();
    while engine.backend().swap_pages() < wanted {
        engine.backend_mut().moved().map_err(|error| Error::run(error.to_string()))?;
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Returns an engine's config for `free` bytes of a GPU's memory. The pool stores `channels` label channels, if any.
/// With `--sparse`, a pool without channels has no more pages than one with channels.
fn engine_config(args: &Args, model: &ModelConfig, free: u64, channels: Option<u32>) -> Result<EngineConfig> {
    let mut bytes = free - free / RESERVE;
    if let Some(sparse) = args.sparse {
        // Without channels, the command line names no file of labels.
        let count = channels.map_or_else(|| sparse.channels(None), Ok)?;
        bytes = sparse::pool_bytes(model, (args.concurrency, count), bytes);
    }
    let config = setup::engine_config(args, model, bytes)?;
    match (args.sparse, channels) {
        (Some(sparse), Some(channels)) => Ok(sparse.engine(&config, channels)?.0),
        _ => Ok(config),
    }
}

/// Returns how streams select positions, if the command line names a file of channels. A bench without a file uses the
/// first channels. Rejects sparse reads that no GPU supports, before a GPU is opened.
fn reading(args: &Args, model: &ModelConfig) -> Result<Option<Reading>> {
    let Some(sparse) = args.sparse else { return Ok(None) };
    let refuse = |what| Err(Error::request(what));
    if args.kv_dtype != KvDtype::Bf16 {
        return refuse("--sparse on a GPU is for --kv-dtype bf16");
    }
    if args.recall {
        return refuse("--recall is for the CPU");
    }
    if args.labels.is_none() && args.bench.is_none() {
        if args.chat || args.serve.is_some() {
            return refuse("--sparse with --chat or --serve needs --labels");
        }
        if args.tp > 1 {
            return refuse("--sparse with --tp needs --labels");
        }
    }
    // Without --pages, this pool holds one sequence of the model's maximum length. An option that does not fit this
    // pool fits none.
    let pages = (model.max_len as u32).div_ceil(args.page_size.max(1));
    let one = Args { pages: Some(args.pages.unwrap_or(pages)), ..args.clone() };
    let config = setup::engine_config(&one, model, 0)?;
    let given = args.labels.as_deref().map(channels::read).transpose()?;
    let count = sparse.channels(given.as_ref().map(LabelChannels::channels))?;
    sparse.engine(&config, count)?;
    let labels = match given {
        Some(labels) => labels,
        None if args.bench.is_some() => first_channels(model, count),
        None => return Ok(None),
    };
    Reading { top: sparse.top, labels }.of_rank(model, Share::WHOLE).map(Some)
}

fn options(args: &Args) -> GpuOptions {
    GpuOptions {
        chunk: setup::chunk(args),
        concurrency: args.concurrency,
        drafts: args.draft.unwrap_or(0),
        trees: args.draft_tree,
        graphs: args.graphs == Switch::On,
        choice: Choice::Fastest,
        keep_logits: args.first_logits > 0 || args.logprobs,
        sums: args.sums.map(Into::into),
        keep_times: args.serve.is_none(),
    }
}

fn sizes(args: &Args) -> Vec<usize> {
    (1..=args.concurrency as usize).collect()
}
