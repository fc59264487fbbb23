//! The records of a step: its plan, in the forms that backends and other ranks read.
//!
//! A [`BatchPlan`] borrows only the caller's [`StepScratch`], so several steps can be in flight. An [`OwnedPlan`] has
//! the same contents in one buffer: it is `Send`, and a byte string for other processes.
//!
//! Not here: the code that makes a plan (`system/plan_batch/`).

mod draft;
mod moves;
mod owned;
mod spans;
mod step_end;

use bumpalo::Bump;
use bytemuck::{Pod, Zeroable};

use crate::id::{PageId, RowId, SeqKey, SlotId, StepId, TokenId};

pub use crate::admission::{Admission, Admitted, Leader, Prompt};
pub use draft::{Branch, Compaction, DRAFT_MAX, Draft, DraftTree};
pub(crate) use draft::{MaskRow, check_len, check_masks};
pub use moves::PageMove;
pub use owned::{OwnedPlan, PlanBytesError};
pub(crate) use spans::SpanCheck;
pub use spans::{SharedSpan, SharedSpans};
pub use step_end::StepEnd;

/// Most new tokens of one step, padding included: the limit of FlashInfer's 32-bit arrays.
pub const STEP_TOKENS_MAX: u32 = i32::MAX as u32;

// The byte form is a copy of memory, and is defined as little-endian.
const _: () = assert!(cfg!(target_endian = "little"));

/// One item of a batch: a sequence, and the number of tokens to extend it by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extend {
    /// The sequence.
    pub seq: SeqKey,
    /// New tokens to compute, at least 1.
    pub len: u32,
}

/// The numbers of sequences and tokens of a plan, padding included.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PlanSize {
    /// Sequences: rows of the plan.
    pub rows: usize,
    /// New tokens.
    pub tokens: usize,
}

impl PlanSize {
    /// Returns whether a plan of these numbers can be padded to this size: each padding row takes at least one padding
    /// token, padding tokens need a padding row, and there are at most [`STEP_TOKENS_MAX`] tokens.
    pub(crate) fn holds(self, plan: Self) -> bool {
        let rows = self.rows.checked_sub(plan.rows);
        let tokens = self.tokens.checked_sub(plan.tokens);
        rows.zip(tokens).is_some_and(|(rows, tokens)| rows <= tokens && (rows > 0 || tokens == 0))
            && self.tokens <= STEP_TOKENS_MAX as usize
    }

    /// Returns padding row `i` of a plan of these numbers that is padded to this size: each has one padding token, and
    /// the last one has the rest.
    fn padding_row(self, plan: Self, i: usize) -> BatchRow {
        let is_last = plan.rows + i + 1 == self.rows;
        let qo_start = plan.tokens + i;
        let extend_len = if is_last { (self.tokens - qo_start) as u32 } else { 1 };
        BatchRow { row: RowId::new(0), qo_start: qo_start as u32, extend_len, kv_len: 0 }
    }

    /// Writes the padding rows behind those of a plan of these numbers.
    pub(crate) fn pad_rows(self, plan: Self, rows: &mut [BatchRow]) {
        for (i, row) in rows[plan.rows..].iter_mut().enumerate() {
            *row = self.padding_row(plan, i);
        }
    }
}

/// One sequence of a step, 16 bytes.
///
/// Its query rows are `qo_start..qo_start + extend_len`; row `qo_start + i` has position
/// `kv_len - extend_len + i` and sees positions `0..=` that. A padding row has `kv_len` 0 and sees nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BatchRow {
    /// The sequence's row in the page tables.
    pub row: RowId,
    /// Index of the sequence's first row in q, k, v and out.
    pub qo_start: u32,
    /// Number of the sequence's new tokens.
    pub extend_len: u32,
    /// Tokens with K and V after the step has stored its own: `cached_len + extend_len`.
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
    /// Source page.
    pub source: PageId,
    /// Target page.
    pub target: PageId,
}

