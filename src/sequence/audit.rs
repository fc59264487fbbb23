//! The audit of sequences: S5 to S8.

use super::leaf_pool::LeafPool;
use super::{Sequence, SequenceTable};

impl SequenceTable {
    /// Returns whether S6 holds for a row.
    pub(crate) fn last_entry_is_consistent(&self, sequence: &Sequence) -> bool {
        let Sequence { row, page_len, token_len, last_entry, last_token, .. } = *sequence;
        (page_len == 0 || self.stores.pages.entry(row, page_len - 1) == last_entry)
            && (token_len == 0 || self.stores.tokens.token(row, token_len - 1) == last_token)
    }

    /// Returns whether S7 holds.
    pub(crate) fn promises_are_counted(&self) -> bool {
        self.rows.values().map(|s| u64::from(self.outstanding(s))).sum::<u64>() == u64::from(self.all_outstanding())
    }

    /// Returns the waiting marks of a sequence.
    pub(crate) fn marks(&self, sequence: &Sequence) -> impl Iterator<Item = u32> + '_ {
        let marks = self.stores.marks.get(sequence.row.index());
        marks.into_iter().flat_map(|marks| marks.waiting).filter(|&mark| mark > 0)
    }

    /// Returns whether S5 holds. O(leaves).
    pub(crate) fn leaves_are_counted(&self) -> bool {
        let token_leaves = self.rows.values().flat_map(|s| self.stores.tokens.leaves_of(s.row, s.leaves));
        let page_leaves = self.rows.values().flat_map(|s| self.stores.pages.leaves_of(s.row, s.page_len));
        are_counted(self.stores.tokens.pool(), token_leaves) && are_counted(self.stores.pages.pool(), page_leaves)
    }

    /// Returns whether S8 holds. O(running sequences).
    pub(crate) fn fronts_are_indexed(&self) -> bool {
        let fronts = self.rows.iter().filter(|(_, sequence)| self.stores.has_front(sequence));
        self.stores.inflight.check(fronts.map(|(seq, sequence)| (sequence.row, seq, self.stores.front_hash(sequence))))
    }
}

/// Returns whether a pool counts exactly these users of its leaves.
fn are_counted(pool: &LeafPool, named: impl Iterator<Item = u32>) -> bool {
    let mut users = vec![0; pool.users().len()];
    named.for_each(|leaf| users[leaf as usize] += 1);
    let used = users.iter().filter(|&&users| users > 0).count();
    users == pool.users() && used == pool.used_count() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Sequence {
        /// Breaks S5, for tests of the audit.
        pub(crate) fn break_s5(&mut self) {
            self.leaves -= 1;
        }

        /// Breaks S6, for tests of the audit.
        pub(crate) fn break_s6(&mut self) {
            self.last_entry += 1;
        }
    }

    impl SequenceTable {
        /// Breaks S5 of the page table's leaves, for tests of the audit.
        pub(crate) fn break_s5_of_pages(&mut self) {
            let row = self.rows.values().find(|s| s.page_len > 0).expect("a row with pages").row;
            self.stores.pages.break_s5(row);
        }
    }
}
