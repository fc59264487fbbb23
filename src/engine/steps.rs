//! Calls about one step: plans, packed plans, accepted drafts, commit, completion and abort.

use crate::backend::Backend;
use crate::error::{EngineError, Error};
use crate::id::{SeqKey, StepId};
use crate::plan::{
    BatchPlan, Branch, Compaction, Draft, Extend, PackedLevels, PackedPlan, PackedStates, PlanSize, StepEnd,
    StepScratch,
};
use crate::system::abort::{Abort, abort};
use crate::system::accept::{Accept, accept, check_branches};
use crate::system::commit::{Commit, commit};
use crate::system::complete::{Complete, complete};
use crate::system::packed::{Packed, packed, packed_states};
use crate::system::packed_levels::packed_levels;
use crate::system::plan_batch::{PlanBatch, plan_batch};

use super::Engine;

/// Plans, verified drafts, commits and ends of steps.
impl<B: Backend> Engine<B> {
    /// Plans a step: takes the pages that the new tokens need, writes the plan into `scratch` and passes it to the
    /// backend. O(batch, new tokens, and page table words sent).
    ///
    /// Evicts exactly the missing pages; with groups of layers, it may evict a few more. A plan sends the page table
    /// words of new pages, so its cost does not grow with the context. Three cases send more:
    ///
    /// * The first plan of a sequence after `admit`, `resume` or `fork` sends its whole page table, except pages in
    ///   leaves that a fork's child shares with its parent.
    /// * If the sequence switched to equal pages that another sequence had published, the next plan sends these pages
    ///   and all later ones of the sequence.
    /// * Words of an aborted plan are sent again.
    ///
    /// [`EngineShape::plan_bytes`](crate::config::EngineShape::plan_bytes) is the upper bound. If all new pages of a
    /// batch are promised, [`Error::OutOfPages`] lasts at most until the step that it names is complete.
    ///
    /// # Errors
    /// [`EngineError::Core`] with [`Error::EmptyBatch`], [`Error::OutOfSteps`], [`Error::UnknownSequence`],
    /// [`Error::Preempted`], [`Error::RepeatedSequence`], [`Error::NotAccepted`], [`Error::ExtendLen`],
    /// [`Error::StepTokens`], [`Error::OutOfTokens`] or [`Error::OutOfPages`]: nothing has changed, but pages that the
    /// sequences waited for stay [loaded](Engine::load). [`EngineError::Backend`] if this load failed: there is no new
    /// step. [`EngineError::Backend`] if the backend rejected the plan: the step is aborted. Its number stays in use,
    /// and evicted pages stay evicted.
    pub fn plan_batch<'step>(
        &mut self,
        scratch: &'step mut StepScratch,
        items: &[Extend],
    ) -> Result<BatchPlan<'step>, EngineError<B::Error>> {
        self.plan_drafts(scratch, items, &[])
    }

    /// Plans a step with drafts of speculative decoding among the items. Costs as much as [`Engine::plan_batch`].
    ///
    /// `drafts` are in the order of their items. Each is a chain, or a tree with masks and positions. The step verifies
    /// all new tokens of a draft together; [`accept`](Engine::accept) then keeps one branch. Until then the step cannot
    /// be committed. The sequence cannot be planned, preempted, forked or rolled back, but it can be finished. After an
    /// abort of the step, its drafts are ordinary tokens.
    ///
    /// # Errors
    /// As [`Engine::plan_batch`]. For a draft also [`Error::DraftOrder`], [`Error::ExtendLen`] if a token is not known,
    /// [`Error::DraftLen`], [`Error::DraftArrays`], [`Error::DraftMask`], [`Error::DraftPosition`].
    pub fn plan_drafts<'step>(
        &mut self,
        scratch: &'step mut StepScratch,
        items: &[Extend],
        drafts: &[Draft<'_>],
    ) -> Result<BatchPlan<'step>, EngineError<B::Error>> {
        self.plan(scratch, items, drafts, None)
    }

    /// Plans a step as [`Engine::plan_drafts`] does, padded to the size of a captured graph. Costs O(padding) more.
    ///
    /// A padding row has `kv_len` 0: it attends to nothing and its output is 0. A padding token has slot -1, so nothing
    /// is stored. Each padding row has one padding token; the last row has the rest.
    ///
    /// # Errors
    /// As [`Engine::plan_drafts`], and [`Error::PlanSize`] for a size that does not hold the batch.
    pub fn plan_padded<'step>(
        &mut self,
        scratch: &'step mut StepScratch,
        items: &[Extend],
        drafts: &[Draft<'_>],
        size: PlanSize,
    ) -> Result<BatchPlan<'step>, EngineError<B::Error>> {
        self.plan(scratch, items, drafts, Some(size))
    }

    fn plan<'step>(
        &mut self,
        scratch: &'step mut StepScratch,
        items: &[Extend],
        drafts: &[Draft<'_>],
        size: Option<PlanSize>,
    ) -> Result<BatchPlan<'step>, EngineError<B::Error>> {
        if self.world.prefixes.has_swap() {
            self.load_waiting(&mut items.iter().map(|item| item.seq))?;
        }
        let plan = plan_batch(PlanBatch::from(&mut self.world), scratch, items, drafts, size);
        let plan = self.world.counters.count_refusal(plan)?;
        if self.world.prefixes.has_swap() {
            self.flush_saves();
        }
        if let Err(error) = self.backend.begin(&plan) {
            abort(Abort::from(&mut self.world), plan.step, false).expect("the step was just planned");
            return Err(EngineError::Backend(error));
        }
        Ok(plan)
    }

    /// Returns the page tables of a planned batch in FlashInfer's format, for hosts with their own kernels. O(pages of
    /// the items).
    ///
    /// `items` are all or some items of one plan, in its order, so a host may have separate kernels for prefill and
    /// decode. Their step is not complete, and the sequences have not been planned again or rolled back since. Chains
    /// of drafts are packed as ordinary tokens. [Accepted](Engine::accept) drafts are an item of the accepted length.
    /// FlashInfer's arrays have no masks, so trees are rejected.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::Preempted`]. [`Error::NotPlanned`] for an item that is not the last plan of
    /// its sequence, or is out of order. [`Error::PackedTree`]. [`Error::PackedLimit`] for a pool or a batch with
    /// numbers beyond 31 bits.
    pub fn packed<'step>(&self, scratch: &'step mut StepScratch, items: &[Extend]) -> Result<PackedPlan<'step>, Error> {
        packed(&Packed::from(&self.world), 0, items, scratch.reset())
    }

    /// Returns the arrays of [`packed`](Engine::packed) for another track: for the layers that
    /// [`PoolLayout::place`](crate::layout::PoolLayout::place) puts in it.
    ///
    /// A sequence keeps only some pages in the track of a window or of chunks. The list of the sequence begins at the
    /// first kept page, not at position 0, and ends at the same place as the list of track 0. So the two lists differ
    /// in length by the number of places before the first kept page. A kernel over the shorter list counts the
    /// positions of keys from the end, or adds `page_size` for each of these places.
    ///
    /// # Errors
    /// As [`packed`](Engine::packed).
    ///
    /// # Panics
    /// If `track` is not below the number of tracks.
    pub fn packed_track<'step>(
        &self,
        scratch: &'step mut StepScratch,
        track: u32,
        items: &[Extend],
    ) -> Result<PackedPlan<'step>, Error> {
        assert!(track < self.world.shape.table.tracks, "there is no track {track}");
        packed(&Packed::from(&self.world), track, items, scratch.reset())
    }

    /// Returns the pages of the states that a planned batch reads and writes, for hosts with their own kernels. O(rows,
    /// times the pages of a state).
    ///
    /// Track r has the pages with the states of the layers whose [place](crate::layout::PoolLayout::place) has track r.
    /// A page's number is the slot of FlashInfer's, flash-linear-attention's and causal_conv1d's kernels, in a pool
    /// that begins at the layer's lane and whose slots are [`page_bytes`](crate::layout::PoolLayout::page_bytes) apart;
    /// the product needs 64 bits. Rows of new sequences read page 0, which is zero. `items` are as in
    /// [`packed`](Engine::packed); `rows - items.len()` rows of padding have page -1.
    ///
    /// # Errors
    /// As [`packed`](Engine::packed). [`Error::PackedRows`] for fewer rows than items.
    pub fn packed_states<'step>(
        &self,
        scratch: &'step mut StepScratch,
        items: &[Extend],
        rows: usize,
    ) -> Result<PackedStates<'step>, Error> {
        packed_states(&Packed::from(&self.world), items, rows, scratch.reset())
    }

    /// Returns the arrays of [`packed`](Engine::packed) for group 0 as the levels of FlashInfer's cascade, which lists
    /// shared pages once. O(items + pages).
    ///
    /// `plan` is a plan of this engine, padded or not. `items` are all its items; [`accept`](Engine::accept) has
    /// shortened none of them.
    ///
    /// # Errors
    /// As [`packed`](Engine::packed). [`Error::PackedRows`] or [`Error::NotPlanned`] if the plan is not of these items.
    ///
    /// # Panics
    /// May panic for a plan of another engine.
    pub fn packed_levels<'step>(
        &self,
        scratch: &'step mut StepScratch,
        plan: &BatchPlan<'_>,
        items: &[Extend],
    ) -> Result<PackedLevels<'step>, Error> {
        packed_levels(&Packed::from(&self.world), plan, items, scratch.reset())
    }

    /// Keeps one branch of a sequence's verified drafts, and drops the other drafts and all later tokens. O(tokens
    /// kept, and pages released).
    ///
    /// `tokens` are the indices of the branch within the item: a root, a token that follows it, and so on. An empty
    /// branch drops all drafts. The sequence then ends with the branch; [`append`](Engine::append) continues it. The
    /// backend makes K and V of the branch contiguous, in the order of its stream. So call `accept` after all other
    /// work of the step and before the commit.
    ///
    /// Returns the moves of K and V; none if the branch is the item's first drafts. The host passes them to
    /// [`Backend::compact`] of other ranks before the next plan.
    ///
    /// # Errors
    /// [`EngineError::Core`] with [`Error::UnknownStep`], [`Error::UnknownSequence`], [`Error::Preempted`],
    /// [`Error::NotDrafted`], [`Error::NotABranch`], or [`Error::RollbackLen`] if no token would be left: nothing has
    /// changed. [`EngineError::Backend`] if the move failed: the drafts still wait for `accept`, but their K and V are
    /// lost, so the host must abort the step.
    pub fn accept(
        &mut self,
        step: StepId,
        seq: SeqKey,
        tokens: &[u32],
    ) -> Result<&[Compaction], EngineError<B::Error>> {
        self.accept_batch(step, &[Branch { seq, tokens }])
    }

    /// Accepts one branch for each of several sequences of a step, all or none, with one call of the backend.
    ///
    /// `branches` are in the order of the step's items.
    ///
    /// # Errors
    /// As [`Engine::accept`]. [`Error::RepeatedSequence`] for a sequence that is repeated or out of order.
    pub fn accept_batch(
        &mut self,
        step: StepId,
        branches: &[Branch<'_>],
    ) -> Result<&[Compaction], EngineError<B::Error>> {
        check_branches(&mut Accept::from(&mut self.world), step, branches)?;
        let compactions = &self.world.buffers.compactions;
        if !compactions.is_empty() {
            self.backend.compact(compactions).map_err(EngineError::Backend)?;
        }
        accept(Accept::from(&mut self.world), step, branches);
        Ok(&self.world.buffers.compactions)
    }

    /// Commits a step: advances `cached_len` and makes whole pages matchable. O(batch and pages published).
    ///
    /// The host calls it when the tokens of the step have K and V, or when the backend's stream will write these before
    /// any later work. Skips sequences that were finished or preempted since the plan.
    ///
    /// # Errors
    /// [`Error::UnknownStep`] for a step that is not open. [`Error::StepOrder`] if an earlier step is open.
    /// [`Error::NotAccepted`] for drafts without an accepted branch.
    pub fn commit(&mut self, step: StepId) -> Result<(), Error> {
        commit(Commit::from(&mut self.world), step)
    }

    /// Completes all steps up to `step`: their work has ended on all streams and ranks. O(pages returned, and prefix
    /// nodes that become idle).
    ///
    /// Pages and locks that waited for these steps return, and the backend rejects their plans from now on. If one
    /// stream orders all work on the pool, a step may be completed as soon as its work is enqueued. Completing a
    /// complete step changes nothing.
    ///
    /// The nodes that become idle are on the path of a finished or preempted sequence. A path has few nodes, except in
    /// a conversation of many turns, which has one for each turn.
    ///
    /// The host passes [`StepEnd::Complete`] to backends of other ranks.
    ///
    /// # Errors
    /// [`Error::UnknownStep`] for a step that was never planned. [`Error::StepOpen`] if a step up to it is neither
    /// committed nor aborted.
    pub fn complete(&mut self, step: StepId) -> Result<(), Error> {
        complete(Complete::from(&mut self.world), step)?;
        self.backend.end(StepEnd::Complete(step));
        Ok(())
    }

    /// Undoes a planned step and all steps planned after it. O(items undone and pages released).
    ///
    /// Lengths return to their earlier values, pages wait in the fence until a `complete`, and nothing is published.
    /// The backend rejects the plans from now on. Appended tokens stay.
    ///
    /// The host passes [`StepEnd::Abort`] to backends of other ranks.
    ///
    /// # Errors
    /// [`Error::UnknownStep`] for a step that is not open.
    pub fn abort(&mut self, step: StepId) -> Result<(), Error> {
        abort(Abort::from(&mut self.world), step, true)?;
        self.backend.end(StepEnd::Abort(step));
        Ok(())
    }

    /// Returns the newest step, whatever its state; 0 if there is none.
    ///
    /// If the backend rejected a plan or the copies of a fork, it is the failed step. The host completes it like any
    /// other.
    pub fn newest_step(&self) -> StepId {
        self.world.steps.newest()
    }
}
