//! A planned batch in the format of FlashInfer's multi-level cascade, for hosts with their own attention kernels.

use bumpalo::Bump;
use bytemuck::Zeroable;

use super::packed::{Packed, Packer, check_items, last_page_len};
use crate::error::Error;
use crate::plan::{BatchPlan, Extend, PackedLevels, PackedPlan, SharedSpan};
use crate::sequence::{Sequence, SequenceTable};
use crate::step::StepLog;

/// Implements [`Engine::packed_levels`](crate::Engine::packed_levels). O(items + pages).
///
/// # Errors
/// As [`packed`](super::packed::packed), and [`Error::PackedRows`].
pub(crate) fn packed_levels<'step>(
    world: &Packed<'_>,
    plan: &BatchPlan<'_>,
    items: &[Extend],
    bump: &'step Bump,
) -> Result<PackedLevels<'step>, Error> {
    let Packed { shape, sequences, steps } = *world;
    check_items(world, items)?;
    check_plan(sequences, steps, plan, items)?;
    let spans = plan.shared.spans;
    let depths = depths(spans, bump);
    let levels = depths.iter().map(|&depth| depth as usize + 1).max().unwrap_or(0);
    let mut by_level = sorted_by_depth(spans, depths, levels, bump);
    let order = order(plan.shared.members, items.len(), bump);
    let writer = Writer {
        sequences,
        page_size: shape.layout.page_size(),
        tokens_before: tokens_before(items, order, bump),
        items,
        order,
        bump,
    };
    let list = bump.alloc_slice_fill_with(levels + 1, |level| {
        if level == levels {
            return writer.own(spans);
        }
        let in_level = by_level.iter().take_while(|(depth, _)| *depth as usize == level).count();
        let (at_level, deeper) = by_level.split_at(in_level);
        by_level = deeper;
        writer.shared(at_level)
    });
    Ok(PackedLevels { order, levels: list })
}

/// Rejects a plan that does not have these planned items in order. Its padding rows are ignored.
fn check_plan(sequences: &SequenceTable, steps: &StepLog, plan: &BatchPlan<'_>, items: &[Extend]) -> Result<(), Error> {
    let padding = plan.rows.get(items.len()..).unwrap_or_default();
    if plan.rows.len() < items.len() || padding.iter().any(|row| row.kv_len > 0) {
        return Err(Error::PackedRows { items: items.len(), rows: plan.rows.len() });
    }
    // All items belong to the plan's step, and their numbers rise. So if there are as many items as rows, the items are
    // the plan's rows. The length is also compared, because accepted drafts have fewer tokens than their row.
    for (&Extend { seq, len }, row) in items.iter().zip(plan.rows) {
        let sequence = sequences.running(seq)?;
        if !steps.is_item_of(sequence.last_item, plan.step) || row.extend_len != len {
            return Err(Error::NotPlanned { seq, len });
        }
    }
    Ok(())
}

/// Returns the depth of each span: the number of spans that contain it.
fn depths<'step>(spans: &[SharedSpan], bump: &'step Bump) -> &'step [u32] {
    let depths = bump.alloc_slice_fill_copy(spans.len(), 0_u32);
    // For each depth, the end of the members of its last span.
    let ends = bump.alloc_slice_fill_copy(spans.len(), 0_usize);
    let mut depth = 0;
    for (i, span) in spans.iter().enumerate() {
        while depth > 0 && ends[depth - 1] <= span.member_start as usize {
            depth -= 1;
        }
        depths[i] = depth as u32;
        ends[depth] = span.range().end;
        depth += 1;
    }
    depths
}

/// Returns the spans with their depths, which are below `levels`, outermost first. Spans of one depth keep their order.
fn sorted_by_depth<'step>(
    spans: &[SharedSpan],
    depths: &[u32],
    levels: usize,
    bump: &'step Bump,
) -> &'step [(u32, SharedSpan)] {
    // For each depth, the index of its next span.
    let places = bump.alloc_slice_fill_copy(levels, 0);
    depths.iter().for_each(|&depth| places[depth as usize] += 1);
    let mut before = 0;
    for place in places.iter_mut() {
        before += std::mem::replace(place, before);
    }
    let sorted = bump.alloc_slice_fill_copy(spans.len(), (0, SharedSpan::zeroed()));
    for (&depth, &span) in depths.iter().zip(spans) {
        sorted[places[depth as usize]] = (depth, span);
        places[depth as usize] += 1;
    }
    sorted
}

