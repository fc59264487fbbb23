//! The records that a step is made of: what the engine decided, and what every backend reads.
//!
//! A [`BatchPlan`] borrows nothing but the caller's [`StepScratch`], so several steps can be in flight. An
//! [`OwnedPlan`] is the same in one buffer: `Send`, and a byte string for other processes.
//!
//! Not here: how a plan is made (`system/plan_batch.rs`).

mod admission;
mod draft;
mod spans;
mod step_end;

use std::fmt;

use bumpalo::Bump;
use bytemuck::{Pod, Zeroable};

use crate::id::{PageId, RowId, SeqKey, SlotId, StepId, TokenId};

pub use admission::{Admission, Admitted, Leader, Prompt};
pub use draft::{Branch, Compaction, DRAFT_MAX, Draft, DraftTree};
pub(crate) use draft::{MaskRow, check_len};
pub(crate) use spans::SpanCheck;
pub use spans::{SharedSpan, SharedSpans};
pub use step_end::StepEnd;

/// Most new tokens of one step, padding included: what FlashInfer's 32-bit arrays can number.
pub const STEP_TOKENS_MAX: u32 = i32::MAX as u32;

// The byte form is the memory form, and it is defined as little-endian.
const _: () = assert!(cfg!(target_endian = "little"));

/// One item of a batch: extend this sequence by so many tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extend {
    /// The sequence.
    pub seq: SeqKey,
    /// New tokens to compute, at least 1.
    pub len: u32,
}

/// One sequence of a step, 16 bytes.
///
/// Its query rows are `qo_start..qo_start + extend_len`; row `qo_start + i` stands at position
/// `kv_len - extend_len + i` and sees positions `0..=` that. A padding row has `kv_len` 0 and sees nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BatchRow {
    /// The sequence's row in the page tables.
    pub row: RowId,
    /// First of its rows in q, k, v and out.
    pub qo_start: u32,
    /// Its new tokens.
    pub extend_len: u32,
    /// Tokens with K and V once the step has stored its own: `cached_len + extend_len`.
    pub kv_len: u32,
}

/// One changed word of the page tables: `words[index] = value`, 8 bytes. See [`TableShape`](crate::TableShape).
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct TableWrite {
    /// Index of the word.
    pub index: u32,
    /// Its new value.
    pub value: u32,
}

/// One page to copy within a pool, all layers, K and V, 8 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct PageCopy {
    /// Copied from.
    pub source: PageId,
    /// Copied to.
    pub target: PageId,
}

/// For each new token, the slot its K and V go to; negative: write nothing.
///
/// 32-bit where every slot of the pool fits, else 64-bit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[doc(alias = "out_cache_loc")]
pub enum SlotMapping<'a> {
    /// Slots of a pool of at most 2^31 slots.
    I32(&'a [i32]),
    /// Slots of a larger pool.
    I64(&'a [i64]),
}

impl SlotMapping<'_> {
    /// Number of tokens.
    pub fn len(&self) -> usize {
        match self {
            Self::I32(slots) => slots.len(),
            Self::I64(slots) => slots.len(),
        }
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Slot of token `i`, or nothing where nothing is to be written.
    pub fn get(&self, i: usize) -> Option<SlotId> {
        let slot = match self {
            Self::I32(slots) => i64::from(slots[i]),
            Self::I64(slots) => slots[i],
        };
        u64::try_from(slot).ok().map(SlotId::new)
    }
}

/// Host-made record of one step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchPlan<'step> {
    /// The step.
    pub step: StepId,
    /// The sequences, in the order of the batch.
    pub rows: &'step [BatchRow],
    /// The new tokens of all sequences, one after another; [`TokenId::PENDING`] where not yet known.
    pub tokens: &'step [TokenId],
    /// Position in its sequence of each new token.
    pub positions: &'step [u32],
    /// Slot of each new token.
    pub slot_mapping: SlotMapping<'step>,
    /// What changed in the page tables since the last plan. Indices are distinct, so they may be applied in any order.
    pub table_writes: &'step [TableWrite],
    /// What several rows read from the same pages. Candidates: a backend may read it once for all of them.
    pub shared: SharedSpans<'step>,
    /// Where rows are trees of drafts, one for each new token, else empty: bit `i` says that it sees slot `last - i` of
    /// its row, own bit set; what lies before the row's last 64 slots is seen. 0 for each token of a row that is no
    /// tree, which sees all up to itself.
    pub masks: &'step [u64],
}

