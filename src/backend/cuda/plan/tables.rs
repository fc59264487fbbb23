//! The page tables in device memory: the same array of words as on the host ([`TableShape`]), updated word by word.

use crate::backend::check::longest_row;
use crate::backend::cuda::driver::gpu::Gpu;
use crate::backend::cuda::driver::memory::DeviceBuffer;
use crate::backend::cuda::driver::raw::RawStream;
use crate::backend::cuda::error::{CudaError, Limit};
use crate::id::PageId;
use crate::layout::{PoolLayout, TableShape};
use crate::plan::TableWrite;

/// One pool's page tables.
#[derive(Debug)]
pub struct Tables {
    words: DeviceBuffer,
    shape: TableShape,
    page_size: u32,
}

impl Tables {
    /// Allocates tables of zeros.
    pub fn new(gpu: &Gpu, shape: TableShape, layout: &PoolLayout, stream: RawStream) -> Result<Self, CudaError> {
        check_shape(&shape, layout.page_size())?;
        let words = DeviceBuffer::zeros(gpu, 4 * shape.words(), stream)?;
        Ok(Self { words, shape, page_size: layout.page_size() })
    }

    pub fn shape(&self) -> &TableShape {
        &self.shape
    }

    pub fn address(&self) -> u64 {
        self.words.address()
    }

    /// Returns the index of a track's first word in the first leaf. All directories precede the leaves.
    pub fn leaf_base(&self, track: u32) -> u32 {
        self.shape.page_word(track, 0)
    }

    /// Returns the pages that checked writes store in the tables.
    pub fn pages<'a>(&self, writes: &'a [TableWrite]) -> impl Iterator<Item = PageId> + use<'a> {
        let first = self.leaf_base(0);
        let pages = writes.iter().filter(move |write| write.index >= first);
        pages.map(|write| PageId::new(write.value))
    }

    /// Returns the maximum number of tokens of one row.
    pub fn longest_row(&self) -> u64 {
        longest_row(&self.shape, self.page_size)
    }

    /// Waits for all submitted work, and returns the words on the device. For tests.
    pub fn read(&self) -> Result<Vec<u32>, CudaError> {
        self.words.read(0, self.shape.words())
    }
}

/// Rejects rows that are too long for kernels. Kernels add positions in 32 bits. They divide positions by the page size
/// with [`magic`](crate::backend::cuda::kernels::params::magic), which is exact only for small positions.
fn check_shape(shape: &TableShape, page_size: u32) -> Result<(), CudaError> {
    let exact = if page_size.is_power_of_two() { 1 } else { u64::from(page_size) };
    Limit::RowTokens.check(longest_row(shape, page_size), (1 << 32) / exact.max(2))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cuda::kernels::params::magic;

    #[test]
    fn every_position_of_a_row_finds_its_page() {
        for page_size in 1..=1024_u32 {
            let shape = |len| TableShape::new(page_size, 1, len, 1).expect("a small table");
            let limit = if page_size.is_power_of_two() { 1 << 31 } else { u32::MAX / page_size };
            let leaf = shape(1).leaf_pages * page_size;
            let longest = shape(limit - limit % leaf);
            assert_eq!(check_shape(&longest, page_size), Ok(()), "{page_size}");
            let last = longest_row(&longest, page_size) as u32 - 1;
            for position in (0..3 * page_size).chain(last - 3 * page_size..=last) {
                let page = ((u64::from(position) * magic(page_size)) >> 32) as u32;
                assert_eq!(page, position / page_size, "{position} / {page_size}");
            }
            let longer = shape(limit + 1);
            let (what, value) = (Limit::RowTokens, longest_row(&longer, page_size));
            let error = CudaError::Limit { what, value, max: limit.into() };
            assert_eq!(check_shape(&longer, page_size), Err(error), "{page_size}");
        }
    }
}
