//! Truncates sequences: drops their last pages or tokens.

use crate::id::{PageId, SeqKey, StepId};

use super::record::DirtyFrom;
use super::row::{Marks, Stores, Waits};
use super::{Cuts, Sequence, SequenceTable};

impl SequenceTable {
    /// Drops the pages from `page_len` on and appends them to `out`. O(pages dropped).
    pub(crate) fn truncate_pages(&mut self, seq: SeqKey, page_len: u32, out: &mut Vec<PageId>) {
        let sequence = &mut self.rows[seq];
        if page_len >= sequence.page_len {
            return;
        }
        assert!(page_len >= sequence.published, "S2: a row cannot drop published pages");
        for track in 0..self.stores.pages.tracks() {
            let pieces = self.stores.pages.pieces(sequence.row, track, page_len, sequence.page_len);
            pieces.for_each(|piece| out.extend_from_slice(piece));
        }
        self.stores.pages.shrink(sequence.row, sequence.page_len, page_len);
        // Promised pages that the sequence drops become outstanding again.
        let kept = self.stores.kept(sequence);
        let Stores { limits, all_outstanding, .. } = &mut self.stores;
        let outstanding = |page_len| limits.outstanding(sequence.promised, page_len, sequence.published, kept);
        *all_outstanding += outstanding(page_len) - outstanding(sequence.page_len);
        sequence.page_len = page_len;
        sequence.dirty_from.lower(page_len);
        if page_len > 0 {
            sequence.last_entry = self.stores.pages.entry(sequence.row, page_len - 1);
        }
        self.shrink(seq);
    }

    /// Drops all pages, so the sequence becomes preempted. The caller has released the pages.
    pub(crate) fn clear_pages(&mut self, seq: SeqKey) {
        let sequence = &mut self.rows[seq];
        assert!(sequence.promised == 0, "S3: a preempted sequence is promised nothing");
        self.stores.pages.shrink(sequence.row, sequence.page_len, 0);
        (sequence.page_len, sequence.published) = (0, 0);
        if let Some(waits) = self.stores.waits.get_mut(sequence.row.index()) {
            *waits = Waits::default();
        }
        if let Some(marks) = self.stores.marks.get_mut(sequence.row.index()) {
            *marks = Marks::default();
        }
        self.stores.states.preempt(sequence.row.index());
        (sequence.dirty_from, sequence.inherited) = (DirtyFrom::new(self.stores.states.has_any()), 0);
        (sequence.cached_len, sequence.planned_len) = (0, 0);
        (sequence.last_step, sequence.last_item) = (StepId::default(), 0);
        sequence.preemption_epoch += 1;
        self.shrink(seq);
    }

    /// Records a cut of the tokens from `len` on, if there are such tokens. The caller then drops the tokens.
    pub(crate) fn cut(&mut self, seq: SeqKey, len: u32) {
        let sequence = &self.rows[seq];
        if len < sequence.token_len {
            let cuts = &mut self.cuts[sequence.row.index()];
            cuts.count = cuts.count.wrapping_add(1);
            cuts.shortest = cuts.shortest.min(len);
        }
    }

    /// Returns the cuts of a sequence's tokens.
    pub(crate) fn cuts(&self, sequence: &Sequence) -> Cuts {
        self.cuts[sequence.row.index()]
    }

    /// Drops the tokens past `len`.
    pub(crate) fn truncate_tokens(&mut self, seq: SeqKey, len: u32) {
        self.end_tokens(seq, len);
        self.shrink(seq);
    }

    /// Sets the number of a row's tokens to `len`.
    pub(super) fn end_tokens(&mut self, seq: SeqKey, len: u32) {
        let sequence = &mut self.rows[seq];
        sequence.token_len = len;
        if len > 0 {
            sequence.last_token = self.stores.tokens.token(sequence.row, len - 1);
        }
    }

    /// Releases the leaves that neither tokens nor pages need.
    fn shrink(&mut self, seq: SeqKey) {
        let sequence = &mut self.rows[seq];
        let tokens = sequence.token_len.max(sequence.page_len * self.stores.page_size);
        self.stores.tokens.shrink(sequence.row, &mut sequence.leaves, tokens);
    }
}
