//! Decode with shared spans: the kernel that reads spans once, and its memory for a variant of attention.
//!
//! A step uses this kernel only if its split accepts a span. For rows with several new tokens there are kernels with
//! larger suffixes ([`SUFFIX_ROWS`]).

use super::split::{
    ITEM_ROWS, ITEMS_MAX, RowAssignment, SHARED_ROWS_MAX, SPANS_MAX, SharedGrid, SharedSplit, SpanWork, SplitShape,
};
use crate::backend::cuda::driver::gpu::Gpu;
use crate::backend::cuda::driver::launch::{ExtraParams, Start};
use crate::backend::cuda::driver::memory::DeviceBuffer;
use crate::backend::cuda::driver::raw::RawStream;
use crate::backend::cuda::error::CudaError;
use crate::backend::cuda::kernels::params::{
    AttendParams, AttendSharedParams, DecodeWork, LayerScales, RowShare, SharedHead, SpanItem, SpanMeeting, SpanMember,
    SpanParts,
};
use crate::backend::cuda::kernels::{SUFFIX_ROWS, Selection, Shared};
use crate::backend::cuda::plan::image::{StepLimits, put};
use crate::plan::BatchPlan;

/// Maximum number of variants with this kernel, for which the image has space.
pub const SHARED_VARIANTS_MAX: usize = 2;

/// Maximum number of CTAs per multiprocessor, which registers limit.
const RESIDENT: u32 = 2;
/// Maximum number of work chunks per multiprocessor.
const CHUNKS: u32 = 8;

/// Byte offsets of the plan's arrays from its first word. They depend only on the step's numbers of tokens and rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Offsets {
    works: usize,
    shares: usize,
    members: usize,
    spans: usize,
    items: usize,
    end: usize,
}

impl Offsets {
    /// Returns the offsets for these numbers of work chunks, rows, and members' new tokens.
    fn new(works: usize, (tokens, rows): (usize, usize), member_count: usize) -> Self {
        let shares = size_of::<SharedHead>() + works * size_of::<DecodeWork>();
        let members = shares + rows * size_of::<RowShare>();
        let spans = (members + member_count * size_of::<SpanMember>()).next_multiple_of(32);
        // Each row of several new tokens may have its own items.
        let span_count = SPANS_MAX as usize + if tokens > rows { rows } else { 0 };
        let items = spans + span_count * size_of::<SpanParts>();
        let end = items + ITEMS_MAX as usize * size_of::<SpanItem>();
        Self { works: size_of::<SharedHead>(), shares, members, spans, items, end }
    }
}

/// The kernels of one variant of attention that read spans once, with their plan and memory.
#[derive(Debug)]
pub struct SharedDecode {
    kernels: Shared,
    split: SharedSplit,
    grid: SharedGrid,
    shape: SplitShape,
    /// The rows of the staged step that the kernel takes, if the step reads a span once.
    taken: Option<RowAssignment>,
    /// Bytes from the start of the image's splits to this kernel's plan.
    image_at: usize,
    offsets: Offsets,
    /// Partial sums of suffixes, then of spans; then for each row the maximum logit and the sum of its weights.
    partial: DeviceBuffer,
    /// A barrier for each CTA, then a counter for each (row, kv head).
    counters: DeviceBuffer,
}

impl SharedDecode {
    /// Returns the maximum number of image bytes for the plans.
    pub fn image_bytes(gpu: &Gpu, limits: StepLimits) -> usize {
        let rows = limits.rows.min(SHARED_ROWS_MAX) as usize;
        // The maximum is at one query head for each kv head.
        let members = (limits.tokens as usize).min(rows * ITEM_ROWS as usize);
        SHARED_VARIANTS_MAX * Offsets::new((CHUNKS * gpu.multiprocessors()) as usize, (usize::MAX, rows), members).end
    }

    /// Allocates the memory, if a kernel supports this pool on this device.
    pub fn new(
        gpu: &Gpu,
        selection: &Selection,
        shape: SplitShape,
        limits: StepLimits,
        stream: RawStream,
    ) -> Result<Option<Self>, CudaError> {
        let Some(kernels) = selection.shared(shape.window) else {
            return Ok(None);
        };
        let resident = gpu.resident(kernels[shape.narrowest()])?.min(RESIDENT);
        let grid = SharedGrid::new(kernels[0], gpu.multiprocessors(), resident);
        if resident == 0 || !grid.serves(&shape) {
            return Ok(None);
        }
        let rows = SharedSplit::rows_max(&shape) as usize;
        let heads = rows * shape.kv_heads as usize;
        let counters = DeviceBuffer::zeros(gpu, Self::barrier_bytes(&grid) + 4 * heads, stream)?;
        let rows = Self::own_rows(&shape, &grid) + grid.partial_rows();
        let floats = rows as u64 * u64::from(shape.head_dim + 2);
        Ok(Some(Self {
            kernels,
            split: SharedSplit::new(shape, grid, limits.all_spans),
            grid,
            shape,
            taken: None,
            image_at: 0,
            offsets: Offsets::default(),
            partial: DeviceBuffer::lasting(gpu, 4 * floats)?,
            counters,
        }))
    }

