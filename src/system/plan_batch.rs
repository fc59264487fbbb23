//! Plans a step: takes exactly the pages that the new tokens need, and writes down what every backend has to know.

use bumpalo::Bump;

use crate::config::EngineShape;
use crate::error::Error;
use crate::id::{PageId, TokenId};
use crate::plan::{BatchPlan, BatchRow, Extend, SlotMapping, StepScratch, TableWrite};
use crate::sequence::{Sequence, SequenceTable};
use crate::step::{StepItem, StepLog};
use crate::system::reclaim::reclaim;
use crate::world::World;

/// What a batch needs, found out before anything changes.
#[derive(Default)]
struct Needs {
    tokens: usize,
    pages: u64,
    chunks: u32,
    table_writes: usize,
}

/// Plans a batch; the plan lives in `scratch`. O(batch and new tokens), whatever the context.
///
/// # Errors
/// [`Error::EmptyBatch`], [`Error::OutOfSteps`]; for an item [`Error::UnknownSequence`], [`Error::Preempted`],
/// [`Error::RepeatedSequence`], [`Error::ExtendLen`]; [`Error::OutOfTokens`], [`Error::OutOfPages`].
/// Nothing changes then.
pub(crate) fn plan_batch<'step>(
    shape: &EngineShape,
    world: &mut World,
    scratch: &'step mut StepScratch,
    items: &[Extend],
) -> Result<BatchPlan<'step>, Error> {
    let World { pages, prefixes, sequences, steps, counters, buffers } = world;
    counters.plans += 1;
    let needs = check(shape, sequences, steps, items, counters.plans)?;
    let evicted = reclaim(pages, prefixes, needs.pages, &mut buffers.freed)?;
    counters.evicted_pages += u64::from(evicted);
    let bump = scratch.reset();
    let new_pages = bump.alloc_slice_fill_copy(needs.pages as usize, PageId::default());
    assert!(pages.alloc(new_pages), "the pages were reclaimed");
    if shape.layout.slots_fit_i32() {
        let slots = bump.alloc_slice_fill_copy(needs.tokens, 0_i32);
        let plan = fill(shape, sequences, steps, items, &needs, new_pages, slots, bump);
        Ok(BatchPlan { slot_mapping: SlotMapping::I32(slots), ..plan })
    } else {
        let slots = bump.alloc_slice_fill_copy(needs.tokens, 0_i64);
        let plan = fill(shape, sequences, steps, items, &needs, new_pages, slots, bump);
        Ok(BatchPlan { slot_mapping: SlotMapping::I64(slots), ..plan })
    }
}

/// Finds what is wrong with a batch, or what it needs.
fn check(
    shape: &EngineShape,
    sequences: &mut SequenceTable,
    steps: &StepLog,
    items: &[Extend],
    stamp: u64,
) -> Result<Needs, Error> {
    if items.is_empty() {
        return Err(Error::EmptyBatch);
    }
    steps.check_room()?;
    let mut needs = Needs::default();
    for &Extend { seq, len } in items {
        let sequence = sequences.running(seq)?;
        if sequence.stamp == stamp {
            return Err(Error::RepeatedSequence { seq });
        }
        let max = extend_max(shape, sequence, steps);
        if len == 0 || len > max {
            return Err(Error::ExtendLen { seq, len, max });
        }
        let end = sequence.planned_len + len;
        let page_len = end.div_ceil(shape.layout.page_size());
        needs.tokens += len as usize;
        needs.pages += u64::from(page_len - sequence.page_len);
        needs.chunks += sequences.chunks_lacking(sequence, page_len);
        needs.table_writes += sequences.dirty_write_count(sequence, page_len);
        sequences.get_mut(seq)?.stamp = stamp;
    }
    sequences.check_chunks(needs.chunks, needs.tokens as u64)?;
    Ok(needs)
}

/// The most tokens that can be planned for a sequence now: its known ones, or the one that an unfinished step of it
/// will sample.
pub(crate) fn extend_max(shape: &EngineShape, sequence: &Sequence, steps: &StepLog) -> u32 {
    let known = sequence.token_len.saturating_sub(sequence.planned_len);
    let pending =
        steps.is_unfinished(sequence.last_item) && sequence.planned_len < shape.max_sequence_len;
    if known == 0 { u32::from(pending) } else { known }
}

