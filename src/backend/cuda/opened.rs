//! An open backend on a GPU, and what a host asks of it beside the calls of [`Backend`](crate::Backend).
//!
//! Not here: those calls (`calls.rs`), copies of pages to other memory (`moves/page_moves.rs`), opening (`options.rs`),
//! what is loaded before the first step (`prepare.rs`).

use super::error::CudaError;
use crate::backend::cuda::attention::graph_key::GraphKey;
use crate::backend::cuda::attention::split::SpanWork;
use crate::backend::cuda::attention::variants::Variants;
use crate::backend::cuda::driver::gpu::Gpu;
use crate::backend::cuda::driver::memory::DeviceBuffer;
use crate::backend::cuda::driver::stream::{CudaEvent, CudaStream};
use crate::backend::cuda::moves::copy::CopyStreams;
use crate::backend::cuda::plan::image::{Image, StepLimits};
use crate::backend::cuda::plan::stage::Stage;
use crate::backend::cuda::plan::tables::Tables;
use crate::backend::cuda::store::labels::Labels;
use crate::backend::cuda::store::pool::Pool;
use crate::backend::{OpenSteps, check};
use crate::layout::{Dtype, PoolLayout};
use crate::plan::BatchPlan;

/// K and V on a GPU. [`CudaOptions`](super::CudaOptions) open one.
#[derive(Debug)]
pub struct Cuda {
    pub(super) gpu: Gpu,
    pub(super) stream: CudaStream,
    pub(super) pool: Pool,
    /// Where it keeps some.
    pub(super) labels: Option<Labels>,
    pub(super) tables: Tables,
    pub(super) stage: Stage,
    pub(super) variants: Variants,
    pub(super) limits: StepLimits,
    pub(super) copy_streams: Option<CopyStreams>,
    pub(super) steps: OpenSteps,
    /// A window that attention was prepared for: then no plan may have trees.
    pub(super) window: Option<u32>,
    /// Modules that were loaded when it was last prepared.
    pub(super) prepared: Option<usize>,
}

/// Device addresses of the staged plan's arrays, for the host's own kernels, and which graphs it may replay.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct StagedPlan {
    /// i32 or i64 `[tokens]`, as the plan has it.
    pub slot_mapping: u64,
    /// u32 `[tokens]`.
    pub positions: u64,
    /// [`BatchRow`](crate::BatchRow) `[rows]`.
    pub rows: u64,
    /// Which graphs may be replayed for it.
    pub graph: GraphKey,
}

impl Cuda {
    /// The device.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// The stream that everything is launched on.
    pub fn stream(&self) -> &CudaStream {
        &self.stream
    }

    /// Launches on another stream of the same device from now on.
    ///
    /// # Safety
    /// The host orders the two: what was asked of the one before comes first, opening and [`Cuda::prepare`] too, since
    /// there is one staged plan and one set of tables, and kernels go where these say.
    pub unsafe fn set_stream(&mut self, stream: CudaStream) {
        self.stream = stream;
        self.stage.leave();
    }

    /// The pool.
    pub fn layout(&self) -> &PoolLayout {
        self.pool.layout()
    }

    /// The pool's memory, in the order that [`PoolLayout`] describes.
    pub fn pool(&self) -> &DeviceBuffer {
        self.pool.memory()
    }

    /// Element type of the host's rows: of k, v, q and out.
    pub fn rows(&self) -> Dtype {
        self.pool.rows()
    }

    /// What the bytes of a page mean: see [`PoolLayout::page_fingerprint`].
    pub fn page_fingerprint(&self) -> u64 {
        self.pool.fingerprint()
    }

    /// Bytes of plans sent to the device so far.
    pub fn uploaded_bytes(&self) -> u64 {
        self.stage.sent_bytes()
    }

    /// For `benches/gpu`: what the staged step's time is made of, if it reads a span once.
    #[doc(hidden)]
    pub fn span_work(&self) -> Option<SpanWork> {
        self.variants.span_work()
    }

    /// The page tables as they are on the device, after waiting for everything asked for. For tests.
    ///
    /// # Errors
    /// Whatever failed.
    pub fn table_words(&self) -> Result<Vec<u32>, CudaError> {
        self.tables.read()
    }

    /// Makes `plan`, whose step is open, the one that launches and graphs read; the same plan
    /// [padded](BatchPlan::padded) counts as another one.
    ///
    /// A launch does this by itself where needed. A graph cannot: capture the launches of a plan that is staged, and
    /// replay the graph after staging any plan with the same [`StagedPlan::graph`].
    ///
    /// # Errors
    /// A plan whose step is not open, that does not fit, with trees where a window was [prepared](Cuda::prepare), that
    /// a selection has no room for where there was one, or while the stream is captured.
    pub fn stage(&mut self, plan: &BatchPlan<'_>) -> Result<StagedPlan, CudaError> {
        self.gpu.bind()?;
        let stream = self.stream.raw();
        check::is_open(&self.steps, plan.step)?;
        check::window(plan, self.window)?;
        if let Some(labels) = self.labels.as_ref().filter(|labels| labels.used) {
            labels.check(plan)?;
        }
        let image = self.stage.ensure(&self.gpu, plan, &mut self.variants, &self.tables, stream)?;
        let graph = self.stage.key(&image, &self.variants);
        let Image { slots, positions, rows, .. } = image;
        Ok(StagedPlan { slot_mapping: slots, positions, rows, graph })
    }

    /// Marks the stream's end: when the event is done, so is every step launched so far, and the engine may be told
    /// with `complete`.
    ///
    /// # Errors
    /// The driver's.
    pub fn record(&self) -> Result<CudaEvent, CudaError> {
        self.stream.mark()
    }
}
