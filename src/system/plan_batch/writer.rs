//! Writes the plan of a checked batch, and records each sequence's item in the step.

use bumpalo::Bump;
use bytemuck::Zeroable;

use crate::config::EngineShape;
use crate::id::{PageId, RowId, StepId, TokenId};
use crate::plan::{BatchPlan, BatchRow, Draft, Extend, PlanSize, SharedSpans, SlotMapping, TableWrite};
use crate::sequence::{RowMut, Sequence, SequenceTable};
use crate::step::{StepItem, StepLog};
use crate::system::plan_drafts::begin_drafts;

use super::{Needs, states};

/// A checked batch, and the pages that it takes.
pub(super) struct Batch<'a> {
    pub shape: &'a EngineShape,
    pub items: &'a [Extend],
    pub drafts: &'a [Draft<'a>],
    pub needs: Needs,
    /// The size of the plan, including padding.
    pub size: PlanSize,
    pub new_pages: &'a [PageId],
}

/// Assigns the new pages in batch order, records each sequence's item, and writes the plan except its shared spans. `T`
/// is the number type of slots.
pub(super) fn fill<'step, T: SlotNumber>(
    sequences: &mut SequenceTable,
    steps: &mut StepLog,
    batch: &Batch<'_>,
    bump: &'step Bump,
) -> BatchPlan<'step> {
    let Batch { shape, items, drafts, ref needs, size, new_pages } = *batch;
    let step = steps.begin(true, items.len());
    let further = (shape.table.tracks as usize - 1) * size.tokens;
    let [slots, others] = [size.tokens, further].map(|n| bump.alloc_slice_fill_copy(n, T::NONE));
    let tokens = bump.alloc_slice_fill_copy(size.tokens, TokenId::PENDING);
    let positions = bump.alloc_slice_fill_copy(size.tokens, 0);
    // Values that are not zero avoid memset, which stores bytes one by one for arrays as short as a batch.
    let unwritten = TableWrite { index: u32::MAX, value: 0 };
    let table_writes = bump.alloc_slice_fill_copy(needs.table_writes, unwritten);
    let unwritten = BatchRow { row: RowId::new(u32::MAX), ..BatchRow::zeroed() };
    let rows = bump.alloc_slice_fill_copy(size.rows, unwritten);
    let mut out = PlanWriter {
        page_size: shape.layout.page_size(),
        tracks: shape.table.tracks as usize,
        step,
        qo_start: 0,
        new_pages,
        rows: &mut *rows,
        tokens: &mut *tokens,
        positions: &mut *positions,
        slots: &mut *slots,
        all_tokens: size.tokens,
        others: &mut *others,
        writes: table_writes.iter_mut(),
    };
    let mut rest = items;
    loop {
        let decoded = match shape.table.tracks {
            1 => out.decode::<1>(sequences, steps, rest),
            2 => out.decode::<2>(sequences, steps, rest),
            _ => out.decode::<0>(sequences, steps, rest),
        };
        rest = &rest[decoded..];
        let Some(item) = rest.split_off_first() else { break };
        out.extend(sequences, steps, item);
    }
    if needs.states {
        let mut writes = std::mem::take(&mut out.writes).into_slice();
        states::write(sequences, steps, (step, items), &mut out.new_pages, &mut writes);
        out.writes = writes.iter_mut();
    }
    assert!(out.writes.len() == 0, "the rows write all counted table words");
    assert!(out.new_pages.is_empty(), "the rows take all counted pages");
    size.pad_rows(PlanSize { rows: items.len(), tokens: needs.tokens }, rows);
    tokens[needs.tokens..].fill(TokenId::new(0));
    let masks = match drafts {
        [] => &[],
        _ => begin_drafts(sequences, steps, items, drafts, rows, positions, bump),
    };
    BatchPlan {
        step,
        rows,
        tokens,
        positions,
        slot_mapping: T::mapping(slots),
        track_slots: T::mapping(others),
        table_writes,
        shared: SharedSpans::default(),
        masks,
    }
}

