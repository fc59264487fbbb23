//! The states of layers that keep one: the addresses for the host's kernels, and copies.

use super::driver::raw::is_capturing;
use super::error::CudaError;
use super::opened::Cuda;
use crate::backend::{Backend, StateBackend, check};
use crate::id::LayerId;
use crate::plan::BatchPlan;

/// Device addresses of the states of one layer, and of the slots of a plan's rows in them. A slot is a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct StateSlots {
    /// i32 `[rows]`: the slot that each row reads; 0, whose state is zero, for new sequences; -1 for padding.
    pub reads: u64,
    /// i32 `[rows]`: the slot that each row writes; -1 for padding.
    pub writes: u64,
    /// u32 `[rows + 1]`: the first token of each row, and the number of tokens.
    pub starts: u64,
    /// The layer's state in slot 0.
    pub states: u64,
    /// Bytes from slot to slot.
    pub stride: u64,
}

impl Cuda {
    /// Stages `plan`, and returns the states of a layer for the host's kernels (B21).
    ///
    /// The addresses depend only on the layer and on [`StagedPlan::graph`](super::StagedPlan::graph), so a graph may
    /// contain launches with them. Kernels that are submitted after this call may read and write the states.
    ///
    /// # Errors
    /// [`CudaError::Plan`] for a layer that does not exist or keeps no state. As [`Cuda::stage`].
    pub fn slots(&mut self, plan: &BatchPlan<'_>, layer: LayerId) -> Result<StateSlots, CudaError> {
        let layout = *self.layout();
        let place = check::state_layer(layer, &layout)?;
        let state = layout.state().expect("a layer keeps one");
        let image = self.stage(plan)?.image;
        let slots = |part: u32| image.states + u64::from(part * state.pages + place.track) * image.state_bytes;
        Ok(StateSlots {
            reads: slots(0),
            writes: slots(1),
            starts: image.states + 2 * u64::from(state.pages) * image.state_bytes,
            states: self.pool().address() + u64::from(place.lane) * state.lane_bytes,
            stride: layout.page_bytes(),
        })
    }
}

impl StateBackend for Cuda {
    /// # Errors
    /// [`CudaError::Plan`] for a step that is not open. [`CudaError::CapturedStates`] while the stream is captured. As
    /// [`copy_pages`](Backend::copy_pages).
    fn copy_states(&mut self, plan: &BatchPlan<'_>) -> Result<(), CudaError> {
        self.gpu.bind()?;
        self.check_open(plan)?;
        if is_capturing(self.stream.raw())? {
            return Err(CudaError::CapturedStates { step: plan.step });
        }
        let copies = self.stage.states.take_copies(plan);
        let result = self.copy_pages(&copies);
        self.stage.states.return_copies(copies);
        result
    }
}
