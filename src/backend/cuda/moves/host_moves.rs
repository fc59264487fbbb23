//! The order of saves and loads among the work of a backend.
//!
//! Each direction has a stream. A save waits for all earlier work of the backend's stream; a load waits for the work of
//! steps that have ended. A page records its last moves. Work that uses it afterwards waits for these and no others:
//! `begin` for the pages that its table writes name, `copy_pages` for its pages, the other direction for its own.
//!
//! Not here: the copies (`transfer.rs`), the memory (`region.rs`).

use std::collections::VecDeque;

use super::direction::Direction;
use super::region::{CudaRead, CudaWrite, Region};
use super::transfer::{Transfer, Way};
use crate::backend::cuda::driver::gpu::Gpu;
use crate::backend::cuda::driver::raw::is_capturing;
use crate::backend::cuda::driver::stream::{CudaEvent, CudaStream};
use crate::backend::cuda::error::CudaError;
use crate::backend::cuda::store::pool::Pages;
use crate::backend::{Moved, check};
use crate::id::{HostPageId, MoveId, PageId, StepId};
use crate::layout::PoolLayout;
use crate::memory;
use crate::plan::{PageMove, StepEnd};

/// The host pages of a backend and the moves from and to them.
#[derive(Debug)]
pub(in crate::backend::cuda) struct HostMoves {
    gpu: Gpu,
    region: Region,
    /// The region's pages, as the pool's kernels address them.
    pages: Pages,
    save: (Direction, Transfer),
    load: (Direction, Transfer),
    /// The last move of each direction.
    last: Moved,
    /// The last moves of each page of the pool, and of each host page.
    of_device: Vec<Moved>,
    of_host: Vec<Moved>,
    /// The end of the backend's stream at a move.
    fork: CudaEvent,
    /// Open steps, and the end of the backend's stream when each began.
    begins: VecDeque<(StepId, CudaEvent)>,
    spare: Vec<CudaEvent>,
    /// The last step that had begun when a call was made that did not belong to the last step.
    outside: StepId,
}

/// Pages that a call uses next, by the last moves of all of them.
fn latest(moves: impl Iterator<Item = Moved>) -> Moved {
    moves.fold(Moved::default(), |all, of| Moved {
        saved: all.saved.max(of.saved),
        loaded: all.loaded.max(of.loaded),
    })
}

impl HostMoves {
    pub fn new(
        gpu: &Gpu,
        layout: &PoolLayout,
        pool: &Pages,
        fewer: bool,
    ) -> Result<Self, CudaError> {
        let region = Region::new(gpu, layout, fewer)?;
        let columns = |count: u32| {
            memory::filled(count.into(), Moved::default())
                .map_err(|error| CudaError::OutOfMemory { bytes: error.bytes })
        };
        Ok(Self {
            gpu: gpu.clone(),
            pages: Pages::packed(region.address(), pool, layout.host_region_pages()),
            region,
            save: (Direction::new(gpu)?, Transfer::new(gpu, Way::Save, pool)?),
            load: (Direction::new(gpu)?, Transfer::new(gpu, Way::Load, pool)?),
            last: Moved::default(),
            of_device: columns(layout.page_count())?,
            of_host: columns(layout.host_region_pages())?,
            fork: CudaEvent::new(gpu, false)?,
            begins: VecDeque::new(),
            spare: Vec::new(),
            outside: StepId::new(0),
        })
    }

    /// Saves pages after all earlier work of the backend's `stream`.
    pub fn save(
        &mut self,
        (pool, layout): (&Pages, &PoolLayout),
        id: MoveId,
        moves: &[PageMove],
        stream: &CudaStream,
    ) -> Result<(), CudaError> {
        self.check(id, moves, layout, Way::Save)?;
        let own = &self.save.0.stream;
        self.fork.record(stream)?;
        self.fork.block(own)?;
        // The host pages may still be read, and the pages of the pool written.
        self.load.0.block(self.latest_of(moves).loaded, own)?;
        for PageMove { device, host } in moves {
            self.of_device[device.index()].saved = id;
            self.of_host[host.index()].saved = id;
        }
        self.last.saved = id;
        let (direction, transfer) = &mut self.save;
        let own = direction.stream.raw();
        let done = transfer.submit(&self.gpu, pool, &self.pages, moves, own);
        let done = done.and_then(|()| direction.record(id));
        self.finish_failed(done)
    }

    /// Loads pages after the steps of the backend's `stream` that have ended.
    pub fn load(
        &mut self,
        (pool, layout): (&Pages, &PoolLayout),
        id: MoveId,
        moves: &[PageMove],
        stream: &CudaStream,
    ) -> Result<(), CudaError> {
        self.check(id, moves, layout, Way::Load)?;
        let own = &self.load.0.stream;
        match self.begins.front() {
            // All other work was submitted before the first open step.
            Some((first, begin)) if *first > self.outside => begin.block(own)?,
            _ => {
                self.fork.record(stream)?;
                self.fork.block(own)?;
            }
        }
        // The host pages may still be written, and the pages of the pool read.
        self.save.0.block(self.latest_of(moves).saved, own)?;
        for PageMove { device, host } in moves {
            self.of_device[device.index()].loaded = id;
            self.of_host[host.index()].loaded = id;
        }
        self.last.loaded = id;
        let (direction, transfer) = &mut self.load;
        let own = direction.stream.raw();
        let done = transfer.submit(&self.gpu, pool, &self.pages, moves, own);
        let done = done.and_then(|()| direction.record(id));
        self.finish_failed(done)
    }

