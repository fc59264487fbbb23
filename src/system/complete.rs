//! Completes steps: the fence returns the pages and locks that waited for them.

use crate::error::Error;
use crate::fence::Fence;
use crate::id::StepId;
use crate::page::PagePool;
use crate::prefix::PrefixTree;
use crate::step::StepLog;
use crate::system::access::access;
use crate::world::{Buffers, World};

access! {
    /// Tables of [`complete`].
    struct Complete of &mut World {
        pages: &mut PagePool,
        prefixes: &mut PrefixTree,
        steps: &mut StepLog,
        fence: &mut Fence,
        buffers: &mut Buffers,
    }
}

/// Implements [`Engine::complete`](crate::Engine::complete). O(pages returned, and nodes and cells that
/// become idle).
///
/// # Errors
/// [`Error::UnknownStep`] for a step that was never planned, [`Error::StepOpen`] if a step up to it is neither
/// committed nor aborted.
pub(crate) fn complete(world: Complete<'_>, step: StepId) -> Result<(), Error> {
    let Complete { pages, prefixes, steps, fence, buffers } = world;
    steps.check_complete(step)?;
    steps.complete(step);
    prefixes.complete_cells(step, fence);
    fence.take_pages(step, |run| pages.unfence(run));
    while let Some(lock) = fence.take_lock(step) {
        buffers.pool_pages.clear();
        prefixes.unlock_deferred(lock, fence, &mut buffers.pool_pages);
        pages.free_cached(&buffers.pool_pages);
    }
    fence.complete(step);
    Ok(())
}