impl<'step> BatchPlan<'step> {
    /// The step, for `commit`, `complete` and `abort`.
    pub fn step(&self) -> StepId {
        self.step
    }

    /// New tokens of the step, padding included: rows of q, k, v and out.
    pub fn token_count(&self) -> usize {
        self.positions.len()
    }

    /// The masks of a row that is a tree of drafts; nothing of any other row.
    pub fn tree(&self, row: &BatchRow) -> Option<&'step [u64]> {
        let start = row.qo_start as usize;
        let masks = self.masks.get(start..start + row.extend_len as usize)?;
        masks.first().is_some_and(|&mask| mask != 0).then_some(masks)
    }

    /// The same plan padded to `rows` sequences and `tokens` tokens, for a graph captured at that size.
    ///
    /// A padding row has `kv_len` 0: it attends to nothing and writes output 0. A padding token has slot -1: nothing
    /// is stored. Each padding row but the last takes one padding token, the last takes the rest.
    ///
    /// # Panics
    /// If the plan is larger than asked for, the padding tokens cannot be spread over the padding rows, or there are
    /// more than [`STEP_TOKENS_MAX`] tokens.
    pub fn padded<'pad>(
        &self,
        scratch: &'pad mut StepScratch,
        rows: usize,
        tokens: usize,
    ) -> BatchPlan<'pad> {
        let bump = scratch.reset();
        let (more_rows, more_tokens) = (
            rows.checked_sub(self.rows.len()).expect("padding only adds rows"),
            tokens.checked_sub(self.token_count()).expect("padding only adds tokens"),
        );
        assert!(tokens <= STEP_TOKENS_MAX as usize, "a step has at most {STEP_TOKENS_MAX} tokens");
        assert!(more_rows <= more_tokens, "each padding row takes at least one padding token");
        assert!(more_rows > 0 || more_tokens == 0, "padding tokens need a padding row");
        let pad_row = |i: usize| BatchRow {
            row: RowId::new(0),
            qo_start: (self.token_count() + i) as u32,
            extend_len: if i + 1 == more_rows { (more_tokens - i) as u32 } else { 1 },
            kv_len: 0,
        };
        BatchPlan {
            step: self.step,
            rows: pad(bump, self.rows, rows, pad_row),
            tokens: pad(bump, self.tokens, tokens, |_| TokenId::new(0)),
            positions: pad(bump, self.positions, tokens, |_| 0),
            slot_mapping: match self.slot_mapping {
                SlotMapping::I32(slots) => SlotMapping::I32(pad(bump, slots, tokens, |_| -1)),
                SlotMapping::I64(slots) => SlotMapping::I64(pad(bump, slots, tokens, |_| -1)),
            },
            table_writes: bump.alloc_slice_copy(self.table_writes),
            shared: SharedSpans {
                spans: bump.alloc_slice_copy(self.shared.spans),
                members: bump.alloc_slice_copy(self.shared.members),
            },
            masks: match self.masks {
                [] => &[],
                masks => pad(bump, masks, tokens, |_| 0),
            },
        }
    }
}

/// `items`, then `fill(0..)` up to `len`.
fn pad<'a, T: Copy>(
    bump: &'a Bump,
    items: &[T],
    len: usize,
    mut fill: impl FnMut(usize) -> T,
) -> &'a [T] {
    bump.alloc_slice_fill_with(len, |i| match items.get(i) {
        Some(item) => *item,
        None => fill(i - items.len()),
    })
}

