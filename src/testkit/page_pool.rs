//! Compares the page pool with a plain list of states.

use std::collections::VecDeque;

use arbitrary::Arbitrary;

use super::model::{PageIs, Pages};
use super::replay::agree;
use super::rng::Rng;
use crate::fence::Fence;
use crate::id::{PageId, StepId};
use crate::page::{PagePool, PageState};

/// A call of a page pool. The replay chooses among the pages in the required state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Arbitrary)]
pub enum PageOp {
    /// `alloc`, sometimes of more pages than are free.
    Alloc {
        /// Number of pages, modulo the free pages plus two.
        count: u16,
    },
    /// `publish`
    Publish {
        /// Chooses private pages.
        which: Which,
    },
    /// `free_private`
    FreePrivate {
        /// Chooses private pages.
        which: Which,
    },
    /// `free_cached`
    FreeCached {
        /// Chooses cached pages.
        which: Which,
    },
    /// `fence_private`
    Fence {
        /// Chooses private pages.
        which: Which,
        /// The step that the pages wait for, modulo 4; 0 is the first step that is not complete.
        after: u8,
    },
    /// `Fence::complete`; the pool receives the pages that the fence returns.
    Unfence {
        /// Number of steps that become complete, modulo 4.
        steps: u8,
    },
}

/// A part of a list of pages, in some order.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Arbitrary)]
pub struct Which {
    /// Index of the first page, modulo the length of the list.
    pub first: u16,
    /// Number of pages from `first` on, with wraparound, modulo the length of the list plus one.
    pub count: u16,
    /// Whether the order is reversed.
    pub reversed: bool,
}

impl Which {
    fn of(self, mut pages: Vec<PageId>) -> Vec<PageId> {
        let len = pages.len();
        pages.rotate_left(usize::from(self.first) % len.max(1));
        pages.truncate(usize::from(self.count) % (len + 1));
        if self.reversed {
            pages.reverse();
        }
        pages
    }
}

/// Returns a seeded list of ops.
pub fn page_ops(seed: u64, count: usize) -> Vec<PageOp> {
    let mut rng = Rng::new(seed);
    let weights = [8, 4, 2, 4, 4, 3].map(|weight: u64| weight * rng.within(0, 2) + 1);
    let op = |_| {
        let which =
            Which { first: rng.bits() as u16, count: rng.bits() as u16 >> rng.below(16), reversed: rng.one_in(4) };
        let small = rng.bits() as u8;
        match rng.weighted(&weights) {
            0 => PageOp::Alloc { count: rng.bits() as u16 >> rng.below(16) },
            1 => PageOp::Publish { which },
            2 => PageOp::FreePrivate { which },
            3 => PageOp::FreeCached { which },
            4 => PageOp::Fence { which, after: small },
            _ => PageOp::Unfence { steps: small },
        }
    };
    (0..count).map(op).collect()
}

struct Both {
    pool: PagePool,
    pages: Pages,
    fence: Fence,
    waiting: VecDeque<(PageId, StepId)>,
    completed: u64,
}

/// Replays ops on a pool of `page_count` pages.
///
/// # Errors
/// The first op after which pool and model differ, and the difference.
pub fn replay_pages(page_count: u32, ops: &[PageOp]) -> Result<(), String> {
    let mut both = Both {
        pool: PagePool::new(page_count).expect("memory"),
        pages: Pages::new(page_count),
        fence: Fence::new(page_count, 4, 0).expect("memory"),
        waiting: VecDeque::new(),
        completed: 0,
    };
    for (index, op) in ops.iter().enumerate() {
        let done = both.apply(*op).and_then(|()| both.compare());
        done.map_err(|what| format!("op {index}, {op:?}: {what}"))?;
    }
    Ok(())
}

impl Both {
    fn in_state(&self, state: PageIs) -> Vec<PageId> {
        let all = (0..self.pages.page_count()).map(PageId::new);
        all.filter(|&page| self.pages.state(page) == state).collect()
    }

