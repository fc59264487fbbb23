//! The records of a step: its plan, in the forms that backends and other ranks read. Also the records of calls about
//! requests.

// `system/plan_batch/` makes plans. The records of requests are in `requests.rs`.
//!
//! A [`BatchPlan`] borrows only the caller's [`StepScratch`], so several steps can be in flight. An [`OwnedPlan`]
//! contains the same data in one buffer: it is `Send`, and a byte string for other processes.

mod draft;
mod moves;
mod owned;
mod requests;
mod spans;
mod step_end;

use bumpalo::Bump;
use bytemuck::{Pod, Zeroable};

use crate::id::{PageId, RowId, SeqKey, SlotId, StepId, TokenId};

pub use draft::{Branch, Compaction, DRAFT_MAX, Draft, DraftTree};
pub(crate) use draft::{MaskRow, check_len, check_masks};
pub use moves::PageMove;
pub use owned::{OwnedPlan, PlanBytesError};
pub use requests::{Admission, Admit, Admitted, Forked, Keep, Leader, Prompt};
pub(crate) use spans::SpanCheck;
pub use spans::{SharedSpan, SharedSpans};
pub use step_end::StepEnd;

/// Maximum number of new tokens of a step, including padding: FlashInfer's arrays are 32-bit.
pub const STEP_TOKENS_MAX: u32 = i32::MAX as u32;

// The byte form is a copy of memory, defined as little-endian.
const _: () = assert!(cfg!(target_endian = "little"));

/// One item of a batch: a sequence and its number of new tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extend {
    /// The sequence to extend.
    pub seq: SeqKey,
    /// Number of new tokens to compute, at least 1.
    pub len: u32,
}

/// The numbers of sequences and tokens of a plan, including padding.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PlanSize {
    /// Number of sequences: the plan's rows.
    pub rows: usize,
    /// Number of new tokens.
    pub tokens: usize,
}

impl PlanSize {
    /// Returns whether `plan` can be padded to this size. Each padding row takes at least one padding token, padding
    /// tokens need a padding row, and there are at most [`STEP_TOKENS_MAX`] tokens.
    pub(crate) fn holds(self, plan: Self) -> bool {
        let rows = self.rows.checked_sub(plan.rows);
        let tokens = self.tokens.checked_sub(plan.tokens);
        rows.zip(tokens).is_some_and(|(rows, tokens)| rows <= tokens && (rows > 0 || tokens == 0))
            && self.tokens <= STEP_TOKENS_MAX as usize
    }

    /// Returns padding row `i` of `plan` padded to this size. Each padding row has one padding token; the last row has
    /// the rest.
    pub(crate) fn padding_row(self, plan: Self, i: usize) -> BatchRow {
        let is_last = plan.rows + i + 1 == self.rows;
        let qo_start = plan.tokens + i;
        let extend_len = if is_last { (self.tokens - qo_start) as u32 } else { 1 };
        BatchRow { row: RowId::new(0), qo_start: qo_start as u32, extend_len, kv_len: 0 }
    }

    /// Writes the padding rows after the rows of `plan`.
    pub(crate) fn pad_rows(self, plan: Self, rows: &mut [BatchRow]) {
        for (i, row) in rows[plan.rows..].iter_mut().enumerate() {
            *row = self.padding_row(plan, i);
        }
    }
}

/// One sequence of a step, 16 bytes.
///
/// Its query rows are `qo_start..qo_start + extend_len`. Row `qo_start + i` has position `kv_len - extend_len + i` and
/// sees all positions up to its own, except in a draft tree. A padding row has `kv_len` 0 and sees nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BatchRow {
    /// The sequence's row in the page tables.
    pub row: RowId,
    /// Index of the sequence's first row in q, k, v and out.
    pub qo_start: u32,
    /// Number of the sequence's new tokens.
    pub extend_len: u32,
    /// Number of tokens that have K and V once this step and all earlier steps are computed; 0 for padding.
    pub kv_len: u32,
}

