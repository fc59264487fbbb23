//! Attention over latent rows: which pools are served, the memory that each variant of it keeps, and its launches.
//!
//! On compute capability 9.0 pools with rows of 16 bits, those of fp8 too, have a kernel whose work is split on the
//! host; all others have a plain one.
//!
//! Not here: the split (`split/latent.rs`), the kernels (`ptx/attend_latent*`).

use super::attend_kernels::{AttentionKernel, Beside, attention};
use super::error::CudaError;
use super::gpu::Gpu;
use super::graph_key::KEY_VARIANTS;
use super::image::StepLimits;
use super::kernels::Attention;
use super::launch::Start;
use super::memory::DeviceBuffer;
use super::params::{AttendLatentFp8Params, AttendLatentRowsParams, AttendParams};
use super::pool::Pool;
use super::raw::{RawStream, is_capturing};
use super::ring::{Load, UploadRing};
use super::row_boxes;
use super::split::{LATENT_ROWS, LatentSplit};
use crate::backend::Attend;
use crate::id::LayerId;
use crate::layout::{Dtype, KvShape, PoolLayout};
use crate::plan::BatchPlan;

/// Numbers of a row that kernels serve.
const SERVED: KvShape = KvShape::Latent { rank: 512, rope: 64 };
/// Variants that there may be.
const VARIANTS_MAX: usize = 8;
/// Most query heads over latent rows.
pub(super) const LATENT_HEADS_MAX: u32 = 128;

const F32: Attention = attention!("attend_latent_f32", 128, 0);
const BF16: Attention = attention!("attend_latent_bf16", 128, 0);
const F16: Attention = attention!("attend_latent_f16", 128, 0);
const FP8_F32: Attention<AttendLatentFp8Params> = attention!("attend_latent_fp8_f32", 128, 0);
const FP8_BF16: Attention<AttendLatentFp8Params> = attention!("attend_latent_fp8_bf16", 128, 0);
const FP8_F16: Attention<AttendLatentFp8Params> = attention!("attend_latent_fp8_f16", 128, 0);

/// Refuses latent rows of other lengths than kernels serve.
pub(super) fn check_shape(layout: &PoolLayout) -> Result<(), CudaError> {
    let shape = layout.shape();
    let served = !layout.is_latent() || shape == SERVED;
    if served { Ok(()) } else { Err(CudaError::PoolShape { shape }) }
}

/// The kernel of every GPU.
fn plain(fp8: bool, rows: Dtype) -> AttentionKernel {
    match (fp8, rows) {
        (false, Dtype::F32) => F32.into(),
        (false, Dtype::Bf16) => BF16.into(),
        (false, Dtype::F16) => F16.into(),
        (true, Dtype::F32) => FP8_F32.into(),
        (true, Dtype::Bf16) => FP8_BF16.into(),
        (true, Dtype::F16) => FP8_F16.into(),
    }
}

/// That of a pool.
pub(super) fn plain_of(pool: &Pool) -> AttentionKernel {
    plain(pool.layout().dtype().is_quantised(), pool.rows())
}

/// The kernel of compute capability 9.0, and that which joins what it left in parts.
fn hopper(fp8: bool, rows: Dtype) -> Option<[AttentionKernel; 2]> {
    const BF16: Attention<AttendLatentRowsParams> =
        attention!("attend_latent_bf16_sm90a", 384, 229_376);
    const F16: Attention<AttendLatentRowsParams> =
        attention!("attend_latent_f16_sm90a", 384, 229_376);
    const FP8_BF16: Attention<AttendLatentFp8Params> =
        attention!("attend_latent_fp8_bf16_sm90a", 384, 229_376);
    const FP8_F16: Attention<AttendLatentFp8Params> =
        attention!("attend_latent_fp8_f16_sm90a", 384, 229_376);
    const JOIN_BF16: Attention = attention!("attend_latent_join_bf16_sm90a", 128, 0);
    const JOIN_F16: Attention = attention!("attend_latent_join_f16_sm90a", 128, 0);
    match (fp8, rows) {
        (false, Dtype::Bf16) => Some([BF16.into(), JOIN_BF16.into()]),
        (false, Dtype::F16) => Some([F16.into(), JOIN_F16.into()]),
        (true, Dtype::Bf16) => Some([FP8_BF16.into(), JOIN_BF16.into()]),
        (true, Dtype::F16) => Some([FP8_F16.into(), JOIN_F16.into()]),
        (_, Dtype::F32) => None,
    }
}

