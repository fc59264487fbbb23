//! Reading some of a long context: which positions, and attention over them.
//!
//! What is read is a *selection*: plain numbers, `[rows, kv_heads, top]` of u32, one list for each row of the batch and
//! each kv head. [`SparseBackend::select`] fills it by labels (Double Sparsity, Yang et al. 2024, arXiv:2408.07092); a
//! host may fill it by what it likes: bounds of pages (Quest), an indexer (DeepSeek). A list names positions of the
//! row's sequence. It ascends and names none twice; [`NO_POSITION`] stands for nothing, and so does whatever the row
//! does not see: past its own position, or before its window.
//!
//! Rows of one new token have lists. Those of more, and trees, read all that they see: a prefill wants all of it.

use super::{Attend, Backend, PlanError, Queries};
use crate::id::LayerId;
use crate::layout::PoolLayout;
use crate::plan::{BatchPlan, BatchRow};

/// Stands in a selection for no position.
pub const NO_POSITION: u32 = u32::MAX;

/// What a selection is made by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Select {
    /// Query heads on this rank: a multiple of its kv heads.
    pub q_heads: u32,
    /// Positions of one list: at least 1, at most those that a row of the page tables has pages for.
    pub top: u32,
    /// Sliding window: a query at position p sees positions above `p - window` only. At least 1.
    pub window: Option<u32>,
}

/// Lists of positions, wherever they are: `[rows, kv_heads, top]`, packed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Selection<P> {
    /// The lists: for [`Cpu`](super::Cpu) a slice, for `Cuda` an address on the device.
    pub positions: P,
    /// Positions of one list, at least 1.
    pub top: u32,
}

/// A backend that attends to chosen positions.
///
/// * B9. [`select`](SparseBackend::select) gives the same positions on every backend, bit by bit.
/// * B10. [`attend_selected`](SparseBackend::attend_selected) reads of a row with one new token the positions of its
///   lists that the row sees, and no other; else it is [`attend_queries`](Backend::attend_queries).
pub trait SparseBackend: Backend {
    /// Lists to read.
    type Positions<'a>: Copy;
    /// Lists to write.
    type PositionsMut<'a>;

    /// Chooses, for each row with one new token and each kv head, the `top` positions with the greatest scores, the
    /// row's own always among them. Those of other rows, padding too, become [`NO_POSITION`].
    ///
    /// The score of a position is the product of its labels with the queries in the labels' channels, summed over the
    /// query heads of the kv head: in f32, first the sum of the queries, head after head, then `score = fma(sum, label,
    /// score)`, channel after channel, from 0. Of equal scores the later position is the better; NaN is worse than all
    /// others.
    ///
    /// # Errors
    /// The backend's own: among others [`PlanError::NoLabels`] and [`PlanError::Top`].
    fn select(
        &mut self,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        select: &Select,
        q: Self::Rows<'_>,
        positions: Self::PositionsMut<'_>,
    ) -> Result<(), Self::Error>;

    /// As [`attend_queries`](Backend::attend_queries), but rows with one new token read what `selection` names. Where
    /// that is nothing, the output is 0 and the log-sum-exp the head's sink, or minus infinity.
    ///
    /// # Errors
    /// As `attend`; and [`PlanError::Top`].
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

/// Whether a row of the batch reads what its lists name: a tree's tokens see what their masks say.
pub(super) fn has_lists(plan: &BatchPlan<'_>, row: &BatchRow) -> bool {
    row.kv_len > 0 && row.extend_len == 1 && plan.tree(row).is_none()
}

/// Refuses lists of no positions, and of more than a sequence has.
pub(super) fn check_top(top: u32, longest: u64) -> Result<(), PlanError> {
    if top == 0 || u64::from(top) > longest {
        return Err(PlanError::Top { top, max: longest });
    }
    Ok(())
}

/// A selection that makes sense for a pool whose longest row has so many tokens.
pub(super) fn check(select: &Select, layout: &PoolLayout, longest: u64) -> Result<(), PlanError> {
    let Select { q_heads, top, window } = *select;
    super::check::attend(&Attend { window, ..Attend::new(q_heads, 1) }, layout)?;
    if layout.label_channels() == 0 {
        return Err(PlanError::NoLabels);
    }
    check_top(top, longest)
}
