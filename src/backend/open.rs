//! [`OpenBackend`]: a host chooses a backend's options, and the engine opens the backend for its pool.

use super::Backend;
use crate::config::StepBounds;
use crate::layout::{PoolLayout, TableShape};

/// Options of a backend that is not open yet.
///
/// `CpuOptions` opens a `Cpu`, `CudaOptions` opens a `Cuda`, [`OutboxOptions`](crate::OutboxOptions) opens an
/// [`Outbox`](crate::Outbox), and [`Null`](crate::Null) opens itself. [`Engine::new`](crate::Engine::new) takes the
/// options. A host that drives a backend without an engine calls [`open`](OpenBackend::open).
pub trait OpenBackend: Sized {
    /// The backend that these options open.
    type Backend: Backend;

    /// Allocates a pool and its page tables, whose words are 0. `bounds` limits the steps; a number of steps suffices.
    ///
    /// # Errors
    /// The backend's error, after freeing all memory of the call.
    fn open(
        self,
        layout: &PoolLayout,
        table: &TableShape,
        bounds: impl Into<StepBounds>,
    ) -> Result<Self::Backend, <Self::Backend as Backend>::Error>;
}