/// The slot of K and V of each new token; a backend writes nothing to a negative slot.
///
/// 32-bit if every slot of the pool fits, else 64-bit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[doc(alias = "out_cache_loc")]
pub enum SlotMapping<'a> {
    /// Slots of a pool of at most 2^31 slots.
    I32(&'a [i32]),
    /// Slots of a larger pool.
    I64(&'a [i64]),
}

impl<'a> SlotMapping<'a> {
    /// Returns a range of the slots.
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

    /// Returns the slot of token `i`, or `None` if nothing is written for it.
    pub fn get(&self, i: usize) -> Option<SlotId> {
        let slot = match self {
            Self::I32(slots) => i64::from(slots[i]),
            Self::I64(slots) => slots[i],
        };
        u64::try_from(slot).ok().map(SlotId::new)
    }
}

/// The plan of one step, which the host makes and every backend reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchPlan<'step> {
    /// The step.
    pub step: StepId,
    /// The sequences, in the order of the batch.
    pub rows: &'step [BatchRow],
    /// The new tokens of all sequences, one sequence after another; [`TokenId::PENDING`] for unknown ones.
    pub tokens: &'step [TokenId],
    /// Position in its sequence of each new token.
    pub positions: &'step [u32],
    /// Slot of each new token.
    pub slot_mapping: SlotMapping<'step>,
    /// Slots of the tracks after the first, `[tracks - 1, tokens]`, as wide as `slot_mapping`; empty with one track.
    /// See [`BatchPlan::slots_of`].
    pub track_slots: SlotMapping<'step>,
    /// Changes of the page tables since the last plan. Their indices are distinct, so they may be applied in any order.
    pub table_writes: &'step [TableWrite],
    /// Spans of pages that several rows read. A backend may read them once for all these rows.
    pub shared: SharedSpans<'step>,
    /// The masks of draft trees, one for each new token; empty if no row is a tree. If bit `i` is set, the token sees
    /// slot `last - i` of its row; its own bit is set, and all slots before the row's last 64 are seen. 0 for each
    /// token of a row that is not a tree: it sees all tokens up to itself.
    pub masks: &'step [u64],
}

impl<'step> BatchPlan<'step> {
    /// Returns the step, for `commit`, `complete` and `abort`.
    pub fn step(&self) -> StepId {
        self.step
    }

    /// Returns the new tokens of the step, padding included: the rows of q, k, v and out.
    pub fn token_count(&self) -> usize {
        self.positions.len()
    }

    /// Returns the slots of the new tokens in a track: for the layers that
    /// [`PoolLayout::place`](crate::PoolLayout::place) assigns to it. Track 0 is that of group 0.
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

