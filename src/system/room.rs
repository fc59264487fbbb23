//! How many pages a call may take: free and evictable ones, less those that are promised to others.
//!
//! What keeps a promise (W4): promised <= free + evictable + fenced. Pages leave the right side where a sequence is
//! admitted, which locks idle pages; where it is promised pages; and where a plan or a fork takes pages that nobody was
//! promised: each only as far as free + evictable - promised go. A plan that draws takes as much from both sides. All
//! else keeps the right side or adds to it: a commit that finds duplicates may lock idle pages, but gives up as many of
//! its own, to the fence or the pool; what an abort, a rollback or a commit gives up, which may be promised again, goes
//! there too.
//!
//! So a plan of promised pages alone is refused only while some of them are in the fence, and the step of a mark there
//! brings enough.

use crate::error::Error;
use crate::fence::Fence;
use crate::id::StepId;
use crate::page::PagePool;
use crate::prefix::PrefixTree;
use crate::sequence::SequenceTable;

/// The pages that there are.
pub(crate) struct Room<'a> {
    /// Free and evictable now.
    there: u64,
    /// Promised to sequences and not drawn.
    promised: u64,
    fence: &'a Fence,
}

impl<'a> Room<'a> {
    /// Counts the pages of these tables.
    pub fn new(
        pages: &PagePool,
        prefixes: &PrefixTree,
        sequences: &SequenceTable,
        fence: &'a Fence,
    ) -> Self {
        let there = u64::from(pages.free_count()) + u64::from(prefixes.size_info().evictable);
        Self { there, promised: sequences.promised().into(), fence }
    }

    /// Pages that a call can take when `returned` more have come back, `drawn` of them promised to it.
    fn available(&self, drawn: u64, returned: u32) -> u64 {
        let there = self.there + u64::from(returned);
        there.min(drawn + there.saturating_sub(self.promised))
    }

    /// Pages that nobody has been promised.
    pub fn unpromised(&self) -> u64 {
        self.available(0, 0)
    }

    /// The first step after which a call can take so many pages, if nothing else happens: `wanted` is asked for each
    /// step that something waits for. O(unfinished steps).
    pub fn after(&self, drawn: u64, mut wanted: impl FnMut(StepId) -> u64) -> Option<StepId> {
        let fits =
            |&(step, returned): &(StepId, u32)| wanted(step) <= self.available(drawn, returned);
        self.fence.returns().find(fits).map(|(step, _)| step)
    }

    /// Checks that a call can take so many pages, `drawn` of them promised to it. O(1), or if not O(unfinished steps).
    ///
    /// # Errors
    /// [`Error::OutOfPages`].
    pub fn check(&self, wanted: u64, drawn: u64) -> Result<(), Error> {
        let available = self.available(drawn, 0);
        if wanted <= available {
            return Ok(());
        }
        Err(Error::OutOfPages { wanted, available, after: self.after(drawn, |_| wanted) })
    }
}