/// Hands the new pages out in batch order, records each sequence's part in the step, and writes the plan; `slots` are
/// written beside it, as the number type that fits the pool.
#[expect(clippy::too_many_arguments, reason = "a system's arguments are its access list")]
fn fill<'step, T: SlotNumber>(
    shape: &EngineShape,
    sequences: &mut SequenceTable,
    steps: &mut StepLog,
    items: &[Extend],
    needs: &Needs,
    mut new_pages: &[PageId],
    mut slots: &mut [T],
    bump: &'step Bump,
) -> BatchPlan<'step> {
    let page_size = shape.layout.page_size();
    let step = steps.begin(true);
    let tokens = bump.alloc_slice_fill_copy(needs.tokens, TokenId::PENDING);
    let positions = bump.alloc_slice_fill_copy(needs.tokens, 0);
    let table_writes = bump.alloc_slice_fill_copy(needs.table_writes, TableWrite::default());
    let mut writes = table_writes.iter_mut();
    let mut qo_start = 0;
    let rows = bump.alloc_slice_fill_with(items.len(), |i| {
        let Extend { seq, len } = items[i];
        let sequence = sequences.begin_extend(seq, len, step, |sequence| {
            steps.push(StepItem {
                seq,
                life: sequence.life,
                start: sequence.planned_len,
                end: sequence.planned_len + len,
                dirty_from: sequence.dirty_from,
                previous: sequence.last_item,
            })
        });
        let start = sequence.planned_len - len;
        let row = BatchRow { row: sequence.row, qo_start, extend_len: len, kv_len: start + len };
        let count = row.kv_len.div_ceil(page_size) - sequence.page_len;
        let (own, rest) = new_pages.split_at(count as usize);
        sequences.push_pages(seq, own);
        new_pages = rest;

        let sequence = sequences.get(seq).expect("checked");
        let out = qo_start as usize..(qo_start + len) as usize;
        for (position, out) in (start..).zip(&mut positions[out.clone()]) {
            *out = position;
        }
        known_tokens(sequences, sequence, start, &mut tokens[out]);
        let (own, rest) = std::mem::take(&mut slots).split_at_mut(len as usize);
        write_slots(sequences, sequence, page_size, start, own);
        slots = rest;
        sequences.dirty_writes(sequence, |write| {
            *writes.next().expect("dirty_write_count counts dirty_writes") = write;
        });
        sequences.mark_clean(seq);
        qo_start += len;
        row
    });
    assert!(writes.next().is_none(), "dirty_write_count counts dirty_writes");
    let slot_mapping = SlotMapping::I32(&[]);
    BatchPlan { step, rows, tokens, positions, slot_mapping, table_writes }
}

/// Fills in the tokens that are known.
fn known_tokens(
    sequences: &SequenceTable,
    sequence: &Sequence,
    start: u32,
    mut out: &mut [TokenId],
) {
    let end = sequence.token_len.min(start + out.len() as u32);
    for piece in sequences.token_pieces(sequence, start, end) {
        let (head, rest) = out.split_at_mut(piece.len());
        head.copy_from_slice(piece);
        out = rest;
    }
}

/// The slots of positions from `start` on.
fn write_slots<T: SlotNumber>(
    sequences: &SequenceTable,
    sequence: &Sequence,
    page_size: u32,
    start: u32,
    mut out: &mut [T],
) {
    let end = start + out.len() as u32;
    let (first, last) = (start / page_size, end.div_ceil(page_size));
    let mut offset = start - first * page_size;
    for page in sequences.page_pieces(sequence, first, last).flatten() {
        let count = ((page_size - offset) as usize).min(out.len());
        let (head, rest) = out.split_at_mut(count);
        let slot = u64::from(page.raw()) * u64::from(page_size) + u64::from(offset);
        for (slot, out) in (slot..).zip(head) {
            *out = T::from_slot(slot);
        }
        (out, offset) = (rest, 0);
    }
}

/// A number type of slot mappings.
trait SlotNumber: Copy {
    fn from_slot(slot: u64) -> Self;
}

impl SlotNumber for i32 {
    fn from_slot(slot: u64) -> Self {
        slot as i32
    }
}

impl SlotNumber for i64 {
    fn from_slot(slot: u64) -> Self {
        slot as i64
    }
}
