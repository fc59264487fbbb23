//! The memory of K and V, in one of the element types.

use bytemuck::Zeroable;
use half::{bf16, f16};

use super::error::CpuError;
use super::rows::Elements;
use crate::layout::{Dtype, PoolLayout};
use crate::memory::{self, OutOfMemory};

/// All elements of a pool.
#[derive(Debug)]
pub(super) enum Pool {
    F32(Box<[f32]>),
    F16(Box<[f16]>),
    Bf16(Box<[bf16]>),
}

/// Runs a block with the pool's elements as a slice of whatever type they have.
macro_rules! with_pool {
    ($pool:expr, $elements:ident => $body:block) => {
        match $pool {
            $crate::backend::cpu::pool::Pool::F32($elements) => $body,
            $crate::backend::cpu::pool::Pool::F16($elements) => $body,
            $crate::backend::cpu::pool::Pool::Bf16($elements) => $body,
        }
    };
}
pub(super) use with_pool;

impl Pool {
    /// Zeroed memory for a pool.
    pub fn new(layout: &PoolLayout) -> Result<Self, CpuError> {
        let len = layout.total_bytes() / u64::from(layout.dtype().size());
        Ok(match layout.dtype() {
            Dtype::F32 => Self::F32(zeroed(len)?),
            Dtype::F16 => Self::F16(zeroed(len)?),
            Dtype::Bf16 => Self::Bf16(zeroed(len)?),
        })
    }

    pub fn elements(&self) -> Elements<'_> {
        match self {
            Self::F32(x) => Elements::F32(x),
            Self::F16(x) => Elements::F16(x),
            Self::Bf16(x) => Elements::Bf16(x),
        }
    }

    pub fn bytes(&self) -> &[u8] {
        with_pool!(self, x => { bytemuck::cast_slice(x) })
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        with_pool!(self, x => { bytemuck::cast_slice_mut(x) })
    }
}

/// [`memory::zeroed`], with this backend's error.
pub(super) fn zeroed<T: Zeroable>(len: u64) -> Result<Box<[T]>, CpuError> {
    let zeros = memory::zeroed(len).map(Vec::into_boxed_slice);
    zeros.map_err(|OutOfMemory { bytes }| CpuError::OutOfMemory { bytes })
}
