//! The host's API: [`Engine`] is the tables, a backend, and the systems between them.
//!
//! Not here: what a call does (`system/`), how bytes move (`backend/`).

use crate::backend::{Backend, OpenBackend};
use crate::config::{EngineConfig, EngineShape};
use crate::error::{EngineError, Error};
use crate::event::Event;
use crate::hash::{NamespaceNames, PageHash};
use crate::id::{Namespace, PageId, SeqKey, StepId, TokenId};
use crate::plan::{
    Admission, Admitted, BatchPlan, Branch, Compaction, Draft, Extend, Leader, PackedLevels,
    PackedPlan, Prompt, StepEnd, StepScratch,
};
use crate::prefix::PrefixMatch;
use crate::sequence::Sequence;
use crate::stats::Stats;
use crate::system::abort::{Abort, abort};
use crate::system::accept::{Accept, accept, check_branches};
use crate::system::admit::{Admit, Estimate, admission, admit, admit_batch, resume};
use crate::system::append::{Append, append};
use crate::system::commit::{Commit, commit};
use crate::system::complete::{Complete, complete};
use crate::system::finish::{Finish, Keep, finish, preempt};
use crate::system::fork::{Fork, Forked, fork};
use crate::system::leader::{IsLeading, is_leading};
use crate::system::packed::{Packed, packed};
use crate::system::packed_levels::packed_levels;
use crate::system::plan_batch::{PlanBatch, extend_max, plan_batch};
use crate::system::promise::{Promise, promise};
use crate::system::reset::{Reset, reset};
use crate::system::rollback::{Rollback, rollback};
use crate::world::{Broken, Buffers, World};

/// The KV-cache core of one scheduler: which tokens need computing, where their K and V go, and who may reuse what.
///
/// `Send`; its calls come from one thread at a time. An error leaves the state as it was, unless a method says more.
pub struct Engine<B> {
    config: EngineConfig,
    world: World,
    backend: B,
}

impl<B: Backend> Engine<B> {
    /// Takes all memory that the config asks for, on the host and from the backend. A `PoolConfig` is a config too.
    ///
    /// # Errors
    /// [`EngineError::Config`], with [`ConfigError::OutOfMemory`](crate::ConfigError::OutOfMemory) where the host does
    /// not give the tables' memory; [`EngineError::Backend`].
    ///
    /// A system that over-commits may give more than it has, and end the process without an error when the memory is
    /// touched: here if `prefault` is set (which asks for all of it in one piece first, so that what is more than the
    /// machine has is refused on most systems), else in some later step. A pool of [`Cpu`](crate::Cpu) is touched as
    /// pages are first written.
    pub fn new(
        config: impl Into<EngineConfig>,
        backend: impl OpenBackend<Backend = B>,
    ) -> Result<Self, EngineError<B::Error>> {
        Self::with_hash_bits(config, backend, u32::BITS)
    }

    /// [`Engine::new`] that uses so many bits of the child table's hashes: fewer than 32 only in tests, to force
    /// collisions, the same ones in every process.
    pub(crate) fn with_hash_bits(
        config: impl Into<EngineConfig>,
        backend: impl OpenBackend<Backend = B>,
        hash_bits: u32,
    ) -> Result<Self, EngineError<B::Error>> {
        let config = config.into();
        let shape = config.shape()?;
        let backend = backend.open(&shape.layout, &shape.table, shape.max_steps);
        let backend = backend.map_err(EngineError::Backend)?;
        Ok(Self { config, world: World::new(&shape, hash_bits)?, backend })
    }

    /// The config it was made with.
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// The checked sizes; what another rank's backend is opened with.
    pub fn shape(&self) -> &EngineShape {
        &self.world.shape
    }

    /// The backend.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// The backend, to store and attend.
    pub fn backend_mut(&mut self) -> &mut B {
        &mut self.backend
    }

    /// The tables, for audits and benches: what they are made of may change.
    #[doc(hidden)]
    pub fn world(&self) -> &World {
        &self.world
    }

    /// The prefix that a prompt would use if admitted now: whole pages of all but its last token. Changes nothing, not
    /// even recency: for schedulers that order prompts by what is cached. It ends before a page with
    /// [`TokenId::PENDING`], which no sequence has. O(tokens matched).
    pub fn match_prefix(&self, namespace: Namespace, prompt: &[TokenId]) -> PrefixMatch {
        let found =
            if self.world.shape.finds_prefixes() { prompt.len().saturating_sub(1) } else { 0 };
        let tokens = &prompt[..found];
        self.world.prefixes.match_prefix(namespace, tokens)
    }

