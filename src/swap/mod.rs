//! [`SwapPool`]: the state of every page of swap memory, except the pages of the stage (`prefix/puts.rs`).
//!
//! ```text
//! Free    -> Cached     take
//! Cached  -> Free       drop_page, if no put reads the page
//! Cached  -> Leaving    drop_page, while a put reads the page
//! Leaving -> Free       end_read
//! Free    -> Filling    begin_fill: a fetch writes the page
//! Filling -> Cached     end_fill, if the page has arrived
//! Filling -> Free       end_fill, otherwise
//! ```
//!
//! * H1. A swap page is in one state. Each Cached page belongs to one entry or one cell of the prefix tree.
//!
//! Pages are taken round robin, so a page that was just freed is rarely the next. When a page is taken, the device has
//! therefore probably finished the last save and load of the page. A fetch skips the other pages.
//!
//! `prefix/swap.rs` stores the page of each entry, and `prefix/cells.rs` those of each cell. The bytes of the pages
//! belong to the backend.

use crate::bitmap::{Bitmap, Bits, for_each_word_of_run};
use crate::id::{MoveId, SwapPageId};
use crate::memory::{Memory, OutOfMemory};

/// The states of a fixed number of pages.
pub(crate) struct SwapPool {
    page_count: u32,
    /// Pages below this number are ready; the others are in no state yet.
    ready: u32,
    free: Bitmap,
    cached: Bitmap,
    filling: Bitmap,
    /// Pages that puts read: some Cached pages, and all Leaving pages.
    reading: Bitmap,
    leaving: u32,
    /// Number of puts that read each page, if several may read one.
    readers: Vec<u16>,
    /// The page from which the next search for a free page starts.
    next: u32,
    /// The last save to each page, and the last load from it.
    saves: Vec<MoveId>,
    loads: Vec<MoveId>,
}

impl SwapPool {
    /// Creates pages that are not ready. `is_shared`: whether several puts may read one page.
    pub fn new(page_count: u32, is_shared: bool, memory: &mut Memory) -> Result<Self, OutOfMemory> {
        Ok(Self {
            page_count,
            ready: 0,
            free: Bitmap::new(page_count, false, memory)?,
            cached: Bitmap::new(page_count, false, memory)?,
            filling: Bitmap::new(page_count, false, memory)?,
            reading: Bitmap::new(page_count, false, memory)?,
            leaving: 0,
            readers: memory.zeroed(if is_shared { page_count.into() } else { 0 })?,
            next: 0,
            saves: memory.zeroed(page_count.into())?,
            loads: memory.zeroed(page_count.into())?,
        })
    }

    /// Makes the pages below `ready` usable, if they are more than before.
    pub fn set_ready(&mut self, ready: u32) {
        let (start, end) = (self.ready, ready.clamp(self.ready, self.page_count));
        for_each_word_of_run(start as usize, (end - start) as usize, |bits| self.free.insert(bits));
        self.ready = end;
    }

    pub fn free_count(&self) -> u32 {
        self.free.count()
    }

    pub fn cached_count(&self) -> u32 {
        self.cached.count()
    }

    /// Takes a free page for an entry or a cell: Free to Cached.
    #[inline]
    pub fn take(&mut self) -> Option<SwapPageId> {
        let page = self.free.next(self.next as usize)?;
        self.next = page as u32 + 1;
        self.free.remove(Bits::one(page));
        self.cached.insert(Bits::one(page));
        Some(SwapPageId::new(page as u32))
    }

    /// Returns the next free page whose last save and load are done. `moved` contains the last completed save and load.
    /// O(1 + free pages with unfinished moves).
    pub fn next_idle(&self, moved: [MoveId; 2]) -> Option<SwapPageId> {
        let mut at = self.free.next(self.next as usize)?;
        let first = at;
        loop {
            let page = SwapPageId::new(at as u32);
            if self.is_idle(page, moved) {
                return Some(page);
            }
            at = self.free.next(at + 1)?;
            if at == first {
                return None;
            }
        }
    }

