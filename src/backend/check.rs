//! What a backend refuses before it does anything: plans, attention, layers and pages that do not fit the pool.
//!
//! Plans can come from anywhere, as bytes, so nothing in them is believed. Every backend calls these functions and
//! wraps [`PlanError`] in an error of its own. A backend refuses by itself what fits the pool but not the backend: a
//! shape without a kernel, rows on another device.
//!
//! Cost: the batch and its new tokens, in loops that the compiler vectorises; a loop looks for the entry only where one
//! is off.

use std::fmt;

use super::{Attend, OpenSteps};
use crate::error::Count;
use crate::id::{LayerId, PageId, RowId, SlotId, StepId};
use crate::layout::{PoolLayout, TableShape};
use crate::plan::{self, BatchPlan, Compaction, PageCopy, SlotMapping, SpanCheck, TableWrite};

/// An argument of a call that carries numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Operand {
    /// Queries.
    Q,
    /// Keys.
    K,
    /// Values.
    V,
    /// Logits that take weight and give no value.
    Sinks,
    /// Attention's output.
    Out,
    /// Log-sum-exp.
    Lse,
    /// Lists of positions.
    Selection,
}

impl fmt::Display for Operand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Q => "q",
            Self::K => "k",
            Self::V => "v",
            Self::Sinks => "sinks",
            Self::Out => "out",
            Self::Lse => "the log-sum-exp",
            Self::Selection => "the selection",
        })
    }
}

