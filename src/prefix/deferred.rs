//! Deferred unlocks: locks that are released while an unfinished step may still read their pages. The fence counts the
//! pages of the nodes that become idle when the step is complete, so a scheduler can see how many pages will return.
//!
//! Not here: the queue of those locks (`fence/`).

use bytemuck::Zeroable;

use crate::fence::Fence;
use crate::id::{NodeKey, PageId, PrefixLock, StepId};

use super::PrefixTree;

/// A node's deferred users: fenced locks that end here, and children that have only deferred users.
#[derive(Clone, Copy, Default, PartialEq, Eq, Zeroable)]
pub(super) struct Deferred {
    /// Number of these users. If 0, `step` is 0 too.
    pub count: u32,
    /// The last step that any deferred user has waited for since `count` was 0.
    pub step: StepId,
}

impl PrefixTree {
    /// Records that a lock at `node` waits in the fence until `step` is complete. O(nodes that become deferred).
    pub(crate) fn defer_unlock(&mut self, node: Option<NodeKey>, step: StepId, fence: &mut Fence) {
        let Some(node) = node else { return };
        self.branches += 1;
        self.add_deferred(node, step);
        self.begin_deferred(node, fence);
    }

    /// Returns whether only fenced locks lock a node, so that it becomes idle when their steps are complete.
    pub(super) fn is_deferred(&self, node: NodeKey) -> bool {
        self.deferred_nodes > 0 && {
            let count = self.deferred[node].count;
            count > 0 && count == self.usage[node].lock_count
        }
    }

    pub(super) fn add_deferred(&mut self, node: NodeKey, step: StepId) {
        let deferred = &mut self.deferred[node];
        self.deferred_nodes += u32::from(deferred.count == 0);
        deferred.count += 1;
        deferred.step = deferred.step.max(step);
    }

    fn remove_deferred(&mut self, node: NodeKey) {
        let deferred = &mut self.deferred[node];
        assert!(deferred.count > 0, "T7: a deferred unlock is counted");
        deferred.count -= 1;
        if deferred.count == 0 {
            *deferred = Deferred::default();
            self.deferred_nodes -= 1;
        }
    }

    /// Unlocks a deferred lock, as [`PrefixTree::unlock`].
    pub(crate) fn unlock_deferred(&mut self, lock: PrefixLock, fence: &mut Fence, freed: &mut Vec<PageId>) {
        self.branches += 1;
        let keep = lock.scope().generation == self.generation;
        let mut at = lock.node();
        while let Some(node) = at {
            let step = self.deferred[node].step;
            let usage = &mut self.usage[node];
            assert!(usage.lock_count > 0, "T3: a lock is counted until it is released");
            usage.lock_count -= 1;
            let idle = usage.lock_count == 0;
            self.remove_deferred(node);
            if !idle {
                return; // Both counts fell by 1, so `is_deferred` returns the same as before.
            }
            fence.remove_idle(step, self.nodes.device_pages(node, self.nodes.entries(node)));
            at = self.nodes.link[node].parent;
            self.become_idle(node, keep, freed);
        }
    }

    /// If a node has only deferred users left, counts its pages in the fence. The node is then a deferred user of its
    /// parent, which is checked next.
    pub(super) fn begin_deferred(&mut self, node: NodeKey, fence: &mut Fence) {
        let mut at = node;
        while self.is_deferred(at) {
            let step = self.deferred[at].step;
            fence.add_idle(step, self.nodes.device_pages(at, self.nodes.entries(at)));
            let Some(parent) = self.nodes.link[at].parent else { return };
            self.add_deferred(parent, step);
            at = parent;
        }
    }

    /// Removes the pages of a node, and of its ancestors, from the fence's counts, as far up as these nodes are
    /// deferred. The node is about to get a user.
    pub(super) fn stop_deferred(&mut self, node: NodeKey, fence: &mut Fence) {
        let mut at = node;
        if !self.is_deferred(at) {
            return;
        }
        let mut step = self.deferred[at].step;
        loop {
            fence.remove_idle(step, self.nodes.device_pages(at, self.nodes.entries(at)));
            let Some(parent) = self.nodes.link[at].parent else { return };
            let was_deferred = self.is_deferred(parent);
            step = self.deferred[parent].step;
            self.remove_deferred(parent);
            if !was_deferred {
                return;
            }
            at = parent;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{Namespace, TokenId};

    /// A tree, and the fence in which its locks wait.
    struct Held {
        tree: PrefixTree,
        fence: Fence,
    }

    impl Held {
        fn new() -> Self {
            Self {
                tree: PrefixTree::new(10, 1, 31, false).expect("memory"),
                fence: Fence::new(0, 3, 4).expect("memory"),
            }
        }

        /// Returns a lock on `len` pages of one text, with one token a page.
        fn lock(&mut self, len: u32) -> PrefixLock {
            let Self { tree, fence } = self;
            let text: Vec<TokenId> = (0..len).map(TokenId::new).collect();
            let found = tree.match_prefix(Namespace::default(), &text);
            let mut lock = tree.lock(&found, fence).expect("nothing changed since the match");
            let new = found.pages()..len;
            let mut pages: Vec<PageId> = new.clone().map(PageId::new).collect();
            let tokens = &text[new.start as usize..];
            let inserted = tree.insert(&mut lock, tokens, &mut pages, &mut Vec::new(), fence);
            assert_eq!(inserted.duplicates, 0);
            lock
        }

        fn defer(&mut self, lock: PrefixLock, step: u64) {
            let (node, step) = (lock.node(), StepId::new(step));
            self.fence.push_lock(lock, step);
            self.tree.defer_unlock(node, step, &mut self.fence);
        }

        /// Returns the number of pages that are idle once each of three steps is complete.
        fn idle(&self) -> [u32; 3] {
            [1, 2, 3].map(|step| self.fence.pages_until(StepId::new(step)))
        }
    }

    #[test]
    fn a_node_is_idle_with_the_last_of_its_locks() {
        let mut held = Held::new();
        let [first, second] = [held.lock(4), held.lock(4)];
        held.defer(first, 1);
        assert_eq!(held.idle(), [0, 0, 0], "another lock stays");
        held.defer(second, 3);
        assert_eq!(held.idle(), [0, 0, 4]);
    }

    #[test]
    fn a_parent_is_idle_no_sooner_than_its_own_locks() {
        let mut held = Held::new();
        let parent = held.lock(4);
        let [child, stays] = [held.lock(6), held.lock(6)];
        held.defer(child, 1);
        held.defer(parent, 2);
        assert_eq!(held.idle(), [0, 0, 0], "another lock stays");
        // This unlock makes the child deferred, for a step before the one that its parent waits for.
        held.tree.unlock(stays, &mut held.fence, &mut Vec::new());
        assert_eq!(held.idle(), [2, 6, 6]);
    }

    #[test]
    fn a_parent_is_idle_no_sooner_than_its_children() {
        let mut held = Held::new();
        let parent = held.lock(4);
        let child = held.lock(6);
        held.defer(parent, 1);
        held.defer(child, 2);
        assert_eq!(held.idle(), [0, 6, 6]);
        // A new lock uses both nodes again.
        let again = held.lock(6);
        assert_eq!(held.idle(), [0, 0, 0]);
        held.tree.unlock(again, &mut held.fence, &mut Vec::new());
        assert_eq!(held.idle(), [0, 6, 6]);
    }
}
