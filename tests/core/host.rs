//! A host for tests: an engine, and calls that must succeed.

use std::fmt::Debug;
use std::ops::{Deref, DerefMut, Range};

use kvarena::backend::OpenBackend;
use kvarena::layout::Groups;
use kvarena::{
    Backend, Capacity, Engine, EngineConfig, EngineError, Error, Extend, Namespace, Null, PoolConfig, SeqKey, StepId,
    StepScratch, TokenId,
};

/// The namespace of prompts.
pub const ALL: Namespace = Namespace::new(0);

/// An engine, and a scratch for its plans.
pub struct Host<B = Null> {
    pub engine: Engine<B>,
    pub scratch: StepScratch,
}

impl<B> Deref for Host<B> {
    type Target = Engine<B>;

    fn deref(&self) -> &Engine<B> {
        &self.engine
    }
}

impl<B> DerefMut for Host<B> {
    fn deref_mut(&mut self) -> &mut Engine<B> {
        &mut self.engine
    }
}

impl Host {
    /// Creates an engine without K and V.
    pub fn null(config: impl Into<EngineConfig>) -> Self {
        Self::new(config, Null)
    }
}

impl<B: Backend<Error: Debug>> Host<B> {
    pub fn new(config: impl Into<EngineConfig>, backend: impl OpenBackend<Backend = B>) -> Self {
        Self { engine: Engine::new(config, backend).expect("a valid config"), scratch: StepScratch::new() }
    }

    /// Admits a prompt without a promise.
    pub fn begin(&mut self, prompt: &[TokenId]) -> SeqKey {
        self.admit(ALL, prompt, 0).expect("there is room")
    }

    /// Plans the next `len` tokens of a sequence.
    pub fn plan(&mut self, seq: SeqKey, len: u32) -> StepId {
        self.plan_all(&[Extend { seq, len }])
    }

    pub fn plan_all(&mut self, items: &[Extend]) -> StepId {
        self.engine.plan_batch(&mut self.scratch, items).expect("there is room").step()
    }

    /// Commits and completes a step.
    pub fn close(&mut self, step: StepId) {
        self.engine.commit(step).expect("it is open");
        self.engine.complete(step).expect("it is committed");
        self.check();
    }

    /// Completes all steps, which are committed.
    pub fn complete_all(&mut self) {
        self.engine.complete(self.engine.newest_step()).expect("it is committed");
        self.check();
    }

    /// Computes the next `len` tokens of a sequence.
    pub fn compute(&mut self, seq: SeqKey, len: u32) {
        let step = self.plan(seq, len);
        self.close(step);
    }

    /// Plans all tokens of a sequence that can be planned.
    pub fn plan_rest(&mut self, seq: SeqKey) -> StepId {
        let len = self.extend_max(seq).expect("it is live");
        self.plan(seq, len)
    }

    pub fn compute_rest(&mut self, seq: SeqKey) {
        let step = self.plan_rest(seq);
        self.close(step);
    }

    /// Admits and computes a prompt.
    pub fn prefill(&mut self, prompt: &[TokenId]) -> SeqKey {
        let seq = self.begin(prompt);
        self.compute_rest(seq);
        seq
    }

    /// Computes a prompt and leaves it in the cache.
    pub fn cache(&mut self, prompt: &[TokenId]) {
        let seq = self.prefill(prompt);
        self.finish(seq).expect("it is live");
    }

    /// Checks all invariants.
    pub fn check(&self) {
        self.engine.verify().expect("all invariants hold");
    }
}

/// Returns a pool for one layer of each kind in `groups`.
pub fn pool(page_size: u32, pages: u32, groups: Groups) -> PoolConfig {
    let capacity = Capacity::Pages(pages);
    PoolConfig { layers: groups.layers().max(1), groups, page_size, capacity, ..PoolConfig::default() }
}

/// Returns the tokens of these numbers.
pub fn text(numbers: Range<u32>) -> Vec<TokenId> {
    numbers.map(TokenId::new).collect()
}

/// Returns the error of a call whose backend does not fail.
pub fn core<E: Debug>(error: EngineError<E>) -> Error {
    match error {
        EngineError::Core(error) => error,
        other => panic!("{other:?}"),
    }
}