/// Returns the number of new tokens before each place of the order, then the total number.
fn tokens_before<'step>(items: &[Extend], order: &[u32], bump: &'step Bump) -> &'step [u32] {
    let mut before = 0;
    bump.alloc_slice_fill_with(order.len() + 1, |place| {
        let len = order.get(place).map_or(0, |&row| items[row as usize].len);
        before += len;
        before - len
    })
}

/// Returns an order of the rows in which the members of each span are consecutive; rows without a span come last.
fn order<'step>(members: &[u32], rows: usize, bump: &'step Bump) -> &'step [u32] {
    let is_member = bump.alloc_slice_fill_copy(rows, false);
    for &member in members {
        is_member[member as usize] = true;
    }
    let mut others = (0..rows as u32).filter(|&row| !is_member[row as usize]);
    bump.alloc_slice_fill_with(rows, |place| match members.get(place) {
        Some(&member) => member,
        None => others.next().expect("members are distinct rows"),
    })
}

struct Writer<'a, 'step> {
    sequences: &'a SequenceTable,
    items: &'a [Extend],
    page_size: u32,
    order: &'step [u32],
    /// Number of new tokens before each place of the order, then the total number.
    tokens_before: &'step [u32],
    bump: &'step Bump,
}

/// An entry of a level: the rows at places up to `place_end` of the order, and the pages that they read.
#[derive(Clone, Copy, Default)]
struct Entry {
    place_end: usize,
    page_begin: u32,
    page_end: u32,
    last_page_len: u32,
}

impl<'step> Writer<'_, 'step> {
    /// Returns a level of spans, in the order of their members. Rows without a span read nothing in this level.
    fn shared(&self, spans: &[(u32, SharedSpan)]) -> PackedPlan<'step> {
        let most = 2 * spans.len() + 1;
        let entries = self.bump.alloc_slice_fill_copy(most, Entry::default());
        let (mut count, mut place) = (0, 0);
        let mut put = |entry: Entry| {
            if entry.place_end > place {
                (entries[count], place) = (entry, entry.place_end);
                count += 1;
            }
        };
        for (_, span) in spans {
            let members = span.range();
            put(Entry { place_end: members.start, ..Entry::default() });
            put(Entry {
                place_end: members.end,
                page_begin: span.begin / self.page_size,
                page_end: span.end / self.page_size,
                last_page_len: self.page_size,
            });
        }
        put(Entry { place_end: self.order.len(), ..Entry::default() });
        self.write(&entries[..count])
    }

    /// Returns the last level: for each row the pages after all its spans.
    fn own(&self, spans: &[SharedSpan]) -> PackedPlan<'step> {
        let entries = self.bump.alloc_slice_fill_copy(self.order.len(), Entry::default());
        let around = self.bump.alloc_slice_fill_copy(spans.len(), SharedSpan::zeroed());
        let (mut depth, mut spans) = (0, spans.iter().peekable());
        for (place, entry) in entries.iter_mut().enumerate() {
            while depth > 0 && around[depth - 1].range().end <= place {
                depth -= 1;
            }
            while let Some(span) = spans.next_if(|span| span.range().start <= place) {
                around[depth] = *span;
                depth += 1;
            }
            // The row's own pages begin where its innermost span ends.
            entry.page_begin = around[..depth].last().map_or(0, |span| span.end / self.page_size);
            let sequence = self.sequence(place);
            entry.place_end = place + 1;
            entry.page_end = sequence.page_len;
            entry.last_page_len = last_page_len(sequence, self.page_size);
        }
        self.write(entries)
    }

    fn sequence(&self, place: usize) -> &Sequence {
        let seq = self.items[self.order[place] as usize].seq;
        self.sequences.running(seq).expect("the items were checked")
    }

    fn write(&self, entries: &[Entry]) -> PackedPlan<'step> {
        let pages: u32 = entries.iter().map(|entry| entry.page_end - entry.page_begin).sum();
        let mut packer = Packer::new(entries.len(), pages as usize, self.bump);
        let mut place = 0;
        for entry in entries {
            // All rows of an entry have the same pages there.
            let first = self.sequence(place);
            let pieces = self.sequences.page_pieces(first, 0, entry.page_begin, entry.page_end);
            let tokens = self.tokens_before[entry.place_end] - self.tokens_before[place];
            packer.push(tokens, pieces, entry.last_page_len);
            place = entry.place_end;
        }
        packer.finish()
    }
}
