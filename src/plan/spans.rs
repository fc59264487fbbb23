//! Spans of positions that several rows of a batch read from the same pages: what a backend may read once for all.
//!
//! ```text
//!   members   [ 0 2 5 1 | 3 4 ]          spans   0..512 of members 0..4    (the system prompt)
//!                                                512..2048 of members 0..2 (a conversation of rows 0 and 2)
//!                                                0..256 of members 4..6
//! ```
//!
//! They are candidates: a backend that reads every row by itself is right too.
//!
//! * R1. Spans stand parents first, one subtree after another. A span has two members or more, fewer than its parent,
//!   and among its parent's; siblings have none in common. It begins where its parent ends, at 0 without one, and is
//!   not empty. Every member is of a span.
//! * R2. A member is a row of the batch, and is named once.
//! * R3. A span ends at or before the first query position of each of its members, and within what each has published:
//!   so its pages stand at the same indices of all their page tables, and any of these may be read.
//!
//! Not here: how they are found (`prefix/meeting.rs`).

use bytemuck::{Pod, Zeroable};

use super::BatchRow;

/// Positions `begin..end` that some rows of a batch have in common, 16 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct SharedSpan {
    /// First of its members.
    pub member_start: u32,
    /// Its members, at least 2.
    pub member_count: u32,
    /// First position.
    pub begin: u32,
    /// Position after the last.
    pub end: u32,
}

impl SharedSpan {
    /// Where its members stand in [`SharedSpans::members`].
    pub fn range(&self) -> std::ops::Range<usize> {
        self.member_start as usize..(self.member_start + self.member_count) as usize
    }
}

/// The spans of a batch: R1 to R3.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SharedSpans<'step> {
    /// The spans, parents first.
    pub spans: &'step [SharedSpan],
    /// Rows of the batch by their indices, those of a span side by side.
    pub members: &'step [u32],
}

/// What the check of spans remembers, in memory that stays.
#[derive(Clone, Debug, Default)]
pub(crate) struct SpanCheck {
    /// Which rows were named. Bytes, since bits of one word would wait for one another.
    named: Vec<bool>,
    /// The spans around the one at hand.
    around: Vec<SharedSpan>,
}

impl SpanCheck {
    /// Checks what a plan alone shows of R1 to R3. O(rows, and members of all spans).
    ///
    /// # Errors
    /// The first span that is off; their number, if the members are.
    pub(crate) fn check(
        &mut self,
        shared: &SharedSpans<'_>,
        rows: &[BatchRow],
    ) -> Result<(), usize> {
        let SharedSpans { spans, members } = *shared;
        self.check_members(members, rows.len()).map_err(|()| spans.len())?;
        self.around.clear();
        let mut roots_end = 0;
        for (i, span) in spans.iter().enumerate() {
            let off = || Err(i);
            let Some(members_end) = span.member_start.checked_add(span.member_count) else {
                return off();
            };
            let is_past = |around: &SharedSpan| around.range().end <= span.member_start as usize;
            while self.around.pop_if(|around| is_past(around)).is_some() {}
            let nested = match self.around.last() {
                Some(parent) => {
                    span.begin == parent.end
                        && span.member_start >= parent.member_start
                        && span.member_count < parent.member_count
                        && members_end as usize <= parent.range().end
                }
                None => {
                    let follows = span.member_start == roots_end && span.begin == 0;
                    roots_end = members_end;
                    follows && members_end as usize <= members.len()
                }
            };
            if !nested || span.member_count < 2 || span.begin >= span.end {
                return off();
            }
            let first_query = |&row: &u32| {
                let row = &rows[row as usize];
                row.kv_len.saturating_sub(row.extend_len)
            };
            let first = members[span.range()].iter().map(first_query).fold(u32::MAX, u32::min);
            if first < span.end {
                return off();
            }
            self.around.push(*span);
        }
        if roots_end as usize == members.len() { Ok(()) } else { Err(spans.len()) }
    }

    /// R2.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::RowId;

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
    fn what_is_off_is_named() {
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
        let apart = [(0, 2, 0, 16), (1, 2, 0, 16)];
        assert_eq!(check(&[3, 1, 0], &apart), Err(1), "R1: siblings share a member");
    }
}