/// A batch in FlashInfer's exact contract, for hosts that bring their own kernels: CSR arrays of 32-bit numbers.
///
/// Sequence `i` has query rows `qo_indptr[i]..qo_indptr[i + 1]` and pages
/// `kv_indices[kv_indptr[i]..kv_indptr[i + 1]]`, the last of which holds `kv_last_page_len[i]` tokens,
/// `1 <= kv_last_page_len <= page_size`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PackedPlan<'step> {
    /// `[batch + 1]`
    #[doc(alias = "cu_seqlens")]
    pub qo_indptr: &'step [i32],
    /// `[batch + 1]`
    pub kv_indptr: &'step [i32],
    /// `[kv_indptr[batch]]`: page numbers.
    #[doc(alias = "block_table")]
    pub kv_indices: &'step [i32],
    /// `[batch]`
    pub kv_last_page_len: &'step [i32],
}

/// Memory that a plan lives in; reused, so that a warm step allocates nothing. One for each step in flight.
#[derive(Debug, Default)]
pub struct StepScratch {
    bump: Bump,
}

impl StepScratch {
    /// Empty scratch. It grows to the largest plan made in it.
    pub fn new() -> Self {
        Self::default()
    }

    /// Empty scratch that holds plans of up to `bytes` without growing:
    /// [`EngineShape::plan_bytes`](crate::EngineShape::plan_bytes) says what the largest takes.
    pub fn with_capacity(bytes: usize) -> Self {
        Self { bump: Bump::with_capacity(bytes) }
    }

    /// Forgets the last plan; the borrow checker has seen to it that nobody holds it.
    pub(crate) fn reset(&mut self) -> &Bump {
        self.bump.reset();
        &self.bump
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.bump.allocated_bytes()
    }
}

/// Marks the byte form, and its version.
const MAGIC: u64 = u64::from_le_bytes(*b"kvplan03");

/// First words of the byte form; the arrays follow in this order, each padded to 8 bytes.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Header {
    magic: u64,
    step: u64,
    rows: u64,
    tokens: u64,
    table_writes: u64,
    slot_bytes: u64,
    spans: u64,
    members: u64,
    masks: u64,
}

const HEADER_WORDS: usize = size_of::<Header>() / 8;

/// Why bytes are not a plan.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum PlanBytesError {
    /// The first bytes are not those of a plan of this version.
    Magic,
    /// The length is not what the header says.
    Length {
        /// Bytes given.
        actual: usize,
    },
    /// A slot is neither 4 nor 8 bytes.
    SlotBytes {
        /// The header's number.
        slot_bytes: u64,
    },
    /// The sequences' query rows do not follow one another, or do not add up to the tokens.
    Rows {
        /// The first sequence that is off.
        row: usize,
    },
    /// Shared spans that are not nested as they must be, name no row or one twice, or reach into what is computed now.
    Span {
        /// The first that is off; their number, if the members are.
        span: usize,
    },
    /// Masks that are not one for each token, or one without its token's own bit, or with bits of slots that are not
    /// there or behind it.
    Mask {
        /// The first token whose mask is off; the number of tokens, if that of the masks is.
        token: usize,
    },
    /// A [`StepEnd`] that neither completes nor aborts.
    StepEnd {
        /// The number that stands for what it does.
        kind: u64,
    },
}

impl fmt::Display for PlanBytesError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Magic => write!(f, "the bytes are not a plan of this version"),
            Self::Length { actual } => write!(f, "{actual} bytes are not what the header says"),
            Self::SlotBytes { slot_bytes } => {
                write!(f, "slots of {slot_bytes} bytes are neither 4 nor 8")
            }
            Self::Rows { row } => {
                write!(f, "the query rows of sequence {row} do not follow its neighbour's")
            }
            Self::Span { span } => write!(f, "shared span {span} or its members are off"),
            Self::Mask { token } => write!(f, "the mask of token {token} or their number is off"),
            Self::StepEnd { kind } => {
                write!(f, "an end of steps of kind {kind} neither completes nor aborts")
            }
        }
    }
}

