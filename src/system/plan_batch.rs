//! Plans a step: takes exactly the pages that the new tokens need, and writes down what every backend has to know.

use bumpalo::Bump;
use bytemuck::Zeroable;

use crate::config::EngineShape;
use crate::error::Error;
use crate::fence::Fence;
use crate::id::{PageId, SeqKey, StepId, TokenId};
use crate::page::PagePool;
use crate::plan::{
    BatchPlan, BatchRow, Draft, Extend, STEP_TOKENS_MAX, SharedSpan, SharedSpans, SlotMapping,
    StepScratch, TableWrite,
};
use crate::prefix::{Meeting, PrefixTree};
use crate::sequence::{RowMut, Sequence, SequenceTable};
use crate::stats::Stats;
use crate::step::{StepItem, StepLog};
use crate::system::access::access;
use crate::system::find_spans::find_spans;
use crate::system::plan_drafts::{begin_drafts, check_drafts};
use crate::system::reclaim::reclaim;
use crate::system::room::Room;
use crate::world::{Buffers, World};

access! {
    /// Tables of [`plan_batch`].
    struct PlanBatch of &mut World {
        shape: &EngineShape,
        pages: &mut PagePool,
        prefixes: &mut PrefixTree,
        sequences: &mut SequenceTable,
        steps: &mut StepLog,
        fence: &Fence,
        meeting: &mut Meeting,
        counters: &mut Stats,
        buffers: &mut Buffers,
    }
}

/// What a batch needs, found out before anything changes.
#[derive(Default)]
struct Needs {
    tokens: usize,
    /// Those of all tracks.
    pages: u64,
    /// Of those, the ones that are promised to their sequences.
    drawn: u64,
    chunks: u32,
    table_writes: usize,
}

/// Plans a batch; the plan lives in `scratch`. O(batch, new tokens and page table words to be sent): all words of a
/// sequence's row in its first plan since `admit` or `resume`, later none but those of new pages, of pages that
/// publishing found to be duplicates and those behind them, and of plans that were aborted.
///
/// # Errors
/// [`Error::EmptyBatch`], [`Error::OutOfSteps`]; for an item [`Error::UnknownSequence`], [`Error::Preempted`],
/// [`Error::RepeatedSequence`], [`Error::NotAccepted`], [`Error::ExtendLen`]; [`Error::StepTokens`],
/// [`Error::OutOfTokens`]; for a draft [`Error::DraftOrder`], [`Error::ExtendLen`], [`Error::DraftLen`],
/// [`Error::DraftArrays`], [`Error::DraftMask`], [`Error::DraftPosition`]; [`Error::OutOfPages`]. Nothing changes then.
pub(crate) fn plan_batch<'step>(
    world: PlanBatch<'_>,
    scratch: &'step mut StepScratch,
    items: &[Extend],
    drafts: &[Draft<'_>],
) -> Result<BatchPlan<'step>, Error> {
    let PlanBatch { shape, pages, prefixes, sequences, steps, fence, meeting, .. } = world;
    let plan = sequences.next_plan();
    let needs = match shape.table.tracks {
        1 => check::<true>(shape, sequences, steps, items, plan),
        _ => check::<false>(shape, sequences, steps, items, plan),
    }?;
    check_drafts(sequences, items, drafts)?;
    Room::new(pages, prefixes, sequences, fence).check(needs.pages, needs.drawn)?;
    let evicted = reclaim(pages, prefixes, needs.pages, &mut world.buffers.freed);
    sequences.draw(needs.drawn as u32);
    world.counters.evicted_pages += u64::from(evicted);
    let bump = scratch.reset();
    let new_pages = bump.alloc_slice_fill_copy(needs.pages as usize, PageId::default());
    assert!(pages.alloc(new_pages), "the pages were reclaimed");
    let shared = find_spans(shape, prefixes, sequences, meeting, items, bump);
    let batch = Batch { shape, items, drafts, needs, new_pages };
    let plan = if shape.layout.slots_fit_i32() {
        fill::<i32>(sequences, steps, &batch, bump)
    } else {
        fill::<i64>(sequences, steps, &batch, bump)
    };
    Ok(BatchPlan { shared, ..plan })
}

/// The slots of a row in a track, from position `start` on.
fn write_slots<T: SlotNumber>(
    row: &RowMut<'_>,
    track: u32,
    start: u32,
    page_size: u32,
    mut slots: &mut [T],
) {
    let mut offset = start % page_size;
    for page in row.page_pieces(track, start / page_size, row.sequence.page_len).flatten() {
        let count = slots.len().min((page_size - offset) as usize);
        let slot = slot_at(*page, page_size, offset);
        let out = slots.split_off_mut(..count).expect("no more than there are");
        (slot..).zip(out).for_each(|(slot, out)| *out = T::from_slot(slot));
        offset = 0;
    }
}

