//! States of layers that keep one, such as Mamba or Gated DeltaNet: where a plan's rows read and write them.

use super::Backend;
use crate::plan::BatchPlan;

/// A backend with the bytes of states.
///
/// The page table words of a row contain the pages of the state that its items read and of the one that they write
/// ([`TableShape::state_word`](crate::layout::TableShape::state_word)). If they are equal, the state is updated in
/// place. Otherwise the state that is read must not change: it may be cached, and other rows may read it. A row of a
/// new sequence reads page 0, which is zero.
///
/// * B20. [`copy_states`](StateBackend::copy_states) makes the state that each row writes equal to the one that it
///   reads. Kernels that update states in place call it first; other kernels read one page and write the other.
/// * B21. A backend returns the states of the rows of any open plan, with the words that the rows had when the plan
///   began: `Cpu` their bytes (`Cpu::state`), `Cuda` the addresses of their slots (`Cuda::slots`).
/// * B22. A page that a row of a plan writes is neither read nor written by another row. No call writes page 0.
pub trait StateBackend: Backend {
    /// Copies the state of each row of a plan whose pages to read and to write differ (B20). O(pages copied).
    ///
    /// # Errors
    /// The backend's error, for example for a step that is not open.
    fn copy_states(&mut self, plan: &BatchPlan<'_>) -> Result<(), Self::Error>;
}
