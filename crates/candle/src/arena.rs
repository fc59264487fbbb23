//! [`KvArena`]: the engine, and the device of its tensors.

use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::Device;
use kvarena::backend::Either;
use kvarena::plan::PlanSize;
use kvarena::{Cpu, CpuOptions, Engine, EngineConfig, Extend, StepId, StepScratch};

use crate::{Error, Step};

/// The backend of an arena: [`Cpu`], or `Cuda` on a GPU.
#[cfg(feature = "cuda")]
pub type Pool = Either<Cpu, kvarena::backend::cuda::Cuda>;

/// The backend of an arena: [`Cpu`]. With feature `cuda` it can also be `Cuda`.
#[cfg(not(feature = "cuda"))]
pub type Pool = Either<Cpu, kvarena::Null>;

#[cfg(feature = "cuda")]
type Options = Either<CpuOptions, kvarena::backend::cuda::CudaOptions>;
#[cfg(not(feature = "cuda"))]
type Options = Either<CpuOptions, kvarena::Null>;

/// K and V of all sequences of a model, on the device of its tensors.
pub struct KvArena {
    /// The host admits, extends and finishes sequences here.
    pub engine: Engine<Pool>,
    device: Device,
    scratch: StepScratch,
    /// The arena's number in this process.
    id: u64,
}

impl KvArena {
    /// Allocates the pool on a device. On a GPU the arena uses candle's stream.
    ///
    /// # Errors
    /// * [`Error::Engine`]: the config is invalid or does not fit in memory, the driver fails, or the
    ///   device is one of `Device::new_cuda`, whose stream differs in each thread. Use
    ///   `Device::new_cuda_with_stream`.
    /// * [`Error::Device`]: the device is neither a CPU nor, with feature `cuda`, a GPU.
    pub fn new(config: impl Into<EngineConfig>, device: &Device) -> Result<Self, Error> {
        let config = config.into();
        let options: Options = match device {
            Device::Cpu => Either::Left(CpuOptions::default()),
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => Either::Right(crate::gpu::options(cuda)?),
            other => return Err(Error::Device { location: other.location() }),
        };
        Self::open(config, options, device)
    }

    /// Takes tensors on a GPU as the pool: K and V of each layer, `[pages, page_size, kv_heads, head_dim]`, contiguous,
    /// in the pool's type (`u8` for a pool of fp8). The config's capacity is the tensors' number of pages. In a pool
    /// with groups, the tensors are those of group 0's layers. The arena uses candle's stream, and keeps the tensors.
    ///
    /// The model may read the tensors. If it writes them, later attention reads these numbers.
    ///
    /// # Errors
    /// * [`Error::Shape`], [`Error::Strides`] and [`Error::Dtype`] for a tensor that does not fit the pool.
    /// * [`Error::Device`] for a tensor that is not on the GPU of the first one, or has another stream.
    /// * [`Error::Engine`] as for [`KvArena::new`], also if the number of tensors is not that of the layers, or if the
    ///   pool has more planes than K and V.
    #[cfg(feature = "cuda")]
    pub fn over(config: impl Into<EngineConfig>, layers: &[[candle_core::Tensor; 2]]) -> Result<Self, Error> {
        let config = config.into();
        let layout = config.pool.layout().map_err(kvarena::EngineError::Config)?;
        let device = layers.first().map_or(&Device::Cpu, |[k, _]| k.device());
        let Device::Cuda(cuda) = device else { return Err(Error::Device { location: device.location() }) };
        let options = crate::gpu::options(cuda)?;
        let pool = Some(crate::gpu::given(&options.gpu, device, &layout, layers)?);
        let options = kvarena::backend::cuda::CudaOptions { pool, ..options };
        Self::open(config, Either::Right(options), device)
    }

    fn open(config: EngineConfig, options: Options, device: &Device) -> Result<Self, Error> {
        let engine = Engine::new(config, options)?;
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Ok(Self { engine, device: device.clone(), scratch: StepScratch::new(), id })
    }

    /// Plans a step and uploads its inputs.
    ///
    /// # Errors
    /// The errors of [`Engine::plan_batch`], as [`Error::Engine`], and candle's errors of the
    /// upload. An error leaves the sequences unchanged.
    pub fn step(&mut self, items: &[Extend]) -> Result<Step<'_>, Error> {
        let Self { engine, device, scratch, id } = self;
        let plan = engine.plan_batch(scratch, items)?;
        Step::new(engine, plan, device, *id)
    }

    /// Plans a step with one token of each item, padded to `rows` rows. A host that uses few values of `rows` needs few
    /// graphs. In the inputs and in the model's result, the padding follows the rows of the items.
    ///
    /// # Errors
    /// The errors of [`step`](KvArena::step). Fewer rows than items, or an item of several tokens, is also
    /// an [`Error::Engine`].
    pub fn step_padded(&mut self, items: &[Extend], rows: usize) -> Result<Step<'_>, Error> {
        let Self { engine, device, scratch, id } = self;
        let plan = engine.plan_padded(scratch, items, &[], PlanSize { rows, tokens: rows })?;
        Step::new(engine, plan, device, *id)
    }

    /// Returns the device of the tensors.
    pub fn device(&self) -> &Device {
        &self.device
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Commits and completes a launched step. On a GPU this may happen before the device has
    /// finished the step, because the stream orders all work on the pool.
    ///
    /// # Errors
    /// [`Error::Engine`] if an earlier step is still open, or the step is not open.
    pub fn close(&mut self, step: StepId) -> Result<(), Error> {
        self.engine.commit(step).map_err(kvarena::EngineError::from)?;
        // This also completes a later step that was dropped, unless a later step is open.
        let newest = self.engine.newest_step();
        let completed = self.engine.complete(newest).or_else(|_| self.engine.complete(step));
        Ok(completed.map_err(kvarena::EngineError::from)?)
    }
}
