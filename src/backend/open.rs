//! How backends come to be: a host says what it wants of one, an engine says for which pool.

use super::Backend;
use crate::layout::{PoolLayout, TableShape};

/// A backend that is still to be opened: what a host chooses of it, before pool and page tables are known.
///
/// [`CpuOptions`](crate::CpuOptions) opens a [`Cpu`](crate::Cpu), `CudaOptions` a `Cuda`, and [`Null`](crate::Null)
/// itself. [`Engine::new`](crate::Engine::new) takes one; who drives a backend without an engine calls
/// [`open`](OpenBackend::open).
pub trait OpenBackend {
    /// What is opened.
    type Backend: Backend;

    /// Takes the memory for a pool and its page tables, all of whose words are 0. At most `max_steps` steps will be
    /// open at a time.
    ///
    /// # Errors
    /// The backend's own. Nothing is kept.
    fn open(
        self,
        layout: &PoolLayout,
        table: &TableShape,
        max_steps: u32,
    ) -> Result<Self::Backend, <Self::Backend as Backend>::Error>;
}
