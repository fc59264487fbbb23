//! [`Null`]: a backend without bytes, for planning, replay and ranks that only schedule.

use std::convert::Infallible;

use super::{Attend, Backend, Moved, OpenBackend, Queries, Rope, SwapMemory};
use crate::config::StepBounds;
use crate::id::{LayerId, MoveId, SwapPageId};
use crate::layout::{PoolLayout, TableShape};
use crate::plan::{BatchPlan, Compaction, PageCopy, PageMove, StepEnd};

/// A backend that stores no K and V. Every call succeeds without effect.
#[derive(Clone, Copy, Debug, Default)]
pub struct Null;

impl OpenBackend for Null {
    type Backend = Self;

    fn open(self, _: &PoolLayout, _: &TableShape, _: impl Into<StepBounds>) -> Result<Self, Infallible> {
        Ok(self)
    }
}

impl Backend for Null {
    type Error = Infallible;
    type Rows<'a> = ();
    type RowsMut<'a> = ();
    type Sinks<'a> = ();
    type Lse<'a> = ();

    fn begin(&mut self, _: &BatchPlan<'_>) -> Result<(), Infallible> {
        Ok(())
    }

    fn end(&mut self, _: StepEnd) {}

    fn store_cache(&mut self, _: &BatchPlan<'_>, _: LayerId, _: (), _: ()) -> Result<(), Infallible> {
        Ok(())
    }

    fn rope_store(&mut self, _: &BatchPlan<'_>, _: LayerId, _: &Rope<(), ()>, _: ()) -> Result<(), Infallible> {
        Ok(())
    }

    fn attend_queries(
        &mut self,
        _: &BatchPlan<'_>,
        _: LayerId,
        _: &Attend,
        _: Queries<(), ()>,
        _: (),
        _: Option<()>,
    ) -> Result<(), Infallible> {
        Ok(())
    }

    fn copy_pages(&mut self, _: &[PageCopy]) -> Result<(), Infallible> {
        Ok(())
    }

    fn compact(&mut self, _: &[Compaction]) -> Result<(), Infallible> {
        Ok(())
    }

    /// Returns a number above any pool's number of swap pages.
    fn swap_pages(&self) -> u32 {
        u32::MAX
    }

    fn save_pages(&mut self, _: MoveId, _: &[PageMove]) -> Result<(), Infallible> {
        Ok(())
    }

    fn load_pages(&mut self, _: MoveId, _: &[PageMove]) -> Result<(), Infallible> {
        Ok(())
    }

    fn moved(&mut self) -> Result<Moved, Infallible> {
        Ok(Moved::ALL)
    }

    fn synchronize(&mut self) -> Result<(), Infallible> {
        Ok(())
    }
}

impl SwapMemory for Null {
    type Read = [u8; 0];
    type Write = [u8; 0];

    fn lease(&mut self, _: SwapPageId) -> [u8; 0] {
        []
    }

    fn lease_mut(&mut self, _: SwapPageId) -> [u8; 0] {
        []
    }
}
