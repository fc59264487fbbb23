//! The calls of one request: its sequence is admitted, grows, is forked, preempted, resumed and finished.

use crate::backend::Backend;
use crate::error::{EngineError, Error};
use crate::id::{Namespace, SeqKey, TokenId};
use crate::plan::{Admission, Admitted, Leader, Prompt};
use crate::system::admit::{Admit, Estimate, admission, admit, admit_batch, resume};
use crate::system::append::{Append, append};
use crate::system::finish::{Finish, Keep, finish, preempt};
use crate::system::fork::{Fork, Forked, fork};
use crate::system::leader::{IsLeading, is_leading};
use crate::system::promise::{Promise, promise};
use crate::system::rollback::{Rollback, rollback};
use crate::world::Buffers;

use super::Engine;

/// Requests: admission, growth, forks, preemption, the end.
impl<B: Backend> Engine<B> {
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

    /// Appends tokens to a sequence: sampled, drafted, or the next turn of a conversation. May come after the
    /// `plan_batch` that reserved their places, and after its commit. O(tokens).
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::TooLong`], [`Error::PendingToken`], [`Error::OutOfTokens`].
    pub fn append(&mut self, seq: SeqKey, tokens: &[TokenId]) -> Result<(), Error> {
        append(Append::of(&mut self.world), seq, tokens)
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
}