impl std::error::Error for PlanBytesError {}

/// A plan in one buffer: `Send`, reusable, and a byte string for other processes (tensor-parallel ranks, GPU workers).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OwnedPlan {
    /// Words rather than bytes, so that every array inside is aligned. Empty: no plan yet.
    words: Vec<u64>,
}

impl OwnedPlan {
    /// No plan yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes over a plan, reusing the buffer.
    pub fn copy_from(&mut self, plan: &BatchPlan<'_>) {
        let slot_bytes = match plan.slot_mapping {
            SlotMapping::I32(_) => 4,
            SlotMapping::I64(_) => 8,
        };
        let header = Header {
            magic: MAGIC,
            step: plan.step.raw(),
            rows: plan.rows.len() as u64,
            tokens: plan.token_count() as u64,
            table_writes: plan.table_writes.len() as u64,
            slot_bytes,
            spans: plan.shared.spans.len() as u64,
            members: plan.shared.members.len() as u64,
            masks: plan.masks.len() as u64,
        };
        self.words.clear();
        self.words.extend_from_slice(bytemuck::cast_slice(&[header]));
        self.push(bytemuck::cast_slice(plan.rows));
        self.push(bytemuck::cast_slice(plan.tokens));
        self.push(bytemuck::cast_slice(plan.positions));
        match plan.slot_mapping {
            SlotMapping::I32(slots) => self.push(bytemuck::cast_slice(slots)),
            SlotMapping::I64(slots) => self.push(bytemuck::cast_slice(slots)),
        }
        self.push(bytemuck::cast_slice(plan.table_writes));
        self.push(bytemuck::cast_slice(plan.shared.spans));
        self.push(bytemuck::cast_slice(plan.shared.members));
        self.push(bytemuck::cast_slice(plan.masks));
    }

    fn push(&mut self, bytes: &[u8]) {
        let start = self.words.len();
        self.words.resize(start + bytes.len().div_ceil(8), 0);
        bytemuck::cast_slice_mut(&mut self.words[start..])[..bytes.len()].copy_from_slice(bytes);
    }

    /// The byte form, little-endian; [`guide::ranks`](crate::guide::ranks) specifies it to the bit, with a reader.
    pub fn as_bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.words)
    }

    /// Reads the byte form.
    ///
    /// # Errors
    /// [`PlanBytesError`], for bytes that no `OwnedPlan` ever was. Whether rows, pages and slots exist is up to the
    /// backend, which knows its pool.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, PlanBytesError> {
        let length = PlanBytesError::Length { actual: bytes.len() };
        if !bytes.len().is_multiple_of(8) || bytes.len() < HEADER_WORDS * 8 {
            return Err(length);
        }
        let mut words = vec![0_u64; bytes.len() / 8];
        bytemuck::cast_slice_mut(&mut words).copy_from_slice(bytes);
        let header = *header(&words);
        if header.magic != MAGIC {
            return Err(PlanBytesError::Magic);
        }
        if header.slot_bytes != 4 && header.slot_bytes != 8 {
            return Err(PlanBytesError::SlotBytes { slot_bytes: header.slot_bytes });
        }
        let wanted = words_of(&header).ok_or(length)?;
        if wanted != words.len() as u64 {
            return Err(length);
        }
        let plan = Self { words };
        check_rows(&plan.plan())?;
        let (shared, rows) = (&plan.plan().shared, plan.plan().rows);
        let spans = SpanCheck::default().check(shared, rows);
        spans.map_err(|span| PlanBytesError::Span { span })?;
        check_masks(&plan.plan()).map_err(|token| PlanBytesError::Mask { token })?;
        Ok(plan)
    }

    /// The plan inside.
    ///
    /// # Panics
    /// If there is none yet.
    pub fn plan(&self) -> BatchPlan<'_> {
        let header = header(&self.words);
        let (rows, tokens) = (header.rows as usize, header.tokens as usize);
        let mut rest: &[u8] = &self.as_bytes()[HEADER_WORDS * 8..];
        let mut take = |len: usize| {
            let (array, after) = rest.split_at(len.next_multiple_of(8));
            rest = after;
            &array[..len]
        };
        BatchPlan {
            step: StepId::new(header.step),
            rows: bytemuck::cast_slice(take(rows * size_of::<BatchRow>())),
            tokens: bytemuck::cast_slice(take(tokens * 4)),
            positions: bytemuck::cast_slice(take(tokens * 4)),
            slot_mapping: if header.slot_bytes == 4 {
                SlotMapping::I32(bytemuck::cast_slice(take(tokens * 4)))
            } else {
                SlotMapping::I64(bytemuck::cast_slice(take(tokens * 8)))
            },
            table_writes: bytemuck::cast_slice(take(header.table_writes as usize * 8)),
            shared: SharedSpans {
                spans: bytemuck::cast_slice(take(header.spans as usize * size_of::<SharedSpan>())),
                members: bytemuck::cast_slice(take(header.members as usize * 4)),
            },
            masks: bytemuck::cast_slice(take(header.masks as usize * 8)),
        }
    }
}