impl EngineShape {
    /// Bytes of the largest plan of at most `rows` sequences and `tokens` new tokens together: a
    /// [`StepScratch::with_capacity`] of them is not grown by any such plan. O(1).
    ///
    /// Most of it are page table words, 8 bytes each: the first plan of a sequence since it was admitted or resumed
    /// sends all its pages, the shared ones too. At page_size 1 that is 800 kB for a prompt of 100,000 tokens. A fork
    /// sends a word for each chunk that it shares, unless what its parent sent may still be undone.
    ///
    /// ```
    /// # use kvarena::*;
    /// let shape = EngineConfig::from(PoolConfig::default()).shape()?;
    /// let scratch = StepScratch::with_capacity(shape.plan_bytes(64, 2048) as usize);
    /// # assert!(scratch.bytes() as u64 >= shape.plan_bytes(64, 2048));
    /// # Ok::<(), ConfigError>(())
    /// ```
    pub fn plan_bytes(&self, rows: u32, tokens: u32) -> u64 {
        let rows = u64::from(rows.min(self.table.rows));
        let tokens = u64::from(tokens.min(STEP_TOKENS_MAX));
        let page_size = u64::from(self.layout.page_size());
        let row_pages = u64::from(self.max_sequence_len).div_ceil(page_size);
        let tracks = u64::from(self.table.tracks);
        let row_words = row_pages * tracks + u64::from(self.table.chunks_per_row);
        // A chunk's pages, and the word that names it.
        let chunk_words = u64::from(self.table.chunk_pages) * tracks + 1;
        let words = u64::from(self.table.chunk_count) * chunk_words;
        let writes = words.min(rows * row_words);
        let places = tokens.min(tokens / page_size + rows);
        let new_pages = (places * tracks).min(self.layout.page_count().into());
        let slot = if self.layout.slots_fit_i32() { size_of::<i32>() } else { size_of::<i64>() };
        let slots = slot * self.table.tracks as usize;
        let token = size_of::<TokenId>() + size_of::<u32>() + slots + size_of::<u64>();
        new_pages * size_of::<PageId>() as u64
            + rows * size_of::<BatchRow>() as u64
            + tokens * token as u64
            + writes * size_of::<TableWrite>() as u64
            + rows * (size_of::<SharedSpan>() + size_of::<u32>()) as u64
            + ARRAYS * align_of::<u64>() as u64
    }
}

/// Arrays of a plan, and the new pages; each may begin at the next multiple of its alignment.
const ARRAYS: u64 = 10;

/// Finds what is wrong with a batch, or what it needs. `ONE`: whether there is one track. Not inlined, so that the loop
/// keeps its registers.
#[inline(never)]
fn check<const ONE: bool>(
    shape: &EngineShape,
    sequences: &mut SequenceTable,
    steps: &StepLog,
    items: &[Extend],
    plan: u64,
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
        if sequence.last_plan >= plan {
            return Err(unplannable(sequence, seq));
        }
        sequence.last_plan = plan;
        let max = extend_max(shape, sequence, steps);
        if len == 0 || len > max {
            return Err(Error::ExtendLen { seq, len, max });
        }
        needs.tokens += len as usize;
        let (new_pages, lacking) = if len == 1 && row.is_sent() {
            if row.sequence.room(page_size) > 0 {
                continue;
            }
            row.prefetch_next_page();
            (1, row.lacking_one::<ONE>())
        } else {
            let new_pages = row.sequence.pages_lacking(len, page_size);
            (new_pages, row.lacking(row.sequence.page_len + new_pages))
        };
        needs.pages += u64::from(new_pages);
        needs.drawn += u64::from(if ONE {
            row.sequence.undrawn().min(new_pages)
        } else {
            row.drawn(new_pages)
        });
        needs.chunks += lacking.chunks;
        needs.table_writes += lacking.table_writes as usize;
    }
    if !ONE {
        needs.pages *= u64::from(shape.table.tracks);
    }
    let (tokens, max) = (needs.tokens as u64, u64::from(STEP_TOKENS_MAX));
    if tokens > max {
        return Err(Error::StepTokens { tokens, max });
    }
    sequences.check_chunks(needs.chunks.into())?;
    Ok(needs)
}

