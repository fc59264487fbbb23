//! Decode that reads shared spans once: the kernel that serves a variant of attention, and the memory it keeps.
//!
//! A step goes through it where its split accepts a span; other steps are launched as if it were not there.
//! Rows of a few new tokens take a kernel whose tails have room for them ([`TAIL_ROWS`]).
//!
//! Not here: the split (`split/shared.rs`), the kernel (`ptx/attend_shared_*.cu`).

use super::attend_kernels::attention;
use super::error::{CudaError, check};
use super::gpu::Gpu;
use super::image::StepLimits;
use super::kernels::Attention;
use super::launch::Start;
use super::memory::DeviceBuffer;
use super::params::{
    AttendParams, AttendSharedFp8Params, AttendSharedParams, DecodeWork, LayerScales, RowShare,
    SharedHead, SpanItem, SpanMeeting, SpanMember, SpanParts,
};
use super::pool::Pool;
use super::raw::{RawStream, raw};
use super::split::{
    ITEM_ROWS, ITEMS_MAX, SHARED_ROWS_MAX, SPANS_MAX, SharedGrid, SharedSplit, SpanWork,
    SplitShape, TAIL_ROWS, Taken,
};
use super::sys;
use crate::layout::Dtype;
use crate::plan::BatchPlan;

/// Variants of attention that may have it: the image has room for so many.
pub(super) const SHARED_VARIANTS_MAX: usize = 2;

/// A kernel over pools that hold rows as they are, or over fp8.
#[derive(Clone, Copy, Debug)]
pub(super) enum SharedKernel {
    Plain(Attention<AttendSharedParams>),
    Fp8(Attention<AttendSharedFp8Params>),
}

impl SharedKernel {
    fn resident(&self, gpu: &Gpu) -> Result<u32, CudaError> {
        match self {
            Self::Plain(Attention { kernel, threads }) => gpu.resident(kernel, *threads),
            Self::Fp8(Attention { kernel, threads }) => gpu.resident(kernel, *threads),
        }
    }

    fn load(&self, gpu: &Gpu) -> Result<(), CudaError> {
        match self {
            Self::Plain(Attention { kernel, .. }) => gpu.load(kernel),
            Self::Fp8(Attention { kernel, .. }) => gpu.load(kernel),
        }
    }

    /// # Safety
    /// As of [`Gpu::launch`], of the parameters and the scales.
    unsafe fn launch(
        &self,
        gpu: &Gpu,
        blocks: u32,
        (shared, scales): (AttendSharedParams, LayerScales),
        start: Start,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        let grid = (blocks, 1);
        match self {
            Self::Plain(Attention { kernel, threads }) => {
                // SAFETY: the caller's.
                unsafe { gpu.launch(kernel, grid, (*threads, 1), stream, &shared, start) }
            }
            Self::Fp8(Attention { kernel, threads }) => {
                let params = AttendSharedFp8Params { shared, scales };
                // SAFETY: the caller's.
                unsafe { gpu.launch(kernel, grid, (*threads, 1), stream, &params, start) }
            }
        }
    }
}

/// A kernel for tails of each of [`TAIL_ROWS`].
type Kernels = [SharedKernel; TAIL_ROWS.len()];

/// Most CTAs of a kernel for any device that a multiprocessor is given: registers leave room for no more.
const RESIDENT: u32 = 2;
/// Most work chunks of a multiprocessor.
const CHUNKS: u32 = 8;

/// A `match` over dtype of rows and head_dim with the kernels of each, which are of one kind.
macro_rules! general {
    (
        $key:expr, $kind:ident,
        $($dtype:ident $name:literal $head_dim:literal: $($rows:literal $shared:literal)*;)*
    ) => {
        match $key {
            $((Dtype::$dtype, $head_dim) => {
                const KERNELS: Kernels = [$(SharedKernel::$kind(attention!(
                    concat!("attend_shared_", $name, "_d", $head_dim, "_r", $rows),
                    128,
                    $shared
                ))),*];
                Some(KERNELS)
            })*
            _ => None,
        }
    };
}

