//! The contract's buffers for the CPU backend: vectors.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::{Case, HostRows, SparseTestBackend, StateTestBackend, TestBackend};
use crate::backend::{Cpu, CpuRows, CpuRowsMut};
use crate::id::{LayerId, PageId};
use crate::layout::Dtype;
use crate::plan::BatchPlan;

/// Numbers of one element type.
#[derive(Clone, Debug)]
pub enum Numbers {
    /// binary32
    F32(Vec<f32>),
    /// binary16
    F16(Vec<f16>),
    /// bfloat16
    Bf16(Vec<bf16>),
}

impl Numbers {
    fn new(rows: &HostRows) -> Self {
        let values = &rows.values[..];
        match rows.dtype {
            Dtype::F32 => Self::F32(values.to_vec()),
            Dtype::F16 => Self::F16(values.iter().map(|&x| f16::from_f32(x)).collect()),
            Dtype::Bf16 => Self::Bf16(values.iter().map(|&x| bf16::from_f32(x)).collect()),
        }
    }
}

/// Rows of one element type.
#[derive(Clone, Debug)]
pub struct OwnedRows {
    buffer: Numbers,
    /// Number of elements from one row to the next; `None` if the rows are packed.
    stride: Option<usize>,
}

impl OwnedRows {
    fn new(rows: &HostRows) -> Self {
        let stride = (rows.stride != rows.width).then_some(rows.stride);
        Self { buffer: Numbers::new(rows), stride }
    }

    fn read(&self) -> Vec<f32> {
        match &self.buffer {
            Numbers::F32(x) => x.clone(),
            Numbers::F16(x) => x.to_f32_vec(),
            Numbers::Bf16(x) => x.to_f32_vec(),
        }
    }
}

/// Precision of attention, which sums in f32 for every element type: four roundings of 2^-24 each. They cover the error
/// of `exp`, and the roundings of a logit with a soft cap.
pub(super) const UNIT: f64 = 1.0 / (1 << 22) as f64;

impl TestBackend for Cpu {
    type Input = OwnedRows;
    type Output = OwnedRows;
    type Sums = Vec<f32>;

    fn supports(_: &Case) -> bool {
        true
    }

    fn unit(&self, _: &Case) -> f64 {
        UNIT
    }

    fn input(&mut self, rows: &HostRows) -> OwnedRows {
        OwnedRows::new(rows)
    }

    fn rows(input: &OwnedRows) -> CpuRows<'_> {
        let rows = match &input.buffer {
            Numbers::F32(x) => CpuRows::from(&x[..]),
            Numbers::F16(x) => CpuRows::from(&x[..]),
            Numbers::Bf16(x) => CpuRows::from(&x[..]),
        };
        CpuRows { stride: input.stride, ..rows }
    }

    fn sinks(input: &OwnedRows) -> &[f32] {
        match &input.buffer {
            Numbers::F32(x) => x,
            other => panic!("sinks are f32: {other:?}"),
        }
    }

    fn output(&mut self, poison: &HostRows) -> OwnedRows {
        OwnedRows::new(poison)
    }

    fn rows_mut(output: &mut OwnedRows) -> CpuRowsMut<'_> {
        let rows = match &mut output.buffer {
            Numbers::F32(x) => CpuRowsMut::from(&mut x[..]),
            Numbers::F16(x) => CpuRowsMut::from(&mut x[..]),
            Numbers::Bf16(x) => CpuRowsMut::from(&mut x[..]),
        };
        CpuRowsMut { stride: output.stride, ..rows }
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
        let page_bytes = self.layout().page_bytes() as usize;
        for (&page, target) in pages.iter().zip(target.chunks_exact_mut(page_bytes)) {
            self.read_page(page, target).expect("a page of the pool");
        }
    }

    fn write_pages(&mut self, pages: &[PageId], source: &[u8]) {
        let page_bytes = self.layout().page_bytes() as usize;
        for (&page, source) in pages.iter().zip(source.chunks_exact(page_bytes)) {
            self.write_page(page, source).expect("a page of the pool");
        }
    }
}

impl SparseTestBackend for Cpu {
    type Lists = Vec<u32>;

    fn lists(&mut self, positions: &[u32]) -> Vec<u32> {
        positions.to_vec()
    }

    fn positions(lists: &Vec<u32>) -> &[u32] {
        lists
    }

    fn positions_mut(lists: &mut Vec<u32>) -> &mut [u32] {
        lists
    }

    fn read_lists(&mut self, lists: &Vec<u32>) -> Vec<u32> {
        lists.clone()
    }
}

impl StateTestBackend for Cpu {
    fn slots(&mut self, plan: &BatchPlan<'_>, layer: LayerId) -> [Vec<i32>; 2] {
        let track = self.layout().place(layer).track as usize;
        let page = |part: usize, row| self.state_pages(plan, row).map_or(-1, |pages| pages[part][track].raw() as i32);
        [0, 1].map(|part| (0..plan.rows.len()).map(|row| page(part, row)).collect())
    }
}
