//! The seam to `kvarena`'s backends: how rows that the model computed on the host get to where K and V live.
//!
//! A backend takes rows in its own memory ([`Backend::Rows`]); the model has f32 slices. One implementation of
//! [`Memory`] for each backend bridges the two. Not here: what is attended to, which the plan says.

use std::fmt;

use kvarena::{Attend, Backend, BatchPlan, Cpu, LayerId};

use crate::model::Attention;

/// The error of a memory's backend.
pub type BackendError<M> = <<M as Memory>::Backend as Backend>::Error;

/// Carries rows between the host and a backend's memory.
pub trait Memory {
    /// Who holds K and V.
    type Backend: Backend;

    /// Stores a layer's K and V and attends: `q` and `out` are `[tokens, q_heads, head_dim]`, `k` and `v` are
    /// `[tokens, kv_heads, head_dim]`. `out` is filled when it returns.
    ///
    /// # Errors
    /// The backend's own.
    fn layer(
        &mut self,
        backend: &mut Self::Backend,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        attend: &Attend,
        qkv: [&[f32]; 3],
        out: &mut [f32],
    ) -> Result<(), BackendError<Self>>;
}

/// K and V on the host: rows are handed over as they are.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostMemory;

impl Memory for HostMemory {
    type Backend = Cpu;

    fn layer(
        &mut self,
        backend: &mut Cpu,
        plan: &BatchPlan<'_>,
        layer: LayerId,
        attend: &Attend,
        [q, k, v]: [&[f32]; 3],
        out: &mut [f32],
    ) -> Result<(), BackendError<Self>> {
        backend.store_cache(plan, layer, k.into(), v.into())?;
        backend.attend(plan, layer, attend, q.into(), out.into(), None)
    }
}

/// Why a step's computation ended early.
#[derive(Debug)]
pub enum StepError<E> {
    /// The backend failed.
    Backend(E),
    /// The user asked for a failure (`--fail-every`).
    Injected,
}

impl<E: fmt::Display> fmt::Display for StepError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Backend(error) => error.fmt(f),
            Self::Injected => f.write_str("a failure was asked for"),
        }
    }
}

/// Attention of one planned step over the pages of a backend.
pub struct Paged<'a, M: Memory> {
    /// Carries the rows.
    pub memory: &'a mut M,
    /// Holds the pages.
    pub backend: &'a mut M::Backend,
    /// The step.
    pub plan: BatchPlan<'a>,
    /// Heads and scale.
    pub attend: Attend,
    /// The layer after which the step is to fail, if any.
    pub fail_at: Option<usize>,
}

impl<M: Memory> Attention for Paged<'_, M> {
    type Error = StepError<BackendError<M>>;

    fn layer(
        &mut self,
        layer: usize,
        window: Option<u32>,
        qkv: [&[f32]; 3],
        out: &mut [f32],
    ) -> Result<(), Self::Error> {
        let attend = Attend { window, ..self.attend };
        self.memory
            .layer(self.backend, &self.plan, LayerId::new(layer as u32), &attend, qkv, out)
            .map_err(StepError::Backend)?;
        if self.fail_at == Some(layer) { Err(StepError::Injected) } else { Ok(()) }
    }
}
