//! The seam between the serving loop and whoever computes its steps: the CPU (`cpu.rs`) or a GPU (`gpu/runner.rs`).

use kvarena::{Backend, OwnedPlan};

use crate::clock::Clock;
use crate::config::ModelConfig;
use crate::error::Result;
use crate::sample::Sampling;
use crate::shaping::{Edit, Edits};

/// A token to choose in a step.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Draw {
    /// Which of the step's tokens it follows.
    pub row: usize,
    /// How to choose it.
    pub sampling: Sampling,
    /// Number of the sample among its request's.
    pub sample: u32,
    /// Number of the token among the sample's new ones.
    pub index: u32,
    /// What changes its logits first.
    pub edits: Edits,
}

impl Draw {
    /// Whether its logits are edited, or left out by min-p.
    pub fn is_shaped(&self) -> bool {
        !self.edits.is_none() || (self.sampling.temperature > 0.0 && self.sampling.min_p > 0.0)
    }
}

/// A planned step.
#[derive(Default)]
pub struct Work {
    /// Its sequences, positions and slots.
    pub plan: OwnedPlan,
    /// Its tokens: a token, or -1 - i for the one that the step before chooses as its draw i.
    pub inputs: Vec<i32>,
    /// The tokens to choose.
    pub draws: Vec<Draw>,
    /// Of all draws.
    pub edits: Vec<Edit>,
}

/// Computes planned steps in the order in which they are launched.
pub trait Runner {
    /// Who holds K and V.
    type Backend: Backend;

    /// The model's shape.
    fn config(&self) -> &ModelConfig;

    /// A step is about to be planned, which sends its plan to the backend.
    ///
    /// # Errors
    /// The run failed.
    fn before_plan(&mut self) -> Result<()> {
        Ok(())
    }

    /// Starts a step, which the backend has begun. It may return before the step is done.
    ///
    /// # Errors
    /// The step failed; it and all after it are to be aborted.
    fn launch(&mut self, backend: &mut Self::Backend, work: &Work, clock: &mut Clock)
    -> Result<()>;

    /// Waits for the oldest step that was launched and not collected, and gives the tokens it chose. With `fail`, the
    /// step fails halfway.
    ///
    /// # Errors
    /// The step failed; it and all after it are to be aborted.
    fn collect(
        &mut self,
        backend: &mut Self::Backend,
        work: &Work,
        fail: bool,
        tokens: &mut Vec<u32>,
        clock: &mut Clock,
    ) -> Result<()>;

    /// Waits for all that was launched, and forgets it.
    ///
    /// # Errors
    /// The run failed.
    fn settle(&mut self, backend: &mut Self::Backend) -> Result<()>;

    /// Most tokens that a step can choose; a step of more cannot be launched.
    fn draws_max(&self) -> usize {
        usize::MAX
    }

    /// Most edits that a step can have; a step of more cannot be launched, and a request that may need more is refused. 0:
    /// so are all requests with a shaping or with `min_p`.
    fn edits_max(&self) -> usize {
        0
    }

    /// Whether logits are kept.
    fn keeps_logits(&self) -> bool;

    /// The logits of a draw of the step collected last; empty where they were not kept.
    fn logits(&self, draw: usize) -> &[f32];
}
