//! The checks of all backends: the plan, attention, layers and pages fit the pool. A call runs the checks before it
//! changes anything.
//!
//! Plans may arrive as bytes from another process, so the checks trust no field. Each backend wraps [`PlanError`] in
//! its own error, and adds checks of its own limits. The cost is O(rows, new tokens, table writes and spans), mostly in
//! vectorised loops.

use super::{Attend, Moved, OpenSteps, Operand, PlanError};
use crate::id::{LayerId, MoveId, PageId, SlotId, StepId};
use crate::layout::{LayerPlace, PoolLayout, Reach, TableShape};
use crate::plan::{self, BatchPlan, Compaction, PageCopy, PageMove, SlotMapping, SpanCheck, TableWrite};

/// Checks that a step may begin now (B2, B8).
pub(super) fn may_begin(steps: &OpenSteps, step: StepId) -> Result<(), PlanError> {
    let last = steps.last();
    if step <= last {
        return Err(PlanError::AlreadyBegun { step, last });
    }
    if steps.has_room() { Ok(()) } else { Err(PlanError::OpenSteps { max: steps.max() }) }
}

/// Checks the number of a plan's tokens, including padding.
pub(super) fn step_tokens(plan: &BatchPlan<'_>, max: u32) -> Result<(), PlanError> {
    let tokens = plan.token_count();
    if tokens <= max as usize { Ok(()) } else { Err(PlanError::StepTokens { tokens, max }) }
}

/// Checks that a step is open (B8). O(open steps).
pub(super) fn is_open(steps: &OpenSteps, step: StepId) -> Result<(), PlanError> {
    if steps.contains(step) {
        return Ok(());
    }
    Err(if step <= steps.last() { PlanError::Ended { step } } else { PlanError::NotBegun { step } })
}

/// Checks a plan, except its step, its number of tokens, its spans and its table writes.
pub(super) fn plan(plan: &BatchPlan<'_>, layout: &PoolLayout, table: &TableShape) -> Result<(), PlanError> {
    let (positions, tokens) = (plan.positions.len(), plan.tokens.len());
    let slots = plan.slot_mapping.len();
    if positions != tokens || positions != slots {
        return Err(PlanError::Tokens { positions, tokens, slots });
    }
    let (slots, wanted) = (plan.track_slots.len(), (table.tracks as usize - 1) * tokens);
    if slots != wanted {
        return Err(PlanError::TrackSlots { slots, wanted });
    }
    rows(plan, longest_row(table, layout.page_size()), table.rows)?;
    plan::check_masks(plan).map_err(|token| {
        let mask = plan.masks.get(token).copied().unwrap_or(0);
        PlanError::Mask { token, mask }
    })?;
    if table.tracks > 1 {
        slots_exist(plan.track_slots, layout.slot_count())?;
    }
    slots_exist(plan.slot_mapping, layout.slot_count())
}

/// Rejects a window, chunks or a first position for a plan with draft trees. These count positions, and the masks of
/// trees count slots.
pub(super) fn window(plan: &BatchPlan<'_>, attend: &Attend) -> Result<(), PlanError> {
    match (attend.window, attend.chunk) {
        _ if plan.masks.is_empty() => Ok(()),
        _ if attend.first > 0 => Err(PlanError::First { first: attend.first }),
        (Some(window), _) => Err(PlanError::TreeWindow { window }),
        (None, Some(chunk)) => Err(PlanError::TreeChunk { chunk }),
        (None, None) => Ok(()),
    }
}

/// Returns whether attention uses exactly the group's window or chunks. A group that reads all tokens allows any.
pub(super) fn reads(reach: Reach, attend: &Attend) -> bool {
    match (reach, attend.window, attend.chunk) {
        (Reach::All, ..) => true,
        (Reach::Window(size), window, None) => window == Some(size),
        (Reach::Chunk(size), None, chunk) => chunk == Some(size),
        _ => false,
    }
}

/// Checks that attention uses the window or chunks of the layer's group (B17).
pub(super) fn reach(layer: LayerId, layout: &PoolLayout, attend: &Attend) -> Result<(), PlanError> {
    let group = layout.place(layer).group;
    let (reach, Attend { window, chunk, .. }) = (layout.groups().reach(group), *attend);
    if reads(reach, attend) { Ok(()) } else { Err(PlanError::Reach { layer, group, reach, window, chunk }) }
}

/// Checks that the layer of a sparse read is in group 0.
pub(super) fn sparse_layer(layer: LayerId, layout: &PoolLayout) -> Result<(), PlanError> {
    match layout.place(layer).group {
        0 => Ok(()),
        group => Err(PlanError::SparseGroup { layer, group }),
    }
}

