//! [`PagePool`]: the state of every page of the pool.
//!
//! ```text
//!          alloc                publish
//!   Free ---------> Private ------------> Cached
//!    ^ ^  free_private | | fence_private     |
//!    | +---------------+ v                   | free_cached
//!    +--- unfence --- Fenced                 |
//!    +---------------------------------------+
//! ```
//!
//! * P1. A page is in exactly one state: free + private + cached + fenced + reserved = page_count.
//!
//! The pool asserts the state that a page leaves, so a double free panics. Pages have no use counts: only the prefix
//! tree shares pages, and it counts the users of nodes and cells.

use crate::bitmap::{Bitmap, Bits, WORD, for_each_word};
use crate::id::PageId;
use crate::memory::{Memory, OutOfMemory};

/// The state of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[non_exhaustive]
pub enum PageState {
    /// The page has no owner.
    Free,
    /// One sequence owns the page.
    Private,
    /// One node or cell of the tree owns the page.
    Cached,
    /// The page is released, but an unfinished step may still access it.
    Fenced,
    /// The pool never hands the page out.
    Reserved,
}

/// The states of a fixed number of pages.
pub struct PagePool {
    page_count: u32,
    /// Number of pages from page 0 on that the pool never hands out.
    reserved: u32,
    free: Bitmap,
    cached: Bitmap,
    fenced: Bitmap,
}

impl PagePool {
    /// Creates a pool of free pages.
    ///
    /// # Errors
    /// The allocation that failed.
    pub fn new(page_count: u32) -> Result<Self, OutOfMemory> {
        Self::new_in(page_count, &mut Memory::new(false))
    }

    pub(crate) fn new_in(page_count: u32, memory: &mut Memory) -> Result<Self, OutOfMemory> {
        Ok(Self {
            page_count,
            reserved: 0,
            free: Bitmap::new(page_count, true, memory)?,
            cached: Bitmap::new(page_count, false, memory)?,
            fenced: Bitmap::new(page_count, false, memory)?,
        })
    }

    /// Moves the first `count` pages from Free to Reserved. The pool is new.
    pub(crate) fn reserve(&mut self, count: u32) {
        (0..count as usize).for_each(|page| self.free.remove(Bits::one(page)));
        self.reserved = count;
    }

    /// Returns the number of pages.
    pub fn page_count(&self) -> u32 {
        self.page_count
    }

    /// Returns the number of free pages. O(1), like all counts.
    pub fn free_count(&self) -> u32 {
        self.free.count()
    }

    /// Returns the number of private pages.
    pub fn private_count(&self) -> u32 {
        self.page_count - self.reserved - self.free.count() - self.cached.count() - self.fenced.count()
    }

    /// Returns the number of cached pages.
    pub fn cached_count(&self) -> u32 {
        self.cached.count()
    }

    /// Returns the number of fenced pages.
    pub fn fenced_count(&self) -> u32 {
        self.fenced.count()
    }

    /// Returns the state of one page.
    ///
    /// # Panics
    /// If the pool has no such page.
    pub fn state(&self, page: PageId) -> PageState {
        let page = page.raw();
        assert!(page < self.page_count, "page {page} is not one of {}", self.page_count);
        if page < self.reserved {
            PageState::Reserved
        } else if self.free.contains(page) {
            PageState::Free
        } else if self.cached.contains(page) {
            PageState::Cached
        } else if self.fenced.contains(page) {
            PageState::Fenced
        } else {
            PageState::Private
        }
    }

    /// Allocates the `out.len()` lowest free pages, in ascending order: Free to Private. Returns false, and allocates
    /// none, if fewer are free. O(pages).
    #[must_use]
    pub fn alloc(&mut self, out: &mut [PageId]) -> bool {
        if out.len() > self.free.count() as usize {
            return false;
        }
        self.free.take_lowest(bytemuck::cast_slice_mut(out));
        true
    }

    /// Moves pages from Private to Cached.
    ///
    /// # Panics
    /// If a page is not private. The other transitions also panic on a page in another state.
    pub fn publish(&mut self, pages: &[PageId]) {
        let Self { free, cached, fenced, .. } = self;
        for_each_word(PageId::as_raw(pages), |bits| {
            assert_private(free, fenced, bits);
            cached.insert(bits);
        });
    }

    /// Moves pages from Private to Free. The caller ensures that no unfinished step accesses them.
    pub fn free_private(&mut self, pages: &[PageId]) {
        let Self { free, cached, fenced, .. } = self;
        for_each_word(PageId::as_raw(pages), |bits| {
            assert_private(cached, fenced, bits);
            free.insert(bits);
        });
    }

