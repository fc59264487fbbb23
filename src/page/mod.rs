//! Who may be given a page: [`PagePool`] knows the state of every page of the pool.
//!
//! ```text
//!          alloc                publish
//!   Free ---------> Private ------------> Cached
//!    ^                 |  fence              |
//!    |                 v                     |
//!    +<-- unfence -- Fenced                  |
//!    +<-------------- free (either) ---------+
//! ```
//!
//! * P1. A page is in exactly one state: free + private + cached + fenced = page_count.
//! * P2. The fence returns pages in the order they came, each not before its step is complete.
//!
//! A page that changes state is asserted to be in the state it leaves, so a double free stops the program. Sharing
//! exists only in the prefix tree, which counts its users by node; no page has a count.
//!
//! Not here: whose a page is, what it holds, where its bytes lie.

use std::collections::VecDeque;

use crate::bitmap::{Bitmap, Bits, WORD, for_each_word};
use crate::id::{PageId, StepId};

/// What a page is to the pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum PageState {
    /// Nobody's.
    Free,
    /// One sequence's.
    Private,
    /// One tree node's.
    Cached,
    /// Given up, but an unfinished step may still read or write it.
    Fenced,
}

/// The states of a fixed number of pages.
pub struct PagePool {
    page_count: u32,
    free: Bitmap,
    cached: Bitmap,
    fenced: Bitmap,
    /// Fenced pages in the order they came.
    queue: VecDeque<PageId>,
    /// Runs of `queue`: how many pages wait for which step. Steps rise.
    marks: VecDeque<(StepId, u32)>,
}

impl PagePool {
    /// A pool of free pages. `max_steps`: the most steps that are unfinished at a time.
    pub fn new(page_count: u32, max_steps: u32) -> Self {
        Self {
            page_count,
            free: Bitmap::new(page_count, true),
            cached: Bitmap::new(page_count, false),
            fenced: Bitmap::new(page_count, false),
            queue: VecDeque::with_capacity(page_count as usize),
            marks: VecDeque::with_capacity(max_steps as usize + 1),
        }
    }

    /// Touches all memory, so that no call pays for a page fault later. For a pool with an empty fence.
    pub fn prefault(&mut self) {
        self.queue.resize(self.queue.capacity(), PageId::default());
        self.queue.clear();
    }

    /// Bytes that a pool takes.
    pub fn bytes(page_count: u32, max_steps: u32) -> u64 {
        3 * Bitmap::bytes(page_count)
            + u64::from(page_count) * size_of::<PageId>() as u64
            + (u64::from(max_steps) + 1) * size_of::<(StepId, u32)>() as u64
    }

    /// Pages of the pool.
    pub fn page_count(&self) -> u32 {
        self.page_count
    }

    /// Free pages. O(1), like all counts.
    pub fn free_count(&self) -> u32 {
        self.free.count()
    }

    /// Pages of single sequences.
    pub fn private_count(&self) -> u32 {
        self.page_count - self.free.count() - self.cached.count() - self.fenced.count()
    }

    /// Pages of tree nodes.
    pub fn cached_count(&self) -> u32 {
        self.cached.count()
    }

    /// Pages that wait for a step.
    pub fn fenced_count(&self) -> u32 {
        self.fenced.count()
    }

    /// Fenced pages that return when `step` is complete. O(unfinished steps).
    pub fn fenced_until(&self, step: StepId) -> u32 {
        self.marks.iter().take_while(|mark| mark.0 <= step).map(|mark| mark.1).sum()
    }

