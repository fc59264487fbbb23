//! [`KvArena`]: the engine, and the device of its tensors.

use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::Device;
use kvarena::backend::Either;
use kvarena::{Cpu, CpuOptions, Engine, EngineConfig, Extend, PlanSize, StepId, StepScratch};

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
    /// Its number in this process.
    id: u64,
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
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Ok(Self { engine, device: device.clone(), scratch: StepScratch::new(), id })
    }

    /// Plans a step and uploads its inputs.
    ///
    /// # Errors
    /// [`Error::Engine`] where [`Engine::plan_batch`] fails, or candle's error of the upload. Nothing has changed then.
    pub fn step(&mut self, items: &[Extend]) -> Result<Step<'_>, Error> {
        let Self { engine, device, scratch, id } = self;
        let plan = engine.plan_batch(scratch, items)?;
        Step::new(engine, plan, device, *id)
    }

    /// Plans a step of one token of each item, padded to so many rows, for graphs of few sizes. The inputs and
    /// the model's result have the rows of padding behind those of the items.
    ///
    /// # Errors
    /// As [`step`](KvArena::step); also for fewer rows than items, or an item of several tokens.
    pub fn step_padded(&mut self, items: &[Extend], rows: usize) -> Result<Step<'_>, Error> {
        let Self { engine, device, scratch, id } = self;
        let plan = engine.plan_padded(scratch, items, &[], PlanSize { rows, tokens: rows })?;
        Step::new(engine, plan, device, *id)
    }

    /// The device of the tensors.
    pub fn device(&self) -> &Device {
        &self.device
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn id(&self) -> u64 {
        self.id
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