    /// Gives a free page to a fetch: Free to Filling.
    pub fn begin_fill(&mut self, page: SwapPageId) {
        self.next = page.raw() + 1;
        self.free.remove(Bits::one(page.index()));
        self.filling.insert(Bits::one(page.index()));
    }

    /// Gives the page of an entry or a cell back: Cached to Free, or to Leaving while a put reads it.
    #[inline]
    pub fn drop_page(&mut self, page: SwapPageId) {
        self.cached.remove(Bits::one(page.index()));
        if self.reading.count() > 0 && self.reading.contains(page.raw()) {
            self.leaving += 1;
        } else {
            self.free.insert(Bits::one(page.index()));
        }
    }

    /// Records that a put reads the page of an entry or a cell.
    pub fn begin_read(&mut self, page: SwapPageId) {
        if let Some(readers) = self.readers.get_mut(page.index()) {
            *readers += 1;
            if *readers > 1 {
                return;
            }
        }
        self.reading.insert(Bits::one(page.index()));
    }

    /// Records that a put of a page has ended. A Leaving page becomes Free after its last put.
    pub fn end_read(&mut self, page: SwapPageId) {
        if let Some(readers) = self.readers.get_mut(page.index()) {
            *readers -= 1;
            if *readers > 0 {
                return;
            }
        }
        self.reading.remove(Bits::one(page.index()));
        if !self.cached.contains(page.raw()) {
            self.leaving -= 1;
            self.free.insert(Bits::one(page.index()));
        }
    }

    /// Ends the fetch of a page: Filling to Cached if it has arrived, otherwise to Free.
    pub fn end_fill(&mut self, page: SwapPageId, arrived: bool) {
        self.filling.remove(Bits::one(page.index()));
        let pages = if arrived { &mut self.cached } else { &mut self.free };
        pages.insert(Bits::one(page.index()));
    }

    /// Returns whether the last save and the last load of a page are done.
    pub fn is_idle(&self, page: SwapPageId, [saved, loaded]: [MoveId; 2]) -> bool {
        self.saves[page.index()] <= saved && self.loads[page.index()] <= loaded
    }

    /// Records that a save writes a page.
    pub fn set_save(&mut self, page: SwapPageId, id: MoveId) {
        self.saves[page.index()] = id;
    }

    /// Records that a load reads a page.
    pub fn set_load(&mut self, page: SwapPageId, id: MoveId) {
        self.loads[page.index()] = id;
    }

    /// Returns the last save to a page.
    pub fn last_save(&self, page: SwapPageId) -> MoveId {
        self.saves[page.index()]
    }

    /// Returns whether a fetch writes a page, for audits.
    pub fn is_filling(&self, page: SwapPageId) -> bool {
        self.filling.contains(page.raw())
    }

    /// Returns whether a put reads a page.
    pub fn is_read(&self, page: SwapPageId) -> bool {
        self.reading.contains(page.raw())
    }

    /// Returns whether a page belongs to an entry or a cell, for audits.
    pub fn is_cached(&self, page: SwapPageId) -> bool {
        self.cached.contains(page.raw())
    }

    /// Checks the part of H1 that concerns states. O(pages).
    pub fn check(&self) -> Result<(), &'static str> {
        let twice = |word: usize| {
            let [free, cached, filling, reading] =
                [&self.free, &self.cached, &self.filling, &self.reading].map(|set| set.word(word));
            free & cached | free & filling | cached & filling | reading & (free | filling)
        };
        let states = (0..self.free.word_count()).all(|word| twice(word) == 0);
        let all = self.free.count() + self.cached.count() + self.filling.count() + self.leaving;
        if states && all == self.ready { Ok(()) } else { Err("H1: a swap page is in one state") }
    }
}
