//! Orders saves and loads among a backend's other work.
//!
//! Each direction has a stream. A save waits for all earlier work of the backend's stream; a load waits at least for
//! the work of steps that have ended. Each page has a record of its last moves. Later work waits only for the last
//! moves of the pages that it uses. A step uses the pages that its table writes name. `copy_pages` and moves of the
//! other direction use the pages that they copy.
//!
//! A large load copies the first layers of all its pages, then the next layers, and so on. It thus has a few parts,
//! each with an event. `begin` waits for saves alone, and a layer's calls wait for the part that contains the layer.
//! Graphs cannot wait, so `Cuda::stage` waits for all parts.
//!
//! `transfer.rs` makes the copies; `region.rs` owns the memory.

use std::collections::VecDeque;

use super::direction::{Direction, MoveQueue, Part};
use super::region::{CudaRead, CudaWrite, Region};
use super::transfer::Transfer;
use crate::backend::cuda::driver::gpu::Gpu;
use crate::backend::cuda::driver::raw::is_capturing;
use crate::backend::cuda::driver::stream::{CudaEvent, CudaStream};
use crate::backend::cuda::error::CudaError;
use crate::backend::cuda::store::pages::Pages;
use crate::backend::{Moved, PlanError, check};
use crate::id::{MoveId, PageId, StepId, SwapPageId};
use crate::layout::PoolLayout;
use crate::memory::Memory;
use crate::plan::{PageMove, StepEnd};

/// Maximum number of parts of a load.
const PARTS_MAX: u64 = 4;
/// Minimum bytes of a load that is submitted in parts; smaller loads end soon.
const PARTED_BYTES: u64 = 8 << 20;
/// Minimum bytes of one plane of a page in a part. On an H100, blocks of 288 KiB load at 54.8 GB/s, whole pages of
/// 2,304 KiB at 55.0.
const PART_BYTES: u64 = 192 << 10;

/// The swap pages of a backend and the moves from and to them.
#[derive(Debug)]
pub struct SwapMoves {
    gpu: Gpu,
    region: Region,
    /// The region's pages, as the pool's kernels address them.
    pages: Pages,
    saves: MoveQueue,
    loads: MoveQueue,
    save_transfer: Transfer,
    load_transfer: Transfer,
    /// Number of parts of a large load. The parts' numbers of lanes differ by at most one.
    parts: u32,
    /// The last move of each direction.
    last: Moved,
    /// The last moves of each page of the pool, and of each swap page.
    of_device: Vec<Moved>,
    of_swap: Vec<Moved>,
    /// The end of the backend's stream at the last move that waited for all earlier work.
    fork: CudaEvent,
    /// Open steps, and the end of the backend's stream when each began.
    begins: VecDeque<(StepId, CudaEvent)>,
    spare: Vec<CudaEvent>,
    /// The newest step at the time of the last *stray call*, which belonged to an older step or to none.
    newest_at_stray_call: StepId,
    /// The last load that wrote a page of a begun step.
    needed: MoveId,
    /// The last part of a load for which the backend's stream waits or has waited. This wait covers all earlier parts.
    awaited: Part,
}

/// Returns the last save and the last load among the moves of several pages.
fn latest(moves: impl Iterator<Item = Moved>) -> Moved {
    moves.fold(Moved::default(), |all, of| Moved { saved: all.saved.max(of.saved), loaded: all.loaded.max(of.loaded) })
}

impl SwapMoves {
    pub fn new(gpu: &Gpu, layout: &PoolLayout, pool: &Pages, fewer: bool) -> Result<Self, CudaError> {
        let region = Region::new(gpu, layout, fewer)?;
        let columns = |count: u32| {
            Memory::new(false)
                .filled(count.into(), Moved::default())
                .map_err(|error| CudaError::OutOfMemory { bytes: error.bytes })
        };
        let load_transfer = Transfer::new(gpu, Direction::Load, pool)?;
        let most = pool.page_bytes() / (u64::from(pool.planes()) * PART_BYTES);
        let parts = if load_transfer.is_by_engines() { most } else { 1 };
        Ok(Self {
            gpu: gpu.clone(),
            parts: parts.clamp(1, PARTS_MAX.min(pool.lanes.into())) as u32,
            pages: Pages::packed(region.address(), pool, layout.swap_region_pages()),
            region,
            saves: MoveQueue::new(gpu)?,
            loads: MoveQueue::new(gpu)?,
            save_transfer: Transfer::new(gpu, Direction::Save, pool)?,
            load_transfer,
            last: Moved::default(),
            of_device: columns(layout.page_count())?,
            of_swap: columns(layout.swap_region_pages())?,
            fork: CudaEvent::new(gpu, false)?,
            begins: VecDeque::new(),
            spare: Vec::new(),
            newest_at_stray_call: StepId::new(0),
            needed: MoveId::new(0),
            awaited: Part::default(),
        })
    }

