//! The swap pages of a backend: pinned memory that grows in the background, and leases on its pages.
//!
//! `swap_moves.rs` moves the pages; `driver/mapping.rs` maps and pins the memory.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, OnceLock};
use std::{slice, thread};

use crate::backend::cuda::driver::gpu::Gpu;
use crate::backend::cuda::driver::mapping::{Mapping, available_memory};
use crate::backend::cuda::error::CudaError;
use crate::id::SwapPageId;
use crate::layout::PoolLayout;

/// Maximum number of bytes that are pinned in one call, unless whole pages need more. Other calls of the driver wait
/// for such a call: a step took up to 471 ms while pieces of 1 GiB were pinned (H100).
const PIECE_BYTES: u64 = 128 << 20;
/// Bytes of the smallest page of the system.
const SYSTEM_PAGE: u64 = 4096;
/// The state of a page that a writer has leased; other states are numbers of readers.
const WRITER: u32 = u32::MAX;

/// Swap pages, each contiguous in the order `[plane, lane, piece]`.
///
/// A thread pins them, and unpins them after the backend is dropped, so the host waits for neither. If a lease exists
/// then, the drop of the last lease unpins them.
#[derive(Debug)]
pub struct Region {
    pages: Arc<Pages>,
    /// The thread ends after this is dropped.
    _alive: Sender<()>,
}

#[derive(Debug)]
struct Pages {
    memory: Mapping,
    page_bytes: u64,
    ready: AtomicU32,
    failure: OnceLock<CudaError>,
    /// For each page: 0, the number of its readers, or [`WRITER`].
    leases: Box<[AtomicU32]>,
}

impl Region {
    /// Reserves the pages of a layout and begins to pin them. With `fewer`, reserves at most as many pages as the
    /// machine has memory for.
    ///
    /// # Errors
    /// [`CudaError::SwapMemory`] if the machine has too little memory for all pages, or with `fewer` for one page.
    /// [`CudaError::OutOfMemory`] if the address space is too small or no thread can be started.
    pub fn new(gpu: &Gpu, layout: &PoolLayout, fewer: bool) -> Result<Self, CudaError> {
        let (page_bytes, wanted) = (layout.page_bytes(), layout.swap_region_pages());
        let available = available_memory().unwrap_or(u64::MAX);
        let most = u32::try_from(available / page_bytes).unwrap_or(u32::MAX);
        let count = if fewer { wanted.min(most) } else { wanted };
        if count == 0 || count > most {
            let bytes = page_bytes * u64::from(wanted);
            return Err(CudaError::SwapMemory { bytes, available });
        }
        let piece = piece_bytes(page_bytes);
        let memory = Mapping::reserve(gpu, page_bytes * u64::from(count), piece)?;
        let leases = (0..count).map(|_| AtomicU32::new(0)).collect();
        let (ready, failure) = (AtomicU32::new(0), OnceLock::new());
        let pages = Arc::new(Pages { memory, page_bytes, ready, failure, leases });
        let (alive, ends) = channel();
        let pinned = Arc::clone(&pages);
        let thread = thread::Builder::new().name("kvarena-pin".into());
        thread.spawn(move || pinned.pin(&ends)).map_err(|_| CudaError::OutOfMemory { bytes: 0 })?;
        Ok(Self { pages, _alive: alive })
    }

    /// Returns the number of pages that are pinned.
    pub fn ready(&self) -> u32 {
        self.pages.ready.load(Ordering::Acquire)
    }

    /// Returns the error, if any, that keeps some pages from ever being ready.
    pub fn failure(&self) -> Option<&CudaError> {
        self.pages.failure.get()
    }

    /// Returns the address of page 0, which is the same for the host and for devices. The other pages follow.
    pub fn address(&self) -> u64 {
        self.pages.memory.address()
    }

    /// Returns whether a move may write a page, or may read it if `read`.
    pub fn is_free(&self, page: SwapPageId, read: bool) -> bool {
        match self.pages.leases[page.index()].load(Ordering::Acquire) {
            0 => true,
            WRITER => false,
            _ => read,
        }
    }