/// One changed word of the page tables ([`TableShape`](crate::layout::TableShape)): `words[index] = value`, 8 bytes.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct TableWrite {
    /// Index of the word.
    pub index: u32,
    /// Its new value.
    pub value: u32,
}

/// One page to copy within a pool, with all planes of all lanes. 8 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct PageCopy {
    /// Source page.
    pub source: PageId,
    /// Target page.
    pub target: PageId,
}

/// The slot for K and V of each new token. A backend stores nothing for a negative slot.
///
/// Slots have 32 bits if every slot of the pool fits, else 64.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[doc(alias = "out_cache_loc")]
pub enum SlotMapping<'a> {
    /// Slots of a pool of at most 2^31 slots.
    I32(&'a [i32]),
    /// Slots of a larger pool.
    I64(&'a [i64]),
}

impl<'a> SlotMapping<'a> {
    fn part(&self, range: std::ops::Range<usize>) -> SlotMapping<'a> {
        match self {
            Self::I32(slots) => SlotMapping::I32(&slots[range]),
            Self::I64(slots) => SlotMapping::I64(&slots[range]),
        }
    }

    /// Returns the number of tokens.
    pub fn len(&self) -> usize {
        match self {
            Self::I32(slots) => slots.len(),
            Self::I64(slots) => slots.len(),
        }
    }

    /// Returns whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the slot of token `i`; `None` if the slot is negative.
    ///
    /// # Panics
    /// If there is no such token.
    pub fn get(&self, i: usize) -> Option<SlotId> {
        let slot = match self {
            Self::I32(slots) => i64::from(slots[i]),
            Self::I64(slots) => slots[i],
        };
        u64::try_from(slot).ok().map(SlotId::new)
    }
}

/// The plan of one step, which every backend reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchPlan<'step> {
    /// The step, which `commit`, `complete` and `abort` name.
    pub step: StepId,
    /// The sequences, in the order of the batch.
    pub rows: &'step [BatchRow],
    /// New tokens of all sequences, in the order of the rows; [`TokenId::PENDING`] for unknown ones.
    pub tokens: &'step [TokenId],
    /// Position of each new token in its sequence.
    pub positions: &'step [u32],
    /// Slot of each new token.
    pub slot_mapping: SlotMapping<'step>,
    /// Slots of the tracks after the first ([`BatchPlan::slots_of`]): `[tracks - 1, tokens]`, in the integer type of
    /// `slot_mapping`. Empty with one track.
    pub track_slots: SlotMapping<'step>,
    /// Changes of the page tables since the last plan. Their indices are distinct, so a backend may apply them in any
    /// order.
    pub table_writes: &'step [TableWrite],
    /// Spans of pages that several rows read. A backend may read them once for all these rows.
    pub shared: SharedSpans<'step>,
    /// Masks of draft trees, one for each new token; empty if no row is a tree. If bit `i` is set, the token sees slot
    /// `last - i` of its row. A token of a tree also sees all slots before the row's last 64. A mask of 0 belongs to a
    /// row that is not a tree: the token sees all tokens up to itself.
    pub masks: &'step [u64],
}

impl<'step> BatchPlan<'step> {
    /// Returns the step, for `commit`, `complete` and `abort`.
    pub fn step(&self) -> StepId {
        self.step
    }

    /// Returns the number of new tokens, including padding: the rows of q, k, v and out.
    pub fn token_count(&self) -> usize {
        self.positions.len()
    }

