//! Releases pages and locks, at once or through the fence if an unfinished step may access them.

use crate::fence::Fence;
use crate::id::{PageId, PrefixLock, StepId};
use crate::page::PagePool;
use crate::prefix::PrefixTree;

/// Releases private pages: through the fence while `last_step` is unfinished, else at once. O(pages).
pub(crate) fn release_pages(pages: &mut PagePool, fence: &mut Fence, last_step: StepId, list: &[PageId]) {
    if list.is_empty() {
        return;
    }
    match fence.until(last_step) {
        Some(until) => {
            pages.fence_private(list);
            fence.push_pages(list, until);
        }
        None => pages.free_private(list),
    }
}

/// Releases a lock: through the fence while `last_step` is unfinished, else at once. O(nodes that become idle or
/// deferred, and pages dropped).
pub(crate) fn release_lock(
    pages: &mut PagePool,
    prefixes: &mut PrefixTree,
    fence: &mut Fence,
    last_step: StepId,
    lock: PrefixLock,
    freed: &mut Vec<PageId>,
) {
    match fence.until(last_step) {
        Some(until) => {
            let node = lock.node();
            fence.push_lock(lock, until);
            prefixes.defer_unlock(node, until, fence);
        }
        None => {
            freed.clear();
            prefixes.unlock(lock, fence, freed);
            pages.free_cached(freed);
        }
    }
}