    /// Moves pages: saves them after all earlier work of the backend's `stream`, or loads them after the work before
    /// the first open step. A load also waits for all earlier work if no step is open, or if a call since that step's
    /// begin did not belong to the last step.
    pub fn move_pages(
        &mut self,
        direction: Direction,
        pool: &Pages,
        layout: &PoolLayout,
        id: MoveId,
        moves: &[PageMove],
        stream: &CudaStream,
    ) -> Result<(), CudaError> {
        self.check(direction, id, moves, layout)?;
        let (own, other) = match direction {
            Direction::Save => (&self.saves.stream, &self.loads),
            Direction::Load => (&self.loads.stream, &self.saves),
        };
        match self.begins.front() {
            // All work outside the open steps was submitted before the first of them began.
            Some((first, begin)) if direction == Direction::Load && *first > self.newest_at_stray_call => {
                begin.block(own)?
            }
            _ => {
                self.fork.record(stream)?;
                self.fork.block(own)?;
            }
        }
        // The other direction may still use the pages.
        let last = *direction.other().last_in(&mut self.latest_of(moves));
        other.block(Part::last(last), own)?;
        for PageMove { device, swap } in moves {
            *direction.last_in(&mut self.of_device[device.index()]) = id;
            *direction.last_in(&mut self.of_swap[swap.index()]) = id;
        }
        *direction.last_in(&mut self.last) = id;
        let done = self.submit(direction, pool, id, moves);
        if done.is_err() {
            // A part of the move may have been submitted.
            let _ = self.gpu.finish();
        }
        done
    }

    /// Submits a move on its direction's stream, a large load in parts.
    fn submit(&mut self, direction: Direction, pool: &Pages, id: MoveId, moves: &[PageMove]) -> Result<(), CudaError> {
        let (queue, transfer) = match direction {
            Direction::Save => (&mut self.saves, &mut self.save_transfer),
            Direction::Load => (&mut self.loads, &mut self.load_transfer),
        };
        let stream = queue.stream.raw();
        let is_small = pool.page_bytes() * (moves.len() as u64) < PARTED_BYTES;
        if direction == Direction::Save || self.parts == 1 || is_small {
            transfer.submit(&self.gpu, pool, &self.pages, moves, stream)?;
            return queue.record(Part::last(id));
        }
        for part in 0..self.parts {
            let first = |part: u32| (part * pool.lanes).div_ceil(self.parts);
            let lanes = first(part)..first(part + 1);
            let (pool, swap) = (pool.part(lanes.clone()), self.pages.part(lanes));
            transfer.submit(&self.gpu, &pool, &swap, moves, stream)?;
            queue.record(Part::new(id, part, self.parts))?;
        }
        Ok(())
    }

    /// Checks a call, before it has any effect.
    fn check(
        &mut self,
        direction: Direction,
        id: MoveId,
        moves: &[PageMove],
        layout: &PoolLayout,
    ) -> Result<(), CudaError> {
        check::moves(id, moves, layout, self.last)?;
        let ready = self.region.ready();
        for &PageMove { swap, .. } in moves {
            if swap.raw() >= ready {
                let failed = self.region.failure().cloned();
                return Err(failed.unwrap_or(CudaError::NotPinned { page: swap, ready }));
            }
            if !self.region.is_free(swap, direction == Direction::Load) {
                return Err(PlanError::Leased { page: swap }.into());
            }
        }
        self.moved().map(|_| ())
    }

    fn latest_of(&self, moves: &[PageMove]) -> Moved {
        let both = |pages: &PageMove| [self.of_device[pages.device.index()], self.of_swap[pages.swap.index()]];
        latest(moves.iter().flat_map(both))
    }

    pub fn failure(&self) -> Option<&CudaError> {
        self.region.failure()
    }

    pub fn ready(&self) -> u32 {
        self.region.ready()
    }

    /// Returns the last moves that are done.
    pub fn moved(&mut self) -> Result<Moved, CudaError> {
        Ok(Moved { saved: self.saves.poll()?, loaded: self.loads.poll()? })
    }

    /// Returns whether a move may be in flight.
    fn is_moving(&self) -> bool {
        self.saves.done() < self.last.saved || self.loads.done() < self.last.loaded
    }

