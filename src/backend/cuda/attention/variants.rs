//! Attention launches, and the memory that each variant of attention keeps.
//!
//! A *variant* has its own query heads, sliding window and length of lists: a step is split for each. A model has one
//! variant, or two where local and global layers alternate. The first launch of a variant makes its memory; from then
//! on every step is split for it when its plan is staged.
//!
//! Not here: the split itself (`split/`), the kernels (`ptx/src`).

use super::graph_key::KEY_VARIANTS;
use super::latent::LatentVariants;
use super::shared::{SHARED_VARIANTS_MAX, SharedDecode};
use super::split::{DECODE_ROWS, SpanWork, Split, SplitCount, SplitShape, decode_extra};
use crate::backend::Attend;
use crate::backend::cuda::driver::gpu::Gpu;
use crate::backend::cuda::driver::launch::{ExtraParams, Start};
use crate::backend::cuda::driver::memory::DeviceBuffer;
use crate::backend::cuda::driver::raw::{RawStream, is_capturing, raw};
use crate::backend::cuda::driver::sys;
use crate::backend::cuda::error::{CudaError, check};
use crate::backend::cuda::kernels::params::{
    AttendParams, DecodeWork, LayerScales, Lists, wide_magic,
};
use crate::backend::cuda::kernels::{Decodes, Kernel, Selection};
use crate::backend::cuda::plan::image::{Image, StepLimits};
use crate::backend::cuda::plan::ring::{Load, UploadRing};
use crate::backend::cuda::store::pool::Pool;
use crate::layout::PoolLayout;
use crate::plan::{BatchPlan, BatchRow};

/// Variants that the image has room for; twice as many where the pool keeps labels.
const VARIANTS_MAX: usize = 8;
/// No kernel has more CTAs than this on one multiprocessor.
const RESIDENT_MAX: u32 = 8;
/// Those of a decode kernel for more rows than one token's: registers and shared memory leave room for no more.
const WIDE_RESIDENT: u32 = 2;

/// Query heads, window (0: none), positions of a list (0: none, all is read), and whether logits have the sign of their
/// scores.
type VariantKey = (u32, u32, u32, bool);

/// Slots that the positions of a step's lists stand for, as kernels make them.
#[derive(Debug)]
pub(in crate::backend::cuda) struct ListBuffers {
    /// u32 `[rows, kv_heads, top]`.
    pub listed: DeviceBuffer,
    /// u32 `[rows, kv_heads]`.
    pub counts: DeviceBuffer,
}

/// One variant of attention: its split, and the memory of its two kernels.
#[derive(Debug)]
struct Variant {
    key: VariantKey,
    decode: Decodes,
    extend: &'static Kernel,
    /// In its place where rows are trees, and in graphs, which serve those too: where it knows none.
    trees: Option<&'static Kernel>,
    split: Split,
    /// Where attention is over lists.
    lists: Option<ListBuffers>,
    /// Reads shared spans once, where a kernel does.
    shared: Option<SharedDecode>,
    /// What the staged step came to.
    count: SplitCount,
    /// Bytes from the image's splits to this variant's.
    image_at: usize,
    /// The extend plan on the device.
    extend_plan: DeviceBuffer,
    /// Partial sums: of decode, then of extend.
    partial: DeviceBuffer,
    /// Counters: of decode, then of extend. Zero between launches.
    counters: DeviceBuffer,
}

/// The variants of attention met so far. Rows of f32 need none.
#[derive(Debug, Default)]
pub(in crate::backend::cuda) struct Variants {
    list: Vec<Variant>,
    /// Those of a latent pool, which has no others.
    pub(in crate::backend::cuda) latent: LatentVariants,
}

impl Variants {
    pub(in crate::backend::cuda) fn len(&self) -> usize {
        self.list.len() + self.latent.len()
    }

    /// What the staged step's time is made of, if the first variant reads a span of it once.
    pub(in crate::backend::cuda) fn span_work(&self) -> Option<SpanWork> {
        self.list.first()?.shared.as_ref()?.work()
    }

    /// Bytes of the image that the variants' decode splits take.
    pub(in crate::backend::cuda) fn image_bytes(
        gpu: &Gpu,
        layout: &PoolLayout,
        limits: StepLimits,
    ) -> usize {
        let works = (gpu.multiprocessors() * RESIDENT_MAX) as usize * size_of::<DecodeWork>();
        variants_max(layout) * (works + limits.rows as usize * size_of::<BatchRow>())
    }

