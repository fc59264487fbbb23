//! Shared spans: positions that several rows of a batch read from the same pages. A backend may read these pages once.
//!
//! ```text
//!   members   [ 0 2 5 1 | 3 4 ]          spans   0..512 of members 0..4    (the system prompt)
//!                                                512..2048 of members 0..2 (a conversation of rows 0 and 2)
//!                                                0..256 of members 4..6
//! ```
//!
//! Spans are optional: a backend that reads each row separately gives the same result. `prefix/shared_spans.rs` finds
//! them.
//!
//! * R1. Spans are in order, parents first, one subtree after another. A span has at least two members, fewer than its
//!   parent, and all of them are members of its parent. Siblings share no member. A span is not empty and begins at the
//!   end of its parent, or at 0 without a parent. Every listed member is in a span.
//! * R2. A member is a row of the batch, and `members` lists it once.
//! * R3. A span ends at or before the first query position of each member, and within each member's published pages. So
//!   the page tables of all members contain the span's pages at the same indices.

use bytemuck::{Pod, Zeroable};

use super::BatchRow;

/// Positions `begin..end` that several rows of a batch read from the same pages, 16 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct SharedSpan {
    /// Index of its first member.
    pub member_start: u32,
    /// Number of its members, at least 2.
    pub member_count: u32,
    /// First position.
    pub begin: u32,
    /// Position after the last.
    pub end: u32,
}

impl SharedSpan {
    /// Returns the range of its members in [`SharedSpans::members`].
    pub fn range(&self) -> std::ops::Range<usize> {
        let start = self.member_start as usize;
        start..start + self.member_count as usize
    }
}

/// The shared spans of a batch, which satisfy R1 to R3.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SharedSpans<'step> {
    /// The spans, parents first.
    pub spans: &'step [SharedSpan],
    /// Indices of rows of the batch; the members of a span are consecutive.
    pub members: &'step [u32],
}

/// Checks spans, with reusable buffers.
#[derive(Clone, Debug, Default)]
pub(crate) struct SpanCheck {
    /// For each row, whether the check has found it in `members`. Bytes are faster than bits, because updates of one
    /// word of bits depend on each other.
    named: Vec<bool>,
    /// The spans that contain the current one, outermost first, each with its index. Their ends rise.
    around: Vec<(usize, SharedSpan)>,
}

impl SpanCheck {
    /// Checks the parts of R1 to R3 that depend only on the plan. O(rows and spans): the check compares each member
    /// only with its innermost span, which ends last.
    ///
    /// # Errors
    /// The first wrong span; the number of spans if the list of members is wrong.
    pub(crate) fn check(&mut self, shared: &SharedSpans<'_>, rows: &[BatchRow]) -> Result<(), usize> {
        let SharedSpans { spans, members } = *shared;
        self.check_members(members, rows.len()).map_err(|()| spans.len())?;
        self.around.clear();
        let mut queries = Queries { members, rows, reached: 0, first_wrong: spans.len() };
        for (i, span) in spans.iter().enumerate() {
            self.leave(span.member_start as usize, &mut queries);
            if !self.is_nested(span, queries.reached, members.len()) {
                queries.first_wrong = queries.first_wrong.min(i);
                break;
            }
            queries.check(&self.around, span.member_start as usize);
            self.around.push((i, *span));
        }
        self.leave(usize::MAX, &mut queries);
        let is_right = queries.first_wrong == spans.len() && queries.reached == members.len();
        if is_right { Ok(()) } else { Err(queries.first_wrong) }
    }

    /// Leaves the spans whose members end at or before `start`, innermost first.
    fn leave(&mut self, start: usize, queries: &mut Queries<'_>) {
        while let Some(&(_, innermost)) = self.around.last()
            && innermost.range().end <= start
        {
            queries.check(&self.around, innermost.range().end);
            self.around.pop();
        }
    }

