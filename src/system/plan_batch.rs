//! Plans a step: takes exactly the pages that the new tokens need, and writes down what every backend has to know.

use bumpalo::Bump;

use crate::config::EngineShape;
use crate::error::Error;
use crate::id::{PageId, SeqKey, StepId, TokenId};
use crate::plan::{BatchPlan, BatchRow, Extend, SlotMapping, StepScratch, TableWrite};
use crate::sequence::{RowMut, Sequence, SequenceTable};
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
    let page_size = shape.layout.page_size();
    let mut needs = Needs::default();
    for &Extend { seq, len } in items {
        let row = sequences.row_mut(seq)?;
        let sequence = &mut *row.sequence;
        if sequence.is_preempted() {
            return Err(Error::Preempted { seq });
        }
        if sequence.stamp == stamp {
            return Err(Error::RepeatedSequence { seq });
        }
        sequence.stamp = stamp;
        let max = extend_max(shape, sequence, steps);
        if len == 0 || len > max {
            return Err(Error::ExtendLen { seq, len, max });
        }
        let new_pages = sequence.pages_lacking(len, page_size);
        let page_len = sequence.page_len + new_pages;
        needs.tokens += len as usize;
        needs.pages += u64::from(new_pages);
        let (chunks, table_writes) = row.lacking(page_len);
        needs.chunks += chunks;
        needs.table_writes += table_writes as usize;
    }
    sequences.check_chunks(needs.chunks)?;
    Ok(needs)
}

/// The most tokens that can be planned for a sequence now: its known ones, or the one that an unfinished step of it
/// will sample.
pub(crate) fn extend_max(shape: &EngineShape, sequence: &Sequence, steps: &StepLog) -> u32 {
    if sequence.token_len > sequence.planned_len {
        return sequence.token_len - sequence.planned_len;
    }
    let room = sequence.planned_len < shape.max_sequence_len;
    u32::from(room && steps.samples_next(sequence.last_item))
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
    new_pages: &[PageId],
    slots: &mut [T],
    bump: &'step Bump,
) -> BatchPlan<'step> {
    let step = steps.begin(true);
    let tokens = bump.alloc_slice_fill_copy(needs.tokens, TokenId::PENDING);
    let positions = bump.alloc_slice_fill_copy(needs.tokens, 0);
    let table_writes = bump.alloc_slice_fill_copy(needs.table_writes, TableWrite::default());
    let mut arrays = Arrays {
        page_size: shape.layout.page_size(),
        new_pages,
        at: 0,
        tokens: &mut *tokens,
        positions: &mut *positions,
        slots,
        writes: table_writes.iter_mut(),
    };
    let rows = bump.alloc_slice_fill_with(items.len(), |i| {
        let Extend { seq, len } = items[i];
        let mut row = sequences.row_mut(seq).expect("checked");
        let qo_start = arrays.at as u32;
        record(row.sequence, seq, len, step, steps);
        if len == 1 && row.is_sent() {
            arrays.write_one(&mut row);
        } else {
            arrays.write(&mut row, len);
        }
        let Sequence { row, planned_len: kv_len, .. } = *row.sequence;
        BatchRow { row, qo_start, extend_len: len, kv_len }
    });
    assert!(arrays.writes.len() == 0, "the words that are taken were counted");
    assert!(arrays.new_pages.is_empty(), "the pages that are taken were counted");
    let slot_mapping = SlotMapping::I32(&[]);
    BatchPlan { step, rows, tokens, positions, slot_mapping, table_writes }
}

/// Records a sequence's part in a step: `len` tokens more.
fn record(sequence: &mut Sequence, seq: SeqKey, len: u32, step: StepId, steps: &mut StepLog) {
    let Sequence { life, planned_len: start, dirty_from, last_item: previous, .. } = *sequence;
    let end = start + len;
    let item = StepItem { seq, life, start, end, dirty_from, previous, cut: false };
    sequence.last_item = steps.push(item);
    sequence.last_step = step;
    sequence.planned_len = end;
}

/// A plan's arrays, written up to token `at`, and the new pages not yet handed out.
struct Arrays<'a, T> {
    page_size: u32,
    new_pages: &'a [PageId],
    at: usize,
    tokens: &'a mut [TokenId],
    positions: &'a mut [u32],
    slots: &'a mut [T],
    writes: std::slice::IterMut<'a, TableWrite>,
}

impl<T: SlotNumber> Arrays<'_, T> {
    /// Writes the last `len` planned tokens of a row.
    fn write(&mut self, row: &mut RowMut<'_>, len: u32) {
        let Sequence { planned_len: end, token_len, page_len, .. } = *row.sequence;
        let start = end - len;
        let count = (end.div_ceil(self.page_size) - page_len) as usize;
        row.push_pages(self.new_pages.split_off(..count).expect("counted"));
        row.take_dirty(|write| *self.writes.next().expect("counted") = write);
        let out = self.at..self.at + len as usize;
        (start..end).zip(&mut self.positions[out.clone()]).for_each(|(n, out)| *out = n);
        let mut tokens = &mut self.tokens[out.clone()];
        for piece in row.token_pieces(start, token_len.min(end)) {
            tokens.split_off_mut(..piece.len()).expect("counted").copy_from_slice(piece);
        }
        let (mut slots, mut offset) = (&mut self.slots[out.clone()], start % self.page_size);
        for page in row.page_pieces(start / self.page_size, row.sequence.page_len).flatten() {
            let count = slots.len().min((self.page_size - offset) as usize);
            let slot = slot(*page, self.page_size, offset);
            let out = slots.split_off_mut(..count).expect("no more than there are");
            (slot..).zip(out).for_each(|(slot, out)| *out = T::from_slot(slot));
            offset = 0;
        }
        self.at = out.end;
    }

    /// [`Arrays::write`] for a row that decodes: one token, and no page to be sent but perhaps a new one. It takes a
    /// third of the instructions, and most rows of most steps are such.
    fn write_one(&mut self, row: &mut RowMut<'_>) {
        let Sequence { planned_len, token_len, .. } = *row.sequence;
        let position = planned_len - 1;
        let (index, offset) = (position / self.page_size, position % self.page_size);
        let (page, token) = if offset == 0 {
            let page = *self.new_pages.split_off_first().expect("counted");
            let write = |write| *self.writes.next().expect("counted") = write;
            (page, row.push_sent(page, write))
        } else {
            row.page_and_token(index, offset)
        };
        if position < token_len {
            self.tokens[self.at] = token;
        }
        self.positions[self.at] = position;
        self.slots[self.at] = T::from_slot(slot(page, self.page_size, offset));
        self.at += 1;
    }
}

fn slot(page: PageId, page_size: u32, offset: u32) -> u64 {
    u64::from(page.raw()) * u64::from(page_size) + u64::from(offset)
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
