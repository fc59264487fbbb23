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
    pub fn new(pages: &PagePool, prefixes: &PrefixTree, sequences: &SequenceTable, fence: &'a Fence) -> Self {
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

    /// Returns the number of pages that a call can take in addition to `wanted` pages, `own` of which are promised to
    /// its sequences.
    pub fn spare(&self, wanted: u64, own: u64) -> u64 {
        self.available(own, 0).saturating_sub(wanted)
    }

    /// Returns the first step whose completion lets a call take its pages, if no other call comes first. `fits` returns
    /// whether the call can take them, given the step and the pages that are available after it. O(unfinished steps).
    pub fn after(&self, own: u64, mut fits: impl FnMut(StepId, u64) -> bool) -> Option<StepId> {
        let mut returns = self.fence.returns();
        let found = returns.find(|&(step, returned)| fits(step, self.available(own, returned)));
        found.map(|(step, _)| step)
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
        Err(Error::OutOfPages { wanted, available, after: self.after(own, |_, available| wanted <= available) })
    }
}
