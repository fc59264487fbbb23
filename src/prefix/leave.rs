//! Locks on their way out: given up, but an unfinished step may still read their pages. The tree counts the pages that
//! will be idle when they are gone, so that a scheduler knows what is about to come back.
//!
//! Not here: the queue of those locks (`step.rs`).

use crate::id::{NodeKey, PageId, PrefixLock, StepId};

use super::PrefixTree;

impl PrefixTree {
    /// Announces that a lock will be given up when `step` is complete. Steps of announcements never fall.
    /// O(nodes that begin to leave).
    pub fn leave(&mut self, lock: &PrefixLock, step: StepId) {
        let Some(node) = lock.node() else { return };
        let age = &mut self.age[node];
        age.leaving += 1;
        age.leaving_step = step;
        self.begin_leaving(node);
    }

    /// Gives up a lock that was announced. As [`PrefixTree::unlock`].
    pub fn unlock_leaving(&mut self, lock: PrefixLock, freed: &mut Vec<PageId>) {
        let keep = lock.scope().era == self.era;
        let mut at = lock.node();
        while let Some(node) = at {
            let age = &mut self.age[node];
            assert!(age.lock_count > 0 && age.leaving > 0, "T7: a fenced lock is counted");
            age.lock_count -= 1;
            age.leaving -= 1;
            if age.lock_count > 0 {
                return; // Both counts fell: whether the node is leaving stays as it was.
            }
            let step = age.leaving_step;
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
        while self.age[at].is_leaving() {
            let step = self.age[at].leaving_step;
            self.count_leaving(at, step, true);
            let Some(parent) = self.link[at].parent else { return };
            let age = &mut self.age[parent];
            age.leaving += 1;
            age.leaving_step = age.leaving_step.max(step);
            at = parent;
        }
    }

    /// Takes a node that is about to get a user, and its parents, out of the count if they were leaving.
    pub(super) fn stop_leaving(&mut self, node: NodeKey) {
        let mut at = node;
        let mut leaving = self.age[at].is_leaving();
        while leaving {
            let step = self.age[at].leaving_step;
            self.count_leaving(at, step, false);
            let Some(parent) = self.link[at].parent else { return };
            let age = &mut self.age[parent];
            leaving = age.is_leaving();
            age.leaving -= 1;
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
