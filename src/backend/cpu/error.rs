//! What the CPU backend refuses, by name and value.

use std::fmt;

use crate::id::{LayerId, PageId, RowId, SlotId, StepId};
use crate::layout::PlaneName;

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
    /// Attention's output.
    Out,
    /// Log-sum-exp.
    Lse,
}

impl fmt::Display for Operand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Q => "q",
            Self::K => "k",
            Self::V => "v",
            Self::Out => "out",
            Self::Lse => "the log-sum-exp",
        })
    }
}

/// Why the CPU backend refused a call. Nothing was written.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub enum CpuError {
    /// A call before [`open`](crate::Backend::open).
    NotOpen,
    /// A second `open`.
    AlreadyOpen,
    /// The machine does not give the memory.
    OutOfMemory {
        /// Bytes asked for.
        bytes: u64,
    },
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
    /// A page past the pool.
    Page {
        /// The page.
        page: PageId,
        /// Pages of the pool.
        page_count: u32,
    },
    /// A contiguous piece that pages do not have.
    Piece {
        /// The piece.
        piece: u32,
        /// Pieces of a page.
        pieces: u32,
    },
    /// A plane that the pool does not have, or that holds no rows by slot.
    Plane {
        /// The plane.
        plane: PlaneName,
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
    /// A soft cap that is not above 0, or not finite.
    SoftCap {
        /// The cap.
        soft_cap: f32,
    },
    /// An argument with another number of elements than the plan asks for.
    Length {
        /// The argument.
        operand: Operand,
        /// Elements given.
        actual: usize,
        /// Elements that the plan asks for; with a stride, the fewest.
        wanted: usize,
    },
    /// Rows that would overlap.
    Stride {
        /// The argument.
        operand: Operand,
        /// Elements from row to row.
        stride: usize,
        /// Elements of one row.
        width: usize,
    },
    /// A buffer of another size than one page.
    PageBytes {
        /// Its bytes.
        actual: usize,
        /// Bytes of one page.
        wanted: u64,
    },
}

impl fmt::Display for CpuError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::NotOpen => write!(f, "the backend has no pool yet"),
            Self::AlreadyOpen => write!(f, "the backend has a pool already"),
            Self::OutOfMemory { bytes } => write!(f, "no memory for {bytes} bytes"),
            Self::NotBegun { step } => write!(f, "{step:?} has not begun"),
            Self::AlreadyBegun { step, last } => {
                write!(f, "{step:?} cannot begin after {last:?}")
            }
            Self::Ended { step } => write!(f, "{step:?} has ended"),
            Self::OpenSteps { max } => write!(f, "{max} steps are open already"),
            Self::Tokens { positions, tokens, slots } => {
                write!(f, "a plan has {positions} positions, {tokens} tokens and {slots} slots")
            }
            Self::QueryRows { row } => {
                write!(f, "the query rows of sequence {row} do not follow its neighbour's")
            }
            Self::Row { row, rows } => write!(f, "{row:?} is not among {rows} page table rows"),
            Self::KvLen { row, kv_len, min, max } => {
                write!(f, "kv_len {kv_len} of {row:?} is outside {min} to {max}")
            }
            Self::Slot { slot, slot_count } => write!(f, "{slot:?} is not among {slot_count}"),
            Self::TableIndex { index, words } => {
                write!(f, "page table word {index} is not among {words}")
            }
            Self::TableValue { index, value, count } => {
                write!(f, "page table word {index} cannot be {value}: there are {count}")
            }
            Self::Page { page, page_count } => write!(f, "{page:?} is not among {page_count}"),
            Self::Piece { piece, pieces } => {
                write!(f, "piece {piece} is not among {pieces} of a page")
            }
            Self::Plane { plane } => write!(f, "the pool has no rows of {plane:?} by slot"),
            Self::Layer { layer, layers } => write!(f, "{layer:?} is not among {layers}"),
            Self::Heads { q_heads, kv_heads } => {
                write!(f, "{q_heads} query heads are not a multiple of {kv_heads} kv heads")
            }
            Self::EmptyWindow => write!(f, "a sliding window of 0 tokens"),
            Self::Scale { scale } => write!(f, "scale {scale} is not finite"),
            Self::SoftCap { soft_cap } => {
                write!(f, "soft cap {soft_cap} is not above 0 and finite")
            }
            Self::Length { operand, actual, wanted } => {
                write!(f, "{operand} has {actual} elements where the plan asks for {wanted}")
            }
            Self::Stride { operand, stride, width } => {
                write!(f, "{operand} has stride {stride} below its row's {width} elements")
            }
            Self::PageBytes { actual, wanted } => {
                write!(f, "a buffer of {actual} bytes for a page of {wanted}")
            }
        }
    }
}

impl std::error::Error for CpuError {}
