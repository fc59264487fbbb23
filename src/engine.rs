//! The host's API: one engine is the tables, a backend and the systems between them.
//!
//! SKELETON: signatures are final unless building teaches better; bodies land soon.

use crate::backend::Backend;
use crate::config::{EngineConfig, EngineShape};
use crate::error::{EngineError, Error};
use crate::id::{Namespace, PageId, SeqKey, StepId, TokenId};
use crate::plan::{BatchPlan, Extend, PackedPlan, PageCopy, StepScratch};

/// What [`Engine::match_prefix`] found. Stays valid until the tree changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PrefixMatch {
    pages: u32,
}

impl PrefixMatch {
    /// Whole pages matched.
    pub fn pages(&self) -> u32 {
        self.pages
    }
}

/// A child that [`Engine::fork`] made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Forked {
    /// The new sequence.
    pub child: SeqKey,
    /// The copy of the partly filled tail page, if there is one. The engine's own backend has been told already; other
    /// ranks' backends need `copy_pages` too.
    pub copy: Option<PageCopy>,
    /// The copy's step, to be completed like any other (committed already); none without a copy.
    pub step: Option<StepId>,
}

/// What becomes of a preempted sequence's computed pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Keep {
    /// Whole computed pages stay matchable until evicted.
    Publish,
    /// What is not published yet is dropped.
    Drop,
}

/// Counters and levels of an engine, all O(1) to read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stats {
    /// Tokens of admitted and resumed prompts that needed no computing.
    pub hit_tokens: u64,
    /// Tokens whose K and V were computed, by committed steps.
    pub computed_tokens: u64,
    /// Pages evicted from the tree for new ones.
    pub evicted_pages: u64,
    /// Pages free now.
    pub free_pages: u32,
    /// Pages that belong to one sequence.
    pub private_pages: u32,
    /// Pages in the tree, evictable and protected.
    pub cached_pages: u32,
    /// Pages given up that an unfinished step may still touch.
    pub fenced_pages: u32,
    /// Pages of the tree that nobody uses.
    pub evictable_pages: u32,
    /// Pages of the tree that running sequences use.
    pub protected_pages: u32,
    /// Sequences, preempted ones included.
    pub sequences: u32,
    /// Steps planned and not complete.
    pub steps: u32,
}

/// The KV-cache core of one scheduler: tables, systems, and one backend.
pub struct Engine<B> {
    backend: B,
}

#[allow(unused, missing_docs, clippy::missing_errors_doc)]
impl<B: Backend> Engine<B> {
    pub fn new(config: impl Into<EngineConfig>, backend: B) -> Result<Self, EngineError<B::Error>> {
        todo!()
    }
    pub fn shape(&self) -> &EngineShape {
        todo!()
    }
    pub fn backend(&self) -> &B {
        &self.backend
    }
    pub fn backend_mut(&mut self) -> &mut B {
        &mut self.backend
    }
    /// Longest cached prefix of all but the last token; changes nothing.
    pub fn match_prefix(&self, namespace: Namespace, prompt: &[TokenId]) -> PrefixMatch {
        todo!()
    }
    /// Match, lock, take a row. Takes no pages. `cached_len(seq)` tokens need no computing.
    pub fn admit(&mut self, namespace: Namespace, prompt: &[TokenId]) -> Result<SeqKey, Error> {
        todo!()
    }
    /// As `admit`, with a match made before; `Error::Stale` if the tree changed since.
    pub fn admit_match(
        &mut self,
        found: &PrefixMatch,
        namespace: Namespace,
        prompt: &[TokenId],
    ) -> Result<SeqKey, Error> {
        todo!()
    }
    /// Takes pages (evicting exactly the shortage), writes the plan into `scratch`, tells the backend (`begin`).
    /// On a backend error the step is aborted.
    pub fn plan_batch<'step>(
        &mut self,
        scratch: &'step mut StepScratch,
        items: &[Extend],
    ) -> Result<BatchPlan<'step>, EngineError<B::Error>> {
        todo!()
    }
    /// The batch in FlashInfer's contract; call right after plan_batch.
    pub fn packed<'step>(
        &self,
        items: &[Extend],
        scratch: &'step mut StepScratch,
    ) -> Result<PackedPlan<'step>, Error> {
        todo!()
    }
    /// Adds tokens to a sequence: sampled, drafted, or the user's next turn.
    pub fn append(&mut self, seq: SeqKey, tokens: &[TokenId]) -> Result<(), Error> {
        todo!()
    }
    /// cached_len advances; whole pages become matchable. In order of planning.
    pub fn commit(&mut self, step: StepId) -> Result<(), Error> {
        todo!()
    }
    /// All steps up to this one are done on all streams and ranks; fenced pages return.
    pub fn complete(&mut self, step: StepId) -> Result<(), Error> {
        todo!()
    }
    /// Undoes a planned step and all planned after it.
    pub fn abort(&mut self, step: StepId) -> Result<(), Error> {
        todo!()
    }
    /// Publishes whole computed pages, gives up the rest; legal while a step with it is in flight.
    pub fn finish(&mut self, seq: SeqKey) -> Result<(), Error> {
        todo!()
    }
    pub fn preempt(&mut self, seq: SeqKey, keep: Keep) -> Result<(), Error> {
        todo!()
    }
    pub fn resume(&mut self, seq: SeqKey) -> Result<(), Error> {
        todo!()
    }
    pub fn fork(&mut self, seq: SeqKey) -> Result<Forked, EngineError<B::Error>> {
        todo!()
    }
    /// Forgets tokens past `len`.
    pub fn rollback(&mut self, seq: SeqKey, len: u32) -> Result<(), Error> {
        todo!()
    }
    /// Drops every idle prefix; locked ones stop matching.
    pub fn reset(&mut self) {
        todo!()
    }
    /// Tokens with K and V (committed).
    pub fn cached_len(&self, seq: SeqKey) -> Result<u32, Error> {
        todo!()
    }
    /// cached_len plus what unfinished plans will add.
    pub fn planned_len(&self, seq: SeqKey) -> Result<u32, Error> {
        todo!()
    }
    /// Known tokens.
    pub fn token_count(&self, seq: SeqKey) -> Result<u32, Error> {
        todo!()
    }
    pub fn tokens(&self, seq: SeqKey) -> Result<impl Iterator<Item = TokenId> + '_, Error> {
        Ok(std::iter::empty())
    }
    pub fn page_table(&self, seq: SeqKey) -> Result<impl Iterator<Item = PageId> + '_, Error> {
        Ok(std::iter::empty())
    }
    /// Pages that a plan could take now: free and evictable.
    pub fn available(&self) -> u32 {
        todo!()
    }
    /// Pages that a plan could take once `step` is complete.
    pub fn available_after(&self, step: StepId) -> u32 {
        todo!()
    }
    pub fn stats(&self) -> Stats {
        todo!()
    }
}
