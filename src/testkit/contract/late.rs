//! [`Late`] as a backend under test. Its buffers are those of the CPU backend.

use super::{Case, StateTestBackend, TestBackend};
use crate::backend::Cpu;
use crate::id::{LayerId, PageId};
use crate::plan::BatchPlan;
use crate::testkit::late::Late;

impl TestBackend for Late {
    forward_buffers!(this: Cpu => this.unsettled());

    fn supports(case: &Case) -> bool {
        Cpu::supports(case)
    }

    fn unit(&self, _: &Case) -> f64 {
        super::cpu::UNIT
    }

    fn read_pages(&mut self, pages: &[PageId], target: &mut [u8]) {
        self.settled().read_pages(pages, target);
    }

    fn write_pages(&mut self, pages: &[PageId], source: &[u8]) {
        self.settled().write_pages(pages, source);
    }
}

impl StateTestBackend for Late {
    fn slots(&mut self, plan: &BatchPlan<'_>, layer: LayerId) -> [Vec<i32>; 2] {
        self.unsettled().slots(plan, layer)
    }
}
