//! The swap pages of the CPU backend, and leases on them.

use std::sync::{Arc, Mutex, PoisonError};

use super::error::CpuError;
use super::{Cpu, pool};
use crate::backend::{Moved, PlanError, SwapMemory, check};
use crate::id::{MoveId, SwapPageId};
use crate::layout::PoolLayout;
use crate::plan::PageMove;

/// The bytes of a page, shared by readers.
type Bytes = Arc<Box<[u8]>>;

/// The bytes of a swap page; empty while a writer has them.
type Place = Arc<Mutex<Option<Bytes>>>;

/// The swap pages of a backend. A move is complete when its call returns.
#[derive(Debug)]
pub(super) struct SwapPages {
    pages: Box<[Place]>,
    moved: Moved,
}

/// A lease to read a swap page.
#[derive(Clone, Debug)]
pub struct CpuRead(Bytes);

impl AsRef<[u8]> for CpuRead {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// A lease to write a swap page.
#[derive(Debug)]
pub struct CpuWrite {
    bytes: Option<Bytes>,
    place: Place,
}

impl AsMut<[u8]> for CpuWrite {
    fn as_mut(&mut self) -> &mut [u8] {
        self.bytes.as_mut().and_then(Arc::get_mut).expect("B16: the lease has the only copy")
    }
}

impl Drop for CpuWrite {
    fn drop(&mut self) {
        *lock(&self.place) = self.bytes.take();
    }
}

/// Locks a place. A panic leaves no partial change, so poisoning is ignored.
fn lock(place: &Place) -> std::sync::MutexGuard<'_, Option<Bytes>> {
    place.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SwapPages {
    pub fn new(layout: &PoolLayout) -> Result<Self, CpuError> {
        let bytes = || pool::zeroed(layout.page_bytes());
        let page = |_| Ok(Arc::new(Mutex::new(Some(Arc::new(bytes()?)))));
        let pages = (0..layout.swap_region_pages()).map(page).collect::<Result<_, CpuError>>()?;
        Ok(Self { pages, moved: Moved::default() })
    }

    pub fn bytes(&self, layout: &PoolLayout) -> u64 {
        self.pages.len() as u64 * layout.page_bytes()
    }

    /// Returns the bytes of a page. Panics if the page has a write lease.
    fn read(&self, page: SwapPageId) -> Bytes {
        let bytes = lock(&self.pages[page.index()]).clone();
        bytes.unwrap_or_else(|| panic!("B16: a writer has leased {page:?}"))
    }

    /// Changes the bytes of a page, and returns the result of the change. Panics if the page has any lease.
    fn write<T>(&self, page: SwapPageId, write: impl FnOnce(&mut [u8]) -> T) -> T {
        let mut place = lock(&self.pages[page.index()]);
        let bytes = place.as_mut().and_then(Arc::get_mut);
        write(bytes.unwrap_or_else(|| panic!("B16: {page:?} is leased")))
    }
}

impl Cpu {
    /// Checks the leases of the pages of a batch: a load reads pages that no writer has leased, and a save writes pages
    /// without any lease.
    pub(crate) fn check_leases(&self, moves: &[PageMove], is_load: bool) -> Result<(), PlanError> {
        let is_free = |swap: SwapPageId| {
            let mut place = lock(&self.swap.pages[swap.index()]);
            place.as_mut().is_some_and(|bytes| is_load || Arc::get_mut(bytes).is_some())
        };
        match moves.iter().find(|pages| !is_free(pages.swap)) {
            Some(pages) => Err(PlanError::Leased { page: pages.swap }),
            None => Ok(()),
        }
    }

    pub(super) fn save(&mut self, id: MoveId, moves: &[PageMove]) -> Result<(), CpuError> {
        check::moves(id, moves, &self.layout, self.swap.moved)?;
        self.check_leases(moves, false)?;
        for PageMove { device, swap } in moves {
            self.swap.write(*swap, |bytes| self.read_page(*device, bytes))?;
        }
        self.swap.moved.saved = id;
        Ok(())
    }

    pub(super) fn load(&mut self, id: MoveId, moves: &[PageMove]) -> Result<(), CpuError> {
        check::moves(id, moves, &self.layout, self.swap.moved)?;
        self.check_leases(moves, true)?;
        for PageMove { device, swap } in moves {
            let bytes = self.swap.read(*swap);
            self.write_page(*device, &bytes)?;
        }
        self.swap.moved.loaded = id;
        Ok(())
    }

    pub(super) fn last_moved(&self) -> Moved {
        self.swap.moved
    }
}

impl SwapMemory for Cpu {
    type Read = CpuRead;
    type Write = CpuWrite;

    fn lease(&mut self, page: SwapPageId) -> CpuRead {
        CpuRead(self.swap.read(page))
    }

    fn lease_mut(&mut self, page: SwapPageId) -> CpuWrite {
        let place = Arc::clone(&self.swap.pages[page.index()]);
        let mut held = lock(&place);
        let is_free = held.as_mut().is_some_and(|bytes| Arc::get_mut(bytes).is_some());
        assert!(is_free, "B16: {page:?} is leased");
        let bytes = held.take();
        drop(held);
        CpuWrite { bytes, place }
    }
}