/// Why a plan, or what was asked with it, fits no backend of this pool. Nothing was written.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub enum PlanError {
    /// The step's plan was not begun.
    NotBegun {
        /// The step.
        step: StepId,
    },
    /// The step, or a later one, has begun already, or ended.
    AlreadyBegun {
        /// The step.
        step: StepId,
        /// The last step that began or ended.
        last: StepId,
    },
    /// The step has ended: its pages may be another sequence's.
    Ended {
        /// The step.
        step: StepId,
    },
    /// As many steps are open as the backend was opened for.
    OpenSteps {
        /// The most.
        max: u32,
    },
    /// The plan's arrays of one entry a token differ in length.
    Tokens {
        /// Tokens, by the positions.
        positions: usize,
        /// Tokens, by the token array.
        tokens: usize,
        /// Tokens, by the slot mapping.
        slots: usize,
    },
    /// The sequences' query rows do not follow one another, or do not add up to the tokens.
    QueryRows {
        /// The first sequence that is off; the number of sequences if the sum is.
        row: usize,
    },
    /// Shared spans that are not nested as they must be, name no row or one twice, or reach into what is computed now.
    Span {
        /// The first that is off; their number, if the members are.
        span: usize,
    },
    /// Masks that are not one for each token, or one without its token's own bit, or with bits of slots that are not
    /// there or behind it, or of more than 64 new tokens.
    Mask {
        /// The first token whose mask is off; the number of tokens, if that of the masks is.
        token: usize,
        /// Its mask; 0 if there is none.
        mask: u64,
    },
    /// A sliding window for a plan with trees of drafts.
    TreeWindow {
        /// The window.
        window: u32,
    },
    /// A sequence with a row that the page tables do not have.
    Row {
        /// The row.
        row: RowId,
        /// Rows of the page tables.
        rows: u32,
    },
    /// A sequence with fewer tokens than it extends by, or more than a row of the page tables holds.
    KvLen {
        /// The sequence's row.
        row: RowId,
        /// Its tokens.
        kv_len: u32,
        /// The fewest.
        min: u32,
        /// The most.
        max: u64,
    },
    /// A slot to be kept that is past what a row of the page tables holds.
    Place {
        /// The row.
        row: RowId,
        /// The slot's place in it.
        place: u64,
        /// Most slots of a row.
        max: u64,
    },
    /// A slot past the pool.
    Slot {
        /// The slot.
        slot: SlotId,
        /// Slots of the pool.
        slot_count: u64,
    },
    /// A write past the page tables.
    TableIndex {
        /// The word's index.
        index: u32,
        /// Words of the page tables.
        words: usize,
    },
    /// A word of the page tables that names no page, or no chunk.
    TableValue {
        /// The word's index.
        index: u32,
        /// Its value.
        value: u32,
        /// Pages of the pool, or chunks of the tables.
        count: u32,
    },
    /// A page past the pool, or past the host's pages.
    Page {
        /// The page.
        page: PageId,
        /// Pages there are.
        page_count: u32,
    },
    /// A layer past the model.
    Layer {
        /// The layer.
        layer: LayerId,
        /// Layers of the model.
        layers: u32,
    },
    /// Query heads that are not a multiple of the kv heads.
    Heads {
        /// Query heads.
        q_heads: u32,
        /// Heads of K and V.
        kv_heads: u32,
    },
    /// A window of no tokens.
    EmptyWindow,
    /// A scale that is not finite.
    Scale {
        /// The scale.
        scale: f32,
    },
    /// A scale by the length of latent rows, which says nothing of the heads that they stand for.
    LatentScale {
        /// The scale.
        scale: f32,
    },
    /// A soft cap that is not above 0, or not finite.
    SoftCap {
        /// The cap.
        soft_cap: f32,
    },
    /// A sink that is NaN or infinity.
    Sink {
        /// The query head.
        head: u32,
        /// Its sink.
        sink: f32,
    },
    /// Lists of no positions, or of more than a sequence can have.
    Top {
        /// Positions of a list.
        top: u32,
        /// The most.
        max: u64,
    },
    /// A selection by labels from a pool that keeps none.
    NoLabels,
    /// An argument with another number of elements than the plan asks for.
    Length {
        /// The argument.
        operand: Operand,
        /// Elements given.
        actual: usize,
        /// Elements that the plan asks for; with a stride, the fewest.
        wanted: usize,
    },
    /// Rows that would overlap, or that lie apart where they may not.
    Stride {
        /// The argument.
        operand: Operand,
        /// Elements from row to row.
        stride: usize,
        /// Elements of one row.
        width: usize,
    },
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::NotBegun { step } => write!(f, "step {} has not begun", step.raw()),
            Self::AlreadyBegun { step, last } => {
                write!(f, "step {} cannot begin after step {}", step.raw(), last.raw())
            }
            Self::Ended { step } => write!(f, "step {} has ended", step.raw()),
            Self::OpenSteps { max } => {
                write!(f, "no more than {} may be open", Count(max.into(), "step"))
            }
            Self::Tokens { positions, tokens, slots } => {
                write!(f, "a plan has {positions} positions, {tokens} tokens and {slots} slots")
            }
            Self::QueryRows { row } => {
                write!(f, "the query rows of sequence {row} do not follow its neighbour's")
            }
            Self::Span { span } => write!(f, "shared span {span} or its members are off"),
            Self::Mask { token, mask } => {
                write!(f, "the mask {mask:#x} of token {token}, or the number of masks, is off")
            }
            Self::TreeWindow { window } => {
                write!(f, "a sliding window of {window} for a plan with trees of drafts")
            }
            Self::Row { row, rows } => missing(f, "page table row", row.raw().into(), rows.into()),
            Self::KvLen { row, kv_len, min, max } => {
                write!(f, "kv_len {kv_len} of row {} is outside {min} to {max}", row.raw())
            }
            Self::Place { row, place, max } => {
                write!(f, "place {place} of row {} is past its {max} slots", row.raw())
            }
            Self::Slot { slot, slot_count } => missing(f, "slot", slot.raw(), slot_count),
            Self::TableIndex { index, words } => {
                missing(f, "page table word", index.into(), words as u64)
            }
            Self::TableValue { index, value, count } => {
                write!(f, "page table word {index} cannot be {value}: there are {count}")
            }
            Self::Page { page, page_count } => {
                missing(f, "page", page.raw().into(), page_count.into())
            }
            Self::Layer { layer, layers } => missing(f, "layer", layer.raw().into(), layers.into()),
            Self::Heads { q_heads, kv_heads } => {
                let (q, kv) =
                    (Count(q_heads.into(), "query head"), Count(kv_heads.into(), "kv head"));
                write!(f, "{q} cannot share {kv}")
            }
            Self::EmptyWindow => write!(f, "a sliding window of 0 tokens"),
            Self::Scale { scale } => write!(f, "scale {scale} is not finite"),
            Self::LatentScale { scale } => {
                write!(f, "scale {scale} is by the length of latent rows, not of heads")
            }
            Self::SoftCap { soft_cap } => {
                write!(f, "soft cap {soft_cap} is not above 0 and finite")
            }
            Self::Sink { head, sink } => {
                write!(f, "sink {sink} of query head {head} is not below infinity")
            }
            Self::Top { top, max } => {
                write!(f, "lists of {}, not 1 to {max}", Count(top.into(), "position"))
            }
            Self::NoLabels => write!(f, "the pool keeps no labels to select by"),
            Self::Length { operand, actual, wanted } => {
                write!(f, "{operand} has {actual} elements where the plan asks for {wanted}")
            }
            Self::Stride { operand, stride, width } => {
                write!(f, "{operand} has stride {stride} for rows of {width} elements")
            }
        }
    }
}