    /// Bytes of the largest extend plan, or that of latent rows.
    pub(in crate::backend::cuda) fn extend_bytes(
        gpu: &Gpu,
        layout: &PoolLayout,
        limits: StepLimits,
    ) -> usize {
        let ctas = gpu.multiprocessors() * RESIDENT_MAX;
        let shape = SplitShape {
            kv_heads: 1,
            group: 16,
            head_dim: layout.head_dim(),
            window: 0,
            top: 0,
            extra: decode_extra(layout.dtype().is_quantised()),
            decode_ctas: [ctas; DECODE_ROWS.len()],
            extend_ctas: ctas,
            batch_max: limits.rows,
            tokens_max: limits.tokens,
        };
        (4 * shape.extend_words()).max(LatentVariants::plan_bytes(gpu, layout, limits))
    }

    /// Loads the decode kernels that a step takes: those for more rows than one token's wait for the first step that
    /// wants them, which no capture can stage.
    pub(in crate::backend::cuda) fn load(
        &self,
        gpu: &Gpu,
        plan: &BatchPlan<'_>,
    ) -> Result<(), CudaError> {
        let (tokens, rows) = (plan.token_count(), plan.rows.len());
        self.list.iter().try_for_each(|variant| {
            let shape = variant.split.shape();
            let shared = variant.shared.as_ref();
            shared.map_or(Ok(()), |shared| shared.load(gpu, plan))?;
            let width = shape.width(tokens, rows);
            // The narrowest was loaded with the variant.
            if width == shape.narrowest() {
                return Ok(());
            }
            gpu.load(variant.decode_of(width)).map(|_| ())
        })
    }

    /// Splits a step for every variant, into the image from `at` on; gives the offset after them.
    pub(in crate::backend::cuda) fn split(
        &mut self,
        plan: &BatchPlan<'_>,
        image: &mut [u8],
        at: usize,
    ) -> usize {
        self.latent.split(plan);
        let (mut end, count) = (at, self.list.len());
        for (i, variant) in self.list.iter_mut().enumerate() {
            let bytes = 4 * variant.split.shape().decode_words();
            let (words, rest) = image[end..].split_at_mut(bytes);
            let words = bytemuck::cast_slice_mut(words);
            variant.image_at = end - at;
            end += bytes;
            if variant.lists.is_some() {
                let places = &mut rest[..size_of_val(plan.rows)];
                end += places.len();
                let places = bytemuck::cast_slice_mut(places);
                variant.count = variant.split.plan_selected(plan.rows, places, words);
                continue;
            }
            if let Some(shared) = &mut variant.shared {
                let (image_at, last) = (end - at, i + 1 == count);
                end += shared.split(plan, rest, image_at, last);
            }
            variant.count = match variant.shared.as_ref().and_then(SharedDecode::taken) {
                Some(taken) => variant.split.plan_left(plan.rows, taken),
                None => variant.split.plan(plan.rows, plan.token_count(), words),
            };
        }
        end
    }

    /// Sends the extend plans of the step that was split last, unless every row has one token or none to compute.
    pub(in crate::backend::cuda) fn send_extend(
        &self,
        gpu: &Gpu,
        decode_only: bool,
        ring: &mut UploadRing,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        self.latent.send(gpu, ring, stream)?;
        for variant in &self.list {
            if decode_only && variant.count.extend_items == 0 {
                continue;
            }
            let bytes: &[u8] = bytemuck::cast_slice(variant.split.extend_words());
            let mut upload = ring.acquire(stream)?;
            upload.bytes()[..bytes.len()].copy_from_slice(bytes);
            let (image_bytes, image) = (bytes.len(), variant.extend_plan.address());
            let load = Load { image_bytes, image, writes_at: 0, writes: 0, words: 0 };
            upload.send(gpu, &load, stream)?;
        }
        Ok(())
    }

    /// The variant's index, making its memory where it is new. Rows of f32 have no variants.
    pub(in crate::backend::cuda) fn prepare(
        &mut self,
        gpu: &Gpu,
        pool: &Pool,
        (attend, top): (&Attend, u32),
        limits: StepLimits,
        stream: RawStream,
    ) -> Result<usize, CudaError> {
        let key = (attend.q_heads, attend.window.unwrap_or(0), top, attend.scale > 0.0);
        if let Some(index) = self.list.iter().position(|variant| variant.key == key) {
            return Ok(index);
        }
        let max = variants_max(pool.layout());
        if self.list.len() == max {
            return Err(CudaError::Variants { max });
        }
        if is_capturing(stream)? {
            return Err(CudaError::NotPrepared);
        }
        let mut variant = Variant::new(gpu, pool, key, limits, stream)?;
        if top == 0 && attend.scale > 0.0 && self.list.len() < SHARED_VARIANTS_MAX {
            let shape = *variant.split.shape();
            variant.shared = SharedDecode::new(gpu, pool, shape, limits, stream)?;
        }
        self.list.push(variant);
        Ok(self.list.len() - 1)
    }

