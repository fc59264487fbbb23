//! Calls about one request: admission, growth, forks, preemption and the end.

use crate::backend::Backend;
use crate::error::{EngineError, Error};
use crate::id::{Namespace, SeqKey, TokenId};
use crate::plan::{Admission, Admit, Admitted, Forked, Keep, Leader, Prompt};
use crate::system::admit::{Admitting, Estimate, admission, admit, admit_batch, resume};
use crate::system::append::{Append, append};
use crate::system::finish::{Finish, finish, preempt};
use crate::system::fork::{Fork, begin_fork, end_fork};
use crate::system::leader::{IsLeading, is_leading};
use crate::system::mark::{Mark, mark};
use crate::system::promise::{Promise, promise};
use crate::system::rollback::{Rollback, rollback};
use crate::world::Buffers;

use super::Engine;

/// Admission, growth, forks, preemption and the end of requests.
impl<B: Backend> Engine<B> {
    /// Returns the cost of admitting a prompt now: the pages it needs, whether and when they fit, and its leader.
    /// O(prompt); if it does not fit also O(unfinished steps, times the idle nodes and the tails of the match).
    ///
    /// Changes nothing, not even recency.
    ///
    /// The [leader](Admission::leader) is a running sequence that computes more of the prompt than is cached. A prompt
    /// that waits while [it is leading](Engine::is_leading) then finds these tokens in the cache. With groups of layers
    /// the host must also [mark](Engine::mark) the leader at [`cached_len`](Leader::cached_len). So a cold server
    /// computes one of many equal prompts, and the others wait for a step or two. No prompt waits forever if the host
    /// plans its running sequences: a sequence that is finished, preempted, cut or done leads no prompt.
    ///
    /// # Errors
    /// As [`Engine::admit`], except [`Error::OutOfPages`].
    pub fn admission(
        &self,
        namespace: Namespace,
        prompt: &[TokenId],
        terms: impl Into<Admit>,
    ) -> Result<Admission, Error> {
        admission(&Estimate::from(&self.world), &Prompt { namespace, tokens: prompt, admit: terms.into() })
    }

    /// Admits a prompt as a new sequence: matches and locks its cached prefix and takes a row, but no pages. O(prompt);
    /// more if it does not fit, as [`Engine::admission`].
    ///
    /// The first [`cached_len`](Engine::cached_len) tokens need no computing.
    ///
    /// [`promise`](Admit::promise) is a number of tokens, prompt and output together, for example
    /// `prompt.len() as u32`. It need not include the last
    /// sampled token, which needs no K and V. The engine reserves pages for the promised tokens that are not cached.
    /// Promise at least the prompt: without a promise, admissions count only pages that plans have taken, so a loop
    /// that admits prompts while they fit admits too many and must preempt them.
    ///
    /// [`available`](Engine::available) excludes promised pages, so no other sequence takes them. Plans of the sequence
    /// take promised pages first, then available ones. Pages that an abort or a rollback releases are promised again. A
    /// plan within the promise lacks pages only while pages wait in the fence, at most until the completion of the step
    /// that the error names. Unused promised pages return when the sequence is finished or preempted, or by
    /// [`promise`](Engine::promise). A promise covers pages alone: the config's limits on tokens and steps still apply.
    ///
    /// # Errors
    /// [`Error::EmptyPrompt`], [`Error::TooLong`] if the prompt or the promise does not fit even an empty pool,
    /// [`Error::UnnamedNamespace`] if pages are hashed, [`Error::PendingToken`], [`Error::OutOfSequences`],
    /// [`Error::OutOfTokens`]. [`Error::OutOfPages`] if the rest of the prompt or of the promise does not fit now.
    pub fn admit(
        &mut self,
        namespace: Namespace,
        prompt: &[TokenId],
        terms: impl Into<Admit>,
    ) -> Result<SeqKey, Error> {
        let prompt = Prompt { namespace, tokens: prompt, admit: terms.into() };
        let admitted = admit(Admitting::from(&mut self.world), &prompt);
        self.world.counters.count_refusal(admitted)
    }