impl std::error::Error for PlanError {}

/// Says that the last of `count` things is before `index`.
fn missing(f: &mut fmt::Formatter<'_>, what: &str, index: u64, count: u64) -> fmt::Result {
    write!(f, "there is no {what} {index} of {count}: the first is 0")
}

/// Whether a step may begin now (B2, B8).
pub(super) fn may_begin(steps: &OpenSteps, step: StepId) -> Result<(), PlanError> {
    let last = steps.last();
    if step <= last {
        return Err(PlanError::AlreadyBegun { step, last });
    }
    if steps.has_room() { Ok(()) } else { Err(PlanError::OpenSteps { max: steps.max() }) }
}

/// Whether a step has begun and not ended (B8). O(open steps).
pub(super) fn is_open(steps: &OpenSteps, step: StepId) -> Result<(), PlanError> {
    match steps.contains(step) {
        true => Ok(()),
        false if step <= steps.last() => Err(PlanError::Ended { step }),
        false => Err(PlanError::NotBegun { step }),
    }
}

/// Everything in a plan but its step and its table writes.
pub(super) fn plan(
    plan: &BatchPlan<'_>,
    layout: &PoolLayout,
    table: &TableShape,
) -> Result<(), PlanError> {
    let (positions, tokens) = (plan.positions.len(), plan.tokens.len());
    let slots = plan.slot_mapping.len();
    if positions != tokens || positions != slots {
        return Err(PlanError::Tokens { positions, tokens, slots });
    }
    rows(plan, longest_row(table, layout.page_size()), table.rows)?;
    plan::check_masks(plan).map_err(|token| {
        let mask = plan.masks.get(token).copied().unwrap_or(0);
        PlanError::Mask { token, mask }
    })?;
    slot_mapping(plan, layout.slot_count())
}

/// Windows go by positions, masks by slots: no plan of trees is attended to through a window.
pub(super) fn window(plan: &BatchPlan<'_>, window: Option<u32>) -> Result<(), PlanError> {
    match window {
        Some(window) if !plan.masks.is_empty() => Err(PlanError::TreeWindow { window }),
        _ => Ok(()),
    }
}

/// Most tokens that one row of the page tables names pages for.
pub(super) fn longest_row(table: &TableShape, page_size: u32) -> u64 {
    u64::from(table.chunks_per_row) * u64::from(table.chunk_pages) * u64::from(page_size)
}

