//! An open backend on a GPU, and the host's calls in addition to [`Backend`](crate::Backend).
//!
//! Not here: the calls of `Backend` (`calls.rs`), copies of pages to other memory (`moves/page_moves.rs`), opening
//! (`options.rs`), loading before the first step (`prepare.rs`).

use super::error::CudaError;
use crate::backend::by_shape::ByShape;
use crate::backend::cuda::attention::graph_key::GraphKey;
use crate::backend::cuda::attention::split::SpanWork;
use crate::backend::cuda::attention::variants::Variants;
use crate::backend::cuda::driver::gpu::Gpu;
use crate::backend::cuda::driver::memory::DeviceBuffer;
use crate::backend::cuda::driver::stream::{CudaEvent, CudaStream};
use crate::backend::cuda::moves::host_moves::HostMoves;
use crate::backend::cuda::plan::image::{Image, StepLimits};
use crate::backend::cuda::plan::stage::Stage;
use crate::backend::cuda::plan::tables::Tables;
use crate::backend::cuda::store::labels::Labels;
use crate::backend::cuda::store::pool::Pool;
use crate::backend::{Attend, OpenSteps, check};
use crate::layout::{Dtype, PoolLayout};
use crate::plan::BatchPlan;

/// K and V on a GPU. [`CudaOptions`](super::CudaOptions) open one.
#[derive(Debug)]
pub struct Cuda {
    pub(super) gpu: Gpu,
    pub(super) stream: CudaStream,
    pub(super) pools: ByShape<Pool>,
    /// The labels, if the pool keeps some.
    pub(super) labels: Option<Labels>,
    pub(super) tables: Tables,
    pub(super) stage: Stage,
    pub(super) variants: Variants,
    pub(super) limits: StepLimits,
    /// Host pages, if the pool has any.
    pub(super) host: Option<HostMoves>,
    pub(super) fewer_host_pages: bool,
    pub(super) steps: OpenSteps,
    /// Prepared attention with a window or chunks, if any was; plans may then have no trees.
    pub(super) limited: Option<Attend>,
    /// Number of modules loaded at the last preparation.
    pub(super) prepared: Option<usize>,
}

/// Device addresses of the staged plan's arrays, for the host's own kernels, and the key of its graphs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct StagedPlan {
    /// i32 or i64 `[tokens]`, as in the plan.
    pub slot_mapping: u64,
    /// u32 `[tokens]`.
    pub positions: u64,
    /// [`BatchRow`](crate::BatchRow) `[rows]`.
    pub rows: u64,
    /// The key of the graphs that may be replayed for this plan.
    pub graph: GraphKey,
    /// The slots of the second track, and bytes from track to track.
    track_slots: u64,
    track_bytes: u64,
}

impl StagedPlan {
    /// Returns the slots of the new tokens in a track, as [`BatchPlan::slots_of`]. Track 0 is `slot_mapping`.
    pub fn slots_of(&self, track: u32) -> u64 {
        match track.checked_sub(1) {
            None => self.slot_mapping,
            Some(index) => self.track_slots + u64::from(index) * self.track_bytes,
        }
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

    /// Launches on another stream of the same device from now on.
    ///
    /// # Safety
    /// The host orders the two streams: the work on the old stream, opening and [`Cuda::prepare`] included, comes
    /// first. Both streams share one staged plan and one set of page tables, which determine the addresses that kernels
    /// access.
    pub unsafe fn set_stream(&mut self, stream: CudaStream) {
        self.stream = stream;
        self.stage.leave();
    }

    /// Returns the layout of the pool.
    pub fn layout(&self) -> &PoolLayout {
        self.pools.of(0).layout()
    }

    /// Returns the pool's memory, in the order of [`PoolLayout`].
    pub fn pool(&self) -> &DeviceBuffer {
        self.pools.of(0).memory()
    }

    /// Returns the element type of the host's rows: of k, v, q and out.
    pub fn rows(&self) -> Dtype {
        self.pools.of(0).rows()
    }

    /// Returns the fingerprint of a page's bytes: see [`PoolLayout::page_fingerprint`].
    pub fn page_fingerprint(&self) -> u64 {
        self.pools.of(0).fingerprint()
    }

    /// Returns the bytes of plans sent to the device.
    pub fn uploaded_bytes(&self) -> u64 {
        self.stage.sent_bytes()
    }

    /// Returns the model of the staged step's time, if the step reads a span once; for `benches/gpu`.
    #[doc(hidden)]
    pub fn span_work(&self) -> Option<SpanWork> {
        self.variants.span_work()
    }

    /// Returns the page tables on the device after waiting for all submitted work. For tests.
    ///
    /// # Errors
    /// Any failure of submitted work.
    pub fn table_words(&self) -> Result<Vec<u32>, CudaError> {
        self.tables.read()
    }

    /// Stages `plan`, whose step is open: later launches and graphs read it. `begin` has staged it already, unless
    /// another plan was staged since. The same plan [padded](BatchPlan::padded) later counts as another plan; one
    /// [padded from the start](crate::Engine::plan_padded) is sent once.
    ///
    /// A launch stages its plan if necessary. A graph cannot: stage a plan, capture its launches, and replay the graph
    /// after staging any plan with the same [`StagedPlan::graph`].
    ///
    /// # Errors
    /// Returns an error if the plan's step is not open, if the plan does not fit, if it has trees although a window was
    /// [prepared](Cuda::prepare), if it exceeds the memory for a selection, or while the stream is captured.
    pub fn stage(&mut self, plan: &BatchPlan<'_>) -> Result<StagedPlan, CudaError> {
        self.gpu.bind()?;
        let stream = self.stream.raw();
        check::is_open(&self.steps, plan.step)?;
        self.limited.as_ref().map_or(Ok(()), |attend| check::window(plan, attend))?;
        if let Some(labels) = self.labels.as_ref().filter(|labels| labels.used) {
            labels.check(plan)?;
        }
        let image = self.stage.ensure(&self.gpu, plan, &mut self.variants, &self.tables, stream)?;
        let graph = self.stage.key(&image, &self.variants);
        let Image { slots, track_slots, track_bytes, positions, rows, .. } = image;
        let slot_mapping = slots;
        Ok(StagedPlan { slot_mapping, positions, rows, graph, track_slots, track_bytes })
    }

    /// Records an event at the stream's end. When the event is done, all steps launched before it are done, and the
    /// host may call the engine's `complete`.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn record(&self) -> Result<CudaEvent, CudaError> {
        self.stream.mark()
    }
}
