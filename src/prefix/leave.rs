//! Locks on their way out: given up, but an unfinished step may still read their pages. The tree counts the pages that
//! will be idle when they are gone, so that a scheduler knows what is about to come back.
//!
//! Not here: the queue of those locks (`step.rs`).

use bytemuck::Zeroable;

use crate::id::{NodeKey, PageId, PrefixLock, StepId};

use super::PrefixTree;

/// How a node's locks are on their way out.
#[derive(Clone, Copy, Default, PartialEq, Eq, Zeroable)]
pub(super) struct Leave {
    /// Fenced locks that end here, and children that are leaving. 0: there are none, and no step.
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
        self.leave_nodes > 0 && {
            let count = self.leave[node].count;
            count > 0 && count == self.age[node].lock_count
        }
    }

    pub(super) fn add_leaving(&mut self, node: NodeKey, step: StepId) {
        let leave = &mut self.leave[node];
        self.leave_nodes += u32::from(leave.count == 0);
        leave.count += 1;
        leave.step = leave.step.max(step);
    }

    fn remove_leaving(&mut self, node: NodeKey) {
        let leave = &mut self.leave[node];
        assert!(leave.count > 0, "T7: a leaving lock or child is counted");
        leave.count -= 1;
        if leave.count == 0 {
            *leave = Leave::default();
            self.leave_nodes -= 1;
        }
    }

    /// Gives up a lock that was announced. As [`PrefixTree::unlock`].
    pub fn unlock_leaving(&mut self, lock: PrefixLock, freed: &mut Vec<PageId>) {
        let keep = lock.scope().era == self.era;
        let mut at = lock.node();
        while let Some(node) = at {
            let step = self.leave[node].step;
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
        if !self.is_leaving(at) {
            return;
        }
        let mut step = self.leave[at].step;
        loop {
            self.count_leaving(at, step, false);
            let Some(parent) = self.link[at].parent else { return };
            let leaving = self.is_leaving(parent);
            step = self.leave[parent].step;
            self.remove_leaving(parent);
            if !leaving {
                return;
            }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{Namespace, TokenId};

    /// A lock on so many pages of one token each, of one text.
    fn lock(tree: &mut PrefixTree, len: u32) -> PrefixLock {
        let text: Vec<TokenId> = (0..len).map(TokenId::new).collect();
        let found = tree.match_prefix(Namespace::default(), &text);
        let mut lock = tree.lock(&found).expect("nothing changed since the match");
        let new = found.pages()..len;
        let mut pages: Vec<PageId> = new.clone().map(PageId::new).collect();
        let tokens = &text[new.start as usize..];
        assert_eq!(tree.insert(&mut lock, tokens, &mut pages, &mut Vec::new()).duplicates, 0);
        lock
    }

    fn leaving(tree: &PrefixTree) -> [u32; 3] {
        [1, 2, 3].map(|step| tree.leaving_until(StepId::new(step)))
    }

    #[test]
    fn a_node_leaves_with_the_last_of_its_locks() {
        let mut tree = PrefixTree::new(10, 1, 3, 31);
        let [first, second] = [lock(&mut tree, 4), lock(&mut tree, 4)];
        tree.leave(&first, StepId::new(1));
        assert_eq!(leaving(&tree), [0, 0, 0], "somebody stays");
        tree.leave(&second, StepId::new(3));
        assert_eq!(leaving(&tree), [0, 0, 4]);
    }

    #[test]
    fn a_parent_leaves_no_sooner_than_its_own_locks() {
        let mut tree = PrefixTree::new(10, 1, 3, 31);
        let parent = lock(&mut tree, 4);
        let [child, stays] = [lock(&mut tree, 6), lock(&mut tree, 6)];
        tree.leave(&child, StepId::new(1));
        tree.leave(&parent, StepId::new(2));
        assert_eq!(leaving(&tree), [0, 0, 0], "somebody stays");
        // The child begins to leave now, for a step before the one that its parent waits for.
        tree.unlock(stays, &mut Vec::new());
        assert_eq!(leaving(&tree), [2, 6, 6]);
    }

    #[test]
    fn a_parent_leaves_no_sooner_than_its_children() {
        let mut tree = PrefixTree::new(10, 1, 3, 31);
        let parent = lock(&mut tree, 4);
        let child = lock(&mut tree, 6);
        tree.leave(&parent, StepId::new(1));
        tree.leave(&child, StepId::new(2));
        assert_eq!(leaving(&tree), [0, 6, 6]);
        // Whoever comes back stops both.
        let again = tree.lock_again(&child);
        assert_eq!(leaving(&tree), [0, 0, 0]);
        tree.unlock(again, &mut Vec::new());
        assert_eq!(leaving(&tree), [0, 6, 6]);
    }
}
