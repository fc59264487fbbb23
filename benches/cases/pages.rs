//! Alloc and free: 128 pages of a fragmented pool. The bench chooses the pool's size and the share of pages in use.

use super::work;
use kvarena::PageId;
use kvarena::testkit::internals::PagePool;

/// Number of pages of a call.
pub const COUNT: usize = 128;

pub struct AllocFree {
    pool: PagePool,
    pages: Vec<PageId>,
}

impl AllocFree {
    /// Creates the case. `taken` is the share of pages in use, in percent; `targets` uses 50.
    pub fn new(page_count: u32, taken: u32) -> Self {
        let mut pool = PagePool::new(page_count).expect("memory");
        let mut all = vec![PageId::default(); page_count as usize];
        assert!(pool.alloc(&mut all), "all pages are free");
        let order = work::free_order(page_count as usize);
        let free = (u64::from(page_count) * u64::from(100 - taken) / 100) as usize;
        for &page in &order[..free] {
            pool.free_private(&[PageId::new(page)]);
        }
        Self { pool, pages: vec![PageId::default(); COUNT] }
    }

    pub fn call(&mut self) {
        assert!(self.pool.alloc(&mut self.pages), "the pool has free pages");
        self.pool.free_private(&self.pages);
    }

    pub fn check(&mut self) {
        let free = self.pool.free_count();
        assert!(self.pool.alloc(&mut self.pages));
        assert!(self.pages.is_sorted_by(|a, b| a < b), "the lowest pages, in rising order");
        assert_eq!(self.pool.free_count(), free - COUNT as u32);
        self.pool.free_private(&self.pages);
        assert_eq!(self.pool.free_count(), free);
    }
}
