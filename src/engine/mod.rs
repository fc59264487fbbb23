//! The host's API: [`Engine`] contains the tables and a backend, and calls the systems.

// The calls are in `requests`, `steps`, `cache`, `tiers`, `stores` and `query`, the systems in `system/`, and the bytes
// of K and V in `backend/`.

mod cache;
mod query;
mod requests;
mod steps;
mod stores;
mod tiers;

use crate::backend::{Backend, OpenBackend};
use crate::config::{EngineConfig, EngineShape};
use crate::error::EngineError;
pub use crate::prefix::PrefixMatch;
use crate::stats::Stats;
use crate::world::World;
pub use crate::world::{Broken, EngineBytes, Owner};

/// The KV-cache core of one scheduler: records the tokens that have K and V, assigns pages to new tokens, and shares
/// the pages of equal prefixes.
///
/// An engine is `Send`; one thread at a time calls it. An error leaves the state unchanged, unless a method documents
/// otherwise.
pub struct Engine<B> {
    config: EngineConfig,
    world: World,
    backend: B,
}

/// Construction, access to the parts, and audits.
impl<B: Backend> Engine<B> {
    /// Creates an engine and allocates all its memory, on the host and in the backend. `config` may be a `PoolConfig`.
    ///
    /// With [`prefault`](crate::EngineConfig::prefault) the call also touches the memory of the large tables, so that
    /// steps cause hardly any page faults. If the operating system over-commits memory, touching memory that the
    /// machine cannot back ends the process. The call therefore first allocates and frees the total in one piece: most
    /// systems reject a piece larger than all their memory. `Cpu` touches its pool as pages are first written.
    ///
    /// # Errors
    /// [`EngineError::Config`] for an invalid config, with
    /// [`ConfigError::OutOfMemory`](crate::ConfigError::OutOfMemory) if the host cannot allocate the tables;
    /// [`EngineError::Backend`].
    pub fn new(
        config: impl Into<EngineConfig>,
        backend: impl OpenBackend<Backend = B>,
    ) -> Result<Self, EngineError<B::Error>> {
        Self::with_hash_bits(config, backend, u32::BITS)
    }

    /// Creates an engine whose tables use `hash_bits` bits of each hash. Tests use fewer than 32 to force collisions.
    pub(crate) fn with_hash_bits(
        config: impl Into<EngineConfig>,
        backend: impl OpenBackend<Backend = B>,
        hash_bits: u32,
    ) -> Result<Self, EngineError<B::Error>> {
        let config = config.into();
        let shape = config.shape()?;
        let backend = backend.open(&shape.layout, &shape.table, shape.step_bounds());
        let backend = backend.map_err(EngineError::Backend)?;
        let mut engine = Self { config, world: World::new(&shape, hash_bits)?, backend };
        if engine.world.prefixes.has_swap() {
            engine.look_at_swap();
        }
        Ok(engine)
    }

    /// Returns the config.
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Returns the checked limits. A host opens the backends of other ranks with them.
    pub fn shape(&self) -> &EngineShape {
        &self.world.shape
    }

    /// Returns the backend.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// Returns the backend, for stores and attention.
    pub fn backend_mut(&mut self) -> &mut B {
        &mut self.backend
    }

    /// Returns the tables, for audits.
    #[cfg(any(test, feature = "testkit"))]
    pub(crate) fn world(&self) -> &World {
        &self.world
    }

    /// Returns counters and levels. O(1).
    pub fn stats(&self) -> Stats {
        let World { pages, prefixes, sequences, steps, counters, .. } = &self.world;
        let mut stats = Stats {
            free_pages: pages.free_count(),
            private_pages: pages.private_count(),
            cached_pages: pages.cached_count(),
            fenced_pages: pages.fenced_count(),
            outstanding_pages: sequences.all_outstanding(),
            sequences: sequences.len(),
            steps: steps.len(),
            ..*counters
        };
        prefixes.count(&mut stats);
        stats
    }

    /// Checks the numbered invariants of all tables (L2 and M1 to M3 only in part), for tests and debugging. O(whole
    /// state).
    ///
    /// # Errors
    /// The first broken invariant. If a page breaks it, the error also names the page and its owner.
    pub fn verify(&self) -> Result<(), Broken> {
        self.world.verify()
    }
}

#[cfg(test)]
mod tests;
