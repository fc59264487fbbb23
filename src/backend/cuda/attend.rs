//! Attention launches: which kernels serve a pool, and the memory that each variant of attention keeps.
//!
//! A *variant* has its own query heads and sliding window: a step is split for each. A model has one variant,
//! or two where local and global layers alternate. The first launch of a variant makes its memory; from then on every
//! step is split for it when its plan is staged.
//!
//! Not here: the split itself (`split/`), the kernels (`ptx/attend_*.cu`).

use super::attend_latent::LatentVariants;
use super::attend_shared::{SHARED_VARIANTS_MAX, SharedDecode};
use super::error::{CudaError, check};
use super::gpu::Gpu;
use super::image::{Image, StepLimits};
use super::kernels::{Attention, Kernel};
use super::launch::Start;
use super::memory::DeviceBuffer;
use super::params::{AttendParams, DecodeWork};
use super::raw::{RawStream, is_capturing, raw};
use super::ring::{Load, UploadRing};
use super::split::{DECODE_ROWS, Split, SplitCount, SplitShape};
use super::sys;
use crate::backend::Attend;
use crate::layout::{KvDtype, PoolLayout};
use crate::plan::BatchPlan;

/// Variants that the image has room for.
const VARIANTS_MAX: usize = 8;
/// No kernel has more CTAs than this on one multiprocessor.
const RESIDENT_MAX: u32 = 8;
/// Those of a decode kernel for more rows than one token's: registers and shared memory leave room for no more.
const WIDE_RESIDENT: u32 = 2;

macro_rules! attention {
    ($name:expr, $threads:literal, $shared:literal) => {
        Attention {
            kernel: Kernel::new(
                $name,
                include_str!(concat!("../../../ptx/", $name, ".ptx")),
                $shared,
            ),
            threads: $threads,
        }
    };
}

const ATTEND_F32: Attention = attention!("attend_f32", 128, 0);

/// The decode kernels of [`DECODE_ROWS`].
type Decodes = [Option<Attention>; DECODE_ROWS.len()];

/// A `match` over dtype and head_dim with the decode kernels and the extend kernel of each.
macro_rules! attentions {
    (
        $key:expr,
        $($dtype:ident $name:literal $head_dim:literal: $extend:literal,
            $threads:literal $($rows:literal $shared:literal)*;)*
    ) => {
        Some(match $key {
            $(
                (KvDtype::$dtype, $head_dim) => {
                    let mut decodes = Decodes::default();
                    let all = [$(attention!(
                        concat!("attend_decode_", $name, "_d", $head_dim, "_r", $rows),
                        $threads,
                        $shared
                    )),*];
                    for (place, one) in decodes.iter_mut().zip(all) {
                        *place = Some(one);
                    }
                    let extend = attention!(
                        concat!("attend_extend_", $name, "_d", $head_dim),
                        128,
                        $extend
                    );
                    (decodes, extend)
                }
            )*
            _ => return None,
        })
    };
}

/// The decode kernels and the extend kernel for 16-bit pools. Threads and shared memory are those of the kernels'
/// headers.
fn kernels(dtype: KvDtype, head_dim: u32) -> Option<(Decodes, Attention)> {
    attentions! { (dtype, head_dim),
        Bf16 "bf16" 64: 49_152, 128 8 71_680 16 77_824;
        Bf16 "bf16" 128: 98_304, 128 8 77_824 16 90_112;
        Bf16 "bf16" 256: 98_304, 64 8 73_728 16 81_920;
        F16 "f16" 64: 49_152, 128 8 71_680 16 77_824;
        F16 "f16" 128: 98_304, 128 8 77_824 16 90_112;
        F16 "f16" 256: 98_304, 64 8 73_728 16 81_920;
    }
}

/// The extend kernel that only compute capability 9.0 runs, where there is one.
fn hopper(dtype: KvDtype, head_dim: u32) -> Option<Attention> {
    Some(match (dtype, head_dim) {
        (KvDtype::Bf16, 128) => {
            attention!("attend_extend_bf16_d128_sm90a", 384, 204_800)
        }
        (KvDtype::F16, 128) => {
            attention!("attend_extend_f16_d128_sm90a", 384, 204_800)
        }
        _ => return None,
    })
}

