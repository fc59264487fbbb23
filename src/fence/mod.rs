//! [`Fence`]: released pages and locks that wait for the completion of a step that may still access them.
//!
//! ```text
//! marks   step 7: 3 pages, 5 idle pages | step 9: 1 page, 0 idle pages     in the order of steps
//! pages   p3 p9 p4                      | p5                               in the order of arrival
//! locks   (7, lock) (7, lock)           | (9, lock)                        in the order of arrival
//! ```
//!
//! * F1. The steps of marks rise, and none is complete.
//! * F2. Marks count the waiting pages. Each of these is in the pool's state Fenced, and in the fence once.
//! * F3. Locks wait in the order of arrival, each for a step that has a mark.
//! * F4. A mark's idle pages belong to nodes and cells of the tree that become idle when its step is complete (T7, G5).
//!
//! `system/` determines which step a page waits for.

use std::collections::VecDeque;

use crate::id::{PageId, PrefixLock, StepId};
use crate::memory::{Memory, OutOfMemory};

/// The numbers of pages that return when a step is complete.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Mark {
    step: StepId,
    /// Pages in the queue.
    pages: u32,
    /// Pages of the prefix tree that become idle.
    idle_pages: u32,
}

/// Pages and locks that wait for steps.
pub struct Fence {
    /// All steps up to this one are complete.
    completed: StepId,
    /// The newest step that a page or lock has waited for.
    newest: StepId,
    marks: VecDeque<Mark>,
    pages: VecDeque<PageId>,
    locks: VecDeque<(StepId, PrefixLock)>,
}

impl Fence {
    /// Creates an empty fence for at most `page_count` pages, `max_steps` unfinished steps and `max_locks` locks.
    ///
    /// # Errors
    /// The allocation that failed.
    #[cfg(any(test, feature = "testkit"))]
    pub fn new(page_count: u32, max_steps: u32, max_locks: u64) -> Result<Self, OutOfMemory> {
        Self::new_in(page_count, max_steps, max_locks, &mut Memory::new(false))
    }

    pub(crate) fn new_in(
        page_count: u32,
        max_steps: u32,
        max_locks: u64,
        memory: &mut Memory,
    ) -> Result<Self, OutOfMemory> {
        Ok(Self {
            completed: StepId::default(),
            newest: StepId::default(),
            marks: memory.queue(u64::from(max_steps) + 1)?,
            pages: memory.queue(page_count.into())?,
            locks: memory.queue(max_locks)?,
        })
    }

    /// Returns the step that a page or lock must wait for if `last_step` may access it; `None` if that step is
    /// complete. The result is never below the step of an earlier arrival, so pages and locks return in the order of
    /// arrival.
    pub fn until(&self, last_step: StepId) -> Option<StepId> {
        (last_step > self.completed).then_some(self.newest.max(last_step))
    }

    pub(crate) fn is_complete(&self, step: StepId) -> bool {
        step <= self.completed
    }

    /// Adds pages that wait for a step that [`Fence::until`] returned.
    pub fn push_pages(&mut self, pages: &[PageId], until: StepId) {
        self.pages.extend(pages);
        self.newest = until;
        self.mark(until).pages += pages.len() as u32;
    }

    /// Adds a lock that waits for a step that [`Fence::until`] returned.
    pub fn push_lock(&mut self, lock: PrefixLock, until: StepId) {
        self.newest = until;
        self.mark(until);
        self.locks.push_back((until, lock));
    }

    /// Returns the index of a step's mark, or where to insert it. O(1) for a step after all marks, else O(log marks).
    fn find(&self, step: StepId) -> Result<usize, usize> {
        if self.marks.back().is_none_or(|last| last.step < step) {
            return Err(self.marks.len());
        }
        self.marks.binary_search_by_key(&step, |mark| mark.step)
    }

    /// Returns the mark of an unfinished step, and adds it if it is missing. O(marks) if it is missing before other
    /// marks, else as [`Fence::find`].
    fn mark(&mut self, step: StepId) -> &mut Mark {
        let index = self.find(step).unwrap_or_else(|index| {
            self.marks.insert(index, Mark { step, pages: 0, idle_pages: 0 });
            index
        });
        &mut self.marks[index]
    }

    /// Counts pages of the tree that will become idle when the step is complete. O(log unfinished steps) if the step
    /// has a mark.
    pub fn add_idle(&mut self, step: StepId, pages: u32) {
        self.mark(step).idle_pages += pages;
    }

