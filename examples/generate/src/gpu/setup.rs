//! From the command line to a server on a GPU.

use std::rc::Rc;

use kvarena::backend::cuda::CudaOptions;
use kvarena::{Engine, KvDtype};

use super::device::Device;
use super::error::GpuError;
use super::forward::{check_dtype, check_shape};
use super::products::Choice;
use super::runner::{GpuOptions, GpuRunner};
use super::weights::Weights;
use crate::args::{Args, Switch};
use crate::config::ModelConfig;
use crate::error::Result;
use crate::model::Random;
use crate::server::Server;
use crate::setup;
use crate::text::Text;

/// Of the memory that weights and activations leave, this part is for page tables, plans and graphs.
const RESERVE: u64 = 16;

/// The server that the command line asks for, ready to serve.
///
/// # Errors
/// No GPU, no cublasLt, a model that cannot be used or does not fit, a pool that cannot be made.
pub fn server(args: &Args) -> Result<(Server<GpuRunner>, Text)> {
    check_dtype(KvDtype::from(args.kv_dtype))?;
    let dir = match args.random_model {
        Some(_) => None,
        None => Some(setup::model_dir(args)?),
    };
    let (config, text) = match (&dir, args.random_model) {
        (Some(dir), _) => {
            let config = ModelConfig::read(dir)?;
            let text = Text::read(dir, config.vocab)?;
            (config, text)
        }
        (None, shape) => (setup::config_of(shape.expect("no directory"))?, Text::default()),
    };
    check_shape(&config)?;
    let policy = setup::policy(args, &config)?;
    let device = Rc::new(Device::open()?);
    let weights = Rc::new(match &dir {
        Some(dir) => Weights::read(&device, &config, dir)?,
        None => Weights::random(&device, &config, Random { seed: args.seed })?,
    });
    let options = GpuOptions {
        chunk: setup::chunk(args),
        concurrency: args.concurrency,
        graphs: args.graphs == Switch::On,
        choice: Choice::Fastest,
        keep_logits: args.first_logits > 0 || args.logprobs,
        keep_times: args.serve.is_none(),
    };
    let runner = GpuRunner::new(device, config, weights, options)?;
    let free = runner.device().gpu.free_memory().map_err(GpuError::from)?;
    let config = setup::engine_config(args, &runner.forward().config, free - free / RESERVE)?;
    let options = CudaOptions { scales: setup::scales(args)?, ..runner.backend() };
    let mut engine = Engine::new(config, options).map_err(setup::no_engine)?;
    let mut runner = runner;
    let sizes: Vec<usize> = (1..=args.concurrency as usize).collect();
    runner.warm(engine.backend_mut(), &sizes)?;
    Ok((Server::new(runner, engine, policy), text))
}
