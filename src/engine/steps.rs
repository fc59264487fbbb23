//! The calls of one step: it is planned, packed for other kernels, committed, completed or aborted.

use crate::backend::Backend;
use crate::error::{EngineError, Error};
use crate::id::{SeqKey, StepId};
use crate::plan::{
    BatchPlan, Branch, Compaction, Draft, Extend, PackedLevels, PackedPlan, StepEnd, StepScratch,
};
use crate::system::abort::{Abort, abort};
use crate::system::accept::{Accept, accept, check_branches};
use crate::system::commit::{Commit, commit};
use crate::system::complete::{Complete, complete};
use crate::system::packed::{Packed, packed};
use crate::system::packed_levels::packed_levels;
use crate::system::plan_batch::{PlanBatch, plan_batch};

use super::Engine;

/// Steps: plans, verified drafts, commits, ends.
impl<B: Backend> Engine<B> {
    /// Plans a step: takes exactly the pages that the new tokens need, evicts no more than are lacking, writes the plan
    /// into `scratch`, and tells the backend. O(batch, new tokens, and page table words that no plan has sent).
    ///
    /// Those are the words of new pages, so that the cost does not grow with the context, with these exceptions: in its
    /// first plan since `admit` or `resume` a sequence sends all its pages, the shared ones too; where a commit
    /// found that another sequence had published the same pages, they and those behind them are sent again; and what
    /// an aborted plan sent is. [`EngineShape::plan_bytes`] counts the worst.
    ///
    /// # Errors
    /// [`EngineError::Core`] with [`Error::EmptyBatch`], [`Error::OutOfSteps`], [`Error::UnknownSequence`],
    /// [`Error::Preempted`], [`Error::RepeatedSequence`], [`Error::NotAccepted`], [`Error::ExtendLen`],
    /// [`Error::StepTokens`], [`Error::OutOfTokens`] or [`Error::OutOfPages`]: nothing has changed.
    /// [`EngineError::Backend`]: the step is aborted, so its number is spent and what was evicted for it stays evicted.
    ///
    /// A batch whose new pages are all promised is out of pages only until the step that the error names is complete.
    pub fn plan_batch<'step>(
        &mut self,
        scratch: &'step mut StepScratch,
        items: &[Extend],
    ) -> Result<BatchPlan<'step>, EngineError<B::Error>> {
        self.plan_drafts(scratch, items, &[])
    }

    /// [`Engine::plan_batch`] of items of which some are drafts, in the order of the items: chains, or trees with masks
    /// and positions. The new tokens of a draft are checked together, and [`accept`](Engine::accept) keeps a branch of
    /// them once the model has answered: until then the sequence is not planned, committed, preempted, forked or rolled
    /// back. It may be finished, and the step aborted, after which its drafts are tokens like others. O(as
    /// `plan_batch`).
    ///
    /// # Errors
    /// As [`Engine::plan_batch`]; for a draft also [`Error::DraftOrder`], [`Error::ExtendLen`] where a token is not
    /// known, [`Error::DraftLen`], [`Error::DraftArrays`], [`Error::DraftMask`], [`Error::DraftPosition`].
    pub fn plan_drafts<'step>(
        &mut self,
        scratch: &'step mut StepScratch,
        items: &[Extend],
        drafts: &[Draft<'_>],
    ) -> Result<BatchPlan<'step>, EngineError<B::Error>> {
        let plan = plan_batch(PlanBatch::of(&mut self.world), scratch, items, drafts);
        let plan = self.world.counters.count_refusal(plan)?;
        if let Err(error) = self.backend.begin(&plan) {
            self.abort(plan.step).expect("the step was just planned");
            return Err(EngineError::Backend(error));
        }
        Ok(plan)
    }

    /// The page tables of a planned batch in FlashInfer's contract, for hosts that bring their own kernels.
    ///
    /// `items` are those of one plan in its order, or some of them (a host may have one kernel for prefill and another
    /// for decode), as long as their step is not complete and nothing was planned or rolled back for them since. Drafts
    /// that are a chain are packed as tokens like others, and what was [accepted](Engine::accept) of drafts as an item
    /// of so many tokens; a tree has masks, which that contract lacks, and is refused. O(pages of the items).
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::Preempted`], [`Error::NotPlanned`] for an item that is not what was planned
    /// last for its sequence, or is out of order; [`Error::PackedTree`]; [`Error::PackedLimit`] for a pool or a batch
    /// whose numbers do not fit that contract's signed 32 bits.
    pub fn packed<'step>(
        &self,
        scratch: &'step mut StepScratch,
        items: &[Extend],
    ) -> Result<PackedPlan<'step>, Error> {
        packed(&Packed::of(&self.world), 0, items, scratch.reset())
    }

    /// [`packed`](Engine::packed) of the page tables of another track: those of the layers that
    /// [`PoolLayout::place`](crate::PoolLayout::place) has there.
    ///
    /// # Errors
    /// As [`packed`](Engine::packed).
    ///
    /// # Panics
    /// If there is no such track.
    pub fn packed_track<'step>(
        &self,
        scratch: &'step mut StepScratch,
        track: u32,
        items: &[Extend],
    ) -> Result<PackedPlan<'step>, Error> {
        assert!(track < self.world.shape.table.tracks, "there is no track {track}");
        packed(&Packed::of(&self.world), track, items, scratch.reset())
    }

    /// [`packed`](Engine::packed), of group 0, in the levels of FlashInfer's cascade: what several sequences share is
    /// listed once.
    ///
    /// `plan` is this engine's, padded or not, and `items` are all of its items, none accepted in part since.
    /// O(items + pages).
    ///
    /// # Errors
    /// As [`packed`](Engine::packed); [`Error::PackedRows`] and [`Error::NotPlanned`] where the plan is not of these
    /// items.
    ///
    /// # Panics
    /// If the plan is another engine's, maybe: its step and lengths may look like this one's, but not its spans.
    pub fn packed_levels<'step>(
        &self,
        scratch: &'step mut StepScratch,
        plan: &BatchPlan<'_>,
        items: &[Extend],
    ) -> Result<PackedLevels<'step>, Error> {
        packed_levels(&Packed::of(&self.world), plan, items, scratch.reset())
    }

    /// Keeps a branch of the drafts that a step checks of a sequence, and forgets the others, with all that was
    /// appended behind them: the sequence ends with what is kept, and goes on with [`append`](Engine::append). `tokens`
    /// are counted from the item's first: a root, a token that follows it, and so on; none, and all drafts are
    /// forgotten. K and V of the branch are moved together on the backend, in its order, so `accept` comes after all
    /// that the step asks of it, and before the commit. O(tokens kept, and pages released).
    ///
    /// Where the branch was not in one piece, what was moved is returned: other ranks' backends need
    /// [`Backend::compact`] too, before the next plan.
    ///
    /// # Errors
    /// [`EngineError::Core`] with [`Error::UnknownStep`], [`Error::UnknownSequence`], [`Error::Preempted`],
    /// [`Error::NotDrafted`], [`Error::NotABranch`], or [`Error::RollbackLen`] if no token would be left: nothing has
    /// changed. [`EngineError::Backend`] if the move failed: the drafts wait still, but their K and V are lost, so the
    /// step is to be aborted.
    pub fn accept(
        &mut self,
        step: StepId,
        seq: SeqKey,
        tokens: &[u32],
    ) -> Result<&[Compaction], EngineError<B::Error>> {
        self.accept_batch(step, &[Branch { seq, tokens }])
    }

    /// [`Engine::accept`] of many sequences of a step, in the order of its items, all or none: one call of the backend.
    ///
    /// # Errors
    /// As [`Engine::accept`], and [`Error::RepeatedSequence`] for a sequence that stands twice or out of order.
    pub fn accept_batch(
        &mut self,
        step: StepId,
        branches: &[Branch<'_>],
    ) -> Result<&[Compaction], EngineError<B::Error>> {
        check_branches(&mut Accept::of(&mut self.world), step, branches)?;
        let compactions = &self.world.buffers.compactions;
        if !compactions.is_empty() {
            self.backend.compact(compactions).map_err(EngineError::Backend)?;
        }
        accept(Accept::of(&mut self.world), step, branches);
        Ok(&self.world.buffers.compactions)
    }

    /// Commits a step: its tokens have K and V, or will have in the order of the backend's stream. `cached_len`
    /// advances and whole pages become matchable. Sequences finished or preempted since are skipped.
    /// O(batch and pages published).
    ///
    /// # Errors
    /// [`Error::UnknownStep`] for a step that is not open, [`Error::StepOrder`] if an earlier one is,
    /// [`Error::NotAccepted`] for drafts of which no branch is kept.
    pub fn commit(&mut self, step: StepId) -> Result<(), Error> {
        commit(Commit::of(&mut self.world), step)
    }

    /// All steps up to `step` are done on all streams and ranks: what waited for them returns, and the backend refuses
    /// their plans. Where one stream orders all work of the pool, a step may be completed as soon as all of it is asked
    /// for. Completing a complete step changes nothing. O(pages returned, and prefix nodes that nobody uses from now
    /// on). Those are the path of a finished or preempted sequence up to where another one uses it: seldom more than a
    /// few, but a conversation of many turns has one for each, and they are all walked although no page of theirs
    /// returns. Admitting the sequence or publishing its pages took as long before.
    ///
    /// Backends of other ranks are told by the host: [`StepEnd::Complete`].
    ///
    /// # Errors
    /// [`Error::UnknownStep`] for a step never planned, [`Error::StepOpen`] if one up to it is neither committed nor
    /// aborted.
    pub fn complete(&mut self, step: StepId) -> Result<(), Error> {
        complete(Complete::of(&mut self.world), step)?;
        self.backend.end(StepEnd::Complete(step));
        Ok(())
    }

    /// Undoes a planned step and every one planned after it: lengths return, pages pass the fence until a `complete`,
    /// nothing is published, and the backend refuses their plans. Tokens appended meanwhile stay. O(items undone).
    ///
    /// Backends of other ranks are told by the host: [`StepEnd::Abort`].
    ///
    /// # Errors
    /// [`Error::UnknownStep`] for a step that is not open.
    pub fn abort(&mut self, step: StepId) -> Result<(), Error> {
        abort(Abort::of(&mut self.world), step)?;
        self.backend.end(StepEnd::Abort(step));
        Ok(())
    }

    /// The newest step, planned or aborted; 0 if there was none. After a backend's error it is the one that failed,
    /// which is to be completed like any other.
    pub fn newest_step(&self) -> StepId {
        self.world.steps.newest()
    }
}
