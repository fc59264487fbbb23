//! The options of a [`Cuda`], which open it.

use super::error::CudaError;
use super::opened::Cuda;
use crate::backend::by_shape::ByShape;
use crate::backend::cuda::attention::latent as attend_latent;
use crate::backend::cuda::attention::variant_table::Variants;
use crate::backend::cuda::driver::gpu::Gpu;
use crate::backend::cuda::driver::stream::CudaStream;
use crate::backend::cuda::kernels::Selection;
use crate::backend::cuda::moves::swap_moves::SwapMoves;
use crate::backend::cuda::plan::image::StepLimits;
use crate::backend::cuda::plan::stage::Stage;
use crate::backend::cuda::plan::tables::Tables;
use crate::backend::cuda::store::given::GivenPool;
use crate::backend::cuda::store::labels::Labels;
use crate::backend::cuda::store::memory::PoolMemory;
use crate::backend::cuda::store::pool::Pool;
use crate::backend::{OpenBackend, OpenSteps};
use crate::config::StepBounds;
use crate::layout::{Dtype, KvScales, LabelChannels, PoolLayout, TableShape};

/// Options of a [`Cuda`].
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// The device.
    pub gpu: Gpu,
    /// The stream of all launches, usually the host's own ([`CudaStream::from_raw`]). Default: `None`, the default
    /// stream.
    pub stream: Option<CudaStream>,
    /// Memory of the host for K and V. Default: `None`, the backend allocates the pool.
    pub pool: Option<GivenPool>,
    /// Maximum number of rows of a step, including padding. Default: 0, which means the number of page table rows, but
    /// at least 256.
    pub max_step_rows: u32,
    /// Static scales of a quantised pool ([`Scaling::Static`](crate::layout::Scaling::Static)), for the heads of this
    /// rank ([`KvScales::local`]). Default: `None`, all 1.
    pub scales: Option<KvScales>,
    /// Element type of the host's rows, if the pool is quantised: of k and v before the store, of q and of the output.
    /// Default: `None`, [`KvDtype::rows`](crate::KvDtype::rows) of the pool.
    pub rows: Option<Dtype>,
    /// Label channels of a pool with labels, for the heads of this rank ([`LabelChannels::local`]). Default: `None`.
    pub labels: Option<LabelChannels>,
    /// Maximum number of tokens that rows of one new token see together in a step that selects by labels; shared pages
    /// count for each row. Each row's number is rounded up to a multiple of 256. For this, the backend adds 256 tokens
    /// to the maximum for each row of a step. A pool with labels takes four bytes of device memory for each of these
    /// tokens and kv head. Default: 0, which means the pool's slots.
    pub select_tokens: u64,
    /// Whether a lack of swap memory, or of memory that the driver can pin, reduces the swap pages. Otherwise `open` or
    /// a later [`moved`](crate::Backend::moved) returns the error. Default: `false`.
    pub fewer_swap_pages: bool,
    /// For tests: reads every possible span once, at any cost.
    #[doc(hidden)]
    pub all_spans: bool,
    /// For tests: selects the kernels by this compute capability, as 10 * major + minor. The driver still compiles them
    /// for the device.
    #[doc(hidden)]
    pub selected_capability: Option<u32>,
}

impl CudaOptions {
    /// Returns the defaults for `gpu`.
    pub fn new(gpu: &Gpu) -> Self {
        Self {
            gpu: gpu.clone(),
            stream: None,
            pool: None,
            max_step_rows: 0,
            scales: None,
            rows: None,
            labels: None,
            select_tokens: 0,
            fewer_swap_pages: false,
            all_spans: false,
            selected_capability: None,
        }
    }

