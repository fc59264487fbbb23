//! Chooses the spans of a step that are read once, and the part of each row in them.
//!
//! From one decode step to the next usually only lengths grow; the accepted spans are then reused.

use super::{Accepted, ITEMS_MAX, PARTIAL_ROWS, RowAssignment, SPAN_TOKENS, SPANS_MAX, SharedSplit};
use crate::backend::cuda::kernels::params::{NO_SPAN, RowShare, SpanMember, TREE_ROW};
use crate::plan::{BatchRow, SharedSpan, SharedSpans};

/// Numbers of eligible rows, and of their new tokens.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Eligible {
    rows: u32,
    tokens: u32,
}

/// The input of the last acceptance, for comparison.
#[derive(Clone, Debug)]
pub(super) struct Before {
    rows: Vec<BatchRow>,
    spans: Vec<SharedSpan>,
    members: Vec<u32>,
    /// `None` before the first step.
    taken: Option<RowAssignment>,
}

impl Before {
    /// Allocates the memory for batches of `rows` rows. Spans are nested, so there are fewer spans than rows.
    pub(super) fn new(rows: usize) -> Self {
        Self {
            rows: Vec::with_capacity(rows),
            spans: Vec::with_capacity(rows),
            members: Vec::with_capacity(rows),
            taken: None,
        }
    }

    #[cfg(test)]
    pub(super) fn capacity(&self) -> [usize; 3] {
        [self.rows.capacity(), self.spans.capacity(), self.members.capacity()]
    }

    /// Returns whether only lengths changed. Lengths matter only for own items of rows.
    pub(super) fn is_like(&self, rows: &[BatchRow], shared: &SharedSpans<'_>, taken: RowAssignment) -> bool {
        self.taken == Some(taken)
            && !taken.may_have_items()
            && self.rows.len() == rows.len()
            && self.members == shared.members
            && self.spans == shared.spans
            && rows.iter().zip(&self.rows).fold(true, |like, (row, before)| {
                // Without branches, a row takes a fraction of a nanosecond.
                like & (row.row == before.row)
                    & (row.qo_start == before.qo_start)
                    & (row.extend_len == before.extend_len)
                    & ((row.kv_len > 0) == (before.kv_len > 0))
            })
    }

    fn keep(&mut self, rows: &[BatchRow], shared: &SharedSpans<'_>, taken: RowAssignment) {
        self.taken = Some(taken);
        self.rows.clear();
        self.rows.extend_from_slice(rows);
        self.spans.clear();
        self.spans.extend_from_slice(shared.spans);
        self.members.clear();
        self.members.extend_from_slice(shared.members);
    }
}

impl SharedSplit {
    /// Accepts spans for a kernel that takes these rows. It sets the members, the accepted spans, and the shares except
    /// the units of suffixes.
    pub(super) fn accept(&mut self, rows: &[BatchRow], shared: &SharedSpans<'_>, taken: RowAssignment) {
        if self.before.is_like(rows, shared, taken) {
            return;
        }
        self.before.keep(rows, shared, taken);
        self.is_cut = false;
        (self.taken, self.costs) = (taken, self.grid.costs[taken.suffixes]);
        self.list_rows(rows);
        self.list_members(rows, shared);
        self.accept_spans(rows, shared);
        if !self.accepted.is_empty() {
            self.assign();
            self.add_items(rows);
        }
    }

    fn list_rows(&mut self, rows: &[BatchRow]) {
        let taken = self.taken;
        self.shares.clear();
        self.shares.extend(rows.iter().map(|row| RowShare {
            begin: 0,
            place: 0,
            span: NO_SPAN,
            depth: 0,
            start: 0,
            units: 0,
            qo_start: row.qo_start,
            extend_len: if taken.goes_to_extend(row) { 0 } else { row.extend_len },
        }));
    }

    /// Lists the members whose queries may be gathered, in order, and counts these members before each place.
    fn list_members(&mut self, rows: &[BatchRow], shared: &SharedSpans<'_>) {
        self.members.clear();
        self.eligible.clear();
        let mut count = Eligible::default();
        self.eligible.push(count);
        for &member in shared.members {
            let (row, share) = (&rows[member as usize], &mut self.shares[member as usize]);
            if share.extend_len > 0 && row.kv_len > 0 {
                count.rows += 1;
                count.tokens += share.extend_len;
                add_members(&mut self.members, share, member);
            }
            self.eligible.push(count);
        }
    }

