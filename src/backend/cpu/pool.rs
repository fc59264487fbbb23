//! The memory of a pool. Each plane has its own element type.

use std::ops::Range;

use bytemuck::{Pod, Zeroable};

use super::error::CpuError;
use super::rows::Elements;
use crate::layout::{KvDtype, PoolLayout};
use crate::memory::{self, OutOfMemory};

/// The unit of allocation, aligned for any element type.
type Unit = u128;

const LINE_UNITS: usize = 4;

#[derive(Debug)]
pub(super) struct Pool {
    memory: Box<[Unit]>,
    /// Index of the pool's first unit, which is aligned to a cache line.
    start: usize,
    bytes: usize,
}

/// Runs a block with `$number` as the element type of a dtype.
macro_rules! with_number {
    ($dtype:expr, $number:ident => $body:block) => {
        match $dtype {
            $crate::layout::KvDtype::F32 => {
                type $number = f32;
                $body
            }
            $crate::layout::KvDtype::F16 => {
                type $number = half::f16;
                $body
            }
            $crate::layout::KvDtype::Bf16 => {
                type $number = half::bf16;
                $body
            }
            $crate::layout::KvDtype::Fp8E4M3 => {
                type $number = $crate::backend::cpu::e4m3::E4m3;
                $body
            }
        }
    };
}
pub(super) use with_number;

impl Pool {
    /// Allocates zeroed memory for a pool.
    pub fn new(layout: &PoolLayout) -> Result<Self, CpuError> {
        let bytes = layout.total_bytes();
        let units = bytes.div_ceil(size_of::<Unit>() as u64);
        let memory: Box<[Unit]> =
            zeroed(units.saturating_add(LINE_UNITS as u64)).map_err(|_| CpuError::OutOfMemory { bytes })?;
        let start = (memory.as_ptr().addr() / size_of::<Unit>()).wrapping_neg() % LINE_UNITS;
        // Cached pages are read in random order, so with small system pages each read would miss the TLB.
        memory::advise_huge_pages(memory.as_ptr().addr(), size_of_val(&*memory));
        Ok(Self { memory, start, bytes: bytes as usize })
    }

    pub fn bytes(&self) -> &[u8] {
        &self.numbers()[..self.bytes]
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let bytes = self.bytes;
        &mut self.numbers_mut()[..bytes]
    }

    /// Returns the pool as numbers of one type: number `i` begins at byte `i * size_of::<T>()`.
    pub fn numbers<T: Pod>(&self) -> &[T] {
        bytemuck::cast_slice(&self.memory[self.start..])
    }

    /// Returns [`Pool::numbers`] as a mutable slice.
    pub fn numbers_mut<T: Pod>(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(&mut self.memory[self.start..])
    }

    /// Returns the numbers in a range of bytes; `None` if they are quantised.
    pub fn elements(&self, dtype: KvDtype, bytes: Range<usize>) -> Option<Elements<'_>> {
        let size = dtype.size() as usize;
        let range = bytes.start / size..bytes.end / size;
        Some(match dtype {
            KvDtype::F32 => Elements::F32(&self.numbers()[range]),
            KvDtype::F16 => Elements::F16(&self.numbers()[range]),
            KvDtype::Bf16 => Elements::Bf16(&self.numbers()[range]),
            KvDtype::Fp8E4M3 => return None,
        })
    }
}

/// Like [`memory::zeroed`], but returns an error of this backend.
pub(super) fn zeroed<T: Zeroable>(len: u64) -> Result<Box<[T]>, CpuError> {
    let zeros = memory::zeroed(len).map(Vec::into_boxed_slice);
    zeros.map_err(|OutOfMemory { bytes }| CpuError::OutOfMemory { bytes })
}
