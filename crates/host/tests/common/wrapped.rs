//! A CPU runner with the limits of a GPU, which may choose a fixed token.

use kvarena::Cpu;
use kvarena_host::clock::Clock;
use kvarena_host::config::ModelConfig;
use kvarena_host::cpu::CpuRunner;
use kvarena_host::error::Result;
use kvarena_host::model::Model;
use kvarena_host::runner::{Runner, Work};

pub struct Wrapped<'m> {
    pub inner: CpuRunner<'m>,
    /// Maximum number of edits and of draws of a step.
    pub edits: usize,
    pub draws: usize,
    /// The token that all draws choose.
    pub forced: Option<u32>,
}

impl<'m> Wrapped<'m> {
    pub fn new(model: &'m Model) -> Self {
        let (edits, draws) = (usize::MAX, usize::MAX);
        Self { inner: CpuRunner::new(model), edits, draws, forced: None }
    }

    pub fn with_edits(model: &'m Model, edits: usize) -> Self {
        Self { edits, ..Self::new(model) }
    }

    pub fn with_draws(model: &'m Model, draws: usize) -> Self {
        Self { draws, ..Self::new(model) }
    }
}

impl Runner for Wrapped<'_> {
    type Backend = Cpu;

    fn config(&self) -> &ModelConfig {
        self.inner.config()
    }

    fn launch(&mut self, backend: &mut Cpu, work: &Work, clock: &mut Clock) -> Result<()> {
        let (edits, draws) = (work.edits.len(), work.draws.len());
        assert!(edits <= self.edits, "{edits} edits, the limit is {}", self.edits);
        assert!(draws <= self.draws, "{draws} draws, the limit is {}", self.draws);
        self.inner.launch(backend, work, clock)
    }

    fn collect(
        &mut self,
        backend: &mut Cpu,
        work: &Work,
        fail: bool,
        tokens: &mut Vec<u32>,
        clock: &mut Clock,
    ) -> Result<()> {
        self.inner.collect(backend, work, fail, tokens, clock)?;
        self.forced.into_iter().for_each(|token| tokens.fill(token));
        Ok(())
    }

    fn settle(&mut self, backend: &mut Cpu) -> Result<()> {
        self.inner.settle(backend)
    }

    fn draws_max(&self) -> usize {
        self.draws
    }

    fn edits_max(&self) -> usize {
        self.edits
    }

    fn keeps_logits(&self) -> bool {
        self.inner.keeps_logits()
    }

    fn logits(&self, draw: usize) -> &[f32] {
        self.inner.logits(draw)
    }
}
