//! [`Null`]: a backend without bytes, for planning, replay and ranks that only schedule.

use std::convert::Infallible;

use super::{Attend, Backend, Moved, OpenBackend, Queries, Rope, StateBackend, SwapMemory};
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

/// Declares calls that succeed without effect.
macro_rules! succeed {
    ($($call:ident($($argument:ty),*);)*) => {$(
        fn $call(&mut self, $(_: $argument),*) -> Result<(), Infallible> {
            Ok(())
        }
    )*};
}

impl Backend for Null {
    type Error = Infallible;
    type Rows<'a> = ();
    type RowsMut<'a> = ();
    type Sinks<'a> = ();
    type Lse<'a> = ();

    succeed! {
        begin(&BatchPlan<'_>);
        store_cache(&BatchPlan<'_>, LayerId, (), ());
        rope_store(&BatchPlan<'_>, LayerId, &Rope<(), ()>, ());
        attend_queries(&BatchPlan<'_>, LayerId, &Attend, Queries<(), ()>, (), Option<()>);
        copy_pages(&[PageCopy]);
        compact(&[Compaction]);
        save_pages(MoveId, &[PageMove]);
        load_pages(MoveId, &[PageMove]);
        synchronize();
    }

    fn end(&mut self, _: StepEnd) {}

    /// Returns a number above any pool's number of swap pages.
    fn swap_pages(&self) -> u32 {
        u32::MAX
    }

    fn moved(&mut self) -> Result<Moved, Infallible> {
        Ok(Moved::ALL)
    }
}

impl StateBackend for Null {
    succeed! {
        copy_states(&BatchPlan<'_>);
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
