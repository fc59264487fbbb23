//! What a host makes ready before its first step: the kernels of all that it will do, and the memory of attention.
//!
//! Not here: which kernel serves what (`kernels/selection.rs`, `attention/variants.rs`).

use super::check::{check_attend, check_pool};
use super::driver::raw::is_capturing;
use super::error::CudaError;
use super::kernels::{COMPACT_SLOTS, COPY_PAGES, LOAD_PLAN, RESOLVE_SELECTION};
use super::opened::Cuda;
use super::store::labels::Labels;
use super::store::{fp8, rows};
use crate::backend::Attend;
use crate::backend::cuda::attention::latent;
use crate::layout::Dtype;

/// What a host will do with a [`Cuda`]: [`Cuda::prepare`] loads the kernels of that, and no others.
#[derive(Clone, Copy, Debug)]
pub struct Prepare<'a> {
    /// How layers attend, each way once.
    pub attend: &'a [Attend],
    /// How layers attend over lists, each way once with the length of its lists. Default: none.
    pub lists: &'a [(Attend, u32)],
    /// Most new tokens of a row in steps that decode, drafts among them; a step of `tokens` for `rows`, padding
    /// included, as a graph's size, counts as `tokens.div_ceil(rows)`. Default: 1.
    pub decode_tokens: u32,
    /// Rows have any number of new tokens in some steps, as prompts have. Default: `true`.
    pub extend: bool,
    /// Some rows are trees of drafts. Default: `false`.
    pub trees: bool,
    /// Plans name [spans](crate::SharedSpans) that rows share. Default: `true`.
    pub spans: bool,
    /// Pages are copied. Default: `true`.
    pub copies: bool,
    /// Slots are [compacted](crate::Backend::compact). Default: `false`.
    pub compactions: bool,
}

impl<'a> Prepare<'a> {
    /// Prompts, decode steps of one new token a row, and copies of pages, for layers that attend in these ways.
    pub const fn new(attend: &'a [Attend]) -> Self {
        Self {
            attend,
            lists: &[],
            decode_tokens: 1,
            extend: true,
            trees: false,
            spans: true,
            copies: true,
            compactions: false,
        }
    }

    /// All ways of attention, with the length of their lists; 0: none.
    pub(super) fn variants(&self) -> impl Iterator<Item = (Attend, u32)> + use<'a> {
        let plain = self.attend.iter().map(|&attend| (attend, 0));
        plain.chain(self.lists.iter().copied())
    }
}

impl Cuda {
    /// Loads the kernels and makes the memory for what the host will do, several kernels at a time on several threads.
    /// The texts of kernels are released at the end. A capture needs that to have happened, and a step that needs what
    /// was not prepared waits until the driver has compiled it: [`Cuda::modules_after_prepare`] counts those.
    ///
    /// A host prepares all that its model's layers attend with: where some have a window, plans with trees of drafts
    /// are refused from then on as soon as they begin ([`PlanError::TreeWindow`](crate::PlanError)), and not at the
    /// first such layer. Later calls add to earlier ones.
    ///
    /// # Errors
    /// An [`Attend`] that no kernel serves, lists of length 0 or above a sequence's tokens or over a pool that no such
    /// kernel serves, [`CudaError::NotPrepared`] while the stream captures, or the driver's.
    pub fn prepare(&mut self, work: &Prepare<'_>) -> Result<(), CudaError> {
        self.gpu.bind()?;
        if is_capturing(self.stream.raw())? {
            return Err(CudaError::NotPrepared);
        }
        let (layout, longest) = (*self.pool.layout(), self.tables.longest_row());
        let checked = |attend: &Attend| check_attend(attend, &self.pool, longest);
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
        kernels.push(LOAD_PLAN);
        kernels.extend(work.copies.then_some(COPY_PAGES));
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
        self.window = self.window.or(work.variants().find_map(|(attend, _)| attend.window));
        self.prepared = Some(self.gpu.module_count());
        Ok(())
    }

    /// Modules loaded in the device's context, by whoever uses this [`Gpu`](super::Gpu), since the last
    /// [`Cuda::prepare`], or since the first kernel where there was none. 0 in a host that prepares all that it does.
    pub fn modules_after_prepare(&self) -> usize {
        self.gpu.module_count() - self.prepared.unwrap_or(0)
    }
}
