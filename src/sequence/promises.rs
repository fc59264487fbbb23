//! Promises: the pages that each sequence is promised and has not drawn, and their sum (S7).

use crate::id::SeqKey;

use super::{Sequence, SequenceTable};

impl SequenceTable {
    /// Pages that sequences are promised and have not drawn.
    pub fn promised(&self) -> u32 {
        self.stores.promised
    }

    /// Promises a sequence the pages of so many places in all, in place of what it was promised. The caller checked
    /// that they can be had.
    pub(crate) fn promise(&mut self, seq: SeqKey, places: u32) {
        let before = self.undrawn(&self.rows[seq]);
        self.rows[seq].promised = places;
        self.stores.promised = self.stores.promised - before + self.undrawn(&self.rows[seq]);
    }

    /// So many promised pages are being appended to their sequences.
    pub(crate) fn draw(&mut self, pages: u32) {
        assert!(pages <= self.stores.promised, "S7: what is drawn was promised");
        self.stores.promised -= pages;
    }

    /// Pages that a sequence is promised and has not drawn.
    pub(crate) fn undrawn(&self, sequence: &Sequence) -> u32 {
        let Sequence { promised, page_len, published, .. } = *sequence;
        self.stores.limits.undrawn(promised, page_len, published)
    }
}