/// Query heads and window (0: none).
type VariantKey = (u32, u32);

/// One variant of attention: its split, and the memory of its two kernels.
#[derive(Debug)]
struct Variant {
    key: VariantKey,
    decode: Decodes,
    extend: Attention,
    split: Split,
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

/// The variants of attention met so far. A pool of f32 needs none.
#[derive(Debug, Default)]
pub(super) struct Variants {
    list: Vec<Variant>,
    /// Those of a latent pool, which has no others.
    pub(super) latent: LatentVariants,
}

impl Variants {
    pub(super) fn len(&self) -> usize {
        self.list.len() + self.latent.len()
    }

    /// Bytes of the image that the variants' decode splits take.
    pub(super) fn image_bytes(gpu: &Gpu) -> usize {
        let ctas = gpu.multiprocessors() * RESIDENT_MAX;
        VARIANTS_MAX * ctas as usize * size_of::<DecodeWork>()
    }

    /// Bytes of the largest extend plan, or that of latent rows.
    pub(super) fn extend_bytes(gpu: &Gpu, layout: &PoolLayout, limits: StepLimits) -> usize {
        let ctas = gpu.multiprocessors() * RESIDENT_MAX;
        let shape = SplitShape {
            kv_heads: 1,
            group: 16,
            head_dim: layout.head_dim(),
            window: 0,
            decode_ctas: [ctas; DECODE_ROWS.len()],
            extend_ctas: ctas,
            batch_max: limits.rows,
            tokens_max: limits.tokens,
        };
        (4 * shape.extend_words()).max(LatentVariants::plan_bytes(gpu, layout, limits))
    }

    /// Loads the decode kernels that a step of so many tokens and rows takes: those for more rows than one token's wait
    /// for the first step that wants them, which no capture can stage.
    pub(super) fn load(&self, gpu: &Gpu, tokens: usize, rows: usize) -> Result<(), CudaError> {
        self.list.iter().try_for_each(|variant| {
            let shape = variant.split.shape();
            let width = shape.width(tokens, rows);
            // The narrowest was loaded with the variant.
            if width == shape.narrowest() {
                Ok(())
            } else {
                gpu.load(&variant.decode_of(width).kernel)
            }
        })
    }

    /// Splits a step for every variant, into the image from `at` on; gives the offset after them.
    pub(super) fn split(&mut self, plan: &BatchPlan<'_>, image: &mut [u8], at: usize) -> usize {
        self.latent.split(plan);
        let (mut end, count) = (at, self.list.len());
        for (i, variant) in self.list.iter_mut().enumerate() {
            let bytes = 4 * variant.split.shape().decode_words();
            let words = bytemuck::cast_slice_mut(&mut image[end..end + bytes]);
            variant.count = variant.split.plan(plan.rows, plan.token_count(), words);
            variant.image_at = end - at;
            end += bytes;
            if let Some(shared) = &mut variant.shared {
                end = shared.split(plan, image, end - at, end, i + 1 == count);
            }
        }
        end
    }

    /// Sends the extend plans of the step that was split last, unless every row has one token or none to compute.
    pub(super) fn send_extend(
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
            let mut upload = ring.acquire(gpu, stream)?;
            upload.bytes()[..bytes.len()].copy_from_slice(bytes);
            let (image_bytes, image) = (bytes.len(), variant.extend_plan.address());
            let load = Load { image_bytes, image, writes_at: 0, writes: 0, words: 0 };
            upload.send(gpu, &load, stream)?;
        }
        Ok(())
    }

