//! Sparse reads: selection of positions of a long context, and attention over them.
//!
//! A *selection* is an array `[rows, kv_heads, top]` of u32: one list for each row of the batch and each kv head.
//! [`SparseBackend::select`] fills it by labels (Double Sparsity, Yang et al. 2024, arXiv:2408.07092). A host may fill
//! it by another rule, such as bounds of pages (Quest) or an indexer (DeepSeek). A list contains ascending, distinct
//! positions of the row's sequence. Kernels ignore [`NO_POSITION`] and positions that the row cannot read.
//!
//! Lists apply to rows with one new token. Rows with several new tokens, and draft trees, read all their positions.

use super::{Attend, Backend, PlanError, Queries};
use crate::id::LayerId;
use crate::layout::PoolLayout;
use crate::plan::{BatchPlan, BatchRow};

/// Marks an unused entry of a selection.
pub const NO_POSITION: u32 = u32::MAX;

/// Parameters of a selection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Select {
    /// Number of query heads on this rank: a multiple of its kv heads.
    pub q_heads: u32,
    /// Length of a list: at least 1, at most the positions of a page table row.
    pub top: u32,
    /// Sliding window in tokens, at least 1: a query at position `p` reads only positions above `p - window`.
    pub window: Option<u32>,
}

/// Lists of positions, `[rows, kv_heads, top]`, contiguous, in the backend's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Selection<P> {
    /// The lists: a slice for `Cpu`, a device address for `Cuda`.
    pub positions: P,
    /// Length of a list, at least 1.
    pub top: u32,
}

/// A backend with attention over selected positions.
///
/// * B9. [`select`](SparseBackend::select) returns the same positions on every backend.
/// * B10. For a row with one new token, [`attend_selected`](SparseBackend::attend_selected) reads exactly the readable
///   positions of its lists. For other rows it equals [`attend_queries`](Backend::attend_queries).
pub trait SparseBackend: Backend {
    /// Lists to read.
    type Positions<'a>: Copy;
    /// Lists to write.
    type PositionsMut<'a>;

    /// Selects the `top` positions with the greatest scores, for each row with one new token and each kv head.
    ///
    /// The row's own position is always selected. Lists of other rows, including padding, become [`NO_POSITION`].
    ///
    /// A position's score is the dot product of its labels with the queries, summed over the query heads of the kv
    /// head. It is computed in f32: first the sum of the queries in the order of heads, then `score = fma(sum, label,
    /// score)` from 0, in the order of channels. Among equal scores, the later position wins. NaN loses to every score.
    ///
    /// # Errors
    /// Errors of the backend, among them [`PlanError::NoLabels`], [`PlanError::SparseGroup`] and [`PlanError::Top`].
    fn select(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        select: &Select,
        q: Self::Rows<'_>,
        positions: Self::PositionsMut<'_>,
    ) -> Result<(), Self::Error>;

    /// Computes [`attend_queries`](Backend::attend_queries), but each row with one new token reads only its lists.
    ///
    /// If a list has no readable position, the output is 0. The log-sum-exp is then the head's sink, or minus infinity
    /// without sinks.
    ///
    /// # Errors
    /// The errors of `attend_queries`, [`PlanError::SparseGroup`] and [`PlanError::Top`].
    #[allow(clippy::too_many_arguments)]
    fn attend_selected(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        attend: &Attend,
        selection: Selection<Self::Positions<'_>>,
        queries: Queries<Self::Rows<'_>, Self::Sinks<'_>>,
        out: Self::RowsMut<'_>,
        lse: Option<Self::Lse<'_>>,
    ) -> Result<(), Self::Error>;
}

/// Returns whether lists apply to a row: it has one new token, and is neither a tree nor padding.
pub(super) fn has_lists(plan: &BatchPlan<'_>, row: &BatchRow) -> bool {
    row.kv_len > 0 && row.extend_len == 1 && plan.tree(row).is_none()
}

/// Rejects empty lists, and lists longer than a sequence.
pub(super) fn check_top(top: u32, longest: u64) -> Result<(), PlanError> {
    if top == 0 || u64::from(top) > longest {
        return Err(PlanError::Top { top, max: longest });
    }
    Ok(())
}

/// Checks a selection for a pool whose longest row has `longest` tokens.
pub(super) fn check(select: &Select, layout: &PoolLayout, longest: u64) -> Result<(), PlanError> {
    let Select { q_heads, top, window } = *select;
    super::check::attend(&Attend { window, ..Attend::new(q_heads, 1) }, layout)?;
    if layout.label_channels() == 0 {
        return Err(PlanError::NoLabels);
    }
    check_top(top, longest)
}