    /// Moves evicted pages, and pages whose last user has released them, from Cached to Free.
    pub fn free_cached(&mut self, pages: &[PageId]) {
        let Self { free, cached, .. } = self;
        for_each_word(PageId::as_raw(pages), |bits| {
            cached.remove(bits);
            free.insert(bits);
        });
    }

    /// Moves pages from Private to Fenced. An unfinished step may still access them.
    pub fn fence_private(&mut self, pages: &[PageId]) {
        let Self { free, cached, fenced, .. } = self;
        for_each_word(PageId::as_raw(pages), |bits| {
            assert_private(free, cached, bits);
            fenced.insert(bits);
        });
    }

    /// Moves pages from Fenced to Free. The caller ensures that no unfinished step accesses them.
    pub fn unfence(&mut self, pages: &[PageId]) {
        let Self { free, fenced, .. } = self;
        for_each_word(PageId::as_raw(pages), |bits| {
            fenced.remove(bits);
            free.insert(bits);
        });
    }

    /// Checks P1 over the whole pool; returns the first page that breaks it. O(pages).
    pub(crate) fn check(&self) -> Result<(), (&'static str, Option<PageId>)> {
        let is_out = |&page: &u32| self.free.contains(page) || self.cached.contains(page) || self.fenced.contains(page);
        if let Some(page) = (0..self.reserved).find(is_out) {
            return Err(("P1: a page is in exactly one state", Some(PageId::new(page))));
        }
        for word in 0..self.free.word_count() {
            let (free, cached, fenced) = (self.free.word(word), self.cached.word(word), self.fenced.word(word));
            let twice = free & cached | free & fenced | cached & fenced;
            if twice != 0 {
                let page = word as u32 * 64 + twice.trailing_zeros();
                return Err(("P1: a page is in exactly one state", Some(PageId::new(page))));
            }
        }
        Ok(())
    }
}

/// Asserts that pages are in neither of two sets. Afterwards the caller inserts them into the third set, which asserts
/// that they were not in it.
fn assert_private(one: &Bitmap, other: &Bitmap, bits: Bits) {
    let taken = (one.word(bits.word) | other.word(bits.word)) & bits.mask;
    let page = bits.word * WORD + taken.trailing_zeros() as usize;
    assert!(taken == 0, "page {page} is not private");
}

#[cfg(test)]
mod tests {
    use super::*;

    impl PagePool {
        /// Makes a page cached in addition to its state, for tests of the audit.
        pub(crate) fn break_p1(&mut self, page: PageId) {
            self.cached.insert(Bits::one(page.index()));
        }
    }

    fn ids(pages: &[u32]) -> &[PageId] {
        PageId::from_raw(pages)
    }

    /// Returns a pool in which pages 0 to 2 are cached, 3 and 4 private, 5 to 8 fenced, and the rest free.
    fn sound() -> PagePool {
        let mut pool = PagePool::new(100).expect("memory");
        assert!(pool.alloc(&mut [PageId::default(); 9]));
        pool.publish(ids(&[0, 1, 2]));
        pool.fence_private(ids(&[7, 5, 6, 8]));
        assert_eq!(pool.check(), Ok(()));
        pool
    }

    /// Returns the audit's error after `spoil`.
    fn broken<T>(spoil: impl FnOnce(&mut PagePool) -> T) -> (&'static str, Option<PageId>) {
        let mut pool = sound();
        spoil(&mut pool);
        pool.check().expect_err("the audit finds it")
    }

    #[test]
    fn p1_a_page_is_in_one_state() {
        let p1 = |page| ("P1: a page is in exactly one state", Some(PageId::new(page)));
        assert_eq!(broken(|pool| pool.free.insert(Bits::one(2))), p1(2));
        assert_eq!(broken(|pool| pool.fenced.insert(Bits::one(1))), p1(1));
        assert_eq!(broken(|pool| pool.break_p1(PageId::new(99))), p1(99));
        assert_eq!(broken(|pool| pool.break_p1(PageId::new(8))), p1(8));
        assert_eq!(broken(|pool| pool.fenced.insert(Bits::one(70))), p1(70));
    }

    #[test]
    fn unfenced_pages_are_free() {
        let mut pool = sound();
        pool.unfence(ids(&[7, 5]));
        assert_eq!([5, 6, 7, 8].map(|page| pool.state(PageId::new(page))), {
            use PageState::{Fenced, Free};
            [Free, Fenced, Free, Fenced]
        });
        pool.unfence(ids(&[8, 6]));
        assert_eq!((pool.fenced_count(), pool.free_count(), pool.private_count()), (0, 95, 2));
        assert_eq!(pool.check(), Ok(()));
    }
}