    /// Returns the masks of a row that is a tree of drafts, and `None` for any other row.
    pub fn tree(&self, row: &BatchRow) -> Option<&'step [u64]> {
        let start = row.qo_start as usize;
        let masks = self.masks.get(start..start + row.extend_len as usize)?;
        masks.first().is_some_and(|&mask| mask != 0).then_some(masks)
    }

    /// Returns the numbers of sequences and tokens, padding included.
    pub(crate) fn size(&self) -> PlanSize {
        PlanSize { rows: self.rows.len(), tokens: self.token_count() }
    }

    /// Returns the plan padded to `rows` sequences and `tokens` tokens, for a graph that was captured at that size. A
    /// backend stages the result as another plan; [`Engine::plan_padded`](crate::Engine::plan_padded) makes a plan that
    /// is padded from the start.
    ///
    /// A padding row has `kv_len` 0: it attends to nothing and its output is 0. A padding token has slot -1: nothing is
    /// stored. Each padding row takes one padding token, and the last row takes the rest.
    ///
    /// # Panics
    /// If the plan is larger than `rows` or `tokens`, if the padding tokens do not suffice for the padding rows or have
    /// no row, or if there are more than [`STEP_TOKENS_MAX`] tokens.
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
        let size = PlanSize { rows, tokens };
        BatchPlan {
            step: self.step,
            rows: pad(bump, self.rows, rows, |i| size.padding_row(self.size(), i)),
            tokens: pad(bump, self.tokens, tokens, |_| TokenId::new(0)),
            positions: pad(bump, self.positions, tokens, |_| 0),
            slot_mapping: match self.slot_mapping {
                SlotMapping::I32(slots) => SlotMapping::I32(pad(bump, slots, tokens, |_| -1)),
                SlotMapping::I64(slots) => SlotMapping::I64(pad(bump, slots, tokens, |_| -1)),
            },
            track_slots: match self.track_slots {
                SlotMapping::I32(slots) => {
                    SlotMapping::I32(pad_each(bump, slots, self.token_count(), tokens))
                }
                SlotMapping::I64(slots) => {
                    SlotMapping::I64(pad_each(bump, slots, self.token_count(), tokens))
                }
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

/// Pads the slots of each track from `tokens` to `len`.
fn pad_each<'a, T: Copy + From<i8>>(
    bump: &'a Bump,
    slots: &[T],
    tokens: usize,
    len: usize,
) -> &'a [T] {
    let tracks = slots.len().checked_div(tokens).unwrap_or(0);
    let slot = |at: usize| slots[at / len * tokens..][..tokens].get(at % len).copied();
    bump.alloc_slice_fill_with(tracks * len, |at| slot(at).unwrap_or(T::from(-1)))
}

/// Returns `items`, followed by `fill(0..)` up to `len`.
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

/// A batch in the form of FlashInfer's paged attention, for hosts with their own kernels: CSR arrays of 32-bit numbers.
///
/// Sequence `i` has query rows `qo_indptr[i]..qo_indptr[i + 1]` and pages `kv_indices[kv_indptr[i]..kv_indptr[i + 1]]`.
/// The last page has `kv_last_page_len[i]` tokens, `1 <= kv_last_page_len <= page_size`. It is 0 for an entry without
/// pages, which only [`PackedLevels`] have.
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

/// A batch in the form of FlashInfer's `MultiLevelCascadeAttentionWrapper`: each level lists pages that several rows
/// share once.
///
/// Each level attends all new tokens of the batch to some of their pages. Merging the results of the levels by their
/// log-sum-exp gives attention to all pages. In a level, sequence `i` of [`PackedPlan`] is an entry: consecutive rows,
/// and the pages that all of them read in the level. An entry without pages reads nothing. Shared pages precede every
/// query, so only the last level is causal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PackedLevels<'step> {
    /// `[items]`: indices of the plan's rows, without padding, in the order in which `qo_indptr` counts their new
    /// tokens. Gather q by it, and scatter the output.
    pub order: &'step [u32],
    /// At least one level. The shared spans are first, outermost first: level `n` has the spans with `n` spans around
    /// them. The last level has the pages that each row reads alone.
    pub levels: &'step [PackedPlan<'step>],
}

/// Memory of one plan. Reuse it, so that a warm step allocates nothing; each step in flight needs its own.
#[derive(Debug, Default)]
pub struct StepScratch {
    bump: Bump,
}

impl StepScratch {
    /// Creates empty scratch, which grows to the largest plan made in it.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates empty scratch for plans of up to `bytes`; [`EngineShape::plan_bytes`](crate::EngineShape::plan_bytes) is
    /// the size of the largest.
    pub fn with_capacity(bytes: usize) -> Self {
        Self { bump: Bump::with_capacity(bytes) }
    }

    /// Drops the last plan, which is no longer borrowed.
    pub(crate) fn reset(&mut self) -> &Bump {
        self.bump.reset();
        &self.bump
    }

    /// Returns the allocated bytes.
    pub fn bytes(&self) -> usize {
        self.bump.allocated_bytes()
    }
}
