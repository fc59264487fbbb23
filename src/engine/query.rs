//! The questions about sequences and free pages.

use crate::backend::Backend;
use crate::error::Error;
use crate::id::{PageId, SeqKey, StepId, TokenId};
use crate::sequence::Sequence;
use crate::system::plan_batch::extend_max;

use super::Engine;

/// Lengths, tokens and pages of sequences, and how many pages are available.
impl<B: Backend> Engine<B> {
    /// Tokens of a sequence that have K and V.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; so do the other questions about a sequence.
    pub fn cached_len(&self, seq: SeqKey) -> Result<u32, Error> {
        self.sequence(seq).map(|sequence| sequence.cached_len)
    }

    /// `cached_len` and what unfinished plans will add.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn planned_len(&self, seq: SeqKey) -> Result<u32, Error> {
        self.sequence(seq).map(|sequence| sequence.planned_len)
    }

    /// The most tokens that a plan can extend a sequence by now: its known ones that no plan covers, or the one that an
    /// unfinished step of it will sample (not where a rollback has cut that step). 0: append first, or accept, or
    /// resume.
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

    /// Known tokens of a sequence.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn token_count(&self, seq: SeqKey) -> Result<u32, Error> {
        self.sequence(seq).map(|sequence| sequence.token_len)
    }

    /// A sequence's numbers, for audits and benches: what they are may change.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    #[doc(hidden)]
    pub fn sequence(&self, seq: SeqKey) -> Result<&Sequence, Error> {
        self.world.sequences.get(seq)
    }

    /// A sequence's known tokens.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn tokens(&self, seq: SeqKey) -> Result<impl Iterator<Item = TokenId> + '_, Error> {
        let sequence = self.sequence(seq)?;
        let pieces = self.world.sequences.token_pieces(sequence, 0, sequence.token_len);
        Ok(pieces.flatten().copied())
    }

    /// A sequence's pages in order.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn page_table(&self, seq: SeqKey) -> Result<impl Iterator<Item = PageId> + '_, Error> {
        Ok(self.world.sequences.pages(self.sequence(seq)?))
    }

    /// A sequence's pages of a track in order, as far as it holds them: of the layers that
    /// [`PoolLayout::place`](crate::PoolLayout::place) has there. Track 0 is the [page table](Engine::page_table) of
    /// group 0.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    ///
    /// # Panics
    /// If there is no such track.
    pub fn track_table(
        &self,
        seq: SeqKey,
        track: u32,
    ) -> Result<impl Iterator<Item = PageId> + '_, Error> {
        assert!(track < self.world.shape.table.tracks, "there is no track {track}");
        Ok(self.world.sequences.track_pages(self.sequence(seq)?, track, 0))
    }

    /// Pages that a sequence is promised and has not drawn. Its plans may take these, and what is
    /// [available](Engine::available).
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn promised(&self, seq: SeqKey) -> Result<u32, Error> {
        Ok(self.world.sequences.outstanding(self.sequence(seq)?))
    }

    /// Pages that anybody could take now: free and evictable, less those promised to sequences; never below 0. O(1).
    pub fn available(&self) -> u32 {
        self.world.available()
    }

    /// [`available`](Engine::available) once `step` is complete, if nothing else happens. A scheduler compares it with
    /// what it needs before it preempts. O(unfinished steps).
    pub fn available_after(&self, step: StepId) -> u32 {
        self.world.available_after(step)
    }
}
