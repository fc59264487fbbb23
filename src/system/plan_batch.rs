//! Plans a step: takes exactly the pages that the new tokens need, and writes down what every backend has to know.

use bumpalo::Bump;

use crate::config::EngineShape;
use crate::error::Error;
use crate::id::{PageId, StepId, TokenId};
use crate::plan::{BatchPlan, BatchRow, Extend, SlotMapping, StepScratch, TableWrite};
use crate::sequence::{Sequence, SequenceTable};
use crate::step::{StepItem, StepLog};
use crate::system::reclaim::{self, reclaim};
use crate::world::World;

/// What a batch needs, found out before anything changes.
#[derive(Default)]
struct Needs {
    tokens: usize,
    pages: u64,
    chunks: u32,
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
    reclaim::check(pages, prefixes, needs.pages)?;
    let bump = scratch.reset();

    let evicted = reclaim(pages, prefixes, needs.pages, &mut buffers.freed)?;
    counters.evicted_pages += u64::from(evicted);
    let new_pages = bump.alloc_slice_fill_copy(needs.pages as usize, PageId::default());
    assert!(pages.alloc(new_pages), "the pages were reclaimed");
    let step = steps.begin(true);
    let rows = take(shape, sequences, steps, step, items, new_pages, bump);

    let tokens = bump.alloc_slice_fill_copy(needs.tokens, TokenId::PENDING);
    let positions = bump.alloc_slice_fill_copy(needs.tokens, 0);
    for (item, row) in items.iter().zip(rows.iter()) {
        let out = row.qo_start as usize..(row.qo_start + row.extend_len) as usize;
        let start = row.kv_len - row.extend_len;
        for (position, out) in (start..).zip(&mut positions[out.clone()]) {
            *out = position;
        }
        let sequence = sequences.get(item.seq)?;
        known_tokens(sequences, sequence, start, &mut tokens[out]);
    }
    let slot_mapping = if shape.layout.slots_fit_i32() {
        SlotMapping::I32(slots(shape, sequences, items, rows, bump, |slot| slot as i32))
    } else {
        SlotMapping::I64(slots(shape, sequences, items, rows, bump, |slot| slot as i64))
    };
    let table_writes = table_writes(sequences, items, bump)?;
    Ok(BatchPlan { step, rows, tokens, positions, slot_mapping, table_writes })
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
        needs.tokens += len as usize;
        needs.pages += u64::from(end.div_ceil(shape.layout.page_size()) - sequence.page_len);
        needs.chunks += sequences.chunks_lacking(sequence, end);
        sequences.get_mut(seq)?.stamp = stamp;
    }
    sequences.check_chunks(needs.chunks, needs.tokens as u64)?;
    Ok(needs)
}

/// The most tokens that can be planned for a sequence now: its known ones, or the one that an unfinished step of it
/// will sample.
fn extend_max(shape: &EngineShape, sequence: &Sequence, steps: &StepLog) -> u32 {
    let known = sequence.token_len.saturating_sub(sequence.planned_len);
    let pending =
        steps.is_unfinished(sequence.last_item) && sequence.planned_len < shape.max_sequence_len;
    if known == 0 { u32::from(pending) } else { known }
}

/// Hands the new pages out in batch order, and records each sequence's part in the step.
fn take<'step>(
    shape: &EngineShape,
    sequences: &mut SequenceTable,
    steps: &mut StepLog,
    step: StepId,
    items: &[Extend],
    mut new_pages: &[PageId],
    bump: &'step Bump,
) -> &'step [BatchRow] {
    let mut qo_start = 0;
    bump.alloc_slice_fill_with(items.len(), |i| {
        let Extend { seq, len } = items[i];
        let sequence = sequences.get_mut(seq).expect("checked");
        let (start, end) = (sequence.planned_len, sequence.planned_len + len);
        let item = StepItem {
            seq,
            life: sequence.life,
            start,
            end,
            dirty_from: sequence.dirty_from,
            previous: sequence.last_item,
        };
        sequence.planned_len = end;
        sequence.last_step = step;
        sequence.last_item = steps.push(item);
        let row = BatchRow { row: sequence.row, qo_start, extend_len: len, kv_len: end };
        let count = end.div_ceil(shape.layout.page_size()) - sequence.page_len;
        if count > 0 {
            let (own, rest) = new_pages.split_at(count as usize);
            sequences.push_pages(seq, own);
            new_pages = rest;
        }
        qo_start += len;
        row
    })
}

/// Fills in the tokens that are known.
fn known_tokens(
    sequences: &SequenceTable,
    sequence: &Sequence,
    start: u32,
    mut out: &mut [TokenId],
) {
    let end = sequence.token_len.min(start + out.len() as u32);
    for piece in sequences.token_pieces(sequence, start, end.max(start)) {
        let (head, rest) = out.split_at_mut(piece.len());
        head.copy_from_slice(piece);
        out = rest;
    }
}

/// The slot of each new token, as the number type that fits the pool.
fn slots<'step, T: Copy + Default>(
    shape: &EngineShape,
    sequences: &SequenceTable,
    items: &[Extend],
    rows: &[BatchRow],
    bump: &'step Bump,
    number: impl Fn(u64) -> T,
) -> &'step [T] {
    let page_size = shape.layout.page_size();
    let len = rows.last().map_or(0, |row| (row.qo_start + row.extend_len) as usize);
    let out = bump.alloc_slice_fill_copy(len, T::default());
    let mut rest = &mut *out;
    for (item, row) in items.iter().zip(rows) {
        let sequence = sequences.get(item.seq).expect("checked");
        let (mut position, end) = (row.kv_len - row.extend_len, row.kv_len);
        let pages = (position / page_size, end.div_ceil(page_size));
        for page in sequences.page_pieces(sequence, pages.0, pages.1).flatten() {
            let offset = position % page_size;
            let count = (page_size - offset).min(end - position);
            let (head, tail) = rest.split_at_mut(count as usize);
            let first = shape.layout.slot(*page, offset).raw();
            for (slot, out) in (first..).zip(head) {
                *out = number(slot);
            }
            (rest, position) = (tail, position + count);
        }
    }
    out
}

/// The changed words of the batch's page tables, which count as sent from now on.
fn table_writes<'step>(
    sequences: &mut SequenceTable,
    items: &[Extend],
    bump: &'step Bump,
) -> Result<&'step [TableWrite], Error> {
    let mut count = 0;
    for item in items {
        count += sequences.dirty_write_count(sequences.get(item.seq)?);
    }
    let out = bump.alloc_slice_fill_copy(count, TableWrite { index: 0, value: 0 });
    let mut next = out.iter_mut();
    for item in items {
        let sequence = sequences.get(item.seq)?;
        sequences.dirty_writes(sequence, |write| {
            *next.next().expect("dirty_write_count counts dirty_writes") = write;
        });
        let sequence = sequences.get_mut(item.seq)?;
        sequence.dirty_from = sequence.page_len;
    }
    Ok(out)
}