    /// The fence: pages in the order they came, each with the step it waits for.
    pub fn fence(&self) -> impl Iterator<Item = (PageId, StepId)> + '_ {
        let steps = self.marks.iter().flat_map(|&(step, count)| (0..count).map(move |_| step));
        self.queue.iter().copied().zip(steps)
    }

    /// State of one page.
    ///
    /// # Panics
    /// If the pool has no such page.
    pub fn state(&self, page: PageId) -> PageState {
        let page = page.raw();
        assert!(page < self.page_count, "page {page} is not one of {}", self.page_count);
        if self.free.contains(page) {
            PageState::Free
        } else if self.cached.contains(page) {
            PageState::Cached
        } else if self.fenced.contains(page) {
            PageState::Fenced
        } else {
            PageState::Private
        }
    }

    /// Takes `out.len()` free pages, strictly the lowest, in rising order: Free to Private. All or nothing: `false`
    /// where fewer are free. O(pages).
    #[must_use]
    pub fn alloc(&mut self, out: &mut [PageId]) -> bool {
        if out.len() > self.free.count() as usize {
            return false;
        }
        self.free.take_lowest(bytemuck::cast_slice_mut(out));
        true
    }

    /// Private to Cached.
    ///
    /// # Panics
    /// If a page is not private. So do the other changes of state, for the state they start from.
    pub fn publish(&mut self, pages: &[PageId]) {
        let Self { free, cached, fenced, .. } = self;
        for_each_word(PageId::peel(pages), |bits| {
            assert_private(free, fenced, bits);
            cached.insert(bits);
        });
    }

    /// Private to Free: nobody's step can touch them.
    pub fn free_private(&mut self, pages: &[PageId]) {
        let Self { free, cached, fenced, .. } = self;
        for_each_word(PageId::peel(pages), |bits| {
            assert_private(cached, fenced, bits);
            free.insert(bits);
        });
    }

    /// Cached to Free: evicted, or gone with their last user.
    pub fn free_cached(&mut self, pages: &[PageId]) {
        let Self { free, cached, .. } = self;
        for_each_word(PageId::peel(pages), |bits| {
            cached.remove(bits);
            free.insert(bits);
        });
    }

    /// Private to Fenced, until `step` is complete or the step of an earlier entry, whichever is later.
    pub fn fence_private(&mut self, pages: &[PageId], step: StepId) {
        if pages.is_empty() {
            return;
        }
        let Self { free, cached, fenced, .. } = self;
        for_each_word(PageId::peel(pages), |bits| {
            assert_private(free, cached, bits);
            fenced.insert(bits);
        });
        self.queue.extend(pages);
        match self.marks.back_mut() {
            Some(last) if last.0 >= step => last.1 += pages.len() as u32,
            _ => self.marks.push_back((step, pages.len() as u32)),
        }
    }

    /// Fenced to Free, for all pages that wait for `step` or an earlier one. O(pages).
    pub fn unfence(&mut self, step: StepId) {
        while let Some(&(until, count)) = self.marks.front() {
            if until > step {
                return;
            }
            self.marks.pop_front();
            let Self { free, fenced, queue, .. } = self;
            let (head, tail) = queue.as_slices();
            let in_head = head.len().min(count as usize);
            for run in [&head[..in_head], &tail[..count as usize - in_head]] {
                for_each_word(PageId::peel(run), |bits| {
                    fenced.remove(bits);
                    free.insert(bits);
                });
            }
            queue.drain(..count as usize);
        }
    }

    /// Checks P1 and P2 over the whole pool; the first page that breaks one. O(pages).
    pub(crate) fn check(&self) -> Result<(), (&'static str, Option<PageId>)> {
        for word in 0..self.free.word_count() {
            let (free, cached, fenced) =
                (self.free.word(word), self.cached.word(word), self.fenced.word(word));
            let twice = free & cached | free & fenced | cached & fenced;
            if twice != 0 {
                let page = word as u32 * 64 + twice.trailing_zeros();
                return Err(("P1: a page is in exactly one state", Some(PageId::new(page))));
            }
        }
        let counts = self.marks.iter().map(|mark| mark.1 as usize).sum::<usize>();
        if counts != self.queue.len() || counts != self.fenced.count() as usize {
            return Err(("P2: the fence holds the fenced pages, each once", None));
        }
        if let Some(&page) = self.queue.iter().find(|page| !self.fenced.contains(page.raw())) {
            return Err(("P2: the fence holds fenced pages", Some(page)));
        }
        if !self.marks.iter().is_sorted_by(|a, b| a.0 < b.0) {
            return Err(("P2: the fence's steps rise", None));
        }
        Ok(())
    }
}

/// A private page is in none of three sets; the caller's own insert asserts the one that is not named here.
fn assert_private(one: &Bitmap, other: &Bitmap, bits: Bits) {
    let taken = (one.word(bits.word) | other.word(bits.word)) & bits.mask;
    let page = bits.word * WORD + taken.trailing_zeros() as usize;
    assert!(taken == 0, "page {page} is not private");
}