    /// Returns the bytes of the barriers of all CTAs.
    fn barrier_bytes(grid: &SharedGrid) -> usize {
        grid.ctas as usize * size_of::<SpanMeeting>()
    }

    /// Returns the number of query rows in the memory for sums of suffixes.
    fn own_rows(shape: &SplitShape, grid: &SharedGrid) -> usize {
        let (rows, part) = (SharedSplit::rows_max(shape), SUFFIX_ROWS[SUFFIX_ROWS.len() - 1]);
        part as usize * (2 * grid.warps * grid.ctas + rows * shape.kv_heads) as usize
    }

    /// Returns the rows that the kernel would take from a step; `None` if it does not take the step.
    fn taken_of(&self, plan: &BatchPlan<'_>) -> Option<RowAssignment> {
        if plan.rows.len() > SharedSplit::rows_max(&self.shape) as usize {
            return None;
        }
        self.shape.taken(&self.grid, plan.token_count(), plan.rows)
    }

    /// Compiles the kernel that a step with spans may use, because a later capture cannot compile it.
    pub fn compile(&self, gpu: &Gpu, plan: &BatchPlan<'_>) -> Result<(), CudaError> {
        // The narrowest kernel is compiled with the variant.
        if let Some(taken) = self.taken_of(plan).filter(|taken| taken.suffixes > self.shape.narrowest()) {
            gpu.compile(self.kernels[taken.suffixes])?;
        }
        Ok(())
    }

    /// Splits a step, writes the plan to `image` and returns the number of bytes to keep. `image` begins `image_at`
    /// bytes after the start of all splits. If `last` is set, no data follows, so unused bytes are not counted.
    pub fn split(&mut self, plan: &BatchPlan<'_>, image: &mut [u8], image_at: usize, last: bool) -> usize {
        self.image_at = image_at;
        let (tokens, rows) = (plan.token_count(), plan.rows.len());
        let works = self.grid.work_count(&self.shape);
        let offsets = Offsets::new(works, (tokens, rows), self.shape.members_max(tokens, rows));
        self.offsets = offsets;
        let taken = if plan.shared.spans.is_empty() { None } else { self.taken_of(plan) };
        let split = &mut self.split;
        self.taken = taken.filter(|&taken| split.plan(plan.rows, &plan.shared, taken));
        if self.taken.is_none() {
            return if last { 0 } else { offsets.end };
        }
        let SharedSplit { head, works, shares, members, spans, items, .. } = &self.split;
        let block = &mut image[..offsets.end];
        put(block, 0, std::slice::from_ref(head));
        put(block, offsets.works, works);
        put(block, offsets.shares, shares);
        put(block, offsets.members, members);
        put(block, offsets.spans, spans);
        let used = put(block, offsets.items, items);
        if last { used } else { offsets.end }
    }

    /// Returns the work of the staged step, if the step reads a span once.
    pub fn work(&self) -> Option<SpanWork> {
        self.taken.map(|_| self.split.work)
    }

    /// Returns the rows that the kernel takes from the staged step, if the step reads a span once.
    pub fn taken(&self) -> Option<&RowAssignment> {
        self.taken.as_ref()
    }

    /// Launches the kernel for the staged step, whose splits are at `splits`.
    ///
    /// # Safety
    /// The addresses in `attend` have rows for every token of the staged step, and `scales` belong to the layer.
    pub unsafe fn launch(
        &self,
        gpu: &Gpu,
        splits: u64,
        (mut attend, scales): (AttendParams, LayerScales),
        start: Start,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        let (offsets, at) = (&self.offsets, splits + self.image_at as u64);
        let own = Self::own_rows(&self.shape, &self.grid) as u64;
        let all = self.grid.partial_rows() as u64;
        let row_bytes = 4 * u64::from(self.shape.head_dim);
        attend.plan = at;
        attend.partial = self.partial.address();
        attend.counters = self.counters.address() + Self::barrier_bytes(&self.grid) as u64;
        attend.stripes = self.shape.decode_stripes(self.shape.narrowest());
        let span_partial = attend.partial + own * row_bytes;
        let tops = span_partial + all * row_bytes;
        let params = AttendSharedParams {
            attend,
            shares: at + offsets.shares as u64,
            spans: at + offsets.spans as u64,
            items: at + offsets.items as u64,
            members: at + offsets.members as u64,
            meetings: self.counters.address(),
            tops,
            span_partial,
            span_tops: tops + own * 8,
        };
        let taken = self.taken.expect("the staged step reads a span once");
        let (kernel, ctas) = (self.kernels[taken.suffixes], self.grid.ctas);
        let extra = ExtraParams { scales, ..ExtraParams::default() };
        // SAFETY: the caller guarantees the rows; plan, sums and counters belong to this variant and grid.
        unsafe { gpu.launch_attention(kernel, ctas, &params, &extra, start, stream) }
    }
}
