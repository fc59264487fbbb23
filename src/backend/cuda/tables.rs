//! The page tables in device memory: the same array of words as on the host, changed word by word.
//!
//! Not here: what the words mean (`TableShape`).

use cust::sys;

use super::error::{CudaError, check};
use super::gpu::Gpu;
use super::memory::DeviceBuffer;
use super::stream::{RawStream, raw};
use crate::layout::{PoolLayout, TableShape};
use crate::plan::TableWrite;

/// One pool's page tables.
#[derive(Debug)]
pub(super) struct Tables {
    words: DeviceBuffer,
    shape: TableShape,
    page_count: u32,
    page_size: u32,
}

impl Tables {
    /// Tables of zeros.
    pub(super) fn new(
        gpu: &Gpu,
        shape: TableShape,
        layout: &PoolLayout,
        stream: RawStream,
    ) -> Result<Self, CudaError> {
        let words = DeviceBuffer::new(gpu, 4 * shape.words() as u64)?;
        // SAFETY: the range is the buffer allocated above.
        let result =
            unsafe { sys::cuMemsetD32Async(words.address(), 0, shape.words(), raw(stream)) };
        check("cuMemsetD32Async", result)?;
        let (page_count, page_size) = (layout.page_count(), layout.page_size());
        Ok(Self { words, shape, page_count, page_size })
    }

    pub(super) fn shape(&self) -> &TableShape {
        &self.shape
    }

    /// Device address of the words.
    pub(super) fn address(&self) -> u64 {
        self.words.address()
    }

    /// Words of all directories, which the chunks follow.
    pub(super) fn chunk_base(&self) -> u32 {
        self.shape.rows * self.shape.chunks_per_row
    }

    /// Most tokens that one row names pages for, of `page_size` tokens each.
    pub(super) fn longest_row(&self) -> u64 {
        u64::from(self.shape.chunks_per_row)
            * u64::from(self.shape.chunk_pages)
            * u64::from(self.page_size)
    }

    /// Refuses a write that would send a kernel outside the tables or the pool.
    pub(super) fn check(&self, writes: &[TableWrite]) -> Result<(), CudaError> {
        let directory = self.chunk_base();
        let words = u32::try_from(self.shape.words()).unwrap_or(u32::MAX);
        let within = |&TableWrite { index, value }: &TableWrite| {
            let limit = if index < directory { self.shape.chunk_count } else { self.page_count };
            (index < words) & (value < limit)
        };
        // All of them in one pass without branches; which one it was is asked only where one is off.
        if writes.iter().fold(true, |all, write| all & within(write)) {
            return Ok(());
        }
        let write = writes.iter().find(|write| !within(write)).expect("one is off");
        Err(CudaError::TableWrite { index: write.index, value: write.value })
    }

    /// The words as they are on the device, after everything asked for is done. For tests.
    pub(super) fn read(&self) -> Result<Vec<u32>, CudaError> {
        self.words.read(0, self.shape.words())
    }
}