/// The rows of q, k, v and out: one for each token, sequence after sequence. And each sequence's row and length.
fn rows(plan: &BatchPlan<'_>, max: u64, rows: u32) -> Result<(), PlanError> {
    let mut next = 0;
    for (i, row) in plan.rows.iter().enumerate() {
        if u64::from(row.qo_start) != next {
            return Err(PlanError::QueryRows { row: i });
        }
        next += u64::from(row.extend_len);
        // Padding names nothing.
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

/// Slots are in the pool; those below 0 are none.
fn slot_mapping(plan: &BatchPlan<'_>, slot_count: u64) -> Result<(), PlanError> {
    let largest = match plan.slot_mapping {
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

/// Checks a plan's shared spans. Cost: the rows, and the members of all spans.
pub(super) fn spans(seen: &mut SpanCheck, plan: &BatchPlan<'_>) -> Result<(), PlanError> {
    seen.check(&plan.shared, plan.rows).map_err(|span| PlanError::Span { span })
}

/// Every word that is written names a chunk or a page, so that attention need not look.
pub(super) fn table_writes(
    writes: &[TableWrite],
    layout: &PoolLayout,
    table: &TableShape,
) -> Result<(), PlanError> {
    let directory = table.page_word(0, 0);
    let words = u32::try_from(table.words()).unwrap_or(u32::MAX);
    let (chunks, pages) = (table.chunk_count, layout.page_count());
    let count = |index| if index < directory { chunks } else { pages };
    let off = |&TableWrite { index, value }: &TableWrite| {
        u32::from(index >= words) | u32::from(value >= count(index))
    };
    if writes.iter().fold(0, |any, write| any | off(write)) == 0 {
        return Ok(());
    }
    let &TableWrite { index, value } =
        writes.iter().find(|write| off(write) != 0).expect("one is off");
    Err(match index >= words {
        true => PlanError::TableIndex { index, words: table.words() },
        false => PlanError::TableValue { index, value, count: count(index) },
    })
}

pub(super) fn layer(layer: LayerId, layout: &PoolLayout) -> Result<(), PlanError> {
    let layers = layout.layers();
    if layer.raw() < layers { Ok(()) } else { Err(PlanError::Layer { layer, layers }) }
}

pub(super) fn page(page: PageId, page_count: u32) -> Result<(), PlanError> {
    if page.raw() < page_count { Ok(()) } else { Err(PlanError::Page { page, page_count }) }
}

/// Copies from and to pages that exist, by the numbers of pages at the sources and at the targets.
pub(super) fn copies(copies: &[PageCopy], counts: (u32, u32)) -> Result<(), PlanError> {
    copies
        .iter()
        .try_for_each(|copy| page(copy.source, counts.0).and_then(|()| page(copy.target, counts.1)))
}

/// Slots of rows that exist.
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

/// An attention that makes sense for the pool's kv heads.
pub(super) fn attend(attend: &Attend, layout: &PoolLayout) -> Result<(), PlanError> {
    let (q_heads, kv_heads) = (attend.q_heads, layout.kv_heads());
    if q_heads == 0 || q_heads % kv_heads != 0 {
        return Err(PlanError::Heads { q_heads, kv_heads });
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
        Some(soft_cap) if !(soft_cap > 0.0 && soft_cap.is_finite()) => {
            Err(PlanError::SoftCap { soft_cap })
        }
        _ => Ok(()),
    }
}

/// One sink for each query head, each below infinity.
pub(super) fn sinks(sinks: &[f32], q_heads: u32) -> Result<(), PlanError> {
    let (actual, wanted) = (sinks.len(), q_heads as usize);
    if actual != wanted {
        return Err(PlanError::Length { operand: Operand::Sinks, actual, wanted });
    }
    match (0..).zip(sinks).find(|(_, sink)| sink.is_nan() || **sink == f32::INFINITY) {
        Some((head, &sink)) => Err(PlanError::Sink { head, sink }),
        None => Ok(()),
    }
}

/// Elements from row to row, if `actual` elements hold so many rows of `width`: the last one need not be followed by
/// the rest of its stride.
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
    // What does not fit 64 bits is longer than any memory.
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
        let length =
            |actual, wanted| Err(PlanError::Length { operand: Operand::K, actual, wanted });
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
