//! Under construction.
#![allow(missing_docs)]
use super::{Attend, Backend};
use crate::id::LayerId;
use crate::layout::{PoolLayout, TableShape};
use crate::plan::{BatchPlan, PageCopy};

/// Numbers to read, in any element type.
#[derive(Clone, Copy, Debug)]
pub enum Elements<'a> {
    F32(&'a [f32]),
    F16(&'a [half::f16]),
    Bf16(&'a [half::bf16]),
}
/// Numbers to write.
#[derive(Debug)]
pub enum ElementsMut<'a> {
    F32(&'a mut [f32]),
    F16(&'a mut [half::f16]),
    Bf16(&'a mut [half::bf16]),
}
/// Rows to read; `stride` elements from row to row, None: packed.
#[derive(Clone, Copy, Debug)]
pub struct CpuRows<'a> {
    pub elements: Elements<'a>,
    pub stride: Option<usize>,
}
#[derive(Debug)]
pub struct CpuRowsMut<'a> {
    pub elements: ElementsMut<'a>,
    pub stride: Option<usize>,
}
impl<'a> From<&'a [f32]> for CpuRows<'a> {
    fn from(x: &'a [f32]) -> Self {
        Self { elements: Elements::F32(x), stride: None }
    }
}
impl<'a> From<&'a mut [f32]> for CpuRowsMut<'a> {
    fn from(x: &'a mut [f32]) -> Self {
        Self { elements: ElementsMut::F32(x), stride: None }
    }
}
#[derive(Debug, Default)]
pub struct Cpu {}
impl Cpu {
    pub fn new() -> Self {
        Self::default()
    }
}
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum CpuError {}
impl std::fmt::Display for CpuError {
    fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        Ok(())
    }
}
impl std::error::Error for CpuError {}
impl Backend for Cpu {
    type Error = CpuError;
    type Rows<'a> = CpuRows<'a>;
    type RowsMut<'a> = CpuRowsMut<'a>;
    type Lse<'a> = &'a mut [f32];
    fn open(&mut self, _: &PoolLayout, _: &TableShape, _: u32) -> Result<(), CpuError> {
        todo!()
    }
    fn begin(&mut self, _: &BatchPlan<'_>) -> Result<(), CpuError> {
        todo!()
    }
    fn store_cache(
        &mut self,
        _: &BatchPlan<'_>,
        _: LayerId,
        _: CpuRows<'_>,
        _: CpuRows<'_>,
    ) -> Result<(), CpuError> {
        todo!()
    }
    fn attend(
        &mut self,
        _: &BatchPlan<'_>,
        _: LayerId,
        _: &Attend,
        _: CpuRows<'_>,
        _: CpuRowsMut<'_>,
        _: Option<&mut [f32]>,
    ) -> Result<(), CpuError> {
        todo!()
    }
    fn copy_pages(&mut self, _: &[PageCopy]) -> Result<(), CpuError> {
        todo!()
    }
    fn synchronize(&mut self) -> Result<(), CpuError> {
        todo!()
    }
}