    /// Returns the slots of the new tokens in a track, for the layers that
    /// [`PoolLayout::place`](crate::layout::PoolLayout::place) assigns to the track. Track 0 belongs to group 0.
    ///
    /// # Panics
    /// If `track` is not below the number of tracks.
    pub fn slots_of(&self, track: u32) -> SlotMapping<'step> {
        match track.checked_sub(1) {
            None => self.slot_mapping,
            Some(index) => {
                let first = index as usize * self.token_count();
                self.track_slots.part(first..first + self.token_count())
            }
        }
    }

    /// Returns the masks of a row that is a draft tree; `None` for other rows.
    pub fn tree(&self, row: &BatchRow) -> Option<&'step [u64]> {
        let start = row.qo_start as usize;
        let masks = self.masks.get(start..start + row.extend_len as usize)?;
        masks.first().is_some_and(|&mask| mask != 0).then_some(masks)
    }
}

/// A batch in the format of FlashInfer's paged attention, for hosts with their own kernels: CSR arrays of 32-bit
/// numbers.
///
/// Sequence `i` has query rows `qo_indptr[i]..qo_indptr[i + 1]` and pages `kv_indices[kv_indptr[i]..kv_indptr[i + 1]]`.
/// Its last page has `kv_last_page_len[i]` tokens, from 1 to page_size. This length is 0 for an entry without pages,
/// which only [`PackedLevels`] contains.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PackedPlan<'step> {
    /// `[batch + 1]`: first query row of each sequence.
    #[doc(alias = "cu_seqlens")]
    pub qo_indptr: &'step [i32],
    /// `[batch + 1]`: first page of each sequence.
    pub kv_indptr: &'step [i32],
    /// `[kv_indptr[batch]]`: page numbers.
    #[doc(alias = "block_table")]
    pub kv_indices: &'step [i32],
    /// `[batch]`: tokens in the last page of each sequence.
    pub kv_last_page_len: &'step [i32],
}

/// The pages of the states that a batch reads and writes ([`Engine::packed_states`](crate::Engine::packed_states)).
///
/// A row with equal pages in both arrays updates its state in place. Other rows read a state that must not change, such
/// as a cached one: kernels that update in place call [`copy_states`](crate::backend::StateBackend::copy_states) first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PackedStates<'step> {
    /// `[state_pages, rows]`: page of each track and row to read.
    pub reads: &'step [i32],
    /// `[state_pages, rows]`: page of each track and row to write.
    pub writes: &'step [i32],
}

/// A batch in the format of FlashInfer's `MultiLevelCascadeAttentionWrapper`. A level lists a page only once for all
/// rows that share it.
///
/// A level computes the attention of all new tokens of the batch to some of their pages. Merging the results of all
/// levels by log-sum-exp gives attention to all pages. An entry of a level is a run of consecutive rows in `order`,
/// with the pages that all these rows read, possibly none. Shared pages precede every query, so only the last level is
/// causal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PackedLevels<'step> {
    /// `[items]`: indices of the plan's rows without padding, in the order of `qo_indptr`. The host gathers q in this
    /// order and scatters the output.
    pub order: &'step [u32],
    /// At least one level. Level `n` lists the shared spans that are nested in `n` others; the last level lists the
    /// pages that each row reads alone.
    pub levels: &'step [PackedPlan<'step>],
}

/// Memory of one plan. Reuse it, so that a warm step allocates nothing. Plans in use at the same time need one scratch
/// each.
#[derive(Debug, Default)]
pub struct StepScratch {
    bump: Bump,
}

impl StepScratch {
    /// Creates an empty scratch, which grows to the size of its largest plan.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates an empty scratch for plans of up to `bytes` bytes.
    /// [`EngineShape::plan_bytes`](crate::config::EngineShape::plan_bytes) returns the size of the largest plan.
    pub fn with_capacity(bytes: usize) -> Self {
        Self { bump: Bump::with_capacity(bytes) }
    }

    /// Drops the last plan.
    pub(crate) fn reset(&mut self) -> &Bump {
        self.bump.reset();
        &self.bump
    }

    /// Returns the number of allocated bytes.
    pub fn bytes(&self) -> usize {
        self.bump.allocated_bytes()
    }
}
