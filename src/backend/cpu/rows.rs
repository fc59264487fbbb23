//! The rows of numbers that a host passes: slices of any element type, packed or strided.

use std::ops::Range;

use half::{bf16, f16};

use super::number::{Number, convert};
use crate::backend::check::row_stride;
use crate::backend::{Operand, PlanError};
use crate::layout::Dtype;

/// Numbers to read, in any element type.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Elements<'a> {
    /// binary32
    F32(&'a [f32]),
    /// binary16
    F16(&'a [f16]),
    /// bfloat16
    Bf16(&'a [bf16]),
}

impl<'a> Elements<'a> {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(x) => x.len(),
            Self::F16(x) => x.len(),
            Self::Bf16(x) => x.len(),
        }
    }

    /// Returns whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the type of the elements.
    pub fn dtype(&self) -> Dtype {
        match self {
            Self::F32(_) => Dtype::F32,
            Self::F16(_) => Dtype::F16,
            Self::Bf16(_) => Dtype::Bf16,
        }
    }

    /// Returns a part of the numbers.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn slice(&self, range: Range<usize>) -> Elements<'a> {
        match self {
            Self::F32(x) => Elements::F32(&x[range]),
            Self::F16(x) => Elements::F16(&x[range]),
            Self::Bf16(x) => Elements::Bf16(&x[range]),
        }
    }

    /// Returns the numbers, widened exactly.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut wide = vec![0.0; self.len()];
        self.convert_into(&mut wide);
        wide
    }

    /// Writes all numbers to `target`, rounded to nearest even. Equal types are copied bit by bit.
    pub(super) fn convert_into<T: Number>(&self, target: &mut [T]) {
        match self {
            Self::F32(x) => convert(x, target),
            Self::F16(x) => convert(x, target),
            Self::Bf16(x) => convert(x, target),
        }
    }
}

/// Numbers to write, in any element type.
#[derive(Debug)]
pub enum ElementsMut<'a> {
    /// binary32
    F32(&'a mut [f32]),
    /// binary16
    F16(&'a mut [f16]),
    /// bfloat16
    Bf16(&'a mut [bf16]),
}

impl ElementsMut<'_> {
    /// Returns the same numbers to read.
    pub fn as_elements(&self) -> Elements<'_> {
        match self {
            Self::F32(x) => Elements::F32(x),
            Self::F16(x) => Elements::F16(x),
            Self::Bf16(x) => Elements::Bf16(x),
        }
    }

    /// Sets a part to 0.
    pub(super) fn zero(&mut self, range: Range<usize>) {
        match self {
            Self::F32(x) => x[range].fill(0.0),
            Self::F16(x) => x[range].fill(f16::ZERO),
            Self::Bf16(x) => x[range].fill(bf16::ZERO),
        }
    }

    /// Writes `source` from element `start` on, rounded to nearest even.
    pub(super) fn write(&mut self, start: usize, source: &[f32]) {
        let range = start..start + source.len();
        match self {
            Self::F32(x) => convert(source, &mut x[range]),
            Self::F16(x) => convert(source, &mut x[range]),
            Self::Bf16(x) => convert(source, &mut x[range]),
        }
    }
}

/// Rows to read: q, k or v of a step, `[tokens, heads, head_dim]`, or a norm's weights.
#[derive(Clone, Copy, Debug)]
pub struct CpuRows<'a> {
    /// The numbers, from the first row on.
    pub elements: Elements<'a>,
    /// Number of elements from one row to the next, as in a view into a fused qkv; `None` if packed.
    pub stride: Option<usize>,
}

/// Rows to write: attention's output, `[tokens, q_heads, head_dim]`, or the qkv of `rope_store`, which is also read.
#[derive(Debug)]
pub struct CpuRowsMut<'a> {
    /// The numbers, from the first row on. Numbers between strided rows stay unchanged.
    pub elements: ElementsMut<'a>,
    /// Number of elements from one row to the next; `None` if packed.
    pub stride: Option<usize>,
}

macro_rules! rows_from {
    ($type:ty, $variant:ident) => {
        impl<'a> From<&'a [$type]> for CpuRows<'a> {
            fn from(packed: &'a [$type]) -> Self {
                Self { elements: Elements::$variant(packed), stride: None }
            }
        }

        impl<'a> From<&'a mut [$type]> for CpuRowsMut<'a> {
            fn from(packed: &'a mut [$type]) -> Self {
                Self { elements: ElementsMut::$variant(packed), stride: None }
            }
        }
    };
}

rows_from!(f32, F32);
rows_from!(f16, F16);
rows_from!(bf16, Bf16);

impl CpuRows<'_> {
    /// Returns the numbers as rows that begin `stride` elements apart.
    pub fn strided(self, stride: usize) -> Self {
        Self { stride: Some(stride), ..self }
    }

    /// Checks that there are `rows` rows of `width` elements, and returns the stride.
    pub(super) fn check(&self, operand: Operand, rows: usize, width: usize) -> Result<usize, PlanError> {
        check_rows(operand, self.elements.len(), self.stride, rows, width)
    }
}

impl CpuRowsMut<'_> {
    /// Returns the numbers as rows that begin `stride` elements apart.
    pub fn strided(self, stride: usize) -> Self {
        Self { stride: Some(stride), ..self }
    }

    /// Does the same as [`CpuRows::check`].
    pub(super) fn check(&self, operand: Operand, rows: usize, width: usize) -> Result<usize, PlanError> {
        check_rows(operand, self.elements.as_elements().len(), self.stride, rows, width)
    }
}

/// Checks rows: packed rows have the exact number of elements; after the last strided row there may be more.
fn check_rows(
    operand: Operand,
    actual: usize,
    stride: Option<usize>,
    rows: usize,
    width: usize,
) -> Result<usize, PlanError> {
    let wanted = rows * width;
    if stride.is_none() && actual != wanted {
        return Err(PlanError::Length { operand, actual, wanted });
    }
    row_stride(operand, actual, stride, rows, width)
}

/// Checks the exact number of elements of a log-sum-exp.
pub(super) fn check_lse(lse: Option<&[f32]>, wanted: usize) -> Result<(), PlanError> {
    match lse.map(<[f32]>::len) {
        Some(actual) if actual != wanted => Err(PlanError::Length { operand: Operand::Lse, actual, wanted }),
        _ => Ok(()),
    }
}
