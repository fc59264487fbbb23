//! Rows of numbers that a host hands in: slices of any element type, packed or strided.

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
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(x) => x.len(),
            Self::F16(x) => x.len(),
            Self::Bf16(x) => x.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Type of the elements.
    pub fn dtype(&self) -> Dtype {
        match self {
            Self::F32(_) => Dtype::F32,
            Self::F16(_) => Dtype::F16,
            Self::Bf16(_) => Dtype::Bf16,
        }
    }

    /// A part of them.
    ///
    /// # Panics
    /// Past the end.
    pub fn slice(&self, range: Range<usize>) -> Elements<'a> {
        match self {
            Self::F32(x) => Elements::F32(&x[range]),
            Self::F16(x) => Elements::F16(&x[range]),
            Self::Bf16(x) => Elements::Bf16(&x[range]),
        }
    }

    /// The numbers, widened exactly.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut wide = vec![0.0; self.len()];
        self.convert_into(&mut wide);
        wide
    }

    /// Writes all of them to `target`, rounded to nearest even; the same type is copied bit by bit.
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
    /// The same numbers, to read.
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

/// Rows to read: q, k or v of a step, `[tokens, heads, head_dim]`.
#[derive(Clone, Copy, Debug)]
pub struct CpuRows<'a> {
    /// The numbers, from the first row's first on.
    pub elements: Elements<'a>,
    /// Elements from row to row, as in a view into a fused qkv; `None`: packed.
    pub stride: Option<usize>,
}

/// Rows to write: attention's output, `[tokens, q_heads, head_dim]`.
#[derive(Debug)]
pub struct CpuRowsMut<'a> {
    /// The numbers, from the first row's first on. What lies between strided rows stays untouched.
    pub elements: ElementsMut<'a>,
    /// Elements from row to row; `None`: packed.
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
    /// The same numbers as rows `stride` elements apart.
    pub fn strided(self, stride: usize) -> Self {
        Self { stride: Some(stride), ..self }
    }

    /// Checks that there are `rows` rows of `width` elements; gives the stride.
    pub(super) fn check(
        &self,
        operand: Operand,
        rows: usize,
        width: usize,
    ) -> Result<usize, PlanError> {
        check_rows(operand, self.elements.len(), self.stride, rows, width)
    }
}

impl CpuRowsMut<'_> {
    /// The same place as rows `stride` elements apart.
    pub fn strided(self, stride: usize) -> Self {
        Self { stride: Some(stride), ..self }
    }

    /// As [`CpuRows::check`].
    pub(super) fn check(
        &self,
        operand: Operand,
        rows: usize,
        width: usize,
    ) -> Result<usize, PlanError> {
        check_rows(operand, self.elements.as_elements().len(), self.stride, rows, width)
    }
}

/// Packed rows have exactly the elements; strided ones may be followed by the rest of the last row.
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

/// A log-sum-exp has exactly the elements.
pub(super) fn check_lse(lse: Option<&[f32]>, wanted: usize) -> Result<(), PlanError> {
    match lse.map(<[f32]>::len) {
        Some(actual) if actual != wanted => {
            Err(PlanError::Length { operand: Operand::Lse, actual, wanted })
        }
        _ => Ok(()),
    }
}