    /// Returns whether a span satisfies R1, given the spans that contain it. A root's members begin where those of the
    /// previous root end.
    fn is_nested(&self, span: &SharedSpan, roots_end: usize, members: usize) -> bool {
        let range = span.range();
        let fits = match self.around.last() {
            Some((_, parent)) => {
                span.begin == parent.end
                    && span.member_start >= parent.member_start
                    && span.member_count < parent.member_count
                    && range.end <= parent.range().end
            }
            None => span.begin == 0 && range.start == roots_end && range.end <= members,
        };
        fits && span.member_count >= 2 && span.begin < span.end
    }

    /// Checks R2.
    fn check_members(&mut self, members: &[u32], rows: usize) -> Result<(), ()> {
        self.named.clear();
        self.named.resize(if members.is_empty() { 0 } else { rows }, false);
        for &member in members {
            match self.named.get_mut(member as usize) {
                Some(named) if !*named => *named = true,
                _ => return Err(()),
            }
        }
        Ok(())
    }
}

/// Checks R3: compares spans with the first query positions of their members, in order.
struct Queries<'a> {
    members: &'a [u32],
    rows: &'a [BatchRow],
    /// Number of members that were checked.
    reached: usize,
    /// The first span that ends after the first query of a member.
    first_wrong: usize,
}

