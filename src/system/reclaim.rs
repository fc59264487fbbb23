//! Makes room: evicts exactly the pages that are short.

use crate::error::Error;
use crate::id::PageId;
use crate::page::PagePool;
use crate::prefix::PrefixTree;

/// Evicts prefixes until `wanted` pages are free, or changes nothing. Returns the pages evicted. O(pages evicted).
///
/// # Errors
/// [`Error::OutOfPages`] if free and evictable pages together are fewer.
pub fn reclaim(
    pages: &mut PagePool,
    prefixes: &mut PrefixTree,
    wanted: u64,
    freed: &mut Vec<PageId>,
) -> Result<u32, Error> {
    check(pages, prefixes, wanted)?;
    let short = (wanted as u32).saturating_sub(pages.free_count());
    freed.clear();
    prefixes.evict(short, freed);
    pages.free_cached(freed);
    Ok(short)
}

/// Checks that `wanted` pages are free or evictable.
///
/// # Errors
/// [`Error::OutOfPages`].
pub(crate) fn check(pages: &PagePool, prefixes: &PrefixTree, wanted: u64) -> Result<(), Error> {
    let available = u64::from(pages.free_count()) + u64::from(prefixes.size_info().evictable);
    if wanted <= available { Ok(()) } else { Err(Error::OutOfPages { wanted, available }) }
}
