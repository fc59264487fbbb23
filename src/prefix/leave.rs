//! Locks on their way out: given up, but an unfinished step may still read their pages. The tree counts the pages that
//! will be idle when they are gone, so that a scheduler knows what is about to come back.
//!
//! Not here: the queue of those locks (`step.rs`).

use crate::id::{NodeKey, PageId, PrefixLock, StepId};

use super::PrefixTree;

/// How a node's locks are on their way out.
#[derive(Clone, Copy, Default)]
pub(super) struct Leave {
    /// Fenced locks that end here, and children that are leaving. Not 0: a node without has no entry.
    pub count: u32,
    /// The last step that one of them waits for.
    pub step: StepId,
}

impl PrefixTree {
    /// Announces that a lock will be given up when `step` is complete. Steps of announcements never fall.
    /// O(nodes that begin to leave).
    pub fn leave(&mut self, lock: &PrefixLock, step: StepId) {
        let Some(node) = lock.node() else { return };
        self.add_leaving(node, step);
        self.begin_leaving(node);
    }

    /// Whether a node is locked by fenced locks only: it will be idle when their steps are complete.
    pub(super) fn is_leaving(&self, node: NodeKey) -> bool {
        !self.leave.is_empty()
            && self.leave.get(node).is_some_and(|leave| leave.count == self.age[node].lock_count)
    }

    fn add_leaving(&mut self, node: NodeKey, step: StepId) {
        match self.leave.get_mut(node) {
            Some(leave) => {
                leave.count += 1;
                leave.step = leave.step.max(step);
            }
            None => drop(self.leave.insert(node, Leave { count: 1, step })),
        }
    }

    fn remove_leaving(&mut self, node: NodeKey) {
        let leave = self.leave.get_mut(node).expect("T7: a leaving lock or child is counted");
        leave.count -= 1;
        if leave.count == 0 {
            self.leave.remove(node);
        }
    }

    /// Gives up a lock that was announced. As [`PrefixTree::unlock`].
    pub fn unlock_leaving(&mut self, lock: PrefixLock, freed: &mut Vec<PageId>) {
        let keep = lock.scope().era == self.era;
        let mut at = lock.node();
        while let Some(node) = at {
            let step = self.leave.get(node).expect("T7: a fenced lock is counted").step;
            let age = &mut self.age[node];
            assert!(age.lock_count > 0, "T3: a lock is counted until it is given up");
            age.lock_count -= 1;
            let idle = age.lock_count == 0;
            self.remove_leaving(node);
            if !idle {
                return; // Both counts fell: whether the node is leaving stays as it was.
            }
            self.count_leaving(node, step, false);
            at = self.link[node].parent;
            self.become_idle(node, keep, freed);
        }
    }

    /// Pages that will be idle when `step` is complete, if nobody locks them before. O(unfinished steps).
    pub fn leaving_until(&self, step: StepId) -> u32 {
        self.leaving.iter().take_while(|(s, _)| *s <= step).map(|(_, pages)| pages).sum()
    }

    /// Counts a node, and the parents whose last staying user it was, if it has begun to leave.
    pub(super) fn begin_leaving(&mut self, node: NodeKey) {
        let mut at = node;
        while self.is_leaving(at) {
            let step = self.leave[at].step;
            self.count_leaving(at, step, true);
            let Some(parent) = self.link[at].parent else { return };
            self.add_leaving(parent, step);
            at = parent;
        }
    }

    /// Takes a node that is about to get a user, and its parents, out of the count if they were leaving.
    pub(super) fn stop_leaving(&mut self, node: NodeKey) {
        let mut at = node;
        let mut leaving = self.is_leaving(at);
        let mut step = self.leave.get(at).copied().unwrap_or_default().step;
        while leaving {
            self.count_leaving(at, step, false);
            let Some(parent) = self.link[at].parent else { return };
            leaving = self.is_leaving(parent);
            step = self.leave[parent].step;
            self.remove_leaving(parent);
            at = parent;
        }
    }

    fn count_leaving(&mut self, node: NodeKey, step: StepId, more: bool) {
        let pages = self.link[node].span.pages();
        let index = self.leaving.partition_point(|(s, _)| *s < step);
        if more {
            match self.leaving.get_mut(index) {
                Some((s, count)) if *s == step => *count += pages,
                _ => self.leaving.insert(index, (step, pages)),
            }
            return;
        }
        let (s, count) = &mut self.leaving[index];
        assert!(*s == step, "T7: leaving nodes are counted");
        *count -= pages;
        if *count == 0 {
            self.leaving.remove(index);
        }
    }
}
