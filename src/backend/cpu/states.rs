//! States in the pool of a [`Cpu`].

use std::collections::VecDeque;

use super::{Cpu, CpuError};
use crate::backend::OpenSteps;
use crate::backend::check;
use crate::backend::plan_error::PlanError;
use crate::backend::state::StateBackend;
use crate::id::{LayerId, StepId};
use crate::layout::TableShape;
use crate::plan::BatchPlan;

/// For each open step, the pages of the states that its rows read and write. The words of a row change with its next
/// plan, which may begin before a host computes this one.
#[derive(Debug, Default)]
pub(super) struct StepStates {
    steps: VecDeque<(StepId, Pages)>,
    /// Lists of ended steps, for reuse.
    spare: Vec<Pages>,
}

/// `[row, page of the state]`: the page to read and the one to write; zeros for padding.
type Pages = Vec<[u32; 2]>;

impl StepStates {
    /// Copies the pages of a plan's rows from the page tables.
    pub fn begin(&mut self, plan: &BatchPlan<'_>, table: &TableShape, words: &[u32]) {
        if table.state_pages == 0 {
            return;
        }
        let mut pages = self.spare.pop().unwrap_or_default();
        pages.clear();
        for row in plan.rows {
            let first = (row.kv_len > 0).then(|| [0, 1].map(|part| table.state_word(row.row, part)));
            let page = |track| first.map_or([0; 2], |first| first.map(|word| words[(word + track) as usize]));
            pages.extend((0..table.state_pages).map(page));
        }
        self.steps.push_back((plan.step, pages));
    }

    /// Drops the pages of steps that are no longer open.
    pub fn end(&mut self, open: &OpenSteps) {
        while let Some(at) = self.steps.iter().position(|(step, _)| !open.contains(*step)) {
            self.spare.extend(self.steps.remove(at).map(|(_, pages)| pages));
        }
    }

    fn pages(&self, step: StepId, table: &TableShape, row: usize) -> &[[u32; 2]] {
        let (_, pages) = self.steps.iter().find(|(other, _)| *other == step).expect("the step is open");
        &pages[row * table.state_pages as usize..][..table.state_pages as usize]
    }
}

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
        let [read, write] = self.state_pages(plan, row)?[lane.track as usize].map(|page| {
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

    /// Returns the pages of a row's state that a plan reads and writes.
    fn state_pages(&self, plan: &BatchPlan<'_>, row: usize) -> Result<&[[u32; 2]], CpuError> {
        if plan.rows.get(row).is_none_or(|row| row.kv_len == 0) {
            return Err(PlanError::StateRow { row, rows: plan.rows.len() }.into());
        }
        Ok(self.states.pages(plan.step, &self.table, row))
    }
}

impl StateBackend for Cpu {
    fn copy_states(&mut self, plan: &BatchPlan<'_>) -> Result<(), CpuError> {
        self.check_open(plan)?;
        let page_bytes = self.layout.page_bytes() as usize;
        for row in (0..plan.rows.len()).filter(|&row| plan.rows[row].kv_len > 0) {
            for track in 0..self.table.state_pages as usize {
                let [read, write] = self.state_pages(plan, row)?[track].map(|page| page as usize * page_bytes);
                if read != write {
                    self.pool.bytes_mut().copy_within(read..read + page_bytes, write);
                }
            }
        }
        Ok(())
    }
}