    /// The longest cached prefix of a chain of hashes, for callers that have no tokens: the cache as one of blocks by
    /// chained hashes. The present generation's prefixes match, of whichever namespace the hashes are. 0 pages where
    /// pages are not hashed ([`EngineConfig::hashing`]). Changes nothing. O(hashes matched).
    ///
    /// The answer trusts the hashes, so it is as good as their recipe is; nothing else in the engine does.
    pub fn match_hashes(&self, chain: &[PageHash]) -> PrefixMatch {
        self.match_hashed_pages(chain, |_| ())
    }

    /// [`Engine::match_hashes`] that also hands the matched pages over, in order, piece by piece. O(hashes matched).
    pub fn match_hashed_pages(
        &self,
        chain: &[PageHash],
        each: impl FnMut(&[PageId]),
    ) -> PrefixMatch {
        self.world.prefixes.match_hashes(chain, each)
    }

    /// Says what a namespace is called by those who know prefixes by hashes, once, before its first prompt, until it is
    /// [forgotten](Engine::forget_namespace). Does nothing where pages are not hashed. The default namespace has no
    /// names and needs none. O(names).
    ///
    /// # Errors
    /// [`Error::NamespaceNamed`] if it is called something else already, [`Error::NamesTaken`] if another namespace has
    /// these names as far as they enter the hashes of [`EngineConfig::hashing`]; some recipes hear none.
    pub fn name_namespace(
        &mut self,
        namespace: Namespace,
        names: NamespaceNames,
    ) -> Result<(), Error> {
        self.world.prefixes.name(namespace, names)
    }

    /// Forgets the names of a namespace, so that a salt for each request does not grow the table of names for ever.
    ///
    /// From now on [`admit`](Engine::admit) refuses its prompts ([`Error::UnnamedNamespace`]); its sequences go on. The
    /// table drops the names when the last of these is finished and the last cached page of the namespace is evicted.
    /// Until then no other namespace can take the names, and [`name_namespace`](Engine::name_namespace) with the same
    /// names undoes the call. Does nothing where pages are not hashed, nor to the default namespace. O(names).
    ///
    /// # Errors
    /// [`Error::UnnamedNamespace`] if the namespace has no names or is forgotten already.
    pub fn forget_namespace(&mut self, namespace: Namespace) -> Result<(), Error> {
        self.world.prefixes.forget_names(namespace)
    }

