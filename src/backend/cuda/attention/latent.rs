//! Attention over latent rows: the supported pools, the memory of each variant, and the launches.
//!
//! The host splits the work of kernels over 16-bit or fp8 rows (`split/latent.rs`). Rows of f32 have a plain kernel.

use super::graph_key::KEY_VARIANTS;
use super::row_boxes;
use super::split::{LatentItems, LatentSplit};
use crate::backend::Attend;
use crate::backend::cuda::driver::gpu::Gpu;
use crate::backend::cuda::driver::launch::{ExtraParams, Start};
use crate::backend::cuda::driver::memory::DeviceBuffer;
use crate::backend::cuda::driver::raw::{RawStream, is_capturing};
use crate::backend::cuda::error::{CudaError, Limit};
use crate::backend::cuda::kernels::params::AttendParams;
use crate::backend::cuda::kernels::{Kernel, Latent, Selection};
use crate::backend::cuda::plan::image::StepLimits;
use crate::backend::cuda::plan::ring::UploadRing;
use crate::backend::cuda::store::pool::Pool;
use crate::id::LayerId;
use crate::layout::{KvShape, PoolLayout};
use crate::plan::BatchPlan;

/// The shape that kernels support.
const SERVED: KvShape = KvShape::Latent { rank: 512, rope: 64 };
/// Maximum number of variants.
const VARIANTS_MAX: u64 = 8;
/// Maximum number of query heads over latent rows.
pub const LATENT_HEADS_MAX: u32 = 128;

/// Rejects latent rows of unsupported lengths, and latent rows together with other shapes.
pub fn check_shape(layout: &PoolLayout) -> Result<(), CudaError> {
    let shapes = layout.views().map(|layout| layout.shape());
    let mut latent = shapes.filter(|shape| matches!(shape, KvShape::Latent { .. }));
    match latent.find(|&shape| shape != SERVED || !layout.has_one_shape()) {
        Some(shape) => Err(CudaError::PoolShape { shape }),
        None => Ok(()),
    }
}

/// Returns all kernels of a pool.
pub fn kernels(selection: &Selection) -> Vec<&'static Kernel> {
    match selection.latent() {
        Latent::Plain(kernel) => vec![kernel],
        Latent::Split(kernels, _) => kernels.to_vec(),
    }
}

/// Returns the number of CTAs of a split kernel. It is even, because a cluster has two CTAs.
fn ctas(gpu: &Gpu) -> u32 {
    (gpu.multiprocessors() & !1).max(2)
}

/// One variant of attention over latent rows of 16 bits or fp8.
#[derive(Debug)]
struct Variant {
    /// Number of query heads, and window (0 for none).
    key: (u32, u32),
    kernels: [&'static Kernel; 2],
    split: LatentSplit,
    /// Number of items of the staged step that are cut into parts.
    cut: u32,
    /// The plan on the device.
    plan: DeviceBuffer,
    /// Partial sums `[slots, rows, 512]`, for the maximum rows of a CTA's item.
    partial: DeviceBuffer,
    /// For each row, the maximum logit to which its weights are relative, and their sum: `[slots, rows, 2]`.
    tops: DeviceBuffer,
}

#[derive(Debug, Default)]
pub struct LatentVariants {
    list: Vec<Variant>,
}

impl LatentVariants {
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// Returns the bytes of the largest plan: that of the narrowest items.
    pub fn plan_bytes(gpu: &Gpu, layout: &PoolLayout, limits: StepLimits) -> usize {
        if !layout.is_latent() {
            return 0;
        }
        let sizes = (limits.rows, limits.tokens);
        4 * LatentSplit::words_max(LatentItems::Tiles, LATENT_HEADS_MAX, ctas(gpu), sizes)
    }