    /// Checks a call, before it has any effect.
    fn check(
        &mut self,
        id: MoveId,
        moves: &[PageMove],
        layout: &PoolLayout,
        way: Way,
    ) -> Result<(), CudaError> {
        check::moves(id, moves, layout, self.last)?;
        let ready = self.region.ready();
        for &PageMove { host, .. } in moves {
            if host.raw() >= ready {
                let failed = self.region.failure().cloned();
                return Err(failed.unwrap_or(CudaError::NotPinned { page: host, ready }));
            }
            assert!(self.region.is_free(host, way == Way::Load), "B16: {host:?} is leased");
        }
        self.moved().map(|_| ())
    }

    /// Waits for a move of which a part may have been submitted.
    fn finish_failed(&mut self, done: Result<(), CudaError>) -> Result<(), CudaError> {
        if done.is_err() {
            let _ = self.gpu.finish();
        }
        done
    }

    fn latest_of(&self, moves: &[PageMove]) -> Moved {
        let both =
            |of: &PageMove| [self.of_device[of.device.index()], self.of_host[of.host.index()]];
        latest(moves.iter().flat_map(both))
    }

    /// Returns the reason for which some pages will never be ready.
    pub fn failure(&self) -> Option<&CudaError> {
        self.region.failure()
    }

    /// Returns the pages that are ready.
    pub fn ready(&self) -> u32 {
        self.region.ready()
    }

    /// Returns the last moves that are done.
    pub fn moved(&mut self) -> Result<Moved, CudaError> {
        Ok(Moved { saved: self.save.0.poll()?, loaded: self.load.0.poll()? })
    }

    /// Returns whether a move may be in flight.
    fn is_moving(&self) -> bool {
        self.save.0.done() < self.last.saved || self.load.0.done() < self.last.loaded
    }

    /// Makes the backend's stream wait for the moves of pages that a step's table writes name, and records the step.
    pub fn begin(
        &mut self,
        step: StepId,
        pages: impl Iterator<Item = PageId>,
        stream: &CudaStream,
    ) -> Result<(), CudaError> {
        let mut event = match self.spare.pop() {
            Some(event) => event,
            None => CudaEvent::new(&self.gpu, false)?,
        };
        event.record(stream)?;
        if self.is_moving() {
            self.moved()?;
            self.block(pages, stream)?;
        }
        self.begins.push_back((step, event));
        Ok(())
    }

    /// Makes a stream wait for the moves of pages.
    fn block(
        &self,
        pages: impl Iterator<Item = PageId>,
        stream: &CudaStream,
    ) -> Result<(), CudaError> {
        let last = latest(pages.map(|page| self.of_device[page.index()]));
        self.save.0.block(last.saved, stream)?;
        self.load.0.block(last.loaded, stream)
    }

    /// Makes a stream wait for the moves of pages that copies use. A capture cannot wait.
    pub fn before_copies(
        &self,
        mut pages: impl Iterator<Item = PageId>,
        stream: &CudaStream,
    ) -> Result<(), CudaError> {
        if !self.is_moving() {
            return Ok(());
        }
        if !is_capturing(stream.raw())? {
            return self.block(pages, stream);
        }
        let (saved, loaded) = (self.save.0.done(), self.load.0.done());
        let is_moving = |page: &PageId| {
            let of = self.of_device[page.index()];
            of.saved > saved || of.loaded > loaded
        };
        match pages.find(is_moving) {
            Some(page) => Err(CudaError::PageInUse { page: page.raw() }),
            None => Ok(()),
        }
    }

    /// Records a call that does not belong to `last`, the last step that has begun.
    pub fn outside(&mut self, last: StepId) {
        self.outside = last;
    }

    /// Ends steps; `last` has begun last.
    pub fn end(&mut self, end: StepEnd, last: StepId) {
        let spare = match end {
            StepEnd::Complete(step) => {
                let ended = self.begins.iter().take_while(|(begun, _)| *begun <= step).count();
                self.begins.drain(..ended)
            }
            StepEnd::Abort(step) => {
                // Its calls come after the begin of steps that are still open.
                self.outside = last;
                let open = self.begins.iter().take_while(|(begun, _)| *begun < step).count();
                self.begins.drain(open..)
            }
        };
        self.spare.extend(spare.map(|(_, event)| event));
    }

    /// Waits for all moves.
    pub fn synchronize(&mut self) -> Result<(), CudaError> {
        let streams = [&self.save.0.stream, &self.load.0.stream];
        streams.into_iter().try_for_each(CudaStream::synchronize)?;
        self.moved().map(|_| ())
    }

    /// Leases a host page to a reader.
    pub fn lease(&mut self, page: HostPageId) -> CudaRead {
        let (of, moved) = (self.of_host[page.index()], self.moved());
        assert!(moved.is_ok_and(|done| of.saved <= done.saved), "B16: a save writes {page:?}");
        self.region.lease(page)
    }

    /// Leases a host page to a writer.
    pub fn lease_mut(&mut self, page: HostPageId) -> CudaWrite {
        let (of, moved) = (self.of_host[page.index()], self.moved());
        let is_done = |done: Moved| of.saved <= done.saved && of.loaded <= done.loaded;
        assert!(moved.is_ok_and(is_done), "B16: a move uses {page:?}");
        self.region.lease_mut(page)
    }
}

impl Drop for HostMoves {
    fn drop(&mut self) {
        // The thread of the region unpins its memory without further waits.
        let _ = self.synchronize();
    }
}