    /// The variant's index, making its memory where it is new. f32 pools have no variants.
    pub(super) fn prepare(
        &mut self,
        gpu: &Gpu,
        layout: &PoolLayout,
        attend: &Attend,
        limits: StepLimits,
        stream: RawStream,
    ) -> Result<usize, CudaError> {
        let key = (attend.q_heads, attend.window.unwrap_or(0));
        if let Some(index) = self.list.iter().position(|variant| variant.key == key) {
            return Ok(index);
        }
        if self.list.len() == VARIANTS_MAX {
            return Err(CudaError::Variants { max: VARIANTS_MAX });
        }
        if is_capturing(stream)? {
            return Err(CudaError::NotPrepared);
        }
        let mut variant = Variant::new(gpu, layout, key, limits, stream)?;
        if self.list.len() < SHARED_VARIANTS_MAX {
            let shape = *variant.split.shape();
            variant.shared = SharedDecode::new(gpu, layout.dtype(), shape, limits, stream)?;
        }
        self.list.push(variant);
        Ok(self.list.len() - 1)
    }

    /// Launches the kernels that the staged step needs; while capturing, all that a step of so many tokens and rows
    /// can need.
    ///
    /// # Safety
    /// The addresses in `params` are those of rows for every token of the staged step.
    pub(super) unsafe fn launch(
        &self,
        gpu: &Gpu,
        index: usize,
        image: &Image,
        mut params: AttendParams,
        start: &mut Start,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        let variant = &self.list[index];
        let shape = variant.split.shape();
        // One token a row, or none: every sequence decodes, whichever step the graph is replayed for.
        let decode_only = image.token_count <= image.row_count;
        let capturing = is_capturing(stream)?;
        // A graph is launched in order as a whole.
        let decode_start = if capturing { Start::Pdl } else { *start };
        let decode = variant.count.decode_units > 0 || capturing;
        let extend = variant.count.extend_items > 0 || (capturing && !decode_only);
        let shared = variant.shared.as_ref();
        let counts = (image.token_count, image.row_count);
        let shared = shared.filter(|shared| shared.serves(&params, counts, capturing));
        if let Some(shared) = shared.filter(|_| decode) {
            // SAFETY: the caller answers for the rows.
            unsafe {
                shared.launch(gpu, image.splits, image.row_count, params, decode_start, stream)
            }?;
        } else if decode {
            params.plan = image.splits + variant.image_at as u64;
            params.partial = variant.partial.address();
            params.counters = variant.counters.address();
            let width = variant.count.width;
            params.stripes = shape.decode_stripes(width);
            let Attention { kernel, threads } = variant.decode_of(width);
            // SAFETY: the caller answers for the rows; plan, partial and counters are this variant's, for this grid.
            unsafe {
                let grid = (shape.decode_ctas[width], 1);
                gpu.launch(kernel, grid, (*threads, 1), stream, &params, decode_start)
            }?;
        }
        if extend {
            // Its search for the greatest logit comes before the scale, which must not turn its sign then.
            params.negate_q = u32::from(params.scale < 0.0);
            params.scale = params.scale.abs();
            params.plan = variant.extend_plan.address();
            params.partial = variant.partial.address() + shape.decode_partial_bytes() as u64;
            params.counters = variant.counters.address() + shape.decode_counter_bytes() as u64;
            let Attention { kernel, threads } = &variant.extend;
            // SAFETY: as above.
            unsafe {
                let grid = (shape.extend_ctas, 1);
                gpu.launch(kernel, grid, (*threads, 1), stream, &params, Start::InOrder)
            }?;
        }
        if !capturing && (decode || extend) {
            *start = Start::Pdl;
        }
        Ok(())
    }
}

impl Variant {
    /// The decode kernel of a width that steps have.
    fn decode_of(&self, width: usize) -> &Attention {
        self.decode[width].as_ref().expect("a width with CTAs has a kernel")
    }

