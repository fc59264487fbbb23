//! A backend that fails on demand, to check that errors leave the engine consistent.

use std::collections::BTreeSet;
use std::error::Error as StdError;
use std::fmt;

use super::replay::Inspect;
use crate::backend::{Backend, Moved, OpenBackend, StateBackend, SwapMemory};
use crate::config::StepBounds;
use crate::id::{LayerId, MoveId, SlotId, SwapPageId};
use crate::layout::{PlaneName, PoolLayout, TableShape};
use crate::plan::{BatchPlan, Compaction, PageCopy, PageMove};

/// The time at which a call fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// The call fails without effect.
    Before,
    /// The call fails after its effect. The caller may rely neither on the effect nor on its absence.
    After,
}

/// Forwards to a backend, but some calls of `begin`, `copy_pages`, `copy_states`, `compact`, `save_pages`, `load_pages`
/// and `moved` fail. `Failing` can also wrap the options of a backend; it then opens a failing backend.
#[derive(Clone, Debug)]
pub struct Failing<B> {
    inner: B,
    fault: Fault,
    first: u64,
    every: Option<u64>,
    calls: u64,
    failures: u64,
    /// For each save and load since the last call of `take_moves`, whether it failed.
    moves: Vec<bool>,
    /// Swap pages whose last save succeeded, or that a fetch has written since.
    swap_pages: BTreeSet<SwapPageId>,
}

impl<B> Failing<B> {
    /// Creates a backend whose call `n` fails, counted from 0 among the calls that can fail.
    pub fn at(inner: B, fault: Fault, n: u64) -> Self {
        let (moves, swap_pages) = (Vec::new(), BTreeSet::new());
        Self { inner, fault, first: n, every: None, calls: 0, failures: 0, moves, swap_pages }
    }

    /// Creates a backend whose call `n`, counted as in [`Failing::at`], and every `every`th later call fail.
    pub fn every(inner: B, fault: Fault, n: u64, every: u64) -> Self {
        Self { every: Some(every), ..Self::at(inner, fault, n) }
    }

    /// Returns the number of calls so far that could have failed.
    pub fn calls(&self) -> u64 {
        self.calls
    }

    fn fails_now(&mut self) -> bool {
        let call = self.calls;
        self.calls += 1;
        let fails = match (call.checked_sub(self.first), self.every) {
            (Some(after), Some(every)) => after.is_multiple_of(every),
            (Some(after), None) => after == 0,
            (None, _) => false,
        };
        self.failures += u64::from(fails);
        fails
    }
}

/// The error of a [`Failing`] backend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Failed<E> {
    /// The test requested this failure.
    OnPurpose,
    /// The inner backend failed.
    Inner(E),
}

impl<E> fmt::Display for Failed<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OnPurpose => write!(f, "the test made the call fail"),
            Self::Inner(_) => write!(f, "the inner backend failed"),
        }
    }
}

impl<E: StdError + 'static> StdError for Failed<E> {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::OnPurpose => None,
            Self::Inner(error) => Some(error),
        }
    }
}

impl<B: Backend> Failing<B> {
    /// Makes a call, and fails before or after it if the call is due to fail.
    fn call<T>(&mut self, call: impl FnOnce(&mut B) -> Result<T, B::Error>) -> Result<T, Failed<B::Error>> {
        let fails = self.fails_now();
        if fails && self.fault == Fault::Before {
            return Err(Failed::OnPurpose);
        }
        let done = call(&mut self.inner).map_err(Failed::Inner)?;
        if fails { Err(Failed::OnPurpose) } else { Ok(done) }
    }
}

impl<O: OpenBackend> OpenBackend for Failing<O> {
    type Backend = Failing<O::Backend>;

    fn open(
        self,
        layout: &PoolLayout,
        table: &TableShape,
        bounds: impl Into<StepBounds>,
    ) -> Result<Self::Backend, Failed<<O::Backend as Backend>::Error>> {
        let Self { inner, fault, first, every, calls, failures, moves, swap_pages } = self;
        let inner = inner.open(layout, table, bounds).map_err(Failed::Inner)?;
        Ok(Failing { inner, fault, first, every, calls, failures, moves, swap_pages })
    }
}

impl<B: Backend> Backend for Failing<B> {
    type Error = Failed<B::Error>;
    forward_backend!(inner: B, Failed::Inner; types, end, store_cache, rope_store, attend, swap_pages, synchronize);

    fn begin(&mut self, plan: &BatchPlan<'_>) -> Result<(), Self::Error> {
        self.call(|inner| inner.begin(plan))
    }

    fn copy_pages(&mut self, copies: &[PageCopy]) -> Result<(), Self::Error> {
        self.call(|inner| inner.copy_pages(copies))
    }

    fn compact(&mut self, compactions: &[Compaction]) -> Result<(), Self::Error> {
        self.call(|inner| inner.compact(compactions))
    }

    fn save_pages(&mut self, id: MoveId, moves: &[PageMove]) -> Result<(), Self::Error> {
        let saved = self.call(|inner| inner.save_pages(id, moves));
        self.moves.push(saved.is_err());
        for PageMove { swap, .. } in moves {
            match saved {
                Ok(()) => self.swap_pages.insert(*swap),
                Err(_) => self.swap_pages.remove(swap),
            };
        }
        saved
    }

    fn load_pages(&mut self, id: MoveId, moves: &[PageMove]) -> Result<(), Self::Error> {
        let loaded = self.call(|inner| inner.load_pages(id, moves));
        self.moves.push(loaded.is_err());
        loaded
    }

    fn moved(&mut self) -> Result<Moved, Self::Error> {
        self.call(B::moved)
    }
}

impl<B: StateBackend> StateBackend for Failing<B> {
    fn copy_states(&mut self, plan: &BatchPlan<'_>) -> Result<(), Self::Error> {
        self.call(|inner| inner.copy_states(plan))
    }
}

impl<B: SwapMemory> SwapMemory for Failing<B> {
    forward_backend!(inner: B, Failed::Inner; leases);
}

impl<B: Inspect> Inspect for Failing<B> {
    fn store(&mut self, plan: &BatchPlan<'_>, layer: LayerId, k: &[f32], v: &[f32]) -> Result<(), Self::Error> {
        self.inner.store(plan, layer, k, v).map_err(Failed::Inner)
    }

    fn load(&self, plane: PlaneName, layer: LayerId, slot: SlotId) -> Option<Vec<f32>> {
        self.inner.load(plane, layer, slot)
    }

    fn words(&self) -> Option<&[u32]> {
        self.inner.words()
    }

    fn read_state(&mut self, plan: &BatchPlan<'_>, layer: LayerId, row: usize) -> Option<Vec<u8>> {
        self.inner.read_state(plan, layer, row)
    }

    fn write_state(&mut self, plan: &BatchPlan<'_>, layer: LayerId, row: usize, bytes: &[u8]) {
        self.inner.write_state(plan, layer, row, bytes);
    }

    fn last_moved(&mut self) -> Moved {
        self.inner.last_moved()
    }

    fn read_swap(&mut self, page: SwapPageId) -> Option<Vec<u8>> {
        self.inner.read_swap(page)
    }

    fn has_swap_page(&self, page: SwapPageId) -> bool {
        self.swap_pages.contains(&page)
    }

    fn write_swap(&mut self, page: SwapPageId, bytes: &[u8]) {
        self.swap_pages.insert(page);
        self.inner.write_swap(page, bytes);
    }

    fn take_moves(&mut self) -> Vec<bool> {
        std::mem::take(&mut self.moves)
    }

    fn failures(&self) -> u64 {
        self.failures
    }
}