impl From<&BatchPlan<'_>> for OwnedPlan {
    fn from(plan: &BatchPlan<'_>) -> Self {
        let mut owned = Self::new();
        owned.copy_from(plan);
        owned
    }
}

fn header(words: &[u64]) -> &Header {
    assert!(words.len() >= HEADER_WORDS, "an OwnedPlan is read before a plan was copied into it");
    &bytemuck::cast_slice::<u64, Header>(&words[..HEADER_WORDS])[0]
}

/// Words of the whole byte form, or nothing on overflow.
fn words_of(header: &Header) -> Option<u64> {
    let arrays = [
        (header.rows, size_of::<BatchRow>() as u64),
        (header.tokens, 4),
        (header.tokens, 4),
        (header.tokens, header.slot_bytes),
        (header.table_writes, 8),
        (header.spans, size_of::<SharedSpan>() as u64),
        (header.members, 4),
        (header.masks, 8),
    ];
    arrays.iter().try_fold(HEADER_WORDS as u64, |sum, &(count, size)| {
        sum.checked_add(count.checked_mul(size)?.div_ceil(8))
    })
}

fn check_rows(plan: &BatchPlan<'_>) -> Result<(), PlanBytesError> {
    let mut next = 0_u64;
    for (i, row) in plan.rows.iter().enumerate() {
        let padding = row.kv_len == 0;
        if u64::from(row.qo_start) != next || (row.kv_len < row.extend_len && !padding) {
            return Err(PlanBytesError::Rows { row: i });
        }
        next += u64::from(row.extend_len);
    }
    if next == plan.token_count() as u64 {
        Ok(())
    } else {
        Err(PlanBytesError::Rows { row: plan.rows.len() })
    }
}

/// Checks masks; rows were checked.
///
/// # Errors
/// The first token whose mask is off; the number of tokens, if that of the masks is.
pub(crate) fn check_masks(plan: &BatchPlan<'_>) -> Result<(), usize> {
    if plan.masks.is_empty() {
        return Ok(());
    }
    if plan.masks.len() != plan.token_count() {
        return Err(plan.token_count());
    }
    for row in plan.rows {
        let start = row.qo_start as usize;
        let masks = &plan.masks[start..start + row.extend_len as usize];
        let Some(first) = masks.iter().position(|&mask| mask != 0) else { continue };
        if row.extend_len > DRAFT_MAX {
            return Err(start + first);
        }
        let bits = MaskRow::new(row.kv_len, row.extend_len);
        let off = (0..).zip(masks).find(|&(token, &mask)| !bits.allows(token, mask));
        if let Some((token, _)) = off {
            return Err(start + token as usize);
        }
    }
    Ok(())
}
