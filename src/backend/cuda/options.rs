//! What a host chooses of a [`Cuda`], and how it is opened.

use super::error::CudaError;
use super::opened::Cuda;
use crate::backend::cuda::attention::latent as attend_latent;
use crate::backend::cuda::attention::variants::Variants;
use crate::backend::cuda::driver::gpu::Gpu;
use crate::backend::cuda::driver::stream::CudaStream;
use crate::backend::cuda::kernels::Selection;
use crate::backend::cuda::plan::image::StepLimits;
use crate::backend::cuda::plan::stage::Stage;
use crate::backend::cuda::plan::tables::Tables;
use crate::backend::cuda::store::labels::Labels;
use crate::backend::cuda::store::pool::Pool;
use crate::backend::{OpenBackend, OpenSteps, PlanError};
use crate::layout::{Dtype, KvScales, LabelChannels, PoolLayout, TableShape};

/// How a [`Cuda`] is to work.
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// The device.
    pub gpu: Gpu,
    /// The stream on which everything is launched, as a rule the host's own ([`CudaStream::from_raw`]). `None`, as it
    /// is by default, is the default stream.
    pub stream: Option<CudaStream>,
    /// Most new tokens of a step, padding included. Host and device memory for plans is sized by it.
    /// Default: 16,384.
    pub max_step_tokens: u32,
    /// Most rows of a step, padding included; 0, the default, stands for as many as the page tables
    /// have, and at least 256.
    pub max_step_rows: u32,
    /// What the numbers of a quantised pool are multiplied by, where scales are given
    /// ([`Scaling::Static`](crate::Scaling::Static)): those of what this rank holds ([`KvScales::local`]). Uploaded
    /// once. Default: `None`, 1 for all.
    pub scales: Option<KvScales>,
    /// Element type of the host's rows, where the pool is quantised: of k and v before they are stored, of q and out.
    /// Other pools take rows of their own type. Default: `None`, the pool's ([`KvDtype::rows`](crate::KvDtype::rows)).
    pub rows: Option<Dtype>,
    /// Which channels of K are labels, where the pool keeps some: those of what this rank holds
    /// ([`LabelChannels::local`]). Uploaded once. Default: `None`.
    pub labels: Option<LabelChannels>,
    /// Most tokens that rows of one new token may see together in a step that selects by labels, each row's rounded up
    /// to 256; four bytes of device memory for each and kv head, where the pool keeps labels. Rows that share pages
    /// count them each. Default: 0, as many as the pool has slots, and 256 for each row.
    pub select_tokens: u64,
    /// For tests: every span that can be is read once, be it cheaper or not.
    #[doc(hidden)]
    pub all_spans: bool,
    /// For tests: the compute capability, as 10 * major + minor, whose kernels serve in place of the device's. They are
    /// compiled for the device as before.
    #[doc(hidden)]
    pub selected_capability: Option<u32>,
}

impl CudaOptions {
    /// On `gpu`: the default stream, 16,384 tokens, rows by the tables.
    pub fn new(gpu: &Gpu) -> Self {
        Self {
            gpu: gpu.clone(),
            stream: None,
            max_step_tokens: 16 << 10,
            max_step_rows: 0,
            scales: None,
            rows: None,
            labels: None,
            select_tokens: 0,
            all_spans: false,
            selected_capability: None,
        }
    }
}

impl OpenBackend for CudaOptions {
    type Backend = Cuda;

    /// # Errors
    /// [`CudaError::PoolShape`] for latent rows of other lengths than 512 + 64, [`CudaError::Lists`] for a pool of f32
    /// or fp8 that keeps labels, [`CudaError::OutOfMemory`], [`CudaError::Scales`] or [`CudaError::Labels`]
    /// that are not for this pool, [`CudaError::RowsDtype`], a stream of another device, rows of more tokens than
    /// kernels count, or the driver's.
    fn open(
        self,
        layout: &PoolLayout,
        table: &TableShape,
        max_steps: u32,
    ) -> Result<Cuda, CudaError> {
        let Self { gpu, stream, max_step_tokens: tokens, max_step_rows, .. } = self;
        let (scales, all_spans) = (self.scales.as_ref(), self.all_spans);
        if let Some(scales) = scales {
            scales.check_pool(layout)?;
        }
        let (dtype, own) = (layout.dtype(), layout.dtype().rows());
        let rows_dtype = self.rows.unwrap_or(own);
        if rows_dtype != own && !dtype.is_quantised() {
            return Err(CudaError::RowsDtype { rows: rows_dtype, pool: dtype });
        }
        if let Some((group, reach)) = layout.groups().limited().next() {
            return Err(PlanError::Group { group, reach }.into());
        }
        attend_latent::check_shape(layout)?;
        LabelChannels::check_pool(self.labels.as_ref(), layout)?;
        let has_labels = layout.label_channels() > 0;
        if has_labels && (own == Dtype::F32 || dtype.is_quantised()) {
            return Err(CudaError::Lists { dtype });
        }
        let stream = stream.unwrap_or_else(|| CudaStream::default_of(&gpu));
        gpu.check_same(Some(stream.gpu().ordinal()))?;
        gpu.bind()?;
        let rows = match max_step_rows {
            0 => table.rows.max(256),
            rows => rows,
        };
        let limits = StepLimits { tokens, rows, all_spans };
        // A step takes a slot or two for each variant of attention.
        let uploads = 2 * max_steps as usize + 2;
        let capability = self.selected_capability.unwrap_or(gpu.capability());
        let selection = Selection::of(capability, layout, rows_dtype);
        let pool = Pool::new(&gpu, *layout, selection, (scales, self.labels.as_ref()))?;
        let room = match self.select_tokens {
            0 => layout.slot_count(),
            tokens => tokens,
        };
        let labels = match &self.labels {
            Some(channels) => Some(Labels::new(&gpu, &pool, channels, (room, rows))?),
            None => None,
        };
        Ok(Cuda {
            pool,
            labels,
            tables: Tables::new(&gpu, *table, layout, stream.raw())?,
            stage: Stage::new(&gpu, layout, limits, uploads)?,
            variants: Variants::default(),
            limits,
            copy_streams: None,
            steps: OpenSteps::new(max_steps),
            window: None,
            prepared: None,
            gpu,
            stream,
        })
    }
}
