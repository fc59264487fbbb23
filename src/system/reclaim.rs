//! Makes room: evicts no more pages than are lacking.

use crate::id::PageId;
use crate::page::PagePool;
use crate::prefix::PrefixTree;

/// Evicts prefixes until `wanted` pages are free. Returns the pages of group 0 that were evicted. O(pages evicted).
///
/// # Panics
/// If free and evictable pages together are fewer: the caller checked the room.
pub fn reclaim(
    pages: &mut PagePool,
    prefixes: &mut PrefixTree,
    wanted: u64,
    freed: &mut Vec<PageId>,
) -> u32 {
    let short = wanted.saturating_sub(pages.free_count().into());
    freed.clear();
    if prefixes.has_cells() {
        let short = u32::try_from(short).expect("no more than there are");
        let evicted = prefixes.evict_groups(short, freed);
        pages.free_cached(freed);
        return evicted;
    }
    if prefixes.has_hosts() {
        prefixes.evict_to_host(u32::try_from(short).expect("no more than there are"), freed);
    } else {
        prefixes.evict(u32::try_from(short).expect("no more than there are"), freed);
    }
    pages.free_cached(freed);
    short as u32
}
