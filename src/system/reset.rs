//! Invalidates all cached prefixes.

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

/// Implements [`Engine::reset`](crate::Engine::reset). O(idle pages).
pub(crate) fn reset(world: Reset<'_>) {
    let Reset { pages, prefixes, buffers } = world;
    buffers.pool_pages.clear();
    prefixes.reset(&mut buffers.pool_pages);
    pages.free_cached(&buffers.pool_pages);
}
