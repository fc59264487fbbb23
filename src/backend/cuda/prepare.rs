//! Preparation before the first step: loads the kernels that the host will use and allocates memory for attention.
//!
//! Not here: selection of kernels (`kernels/selection.rs`, `attention/variants.rs`).

use super::check::{check_attend, check_pool};
use super::driver::raw::is_capturing;
use super::error::CudaError;
use super::kernels::{COMPACT_SLOTS, COPY_PAGES, LOAD_PLAN, RESOLVE_SELECTION};
use super::opened::Cuda;
use super::store::labels::Labels;
use super::store::{fp8, rope, rows};
use crate::backend::Attend;
use crate::backend::cuda::attention::latent;
use crate::layout::Dtype;

/// The host's future work with a [`Cuda`]. [`Cuda::prepare`] loads the kernels for this work and no others.
#[derive(Clone, Copy, Debug)]
pub struct Prepare<'a> {
    /// The distinct attention parameters of the layers.
    pub attend: &'a [Attend],
    /// The distinct attention parameters of layers that attend over lists, with the lists' lengths. Default: none.
    pub lists: &'a [(Attend, u32)],
    /// Most new tokens of a row in decode steps, drafts included. A graph's size of `tokens` for `rows`, padding
    /// included, counts as `tokens.div_ceil(rows)`. Default: 1.
    pub decode_tokens: u32,
    /// Rows of some steps have any number of new tokens, as prompts have. Default: `true`.
    pub extend: bool,
    /// Some rows are trees of drafts. Default: `false`.
    pub trees: bool,
    /// Plans name [spans](crate::SharedSpans) that rows share. Default: `true`.
    pub spans: bool,
    /// Pages are copied. Default: `true`.
    pub copies: bool,
    /// q and k are rotated by [`rope_store`](crate::Backend::rope_store). Default: `false`.
    pub rope_store: bool,
    /// Slots are [compacted](crate::Backend::compact). Default: `false`.
    pub compactions: bool,
}

impl<'a> Prepare<'a> {
    /// Returns the preparation for prompts, decode steps of one new token a row, and page copies, with these attention
    /// parameters.
    pub const fn new(attend: &'a [Attend]) -> Self {
        Self {
            attend,
            lists: &[],
            decode_tokens: 1,
            extend: true,
            trees: false,
            spans: true,
            copies: true,
            rope_store: false,
            compactions: false,
        }
    }

    /// Returns all attention parameters with the length of their lists (0: none).
    pub(super) fn variants(&self) -> impl Iterator<Item = (Attend, u32)> + use<'a> {
        let plain = self.attend.iter().map(|&attend| (attend, 0));
        plain.chain(self.lists.iter().copied())
    }
}

impl Cuda {
    /// Loads the kernels and allocates the memory for this work; several threads load several kernels at a time.
    /// Releases the kernels' texts at the end. A capture requires this preparation. A step that needs an unprepared
    /// kernel waits for the driver's compiler; [`Cuda::modules_after_prepare`] counts such modules.
    ///
    /// The host prepares the attention of all its layers. If some layers have a window or chunks, `begin` then rejects
    /// plans with trees of drafts ([`PlanError::TreeWindow`](crate::PlanError)); otherwise the first such layer would.
    /// Later calls add to earlier ones.
    ///
    /// # Errors
    /// Returns an error if no kernel serves an [`Attend`], if lists have length 0, exceed a sequence's tokens or need a
    /// kernel that the pool lacks, [`CudaError::NotPrepared`] while the stream is captured, or the driver's error.
    pub fn prepare(&mut self, work: &Prepare<'_>) -> Result<(), CudaError> {
        self.gpu.bind()?;
        if is_capturing(self.stream.raw())? {
            return Err(CudaError::NotPrepared);
        }
        let (layout, longest) = (*self.pool.layout(), self.tables.longest_row());
        let checked = |attend: &Attend| {
            self.stage.check_chunk(attend)?;
            check_attend(attend, &self.pool, longest)
        };
        let attend = work.attend.iter().map(checked).collect::<Result<Vec<_>, _>>()?;
        let over_list = |&(attend, top): &(Attend, u32)| {
            check_pool(top, &layout, longest)?;
            Ok((checked(&attend)?, top))
        };
        let lists = work.lists.iter().map(over_list).collect::<Result<Vec<_>, CudaError>>()?;
        let work = &Prepare { attend: &attend, lists: &lists, ..*work };
        let (selects, has_labels) = (!lists.is_empty(), self.labels.is_some());
        let of = *self.pool.selection();
        let mut kernels = match layout.dtype().is_quantised() {
            true => fp8::kernels(&layout, of.rows),
            false => rows::kernels(&layout, self.limits.tokens),
        };
        if work.rope_store {
            kernels.push(rope::kernel(&self.pool)?);
        }
        kernels.push(LOAD_PLAN);
        kernels.extend((work.copies || self.host.is_some()).then_some(COPY_PAGES));
        kernels.extend(work.compactions.then_some(COMPACT_SLOTS));
        kernels.extend(selects.then_some(RESOLVE_SELECTION));
        if has_labels {
            kernels.extend(Labels::kernels(of.rows, selects));
        }
        let has_variants = !layout.is_latent() && of.rows != Dtype::F32;
        kernels.extend(match of.rows {
            _ if layout.is_latent() => latent::kernels(&of),
            Dtype::F32 => vec![of.check()],
            _ => self.variants.kernels(&self.pool, self.limits, work)?,
        });
        self.gpu.load_all(&kernels)?;
        let (limits, stream) = (self.limits, self.stream.raw());
        if has_variants {
            self.variants.prepare_all(&self.gpu, &self.pool, work, limits, stream)?;
        } else if layout.is_latent() {
            for attend in work.attend {
                self.variants.latent.prepare(&self.gpu, &self.pool, attend, limits, stream)?;
            }
        }
        if let Some(labels) = self.labels.as_mut().filter(|_| selects) {
            labels.used = true;
        }
        let mut all = work.variants().map(|(attend, _)| attend);
        let is_limited = |attend: &Attend| attend.window.or(attend.chunk).is_some();
        self.limited = self.limited.or_else(|| all.find(is_limited));
        self.prepared = Some(self.gpu.module_count());
        Ok(())
    }

    /// Returns the number of modules that users of this [`Gpu`](super::Gpu) have loaded in the device's context since
    /// the last [`Cuda::prepare`], or since the first kernel if there was none. It stays 0 if the host prepares all its
    /// work.
    pub fn modules_after_prepare(&self) -> usize {
        self.gpu.module_count() - self.prepared.unwrap_or(0)
    }
}