/// The kernels for such pools and rows, where there are some.
pub(super) fn kernels(
    capability: u32,
    fp8: bool,
    rows: Dtype,
    shape: &SplitShape,
) -> Option<Kernels> {
    if shape.window > 0 {
        return None;
    }
    let key = (rows, shape.head_dim);
    if fp8 {
        return general! { key, Fp8,
            Bf16 "fp8_bf16" 64: 8 77_568 16 78_208;
            Bf16 "fp8_bf16" 128: 8 74_496 16 75_136;
            Bf16 "fp8_bf16" 256: 8 100_864 16 100_864;
            F16 "fp8_f16" 64: 8 77_568 16 78_208;
            F16 "fp8_f16" 128: 8 74_496 16 75_136;
            F16 "fp8_f16" 256: 8 100_864 16 100_864;
        };
    }
    if is_hopper(capability, fp8, shape) {
        return hopper_kernels(rows);
    }
    general! { key, Plain,
        Bf16 "bf16" 64: 8 75_776 16 81_920;
        Bf16 "bf16" 128: 8 100_480 16 100_480;
        Bf16 "bf16" 256: 8 99_840 16 99_840;
        F16 "f16" 64: 8 75_776 16 81_920;
        F16 "f16" 128: 8 100_480 16 100_480;
        F16 "f16" 256: 8 99_840 16 99_840;
    }
}

/// Whether kernels of compute capability 9.0 alone serve such pools.
fn is_hopper(capability: u32, fp8: bool, shape: &SplitShape) -> bool {
    capability == 90 && shape.head_dim == 128 && !fp8
}

/// Those kernels.
fn hopper_kernels(rows: Dtype) -> Option<Kernels> {
    const BF16: Kernels = [
        SharedKernel::Plain(attention!("attend_shared_bf16_d128_r8_sm90a", 384, 204_800)),
        SharedKernel::Plain(attention!("attend_shared_bf16_d128_r16_sm90a", 384, 196_608)),
    ];
    const F16: Kernels = [
        SharedKernel::Plain(attention!("attend_shared_f16_d128_r8_sm90a", 384, 204_800)),
        SharedKernel::Plain(attention!("attend_shared_f16_d128_r16_sm90a", 384, 196_608)),
    ];
    match rows {
        Dtype::Bf16 => Some(BF16),
        Dtype::F16 => Some(F16),
        Dtype::F32 => None,
    }
}

/// Where the plan's arrays stand, in bytes from its first word; they depend on the step's numbers alone.
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
    /// For so many work chunks, rows, and new tokens of members.
    fn new(works: usize, (tokens, rows): (usize, usize), member_count: usize) -> Self {
        let shares = size_of::<SharedHead>() + works * size_of::<DecodeWork>();
        let members = shares + rows * size_of::<RowShare>();
        let spans = (members + member_count * size_of::<SpanMember>()).next_multiple_of(32);
        // Rows of several new tokens may have items of their own.
        let span_count = SPANS_MAX as usize + if tokens > rows { rows } else { 0 };
        let items = spans + span_count * size_of::<SpanParts>();
        let end = items + ITEMS_MAX as usize * size_of::<SpanItem>();
        Self { works: size_of::<SharedHead>(), shares, members, spans, items, end }
    }
}

/// What reads spans once for one variant of attention.
#[derive(Debug)]
pub(super) struct SharedDecode {
    kernels: Kernels,
    split: SharedSplit,
    grid: SharedGrid,
    shape: SplitShape,
    /// What the staged step goes through, if it reads a span once.
    taken: Option<Taken>,
    /// Bytes from the image's splits to its plan.
    image_at: usize,
    offsets: Offsets,
    /// Partial sums: of tails, then of spans; what each is relative to behind it.
    partial: DeviceBuffer,
    /// A meeting for each CTA, then a counter for each (row, kv head).
    counters: DeviceBuffer,
}

impl SharedDecode {
    /// Bytes of the image that its plans may take.
    pub(super) fn image_bytes(gpu: &Gpu, limits: StepLimits) -> usize {
        let rows = limits.rows.min(SHARED_ROWS_MAX) as usize;
        // Of groups of one.
        let members = (limits.tokens as usize).min(rows * ITEM_ROWS as usize);
        SHARED_VARIANTS_MAX
            * Offsets::new((CHUNKS * gpu.multiprocessors()) as usize, (usize::MAX, rows), members)
                .end
    }