/// Its CTAs: an even number, since clusters are of two.
fn ctas(gpu: &Gpu) -> u32 {
    (gpu.multiprocessors() & !1).max(2)
}

/// One variant of attention over latent rows, where a step is split for it.
#[derive(Debug)]
struct Variant {
    /// Query heads, and window (0: none).
    key: (u32, u32),
    kernels: [AttentionKernel; 2],
    split: LatentSplit,
    /// Items of the staged step that were cut.
    cut: u32,
    /// The plan on the device.
    plan: DeviceBuffer,
    /// `[slots, 64, 512]`, and what the sums of each row are relative to, `[slots, 64, 2]`.
    partial: DeviceBuffer,
    tops: DeviceBuffer,
}

/// The variants met so far.
#[derive(Debug, Default)]
pub(super) struct LatentVariants {
    list: Vec<Variant>,
}

impl LatentVariants {
    pub(super) fn len(&self) -> usize {
        self.list.len()
    }

    /// Bytes of the largest plan.
    pub(super) fn plan_bytes(gpu: &Gpu, layout: &PoolLayout, limits: StepLimits) -> usize {
        if !layout.is_latent() {
            return 0;
        }
        4 * LatentSplit::words_max(LATENT_HEADS_MAX, ctas(gpu), (limits.rows, limits.tokens))
    }

    /// The variant's index, making its memory where it is new; nothing where the plain kernel serves.
    pub(super) fn prepare(
        &mut self,
        gpu: &Gpu,
        pool: &Pool,
        attend: &Attend,
        limits: StepLimits,
        stream: RawStream,
    ) -> Result<Option<usize>, CudaError> {
        let fp8 = pool.layout().dtype().is_quantised();
        let late = hopper(fp8, pool.rows()).filter(|_| gpu.capability() == 90);
        let Some(kernels) = late else { return Ok(None) };
        let key = (attend.q_heads, attend.window.unwrap_or(0));
        if let Some(index) = self.list.iter().position(|variant| variant.key == key) {
            return Ok(Some(index));
        }
        if self.list.len() == VARIANTS_MAX {
            return Err(CudaError::Variants { max: VARIANTS_MAX });
        }
        if is_capturing(stream)? {
            return Err(CudaError::NotPrepared);
        }
        kernels.iter().try_for_each(|kernel| kernel.load(gpu))?;
        let (ctas, sizes) = (ctas(gpu), (limits.rows, limits.tokens));
        // Rows of 16 bits come to both CTAs of a cluster by boxes; bytes of fp8 need none.
        let pairs = fp8 || row_boxes::rows(pool.layout()) > 0;
        let split = LatentSplit::new(key.0, key.1, ctas, sizes).in_pairs(pairs);
        let rows = u64::from(split.slots()) * u64::from(LATENT_ROWS);
        let words = LatentSplit::words_max(key.0, ctas, sizes).next_multiple_of(4);
        self.list.push(Variant {
            key,
            kernels,
            split,
            cut: 0,
            plan: DeviceBuffer::lasting(gpu, 4 * words as u64)?,
            partial: DeviceBuffer::lasting(gpu, rows * 512 * 4)?,
            tops: DeviceBuffer::lasting(gpu, rows * 8)?,
        });
        Ok(Some(self.list.len() - 1))
    }

    /// Splits a step for every variant.
    pub(super) fn split(&mut self, plan: &BatchPlan<'_>) {
        for variant in &mut self.list {
            variant.cut = variant.split.plan(plan.rows);
        }
    }

