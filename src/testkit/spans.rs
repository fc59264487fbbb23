//! Finds shared spans from page tables alone. The core finds them from the prefix tree.

use std::collections::{BTreeMap, BTreeSet};

use crate::id::PageId;
use crate::plan::{SharedSpan, SharedSpans};

/// The spans of a batch and their members.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Spans {
    spans: Vec<SharedSpan>,
    members: Vec<u32>,
}

impl Spans {
    /// Returns the spans of rows with these pages. The index of a table is its row.
    pub fn of(tables: &[&[PageId]], page_size: u32) -> Self {
        let mut found = Self::default();
        let all = (0..tables.len() as u32).collect();
        found.divide(all, 0, tables, page_size);
        // Rows without a span come last.
        let named = found.spans.iter().map(|span| span.range().end).max().unwrap_or(0);
        found.members.truncate(named);
        found
    }

    /// Returns the spans as a plan contains them.
    pub fn plan(&self) -> SharedSpans<'_> {
        SharedSpans { spans: &self.spans, members: &self.members }
    }

    /// Adds the spans of rows whose first `from` pages are equal, and the rows as members.
    fn divide(&mut self, rows: Vec<u32>, from: usize, tables: &[&[PageId]], page_size: u32) {
        let mut groups: BTreeMap<PageId, Vec<u32>> = BTreeMap::new();
        let mut alone = Vec::new();
        for row in rows {
            match tables[row as usize].get(from) {
                Some(&page) => groups.entry(page).or_default().push(row),
                None => alone.push(row),
            }
        }
        for group in groups.into_values() {
            let [first, _, ..] = group[..] else {
                alone.extend(group);
                continue;
            };
            let common = |&row: &u32| {
                let pairs = tables[first as usize].iter().zip(tables[row as usize]);
                pairs.take_while(|(a, b)| a == b).count()
            };
            let end = group.iter().map(common).min().expect("two rows");
            self.spans.push(SharedSpan {
                member_start: self.members.len() as u32,
                member_count: group.len() as u32,
                begin: from as u32 * page_size,
                end: end as u32 * page_size,
            });
            self.divide(group, end, tables, page_size);
        }
        self.members.extend(alone);
    }
}

/// Returns the spans as a set: the rows, the begin and the end of each span.
pub fn unordered(shared: &SharedSpans<'_>) -> BTreeSet<(BTreeSet<u32>, u32, u32)> {
    let members = |span: &SharedSpan| shared.members[span.range()].iter().copied().collect();
    shared.spans.iter().map(|span| (members(span), span.begin, span.end)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_that_begin_alike_share() {
        let table = |pages: &[u32]| pages.iter().copied().map(PageId::new).collect::<Vec<_>>();
        let tables =
            [table(&[1, 2, 3, 4]), table(&[7, 8]), table(&[1, 2, 5]), table(&[1, 2, 3, 6]), table(&[]), table(&[1, 2])];
        let tables: Vec<&[PageId]> = tables.iter().map(Vec::as_slice).collect();
        let found = Spans::of(&tables, 4);
        let want = [(BTreeSet::from([0, 2, 3, 5]), 0, 8), (BTreeSet::from([0, 3]), 8, 12)];
        assert_eq!(unordered(&found.plan()), BTreeSet::from(want));
        assert_eq!(found.members.len(), 4);
    }
}