    fn apply(&mut self, op: PageOp) -> Result<(), String> {
        match op {
            PageOp::Alloc { count } => return self.alloc(count),
            PageOp::Publish { which } => {
                let pages = which.of(self.in_state(PageIs::Private));
                self.pool.publish(&pages);
                self.pages.turn(&pages, PageIs::Private, PageIs::Cached);
            }
            PageOp::FreePrivate { which } => {
                let pages = which.of(self.in_state(PageIs::Private));
                self.pool.free_private(&pages);
                self.pages.turn(&pages, PageIs::Private, PageIs::Free);
            }
            PageOp::FreeCached { which } => {
                let pages = which.of(self.in_state(PageIs::Cached));
                self.pool.free_cached(&pages);
                self.pages.turn(&pages, PageIs::Cached, PageIs::Free);
            }
            PageOp::Fence { which, after } => {
                let pages = which.of(self.in_state(PageIs::Private));
                let step = StepId::new(self.completed + 1 + u64::from(after % 4));
                let until = self.waiting.back().map_or(step, |last| last.1.max(step));
                self.pages.turn(&pages, PageIs::Private, PageIs::Fenced);
                if !pages.is_empty() {
                    agree("until", &self.fence.until(step), &Some(until))?;
                    self.pool.fence_private(&pages);
                    self.fence.push_pages(&pages, until);
                }
                self.waiting.extend(pages.into_iter().map(|page| (page, until)));
            }
            PageOp::Unfence { steps } => {
                self.completed += u64::from(steps % 4);
                let completed = StepId::new(self.completed);
                self.fence.take_pages(completed, |run| self.pool.unfence(run));
                self.fence.complete(completed);
                while self.waiting.front().is_some_and(|first| first.1 <= completed) {
                    let back: Vec<_> = self.waiting.pop_front().map(|first| first.0).into_iter().collect();
                    self.pages.turn(&back, PageIs::Fenced, PageIs::Free);
                }
            }
        }
        Ok(())
    }

    fn alloc(&mut self, count: u16) -> Result<(), String> {
        let free = self.pages.count(PageIs::Free);
        let count = u32::from(count) % (free + 2);
        let mut got = vec![PageId::default(); count as usize];
        let done = self.pool.alloc(&mut got);
        agree("alloc", &done, &(count <= free))?;
        if done {
            agree("the lowest free pages", &got, &self.pages.alloc(count))?;
        }
        Ok(())
    }

    fn compare(&self) -> Result<(), String> {
        let (pool, pages) = (&self.pool, &self.pages);
        for page in (0..pages.page_count()).map(PageId::new) {
            let got = match pool.state(page) {
                PageState::Free => PageIs::Free,
                PageState::Private => PageIs::Private,
                PageState::Cached => PageIs::Cached,
                PageState::Fenced => PageIs::Fenced,
            };
            agree("state", &(page, got), &(page, pages.state(page)))?;
        }
        agree("free_count", &pool.free_count(), &pages.count(PageIs::Free))?;
        agree("private_count", &pool.private_count(), &pages.count(PageIs::Private))?;
        agree("cached_count", &pool.cached_count(), &pages.count(PageIs::Cached))?;
        agree("fenced_count", &pool.fenced_count(), &pages.count(PageIs::Fenced))?;
        let waiting = self.waiting.iter().copied().collect::<Vec<_>>();
        agree("the fence", &self.fence.pages().collect::<Vec<_>>(), &waiting)?;
        for step in (0..6).map(|more| StepId::new(self.completed + more)) {
            let until = waiting.iter().filter(|waits| waits.1 <= step).count() as u32;
            agree("pages_until", &(step, self.fence.pages_until(step)), &(step, until))?;
        }
        pool.check().map_err(|broken| format!("{broken:?}"))?;
        self.fence.check(StepId::new(self.completed + 4), pool.fenced_count()).map_err(str::to_owned)
    }
}
