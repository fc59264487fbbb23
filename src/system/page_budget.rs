//! The page budget of a call: free and evictable pages, minus outstanding pages of promises to other sequences.
//!
//! This upholds W4: outstanding <= free + evictable + fenced. These calls reduce the right side or raise the left side.
//! Each may use at most free + evictable - outstanding pages:
//!
//! * An admission, a resume or a fetch locks idle pages.
//! * An admission, a resume, a fork or [`promise`](crate::system::promise) promises pages.
//! * A plan, a load or a fork takes pages that are not promised.
//!
//! ARCHITECTURE.md shows the effect of the other calls. Therefore a plan of promised pages fails only while some of
//! these pages are in the fence. The step in the error returns enough of them.

use crate::config::EngineShape;
use crate::error::Error;
use crate::fence::Fence;
use crate::id::StepId;
use crate::page::PagePool;
use crate::prefix::PrefixTree;
use crate::sequence::SequenceTable;

/// The pages that a call may take.
pub(crate) struct PageBudget<'a> {
    /// Number of free and evictable pages.
    reclaimable: u64,
    /// Number of outstanding pages of all promises.
    outstanding: u64,
    fence: &'a Fence,
}

impl<'a> PageBudget<'a> {
    /// Counts the pages of these tables.
    pub fn new(
        pages: &PagePool,
        prefixes: &PrefixTree,
        sequences: &SequenceTable,
        fence: &'a Fence,
    ) -> Self {
        let reclaimable = u64::from(pages.free_count()) + u64::from(prefixes.size_info().evictable);
        Self { reclaimable, outstanding: sequences.all_outstanding().into(), fence }
    }

    /// Returns the number of pages that a call can take once the fence has returned `returned` pages. The call's
    /// sequences have promises of `own` pages.
    fn available(&self, own: u64, returned: u32) -> u64 {
        let reclaimable = self.reclaimable + u64::from(returned);
        reclaimable.min(own + reclaimable.saturating_sub(self.outstanding))
    }

    /// Returns the number of pages that are not promised.
    pub fn unpromised(&self) -> u64 {
        self.available(0, 0)
    }

    /// Returns whether all pages are free or evictable, and none is promised.
    pub fn is_idle(&self, shape: &EngineShape) -> bool {
        self.unpromised() == u64::from(shape.layout.page_count())
    }

    /// Returns the first step whose completion lets a call take its pages, if no other call comes first. `wanted`
    /// returns the number of pages that the call needs after a step is complete. O(unfinished steps).
    pub fn after(&self, own: u64, mut wanted: impl FnMut(StepId) -> u64) -> Option<StepId> {
        let fits =
            |&(step, returned): &(StepId, u32)| wanted(step) <= self.available(own, returned);
        self.fence.returns().find(fits).map(|(step, _)| step)
    }

    /// Checks that a call can take `wanted` pages, `own` of which are promised to its sequences. O(1), or O(unfinished
    /// steps) if it fails.
    ///
    /// # Errors
    /// [`Error::OutOfPages`].
    pub fn check(&self, wanted: u64, own: u64) -> Result<(), Error> {
        let available = self.available(own, 0);
        if wanted <= available {
            return Ok(());
        }
        Err(Error::OutOfPages { wanted, available, after: self.after(own, |_| wanted) })
    }
}
