//! [`Late`] as a backend under test. Its buffers are those of the CPU backend.

use super::{Case, HostRows, OwnedRows, TestBackend};
use crate::backend::{Cpu, CpuRows, CpuRowsMut};
use crate::id::PageId;
use crate::testkit::late::Late;

impl TestBackend for Late {
    type Input = OwnedRows;
    type Output = OwnedRows;
    type Sums = Vec<f32>;

    fn supports(case: &Case) -> bool {
        Cpu::supports(case)
    }

    fn unit(&self, _: &Case) -> f64 {
        super::cpu::UNIT
    }

    fn input(&mut self, rows: &HostRows) -> OwnedRows {
        OwnedRows::new(rows)
    }

    fn rows(input: &OwnedRows) -> CpuRows<'_> {
        Cpu::rows(input)
    }

    fn sinks(input: &OwnedRows) -> &[f32] {
        Cpu::sinks(input)
    }

    fn output(&mut self, poison: &HostRows) -> OwnedRows {
        OwnedRows::new(poison)
    }

    fn rows_mut(output: &mut OwnedRows) -> CpuRowsMut<'_> {
        Cpu::rows_mut(output)
    }

    fn read_output(&mut self, output: &OwnedRows) -> Vec<f32> {
        output.read()
    }

    fn sums(&mut self, len: usize) -> Vec<f32> {
        vec![f32::NAN; len]
    }

    fn lse(sums: &mut Vec<f32>) -> &mut [f32] {
        sums
    }

    fn read_sums(&mut self, sums: &Vec<f32>) -> Vec<f32> {
        sums.clone()
    }

    fn read_pages(&mut self, pages: &[PageId], target: &mut [u8]) {
        self.settled().read_pages(pages, target);
    }

    fn write_pages(&mut self, pages: &[PageId], source: &[u8]) {
        self.settled().write_pages(pages, source);
    }
}
