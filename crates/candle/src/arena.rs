//! [`KvArena`]: the engine, and the device of its tensors.

use candle_core::Device;
use kvarena::backend::Either;
use kvarena::{Cpu, CpuOptions, Engine, EngineConfig, Extend, StepId, StepScratch};

use crate::{Error, Step};

/// The backend of an arena: the CPU's, or with feature `cuda` the GPU's.
#[cfg(feature = "cuda")]
pub type Pool = Either<Cpu, kvarena::backend::cuda::Cuda>;

/// The backend of an arena: the CPU's. With feature `cuda` it can also be the GPU's.
#[cfg(not(feature = "cuda"))]
pub type Pool = Either<Cpu, kvarena::Null>;

#[cfg(feature = "cuda")]
type Options = Either<CpuOptions, kvarena::backend::cuda::CudaOptions>;
#[cfg(not(feature = "cuda"))]
type Options = Either<CpuOptions, kvarena::Null>;

/// K and V of all sequences of a model, on the device of its tensors.
pub struct KvArena {
    /// The engine: sequences are admitted, extended and finished here.
    pub engine: Engine<Pool>,
    device: Device,
    scratch: StepScratch,
}

impl KvArena {
    /// Allocates the pool on a device, on a GPU in candle's stream.
    ///
    /// # Errors
    /// [`Error::Engine`] for a config that is not valid or does not fit memory. [`Error::Device`] for a device that is
    /// neither a CPU nor, with feature `cuda`, a GPU. On a GPU also for a device of `Device::new_cuda`, whose stream
    /// differs in each thread: take `Device::new_cuda_with_stream`.
    pub fn new(config: impl Into<EngineConfig>, device: &Device) -> Result<Self, Error> {
        let config = config.into();
        let options: Options = match device {
            Device::Cpu => Either::Left(CpuOptions::default()),
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => Either::Right(crate::gpu::options(cuda)?),
            other => return Err(Error::Device { location: other.location() }),
        };
        let engine = Engine::new(config, options)?;
        Ok(Self { engine, device: device.clone(), scratch: StepScratch::new() })
    }

    /// Plans a step and uploads its inputs.
    ///
    /// # Errors
    /// [`Error::Engine`] where [`Engine::plan_batch`] fails, or candle's error of the upload. Nothing has changed then.
    pub fn step(&mut self, items: &[Extend]) -> Result<Step<'_>, Error> {
        let Self { engine, device, scratch } = self;
        let plan = engine.plan_batch(scratch, items)?;
        Step::new(engine, plan, device)
    }

    /// Ends a launched step: commits it, and completes it. On a GPU the stream orders all work on the pool, so the
    /// step may end before the device has finished it.
    ///
    /// # Errors
    /// [`Error::Engine`]: steps end in the order in which they were planned.
    pub fn close(&mut self, step: StepId) -> Result<(), Error> {
        self.engine.commit(step).map_err(kvarena::EngineError::from)?;
        Ok(self.engine.complete(step).map_err(kvarena::EngineError::from)?)
    }
}
