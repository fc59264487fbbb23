//! The memory of a pool, and the numbers in it: each plane has an element type of its own.

use std::ops::Range;

use bytemuck::{Pod, Zeroable};

use super::error::CpuError;
use super::rows::Elements;
use crate::layout::{KvDtype, PoolLayout};
use crate::memory::{self, OutOfMemory};

/// What memory is taken in: as aligned as any element type.
type Unit = u128;

/// Units in a line of the caches, of 64 bytes.
const LINE_UNITS: usize = 4;

/// All bytes of a pool.
#[derive(Debug)]
pub(super) struct Pool {
    memory: Box<[Unit]>,
    /// First unit of the pool, aligned to a cache line.
    start: usize,
    bytes: usize,
}

/// Runs a block in which `$number` is the element type that a dtype names.
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
    /// Zeroed memory for a pool.
    pub fn new(layout: &PoolLayout) -> Result<Self, CpuError> {
        let bytes = layout.total_bytes();
        let units = bytes.div_ceil(size_of::<Unit>() as u64);
        let memory: Box<[Unit]> = zeroed(units.saturating_add(LINE_UNITS as u64))
            .map_err(|_| CpuError::OutOfMemory { bytes })?;
        let start = (memory.as_ptr().addr() / size_of::<Unit>()).wrapping_neg() % LINE_UNITS;
        // Pages of a cache are read in any order: in the system's small pages each of them misses the TLB.
        memory::ask_for_huge_pages(memory.as_ptr().addr(), size_of_val(&*memory));
        Ok(Self { memory, start, bytes: bytes as usize })
    }

    pub fn bytes(&self) -> &[u8] {
        &self.numbers()[..self.bytes]
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let bytes = self.bytes;
        &mut self.numbers_mut()[..bytes]
    }

    /// All of it as numbers of one type, whatever the planes': number `i` begins at byte `i * size_of::<T>()`.
    pub fn numbers<T: Pod>(&self) -> &[T] {
        bytemuck::cast_slice(&self.memory[self.start..])
    }

    /// As [`Pool::numbers`], to write.
    pub fn numbers_mut<T: Pod>(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(&mut self.memory[self.start..])
    }

    /// The numbers in a range of bytes; nothing where they are multiples of a scale.
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

/// [`memory::zeroed`], with this backend's error.
pub(super) fn zeroed<T: Zeroable>(len: u64) -> Result<Box<[T]>, CpuError> {
    let zeros = memory::zeroed(len).map(Vec::into_boxed_slice);
    zeros.map_err(|OutOfMemory { bytes }| CpuError::OutOfMemory { bytes })
}