    fn new(
        gpu: &Gpu,
        layout: &PoolLayout,
        key: VariantKey,
        limits: StepLimits,
        stream: RawStream,
    ) -> Result<Self, CudaError> {
        let head_dim = layout.head_dim();
        let (decode, extend) =
            kernels(layout.dtype(), head_dim).ok_or(CudaError::HeadDim { head_dim })?;
        let late = hopper(layout.dtype(), head_dim).filter(|_| gpu.capability() == 90);
        let extend = late.unwrap_or(extend);
        let ctas = |attention: &Attention| -> Result<u32, CudaError> {
            let resident = gpu.resident(&attention.kernel, attention.threads)?;
            Ok(gpu.multiprocessors() * resident.clamp(1, RESIDENT_MAX))
        };
        let mut shape = SplitShape {
            kv_heads: layout.kv_heads(),
            group: key.0 / layout.kv_heads(),
            head_dim,
            window: key.1,
            decode_ctas: [0; DECODE_ROWS.len()],
            extend_ctas: ctas(&extend)?,
            batch_max: limits.rows,
            tokens_max: limits.tokens,
        };
        let narrowest = shape.narrowest();
        let of_group = ctas(decode[narrowest].as_ref().expect("every group has a decode kernel"))?;
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
            split: Split::new(shape),
            shared: None,
            count: SplitCount::default(),
            image_at: 0,
            extend_plan: DeviceBuffer::lasting(gpu, 4 * shape.extend_words() as u64)?,
            partial: DeviceBuffer::lasting(gpu, partial as u64)?,
            counters,
        })
    }
}

/// Launches attention in f32, for pools that check rather than serve.
///
/// # Safety
/// The addresses in `params` are those of rows for every token of the staged step.
pub(super) unsafe fn launch_f32(
    gpu: &Gpu,
    params: &AttendParams,
    stream: RawStream,
) -> Result<(), CudaError> {
    let Attention { kernel, threads } = &ATTEND_F32;
    let grid = (8 * gpu.multiprocessors(), 1);
    // SAFETY: the caller answers for the rows.
    unsafe { gpu.launch(kernel, grid, (*threads, 1), stream, params, Start::InOrder) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a kernel's source says of itself, and its PTX.
    fn source(kernel: &Kernel<AttendParams>) -> String {
        let file = kernel.name.replace("_bf16", "_DTYPE").replace("_f16", "_DTYPE");
        let path = format!("{}/ptx/{file}.cu", env!("CARGO_MANIFEST_DIR"));
        std::fs::read_to_string(path).expect("every kernel has a source")
    }

    fn thousands(n: u32) -> String {
        format!("{},{:03}", n / 1000, n % 1000)
    }

    #[test]
    fn kernels_are_launched_as_they_say() {
        for dtype in [KvDtype::F16, KvDtype::Bf16] {
            for head_dim in [64, 128, 256] {
                let shape = SplitShape {
                    kv_heads: 1,
                    group: 1,
                    head_dim,
                    window: 0,
                    decode_ctas: [1; DECODE_ROWS.len()],
                    extend_ctas: 1,
                    batch_max: 1,
                    tokens_max: 1,
                };
                let (decodes, extend) = kernels(dtype, head_dim).expect("a served shape");
                assert!(decodes[0].is_some() && decodes[1].is_some(), "every group is served");
                for (width, decode) in decodes.iter().enumerate() {
                    let Some(decode) = decode else { continue };
                    let rows = DECODE_ROWS[width];
                    assert!(decode.kernel.name.ends_with(&format!("d{head_dim}_r{rows}")));
                    let parts = shape.width_partial_bytes(width) / 8 / (head_dim + 2) as usize;
                    check(decode, format!("[2 * grid, {parts}, {}]", head_dim + 2));
                }
                let rows = shape.extend_rows();
                for extend in [Some(extend), hopper(dtype, head_dim)].into_iter().flatten() {
                    check(&extend, format!("[slots, kv_heads, {rows}, {}]", head_dim + 2));
                }
            }
        }
    }

    fn check(Attention { kernel, threads }: &Attention, partial: String) {
        let text = source(kernel);
        let launch = format!("block {threads}, {} bytes of dynamic", thousands(kernel.shared));
        for wanted in [launch, format!("partial f32 {partial}")] {
            assert!(text.contains(&wanted), "{}: {wanted}", kernel.name);
        }
        let entry = format!(".entry {}(", kernel.name);
        let (_, after) = kernel.ptx.split_once(&entry).expect("the entry is in the PTX");
        assert!(!after.contains(".entry"), "{}: nothing else is compiled with it", kernel.name);
        assert!(after.contains(&format!(".maxntid {threads}, 1, 1")), "{}", kernel.name);
    }
}
