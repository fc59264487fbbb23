//! The host's API: [`Engine`] is the tables, a backend, and the systems between them.
//!
//! `requests`, `steps`, `cache` and `query` contain its calls.
//!
//! Not here: what a call does (`system/`), how bytes move (`backend/`).

mod cache;
mod query;
mod requests;
mod steps;

use crate::backend::{Backend, OpenBackend};
use crate::config::{EngineConfig, EngineShape};
use crate::error::EngineError;
use crate::stats::Stats;
use crate::world::{Broken, World};

/// The KV-cache core of one scheduler: which tokens need computing, where their K and V go, and who may reuse what.
///
/// `Send`; its calls come from one thread at a time. An error leaves the state as it was, unless a method says more.
pub struct Engine<B> {
    config: EngineConfig,
    world: World,
    backend: B,
}

/// Construction, parts and audits.
impl<B: Backend> Engine<B> {
    /// Takes all memory that the config asks for, on the host and from the backend. A `PoolConfig` is a config too.
    ///
    /// # Errors
    /// [`EngineError::Config`], with [`ConfigError::OutOfMemory`](crate::ConfigError::OutOfMemory) where the host does
    /// not give the tables' memory; [`EngineError::Backend`].
    ///
    /// A system that over-commits may give more than it has, and end the process without an error when the memory is
    /// touched: here if `prefault` is set (which asks for all of it in one piece first, so that what is more than the
    /// machine has is refused on most systems), else in some later step. A pool of [`Cpu`](crate::Cpu) is touched as
    /// pages are first written.
    pub fn new(
        config: impl Into<EngineConfig>,
        backend: impl OpenBackend<Backend = B>,
    ) -> Result<Self, EngineError<B::Error>> {
        Self::with_hash_bits(config, backend, u32::BITS)
    }

    /// [`Engine::new`] that uses so many bits of the child table's hashes: fewer than 32 only in tests, to force
    /// collisions, the same ones in every process.
    pub(crate) fn with_hash_bits(
        config: impl Into<EngineConfig>,
        backend: impl OpenBackend<Backend = B>,
        hash_bits: u32,
    ) -> Result<Self, EngineError<B::Error>> {
        let config = config.into();
        let shape = config.shape()?;
        let backend = backend.open(&shape.layout, &shape.table, shape.max_steps);
        let backend = backend.map_err(EngineError::Backend)?;
        Ok(Self { config, world: World::new(&shape, hash_bits)?, backend })
    }

    /// The config it was made with.
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// The checked sizes; what another rank's backend is opened with.
    pub fn shape(&self) -> &EngineShape {
        &self.world.shape
    }

    /// The backend.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// The backend, to store and attend.
    pub fn backend_mut(&mut self) -> &mut B {
        &mut self.backend
    }

    /// The tables, for audits and benches: what they are made of may change.
    #[doc(hidden)]
    pub fn world(&self) -> &World {
        &self.world
    }

    /// Counters and levels. O(1).
    pub fn stats(&self) -> Stats {
        let World { pages, prefixes, sequences, steps, counters, .. } = &self.world;
        let size = prefixes.size_info();
        Stats {
            published_pages: prefixes.published_pages(),
            duplicate_pages: prefixes.duplicate_pages(),
            free_pages: pages.free_count(),
            private_pages: pages.private_count(),
            cached_pages: pages.cached_count(),
            fenced_pages: pages.fenced_count(),
            promised_pages: sequences.promised(),
            evictable_pages: size.evictable,
            protected_pages: size.protected,
            sequences: sequences.len(),
            steps: steps.len(),
            ..*counters
        }
    }

    /// Audits the whole state. O(everything): for tests and debugging.
    ///
    /// # Errors
    /// The first broken invariant, and whose page shows it.
    pub fn verify(&self) -> Result<(), Broken> {
        self.world.verify()
    }
}

#[cfg(test)]
mod tests;
