//! Copies of whole pages between a backend's pool and swap pages or another pool.
//!
//! `copy.rs` and `transfer.rs` make the copies, `swap_moves.rs` keeps their order, and `calls.rs` copies inside a pool.

use super::copy::copy_on_device;
use super::direction::Direction;
use super::region::{CudaRead, CudaWrite};
use super::swap_moves::SwapMoves;
use crate::backend::cuda::driver::raw::is_capturing;
use crate::backend::cuda::driver::stream::{CudaEvent, CudaStream};
use crate::backend::cuda::error::CudaError;
use crate::backend::cuda::opened::Cuda;
use crate::backend::{Moved, PlanError, SwapMemory, check};
use crate::id::{LayerId, MoveId, SwapPageId};
use crate::plan::{PageCopy, PageMove};

impl Cuda {
    /// Copies pages on `stream` into another pool of the same device. The pools have equal
    /// [fingerprints](Cuda::page_fingerprint); each may have either layout. The host orders that stream after the steps
    /// that write the pages. Returns an event at the end of the copies.
    ///
    /// # Errors
    /// Returns an error if pages do not exist or differ in shape or fingerprint, or if the pool or the stream is on
    /// another device.
    /// [`CudaError::Limit`] for pages that are too large for the kernel. In a capture, [`CudaError::PageInUse`] for
    /// pages with an unfinished move, or [`CudaError::NotPrepared`] if the kernel is not compiled. The driver's errors.
    pub fn copy_to_pool(
        &self,
        target: &mut Cuda,
        copies: &[PageCopy],
        stream: &CudaStream,
    ) -> Result<CudaEvent, CudaError> {
        self.gpu.bind()?;
        for gpu in [&target.gpu, stream.gpu()] {
            self.gpu.check_same(Some(gpu.ordinal()))?;
        }
        let fingerprints = (self.page_fingerprint(), target.page_fingerprint());
        let (source, pages) = (self.pools.of_group(0).pages(), target.pools.of_group(0).pages());
        if !source.is_like(pages) {
            return Err(CudaError::PageShape);
        }
        if let (source, target) = fingerprints
            && source != target
        {
            return Err(CudaError::PageFingerprint { source, target });
        }
        check::copies(copies, (source.count, pages.count))?;
        let wait = |moves: &Option<SwapMoves>, end: fn(&PageCopy) -> _| match moves {
            Some(moves) => moves.before_copies(copies.iter().map(end), stream),
            None => Ok(()),
        };
        wait(&self.swap, |copy| copy.source)?;
        wait(&target.swap, |copy| copy.target)?;
        copy_on_device(&self.gpu, source, pages, copies, stream.raw())?;
        stream.mark()
    }

    /// Returns the error, if any, that keeps some swap pages from ever being ready. The error is for the host's log.
    pub fn swap_failure(&self) -> Option<&CudaError> {
        self.swap.as_ref().and_then(SwapMoves::failure)
    }

    pub(in crate::backend::cuda) fn move_pages(
        &mut self,
        direction: Direction,
        id: MoveId,
        moves: &[PageMove],
    ) -> Result<(), CudaError> {
        self.gpu.bind()?;
        let pool = self.pools.of_group(0);
        let (pool, layout) = (pool.pages(), pool.layout());
        let Some(swap) = &mut self.swap else {
            check::moves(id, moves, layout, Moved::default())?;
            return Ok(());
        };
        if is_capturing(self.stream.raw())? {
            return Err(CudaError::NotPrepared);
        }
        swap.move_pages(direction, pool, layout, id, moves, &self.stream)
    }

    pub(in crate::backend::cuda) fn last_moved(&mut self) -> Result<Moved, CudaError> {
        let Some(swap) = &mut self.swap else { return Ok(Moved::default()) };
        self.gpu.bind()?;
        match swap.failure() {
            Some(failure) if !self.fewer_swap_pages => Err(failure.clone()),
            _ => swap.moved(),
        }
    }

    /// Makes the stream wait until all pages that steps use are loaded, before a call that may use any of these pages.
    pub(in crate::backend::cuda) fn before_pages(&mut self) -> Result<(), CudaError> {
        match &mut self.swap {
            Some(swap) => swap.before_all(&self.stream),
            None => Ok(()),
        }
    }

    /// Makes the stream wait until this layer of all pages that steps use is loaded, before a call of the layer.
    pub(in crate::backend::cuda) fn before_layer(&mut self, layer: LayerId) -> Result<(), CudaError> {
        let Some(swap) = &mut self.swap else { return Ok(()) };
        let layout = self.pools.of_group(0).layout();
        check::layer(layer, layout)?;
        if layout.has_one_shape() {
            swap.before_lane(layout.place(layer).lane, &self.stream)
        } else {
            // Lanes differ by group, so loads are not split into parts.
            swap.before_all(&self.stream)
        }
    }

    fn leasing(&mut self, page: SwapPageId) -> &mut SwapMoves {
        let pages = self.pools.of_group(0).layout().swap_region_pages();
        assert!(page.raw() < pages, "{}", PlanError::SwapPage { page, pages });
        self.swap.as_mut().expect("a pool with swap pages has their memory")
    }
}

impl SwapMemory for Cuda {
    type Read = CudaRead;
    type Write = CudaWrite;

    fn lease(&mut self, page: SwapPageId) -> CudaRead {
        self.leasing(page).lease(page)
    }

    fn lease_mut(&mut self, page: SwapPageId) -> CudaWrite {
        self.leasing(page).lease_mut(page)
    }
}
