//! Evicts exactly the missing pages; with groups, it may evict a few more.

use crate::id::PageId;
use crate::page::PagePool;
use crate::prefix::PrefixTree;

/// Evicts prefixes until `wanted` pages are free, and returns the number of evicted pages of group 0. O(pages evicted).
///
/// # Panics
/// If there are fewer than `wanted` free and evictable pages. The caller has checked this.
pub fn reclaim(pages: &mut PagePool, prefixes: &mut PrefixTree, wanted: u64, freed: &mut Vec<PageId>) -> u32 {
    let missing = wanted.saturating_sub(pages.free_count().into());
    freed.clear();
    let missing = u32::try_from(missing).expect("the pool has fewer than 2^32 pages");
    let evicted = prefixes.evict(missing, freed);
    pages.free_cached(freed);
    evicted
}