/// Why a sequence that this plan has named already, or whose drafts wait, cannot be planned.
#[cold]
fn unplannable(sequence: &Sequence, seq: SeqKey) -> Error {
    match sequence.is_drafted() {
        true => Error::NotAccepted { seq, step: sequence.last_step },
        false => Error::RepeatedSequence { seq },
    }
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

/// A batch that was checked, and the pages that it takes.
struct Batch<'a> {
    shape: &'a EngineShape,
    items: &'a [Extend],
    drafts: &'a [Draft<'a>],
    needs: Needs,
    new_pages: &'a [PageId],
}

/// Hands the new pages out in batch order, records each sequence's part in the step, and writes the plan but for its
/// shared spans. `T`: the number type of the pool's slots. Not inlined, so that its loop keeps its registers.
#[inline(never)]
fn fill<'step, T: SlotNumber>(
    sequences: &mut SequenceTable,
    steps: &mut StepLog,
    batch: &Batch<'_>,
    bump: &'step Bump,
) -> BatchPlan<'step> {
    let Batch { shape, items, drafts, ref needs, new_pages } = *batch;
    let step = steps.begin(true, items.len());
    let further = (shape.table.tracks as usize - 1) * needs.tokens;
    let [slots, others] = [needs.tokens, further].map(|n| bump.alloc_slice_fill_copy(n, T::ZERO));
    let tokens = bump.alloc_slice_fill_copy(needs.tokens, TokenId::PENDING);
    let positions = bump.alloc_slice_fill_copy(needs.tokens, 0);
    let table_writes = bump.alloc_slice_fill_copy(needs.table_writes, TableWrite::default());
    let rows = bump.alloc_slice_fill_with(items.len(), |_| BatchRow::zeroed());
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
        all_tokens: needs.tokens,
        others: &mut *others,
        writes: table_writes.iter_mut(),
    };
    let mut rest = items;
    loop {
        let decoded = match shape.table.tracks {
            1 => out.decode::<true>(sequences, steps, rest),
            _ => out.decode_tracks(sequences, steps, rest),
        };
        rest = &rest[decoded..];
        let Some(item) = rest.split_off_first() else { break };
        out.extend(sequences, steps, item);
    }
    assert!(out.writes.len() == 0, "the words that are taken were counted");
    assert!(out.new_pages.is_empty(), "the pages that are taken were counted");
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

/// Records a sequence's part in a step.
fn record(sequence: &mut Sequence, item: Extend, step: StepId, steps: &mut StepLog) {
    let Sequence { incarnation, planned_len: start, dirty_from, last_item: previous, .. } =
        *sequence;
    let end = start + item.len;
    sequence.last_step = step;
    sequence.planned_len = end;
    sequence.last_item = steps.push(StepItem {
        seq: item.seq,
        incarnation,
        start,
        end,
        dirty_from,
        previous,
        cut: false,
    });
}

/// What of a plan's arrays is not written yet, and the new pages not yet handed out.
struct PlanWriter<'a, T> {
    page_size: u32,
    tracks: usize,
    step: StepId,
    /// Tokens written, and so the first of the next row.
    qo_start: u32,
    new_pages: &'a [PageId],
    rows: &'a mut [BatchRow],
    tokens: &'a mut [TokenId],
    positions: &'a mut [u32],
    slots: &'a mut [T],
    /// Tokens of the batch.
    all_tokens: usize,
    /// Slots of the further tracks, `[tracks - 1, all_tokens]`.
    others: &'a mut [T],
    writes: std::slice::IterMut<'a, TableWrite>,
}

