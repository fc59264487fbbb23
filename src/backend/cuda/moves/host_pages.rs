//! Pages in pinned host memory. They record pending copies and reject conflicting access.
//!
//! Not here: the copies (`copy.rs`).

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::backend::cuda::driver::gpu::Gpu;
use crate::backend::cuda::driver::memory::PinnedBuffer;
use crate::backend::cuda::driver::stream::{CudaEvent, CudaStream};
use crate::backend::cuda::error::CudaError;
use crate::id::PageId;
use crate::layout::PoolLayout;

/// The direction of a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::backend::cuda) enum Way {
    ToHost,
    FromHost,
}

/// Pages in pinned host memory, each one piece of memory in the order `[plane, layer, piece]`.
#[derive(Debug)]
pub struct HostPages {
    memory: PinnedBuffer,
    pub(in crate::backend::cuda) page_bytes: u64,
    pub(in crate::backend::cuda) count: u32,
    /// Copies that may be pending. The host tracks copies in graphs.
    copies: Mutex<Vec<UnderWay>>,
}

/// A copy from or to host pages.
#[derive(Debug)]
struct UnderWay {
    way: Way,
    pages: Vec<u32>,
    done: CudaEvent,
}

impl HostPages {
    /// Allocates pinned memory for `count` pages of a pool's shape.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`].
    pub fn new(gpu: &Gpu, layout: &PoolLayout, count: u32) -> Result<Self, CudaError> {
        let page_bytes = layout.page_bytes();
        let bytes = page_bytes * u64::from(count);
        let memory = PinnedBuffer::new(gpu, bytes as usize)?;
        Ok(Self { memory, page_bytes, count, copies: Mutex::default() })
    }

    /// Returns one page, to read.
    ///
    /// # Errors
    /// [`CudaError::PageInUse`] while a copy to the page is pending: wait for its event first.
    ///
    /// # Panics
    /// If the page does not exist.
    pub fn page(&self, page: PageId) -> Result<&[u8], CudaError> {
        self.check_done(page, false)?;
        let start = page.index() * self.page_bytes as usize;
        Ok(&self.memory.as_slice()[start..start + self.page_bytes as usize])
    }

    /// Returns one page, to write.
    ///
    /// # Errors
    /// [`CudaError::PageInUse`] while a copy from or to the page is pending: wait for its event first.
    ///
    /// # Panics
    /// If the page does not exist.
    pub fn page_mut(&mut self, page: PageId) -> Result<&mut [u8], CudaError> {
        self.check_done(page, true)?;
        let start = page.index() * self.page_bytes as usize;
        Ok(&mut self.memory.as_mut_slice()[start..start + self.page_bytes as usize])
    }

    /// Rejects a page that a pending copy writes, or reads if the caller wants to write it.
    fn check_done(&self, page: PageId, write: bool) -> Result<(), CudaError> {
        assert!(page.raw() < self.count);
        for copy in self.copies().iter().filter(|copy| write || copy.way == Way::ToHost) {
            if copy.pages.contains(&page.raw()) && !copy.done.is_done()? {
                return Err(CudaError::PageInUse { page: page.raw() });
            }
        }
        Ok(())
    }

    /// Host address of a page.
    pub(in crate::backend::cuda) fn host_address(&self, page: u32) -> *mut u8 {
        assert!(page < self.count);
        self.memory.host().wrapping_add(page as usize * self.page_bytes as usize)
    }

    /// Device address of the first page.
    pub(in crate::backend::cuda) fn address(&self) -> u64 {
        self.memory.address()
    }

    /// Records a copy that ends at the stream's present end, with its own event, because the caller may reuse theirs.
    pub(in crate::backend::cuda) fn remember(
        &self,
        way: Way,
        pages: impl Iterator<Item = u32>,
        stream: &CudaStream,
    ) -> Result<(), CudaError> {
        let (done, pages) = (stream.mark()?, pages.collect());
        let mut copies = self.copies();
        copies.retain(|copy| copy.done.is_done() != Ok(true));
        copies.push(UnderWay { way, pages, done });
        Ok(())
    }

    fn copies(&self) -> MutexGuard<'_, Vec<UnderWay>> {
        // A panic cannot leave the list half changed.
        self.copies.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for HostPages {
    fn drop(&mut self) {
        // Copies may run on another device, and the drop of the memory does not wait for that device's work.
        for copy in self.copies().drain(..) {
            // If the wait fails, that device's context is broken.
            let _ = copy.done.synchronize();
        }
    }
}