/// Returns the maximum number of tokens of a page table row.
pub(super) fn longest_row(table: &TableShape, page_size: u32) -> u64 {
    u64::from(table.leaves_per_row) * u64::from(table.leaf_pages) * u64::from(page_size)
}

/// Checks that query rows are contiguous, one for each token, and checks each sequence's row and length.
fn rows(plan: &BatchPlan<'_>, max: u64, rows: u32) -> Result<(), PlanError> {
    let mut next = 0;
    for (i, row) in plan.rows.iter().enumerate() {
        if u64::from(row.qo_start) != next {
            return Err(PlanError::QueryRows { row: i });
        }
        next += u64::from(row.extend_len);
        // Padding has neither a row nor a length.
        if row.kv_len == 0 {
            continue;
        }
        if row.row.raw() >= rows {
            return Err(PlanError::Row { row: row.row, rows });
        }
        if row.kv_len < row.extend_len || u64::from(row.kv_len) > max {
            let (kv_len, min) = (row.kv_len, row.extend_len);
            return Err(PlanError::KvLen { row: row.row, kv_len, min, max });
        }
    }
    let whole = next == plan.token_count() as u64;
    if whole { Ok(()) } else { Err(PlanError::QueryRows { row: plan.rows.len() }) }
}

/// Checks that slots are in the pool. Negative slots store nothing.
fn slots_exist(slots: SlotMapping<'_>, slot_count: u64) -> Result<(), PlanError> {
    let largest = match slots {
        SlotMapping::I32(slots) => slots.iter().copied().max().map(i64::from),
        SlotMapping::I64(slots) => slots.iter().copied().max(),
    };
    match largest {
        Some(slot) if slot >= 0 && slot as u64 >= slot_count => {
            Err(PlanError::Slot { slot: SlotId::new(slot as u64), slot_count })
        }
        _ => Ok(()),
    }
}

/// Checks a plan's shared spans. O(rows and spans).
pub(super) fn spans(seen: &mut SpanCheck, plan: &BatchPlan<'_>) -> Result<(), PlanError> {
    seen.check(&plan.shared, plan.rows).map_err(|span| PlanError::Span { span })
}

/// Checks that every write is inside the tables and its value is a valid leaf or page, so attention need not check.
pub(super) fn table_writes(writes: &[TableWrite], layout: &PoolLayout, table: &TableShape) -> Result<(), PlanError> {
    let directory = table.page_word(0, 0);
    let words = u32::try_from(table.words()).unwrap_or(u32::MAX);
    let (blocks, pages) = (table.blocks(), layout.page_count());
    let count = |index| if index < directory { blocks } else { pages };
    let off = |&TableWrite { index, value }: &TableWrite| u32::from(index >= words) | u32::from(value >= count(index));
    if writes.iter().fold(0, |any, write| any | off(write)) == 0 {
        return Ok(());
    }
    let &TableWrite { index, value } = writes.iter().find(|write| off(write) != 0).expect("a write is wrong");
    Err(if index >= words {
        PlanError::TableIndex { index, words: table.words() }
    } else {
        PlanError::TableValue { index, value, count: count(index) }
    })
}

/// Checks that a layer exists and stores K and V.
pub(super) fn layer(layer: LayerId, layout: &PoolLayout) -> Result<(), PlanError> {
    if keeps_state(layer, layout)? { Err(PlanError::StateLayer { layer }) } else { Ok(()) }
}

/// Returns whether a layer, which must exist, keeps a state.
fn keeps_state(layer: LayerId, layout: &PoolLayout) -> Result<bool, PlanError> {
    let layers = layout.layers();
    if layer.raw() >= layers {
        return Err(PlanError::Layer { layer, layers });
    }
    Ok(layout.state().is_some() && Some(layout.groups().group(layer)) == layout.groups().state_group())
}

/// Returns the place of the state of a layer that keeps one.
pub(super) fn state_layer(layer: LayerId, layout: &PoolLayout) -> Result<LayerPlace, PlanError> {
    if keeps_state(layer, layout)? { Ok(layout.place(layer)) } else { Err(PlanError::NoState { layer }) }
}

pub(super) fn page(page: PageId, page_count: u32) -> Result<(), PlanError> {
    if page.raw() < page_count { Ok(()) } else { Err(PlanError::Page { page, page_count }) }
}

/// Checks copies; `counts` are the numbers of pages of the source pool and of the target pool.
pub(super) fn copies(copies: &[PageCopy], counts: (u32, u32)) -> Result<(), PlanError> {
    copies.iter().try_for_each(|copy| page(copy.source, counts.0).and_then(|()| page(copy.target, counts.1)))
}

