//! From the command line to a server on one GPU or several.

use std::rc::Rc;

use kvarena::backend::cuda::CudaOptions;
use kvarena::{Engine, KvDtype};

use super::device::Device;
use super::error::GpuError;
use super::products::Choice;
use super::ranks::{RanksRunner, Source};
use super::runner::{GpuOptions, GpuRunner};
use super::shape::{check_dtype, check_shape};
use super::weights::Share;
use crate::args::{Args, Switch};
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::runner::Runner;
use crate::server::Server;
use crate::setup;
use crate::text::Text;

/// Of the memory that weights and activations leave, this part is for page tables, plans and graphs.
const RESERVE: u64 = 16;

/// The server that the command line asks for on one GPU, ready to serve.
///
/// # Errors
/// No GPU, no cublasLt, a model that cannot be used or does not fit, a pool that cannot be made.
pub fn server(args: &Args) -> Result<(Server<GpuRunner>, Text)> {
    let (config, source, text) = model(args)?;
    check_shape(&config)?;
    let policy = setup::policy(args, &config)?;
    let device = Rc::new(Device::open()?);
    let weights = Rc::new(source.weights(&device, &config, Share::WHOLE)?);
    let mut runner = GpuRunner::new(device, config, weights, options(args))?;
    let free = runner.device().gpu.free_memory().map_err(GpuError::from)?;
    let config = setup::engine_config(args, &runner.forward().config, free - free / RESERVE)?;
    let options = CudaOptions { scales: setup::scales(args)?, ..runner.backend() };
    let mut engine = Engine::new(config, options).map_err(setup::no_engine)?;
    runner.warm(engine.backend_mut(), &sizes(args))?;
    Ok((Server::new(runner, engine, policy), text))
}

/// The same on several GPUs.
///
/// # Errors
/// As [`server`]; fewer GPUs, no NCCL, or a model that cannot be spread so.
pub fn ranks_server(args: &Args) -> Result<(Server<RanksRunner>, Text)> {
    if setup::scales(args)?.is_some() {
        return Err(Error::request("scales from a file are for one GPU"));
    }
    let (config, source, text) = model(args)?;
    let policy = setup::policy(args, &config)?;
    let mut runner = RanksRunner::new(&config, &source, options(args), args.tp as usize)?;
    let free = runner.free_memory()?;
    let config = setup::engine_config(args, runner.config(), free - free / RESERVE)?;
    let mut engine = Engine::new(config, runner.backend()).map_err(setup::no_engine)?;
    runner.warm(engine.backend_mut(), &sizes(args))?;
    Ok((Server::new(runner, engine, policy), text))
}

/// The model's shape, where its weights come from, and its way with text.
fn model(args: &Args) -> Result<(ModelConfig, Source, Text)> {
    check_dtype(KvDtype::from(args.kv_dtype))?;
    if let Some(shape) = args.random_model {
        return Ok((setup::config_of(shape)?, Source::Random(args.seed), Text::default()));
    }
    let dir = setup::model_dir(args)?;
    let config = ModelConfig::read(&dir)?;
    let text = Text::read(&dir, config.vocab)?;
    Ok((config, Source::Files(dir), text))
}

fn options(args: &Args) -> GpuOptions {
    GpuOptions {
        chunk: setup::chunk(args),
        concurrency: args.concurrency,
        drafts: args.draft.unwrap_or(0),
        graphs: args.graphs == Switch::On,
        choice: Choice::Fastest,
        keep_logits: args.first_logits > 0 || args.logprobs,
        sums: args.sums,
        keep_times: args.serve.is_none(),
    }
}

fn sizes(args: &Args) -> Vec<usize> {
    (1..=args.concurrency as usize).collect()
}
