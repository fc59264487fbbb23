//! States in the pool of a [`Cpu`].

use super::{Cpu, CpuError};
use crate::backend::check;
use crate::backend::plan_error::PlanError;
use crate::backend::state::StateBackend;
use crate::id::{LayerId, PageId};
use crate::plan::{BatchPlan, PageCopy};

/// The state of one layer and one row of a plan: the bytes of all its parts.
#[derive(Debug, PartialEq, Eq)]
pub enum CpuState<'a> {
    /// The state is updated in place.
    InPlace(&'a mut [u8]),
    /// The first state is read, and the second one is written.
    From(&'a [u8], &'a mut [u8]),
}

impl Cpu {
    /// Returns the state of a layer for row `row` of a plan: [`lane_bytes`](crate::layout::StateLayout::lane_bytes)
    /// bytes.
    ///
    /// # Errors
    /// [`CpuError::Plan`] for a step that is not open, a layer that does not exist or keeps no state, and for a row
    /// that does not exist or is padding.
    pub fn state(&mut self, plan: &BatchPlan<'_>, layer: LayerId, row: usize) -> Result<CpuState<'_>, CpuError> {
        self.check_open(plan)?;
        let lane = check::state_layer(layer, &self.layout)?;
        let [read, write] = self.state_pages(plan, row)?.map(|pages| {
            let (state, page) = (self.layout.state().expect("checked"), pages[lane.track as usize]);
            let start = u64::from(page.raw()) * self.layout.page_bytes() + u64::from(lane.lane) * state.lane_bytes;
            start as usize..(start + state.lane_bytes) as usize
        });
        let bytes = self.pool.bytes_mut();
        if read == write {
            return Ok(CpuState::InPlace(&mut bytes[write]));
        }
        let (low, high) = bytes.split_at_mut(read.start.max(write.start));
        let in_high = |range: std::ops::Range<usize>, at: usize| range.start - at..range.end - at;
        Ok(if read.start < write.start {
            let at = write.start;
            CpuState::From(&low[read], &mut high[in_high(write, at)])
        } else {
            let at = read.start;
            CpuState::From(&high[in_high(read, at)], &mut low[write])
        })
    }

    /// Returns the pages of a row's state that a plan reads, and those that it writes.
    pub(crate) fn state_pages(&self, plan: &BatchPlan<'_>, row: usize) -> Result<[&[PageId]; 2], CpuError> {
        let pages = self.states.pages(plan, row);
        pages.ok_or_else(|| PlanError::StateRow { row, rows: plan.rows.len() }.into())
    }
}

impl StateBackend for Cpu {
    fn copy_states(&mut self, plan: &BatchPlan<'_>) -> Result<(), CpuError> {
        self.check_open(plan)?;
        let page_bytes = self.layout.page_bytes() as usize;
        let copies = self.states.take_copies(plan);
        for PageCopy { source, target } in &copies {
            let start = source.index() * page_bytes;
            self.pool.bytes_mut().copy_within(start..start + page_bytes, target.index() * page_bytes);
        }
        self.states.return_copies(copies);
        Ok(())
    }
}
