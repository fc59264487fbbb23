//! The page budget of a call: free and evictable pages, less the outstanding pages of promises to other sequences.
//!
//! This upholds W4: outstanding <= free + evictable + fenced. Three kinds of call lower the right side, or raise the
//! left one. Each goes only as far as free + evictable - outstanding pages reach:
//!
//! * an admission locks idle pages, or promises pages;
//! * [`promise`](crate::system::promise) promises pages;
//! * a plan or a fork takes pages that no sequence is promised.
//!
//! A plan that takes promised pages lowers both sides alike. All other calls keep the right side or raise it. A commit
//! that finds duplicates may lock idle pages, but releases as many pages of its own. Pages that an abort, a rollback or
//! a commit releases may become outstanding again, and return to the right side.
//!
//! So the engine refuses a plan of promised pages only while some of them are in the fence. The step that the error
//! names returns enough of them.

use crate::config::EngineShape;
use crate::error::Error;
use crate::fence::Fence;
use crate::id::StepId;
use crate::page::PagePool;
use crate::prefix::PrefixTree;
use crate::sequence::SequenceTable;

/// The pages that a call may take.
pub(crate) struct PageBudget<'a> {
    /// Free and evictable pages.
    reclaimable: u64,
    /// Outstanding pages of all promises.
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
        Self { reclaimable, outstanding: sequences.promised().into(), fence }
    }

    /// Returns the pages that a call can take once the fence has returned `returned` pages. `own`: pages of the call
    /// that its sequences are promised.
    fn available(&self, own: u64, returned: u32) -> u64 {
        let reclaimable = self.reclaimable + u64::from(returned);
        reclaimable.min(own + reclaimable.saturating_sub(self.outstanding))
    }

    /// Returns the pages that are promised to no sequence.
    pub fn unpromised(&self) -> u64 {
        self.available(0, 0)
    }

    /// Returns whether no sequence uses a page or is promised one, and none is in the fence.
    pub fn is_idle(&self, shape: &EngineShape) -> bool {
        self.unpromised() == u64::from(shape.layout.page_count())
    }

    /// Returns the first step whose completion lets a call take its pages, if no other call comes first. `wanted`
    /// returns the pages that the call takes once a step is complete. O(unfinished steps).
    pub fn after(&self, own: u64, mut wanted: impl FnMut(StepId) -> u64) -> Option<StepId> {
        let fits =
            |&(step, returned): &(StepId, u32)| wanted(step) <= self.available(own, returned);
        self.fence.returns().find(fits).map(|(step, _)| step)
    }

    /// Checks that a call can take `wanted` pages, `own` of which its sequences are promised. O(1), or
    /// O(unfinished steps) if it cannot.
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
