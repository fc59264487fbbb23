//! [`Late`] as a backend under test. Its buffers are those of the CPU backend.

use super::{Case, TestBackend};
use crate::backend::Cpu;
use crate::id::PageId;
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