    /// Takes its memory, where a kernel serves such a pool on this device.
    pub(super) fn new(
        gpu: &Gpu,
        pool: &Pool,
        shape: SplitShape,
        limits: StepLimits,
        stream: RawStream,
    ) -> Result<Option<Self>, CudaError> {
        let (capability, multiprocessors) = (gpu.capability(), gpu.multiprocessors());
        let fp8 = pool.layout().dtype().is_quantised();
        let Some(kernels) = kernels(capability, fp8, pool.rows(), &shape) else {
            return Ok(None);
        };
        let resident = kernels[shape.narrowest()].resident(gpu)?.min(RESIDENT);
        let grid = if is_hopper(capability, fp8, &shape) {
            SharedGrid::hopper(multiprocessors)
        } else if fp8 {
            SharedGrid::over_fp8(multiprocessors, resident, shape.head_dim)
        } else {
            SharedGrid::general(multiprocessors, resident, shape.head_dim)
        };
        if resident == 0 || !grid.serves(&shape) {
            return Ok(None);
        }
        let rows = SharedSplit::rows_max(&shape) as usize;
        let heads = rows * shape.kv_heads as usize;
        let counters = DeviceBuffer::lasting(gpu, (Self::meeting_bytes(&grid) + 4 * heads) as u64)?;
        // SAFETY: the range is the buffer allocated above.
        let result = unsafe {
            sys::cuMemsetD32Async(counters.address(), 0, counters.bytes() as usize / 4, raw(stream))
        };
        check("cuMemsetD32Async", result)?;
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

    /// Bytes of a meeting for each CTA.
    fn meeting_bytes(grid: &SharedGrid) -> usize {
        grid.ctas as usize * size_of::<SpanMeeting>()
    }

    /// Query rows that the tails' sums have room for.
    fn own_rows(shape: &SplitShape, grid: &SharedGrid) -> usize {
        let (rows, part) = (SharedSplit::rows_max(shape), TAIL_ROWS[TAIL_ROWS.len() - 1]);
        part as usize * (2 * grid.warps * grid.ctas + rows * shape.kv_heads) as usize
    }

    /// What of a step could go through it.
    fn taken_of(&self, plan: &BatchPlan<'_>) -> Option<Taken> {
        if plan.rows.len() > SharedSplit::rows_max(&self.shape) as usize {
            return None;
        }
        self.shape.taken(&self.grid, plan.token_count(), plan.rows)
    }

    /// Loads the kernel that a step may go through, which no capture can.
    pub(super) fn load(&self, gpu: &Gpu, plan: &BatchPlan<'_>) -> Result<(), CudaError> {
        if plan.shared.spans.is_empty() {
            return Ok(());
        }
        // The narrowest was loaded with the variant.
        let wide = self.taken_of(plan).filter(|taken| taken.tails > self.shape.narrowest());
        wide.map_or(Ok(()), |taken| self.kernels[taken.tails].load(gpu))
    }

    /// Splits a step into the image, of which `image` is what begins `image_at` bytes behind the splits' begin; gives
    /// the bytes that are taken. `last`: nothing follows it, so that what is not used need not be sent.
    pub(super) fn split(
        &mut self,
        plan: &BatchPlan<'_>,
        image: &mut [u8],
        image_at: usize,
        last: bool,
    ) -> usize {
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

    /// What the staged step's time is made of, if it reads a span once.
    pub(super) fn work(&self) -> Option<SpanWork> {
        self.taken.map(|_| self.split.work)
    }

    /// What of the staged step goes through it, if anything does.
    pub(super) fn taken(&self) -> Option<&Taken> {
        self.taken.as_ref()
    }

    /// Launches it for the staged step, whose splits lie at `splits`.
    ///
    /// # Safety
    /// The addresses in `attend` are those of rows for every token of the staged step, `scales` the layer's.
    pub(super) unsafe fn launch(
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
        attend.counters = self.counters.address() + Self::meeting_bytes(&self.grid) as u64;
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
        let taken = self.taken.expect("the staged step goes through it");
        let kernel = &self.kernels[taken.tails];
        // SAFETY: the caller answers for the rows; plan, sums and counters are this variant's, for this grid.
        unsafe { kernel.launch(gpu, self.grid.ctas, (params, scales), start, stream) }
    }
}

/// Copies records to offset `at`; gives the offset after them.
fn put<T: bytemuck::Pod>(bytes: &mut [u8], at: usize, records: &[T]) -> usize {
    let end = at + size_of_val(records);
    bytes[at..end].copy_from_slice(bytemuck::cast_slice(records));
    end
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::attend_kernels::tests::{Parts, source};
    use super::super::split::DECODE_EXTRA;
    use super::*;

    fn shape(group: u32, head_dim: u32) -> SplitShape {
        SplitShape {
            kv_heads: 8,
            group,
            head_dim,
            window: 0,
            top: 0,
            extra: DECODE_EXTRA,
            decode_ctas: [132; 3],
            extend_ctas: 132,
            batch_max: 64,
            tokens_max: 64,
        }
    }

    fn parts(kernel: &SharedKernel) -> Parts {
        match kernel {
            SharedKernel::Plain(Attention { kernel, threads }) => {
                (kernel.name, kernel.ptx, kernel.shared, *threads)
            }
            SharedKernel::Fp8(Attention { kernel, threads }) => {
                (kernel.name, kernel.ptx, kernel.shared, *threads)
            }
        }
    }

    fn check(capability: u32, fp8: bool, rows: Dtype, shape: &SplitShape) {
        let kernels = kernels(capability, fp8, rows, shape).expect("they are");
        let (name, ptx, shared, threads) = parts(&kernels[shape.narrowest()]);
        let target = match (capability, shape.head_dim, fp8) {
            (90, 128, false) => "_sm90a",
            _ => "",
        };
        let of = if fp8 { "fp8_" } else { "" };
        let begin = format!("attend_shared_{of}{}_d", format!("{rows:?}").to_lowercase());
        let end = format!("d{}_r{}{target}", shape.head_dim, if shape.group > 8 { 16 } else { 8 });
        assert!(name.starts_with(&begin) && name.ends_with(&end), "{name} {begin} {end}");
        assert!(ptx.contains(&format!(".entry {name}(")));
        let bytes = format!("{},{:03}", shared / 1000, shared % 1000);
        let launch = format!("block {threads}, {bytes} bytes of dynamic");
        assert!(source(name).contains(&launch), "{name}");
    }

    /// The kernels that a device of this compute capability may be asked to run.
    pub(in super::super) fn offered(capability: u32) -> Vec<Parts> {
        let mut offered = Vec::new();
        for (rows, head_dim) in
            [Dtype::F16, Dtype::Bf16].into_iter().flat_map(|r| [64, 128, 256].map(|dim| (r, dim)))
        {
            for fp8 in [false, true] {
                let kernels = kernels(capability, fp8, rows, &shape(1, head_dim));
                offered.extend(kernels.iter().flatten().map(parts));
            }
        }
        offered
    }

    #[test]
    fn each_group_has_a_kernel_which_is_launched_as_it_says() {
        let devices = [(80, 64), (80, 128), (80, 256), (89, 128), (90, 64), (90, 128), (90, 256)];
        for (capability, head_dim) in devices {
            for shape in [1, 8, 9, 16].map(|group| shape(group, head_dim)) {
                for rows in [Dtype::F16, Dtype::Bf16] {
                    for fp8 in [false, true] {
                        check(capability, fp8, rows, &shape);
                    }
                }
            }
        }
    }

    /// Spans are read by each row for itself where rows are of f32, and where there is a window.
    #[test]
    fn spans_are_read_once_for_rows_of_16_bits_alone() {
        let with_window = SplitShape { window: 64, ..shape(4, 128) };
        for (capability, head_dim) in [(80, 128), (90, 128), (90, 64)] {
            for (fp8, rows) in [false, true]
                .into_iter()
                .flat_map(|fp8| [Dtype::F32, Dtype::F16, Dtype::Bf16].map(|rows| (fp8, rows)))
            {
                let found = kernels(capability, fp8, rows, &shape(4, head_dim));
                assert_eq!(found.is_some(), rows != Dtype::F32, "{rows:?}");
                assert!(kernels(capability, fp8, rows, &with_window).is_none());
            }
        }
    }
}
