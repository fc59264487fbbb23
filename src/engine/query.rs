//! Calls that return numbers, tokens and pages of sequences, and the number of available pages.

use crate::backend::Backend;
use crate::error::Error;
use crate::id::{PageId, SeqKey, StepId, TokenId};
use crate::sequence::Sequence;
use crate::system::plan_batch::extend_max;

use super::Engine;

/// Lengths, tokens and pages of sequences, and how many pages are available.
impl<B: Backend> Engine<B> {
    /// Returns the tokens of a sequence that have K and V.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], as the other calls about a sequence.
    pub fn cached_len(&self, seq: SeqKey) -> Result<u32, Error> {
        self.sequence(seq).map(|sequence| sequence.cached_len)
    }

    /// Returns `cached_len` plus the tokens that unfinished plans will add.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn planned_len(&self, seq: SeqKey) -> Result<u32, Error> {
        self.sequence(seq).map(|sequence| sequence.planned_len)
    }

    /// Returns the most tokens that a plan can extend a sequence by now.
    ///
    /// These are its known tokens that no plan covers, or the one token that an unfinished step of it will sample
    /// (unless a rollback has cut that step). At 0, call `append`, `accept` or `resume` first.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn extend_max(&self, seq: SeqKey) -> Result<u32, Error> {
        let sequence = self.sequence(seq)?;
        if sequence.is_preempted() || sequence.is_drafted() {
            return Ok(0);
        }
        Ok(extend_max(&self.world.shape, sequence, &self.world.steps))
    }

    /// Returns the known tokens of a sequence.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn token_count(&self, seq: SeqKey) -> Result<u32, Error> {
        self.sequence(seq).map(|sequence| sequence.token_len)
    }

    /// Returns the record of a sequence, for audits and benches. Its fields are not a stable interface.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    #[doc(hidden)]
    pub fn sequence(&self, seq: SeqKey) -> Result<&Sequence, Error> {
        self.world.sequences.get(seq)
    }

    /// Returns the known tokens of a sequence, in order.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn tokens(&self, seq: SeqKey) -> Result<impl Iterator<Item = TokenId> + '_, Error> {
        let sequence = self.sequence(seq)?;
        let pieces = self.world.sequences.token_pieces(sequence, 0, sequence.token_len);
        Ok(pieces.flatten().copied())
    }

    /// Returns the pages of a sequence, in order.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn page_table(&self, seq: SeqKey) -> Result<impl Iterator<Item = PageId> + '_, Error> {
        Ok(self.world.sequences.pages(self.sequence(seq)?))
    }

    /// Returns the pages that a sequence holds in a track, in order.
    ///
    /// These belong to the layers that [`PoolLayout::place`](crate::PoolLayout::place) puts in the track. Track 0 is
    /// the [page table](Engine::page_table) of group 0.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    ///
    /// # Panics
    /// If `track` is not below the number of tracks.
    pub fn track_table(
        &self,
        seq: SeqKey,
        track: u32,
    ) -> Result<impl Iterator<Item = PageId> + '_, Error> {
        assert!(track < self.world.shape.table.tracks, "there is no track {track}");
        Ok(self.world.sequences.track_pages(self.sequence(seq)?, track, 0))
    }

    /// Returns the pages that a sequence is promised and has not taken yet.
    ///
    /// Plans of the sequence can take these pages besides the [available](Engine::available) ones.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn promised(&self, seq: SeqKey) -> Result<u32, Error> {
        Ok(self.world.sequences.outstanding(self.sequence(seq)?))
    }

    /// Returns the free and evictable pages less those promised to sequences, at least 0. O(1).
    ///
    /// Every call can take these pages.
    pub fn available(&self) -> u32 {
        self.world.available()
    }

    /// Returns [`available`](Engine::available) as of the completion of `step`, if no other call comes first.
    /// O(unfinished steps).
    ///
    /// A scheduler compares it with its need before it preempts.
    pub fn available_after(&self, step: StepId) -> u32 {
        self.world.available_after(step)
    }
}