impl Queries<'_> {
    /// Checks the members up to `end`; `around` are the spans that contain all of them.
    fn check(&mut self, around: &[(usize, SharedSpan)], end: usize) {
        let Some(&(_, innermost)) = around.last() else { return };
        let first_query = |&row: &u32| {
            let row = &self.rows[row as usize];
            row.kv_len.saturating_sub(row.extend_len)
        };
        let own = &self.members[self.reached..end];
        let first = own.iter().map(first_query).fold(u32::MAX, u32::min);
        if first < innermost.end {
            let outermost = around.partition_point(|(_, span)| span.end <= first);
            self.first_wrong = self.first_wrong.min(around[outermost].0);
        }
        self.reached = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::RowId;
    use crate::testkit::rng::Rng;

    fn rows(count: u32) -> Vec<BatchRow> {
        let row = |i| BatchRow { row: RowId::new(i), qo_start: i, extend_len: 1, kv_len: 101 };
        (0..count).map(row).collect()
    }

    fn check(members: &[u32], spans: &[(u32, u32, u32, u32)]) -> Result<(), usize> {
        let span = |&(member_start, member_count, begin, end): &(u32, u32, u32, u32)| SharedSpan {
            member_start,
            member_count,
            begin,
            end,
        };
        let spans: Vec<_> = spans.iter().map(span).collect();
        let shared = SharedSpans { spans: &spans, members };
        SpanCheck::default().check(&shared, &rows(8))
    }

    #[test]
    fn spans_nest() {
        assert_eq!(check(&[], &[]), Ok(()));
        assert_eq!(check(&[3, 1], &[(0, 2, 0, 100)]), Ok(()));
        let tree = [(0, 5, 0, 16), (0, 2, 16, 32), (2, 3, 16, 48), (3, 2, 48, 64), (5, 2, 0, 1)];
        assert_eq!(check(&[3, 1, 0, 2, 4, 7, 6], &tree), Ok(()));
    }

    #[test]
    fn broken_spans_are_named() {
        assert_eq!(check(&[3, 8], &[(0, 2, 0, 16)]), Err(1), "R2: no such row");
        assert_eq!(check(&[3, 3], &[(0, 2, 0, 16)]), Err(1), "R2: named twice");
        assert_eq!(check(&[3], &[]), Err(0), "R1: a member of no span");
        assert_eq!(check(&[3, 1, 2], &[(0, 2, 0, 16)]), Err(1), "R1: a member of no span");
        assert_eq!(check(&[3, 1], &[(0, 1, 0, 16)]), Err(0), "R1: one member");
        assert_eq!(check(&[3, 1], &[(0, 3, 0, 16)]), Err(0), "R1: more than there are");
        assert_eq!(check(&[3, 1], &[(1, u32::MAX, 0, 16)]), Err(0), "R1: more than there are");
        assert_eq!(check(&[3, 1], &[(0, 2, 16, 16)]), Err(0), "R1: empty");
        assert_eq!(check(&[3, 1], &[(0, 2, 16, 32)]), Err(0), "R1: a root begins at 0");
        assert_eq!(check(&[3, 1], &[(0, 2, 0, 101)]), Err(0), "R3: a query is in it");
        let under = |span| check(&[3, 1, 0, 5], &[(0, 4, 0, 16), span]);
        assert_eq!(under((1, 3, 16, 17)), Ok(()));
        assert_eq!(under((0, 4, 16, 32)), Err(1), "R1: as many as its parent");
        assert_eq!(under((2, 3, 16, 32)), Err(1), "R1: past its parent's");
        assert_eq!(under((0, 2, 0, 32)), Err(1), "R1: not where its parent ends");
        assert_eq!(under((0, 2, 17, 32)), Err(1), "R1: not where its parent ends");
        let two = [(0, 4, 0, 16), (2, 2, 16, 32), (0, 2, 16, 32)];
        assert_eq!(check(&[3, 1, 0, 5], &two), Err(2), "R1: out of order");
        let before = [(0, 6, 0, 16), (3, 3, 16, 32), (0, 2, 32, 48)];
        assert_eq!(check(&[3, 1, 0, 5, 2, 4], &before), Err(2), "R1: before its parent's members");
        let apart = [(0, 2, 0, 16), (1, 2, 0, 16)];
        assert_eq!(check(&[3, 1, 0], &apart), Err(1), "R1: siblings share a member");
    }

    #[test]
    fn the_largest_span_has_a_range() {
        let span = SharedSpan { member_start: u32::MAX, member_count: u32::MAX, begin: 0, end: 1 };
        assert_eq!(span.range(), u32::MAX as usize..2 * u32::MAX as usize);
    }

    /// Reading all members of each span would take 2^39 reads.
    #[test]
    fn the_span_check_reads_each_member_once() {
        const ROWS: u32 = 1 << 20;
        let row = |i| BatchRow { row: RowId::new(i), qo_start: i, extend_len: 1, kv_len: 2 + i };
        let mut rows: Vec<_> = (0..ROWS).map(row).collect();
        // Span i contains position i of all rows from i on, so row i is in i + 1 spans, and the last row in i.
        let span = |i| SharedSpan { member_start: i, member_count: ROWS - i, begin: i, end: i + 1 };
        let spans: Vec<_> = (0..ROWS - 1).map(span).collect();
        let members: Vec<_> = (0..ROWS).collect();
        let shared = SharedSpans { spans: &spans, members: &members };
        let mut check = SpanCheck::default();
        assert_eq!(check.check(&shared, &rows), Ok(()));
        let last = ROWS as usize - 1;
        rows[last].kv_len = 1 + 77;
        assert_eq!(check.check(&shared, &rows), Err(77), "the outermost wrong span");
        // The query of row i is inside span i.
        rows.iter_mut().zip(0..).for_each(|(row, i)| row.kv_len = 1 + i);
        assert_eq!(check.check(&shared, &rows), Err(0));
    }

    /// Checks spans by their definition: compares each span with all its members.
    fn check_all(shared: &SharedSpans<'_>, rows: &[BatchRow]) -> Result<(), usize> {
        let SharedSpans { spans, members } = *shared;
        let mut named = vec![false; rows.len()];
        for &member in members {
            match named.get_mut(member as usize) {
                Some(named) if !*named => *named = true,
                _ => return Err(spans.len()),
            }
        }
        let (mut around, mut roots_end) = (Vec::<SharedSpan>::new(), 0);
        for (i, span) in spans.iter().enumerate() {
            let is_past = |around: &SharedSpan| around.range().end <= span.member_start as usize;
            while around.pop_if(|around| is_past(around)).is_some() {}
            let range = span.range();
            let nested = match around.last() {
                Some(parent) => {
                    span.begin == parent.end
                        && span.member_start >= parent.member_start
                        && span.member_count < parent.member_count
                        && range.end <= parent.range().end
                }
                None => {
                    let follows = range.start == roots_end && span.begin == 0;
                    roots_end = range.end;
                    follows && range.end <= members.len()
                }
            };
            let first_query = |&row: &u32| {
                let row = &rows[row as usize];
                row.kv_len.saturating_sub(row.extend_len)
            };
            let is_right = nested
                && span.member_count >= 2
                && span.begin < span.end
                && members[range].iter().map(first_query).all(|first| first >= span.end);
            if !is_right {
                return Err(i);
            }
            around.push(*span);
        }
        if roots_end == members.len() { Ok(()) } else { Err(spans.len()) }
    }

    /// Adds random nested spans of the members `start..end`, from position `begin` on. Roots leave no gap between their
    /// members.
    fn grow(rng: &mut Rng, spans: &mut Vec<SharedSpan>, start: u32, end: u32, begin: u32) {
        let mut at = start;
        while end - at >= 2 && rng.below(4) > 0 {
            let is_root = begin == 0;
            at += if is_root { 0 } else { rng.below(u64::from(end - at - 1)) as u32 };
            let most = if is_root { end - at } else { (end - at).min(end - start - 1) };
            if most < 2 {
                return;
            }
            let count = 2 + rng.below(u64::from(most - 1)) as u32;
            let to = begin + 1 + rng.below(3) as u32;
            spans.push(SharedSpan { member_start: at, member_count: count, begin, end: to });
            grow(rng, spans, at, at + count, to);
            at += count;
        }
    }

    #[test]
    fn the_span_check_equals_a_check_of_all_members() {
        let mut rng = Rng::new(0x5ba5);
        let mut check = SpanCheck::default();
        let (mut spans, mut members) = (Vec::new(), Vec::new());
        let (mut right, mut depth) = (0, 0);
        let mut seen = [0_u32; 16];
        for case in 0..1_000_000 {
            let count = 2 + rng.below(11) as u32;
            spans.clear();
            grow(&mut rng, &mut spans, 0, count, 0);
            let named = spans.iter().map(|span| span.range().end).max().unwrap_or(0);
            members.clear();
            members.extend(0..count);
            (1..count as usize).for_each(|i| members.swap(i, rng.below(i as u64 + 1) as usize));
            members.truncate(named);
            let mut kv_lens = vec![1_u32; count as usize];
            for span in &spans {
                members[span.range()].iter().for_each(|&row| kv_lens[row as usize] = 1 + span.end);
            }
            for _ in 0..rng.below(2) * (1 + rng.below(3)) {
                let near = |rng: &mut Rng, value: u32| match rng.below(8) {
                    0 => rng.below(1 << 32) as u32,
                    1 => u32::MAX,
                    2 => 0,
                    n => value.wrapping_add(n as u32).wrapping_sub(5),
                };
                let row = rng.below(count.into()) as usize;
                let i = rng.below(spans.len().max(1) as u64) as usize;
                match (rng.below(8), spans.get_mut(i)) {
                    (0, Some(span)) => span.member_start = near(&mut rng, span.member_start),
                    (1, Some(span)) => span.member_count = near(&mut rng, span.member_count),
                    (2, Some(span)) => span.begin = near(&mut rng, span.begin),
                    (3, Some(span)) => span.end = near(&mut rng, span.end),
                    (4, Some(_)) => _ = spans.swap_remove(i),
                    (5, Some(&mut span)) => spans.push(span),
                    (6, _) if named > 0 => members[i % named] = row as u32,
                    _ => kv_lens[row] = near(&mut rng, kv_lens[row]),
                }
            }
            let row = |(i, &kv_len): (usize, &u32)| BatchRow {
                row: RowId::new(i as u32),
                qo_start: i as u32,
                extend_len: 1,
                kv_len,
            };
            let rows: Vec<_> = kv_lens.iter().enumerate().map(row).collect();
            let shared = SharedSpans { spans: &spans, members: &members };
            let want = check_all(&shared, &rows);
            assert_eq!(check.check(&shared, &rows), want, "case {case}: {shared:?}, {kv_lens:?}");
            match want {
                Ok(()) => (right, depth) = (right + 1, depth.max(spans.len())),
                Err(off) => seen[off.min(15)] += 1,
            }
        }
        assert!((400_000..900_000).contains(&right) && depth >= 6, "{right} {depth}");
        assert!(seen[..8].iter().all(|&count| count > 100), "each index is wrong at times: {seen:?}");
    }
}
