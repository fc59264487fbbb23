//! Why a backend refuses: [`PlanError`], alike for all of them.
//!
//! Not here: what is refused (`check.rs`), what a backend refuses beside it (its own `error.rs`).

use std::fmt;

use crate::error::Count;
use crate::id::{LayerId, PageId, RowId, SlotId, StepId};
use crate::layout::Reach;

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
    /// Slots of the tracks but the first one that are not one for each of them and each token.
    TrackSlots {
        /// Slots.
        slots: usize,
        /// Slots that the plan's tokens and the page tables' tracks take.
        wanted: usize,
    },
    /// A layer of a group that reads a window or a chunk, attended to through another window, or none.
    Reach {
        /// The layer.
        layer: LayerId,
        /// Its group.
        group: u32,
        /// What the group's tokens read.
        reach: Reach,
        /// The window that was given.
        window: Option<u32>,
    },
    /// A sparse read of a layer of a group that does not keep everything.
    SparseGroup {
        /// The layer.
        layer: LayerId,
        /// Its group.
        group: u32,
    },
    /// A group beside the one that keeps everything, which the backend does not serve.
    Group {
        /// The group.
        group: u32,
        /// What its tokens read.
        reach: Reach,
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
            Self::TrackSlots { slots, wanted } => {
                write!(f, "{} of further tracks where {wanted} belong", Count(slots as u64, "slot"))
            }
            Self::Reach { layer, group, reach, window } => {
                let layer = layer.raw();
                write!(
                    f,
                    "layer {layer} of group {group} reads {reach}, and was attended to through "
                )?;
                match window {
                    Some(window) => write!(f, "a window of {window}"),
                    None => write!(f, "no window"),
                }
            }
            Self::SparseGroup { layer, group } => {
                write!(
                    f,
                    "a sparse read of layer {}, whose group {group} lacks tokens",
                    layer.raw()
                )
            }
            Self::Group { group, reach } => {
                write!(f, "group {group}, which reads {reach}, is not served by this backend")
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
