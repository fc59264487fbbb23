//! An open backend on a GPU, and the host's calls in addition to [`Backend`](crate::Backend).

use super::error::CudaError;
use crate::backend::by_shape::ByShape;
use crate::backend::cuda::attention::graph_key::GraphKey;
use crate::backend::cuda::attention::split::SpanWork;
use crate::backend::cuda::attention::variant_table::Variants;
use crate::backend::cuda::driver::gpu::Gpu;
use crate::backend::cuda::driver::memory::DeviceBuffer;
use crate::backend::cuda::driver::stream::{CudaEvent, CudaStream};
use crate::backend::cuda::moves::swap_moves::SwapMoves;
use crate::backend::cuda::plan::image::{Image, StepLimits};
use crate::backend::cuda::plan::stage::Stage;
use crate::backend::cuda::plan::tables::Tables;
use crate::backend::cuda::store::labels::Labels;
use crate::backend::cuda::store::pool::Pool;
use crate::backend::{Attend, OpenSteps, check};
use crate::layout::{Dtype, PoolLayout};
use crate::plan::BatchPlan;

/// K and V on a GPU. [`CudaOptions`](super::CudaOptions) open it.
#[derive(Debug)]
pub struct Cuda {
    pub(super) gpu: Gpu,
    pub(super) stream: CudaStream,
    pub(super) pools: ByShape<Pool>,
    /// The labels, if the pool has some.
    pub(super) labels: Option<Labels>,
    pub(super) tables: Tables,
    pub(super) stage: Stage,
    pub(super) variants: Variants,
    pub(super) limits: StepLimits,
    /// Swap pages, if the pool has any.
    pub(super) swap: Option<SwapMoves>,
    pub(super) fewer_swap_pages: bool,
    pub(super) steps: OpenSteps,
    /// Prepared attention with a window or chunks, if any. If it is set, plans with trees are rejected.
    pub(super) limited: Option<Attend>,
    /// Number of compiled modules at the end of the last preparation.
    pub(super) prepared: Option<usize>,
}

/// Device addresses of the staged plan's arrays, for the host's own kernels, and its graph key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct StagedPlan {
    /// The key of the graphs that may be replayed for this plan.
    pub graph: GraphKey,
    pub(super) image: Image,
}

impl StagedPlan {
    /// Returns the slots of the new tokens in a track ([`BatchPlan::slots_of`]): i32 or i64 `[tokens]`, of the plan's
    /// width.
    pub fn slots_of(&self, track: u32) -> u64 {
        self.image.slots_of(track)
    }

    /// Returns the positions of the new tokens: u32 `[tokens]`.
    pub fn positions(&self) -> u64 {
        self.image.positions
    }

    /// Returns the rows: [`BatchRow`](crate::plan::BatchRow) `[rows]`.
    pub fn rows(&self) -> u64 {
        self.image.rows
    }
}

impl Cuda {
    /// Returns the device.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Returns the stream of all launches.
    pub fn stream(&self) -> &CudaStream {
        &self.stream
    }

    /// Uses another stream of the same device for all later launches.
    ///
    /// # Safety
    /// The host orders all earlier work, including opening and [`Cuda::prepare`], before the work of the new stream.
    /// Both streams use the same staged plan and page tables, from which kernels compute addresses.
    pub unsafe fn set_stream(&mut self, stream: CudaStream) {
        self.stream = stream;
        self.stage.switch_stream();
    }

    /// Returns the layout of the pool.
    pub fn layout(&self) -> &PoolLayout {
        self.pools.of_group(0).layout()
    }

    /// Returns the pool's memory, in the order of [`PoolLayout`]. It is empty if the host gave the memory
    /// ([`CudaOptions::pool`](super::CudaOptions::pool)).
    pub fn pool(&self) -> &DeviceBuffer {
        self.pools.of_group(0).memory()
    }

    /// Returns the element type of the host's rows for the layers of group 0: of k, v, q and out.
    pub fn rows(&self) -> Dtype {
        self.pools.of_group(0).rows()
    }

    /// Returns the fingerprint of a page's bytes: see [`PoolLayout::page_fingerprint`].
    pub fn page_fingerprint(&self) -> u64 {
        self.pools.of_group(0).fingerprint()
    }

    /// Returns the number of bytes of plans sent to the device.
    pub fn uploaded_bytes(&self) -> u64 {
        self.stage.sent_bytes()
    }

    /// Returns the staged step's work, the input of the time model, if the step reads a span once. For `benches/gpu`.
    #[doc(hidden)]
    pub fn span_work(&self) -> Option<SpanWork> {
        self.variants.span_work()
    }

    /// Waits for all submitted work, and returns the page tables on the device. For tests.
    ///
    /// # Errors
    /// Any failure of submitted work.
    pub fn table_words(&self) -> Result<Vec<u32>, CudaError> {
        self.tables.read()
    }

    /// Stages `plan`, whose step is open, for later launches and graphs.
    ///
    /// `begin` has staged it already, unless another plan was staged or a variant of attention was added since. Plan
    /// for a graph with [`plan_padded`](crate::Engine::plan_padded): the padding of a plan after its `begin` makes
    /// another plan.
    ///
    /// A launch stages its plan if necessary, but a graph cannot. Stage a plan, capture its launches, and replay the
    /// graph after staging any plan with the same [`StagedPlan::graph`].
    ///
    /// Work that is submitted after this call, such as graphs and the host's own kernels, waits until all layers of
    /// loaded pages have arrived. Without this call, each layer's calls wait only for the pages of their layer, so they
    /// may begin before other layers have arrived.
    ///
    /// # Errors
    /// * [`CudaError::Plan`] for an invalid plan, a step that is not open, or draft trees although attention with a
    ///   window or chunks was [prepared](Cuda::prepare).
    /// * [`CudaError::Limit`] for a step above the limits, also for too many tokens of rows with lists.
    /// * [`CudaError::NotStaged`] or [`CudaError::NotPrepared`] if a capture would have to send the plan or to wait for
    ///   a load. The driver's errors.
    pub fn stage(&mut self, plan: &BatchPlan<'_>) -> Result<StagedPlan, CudaError> {
        self.gpu.bind()?;
        let stream = self.stream.raw();
        self.check_open(plan)?;
        if let Some(attend) = &self.limited {
            check::window(plan, attend)?;
        }
        if let Some(labels) = self.labels.as_ref().filter(|labels| labels.used) {
            labels.check(plan)?;
        }
        self.before_pages()?;
        let image = self.stage.ensure(&self.gpu, plan, &mut self.variants, &self.tables, stream)?;
        let graph = self.stage.key(&image, &self.variants);
        Ok(StagedPlan { graph, image })
    }

    /// Records an event at the stream's end. When it is done, all earlier steps are done, and the host may call the
    /// engine's `complete`.
    pub fn record(&self) -> Result<CudaEvent, CudaError> {
        self.stream.mark()
    }
}
