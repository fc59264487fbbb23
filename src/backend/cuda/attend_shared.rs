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
    AttendParams, AttendSharedParams, DecodeWork, RowShare, SharedHead, SpanItem, SpanMeeting,
    SpanMember, SpanParts,
};
use super::raw::{RawStream, raw};
use super::split::{
    ITEM_ROWS, ITEMS_MAX, SHARED_ROWS_MAX, SPANS_MAX, SharedGrid, SharedSplit, SpanWork,
    SplitShape, TAIL_ROWS, Taken,
};
use super::sys;
use crate::layout::KvDtype;
use crate::plan::BatchPlan;

/// Variants of attention that may have it: the image has room for so many.
pub(super) const SHARED_VARIANTS_MAX: usize = 2;

/// A kernel for tails of each of [`TAIL_ROWS`].
type Kernels = [Attention<AttendSharedParams>; TAIL_ROWS.len()];

/// Most CTAs of a kernel for any device that a multiprocessor is given: registers leave room for no more.
const RESIDENT: u32 = 2;
/// Most work chunks of a multiprocessor.
const CHUNKS: u32 = 8;

/// A `match` over dtype and head_dim with the kernels of each.
macro_rules! general {
    ($key:expr, $($dtype:ident $name:literal $head_dim:literal: $($rows:literal $shared:literal)*;)*) => {
        match $key {
            $((KvDtype::$dtype, $head_dim) => {
                const KERNELS: Kernels = [$(attention!(
                    concat!("attend_shared_", $name, "_d", $head_dim, "_r", $rows),
                    128,
                    $shared
                )),*];
                Some(KERNELS)
            })*
            _ => None,
        }
    };
}

/// The kernels for such pools, where there are some.
pub(super) fn kernels(capability: u32, dtype: KvDtype, shape: &SplitShape) -> Option<Kernels> {
    if shape.window > 0 {
        return None;
    }
    if is_hopper(capability, shape) {
        return hopper_kernels(dtype);
    }
    general! { (dtype, shape.head_dim),
        Bf16 "bf16" 64: 8 75_776 16 81_920;
        Bf16 "bf16" 128: 8 100_480 16 100_480;
        Bf16 "bf16" 256: 8 99_840 16 99_840;
        F16 "f16" 64: 8 75_776 16 81_920;
        F16 "f16" 128: 8 100_480 16 100_480;
        F16 "f16" 256: 8 99_840 16 99_840;
    }
}

/// Whether kernels of compute capability 9.0 alone serve such pools.
fn is_hopper(capability: u32, shape: &SplitShape) -> bool {
    capability == 90 && shape.head_dim == 128
}

/// Those kernels.
fn hopper_kernels(dtype: KvDtype) -> Option<Kernels> {
    const BF16: Kernels = [
        attention!("attend_shared_bf16_d128_r8_sm90a", 384, 204_800),
        attention!("attend_shared_bf16_d128_r16_sm90a", 384, 196_608),
    ];
    const F16: Kernels = [
        attention!("attend_shared_f16_d128_r8_sm90a", 384, 204_800),
        attention!("attend_shared_f16_d128_r16_sm90a", 384, 196_608),
    ];
    match dtype {
        KvDtype::Bf16 => Some(BF16),
        KvDtype::F16 => Some(F16),
        _ => None,
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
        dtype: KvDtype,
        shape: SplitShape,
        limits: StepLimits,
        stream: RawStream,
    ) -> Result<Option<Self>, CudaError> {
        let (capability, multiprocessors) = (gpu.capability(), gpu.multiprocessors());
        let Some(kernels) = kernels(capability, dtype, &shape) else {
            return Ok(None);
        };
        let attention = &kernels[shape.narrowest()];
        let resident = gpu.resident(&attention.kernel, attention.threads)?.min(RESIDENT);
        let grid = if is_hopper(capability, &shape) {
            SharedGrid::hopper(multiprocessors)
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
        wide.map_or(Ok(()), |taken| gpu.load(&self.kernels[taken.tails].kernel))
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
    /// The addresses in `params` are those of rows for every token of the staged step.
    pub(super) unsafe fn launch(
        &self,
        gpu: &Gpu,
        splits: u64,
        mut attend: AttendParams,
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
        let Attention { kernel, threads } = &self.kernels[taken.tails];
        // SAFETY: the caller answers for the rows; plan, sums and counters are this variant's, for this grid.
        unsafe { gpu.launch(kernel, (self.grid.ctas, 1), (*threads, 1), stream, &params, start) }
    }
}

/// Copies records to offset `at`; gives the offset after them.
fn put<T: bytemuck::Pod>(bytes: &mut [u8], at: usize, records: &[T]) -> usize {
    let end = at + size_of_val(records);
    bytes[at..end].copy_from_slice(bytemuck::cast_slice(records));
    end
}

#[cfg(test)]
mod tests {
    use super::super::attend_kernels::tests::source;
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

    #[test]
    fn each_group_has_a_kernel_which_is_launched_as_it_says() {
        let devices = [(80, 64), (80, 128), (80, 256), (89, 128), (90, 64), (90, 128), (90, 256)];
        for (capability, head_dim) in devices {
            for (group, rows) in [(1, 8), (8, 8), (9, 16), (16, 16)] {
                for dtype in [KvDtype::F16, KvDtype::Bf16] {
                    let shape = shape(group, head_dim);
                    let kernels = kernels(capability, dtype, &shape).expect("they are");
                    let Attention { kernel, threads } = kernels[shape.narrowest()];
                    let target = if (capability, head_dim) == (90, 128) { "_sm90a" } else { "" };
                    let end = format!("_d{head_dim}_r{rows}{target}");
                    assert!(kernel.name.ends_with(&end), "{} {end}", kernel.name);
                    assert!(kernel.ptx.contains(&format!(".entry {}(", kernel.name)));
                    let bytes = format!("{},{:03}", kernel.shared / 1000, kernel.shared % 1000);
                    let launch = format!("block {threads}, {bytes} bytes of dynamic");
                    assert!(source(kernel.name).contains(&launch), "{}", kernel.name);
                }
            }
        }
    }

    /// Spans over pools of fp8 are read by each row for itself, as those over f32 are.
    #[test]
    fn spans_are_read_once_from_pools_of_16_bits_alone() {
        let with_window = SplitShape { window: 64, ..shape(4, 128) };
        for (capability, head_dim) in [(80, 128), (90, 128), (90, 64)] {
            for dtype in [KvDtype::F32, KvDtype::F16, KvDtype::Bf16, KvDtype::Fp8E4M3] {
                let is_served = matches!(dtype, KvDtype::F16 | KvDtype::Bf16);
                let found = kernels(capability, dtype, &shape(4, head_dim));
                assert_eq!(found.is_some(), is_served, "{dtype:?}");
                assert!(kernels(capability, dtype, &with_window).is_none());
            }
        }
    }
}