    /// Subtracts pages that have become idle already or stay in use. O(log unfinished steps).
    pub fn remove_idle(&mut self, step: StepId, pages: u32) {
        let index = self.find(step).expect("F3: a step that a lock waits for has a mark");
        let mark = &mut self.marks[index];
        assert!(mark.idle_pages >= pages, "F4: idle pages are counted");
        mark.idle_pages -= pages;
    }

    /// Returns the number of pages that return, or become idle, by the completion of `step`. O(unfinished steps).
    pub fn pages_until(&self, step: StepId) -> u32 {
        let marks = self.marks.iter().take_while(|mark| mark.step <= step);
        marks.map(|mark| mark.pages + mark.idle_pages).sum()
    }

    /// Returns each step with a mark, in order, and its [`Fence::pages_until`].
    pub(crate) fn returns(&self) -> impl Iterator<Item = (StepId, u32)> + '_ {
        let mut pages = 0;
        self.marks.iter().map(move |mark| {
            pages += mark.pages + mark.idle_pages;
            (mark.step, pages)
        })
    }

    /// Removes the pages that wait for `step` or an earlier one, and passes them to `each` in slices, in the order of
    /// arrival. O(pages).
    pub(crate) fn take_pages(&mut self, step: StepId, mut each: impl FnMut(&[PageId])) {
        let marks = self.marks.iter_mut().take_while(|mark| mark.step <= step);
        let count = marks.map(|mark| std::mem::take(&mut mark.pages) as usize).sum::<usize>();
        let (head, tail) = self.pages.as_slices();
        let in_head = head.len().min(count);
        for run in [&head[..in_head], &tail[..count - in_head]] {
            each(run);
        }
        self.pages.drain(..count);
    }

    /// Removes the next lock that waits for `step` or an earlier one.
    pub(crate) fn take_lock(&mut self, step: StepId) -> Option<PrefixLock> {
        if self.locks.front()?.0 > step {
            return None;
        }
        self.locks.pop_front().map(|(_, lock)| lock)
    }

    /// Removes the marks up to `step`. The caller has taken their pages and locks.
    pub(crate) fn complete(&mut self, step: StepId) {
        while self.marks.front().is_some_and(|mark| mark.step <= step) {
            let mark = self.marks.pop_front().expect("the loop saw this mark");
            assert!(mark.pages == 0 && mark.idle_pages == 0, "F4: a complete step holds nothing");
        }
        self.completed = self.completed.max(step);
    }

    /// Returns the waiting pages in the order of arrival, each with its step; for audits.
    pub(crate) fn pages(&self) -> impl Iterator<Item = (PageId, StepId)> + '_ {
        let steps = self.marks.iter();
        let steps = steps.flat_map(|mark| (0..mark.pages).map(move |_| mark.step));
        self.pages.iter().copied().zip(steps)
    }

    /// Returns the waiting locks in the order of arrival, each with its step; for audits.
    pub(crate) fn locks(&self) -> impl Iterator<Item = &(StepId, PrefixLock)> {
        self.locks.iter()
    }

    /// Returns the idle pages of each mark that has some, for audits.
    pub(crate) fn idle_pages(&self) -> impl Iterator<Item = (StepId, u32)> + '_ {
        let marks = self.marks.iter().filter(|mark| mark.idle_pages > 0);
        marks.map(|mark| (mark.step, mark.idle_pages))
    }

    /// Checks F1, F3 and the counts of F2. `newest` is the newest step, and `fenced` the pool's number of fenced pages.
    pub(crate) fn check(&self, newest: StepId, fenced: u32) -> Result<(), &'static str> {
        let rise = self.marks.iter().is_sorted_by(|a, b| a.step < b.step);
        let first = self.marks.front().is_none_or(|mark| mark.step > self.completed);
        if !rise || !first {
            return Err("F1: the steps of marks rise, and none is complete");
        }
        if self.marks.back().is_some_and(|mark| mark.step > newest) {
            return Err("F1: nothing waits for a step that is not planned");
        }
        let counted = self.marks.iter().map(|mark| mark.pages as usize).sum::<usize>();
        if counted != self.pages.len() || counted != fenced as usize {
            return Err("F2: marks count the pages that wait");
        }
        if !self.locks.iter().is_sorted_by_key(|(step, _)| *step) {
            return Err("F3: locks wait in the order of arrival");
        }
        if !self.locks.iter().all(|&(step, _)| self.find(step).is_ok()) {
            return Err("F3: a step that a lock waits for has a mark");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
