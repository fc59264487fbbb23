//! Forgets what is cached: for a host that changes the model's weights.

use crate::page::PagePool;
use crate::prefix::PrefixTree;
use crate::world::Buffers;

/// Drops every idle prefix; those in use match no more and go with their last user. O(idle pages).
pub(crate) fn reset(pages: &mut PagePool, prefixes: &mut PrefixTree, buffers: &mut Buffers) {
    buffers.freed.clear();
    prefixes.reset(&mut buffers.freed);
    pages.free_cached(&buffers.freed);
}
