//! The variants of attention and their launches.
//!
//! A *variant* is attention with a shape of the pool, given query heads, a sliding window or chunks, a length of lists
//! and a sign of the scale. Each step is split for each variant. Most models have one variant, or two if local and
//! global layers alternate. `Cuda::prepare`, or else the first launch, allocates the memory of a variant; from then on,
//! staging a plan splits it for the variant. The memory of the extend kernel, and of the kernel with shared spans, is
//! allocated by `Cuda::prepare` or by the first step that uses them.

use super::graph_key::KEY_VARIANTS;
use super::latent::LatentVariants;
use super::shared::{SHARED_VARIANTS_MAX, SharedDecode};
use super::split::{ITEM_ROWS, SpanWork, SplitShape, decode_extra};
use super::variant::{ListBuffers, RESIDENT_MAX, Variant, VariantKey, decodes_of, key, shape_of};
use crate::backend::Attend;
use crate::backend::cuda::driver::gpu::Gpu;
use crate::backend::cuda::driver::launch::{ExtraParams, Start};
use crate::backend::cuda::driver::raw::{RawStream, is_capturing};
use crate::backend::cuda::error::{CudaError, Limit};
use crate::backend::cuda::kernels::params::{AttendParams, DecodeWork, LayerScales};
use crate::backend::cuda::kernels::{DECODE_ROWS, GROUP_MAX, Kernel, SUFFIX_ROWS, extend_rows_min};
use crate::backend::cuda::plan::chunk_rows::{self, ChunkRows};
use crate::backend::cuda::plan::image::{Image, StepLimits};
use crate::backend::cuda::plan::ring::UploadRing;
use crate::backend::cuda::prepare::Prepare;
use crate::backend::cuda::store::pool::Pool;
use crate::layout::PoolLayout;
use crate::plan::{BatchPlan, BatchRow};

/// Number of variants for which the image has space; twice as many if the pool has labels.
const VARIANTS_MAX: usize = 8;
/// Prepared attention: the pool of its layers, its parameters, and the length of its lists (0 for none).
pub type Prepared<'a> = (&'a Pool, Attend, u32);

/// The variants of attention. Rows of f32 need none.
#[derive(Debug, Default)]
pub struct Variants {
    list: Vec<Variant>,
    /// The variants of a latent pool, which has no others.
    pub latent: LatentVariants,
}

impl Variants {
    pub fn len(&self) -> usize {
        self.list.len() + self.latent.len()
    }

    /// Returns the staged step's work, the input of the time model, if the first variant reads a span once.
    pub fn span_work(&self) -> Option<SpanWork> {
        self.list.first()?.shared.as_ref()?.work()
    }

    /// Returns the image bytes of all variants' decode splits.
    pub fn image_bytes(gpu: &Gpu, layout: &PoolLayout, limits: StepLimits) -> usize {
        let works = (gpu.multiprocessors() * RESIDENT_MAX) as usize * size_of::<DecodeWork>();
        variants_max(layout) * (works + limits.rows as usize * size_of::<BatchRow>())
    }

    /// Returns the bytes of the largest plan of the extend kernel or over latent rows.
    pub fn extend_bytes(gpu: &Gpu, layout: &PoolLayout, limits: StepLimits) -> usize {
        let ctas = gpu.multiprocessors() * RESIDENT_MAX;
        let words = |own: PoolLayout| {
            let shape = SplitShape {
                kv_heads: 1,
                group: GROUP_MAX,
                head_dim: own.head_dim(),
                extend_rows: extend_rows_min(own.head_dim())?,
                extend_tokens: 1,
                window: 0,
                top: 0,
                extra: decode_extra(own.dtype().is_quantised()),
                decode_ctas: [ctas; DECODE_ROWS.len()],
                extend_ctas: ctas,
                batch_max: chunk_rows::most(layout, limits),
                tokens_max: limits.tokens,
            };
            Some(shape.extend_words())
        };
        let words = layout.views().filter_map(words).max().unwrap_or(0);
        (4 * words).max(LatentVariants::plan_bytes(gpu, layout, limits))
    }