    /// Sends the plans of the step that was split last.
    pub(super) fn send(
        &self,
        gpu: &Gpu,
        ring: &mut UploadRing,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        for variant in &self.list {
            let bytes: &[u8] = bytemuck::cast_slice(variant.split.words());
            let mut upload = ring.acquire(stream)?;
            upload.bytes()[..bytes.len()].copy_from_slice(bytes);
            let (image_bytes, image) = (bytes.len(), variant.plan.address());
            let load = Load { image_bytes, image, writes_at: 0, writes: 0, words: 0 };
            upload.send(gpu, &load, stream)?;
        }
        Ok(())
    }

    /// What a graph's key says of each variant: whether the staged step has sums to join.
    pub(super) fn key(&self, kernels: &mut [u8; KEY_VARIANTS]) {
        for (key, variant) in kernels.iter_mut().zip(&self.list) {
            *key = u8::from(variant.cut > 0);
        }
    }

    /// Launches attention of the staged step.
    ///
    /// # Safety
    /// The addresses in `params` are those of rows for every token of the staged step, and of the layer.
    pub(super) unsafe fn launch(
        &self,
        gpu: &Gpu,
        pool: &Pool,
        (index, layer): (usize, LayerId),
        mut params: AttendParams,
        start: &mut Start,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        let Variant { kernels: [main, join], split, cut, plan, partial, tops, .. } =
            &self.list[index];
        let fp8 = pool.layout().dtype().is_quantised();
        let (ctas, capturing) = (ctas(gpu), is_capturing(stream)?);
        params.partial = partial.address();
        params.counters = tops.address();
        params.plan = plan.address() + 4 * split.lists_at() as u64;
        let first = start.first(capturing);
        let beside = match fp8 {
            true => beside(pool, layer),
            false => Beside { boxes: row_boxes::of(pool, layer)?, ..Beside::default() },
        };
        // SAFETY: the caller answers for the rows; plan and sums are this variant's, for this grid; scales and rope are
        // the layer's.
        unsafe { main.launch(gpu, ctas, params, beside, first, stream) }?;
        start.launched(capturing);
        if *cut == 0 {
            return Ok(());
        }
        params.plan = plan.address();
        // SAFETY: as above.
        unsafe { join.launch(gpu, 8 * ctas, params, beside, Start::Pdl, stream) }
    }
}

/// What kernels over fp8 take beside the rest.
fn beside(pool: &Pool, layer: LayerId) -> Beside {
    let (scales, rope) = (pool.scales(layer), pool.rope(layer).unwrap_or_default());
    Beside { scales, rope, ..Beside::default() }
}

/// Launches the kernel of every GPU.
///
/// # Safety
/// The addresses in `params` are those of rows for every token of the staged step, and of the layer.
pub(super) unsafe fn launch_plain(
    gpu: &Gpu,
    pool: &Pool,
    layer: LayerId,
    params: AttendParams,
    stream: RawStream,
) -> Result<(), CudaError> {
    let blocks = 8 * gpu.multiprocessors();
    // SAFETY: the caller answers for the rows; scales and rope are the layer's.
    unsafe {
        let kernel = plain_of(pool);
        kernel.launch(gpu, blocks, params, beside(pool, layer), Start::InOrder, stream)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::attend_kernels::tests::{Parts, parts, source};
    use super::*;

    /// The kernels that a device of this compute capability may be asked to run.
    pub(in super::super) fn offered(capability: u32) -> Vec<Parts> {
        let mut offered = Vec::new();
        for rows in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            for fp8 in [false, true] {
                let late = hopper(fp8, rows).filter(|_| capability == 90);
                offered.extend(late.iter().flatten().chain([&plain(fp8, rows)]).map(parts));
            }
        }
        offered
    }

    #[test]
    fn kernels_are_launched_as_they_say() {
        for (name, ptx, shared, threads) in offered(90) {
            let text = source(name);
            let bytes = match shared {
                0 => "no".into(),
                bytes => format!("{},{:03} bytes of", bytes / 1000, bytes % 1000),
            };
            let launch = format!("block {threads}, {bytes} dynamic shared memory");
            assert!(text.contains(&launch), "{name}: {launch}");
            assert!(ptx.contains(&format!(".entry {name}(")));
            assert!(ptx.contains(&format!(".maxntid {threads}, 1, 1")));
        }
    }
}
