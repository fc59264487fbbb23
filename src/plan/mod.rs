//! The records that a step is made of: what the engine decided, and what every backend reads.
//!
//! A [`BatchPlan`] borrows nothing but the caller's [`StepScratch`], so several steps can be in flight. An
//! [`OwnedPlan`] is the same in one buffer: `Send`, and a byte string for other processes.
//!
//! Not here: how a plan is made (`system/plan_batch/`).

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
pub use owned::{OwnedPlan, PlanBytesError};
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

impl<'a> SlotMapping<'a> {
    /// Some of them.
    fn part(&self, range: std::ops::Range<usize>) -> SlotMapping<'a> {
        match self {
            Self::I32(slots) => SlotMapping::I32(&slots[range]),
            Self::I64(slots) => SlotMapping::I64(&slots[range]),
        }
    }

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
    /// The same for the tracks but the first one, `[tracks - 1, tokens]`, slots as wide; empty where there is one
    /// track. See [`BatchPlan::slots_of`].
    pub track_slots: SlotMapping<'step>,
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

    /// The slot of each new token in a track: of the layers that [`PoolLayout::place`](crate::PoolLayout::place) has
    /// there. Track 0 is group 0's.
    ///
    /// # Panics
    /// If there is no such track.
    pub fn slots_of(&self, track: u32) -> SlotMapping<'step> {
        match track.checked_sub(1) {
            None => self.slot_mapping,
            Some(index) => {
                let first = index as usize * self.token_count();
                self.track_slots.part(first..first + self.token_count())
            }
        }
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

/// Slots of tracks, of `tokens` each, padded to `len` each.
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
/// `1 <= kv_last_page_len <= page_size`; 0 where there are no pages, which is in [`PackedLevels`] alone.
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

/// A batch as FlashInfer's `MultiLevelCascadeAttentionWrapper` takes it: what several rows share is in one level once,
/// for all of them together.
///
/// Each level attends all of the batch's new tokens to some of their pages; their results, merged by their log-sum-exp,
/// are attention to all. In a level, sequence `i` of [`PackedPlan`] is an entry: some rows that stand side by side, and
/// the pages that all of them read there; without pages they read nothing. What is shared lies before every query, so
/// that the last level alone is causal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PackedLevels<'step> {
    /// `[items]`: the plan's rows by their indices, padding left out, in the order in which `qo_indptr` counts their
    /// new tokens. Gather q by it, and scatter the output.
    pub order: &'step [u32],
    /// At least one. First the shared spans, outermost first: level `n` has those with `n` others around them. The last
    /// has what each row reads for itself.
    pub levels: &'step [PackedPlan<'step>],
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