    /// Compiles the missing kernels of a step, because a later capture of the step cannot compile them. The narrowest
    /// decode kernel is compiled with its variant.
    pub fn compile(
        &mut self,
        gpu: &Gpu,
        plan: &BatchPlan<'_>,
        limits: StepLimits,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        let (tokens, rows) = (plan.token_count(), plan.rows.len());
        for variant in &mut self.list {
            let shape = *variant.split.shape();
            if !plan.shared.spans.is_empty() {
                variant.add_shared(gpu, limits, stream)?;
                if let Some(shared) = &variant.shared {
                    shared.compile(gpu, plan)?;
                }
            }
            if variant.extend.is_none() && shape.has_extend(plan) {
                variant.add_extend(gpu, stream)?;
            }
            let trees = variant.extend.as_ref().and_then(|extend| extend.trees);
            if let Some(kernel) = trees.filter(|_| !plan.masks.is_empty()) {
                gpu.compile(kernel)?;
            }
            let width = shape.width(tokens, rows);
            if width > shape.narrowest() {
                gpu.compile(variant.decode_of(width))?;
            }
        }
        Ok(())
    }

    /// Returns the kernels of prepared work, for the prepared variants.
    pub fn kernels(
        &self,
        variants: &[Prepared<'_>],
        limits: StepLimits,
        work: &Prepare<'_>,
    ) -> Result<Vec<&'static Kernel>, CudaError> {
        let mut keys: Vec<_> = self.list.iter().map(|variant| variant.key).collect();
        let mut kernels = Vec::new();
        for &(pool, attend, top) in variants {
            let selection = pool.selection();
            let key = key(pool, &attend, top);
            let index = keys.iter().position(|known| *known == key).unwrap_or(keys.len());
            if index == keys.len() {
                keys.push(key);
            }
            let mut shape = shape_of(pool, key, limits)?;
            let decodes = decodes_of(selection, &shape)?;
            shape.decode_ctas = decodes.map(|kernel| u32::from(kernel.is_some()));
            let (group, narrowest) = (shape.group, shape.narrowest());
            // A chunk of a prompt may have any number of tokens.
            let most = if work.extend { ITEM_ROWS } else { work.decode_tokens.clamp(1, ITEM_ROWS) };
            kernels.extend((1..=most as usize).filter_map(|tokens| decodes[shape.width(tokens, 1)]));
            if work.spans && may_share(&key, index) {
                let shared = selection.shared(shape.window).into_iter().flatten();
                let [few, more] = SUFFIX_ROWS;
                let is_wide = (1..=most).any(|tokens| (few + 1..=more).contains(&(tokens * group)));
                let last = if is_wide { SUFFIX_ROWS.len() - 1 } else { narrowest };
                kernels.extend(shared.take(last + 1).skip(narrowest));
            }
            if has_extend(work) {
                kernels.extend(selection.extend());
                kernels.extend(selection.trees().filter(|_| work.trees));
            }
        }
        Ok(kernels)
    }