    /// Hands over what has happened to the cached prefixes since the last drain, in order: pages stored, parents first,
    /// pages removed, all cleared. Pages that are published again say nothing; neighbours are joined. Where more has
    /// happened than [`EngineConfig::event_pages`] has room for, all is cleared, and then what is cached now is stored,
    /// straight from the tree. So an index that is built from events alone is always right once a drain has ended.
    /// Only the present generation is spoken of. Where the sink panics, the next drain is as after an overflow.
    /// O(pages of the events), after an overflow O(tree).
    pub fn drain_events(&mut self, sink: impl FnMut(Event<'_>)) {
        self.world.prefixes.drain_events(sink);
    }

    /// The next [drain](Engine::drain_events) begins anew, as after an overflow: for somebody who has just begun to
    /// listen, or has lost track. O(1).
    pub fn restate_events(&mut self) {
        self.world.prefixes.restate_events();
    }

    /// What admitting a prompt now would take, whether or when it fits, and who is computing what it needs: for
    /// schedulers that ask before they admit. Changes nothing, not even recency. O(prompt), and where it does not fit
    /// O(unfinished steps and prefix nodes).
    ///
    /// Where a [leader](Admission::leader) is named, a prompt that waits until [it leads no more](Engine::is_leading)
    /// finds what it has computed: of many equal prompts that arrive at a cold server one computes, and the others wait
    /// a step or two. None waits for ever as long as the host plans running sequences: who is finished, preempted,
    /// rolled back or done leads nobody.
    ///
    /// # Errors
    /// As [`Engine::admit`], but for [`Error::OutOfPages`].
    pub fn admission(
        &self,
        namespace: Namespace,
        prompt: &[TokenId],
        promise: u32,
    ) -> Result<Admission, Error> {
        admission(&Estimate::of(&self.world), namespace, prompt, promise)
    }

    /// Admits a prompt: matches, locks what matched, takes a row, and no pages. Of its tokens
    /// [`cached_len`](Engine::cached_len) need no computing. O(prompt), and the first plan of it sends its whole page
    /// table: [`Engine::plan_batch`].
    ///
    /// `promise`: how many tokens of K and V it is promised room for in all, those of the prompt and of the output.
    /// What is found in the cache needs no more room, so the promise is of the pages for the rest of the prompt and the
    /// output; the last token sampled needs none. 0, or no more than is cached, promises nothing: the sequence takes
    /// what is there when it is planned, and may have to be preempted for others.
    ///
    /// Promised pages are in no list: [`available`](Engine::available) leaves them out, so that nobody else takes them,
    /// and plans of the sequence draw on them first. What an abort or a rollback gives up of them is promised again. So
    /// a plan that asks for no more than is promised is refused for want of pages only while pages wait in the fence,
    /// until the step that the error names is complete; never for good. Beyond the promise it takes what nobody is
    /// promised. What is not drawn returns when the sequence is finished or preempted, or by
    /// [`promise`](Engine::promise). The promise is of pages: the limits of the config on tokens and steps are as they
    /// were.
    ///
    /// # Errors
    /// [`Error::EmptyPrompt`], [`Error::TooLong`] (the prompt or the promise), [`Error::UnnamedNamespace`] where pages
    /// are hashed, [`Error::PendingToken`], [`Error::OutOfSequences`], [`Error::OutOfTokens`], [`Error::OutOfPages`] if
    /// the rest of the prompt or of the promise cannot fit now.
    pub fn admit(
        &mut self,
        namespace: Namespace,
        prompt: &[TokenId],
        promise: u32,
    ) -> Result<SeqKey, Error> {
        let admitted = admit(Admit::of(&mut self.world), namespace, prompt, promise);
        self.world.counters.count_refusal(admitted)
    }

    /// Admits prompts in order, all or none, as [`Engine::admit`] would each, if what all of them lack fits together.
    /// Each is answered with the sequence that leads it, which may be one before it in the batch. O(all prompts), and
    /// where they do not fit that for each unfinished step.
    ///
    /// To let a prompt wait for its leader, [preempt](Engine::preempt) it before its first plan, and
    /// [resume](Engine::resume) it when [the leader leads no more](Engine::is_leading). It has computed nothing, keeps
    /// its row and its tokens, and finds what the leader computed. [`Stats`] counts it as one prompt:
    /// [`guide::scheduling`](crate::guide::scheduling) has the program.
    ///
    /// # Errors
    /// As [`Engine::admit`]: of the first prompt that is wrong, or for want of room for all of them. Nothing has
    /// changed.
    pub fn admit_batch(&mut self, prompts: &[Prompt<'_>]) -> Result<&[Admitted], Error> {
        let admitted = admit_batch(Admit::of(&mut self.world), prompts);
        self.world.counters.count_refusal(admitted)?;
        Ok(&self.world.buffers.admitted)
    }

    /// Whether a leader is still on its way to the tokens that it was named for. It is not once its sequence has
    /// forgotten one of them, whatever was appended since. O(1).
    ///
    /// The answer is never true too long. It is false too early in one case: the sequence was cut below these tokens
    /// before it was named, and is cut behind them afterwards. [`admission`](Engine::admission) then names it again.
    pub fn is_leading(&self, leader: &Leader) -> bool {
        is_leading(&IsLeading::of(&self.world), leader)
    }

    /// Promises a running sequence room for so many tokens in all, in place of what it was promised: as
    /// [`admit`](Engine::admit) does. 0 gives back what is not drawn. O(1).
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::Preempted`], [`Error::TooLong`], [`Error::OutOfPages`] if the pages beyond
    /// the promise before cannot be had now.
    pub fn promise(&mut self, seq: SeqKey, len: u32) -> Result<(), Error> {
        let promised = promise(Promise::of(&mut self.world), seq, len);
        self.world.counters.count_refusal(promised)
    }

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

    /// Appends tokens to a sequence: sampled, drafted, or the next turn of a conversation. May come after the
    /// `plan_batch` that reserved their places, and after its commit. O(tokens).
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::TooLong`], [`Error::PendingToken`], [`Error::OutOfTokens`].
    pub fn append(&mut self, seq: SeqKey, tokens: &[TokenId]) -> Result<(), Error> {
        append(Append::of(&mut self.world), seq, tokens)
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

    /// Finishes a sequence: its whole computed pages stay for the next request, the rest is released. Legal while an
    /// unfinished step includes it; that step's commit skips it. O(pages released, and prefix nodes that nobody uses
    /// from now on: [`Engine::complete`]).
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn finish(&mut self, seq: SeqKey) -> Result<(), Error> {
        self.finish_with(seq, Keep::Publish)
    }

    /// [`Engine::finish`] that says what becomes of computed pages not yet published: [`Keep::Drop`] for a request
    /// whose K and V are not to be trusted.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn finish_with(&mut self, seq: SeqKey, keep: Keep) -> Result<(), Error> {
        finish(Finish::of(&mut self.world), seq, keep)
    }

    /// Preempts a sequence: it gives its pages up and keeps its tokens and its row, to be [resumed](Engine::resume).
    /// O(pages released, and prefix nodes that nobody uses from now on: [`Engine::complete`]).
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::Preempted`], [`Error::NotAccepted`].
    pub fn preempt(&mut self, seq: SeqKey, keep: Keep) -> Result<(), Error> {
        preempt(Finish::of(&mut self.world), seq, keep)
    }

    /// Admits a preempted sequence again with all the tokens it has; `promise` as in [`admit`](Engine::admit).
    /// O(tokens), and its next plan sends its whole page table: [`Engine::plan_batch`].
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::NotPreempted`], [`Error::TooLong`] (the promise), [`Error::OutOfPages`] if
    /// the rest of the tokens or of the promise cannot fit now.
    pub fn resume(&mut self, seq: SeqKey, promise: u32) -> Result<(), Error> {
        let resumed = resume(Admit::of(&mut self.world), seq, promise);
        self.world.counters.count_refusal(resumed)
    }