/// Records an item of a sequence whose pages before `dirty_from` are sent.
fn record(sequence: &mut Sequence, item: Extend, dirty_from: u32, step: StepId, steps: &mut StepLog) {
    let Sequence { preemption_epoch, planned_len: start, last_item: previous, .. } = *sequence;
    let end = start + item.len;
    sequence.last_step = step;
    sequence.planned_len = end;
    sequence.last_item = steps.push(StepItem {
        seq: item.seq,
        preemption_epoch,
        start,
        end,
        dirty_from,
        previous,
        ..StepItem::default()
    });
}

/// The unwritten rest of a plan's arrays, and the new pages that no row has taken.
struct PlanWriter<'a, T> {
    page_size: u32,
    tracks: usize,
    step: StepId,
    /// Number of tokens written, which is the index of the next row's first token.
    qo_start: u32,
    new_pages: &'a [PageId],
    rows: &'a mut [BatchRow],
    tokens: &'a mut [TokenId],
    positions: &'a mut [u32],
    slots: &'a mut [T],
    /// Number of tokens of the plan, including padding.
    all_tokens: usize,
    /// Slots of the tracks after the first, `[tracks - 1, all_tokens]`.
    others: &'a mut [T],
    writes: std::slice::IterMut<'a, TableWrite>,
}

impl<T: SlotNumber> PlanWriter<'_, T> {
    fn advance(&mut self, rows: usize, tokens: usize) {
        self.qo_start += tokens as u32;
        self.rows.split_off_mut(..rows).expect("counted");
        self.tokens.split_off_mut(..tokens).expect("counted");
        self.positions.split_off_mut(..tokens).expect("counted");
        self.slots.split_off_mut(..tokens).expect("counted");
    }

    /// Writes one row. Not inlined, so that the loop of [`PlanWriter::decode`] keeps its registers,
    /// which saves 4 % of a plan's instructions at page_size 16.
    #[inline(never)]
    fn extend(&mut self, sequences: &mut SequenceTable, steps: &mut StepLog, item: &Extend) {
        let len = item.len as usize;
        let mut row = sequences.row_mut(item.seq).expect("checked");
        let dirty_from = row.sequence.dirty_from.page();
        record(row.sequence, *item, dirty_from, self.step, steps);
        let Sequence { row: id, planned_len: end, token_len, page_len, .. } = *row.sequence;
        let start = end - item.len;
        self.rows[0] = BatchRow { row: id, qo_start: self.qo_start, extend_len: item.len, kv_len: end };
        let count = (end.div_ceil(self.page_size) - page_len) as usize;
        let new = self.new_pages.split_off(..count * self.tracks).expect("counted");
        row.append_pages(count as u32, new);
        row.take_dirty(|write| *self.writes.next().expect("counted") = write);
        (start..end).zip(&mut *self.positions).for_each(|(n, out)| *out = n);
        let mut tokens = &mut self.tokens[..len];
        for piece in row.token_pieces(start, token_len.min(end)) {
            tokens.split_off_mut(..piece.len()).expect("counted").copy_from_slice(piece);
        }
        write_slots(&row, 0, start, self.page_size, &mut self.slots[..len]);
        if self.tracks > 1 {
            let own = self.qo_start as usize..self.qo_start as usize + len;
            for (track, slots) in (1..).zip(self.others.chunks_exact_mut(self.all_tokens)) {
                write_slots(&row, track, start, self.page_size, &mut slots[own.clone()]);
            }
        }
        self.advance(1, len);
    }

    /// Writes the decode rows at the start of `items`, and returns their number. A decode row computes one token and
    /// has no unsent pages and no state to decide, so it needs at most one new page in each track. Most rows decode;
    /// this loop writes them in a third of the instructions of [`PlanWriter::extend`]. `TRACKS` is the number of tracks
    /// if it is 1 or 2, else 0: the forms for 1 and for 2 tracks save 13 % and 11 % of a plan's instructions at
    /// page_size 16.
    fn decode<const TRACKS: usize>(
        &mut self,
        sequences: &mut SequenceTable,
        steps: &mut StepLog,
        items: &[Extend],
    ) -> usize {
        let tracks = if TRACKS > 0 { TRACKS } else { self.tracks };
        let most = items.len();
        let rows = &mut self.rows[..most];
        let (tokens, positions) = (&mut self.tokens[..most], &mut self.positions[..most]);
        let (slots, page_size) = (&mut self.slots[..most], self.page_size);
        let others = &mut *self.others;
        let (mut new_pages, mut writes) = (self.new_pages.iter(), std::mem::take(&mut self.writes));
        let mut count = 0;
        while count < most {
            let item = items[count];
            let mut row = sequences.row_mut(item.seq).expect("checked");
            if item.len != 1 || !row.is_sent() {
                break;
            }
            let room = row.sequence.room(page_size);
            let sent = row.sequence.page_len;
            record(row.sequence, item, sent, self.step, steps);
            // The slots of further tracks are indexed directly. Chunks of a slice would cost a division for each row.
            let mut at = self.qo_start as usize + count;
            let (page, offset) = if room > 0 {
                let offset = page_size - room;
                for page in row.last_further_pages(tracks) {
                    others[at] = T::from_slot(slot_at(page, page_size, offset));
                    at += self.all_tokens;
                }
                (row.last_page(), offset)
            } else if TRACKS == 1 {
                let page = *new_pages.next().expect("counted");
                row.append_sent(page, |write| *writes.next().expect("counted") = write);
                (page, 0)
            } else {
                let (own, rest) = new_pages.as_slice().split_at(tracks);
                new_pages = rest.iter();
                let (words, rest) = writes.into_slice().split_at_mut(row.words_of_place(tracks));
                writes = rest.iter_mut();
                row.append_place(own, words);
                for &page in &own[1..] {
                    others[at] = T::from_slot(slot_at(page, page_size, 0));
                    at += self.all_tokens;
                }
                (own[0], 0)
            };
            let Sequence { row: id, planned_len, token_len, .. } = *row.sequence;
            let qo_start = self.qo_start + count as u32;
            rows[count] = BatchRow { row: id, qo_start, extend_len: 1, kv_len: planned_len };
            if planned_len == token_len {
                tokens[count] = row.sequence.last_token;
            } else if planned_len < token_len {
                tokens[count] = row.token(planned_len - 1);
            }
            positions[count] = planned_len - 1;
            slots[count] = T::from_slot(slot_at(page, page_size, offset));
            count += 1;
        }
        (self.new_pages, self.writes) = (new_pages.as_slice(), writes);
        self.advance(count, count);
        count
    }
}

