//! States in the pool of a [`Cpu`].

use super::{Cpu, CpuError};
use crate::backend::check;
use crate::backend::plan_error::PlanError;
use crate::backend::state::StateBackend;
use crate::id::LayerId;
use crate::plan::BatchPlan;

/// The state of one layer and one row of a plan: the bytes of all its parts.
#[derive(Debug, PartialEq, Eq)]
pub enum CpuState<'a> {
    /// The state is updated in place.
    InPlace(&'a mut [u8]),
    /// The first state is read, and the second one is written.
    From(&'a [u8], &'a mut [u8]),
}

impl CpuState<'_> {
    /// Returns the bytes to write, which contain the state that is read. O(bytes) if the states differ.
    pub fn copied(&mut self) -> &mut [u8] {
        if let Self::From(from, to) = self {
            to.copy_from_slice(from);
        }
        match self {
            Self::InPlace(bytes) | Self::From(_, bytes) => bytes,
        }
    }
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
        let [read, write] = self.state_pages(plan, row, lane.track)?.map(|page| {
            let state = self.layout.state().expect("checked");
            let start = u64::from(page) * self.layout.page_bytes() + u64::from(lane.lane) * state.lane_bytes;
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

    /// Returns the page of a row's state that a plan reads, and the one that it writes, for one page of the state.
    fn state_pages(&self, plan: &BatchPlan<'_>, row: usize, track: u32) -> Result<[u32; 2], CpuError> {
        let known = plan.rows.get(row).filter(|row| row.kv_len > 0);
        let row = known.ok_or(PlanError::StateRow { row, rows: plan.rows.len() })?.row;
        Ok([0, 1].map(|part| self.words[(self.table.state_word(row, part) + track) as usize]))
    }
}

impl StateBackend for Cpu {
    fn copy_states(&mut self, plan: &BatchPlan<'_>) -> Result<(), CpuError> {
        self.check_open(plan)?;
        let page_bytes = self.layout.page_bytes() as usize;
        for row in (0..plan.rows.len()).filter(|&row| plan.rows[row].kv_len > 0) {
            for track in 0..self.table.state_pages {
                let [read, write] = self.state_pages(plan, row, track)?.map(|page| page as usize * page_bytes);
                if read != write {
                    self.pool.bytes_mut().copy_within(read..read + page_bytes, write);
                }
            }
        }
        Ok(())
    }
}