    /// `count` sequences with the same past, all or none: computed whole pages are shared, a partly filled tail page is
    /// copied on the backend for each, all in one step. The children know all tokens of their parent; `promise`, as in
    /// [`admit`](Engine::admit), is made to each of them. O(tokens) for each child, and its first plan sends a word for
    /// each 1,024 tokens or so of what they share, and the pages of the rest.
    ///
    /// # Errors
    /// [`EngineError::Core`] with [`Error::UnknownSequence`], [`Error::Preempted`], [`Error::NotAccepted`],
    /// [`Error::TooLong`] (the promise), [`Error::OutOfSequences`], [`Error::OutOfTokens`], [`Error::OutOfSteps`] or
    /// [`Error::OutOfPages`]: nothing has changed. [`EngineError::Backend`] if the copies failed: there is no child;
    /// their pages return with the step of the copies, which is the newest, and the parent's computed pages stay
    /// published.
    pub fn fork(
        &mut self,
        seq: SeqKey,
        count: u32,
        promise: u32,
    ) -> Result<Forked<'_>, EngineError<B::Error>> {
        let step = fork(Fork::of(&mut self.world), seq, count, promise);
        let step = self.world.counters.count_refusal(step)?;
        if step.is_some()
            && let Err(error) = self.backend.copy_pages(&self.world.buffers.copies)
        {
            while let Some(child) = self.world.buffers.children.pop() {
                self.finish_with(child, Keep::Drop).expect("the child was just made");
            }
            return Err(EngineError::Backend(error));
        }
        self.world.counters.forks += u64::from(count);
        let Buffers { children, copies, .. } = &self.world.buffers;
        Ok(Forked { children, copies, step })
    }

    /// Cuts a sequence to `len` tokens: rejected drafts, an edited turn. Unfinished steps count no further than that.
    /// Roll drafts back before the commit that would publish them, and append before planning on. O(pages released).
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::NotAccepted`], [`Error::RollbackLen`] for 0, for less than what is
    /// published, or past the tokens.
    pub fn rollback(&mut self, seq: SeqKey, len: u32) -> Result<(), Error> {
        rollback(Rollback::of(&mut self.world), seq, len)
    }

    /// Drops every idle prefix; those in use match no more and go with their last user. For a host that changes the
    /// model's weights. O(idle pages).
    pub fn reset(&mut self) {
        reset(Reset::of(&mut self.world));
    }

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

    /// The newest step, planned or aborted; 0 if there was none. After a backend's error it is the one that failed,
    /// which is to be completed like any other.
    pub fn newest_step(&self) -> StepId {
        self.world.steps.newest()
    }

    /// Pages that a sequence is promised and has not drawn. Its plans may take these, and what is
    /// [available](Engine::available).
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn promised(&self, seq: SeqKey) -> Result<u32, Error> {
        Ok(self.world.sequences.undrawn(self.sequence(seq)?))
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

    /// Counters and levels. O(1).
    pub fn stats(&self) -> Stats {
        let World { pages, prefixes, sequences, steps, counters, .. } = &self.world;
        let size = prefixes.size_info();
        Stats {
            published_pages: prefixes.published_pages(),
            duplicate_pages: prefixes.duplicate_pages(),
            free_pages: pages.free_count(),
            private_pages: pages.private_count(),
            cached_pages: pages.cached_count(),
            fenced_pages: pages.fenced_count(),
            promised_pages: sequences.promised(),
            evictable_pages: size.evictable,
            protected_pages: size.protected,
            sequences: sequences.len(),
            steps: steps.len(),
            ..*counters
        }
    }

    /// Audits the whole state. O(everything): for tests and debugging.
    ///
    /// # Errors
    /// The first broken invariant, and whose page shows it.
    pub fn verify(&self) -> Result<(), Broken> {
        self.world.verify()
    }
}

#[cfg(test)]
mod tests;