    /// Leases a page to a reader. No unfinished save may write the page.
    pub fn lease(&self, page: SwapPageId) -> CudaRead {
        assert!(page.raw() < self.ready(), "{page:?} is not ready");
        let lease = &self.pages.leases[page.index()];
        // One more reader than this maximum would look like a writer.
        let more = |readers| (readers < WRITER - 1).then_some(readers + 1);
        let leased = lease.fetch_update(Ordering::AcqRel, Ordering::Acquire, more);
        assert!(leased.is_ok(), "B16: a writer has leased {page:?}");
        CudaRead { pages: Arc::clone(&self.pages), page }
    }

    /// Leases a page to a writer. No unfinished move may use the page.
    pub fn lease_mut(&self, page: SwapPageId) -> CudaWrite {
        assert!(page.raw() < self.ready(), "{page:?} is not ready");
        let lease = &self.pages.leases[page.index()];
        let leased = lease.compare_exchange(0, WRITER, Ordering::AcqRel, Ordering::Acquire);
        assert!(leased.is_ok(), "B16: {page:?} is leased");
        CudaWrite { pages: Arc::clone(&self.pages), page }
    }
}

/// Returns the number of bytes to pin at a time, which is a multiple of the page's bytes and of the system's page size.
fn piece_bytes(page_bytes: u64) -> u64 {
    let common = page_bytes * (SYSTEM_PAGE >> page_bytes.trailing_zeros().min(12));
    common * (PIECE_BYTES / common).max(1)
}

impl Pages {
    /// Pins all pages, and then waits until the backend is dropped. Stops earlier if the backend is dropped earlier.
    fn pin(self: Arc<Self>, ends: &Receiver<()>) {
        let count = self.leases.len() as u32;
        while self.ready.load(Ordering::Relaxed) < count {
            if ends.try_recv() == Err(TryRecvError::Disconnected) {
                return;
            }
            match self.memory.pin_next() {
                Ok(bytes) => {
                    let ready = u32::try_from(bytes / self.page_bytes).unwrap_or(count);
                    self.ready.store(ready.min(count), Ordering::Release);
                }
                Err(error) => {
                    let _ = self.failure.set(error);
                    break;
                }
            }
        }
        let _ = ends.recv();
    }

    fn start(&self, page: SwapPageId) -> *mut u8 {
        self.memory.at(u64::from(page.raw()) * self.page_bytes)
    }

    fn release(&self, page: SwapPageId) {
        let lease = &self.leases[page.index()];
        let one_less = |state| Some(if state == WRITER { 0 } else { state - 1 });
        let _ = lease.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_less);
    }
}

/// The bytes of a leased swap page, to read.
#[derive(Debug)]
pub struct CudaRead {
    pages: Arc<Pages>,
    page: SwapPageId,
}

impl AsRef<[u8]> for CudaRead {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the page is pinned and initialised. While it is leased, nothing writes it.
        unsafe { slice::from_raw_parts(self.pages.start(self.page), self.pages.page_bytes as usize) }
    }
}

impl Drop for CudaRead {
    fn drop(&mut self) {
        self.pages.release(self.page);
    }
}

/// The bytes of a leased swap page, to write.
#[derive(Debug)]
pub struct CudaWrite {
    pages: Arc<Pages>,
    page: SwapPageId,
}

impl AsMut<[u8]> for CudaWrite {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: the page is pinned and initialised. While it is leased to this writer, nothing else accesses it.
        unsafe { slice::from_raw_parts_mut(self.pages.start(self.page), self.pages.page_bytes as usize) }
    }
}

impl Drop for CudaWrite {
    fn drop(&mut self) {
        self.pages.release(self.page);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_hold_whole_pages_of_both_kinds() {
        for page_bytes in [16, 48, 4096, 2304 << 10, 3_000_016, 128 << 20, (1 << 30) + 16] {
            let piece = piece_bytes(page_bytes);
            assert_eq!((piece % page_bytes, piece % SYSTEM_PAGE), (0, 0), "{page_bytes}");
            assert!(piece <= PIECE_BYTES.max(256 * page_bytes), "{page_bytes}: {piece}");
        }
        assert_eq!(piece_bytes(1 << 20), PIECE_BYTES);
    }
}