    /// Where the slots of a variant over lists go.
    pub(in crate::backend::cuda) fn lists(&self, index: usize) -> Option<&ListBuffers> {
        self.list[index].lists.as_ref()
    }

    /// What a graph's key says of each variant: which kernels the staged step takes.
    pub(in crate::backend::cuda) fn key(&self, trees: bool) -> [u8; KEY_VARIANTS] {
        let mut kernels = [0; KEY_VARIANTS];
        for (key, variant) in kernels.iter_mut().zip(&self.list) {
            *key = variant.key_of(trees);
        }
        if self.list.is_empty() {
            self.latent.key(&mut kernels);
        }
        kernels
    }

    /// Launches the kernels that the staged step needs.
    ///
    /// # Safety
    /// The addresses in `params` are those of rows for every token of the staged step, `scales` the layer's.
    pub(in crate::backend::cuda) unsafe fn launch(
        &self,
        gpu: &Gpu,
        index: usize,
        image: &Image,
        (mut params, scales): (AttendParams, LayerScales),
        start: &mut Start,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        let variant = &self.list[index];
        let shape = variant.split.shape();
        let capturing = is_capturing(stream)?;
        let decode_start = start.first(capturing);
        let shared = variant.shared.as_ref().filter(|shared| shared.taken().is_some());
        let extend = variant.count.extend_items > 0;
        let decode = variant.count.decode_units > 0 || shared.is_some();
        if let Some(shared) = shared {
            let params = (params, scales);
            // SAFETY: the caller answers for the rows.
            unsafe { shared.launch(gpu, image.splits, params, decode_start, stream) }?;
        } else if decode {
            params.plan = image.splits + variant.image_at as u64;
            params.partial = variant.partial.address();
            params.counters = variant.counters.address();
            let width = variant.count.width;
            params.stripes = shape.decode_stripes(width);
            let mut extra = ExtraParams { scales, ..ExtraParams::default() };
            let seen = (params.batch_rows, params.window);
            if let Some(buffers) = &variant.lists {
                extra.lists = buffers.params(shape, params.page_size);
                // Behind the split: a row's places for its tokens, of which it sees all.
                params.batch_rows = params.plan + 4 * shape.decode_words() as u64;
                params.window = 0;
            }
            let (kernel, blocks) = (variant.decode_of(width), shape.decode_ctas[width]);
            // SAFETY: the caller answers for the rows; plan, partial and counters are this variant's, for this grid.
            unsafe { gpu.launch_attention(kernel, blocks, &params, &extra, decode_start, stream) }?;
            (params.batch_rows, params.window) = seen;
        }
        if extend {
            // Its search for the greatest logit comes before the scale, which must not turn its sign then.
            params.negate_q = u32::from(params.scale < 0.0);
            params.scale = params.scale.abs();
            params.plan = variant.extend_plan.address();
            params.partial = variant.partial.address() + shape.decode_partial_bytes() as u64;
            params.counters = variant.counters.address() + shape.decode_counter_bytes() as u64;
            let trees = variant.trees.filter(|_| image.trees);
            let (kernel, blocks) = (trees.unwrap_or(variant.extend), shape.extend_ctas);
            let extra = ExtraParams { scales, ..ExtraParams::default() };
            // SAFETY: as above.
            unsafe {
                gpu.launch_attention(kernel, blocks, &params, &extra, Start::InOrder, stream)
            }?;
        }
        if decode || extend {
            start.launched(capturing);
        }
        Ok(())
    }
}

/// Most variants over a pool.
fn variants_max(layout: &PoolLayout) -> usize {
    if layout.label_channels() > 0 { 2 * VARIANTS_MAX } else { VARIANTS_MAX }
}

impl ListBuffers {
    /// For as many rows as a step has.
    fn new(gpu: &Gpu, shape: &SplitShape) -> Result<Self, CudaError> {
        let lists = u64::from(shape.batch_max) * u64::from(shape.kv_heads);
        let listed = DeviceBuffer::lasting(gpu, 4 * lists * u64::from(shape.top))?;
        Ok(Self { listed, counts: DeviceBuffer::lasting(gpu, 4 * lists)? })
    }

    fn params(&self, shape: &SplitShape, page_size: u32) -> Lists {
        Lists {
            listed: self.listed.address(),
            counts: self.counts.address(),
            page_magic: wide_magic(page_size.into()),
            top: shape.top,
            reserved: 0,
        }
    }
}

