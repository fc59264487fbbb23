//! Gives pages and locks up: at once, or through the fence while an unfinished step may touch them.

use crate::id::{PageId, PrefixLock, StepId};
use crate::page::PagePool;
use crate::prefix::PrefixTree;
use crate::step::StepLog;

/// Gives private pages up that `last_step` may touch, if it is unfinished. O(pages).
pub(crate) fn give_up_pages(
    pages: &mut PagePool,
    steps: &mut StepLog,
    last_step: StepId,
    list: &[PageId],
) {
    if list.is_empty() {
        return;
    }
    match steps.fence_until(last_step) {
        Some(until) => pages.fence_private(list, until),
        None => pages.free_private(list),
    }
}

/// Gives a lock up whose pages `last_step` may read, if it is unfinished. O(nodes that become idle).
pub(crate) fn give_up_lock(
    pages: &mut PagePool,
    prefixes: &mut PrefixTree,
    steps: &mut StepLog,
    last_step: StepId,
    lock: PrefixLock,
    freed: &mut Vec<PageId>,
) {
    match steps.fence_until(last_step) {
        Some(until) => {
            prefixes.leave(&lock, until);
            steps.fence_lock(lock, until);
        }
        None => {
            freed.clear();
            prefixes.unlock(lock, freed);
            pages.free_cached(freed);
        }
    }
}
