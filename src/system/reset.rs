//! Drops all cached prefixes, for a host that changes the model's weights.

use crate::page::PagePool;
use crate::prefix::PrefixTree;
use crate::system::access::access;
use crate::world::{Buffers, World};

access! {
    /// Tables of [`reset`].
    struct Reset of &mut World {
        pages: &mut PagePool,
        prefixes: &mut PrefixTree,
        buffers: &mut Buffers,
    }
}

/// Drops every idle prefix; those in use match no more and go with their last user. O(idle pages).
pub(crate) fn reset(world: Reset<'_>) {
    let Reset { pages, prefixes, buffers } = world;
    buffers.freed.clear();
    prefixes.reset(&mut buffers.freed);
    pages.free_cached(&buffers.freed);
}