impl Variant {
    /// Which kernels the staged step takes, `trees` among its rows or not.
    fn key_of(&self, trees: bool) -> u8 {
        let taken = self.shared.as_ref().and_then(SharedDecode::taken);
        let tails = taken.map_or(0, |taken| taken.tails as u8 + 1);
        let decode = u8::from(self.count.decode_units > 0);
        let extend = match self.count.extend_items {
            0 => 0,
            _ => 1 + u8::from(trees),
        };
        decode | extend << 1 | (self.count.width as u8) << 3 | tails << 5
    }

    /// The decode kernel of a width that steps have.
    fn decode_of(&self, width: usize) -> &'static Kernel {
        self.decode[width].expect("a width with CTAs has a kernel")
    }

    fn new(
        gpu: &Gpu,
        pool: &Pool,
        key: VariantKey,
        limits: StepLimits,
        stream: RawStream,
    ) -> Result<Self, CudaError> {
        let (layout, rows) = (pool.layout(), pool.rows());
        let (head_dim, fp8) = (layout.head_dim(), layout.dtype().is_quantised());
        let of = Selection::of(gpu, layout, rows);
        let (q_heads, kv_heads) = (key.0, layout.kv_heads());
        let mut decode = of.decodes(q_heads / kv_heads);
        let extend = of.extend().ok_or(CudaError::HeadDim { head_dim })?;
        let trees = of.trees();
        // A capture loads nothing.
        trees.map_or(Ok(()), |kernel| gpu.load(kernel).map(|_| ()))?;
        let ctas = |kernel: &'static Kernel| -> Result<u32, CudaError> {
            Ok(gpu.multiprocessors() * gpu.resident(kernel)?.clamp(1, RESIDENT_MAX))
        };
        let mut shape = SplitShape {
            kv_heads,
            group: q_heads / kv_heads,
            head_dim,
            window: key.1,
            top: key.2,
            extra: decode_extra(fp8),
            decode_ctas: [0; DECODE_ROWS.len()],
            extend_ctas: ctas(extend)?,
            batch_max: limits.rows,
            tokens_max: limits.tokens,
        };
        let narrowest = shape.narrowest();
        if key.2 > 0 {
            let over_lists = of.selected()[narrowest];
            // Rows of one token have lists, so no step takes a wider one.
            decode = Decodes::default();
            decode[narrowest] = Some(over_lists.ok_or(CudaError::Lists { dtype: layout.dtype() })?);
        }
        let of_group = ctas(decode[narrowest].expect("every group has a decode kernel"))?;
        for (width, ctas) in shape.decode_ctas.iter_mut().enumerate().skip(narrowest) {
            let most = if width == narrowest { u32::MAX } else { WIDE_RESIDENT };
            let resident = (of_group / gpu.multiprocessors()).min(most);
            *ctas = if decode[width].is_some() { resident * gpu.multiprocessors() } else { 0 };
        }
        let partial = shape.decode_partial_bytes() + shape.extend_partial_bytes();
        let counters = shape.decode_counter_bytes() + shape.extend_counter_bytes();
        let counters = DeviceBuffer::lasting(gpu, counters as u64)?;
        // SAFETY: the range is the buffer allocated above, whose size is a multiple of 4.
        let result = unsafe {
            let words = (counters.bytes() / 4) as usize;
            sys::cuMemsetD32Async(counters.address(), 0, words, raw(stream))
        };
        check("cuMemsetD32Async", result)?;
        Ok(Self {
            key,
            decode,
            extend,
            trees,
            split: Split::new(shape),
            lists: if key.2 > 0 { Some(ListBuffers::new(gpu, &shape)?) } else { None },
            shared: None,
            count: SplitCount::default(),
            image_at: 0,
            extend_plan: DeviceBuffer::lasting(gpu, 4 * shape.extend_words() as u64)?,
            partial: DeviceBuffer::lasting(gpu, partial as u64)?,
            counters,
        })
    }
}

/// Launches attention in f32, for rows that check rather than serve.
///
/// # Safety
/// The addresses in `params` are those of rows for every token of the staged step.
pub(in crate::backend::cuda) unsafe fn launch_f32(
    gpu: &Gpu,
    pool: &Pool,
    params: AttendParams,
    scales: LayerScales,
    stream: RawStream,
) -> Result<(), CudaError> {
    let kernel = Selection::of(gpu, pool.layout(), pool.rows()).check();
    let extra = ExtraParams { scales, ..ExtraParams::default() };
    let blocks = 8 * gpu.multiprocessors();
    // SAFETY: the caller answers for the rows.
    unsafe { gpu.launch_attention(kernel, blocks, &params, &extra, Start::InOrder, stream) }
}
