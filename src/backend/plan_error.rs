//! [`PlanError`]: the reasons why any backend rejects a plan or a call. `check.rs`, `rope.rs` and `sparse.rs` return
//! it.

use std::fmt;

use crate::error::Count;
use crate::id::{LayerId, MoveId, PageId, RowId, SlotId, StepId, SwapPageId};
use crate::layout::{KvShape, Reach};

/// An array argument of a backend call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Operand {
    /// Queries.
    Q,
    /// Keys.
    K,
    /// Values.
    V,
    /// Heads of queries, keys and values of a token, in this order.
    Qkv,
    /// Weights of a norm.
    Norm,
    /// Frequencies of a rotation.
    Frequencies,
    /// Attention sinks.
    Sinks,
    /// The output of attention.
    Out,
    /// Log-sum-exp.
    Lse,
    /// Lists of positions to read.
    Selection,
}

impl fmt::Display for Operand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Q => "q",
            Self::K => "k",
            Self::V => "v",
            Self::Qkv => "qkv",
            Self::Norm => "the norm's weights",
            Self::Frequencies => "the frequencies",
            Self::Sinks => "sinks",
            Self::Out => "out",
            Self::Lse => "the log-sum-exp",
            Self::Selection => "the selection",
        })
    }
}

/// The reason why a backend rejected a plan or a call. The call had no effect.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub enum PlanError {
    /// The step has not begun.
    NotBegun {
        /// The step.
        step: StepId,
    },
    /// The step or a later one has already begun or ended.
    AlreadyBegun {
        /// The step.
        step: StepId,
        /// The last step that began or ended.
        last: StepId,
    },
    /// The step has ended, so its pages may belong to another sequence.
    Ended {
        /// The step.
        step: StepId,
    },
    /// The backend has its maximum number of open steps.
    OpenSteps {
        /// The limit.
        max: u32,
    },
    /// The step has more tokens, including padding, than the backend was opened for.
    StepTokens {
        /// The step's tokens.
        tokens: usize,
        /// Maximum number of tokens.
        max: u32,
    },
    /// The arrays with one entry for each token differ in length.
    Tokens {
        /// Length of the positions.
        positions: usize,
        /// Length of the tokens.
        tokens: usize,
        /// Length of the slot mapping.
        slots: usize,
    },
    /// The query rows of the sequences are not contiguous, or their number differs from the number of tokens.
    QueryRows {
        /// The first sequence whose query rows do not follow those of the previous sequence; the number of sequences
        /// if only the total is wrong.
        row: usize,
    },
    /// A shared span is empty, is not nested correctly, has fewer than two members, or covers new tokens of a member.
    /// Or the list of members is wrong: it contains a missing row, a row twice, or a row in no span.
    Span {
        /// The first wrong span; the number of spans if the list of members is wrong.
        span: usize,
    },
    /// The number of masks differs from the number of tokens, or a mask of a draft tree is wrong. Such a mask lacks its
    /// token's own bit, or has bits of missing or later slots. Or the tree has more than 64 new tokens.
    Mask {
        /// The first token with a wrong mask; the number of tokens if the number of masks is wrong.
        token: usize,
        /// Its mask, or 0 without one.
        mask: u64,
    },
    /// The number of slots of the tracks after the first is wrong. Each of these tracks needs one slot for each token.
    TrackSlots {
        /// Slots given.
        slots: usize,
        /// Slots expected: tokens times the tracks after the first.
        wanted: usize,
    },
    /// The attention's window or chunk size differs from that of the layer's group, or is missing.
    Reach {
        /// The layer.
        layer: LayerId,
        /// Its group.
        group: u32,
        /// The positions that the group's tokens read.
        reach: Reach,
        /// The window given.
        window: Option<u32>,
        /// The size of chunks given.
        chunk: Option<u32>,
    },
    /// A sparse read is for a layer outside group 0.
    SparseGroup {
        /// The layer.
        layer: LayerId,
        /// Its group.
        group: u32,
    },
    /// A window is given for a plan with draft trees, which backends do not support.
    TreeWindow {
        /// The window.
        window: u32,
    },
    /// Chunks are given for a plan with draft trees, which backends do not support.
    TreeChunk {
        /// The size of chunks.
        chunk: u32,
    },
    /// The size of chunks is not a power of two.
    ChunkSize {
        /// The size given.
        chunk: u32,
    },
    /// A sequence's row is not in the page tables.
    Row {
        /// The row.
        row: RowId,
        /// Rows of the page tables.
        rows: u32,
    },
    /// `kv_len` of a sequence is below the number of its new tokens, or more than a page table row can hold.
    KvLen {
        /// The sequence's row.
        row: RowId,
        /// Its tokens.
        kv_len: u32,
        /// Minimum length.
        min: u32,
        /// Maximum length.
        max: u64,
    },
    /// A compaction keeps a slot whose place is past the end of the page table row.
    Place {
        /// The row.
        row: RowId,
        /// The slot's place in the row.
        place: u64,
        /// Slots of a row.
        max: u64,
    },
    /// A slot is not in the pool.
    Slot {
        /// The slot.
        slot: SlotId,
        /// Slots of the pool.
        slot_count: u64,
    },
    /// A write is outside the page tables.
    TableIndex {
        /// The word's index.
        index: u32,
        /// Words of the page tables.
        words: usize,
    },
    /// A word written to the page tables is not a valid page or chunk.
    TableValue {
        /// The word's index.
        index: u32,
        /// Its value.
        value: u32,
        /// Pages of the pool or chunks of the tables.
        count: u32,
    },
    /// A page of the pool does not exist.
    Page {
        /// The page.
        page: PageId,
        /// Number of pages.
        page_count: u32,
    },
    /// A page of swap memory does not exist.
    SwapPage {
        /// The page.
        page: SwapPageId,
        /// Number of pages of swap memory.
        pages: u32,
    },
    /// A move writes a swap page that has a lease, or reads a swap page that has a write lease.
    Leased {
        /// The page.
        page: SwapPageId,
    },
    /// The number of a batch of moves is not above the number of the last batch.
    MoveOrder {
        /// Its number.
        id: MoveId,
        /// The number of the last batch.
        last: MoveId,
    },
    /// The model does not have the layer.
    Layer {
        /// The layer.
        layer: LayerId,
        /// Layers of the model.
        layers: u32,
    },
    /// The number of query heads is 0 or not a multiple of the kv heads.
    Heads {
        /// Query heads.
        q_heads: u32,
        /// KV heads.
        kv_heads: u32,
    },
    /// The window is empty.
    EmptyWindow,
    /// The scale is not finite.
    Scale {
        /// The scale.
        scale: f32,
    },
    /// The pool has no heads with an even number of elements to rotate.
    Rope {
        /// The shape of its K and V.
        shape: KvShape,
    },
    /// The scale is `1 / sqrt` of the length of a latent row. The scale must come from the length of the heads that the
    /// row compresses.
    LatentScale {
        /// The scale.
        scale: f32,
    },
    /// The soft cap is not above 0 or not finite.
    SoftCap {
        /// The cap.
        soft_cap: f32,
    },
    /// A sink is NaN or plus infinity.
    Sink {
        /// The query head.
        head: u32,
        /// Its sink.
        sink: f32,
    },
    /// The lists are empty, or longer than a sequence can be.
    Top {
        /// Positions of a list.
        top: u32,
        /// Maximum length of a list.
        max: u64,
    },
    /// The pool has no labels to select by.
    NoLabels,
    /// An argument's number of elements does not match the plan.
    Length {
        /// The argument.
        operand: Operand,
        /// Elements given.
        actual: usize,
        /// Elements expected; for rows, the minimum.
        wanted: usize,
    },
    /// Rows overlap, or are not contiguous where they must be.
    Stride {
        /// The argument.
        operand: Operand,
        /// Elements from one row to the next.
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
            Self::StepTokens { tokens, max } => {
                write!(f, "a step of {tokens} tokens is above the limit of {max}")
            }
            Self::Tokens { positions, tokens, slots } => {
                write!(f, "a plan has {positions} positions, {tokens} tokens and {slots} slots")
            }
            Self::QueryRows { row } => {
                write!(f, "the query rows of sequence {row}, or the total of all, are wrong")
            }
            Self::Span { span } => write!(f, "shared span {span} or its members are wrong"),
            Self::Mask { token, mask } => {
                write!(f, "the mask {mask:#x} of token {token}, or the number of masks, is wrong")
            }
            Self::TrackSlots { slots, wanted } => {
                write!(f, "{} of further tracks, expected {wanted}", Count(slots as u64, "slot"))
            }
            Self::Reach { layer, group, reach, window, chunk } => {
                let layer = layer.raw();
                write!(f, "layer {layer} of group {group} reads {reach}, but its attention has ")?;
                match (window, chunk) {
                    (Some(window), Some(chunk)) => {
                        write!(f, "a window of {window} and chunks of {chunk}")
                    }
                    (Some(window), None) => write!(f, "a window of {window}"),
                    (None, Some(chunk)) => write!(f, "chunks of {chunk}"),
                    (None, None) => write!(f, "no window"),
                }
            }
            Self::SparseGroup { layer, group } => {
                write!(f, "a sparse read of layer {}, whose group {group} does not keep all tokens", layer.raw())
            }
            Self::TreeWindow { window } => {
                write!(f, "a sliding window of {window} for a plan with trees of drafts")
            }
            Self::TreeChunk { chunk } => {
                write!(f, "chunks of {chunk} for a plan with trees of drafts")
            }
            Self::ChunkSize { chunk } => write!(f, "chunks of {chunk}, which is no power of two"),
            Self::Row { row, rows } => out_of_range(f, "page table row", row.raw().into(), rows.into()),
            Self::KvLen { row, kv_len, min, max } => {
                write!(f, "kv_len {kv_len} of row {} is outside {min} to {max}", row.raw())
            }
            Self::Place { row, place, max } => {
                write!(f, "place {place} of row {} is past its {max} slots", row.raw())
            }
            Self::Slot { slot, slot_count } => out_of_range(f, "slot", slot.raw(), slot_count),
            Self::TableIndex { index, words } => out_of_range(f, "page table word", index.into(), words as u64),
            Self::TableValue { index, value, count } => {
                write!(f, "page table word {index} is {value}, which is not below {count}")
            }
            Self::Page { page, page_count } => out_of_range(f, "page", page.raw().into(), page_count.into()),
            Self::SwapPage { page, pages } => out_of_range(f, "swap page", page.raw().into(), pages.into()),
            Self::Leased { page } => write!(f, "swap page {} is leased", page.raw()),
            Self::MoveOrder { id, last } => {
                write!(f, "move {} does not follow move {}", id.raw(), last.raw())
            }
            Self::Layer { layer, layers } => out_of_range(f, "layer", layer.raw().into(), layers.into()),
            Self::Heads { q_heads, kv_heads } => {
                let (q, kv) = (Count(q_heads.into(), "query head"), Count(kv_heads.into(), "kv head"));
                write!(f, "{q} cannot share {kv}")
            }
            Self::EmptyWindow => write!(f, "a sliding window of 0 tokens"),
            Self::Scale { scale } => write!(f, "scale {scale} is not finite"),
            Self::Rope { shape } => write!(f, "{shape:?} has no heads of even size to rotate"),
            Self::LatentScale { scale } => {
                write!(f, "scale {scale} is that of latent rows, not of the heads they compress")
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
            Self::NoLabels => write!(f, "the pool has no labels to select by"),
            Self::Length { operand, actual, wanted } => {
                write!(f, "{operand} has {actual} elements where the plan needs {wanted}")
            }
            Self::Stride { operand, stride, width } => {
                write!(f, "{operand} has stride {stride} for rows of {width} elements")
            }
        }
    }
}

impl std::error::Error for PlanError {}

/// Reports an index that is not below the count.
fn out_of_range(f: &mut fmt::Formatter<'_>, what: &str, index: u64, count: u64) -> fmt::Result {
    write!(f, "{what} {index} is out of range: the count is {count}")
}