    /// Allocates the memory of prepared work, for each prepared variant.
    pub fn prepare_all(
        &mut self,
        gpu: &Gpu,
        variants: &[Prepared<'_>],
        work: &Prepare<'_>,
        limits: StepLimits,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        for &(pool, attend, top) in variants {
            let index = self.prepare(gpu, pool, (&attend, top), limits, stream)?;
            let variant = &mut self.list[index];
            if has_extend(work) {
                variant.add_extend(gpu, stream)?;
            }
            if work.spans {
                variant.add_shared(gpu, limits, stream)?;
            }
        }
        Ok(())
    }

    /// Splits a step for every variant into the image from `at` on, and returns the end of the splits.
    pub fn split(&mut self, plan: &BatchPlan<'_>, chunks: &ChunkRows, image: &mut [u8], at: usize) -> usize {
        self.latent.split(plan);
        // Decode splits come first, so that they do not move in the first step that reads spans once.
        let mut end = at;
        for variant in &mut self.list {
            variant.image_at = end - at;
            end += 4 * variant.split.shape().decode_words();
            end += if variant.lists.is_some() { size_of_val(plan.rows) } else { 0 };
        }
        let last = self.list.iter().rposition(|variant| variant.shared.is_some());
        for (i, variant) in self.list.iter_mut().enumerate() {
            if let Some(shared) = &mut variant.shared {
                end += shared.split(plan, &mut image[end..], end - at, last == Some(i));
            }
            let bytes = 4 * variant.split.shape().decode_words();
            let (words, rest) = image[at + variant.image_at..].split_at_mut(bytes);
            let words = bytemuck::cast_slice_mut(words);
            if variant.lists.is_some() {
                let places = bytemuck::cast_slice_mut(&mut rest[..size_of_val(plan.rows)]);
                variant.count = variant.split.plan_selected(plan.rows, places, words);
                continue;
            }
            // The chunk rows of a row are no longer than the row, so the width of the step serves them.
            let width = variant.split.shape().width(plan.token_count(), plan.rows.len());
            let rows = chunks.of_size(variant.key.chunk).unwrap_or(plan.rows);
            variant.count = match variant.shared.as_ref().and_then(SharedDecode::taken) {
                Some(taken) => variant.split.plan_left(plan.rows, taken),
                None => variant.split.plan(rows, width, words),
            };
        }
        end
    }

    /// Sends the plans over latent rows and the extend plans of the last split. With `decode_only`, extend plans
    /// without items are not sent.
    pub fn send_extend(
        &self,
        gpu: &Gpu,
        decode_only: bool,
        ring: &mut UploadRing,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        self.latent.send(gpu, ring, stream)?;
        for variant in &self.list {
            let Some(extend) = &variant.extend else { continue };
            if decode_only && variant.count.extend_items == 0 {
                continue;
            }
            ring.send_image(gpu, bytemuck::cast_slice(variant.split.extend_words()), extend.plan.address(), stream)?;
        }
        Ok(())
    }

    /// Returns the index of a variant, and allocates the memory of a new one. Rows of f32 have no variants.
    pub fn prepare(
        &mut self,
        gpu: &Gpu,
        pool: &Pool,
        (attend, top): (&Attend, u32),
        limits: StepLimits,
        stream: RawStream,
    ) -> Result<usize, CudaError> {
        let key = key(pool, attend, top);
        if let Some(index) = self.list.iter().position(|variant| variant.key == key) {
            return Ok(index);
        }
        Limit::Variants.check(self.list.len() as u64 + 1, variants_max(pool.layout()) as u64)?;
        if is_capturing(stream)? {
            return Err(CudaError::NotPrepared);
        }
        let mut variant = Variant::new(gpu, pool, key, limits, stream)?;
        variant.may_share = may_share(&key, self.list.len());
        self.list.push(variant);
        Ok(self.list.len() - 1)
    }

    pub fn lists(&self, index: usize) -> Option<&ListBuffers> {
        self.list[index].lists.as_ref()
    }

    /// Writes each variant's part of a graph key: the code of the staged step's kernels.
    pub fn key(&self, trees: bool) -> [u8; KEY_VARIANTS] {
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
    /// The addresses in `params` have rows for every token of the staged step, and `scales` belong to the layer.
    pub unsafe fn launch(
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
        let extend = variant.extend.as_ref().filter(|_| variant.count.extend_items > 0);
        assert!(extend.is_some() || variant.count.extend_items == 0, "staging adds the extend kernel if it has items");
        let decode = variant.count.decode_units > 0 || shared.is_some();
        if let Some(shared) = shared {
            let params = (params, scales);
            // SAFETY: the caller guarantees the rows.
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
                // In the image, the kernel's rows follow the split. The tokens of such a row are the entries of its
                // lists, and all are visible.
                params.batch_rows = params.plan + 4 * shape.decode_words() as u64;
                params.window = 0;
            }
            let (kernel, blocks) = (variant.decode_of(width), shape.decode_ctas[width]);
            // SAFETY: the caller guarantees the rows; plan, partial and counters belong to this variant and grid.
            unsafe { gpu.launch_attention(kernel, blocks, &params, &extra, decode_start, stream) }?;
            (params.batch_rows, params.window) = seen;
        }
        if let Some(extend) = extend {
            // The kernel finds the maximum logit before it applies the scale, so the scale must be positive.
            params.negate_q = u32::from(params.scale < 0.0);
            params.scale = params.scale.abs();
            params.plan = extend.plan.address();
            params.partial = extend.partial.address();
            params.counters = extend.counters.address();
            let trees = extend.trees.filter(|_| image.trees);
            let (kernel, blocks) = (trees.unwrap_or(extend.kernel), shape.extend_ctas);
            let extra = ExtraParams { scales, ..ExtraParams::default() };
            // SAFETY: the same.
            unsafe { gpu.launch_attention(kernel, blocks, &params, &extra, Start::InOrder, stream) }?;
        }
        if decode || extend.is_some() {
            start.launched(capturing);
        }
        Ok(())
    }
}

/// Returns whether variant `index` may read spans once; the image has space for only a few such variants.
fn may_share(&VariantKey { chunk, top, is_positive, .. }: &VariantKey, index: usize) -> bool {
    top == 0 && chunk == 0 && is_positive && index < SHARED_VARIANTS_MAX
}

/// Returns whether prepared steps use the extend kernel.
fn has_extend(work: &Prepare<'_>) -> bool {
    // If rows have several tokens, the last padding row may have any number of them.
    work.extend || work.trees || work.decode_tokens > 1
}

/// Returns the maximum number of variants of a pool; `layout` may be any group's view. Groups with
/// their own shape have no labels.
fn variants_max(layout: &PoolLayout) -> usize {
    let has_labels = layout.of_group(0).label_channels() > 0;
    if has_labels { 2 * VARIANTS_MAX } else { VARIANTS_MAX }
}

/// Launches attention in f32, which is for checks and not for serving.
///
/// # Safety
/// The addresses in `params` have rows for every token of the staged step.
pub unsafe fn launch_f32(
    gpu: &Gpu,
    pool: &Pool,
    params: AttendParams,
    scales: LayerScales,
    stream: RawStream,
) -> Result<(), CudaError> {
    let kernel = pool.selection().check();
    let extra = ExtraParams { scales, ..ExtraParams::default() };
    let blocks = 8 * gpu.multiprocessors();
    // SAFETY: the caller guarantees the rows.
    unsafe { gpu.launch_attention(kernel, blocks, &params, &extra, Start::InOrder, stream) }
}

#[cfg(test)]
mod tests {
    use super::variants_max;
    use crate::layout::{Groups, KvDtype, KvShape, PoolConfig, Reach};

    #[test]
    fn layers_of_all_shapes_share_the_room_for_variants() {
        let groups = Groups::new(&[Reach::All, Reach::Window(8)], &[0, 1]).expect("two groups");
        let groups = groups.with_shape(1, KvShape::heads(1, 128), None).expect("group 1 exists");
        let (dtype, label_channels) = (KvDtype::Bf16, 16);
        let config = PoolConfig { layers: 2, groups, dtype, label_channels, ..Default::default() };
        let layout = config.layout().expect("a valid pool");
        let all: Vec<_> = layout.views().map(|view| (view.label_channels(), variants_max(&view))).collect();
        assert_eq!(all, [(16, 16), (0, 16)]);
    }
}