/// Writes the slots of a row in a track, from position `start` on.
fn write_slots<T: SlotNumber>(row: &RowMut<'_>, track: u32, start: u32, page_size: u32, mut slots: &mut [T]) {
    let mut offset = start % page_size;
    for page in row.page_pieces(track, start / page_size, row.sequence.page_len).flatten() {
        let count = slots.len().min((page_size - offset) as usize);
        let slot = slot_at(*page, page_size, offset);
        let out = slots.split_off_mut(..count).expect("`count` is at most the length");
        (slot..).zip(out).for_each(|(slot, out)| *out = T::from_slot(slot));
        offset = 0;
    }
}

fn slot_at(page: PageId, page_size: u32, offset: u32) -> u64 {
    u64::from(page.raw()) * u64::from(page_size) + u64::from(offset)
}

pub(super) trait SlotNumber: Copy + 'static {
    /// The slot of a token that is not stored.
    const NONE: Self;
    fn from_slot(slot: u64) -> Self;
    fn mapping(slots: &[Self]) -> SlotMapping<'_>;
}

impl SlotNumber for i32 {
    const NONE: Self = -1;

    fn from_slot(slot: u64) -> Self {
        slot as i32
    }

    fn mapping(slots: &[Self]) -> SlotMapping<'_> {
        SlotMapping::I32(slots)
    }
}

impl SlotNumber for i64 {
    const NONE: Self = -1;

    fn from_slot(slot: u64) -> Self {
        slot as i64
    }

    fn mapping(slots: &[Self]) -> SlotMapping<'_> {
        SlotMapping::I64(slots)
    }
}
