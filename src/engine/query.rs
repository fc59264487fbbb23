//! Calls that return lengths, tokens and pages of sequences, and the number of available pages.

use crate::backend::Backend;
use crate::error::Error;
use crate::id::{PageId, SeqKey, StepId, TokenId};
use crate::sequence::{Current, Sequence};
use crate::system::plan_batch::extend_max;

use super::Engine;

/// Lengths, tokens and pages of sequences; available pages.
impl<B: Backend> Engine<B> {
    /// Returns the number of a sequence's tokens that have K and V.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], like every call about a sequence.
    pub fn cached_len(&self, seq: SeqKey) -> Result<u32, Error> {
        self.sequence(seq).map(|sequence| sequence.cached_len)
    }

    /// Returns `cached_len` plus the tokens of plans that are neither committed nor aborted.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn planned_len(&self, seq: SeqKey) -> Result<u32, Error> {
        self.sequence(seq).map(|sequence| sequence.planned_len)
    }

    /// Returns whether the sequence's last plan covers its last known token, so that the plan's row has a sample. A
    /// chunk that does not end its prompt has none.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn has_sample(&self, seq: SeqKey) -> Result<bool, Error> {
        self.sequence(seq).map(|sequence| sequence.planned_len >= sequence.token_len)
    }

    /// Returns the maximum number of tokens that the next plan can give a sequence.
    ///
    /// These are the known tokens that no plan covers. If there are none, the maximum is 1 while an unfinished step
    /// will sample the sequence's next token, and the sequence is not at its maximum length. Otherwise the maximum is
    /// 0: call `append` first. It is also 0 for a preempted sequence until `resume`, and for drafts until `accept`.
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

    /// Returns the largest number of tokens, `most` at most, that the next plan can give a sequence:
    /// [`extend_max`](Engine::extend_max), or less if layers keep a state and a mark comes before. A cached state is
    /// one that a step has written, so items end at marks. Marks of a prompt are the place where it parts from cached
    /// prompts, and the place `state_margin` tokens before its end; [`mark`](Engine::mark) adds others.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn next_len(&self, seq: SeqKey, most: u32) -> Result<u32, Error> {
        let most = most.min(self.extend_max(seq)?);
        let sequences = &self.world.sequences;
        let sequence = sequences.get(seq)?;
        let mark = sequences.has_states().then(|| sequences.next_mark(sequence)).flatten();
        Ok(mark.map_or(most, |mark| most.min(mark - sequence.planned_len)))
    }

    /// Returns whether the state of a running sequence is lost: its layers keep a state, and an abort or a rollback has
    /// undone tokens. [`preempt`](Engine::preempt) and [`resume`](Engine::resume) compute the tokens after the last
    /// cached state again.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn is_state_lost(&self, seq: SeqKey) -> Result<bool, Error> {
        let sequences = &self.world.sequences;
        let sequence = sequences.get(seq)?;
        Ok(sequences.has_states() && sequences.states(sequence).current == Current::Lost)
    }

    /// Returns the number of known tokens of a sequence.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn token_count(&self, seq: SeqKey) -> Result<u32, Error> {
        self.sequence(seq).map(|sequence| sequence.token_len)
    }

    pub(crate) fn sequence(&self, seq: SeqKey) -> Result<&Sequence, Error> {
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
    /// Before the [load](Engine::load) of a sequence, its page table ends before the first page in swap memory alone.
    /// With groups of layers, it is empty until the load.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn page_table(&self, seq: SeqKey) -> Result<impl Iterator<Item = PageId> + '_, Error> {
        Ok(self.world.sequences.pages(self.sequence(seq)?))
    }

    /// Returns the pages that a sequence keeps in one track, in order, in slices: one for each leaf of the page table.
    /// O(slices).
    ///
    /// [`PoolLayout::place`](crate::layout::PoolLayout::place) returns the track of a layer. Track 0 is the [page
    /// table](Engine::page_table) of group 0. In the track of a window or a chunk, the pages are the last ones of the
    /// sequence: the first slice begins at the first place that the group keeps.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    ///
    /// # Panics
    /// If `track` is not below the number of tracks.
    pub fn page_runs(&self, seq: SeqKey, track: u32) -> Result<impl Iterator<Item = &[PageId]> + '_, Error> {
        assert!(track < self.world.shape.table.tracks, "there is no track {track}");
        Ok(self.world.sequences.track_pages(self.sequence(seq)?, track, 0))
    }

    /// Writes a dense page table of one track, `[seqs, width]`: the pages of each sequence by place, then `fill`.
    /// O(seqs * width).
    ///
    /// In the track of a window or a chunk, the places before the first kept one are also `fill`. A kernel with signed
    /// tables reads the same words as i32.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::TableWidth`] for a sequence with more pages than `width`;
    /// [`Error::TableLen`] for another length of `out`. `out` is unchanged then.
    ///
    /// # Panics
    /// If `track` is not below the number of tracks.
    pub fn write_tables(
        &self,
        seqs: &[SeqKey],
        track: u32,
        width: usize,
        fill: u32,
        out: &mut [u32],
    ) -> Result<(), Error> {
        let wanted = seqs.len().saturating_mul(width);
        if out.len() != wanted {
            return Err(Error::TableLen { actual: out.len(), wanted });
        }
        for &seq in seqs {
            let pages = self.sequence(seq)?.page_len;
            if pages as usize > width {
                return Err(Error::TableWidth { seq, pages, width });
            }
        }
        let sequences = &self.world.sequences;
        for (&seq, row) in seqs.iter().zip(out.chunks_exact_mut(width.max(1))) {
            let sequence = self.sequence(seq)?;
            let first = sequences.first_place(sequence, track);
            let mut at = first as usize;
            row[..at].fill(fill);
            for run in sequences.page_pieces(sequence, track, first, sequence.page_len) {
                row[at..at + run.len()].copy_from_slice(PageId::as_raw(run));
                at += run.len();
            }
            row[at..].fill(fill);
        }
        Ok(())
    }

    /// Returns the number of pages that a sequence is promised and has not taken.
    ///
    /// Plans of the sequence can take them in addition to the [available](Engine::available) pages.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn outstanding(&self, seq: SeqKey) -> Result<u32, Error> {
        Ok(self.world.sequences.outstanding(self.sequence(seq)?))
    }

    /// Returns the number of pages that any call can take: free and evictable pages minus promised ones. O(1).
    pub fn available(&self) -> u32 {
        self.world.available()
    }

    /// Returns the number of [`available`](Engine::available) pages after the completion of `step`, if no other call
    /// comes first. O(unfinished steps).
    ///
    /// Before it preempts a sequence, a scheduler can compare this number with the pages that it needs.
    pub fn available_after(&self, step: StepId) -> u32 {
        self.world.available_after(step)
    }
}
