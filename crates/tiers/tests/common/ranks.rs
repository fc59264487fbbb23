//! A backend over ranks, each of which has a pool of the CPU.

use kvarena::backend::{CpuError, Moved, OpenBackend, Queries, Rope, SwapMemory};
use kvarena::config::StepBounds;
use kvarena::id::{MoveId, SwapPageId};
use kvarena::layout::{PoolLayout, TableShape};
use kvarena::plan::{Compaction, PageCopy, PageMove, StepEnd};
use kvarena::*;
use kvarena_tiers::tier::RankMemory;

use crate::host::Pools;

/// Opens a pool for each rank, whose K and V have this factor.
pub struct RanksOptions(pub Vec<f32>);

pub struct Ranks(Vec<(Cpu, f32)>);

/// A lease of each rank.
pub struct Leases<T>(Vec<T>);

type Done = Result<(), CpuError>;

impl Ranks {
    fn each(&mut self, call: impl Fn(&mut Cpu) -> Done) -> Done {
        self.0.iter_mut().try_for_each(|(pool, _)| call(pool))
    }

    fn leases<T>(&mut self, lease: impl Fn(&mut Cpu) -> T) -> Leases<T> {
        Leases(self.0.iter_mut().map(|(pool, _)| lease(pool)).collect())
    }
}

impl OpenBackend for RanksOptions {
    type Backend = Ranks;

    fn open(self, layout: &PoolLayout, table: &TableShape, bounds: impl Into<StepBounds>) -> Result<Ranks, CpuError> {
        let bounds = bounds.into();
        let open = |factor| Ok((CpuOptions::with_threads(1).open(layout, table, bounds)?, factor));
        self.0.into_iter().map(open).collect::<Result<_, _>>().map(Ranks)
    }
}

impl Backend for Ranks {
    type Error = CpuError;
    type Rows<'a> = ();
    type RowsMut<'a> = ();
    type Sinks<'a> = ();
    type Lse<'a> = ();

    fn begin(&mut self, plan: &BatchPlan<'_>) -> Done {
        self.each(|pool| pool.begin(plan))
    }

    fn end(&mut self, end: StepEnd) {
        self.0.iter_mut().for_each(|(pool, _)| pool.end(end));
    }

    fn store_cache(&mut self, _: &BatchPlan<'_>, _: LayerId, (): (), (): ()) -> Done {
        unreachable!("the host stores the rows of each rank")
    }

    fn rope_store(&mut self, _: &BatchPlan<'_>, _: LayerId, _: &Rope<(), ()>, (): ()) -> Done {
        unreachable!("the host stores the rows of each rank")
    }

    fn attend_queries(
        &mut self,
        _: &BatchPlan<'_>,
        _: LayerId,
        _: &Attend,
        _: Queries<(), ()>,
        (): (),
        _: Option<()>,
    ) -> Done {
        unreachable!("the host does not attend")
    }

    fn copy_pages(&mut self, copies: &[PageCopy]) -> Done {
        self.each(|pool| pool.copy_pages(copies))
    }

    fn compact(&mut self, compactions: &[Compaction]) -> Done {
        self.each(|pool| pool.compact(compactions))
    }

    fn swap_pages(&self) -> u32 {
        self.0[0].0.swap_pages()
    }

    fn save_pages(&mut self, id: MoveId, moves: &[PageMove]) -> Done {
        self.each(|pool| pool.save_pages(id, moves))
    }

    fn load_pages(&mut self, id: MoveId, moves: &[PageMove]) -> Done {
        self.each(|pool| pool.load_pages(id, moves))
    }

    fn moved(&mut self) -> Result<Moved, CpuError> {
        self.0[0].0.moved()
    }

    fn synchronize(&mut self) -> Done {
        self.each(Cpu::synchronize)
    }
}

impl SwapMemory for Ranks {
    type Read = Leases<<Cpu as SwapMemory>::Read>;
    type Write = Leases<<Cpu as SwapMemory>::Write>;

    fn lease(&mut self, page: SwapPageId) -> Self::Read {
        self.leases(|pool| pool.lease(page))
    }

    fn lease_mut(&mut self, page: SwapPageId) -> Self::Write {
        self.leases(|pool| pool.lease_mut(page))
    }
}

impl RankMemory for Ranks {
    fn ranks(&self) -> usize {
        self.0.len()
    }

    fn part(lease: &Self::Read, rank: usize) -> &[u8] {
        lease.0[rank].as_ref()
    }

    fn part_mut(lease: &mut Self::Write, rank: usize) -> &mut [u8] {
        lease.0[rank].as_mut()
    }
}

impl Pools for Ranks {
    fn pools(&mut self) -> Vec<(&mut Cpu, f32)> {
        self.0.iter_mut().map(|(pool, factor)| (pool, *factor)).collect()
    }
}
