//! Promises of pages to sequences. Promised pages that a sequence has not taken are outstanding (S7).

use crate::id::SeqKey;

use super::{Sequence, SequenceTable};

impl SequenceTable {
    /// Returns the outstanding pages of all sequences.
    pub fn all_outstanding(&self) -> u32 {
        self.stores.all_outstanding
    }

    /// Sets a sequence's promise to the pages of `places` page table places in total. The caller has checked that the
    /// pages fit.
    pub(crate) fn promise(&mut self, seq: SeqKey, places: u32) {
        let before = self.outstanding(&self.rows[seq]);
        self.rows[seq].promised = places;
        self.stores.all_outstanding = self.stores.all_outstanding - before + self.outstanding(&self.rows[seq]);
    }

    /// Subtracts outstanding pages that their sequences are taking.
    pub(crate) fn consume_promised(&mut self, pages: u32) {
        assert!(pages <= self.stores.all_outstanding, "S7: consumed pages were promised");
        self.stores.all_outstanding -= pages;
    }

    /// Returns the outstanding pages that a sequence would have with a promise of `promised` places.
    pub(crate) fn outstanding_of(&self, sequence: &Sequence, promised: u32) -> u32 {
        self.stores.outstanding(sequence, promised)
    }

    /// Returns the outstanding pages that the load of a sequence's pending pages may consume.
    pub(crate) fn promised_to_load(&self, sequence: &Sequence) -> u32 {
        let loaded = self.prefix_pages(sequence);
        let limits = self.stores.limits;
        let of_state = self.stores.states.outstanding(sequence.row.index(), sequence.promised);
        self.outstanding(sequence) - limits.outstanding(sequence.promised, loaded, loaded, loaded) - of_state
    }

    /// Returns the outstanding pages of a sequence.
    pub(crate) fn outstanding(&self, sequence: &Sequence) -> u32 {
        self.outstanding_of(sequence, sequence.promised)
    }
}