    /// Records a step and the pages that its table writes name. The backend's stream waits for the saves of these
    /// pages; later calls of layers wait for the loads.
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
            let last = latest(pages.map(|page| self.of_device[page.index()]));
            self.saves.block(Part::last(last.saved), stream)?;
            self.needed = self.needed.max(last.loaded);
        }
        self.begins.push_back((step, event));
        Ok(())
    }

    /// Makes the backend's stream wait until a lane of all pages that steps use is loaded.
    pub fn before_lane(&mut self, lane: u32, stream: &CudaStream) -> Result<(), CudaError> {
        let part = lane * self.parts / self.pages.lanes;
        self.wait(Part::new(self.needed, part, self.parts), stream)
    }

    /// Makes the backend's stream wait until all lanes of all pages that steps use are loaded.
    pub fn before_all(&mut self, stream: &CudaStream) -> Result<(), CudaError> {
        self.wait(Part::last(self.needed), stream)
    }

    /// Makes the backend's stream wait for a part of a load, unless it has waited. A capture cannot wait.
    fn wait(&mut self, part: Part, stream: &CudaStream) -> Result<(), CudaError> {
        if part <= self.awaited {
            return Ok(());
        }
        if is_capturing(stream.raw())? {
            return Err(CudaError::NotPrepared);
        }
        self.loads.block(part, stream)?;
        self.awaited = part;
        Ok(())
    }

    /// Makes a stream wait for the moves of pages.
    fn block(&self, pages: impl Iterator<Item = PageId>, stream: &CudaStream) -> Result<(), CudaError> {
        let last = latest(pages.map(|page| self.of_device[page.index()]));
        self.saves.block(Part::last(last.saved), stream)?;
        self.loads.block(Part::last(last.loaded), stream)
    }

    /// Makes a stream wait for the moves of pages that copies use. In a capture, which cannot wait, it rejects pages
    /// with unfinished moves.
    pub fn before_copies(&self, mut pages: impl Iterator<Item = PageId>, stream: &CudaStream) -> Result<(), CudaError> {
        if !self.is_moving() {
            return Ok(());
        }
        if !is_capturing(stream.raw())? {
            return self.block(pages, stream);
        }
        let (saved, loaded) = (self.saves.done(), self.loads.done());
        let is_moving = |page: &PageId| {
            let last = self.of_device[page.index()];
            last.saved > saved || last.loaded > loaded
        };
        match pages.find(is_moving) {
            Some(page) => Err(CudaError::PageInUse { page: page.raw() }),
            None => Ok(()),
        }
    }

    /// Records a call that does not belong to `last`, the last step that has begun.
    pub fn note_stray_call(&mut self, last: StepId) {
        self.newest_at_stray_call = last;
    }

    /// Ends steps; `last` is the last step that has begun.
    pub fn end(&mut self, end: StepEnd, last: StepId) {
        let spare = match end {
            StepEnd::Complete(step) => {
                let ended = self.begins.iter().take_while(|(begun, _)| *begun <= step).count();
                self.begins.drain(..ended)
            }
            StepEnd::Abort(step) => {
                // Loads must also wait for calls of the aborted steps. These calls came after the steps that stay open
                // had begun.
                self.newest_at_stray_call = last;
                let open = self.begins.iter().take_while(|(begun, _)| *begun < step).count();
                self.begins.drain(open..)
            }
        };
        self.spare.extend(spare.map(|(_, event)| event));
    }

    /// Waits for all moves.
    pub fn synchronize(&mut self) -> Result<(), CudaError> {
        let streams = [&self.saves.stream, &self.loads.stream];
        streams.into_iter().try_for_each(CudaStream::synchronize)?;
        self.moved().map(|_| ())
    }

    /// Leases a swap page to a reader.
    pub fn lease(&mut self, page: SwapPageId) -> CudaRead {
        let (last, moved) = (self.of_swap[page.index()], self.moved());
        assert!(moved.is_ok_and(|done| last.saved <= done.saved), "B16: a save writes {page:?}");
        self.region.lease(page)
    }

    /// Leases a swap page to a writer.
    pub fn lease_mut(&mut self, page: SwapPageId) -> CudaWrite {
        let (last, moved) = (self.of_swap[page.index()], self.moved());
        let is_done = |done: Moved| last.saved <= done.saved && last.loaded <= done.loaded;
        assert!(moved.is_ok_and(is_done), "B16: a move uses {page:?}");
        self.region.lease_mut(page)
    }
}

impl Drop for SwapMoves {
    fn drop(&mut self) {
        // The thread of the region unpins its memory without further waits.
        let _ = self.synchronize();
    }
}
