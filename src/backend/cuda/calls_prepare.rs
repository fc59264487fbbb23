//! Preparation before the first step: compiles the kernels of the host's work and allocates the memory of attention.

use super::check::{check_attend, check_pool};
use super::driver::raw::is_capturing;
use super::error::CudaError;
use super::kernels::{COMPACT_SLOTS, COPY_HEADS, COPY_PAGES, Kernel, LOAD_PLAN, RESOLVE_SELECTION};
use super::opened::Cuda;
use super::prepare::Prepare;
use super::store::labels::Labels;
use super::store::{fp8, rope, rows};
use crate::backend::by_shape::ByShape;
use crate::backend::cuda::attention::latent;
use crate::backend::cuda::attention::variant_table::Prepared;
use crate::backend::cuda::store::pool::Pool;
use crate::backend::{Attend, check};
use crate::layout::Dtype;

impl Cuda {
    /// Compiles the kernels with several threads, frees their PTX, and allocates the memory for this work. During a
    /// graph capture, the backend can neither compile kernels nor allocate memory. Without this preparation, a step
    /// that needs a new kernel waits for the driver's compiler. [`Cuda::modules_after_prepare`] counts the modules
    /// compiled by such steps. Later calls add to earlier ones.
    ///
    /// The host should prepare the attention of all its layers. If some prepared layers have a window or chunks,
    /// `begin` rejects plans with draft trees (`TreeWindow` or `TreeChunk` of
    /// [`PlanError`](crate::backend::PlanError)). Without preparation, the attention of the first such layer rejects
    /// them.
    ///
    /// # Errors
    /// [`CudaError::NotPrepared`] while the stream is captured. Errors for an [`Attend`] without a kernel, for a list
    /// length that is 0 or exceeds the longest row, and for lists over a pool that no such kernel supports.
    /// [`CudaError::Limit`] for too many variants. The driver's errors.
    pub fn prepare(&mut self, work: &Prepare<'_>) -> Result<(), CudaError> {
        self.gpu.bind()?;
        if is_capturing(self.stream.raw())? {
            return Err(CudaError::NotPrepared);
        }
        let longest = self.tables.longest_row();
        let checked = |pool: &Pool, attend: &Attend| {
            self.stage.check_chunk(attend)?;
            check_attend(attend, pool, longest)
        };
        let mut variants: Vec<Prepared<'_>> = Vec::new();
        for attend in work.attend {
            for pool in shapes_of(&self.pools, attend) {
                variants.push((pool, checked(pool, attend)?, 0));
            }
        }
        for (attend, top) in work.lists {
            let pool = self.pools.of_group(0);
            check_pool(*top, pool.layout(), longest)?;
            variants.push((pool, checked(pool, attend)?, *top));
        }
        let selects = !work.lists.is_empty();
        let mut kernels = vec![LOAD_PLAN];
        for pool in self.pools.all() {
            kernels.extend(pool_kernels(pool, work, self.limits.tokens)?);
        }
        let copies = if self.pools.of_group(0).pages().has_table() { COPY_HEADS } else { COPY_PAGES };
        kernels.extend((work.copies || self.swap.is_some()).then_some(copies));
        kernels.extend(work.compactions.then_some(COMPACT_SLOTS));
        kernels.extend(selects.then_some(RESOLVE_SELECTION));
        if self.labels.is_some() {
            kernels.extend(Labels::kernels(self.pools.of_group(0).selection(), selects));
        }
        let is_split = |(pool, ..): &Prepared<'_>| pool.rows() != Dtype::F32;
        let split: Vec<_> = variants.iter().copied().filter(is_split).collect();
        let (limits, stream) = (self.limits, self.stream.raw());
        if self.pools.of_group(0).layout().is_latent() {
            self.gpu.compile_all(&kernels)?;
            for &(pool, attend, _) in &variants {
                self.variants.latent.prepare(&self.gpu, pool, &attend, limits, stream)?;
            }
        } else {
            kernels.extend(self.variants.kernels(&split, limits, work)?);
            self.gpu.compile_all(&kernels)?;
            self.variants.prepare_all(&self.gpu, &split, work, limits, stream)?;
        }
        if let Some(labels) = self.labels.as_mut().filter(|_| selects) {
            labels.used = true;
        }
        let mut all = variants.iter().map(|&(_, attend, _)| attend);
        let is_limited = |attend: &Attend| attend.window.or(attend.chunk).is_some();
        self.limited = self.limited.or_else(|| all.find(is_limited));
        self.prepared = Some(self.gpu.module_count());
        Ok(())
    }

    /// Returns the number of modules that users of this [`Gpu`](super::Gpu) have compiled since the last
    /// [`Cuda::prepare`], or since the start. It stays 0 if the host prepares all its work.
    pub fn modules_after_prepare(&self) -> usize {
        self.gpu.module_count() - self.prepared.unwrap_or(0)
    }
}

/// Returns the pools whose layers use this attention: those of the groups with its window or chunks, or else those of
/// the groups that read all tokens.
fn shapes_of<'a>(pools: &'a ByShape<Pool>, attend: &Attend) -> Vec<&'a Pool> {
    let first = pools.of_group(0);
    let groups = first.layout().groups();
    let of_group = |(group, reach)| check::reads(reach, attend).then(|| pools.of_group(group));
    let mut shapes: Vec<_> = groups.limited().filter_map(of_group).collect();
    if shapes.is_empty() {
        shapes.push(first);
        shapes
            .extend((1..groups.count()).filter(|&group| groups.shares_pages(group)).map(|group| pools.of_group(group)));
    }
    shapes.sort_by_key(|pool| pool.shape());
    shapes.dedup_by_key(|pool| pool.shape());
    shapes
}

/// Returns the kernels for stores into one shape of the pool, and the attention kernels over latent or f32 rows.
fn pool_kernels(pool: &Pool, work: &Prepare<'_>, tokens: u32) -> Result<Vec<&'static Kernel>, CudaError> {
    let (selection, layout) = (pool.selection(), pool.layout());
    let is_quantised = layout.dtype().is_quantised();
    let mut kernels = if is_quantised { fp8::kernels(layout, selection.rows) } else { rows::kernels(pool, tokens) };
    if work.rope_store {
        kernels.push(rope::kernel(pool)?);
    }
    match selection.rows {
        _ if layout.is_latent() => kernels.extend(latent::kernels(selection)),
        Dtype::F32 => kernels.push(selection.check()),
        _ => (),
    }
    Ok(kernels)
}