    /// Admits prompts in order, all or none. O(all prompts), times the unfinished steps if they do not fit.
    ///
    /// There must be pages for all prompts together. The result contains the leader of each prompt, which may be an
    /// earlier prompt of the batch.
    ///
    /// To let a prompt wait for its leader, [preempt](Engine::preempt) it before its first plan, and
    /// [resume](Engine::resume) it when [`Engine::is_leading`] returns false. It keeps its row and its tokens, and then
    /// finds the leader's tokens in the cache. [`Stats`](crate::stats::Stats) counts it as one prompt.
    /// [`guide::scheduling`](crate::guide::scheduling) has the program.
    ///
    /// # Errors
    /// As [`Engine::admit`]: for the first invalid prompt, or a [shortage](Error::is_shortage) for all
    /// prompts together.
    pub fn admit_batch(&mut self, prompts: &[Prompt<'_>]) -> Result<&[Admitted], Error> {
        let admitted = admit_batch(Admitting::from(&mut self.world), prompts);
        self.world.counters.count_refusal(admitted)?;
        Ok(&self.world.buffers.admitted)
    }

    /// Returns whether a leader will still publish the tokens for which it was named. O(1).
    ///
    /// Returns false once the leader's sequence has dropped one of these tokens, whatever the host appends later. May
    /// return false too early: if the sequence had dropped such tokens before it was named, a later drop of other
    /// tokens also ends its lead. [`admission`](Engine::admission) then names it again.
    pub fn is_leading(&self, leader: &Leader) -> bool {
        is_leading(&IsLeading::from(&self.world), leader)
    }

    /// Replaces a running sequence's promise by one of `len` tokens in total, as in [`admit`](Engine::admit). O(1), or
    /// O(unfinished steps) if the pages do not fit.
    ///
    /// 0 returns the unused promised pages.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::Preempted`], [`Error::TooLong`]. [`Error::OutOfPages`] if the pages beyond
    /// the earlier promise do not fit now.
    pub fn promise(&mut self, seq: SeqKey, len: u32) -> Result<(), Error> {
        let promised = promise(Promise::from(&mut self.world), seq, len);
        self.world.counters.count_refusal(promised)
    }

    /// Appends tokens to a sequence: sampled tokens, drafts, or the next turn of a conversation. O(tokens).
    ///
    /// The host may call it before or after the plan that reads the tokens, and before or after the commit of the step
    /// that sampled them. The sequence may be preempted: a token that an unfinished step sampled arrives late.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::TooLong`], [`Error::PendingToken`], [`Error::OutOfTokens`].
    pub fn append(&mut self, seq: SeqKey, tokens: &[TokenId]) -> Result<(), Error> {
        append(Append::from(&mut self.world), seq, tokens)
    }

    /// Forks a sequence into `count` more sequences with the same tokens, all or none. O(tokens) for each child.
    ///
    /// Parent and children share the computed whole pages. Tokens count as computed once their step is committed. Each
    /// child computes the tokens of the parent's open steps again, so commit these steps first. The backend copies a
    /// partly filled last page for each child, all in one step.
    ///
    /// Each child has all known tokens of its parent, and the `promise` as in [`admit`](Engine::admit). Its first plan
    /// sends about one word for each 1,024 shared tokens, and the words of its other pages.
    ///
    /// # Errors
    /// [`EngineError::Core`] with [`Error::UnknownSequence`], [`Error::Preempted`], [`Error::NotAccepted`],
    /// [`Error::TooLong`] (the promise), [`Error::OutOfSequences`], [`Error::OutOfTokens`], [`Error::OutOfSteps`] or
    /// [`Error::OutOfPages`]: nothing has changed, but pages that the parent waited for stay loaded.
    /// [`EngineError::Backend`] if this load failed: there is no new step. [`EngineError::Backend`] if the copies
    /// failed: there are no children, and their pages return when the newest step, that of the copies, is complete. The
    /// parent's computed pages stay published.
    pub fn fork(&mut self, seq: SeqKey, count: u32, promise: u32) -> Result<Forked<'_>, EngineError<B::Error>> {
        if self.world.prefixes.has_swap() {
            self.load_waiting(&mut std::iter::once(seq))?;
        }
        let begun = begin_fork(Fork::from(&mut self.world), seq, count, promise);
        let parts = self.world.counters.count_refusal(begun)?;
        if self.world.prefixes.has_swap() {
            self.flush_saves();
        }
        let step = parts.and_then(|parts| end_fork(Fork::from(&mut self.world), seq, &parts));
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

    /// Cuts a sequence to its first `len` tokens, for example to drop rejected drafts. O(pages released and unfinished
    /// steps).
    ///
    /// A later commit of an unfinished step counts only the sequence's tokens before `len`. Roll drafts back before the
    /// commit that would publish them, and append before the next plan.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::NotAccepted`]. [`Error::RollbackLen`] for 0, for less than the tokens
    /// of the published and pending pages, or for more than the known tokens.
    pub fn rollback(&mut self, seq: SeqKey, len: u32) -> Result<(), Error> {
        rollback(Rollback::from(&mut self.world), seq, len)
    }

    /// Adds a place where prompts can match: the end of the whole pages among a running sequence's first `len` tokens.
    /// O(pages kept).
    ///
    /// With [groups of layers](crate::layout::Groups), a prompt matches only at places where the cache has the pages
    /// that the next token reads in every group. The engine keeps these pages at the end of a sequence's prompt, where
    /// the prompt diverges from a cached one, and at the end of the sequence. The host marks other places: the end of a
    /// system prompt, or the [`cached_len`](Leader::cached_len) of a [leader](Admission::leader).
    ///
    /// A mark takes effect at the commit, fork, finish or preemption that publishes the last page before it; a mark at
    /// the end of the published pages takes effect at once. At most 4 marks wait, and a preemption drops the others. A
    /// mark keeps nothing while promises need the pages. Without groups of layers, and in
    /// [`PrefixMode::None`](crate::config::PrefixMode::None), marks have no effect.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::Preempted`], [`Error::MarkLen`] below the tokens of the published
    /// and pending pages, [`Error::OutOfMarks`].
    pub fn mark(&mut self, seq: SeqKey, len: u32) -> Result<(), Error> {
        mark(Mark::from(&mut self.world), seq, len)
    }

    /// Preempts a sequence: releases its pages, and keeps its tokens and its row for [`resume`](Engine::resume).
    /// O(pages published or released, and prefix nodes that become idle: [`Engine::complete`]).
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::Preempted`], [`Error::NotAccepted`].
    pub fn preempt(&mut self, seq: SeqKey, keep: Keep) -> Result<(), Error> {
        preempt(Finish::from(&mut self.world), seq, keep)
    }

    /// Admits a preempted sequence again with all its tokens; `terms` as in [`admit`](Engine::admit). O(tokens); more
    /// if they do not fit, as [`Engine::admission`].
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::NotPreempted`], [`Error::TooLong`]. [`Error::OutOfPages`] if
    /// the rest of the tokens or of the promise does not fit now.
    pub fn resume(&mut self, seq: SeqKey, terms: impl Into<Admit>) -> Result<(), Error> {
        let resumed = resume(Admitting::from(&mut self.world), seq, terms.into());
        self.world.counters.count_refusal(resumed)
    }

    /// Finishes a sequence: its whole computed pages stay cached, and the rest is released. O(pages published or
    /// released, and prefix nodes that become idle: [`Engine::complete`]).
    ///
    /// The host may call it while an unfinished step includes the sequence; the commit of that step skips the sequence.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn finish(&mut self, seq: SeqKey) -> Result<(), Error> {
        self.finish_with(seq, Keep::Publish)
    }

    /// Finishes a sequence, with a choice for the computed pages that are not published yet. [`Keep::Drop`] is for a
    /// request whose K and V may be wrong.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn finish_with(&mut self, seq: SeqKey, keep: Keep) -> Result<(), Error> {
        finish(Finish::from(&mut self.world), seq, keep)
    }
}