    /// Accepts or rejects spans, parents first. A child takes over the tokens of a rejected parent.
    fn accept_spans(&mut self, rows: &[BatchRow], shared: &SharedSpans<'_>) {
        self.around.clear();
        self.accepted.clear();
        let (mut query_tiles, mut partial_rows) = self.taken_by_items(rows);
        for span in shared.spans {
            let (first, last) = (span.range().start, span.range().end);
            while self.around.pop_if(|around| around.0 <= first as u32).is_some() {}
            let parent = self.around.last().map_or(NO_SPAN, |around| around.1);
            let (begin, depth) = self.accepted.get(parent as usize).map_or((0, 0), |of| (of.end, of.depth));
            let (before, up_to) = (self.eligible[first], self.eligible[last]);
            let (member_rows, members) = (up_to.rows - before.rows, up_to.tokens - before.tokens);
            let gain = self.gain(member_rows, members, span.end - begin);
            let (more_query_tiles, more_rows) = (self.query_tiles(members), members * self.shape.group);
            let room = (query_tiles + more_query_tiles) * self.shape.kv_heads + self.grid.ctas <= ITEMS_MAX
                && (partial_rows + more_rows) * self.shape.kv_heads <= PARTIAL_ROWS
                && self.accepted.len() < SPANS_MAX as usize;
            if gain <= 0.0 || !room {
                continue;
            }
            query_tiles += more_query_tiles;
            partial_rows += more_rows;
            self.around.push((last as u32, self.accepted.len() as u32));
            self.accepted.push(Accepted {
                member_start: before.tokens,
                member_count: members,
                query_tiles: more_query_tiles,
                begin,
                end: span.end,
                parent,
                depth: depth + 1,
                row: Self::table_row(rows, shared, span),
                own: false,
            });
        }
    }

    /// Returns the number of query tiles and of query rows of own items. Each row with own items has one query tile.
    fn taken_by_items(&self, rows: &[BatchRow]) -> (u32, u32) {
        if !self.taken.may_have_items() {
            return (0, 0);
        }
        let with_items = rows.iter().filter(|row| self.taken.has_items(row));
        with_items.fold((0, 0), |(query_tiles, query_rows), row| {
            (query_tiles + 1, query_rows + row.extend_len * self.shape.group)
        })
    }

    /// Returns the page table row of any member.
    fn table_row(rows: &[BatchRow], shared: &SharedSpans<'_>, span: &SharedSpan) -> u32 {
        rows[shared.members[span.range().start] as usize].row.raw() & !TREE_ROW
    }

    /// Returns the nanoseconds saved if the `members` new tokens of `rows` rows share one read of `len` tokens.
    fn gain(&self, rows: u32, members: u32, len: u32) -> f64 {
        if rows < 2 {
            return 0.0;
        }
        if self.ignore_cost {
            return f64::INFINITY;
        }
        let bytes = f64::from(len) * self.token_bytes();
        let tiles = len.div_ceil(SPAN_TOKENS) + self.grid.item_tiles;
        let tiles = self.query_tiles(members) * tiles * self.shape.kv_heads;
        let tiles = f64::from(tiles) / f64::from(self.grid.ctas);
        self.costs.gain(f64::from(rows), bytes, tiles)
    }

    /// Assigns each row its deepest span. Parents come first, so a member's last span is the deepest.
    fn assign(&mut self) {
        for (i, span) in self.accepted.iter().enumerate() {
            let range = span.member_start as usize..(span.member_start + span.member_count) as usize;
            for member in &self.members[range] {
                let share = &mut self.shares[member.batch_index as usize];
                (share.begin, share.span, share.depth) = (span.end, i as u32, span.depth);
            }
        }
    }

    /// Adds own items of rows.
    fn add_items(&mut self, rows: &[BatchRow]) {
        if !self.taken.may_have_items() {
            return;
        }
        for (i, row) in rows.iter().enumerate() {
            if !self.taken.has_items(row) {
                continue;
            }
            if self.shares[i].span == NO_SPAN {
                add_members(&mut self.members, &mut self.shares[i], i as u32);
            }
            let share = &mut self.shares[i];
            share.depth += 1;
            let own = Accepted {
                member_start: share.place,
                member_count: row.extend_len,
                query_tiles: 1,
                begin: share.begin,
                end: row.kv_len,
                parent: share.span,
                depth: share.depth,
                row: row.row.raw(),
                own: true,
            };
            (share.begin, share.span) = (row.kv_len, self.accepted.len() as u32);
            self.accepted.push(own);
        }
    }
}

/// Adds a row's new tokens, at least one, as consecutive members.
fn add_members(members: &mut Vec<SpanMember>, share: &mut RowShare, batch_index: u32) {
    share.place = members.len() as u32;
    let first = SpanMember { qo_start: share.qo_start, batch_index };
    members.push(first);
    for more in 1..share.extend_len {
        members.push(SpanMember { qo_start: first.qo_start + more, ..first });
    }
}