impl<T: SlotNumber> PlanWriter<'_, T> {
    /// Leaves behind what has been written: so many rows, and so many tokens of theirs.
    fn advance(&mut self, rows: usize, tokens: usize) {
        self.qo_start += tokens as u32;
        self.rows.split_off_mut(..rows).expect("counted");
        self.tokens.split_off_mut(..tokens).expect("counted");
        self.positions.split_off_mut(..tokens).expect("counted");
        self.slots.split_off_mut(..tokens).expect("counted");
    }

    /// Writes a row. Not inlined, so that the loop of [`PlanWriter::decode`] keeps its registers.
    #[inline(never)]
    fn extend(&mut self, sequences: &mut SequenceTable, steps: &mut StepLog, item: &Extend) {
        let len = item.len as usize;
        let mut row = sequences.row_mut(item.seq).expect("checked");
        record(row.sequence, *item, self.step, steps);
        let Sequence { row: id, planned_len: end, token_len, page_len, .. } = *row.sequence;
        let start = end - item.len;
        self.rows[0] =
            BatchRow { row: id, qo_start: self.qo_start, extend_len: item.len, kv_len: end };
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

    /// [`PlanWriter::decode`] where there are several tracks. Not inlined, as [`PlanWriter::extend`].
    #[inline(never)]
    fn decode_tracks(
        &mut self,
        sequences: &mut SequenceTable,
        steps: &mut StepLog,
        items: &[Extend],
    ) -> usize {
        self.decode::<false>(sequences, steps, items)
    }

    /// Writes the rows up to the first one that does more than decode: compute one token, with no page to be sent but
    /// perhaps a new one. Most rows of most steps are such, and take a third of the instructions. `ONE`: whether there
    /// is one track.
    fn decode<const ONE: bool>(
        &mut self,
        sequences: &mut SequenceTable,
        steps: &mut StepLog,
        items: &[Extend],
    ) -> usize {
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
            record(row.sequence, item, self.step, steps);
            let (page, offset) = if room > 0 {
                (row.last_page(), page_size - room)
            } else if !ONE {
                let (own, rest) = new_pages.as_slice().split_at(self.tracks);
                new_pages = rest.iter();
                row.append_place(own, |write| *writes.next().expect("counted") = write);
                (own[0], 0)
            } else {
                let page = *new_pages.next().expect("counted");
                row.append_sent(page, |write| *writes.next().expect("counted") = write);
                (page, 0)
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
            if !ONE {
                for (track, slots) in (1..).zip(others.chunks_exact_mut(self.all_tokens)) {
                    let page = row.last_track_page(track);
                    slots[qo_start as usize] = T::from_slot(slot_at(page, page_size, offset));
                }
            }
            count += 1;
        }
        (self.new_pages, self.writes) = (new_pages.as_slice(), writes);
        self.advance(count, count);
        count
    }
}

fn slot_at(page: PageId, page_size: u32, offset: u32) -> u64 {
    u64::from(page.raw()) * u64::from(page_size) + u64::from(offset)
}

/// A number type of slot mappings.
trait SlotNumber: Copy + 'static {
    const ZERO: Self;
    fn from_slot(slot: u64) -> Self;
    fn mapping(slots: &[Self]) -> SlotMapping<'_>;
}

impl SlotNumber for i32 {
    const ZERO: Self = 0;

    fn from_slot(slot: u64) -> Self {
        slot as i32
    }

    fn mapping(slots: &[Self]) -> SlotMapping<'_> {
        SlotMapping::I32(slots)
    }
}

impl SlotNumber for i64 {
    const ZERO: Self = 0;

    fn from_slot(slot: u64) -> Self {
        slot as i64
    }

    fn mapping(slots: &[Self]) -> SlotMapping<'_> {
        SlotMapping::I64(slots)
    }
}

#[cfg(test)]
mod tests {
    use super::{PlanBatch, plan_batch};
    use crate::config::EngineConfig;
    use crate::error::Error;
    use crate::id::{Namespace, TokenId};
    use crate::layout::{Capacity, PoolConfig};
    use crate::plan::{Extend, STEP_TOKENS_MAX, StepScratch};
    use crate::system::admit::{Admit, admit};
    use crate::world::World;

    #[test]
    fn a_step_of_more_tokens_than_can_be_numbered_is_refused() {
        // Sequences of 2^30 tokens take 4 GiB each: the lengths are forged.
        const LEN: u32 = 1 << 30;
        let pool = PoolConfig { capacity: Capacity::Pages(8), ..Default::default() };
        let shape = EngineConfig::from(pool).shape().expect("the config is right");
        let mut world = World::new(&shape, 32).expect("it is small");
        let mut items = Vec::new();
        for count in 1..=5_u64 {
            let (namespace, prompt) = (Namespace::default(), [TokenId::new(7)]);
            let seq = admit(Admit::of(&mut world), namespace, &prompt, 0).expect("there is room");
            world.sequences.get_mut(seq).expect("it is live").token_len = LEN;
            items.push(Extend { seq, len: LEN });
            let (tokens, max) = (count << 30, u64::from(STEP_TOKENS_MAX));
            let mut scratch = StepScratch::new();
            let refused = plan_batch(PlanBatch::of(&mut world), &mut scratch, &items, &[]);
            match refused.expect_err("no pool is as large") {
                Error::StepTokens { tokens: named, max: limit } => {
                    assert_eq!((named, limit), (tokens, max));
                }
                error => assert!(tokens <= max, "{tokens} tokens: {error}"),
            }
        }
        assert!(world.steps.is_empty());
    }
}
