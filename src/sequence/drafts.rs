//! Drafts of a sequence that wait for `accept` (S9).

use crate::error::Error;
use crate::id::SeqKey;
use crate::plan::Draft;

use super::record::DRAFTED;
use super::{Sequence, SequenceTable};

impl SequenceTable {
    /// Marks the last `len` planned tokens of a sequence as drafts that wait for `accept`. The caller has checked them.
    /// O(`len`).
    pub(crate) fn begin_draft(&mut self, draft: &Draft<'_>, len: u32) {
        let sequence = &mut self.rows[draft.seq];
        sequence.last_plan = DRAFTED;
        self.stores.branches.set(sequence.row, draft, sequence.planned_len - len, len);
    }

    /// Checks that a sequence has no waiting drafts.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::NotAccepted`].
    pub(crate) fn check_accepted(&self, seq: SeqKey) -> Result<(), Error> {
        let sequence = self.get(seq)?;
        let step = sequence.last_step;
        if sequence.is_drafted() { Err(Error::NotAccepted { seq, step }) } else { Ok(()) }
    }

    /// Returns whether a sequence has `len` waiting drafts that do not form a chain. O(`len`).
    pub(crate) fn has_tree(&self, sequence: &Sequence, len: u32) -> bool {
        sequence.is_drafted() && !self.stores.branches.is_chain(sequence.row, len)
    }

    /// Returns whether exactly one of a sequence's `len` drafts is a root. A single root is the last sampled token;
    /// several roots are guesses of that token. O(`len`).
    pub(crate) fn has_one_root(&self, sequence: &Sequence, len: u32) -> bool {
        self.stores.branches.has_one_root(sequence.row, len)
    }

    /// Returns the first index in `tokens` at which a draft is not a child of the draft before it, if any. The first of
    /// `tokens` must be a root.
    pub(crate) fn first_invalid(&self, sequence: &Sequence, tokens: &[u32]) -> Option<usize> {
        self.stores.branches.first_invalid(sequence.row, tokens)
    }
}
