//! [`HostPool`]: the state of every page of host memory that evicted pages move to.
//!
//! ```text
//!          take                     arrive
//!   Free ---------> Cached <------------------- Filling      Filling: a fetch writes it
//!    ^ ^               |  drop, while a put reads it  ^
//!    | |    drop       v                              |
//!    | +----------- Leaving        Free --------------+      Leaving: a put reads it, no entry has it
//!    +--- drop ---- Cached
//! ```
//!
//! * H1. A host page is in one state; Cached pages belong to entries of the prefix tree, one each.
//!
//! Pages are taken round robin, so that a page that was just given back is taken last: a fetch takes no page whose last
//! move the device has not finished.
//!
//! Not here: which entry has which page (`prefix/hosts.rs`), bytes.

use crate::bitmap::{Bitmap, Bits, WORD};
use crate::id::{HostPageId, MoveId};
use crate::memory::{OutOfMemory, touch, zeroed};

/// The states of a fixed number of pages.
pub(crate) struct HostPool {
    page_count: u32,
    /// Pages below this number are ready; the others are in no state yet.
    ready: u32,
    free: Bitmap,
    cached: Bitmap,
    /// The next page to look at.
    next: u32,
    /// The last move of each page.
    busy: Vec<MoveId>,
}

impl HostPool {
    pub fn new(page_count: u32) -> Result<Self, OutOfMemory> {
        Ok(Self {
            page_count,
            ready: 0,
            free: Bitmap::new(page_count, false)?,
            cached: Bitmap::new(page_count, false)?,
            next: 0,
            busy: zeroed(page_count.into())?,
        })
    }

    pub fn bytes(page_count: u32) -> u64 {
        2 * Bitmap::bytes(page_count) + u64::from(page_count) * size_of::<MoveId>() as u64
    }

    pub fn prefault(&mut self) {
        touch(&mut self.busy);
    }

    /// Makes the pages below `ready` usable, if they are more than before.
    pub fn set_ready(&mut self, ready: u32) {
        let (mut at, end) = (self.ready as usize, ready.min(self.page_count) as usize);
        while at < end {
            let len = (WORD - at % WORD).min(end - at);
            self.free.insert(Bits::run(at, len));
            at += len;
        }
        self.ready = self.ready.max(end as u32);
    }

    pub fn free_count(&self) -> u32 {
        self.free.count()
    }

    pub fn cached_count(&self) -> u32 {
        self.cached.count()
    }

    /// Takes a free page for an entry: Free to Cached.
    #[inline]
    pub fn take(&mut self) -> Option<HostPageId> {
        let page = self.free.next(self.next as usize)?;
        self.next = page as u32 + 1;
        self.free.remove(Bits::one(page));
        self.cached.insert(Bits::one(page));
        Some(HostPageId::new(page as u32))
    }

    /// Gives an entry's page back: Cached to Free.
    #[inline]
    pub fn drop_page(&mut self, page: HostPageId) {
        self.cached.remove(Bits::one(page.index()));
        self.free.insert(Bits::one(page.index()));
    }

    /// Records that a move uses a page.
    pub fn set_busy(&mut self, page: HostPageId, id: MoveId) {
        self.busy[page.index()] = id;
    }

    /// Returns the last move of a page.
    pub fn busy(&self, page: HostPageId) -> MoveId {
        self.busy[page.index()]
    }

    /// Returns whether a page is an entry's, for audits.
    pub fn is_cached(&self, page: HostPageId) -> bool {
        self.cached.contains(page.raw())
    }

    /// Checks H1 as far as states go. O(pages).
    pub fn check(&self) -> Result<(), &'static str> {
        let twice =
            (0..self.free.word_count()).any(|w| self.free.word(w) & self.cached.word(w) != 0);
        let all = self.free.count() + self.cached.count();
        if twice || all != self.ready { Err("H1: a host page is in one state") } else { Ok(()) }
    }
}