    /// Returns the variant's index, and allocates memory for a new variant. Returns `None` if the pool uses the plain
    /// kernel, which needs no memory.
    pub fn prepare(
        &mut self,
        gpu: &Gpu,
        pool: &Pool,
        attend: &Attend,
        limits: StepLimits,
        stream: RawStream,
    ) -> Result<Option<usize>, CudaError> {
        let fp8 = pool.layout().dtype().is_quantised();
        let Latent::Split(kernels, items) = pool.selection().latent() else { return Ok(None) };
        let key = (attend.q_heads, attend.window.unwrap_or(0));
        if let Some(index) = self.list.iter().position(|variant| variant.key == key) {
            return Ok(Some(index));
        }
        Limit::Variants.check(self.list.len() as u64 + 1, VARIANTS_MAX)?;
        if is_capturing(stream)? {
            return Err(CudaError::NotPrepared);
        }
        for kernel in kernels {
            gpu.compile(kernel)?;
        }
        let (ctas, sizes) = (ctas(gpu), (limits.rows, limits.tokens));
        // TMA boxes bring 16-bit rows to both CTAs of a cluster; fp8 rows need no boxes.
        let pairs = fp8 || row_boxes::rows(pool.layout()) > 0;
        let align = row_boxes::rows(pool.layout()).max(1);
        let split = LatentSplit::new(items, key, ctas, sizes).in_pairs(pairs).aligned(align);
        let rows = u64::from(split.slots()) * u64::from(items.rows());
        let words = LatentSplit::words_max(items, key.0, ctas, sizes).next_multiple_of(4);
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
    pub fn split(&mut self, plan: &BatchPlan<'_>) {
        for variant in &mut self.list {
            variant.cut = variant.split.plan(plan.rows);
        }
    }

    /// Sends the plans of the last split.
    pub fn send(&self, gpu: &Gpu, ring: &mut UploadRing, stream: RawStream) -> Result<(), CudaError> {
        for variant in &self.list {
            ring.send_image(gpu, bytemuck::cast_slice(variant.split.words()), variant.plan.address(), stream)?;
        }
        Ok(())
    }

    /// Writes each variant's part of a graph key: whether the staged step must join sums.
    pub fn key(&self, kernels: &mut [u8; KEY_VARIANTS]) {
        for (key, variant) in kernels.iter_mut().zip(&self.list) {
            *key = u8::from(variant.cut > 0);
        }
    }

    /// Launches attention of the staged step.
    ///
    /// # Safety
    /// The addresses in `params` have rows for every token of the staged step, and belong to the layer.
    pub unsafe fn launch(
        &self,
        gpu: &Gpu,
        pool: &Pool,
        (index, layer): (usize, LayerId),
        mut params: AttendParams,
        start: &mut Start,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        let Variant { kernels: [main, join], split, cut, plan, partial, tops, .. } = &self.list[index];
        let fp8 = pool.layout().dtype().is_quantised();
        let (ctas, capturing) = (ctas(gpu), is_capturing(stream)?);
        params.partial = partial.address();
        params.counters = tops.address();
        params.plan = plan.address() + 4 * split.lists_at() as u64;
        let first = start.first(capturing);
        let extra = if fp8 {
            extra(pool, layer)
        } else {
            ExtraParams { boxes: row_boxes::of_layer(pool, layer)?, ..ExtraParams::default() }
        };
        // SAFETY: the caller guarantees the rows; plan and sums belong to this variant and grid, scales and rope to the
        // layer.
        unsafe { gpu.launch_attention(main, ctas, &params, &extra, first, stream) }?;
        start.launched(capturing);
        if *cut == 0 {
            return Ok(());
        }
        params.plan = plan.address();
        // SAFETY: the same.
        unsafe { gpu.launch_attention(join, 8 * ctas, &params, &extra, Start::Pdl, stream) }
    }
}

/// Returns the extra parameters of kernels over fp8.
fn extra(pool: &Pool, layer: LayerId) -> ExtraParams {
    let (scales, rope) = (pool.scales(layer), pool.rope(layer).unwrap_or_default());
    ExtraParams { scales, rope, ..ExtraParams::default() }
}

/// Launches the kernel of rows of f32, whose pools have no variants.
///
/// # Safety
/// The addresses in `params` have rows for every token of the staged step, and belong to the layer.
pub unsafe fn launch_plain(
    gpu: &Gpu,
    pool: &Pool,
    layer: LayerId,
    params: AttendParams,
    stream: RawStream,
) -> Result<(), CudaError> {
    let Latent::Plain(kernel) = pool.selection().latent() else { unreachable!("`prepare` gives split work a variant") };
    let (blocks, extra) = (8 * gpu.multiprocessors(), extra(pool, layer));
    // SAFETY: the caller guarantees the rows; scales and rope belong to the layer.
    unsafe { gpu.launch_attention(kernel, blocks, &params, &extra, Start::InOrder, stream) }
}