/// Checks the id and the pages of a batch of moves; `last` contains the last id of each direction.
pub(super) fn moves(id: MoveId, moves: &[PageMove], layout: &PoolLayout, last: Moved) -> Result<(), PlanError> {
    let last = last.saved.max(last.loaded);
    if id <= last {
        return Err(PlanError::MoveOrder { id, last });
    }
    let pages = layout.swap_region_pages();
    moves.iter().try_for_each(|&PageMove { device, swap }| {
        page(device, layout.page_count())?;
        if swap.raw() < pages { Ok(()) } else { Err(PlanError::SwapPage { page: swap, pages }) }
    })
}

/// Checks that the rows of compactions exist, and that kept slots are within them.
pub(super) fn compactions(
    compactions: &[Compaction],
    layout: &PoolLayout,
    table: &TableShape,
) -> Result<(), PlanError> {
    let max = longest_row(table, layout.page_size());
    compactions.iter().try_for_each(|&compaction| {
        let (row, end) = (compaction.row, compaction.end());
        if row.raw() >= table.rows {
            return Err(PlanError::Row { row, rows: table.rows });
        }
        if end <= max { Ok(()) } else { Err(PlanError::Place { row, place: end - 1, max }) }
    })
}

/// Checks attention's parameters for a pool.
pub(super) fn attend(attend: &Attend, layout: &PoolLayout) -> Result<(), PlanError> {
    let (q_heads, kv_heads) = (attend.q_heads, layout.kv_heads());
    if q_heads == 0 || q_heads % kv_heads != 0 {
        return Err(PlanError::Heads { q_heads, kv_heads });
    }
    if let Some(chunk) = attend.chunk.filter(|chunk| !chunk.is_power_of_two()) {
        return Err(PlanError::ChunkSize { chunk });
    }
    if attend.window == Some(0) {
        return Err(PlanError::EmptyWindow);
    }
    if !attend.scale.is_finite() {
        return Err(PlanError::Scale { scale: attend.scale });
    }
    if layout.is_latent() && attend.scale == Attend::new(1, layout.head_dim()).scale {
        return Err(PlanError::LatentScale { scale: attend.scale });
    }
    match attend.soft_cap {
        Some(soft_cap) if !(soft_cap > 0.0 && soft_cap.is_finite()) => Err(PlanError::SoftCap { soft_cap }),
        _ => Ok(()),
    }
}

/// Checks that there are exactly `wanted` elements.
pub(super) fn length(operand: Operand, actual: usize, wanted: usize) -> Result<(), PlanError> {
    if actual == wanted { Ok(()) } else { Err(PlanError::Length { operand, actual, wanted }) }
}

/// Checks that there is one sink for each query head, below infinity.
pub(super) fn sinks(sinks: &[f32], q_heads: u32) -> Result<(), PlanError> {
    length(Operand::Sinks, sinks.len(), q_heads as usize)?;
    match (0..).zip(sinks).find(|(_, sink)| sink.is_nan() || **sink == f32::INFINITY) {
        Some((head, &sink)) => Err(PlanError::Sink { head, sink }),
        None => Ok(()),
    }
}

/// Checks that `actual` elements contain `rows` rows of `width`, and returns the stride. The last row needs no padding.
pub(super) fn row_stride(
    operand: Operand,
    actual: usize,
    stride: Option<usize>,
    rows: usize,
    width: usize,
) -> Result<usize, PlanError> {
    let stride = stride.unwrap_or(width);
    if stride < width {
        return Err(PlanError::Stride { operand, stride, width });
    }
    // A saturated length exceeds any memory.
    let wanted = match rows {
        0 => 0,
        _ => (rows - 1).saturating_mul(stride).saturating_add(width),
    };
    if actual < wanted { Err(PlanError::Length { operand, actual, wanted }) } else { Ok(stride) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_measured_without_overflow() {
        let rows = |stride, actual| row_stride(Operand::K, actual, stride, 3, 8);
        let length = |actual, wanted| Err(PlanError::Length { operand: Operand::K, actual, wanted });
        assert_eq!(rows(None, 24), Ok(8));
        assert_eq!(rows(None, 23), length(23, 24));
        assert_eq!(rows(Some(10), 28), Ok(10));
        assert_eq!(rows(Some(10), 27), length(27, 28));
        let narrow = PlanError::Stride { operand: Operand::K, stride: 7, width: 8 };
        assert_eq!(rows(Some(7), 99), Err(narrow));
        for stride in [1 << 62, 1 << 63, usize::MAX] {
            assert!(matches!(rows(Some(stride), 1 << 40), Err(PlanError::Length { .. })));
        }
    }
}
