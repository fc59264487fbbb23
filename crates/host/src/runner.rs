//! The trait `Runner`: the interface between the serving loop and the CPU (`cpu.rs`) or a GPU (`gpu/runner.rs`).

use kvarena::plan::{OwnedPlan, PlanSize};
use kvarena::{Backend, Extend};

use crate::clock::Clock;
use crate::config::ModelConfig;
use crate::error::Result;
use crate::sample::{self, Sampling};
use crate::shaping::{self, Edit, Edits};

/// A token to choose in a step.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Draw {
    /// Index of the preceding token in the step.
    pub row: usize,
    /// The sampling parameters.
    pub sampling: Sampling,
    /// Index of the sample within its request.
    pub sample: u32,
    /// Index of the token among the sample's new tokens.
    pub index: u32,
    /// Edits of the logits before the choice.
    pub edits: Edits,
}

impl Draw {
    /// Returns the key of the noise. A shaped draw may have a single allowed token, whose noise must be finite.
    pub fn key(&self) -> u64 {
        let key = self.sampling.key(self.sample, self.index);
        if self.is_shaped() { sample::finite(key) } else { key }
    }

    /// Returns whether edits or min-p change the logits.
    pub fn is_shaped(&self) -> bool {
        !self.edits.is_none() || (self.sampling.temperature > 0.0 && self.sampling.min_p > 0.0)
    }
}

/// A planned step.
#[derive(Default)]
pub struct Work {
    /// The plan, including padding.
    pub plan: OwnedPlan,
    /// Input tokens. The value -1 - i stands for the token that draw i of the previous step chooses.
    pub inputs: Vec<i32>,
    /// The tokens to choose.
    pub draws: Vec<Draw>,
    /// The edits of all draws.
    pub edits: Vec<Edit>,
}

impl Work {
    /// Returns whether the edits of a draw forbid its token. A runner chooses such a token if the edits allow none.
    pub fn forbids(&self, draw: usize, token: u32) -> bool {
        let Edits { start, count, only } = self.draws[draw].edits;
        shaping::forbids(&self.edits[start as usize..][..count as usize], only, token)
    }
}

/// Computes planned steps in the order in which they are launched.
pub trait Runner {
    /// The backend that stores K and V.
    type Backend: Backend;

    /// Returns the model's shape.
    fn config(&self) -> &ModelConfig;

    /// Returns the padded size of a step of these items, if it is padded.
    fn step_size(&self, _items: &[Extend]) -> Option<PlanSize> {
        None
    }

    /// Prepares for a step. The caller then plans the step, and planning sends the plan to the backend.
    ///
    /// # Errors
    /// The run failed.
    fn before_plan(&mut self) -> Result<()> {
        Ok(())
    }

    /// Starts a step that the backend has begun. May return before the step is done.
    ///
    /// # Errors
    /// The step cannot be started, which ends the run.
    fn launch(&mut self, backend: &mut Self::Backend, work: &Work, clock: &mut Clock) -> Result<()>;

    /// Waits for the oldest launched step that was not collected, and writes its chosen tokens to `tokens`. If `fail`
    /// is set, the call returns an injected failure.
    ///
    /// # Errors
    /// The step failed; the caller aborts it and all later steps.
    fn collect(
        &mut self,
        backend: &mut Self::Backend,
        work: &Work,
        fail: bool,
        tokens: &mut Vec<u32>,
        clock: &mut Clock,
    ) -> Result<()>;

    /// Waits for all launched steps and discards them.
    ///
    /// # Errors
    /// The run failed.
    fn settle(&mut self, backend: &mut Self::Backend) -> Result<()>;

    /// Returns the maximum number of draws of a step. The loop launches no larger step, and rejects requests with more
    /// samples. This maximum is larger than the number of a stream's drafts.
    fn draws_max(&self) -> usize {
        usize::MAX
    }

    /// Returns the maximum number of edits of a step. The loop launches no larger step, and rejects a request if one of
    /// its draws may need more. At 0, the loop rejects all requests with a shaping or with `min_p`.
    fn edits_max(&self) -> usize {
        0
    }

    /// Returns whether the runner keeps logits.
    fn keeps_logits(&self) -> bool;

    /// Returns the logits of a draw of the last collected step; empty if they were not kept.
    fn logits(&self, draw: usize) -> &[f32];
}