    /// Rejects options that do not fit the pool, and pools without kernels.
    fn check(&self, layout: &PoolLayout) -> Result<(), CudaError> {
        if let Some(scales) = &self.scales {
            scales.check_pool(layout)?;
        }
        for dtype in layout.views().map(|layout| layout.dtype()) {
            if let Some(rows) = self.rows
                && rows != dtype.rows()
                && !dtype.is_quantised()
            {
                return Err(CudaError::RowsDtype { rows, pool: dtype });
            }
        }
        attend_latent::check_shape(layout)?;
        LabelChannels::check_pool(self.labels.as_ref(), layout)?;
        let dtype = layout.dtype();
        let may_have_labels = dtype.rows() != Dtype::F32 && !dtype.is_quantised();
        let served = layout.label_channels() == 0 || may_have_labels;
        if served { Ok(()) } else { Err(CudaError::Lists { dtype }) }
    }
}

impl OpenBackend for CudaOptions {
    type Backend = Cuda;

    /// # Errors
    /// [`CudaError::PoolShape`] if latent rows are not 512 + 64 long or not alone in the pool.
    /// [`CudaError::ChunkPages`] if the page size does not divide a group's chunk size. [`CudaError::Limit`] for page
    /// tables that are too large. [`CudaError::Lists`] if a pool of f32 or fp8 has labels. [`CudaError::Scales`] or
    /// [`CudaError::Labels`] if they do not fit the pool. [`CudaError::RowsDtype`]. [`CudaError::OtherDevice`] for the
    /// stream. [`CudaError::Given`] if given memory does not fit the pool.
    /// [`CudaError::OutOfMemory`], [`CudaError::SwapMemory`]. The driver's errors.
    fn open(self, layout: &PoolLayout, table: &TableShape, bounds: impl Into<StepBounds>) -> Result<Cuda, CudaError> {
        self.check(layout)?;
        let Self { gpu, stream, max_step_rows, all_spans, .. } = self;
        let StepBounds { steps, tokens } = bounds.into();
        let stream = stream.unwrap_or_else(|| CudaStream::default_of(&gpu));
        gpu.check_same(Some(stream.gpu().ordinal()))?;
        gpu.bind()?;
        let rows = match max_step_rows {
            0 => table.rows.max(256),
            rows => rows,
        };
        let limits = StepLimits { tokens, rows, all_spans };
        // A step takes one upload slot, and more for masks, for extend and latent plans, and for many table writes. If
        // the ring is full, the host waits.
        let uploads = 2 * steps as usize + 2;
        let capability = self.selected_capability.unwrap_or(gpu.capability());
        let memory = PoolMemory::new(&gpu, layout, self.pool)?;
        if let Some(state) = layout.state() {
            // Rows of new sequences read page 0.
            memory.own().clear((u64::from(state.lanes) * state.lane_bytes) as usize, stream.raw())?;
        }
        let (scales, channels) = (self.scales.as_ref(), self.labels.as_ref());
        let mut shapes = 0..;
        let pools = ByShape::new(layout, |layout| {
            let rows = self.rows.unwrap_or(layout.dtype().rows());
            let selection = Selection::new(capability, layout, rows);
            let shape = shapes.next().expect("the numbers do not end");
            Pool::new(&gpu, memory.clone(), *layout, shape, selection, scales, channels)
        })?;
        let room = match self.select_tokens {
            0 => layout.slot_count(),
            tokens => tokens,
        };
        let labels = match &self.labels {
            Some(channels) => Some(Labels::new(&gpu, pools.of_group(0), channels, room, rows)?),
            None => None,
        };
        let swap = match layout.swap_region_pages() {
            0 => None,
            _ => Some(SwapMoves::new(&gpu, layout, pools.of_group(0).pages(), self.fewer_swap_pages)?),
        };
        Ok(Cuda {
            pools,
            labels,
            tables: Tables::new(&gpu, *table, layout, stream.raw())?,
            stage: Stage::new(&gpu, layout, table, limits, uploads)?,
            variants: Variants::default(),
            limits,
            swap,
            fewer_swap_pages: self.fewer_swap_pages,
            steps: OpenSteps::try_new(steps).map_err(|error| CudaError::OutOfMemory { bytes: error.bytes })?,
            limited: None,
            prepared: None,
            gpu,
            stream,
        })
    }
}
