//! Locks and unlocks prefixes, and counts the users of each node.
//!
//! Not here: the split where a match ends inside a node (`split.rs`).

use crate::fence::Fence;
use crate::id::{NodeKey, PageId, PrefixLock, StepId};

use super::{Link, PrefixMatch, PrefixTree};

/// The tree has changed since the match in a way that may make the match invalid.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stale;

impl PrefixTree {
    /// Locks a match, and splits its last node if the match ends inside it. The fence no longer counts the pages of
    /// nodes that were deferred and have a new user. O(nodes that were idle or deferred, their clean entries, and the
    /// extents before a split).
    ///
    /// # Errors
    /// [`Stale`] if the tree has changed since the match in one of these ways: a node was split, trimmed or evicted, or
    /// has grown; a cell was evicted; a node or a cell returned from swap memory; the tree was reset.
    pub fn lock(&mut self, found: &PrefixMatch, fence: &mut Fence) -> Result<PrefixLock, Stale> {
        if self.is_stale(found) {
            return Err(Stale);
        }
        let node = found.node.map(|node| self.split(node, found.pages_in_node));
        if let Some(node) = node {
            self.add_user(node, fence);
        }
        Ok(PrefixLock::new(node, found.scope))
    }

    /// Returns whether the tree has changed since a match in a way that may make the match invalid.
    pub(crate) fn is_stale(&self, found: &PrefixMatch) -> bool {
        found.epoch != self.epoch
    }

    /// Returns one more lock on the same prefix.
    pub(crate) fn lock_again(&mut self, lock: &PrefixLock, fence: &mut Fence) -> PrefixLock {
        if let Some(node) = lock.node() {
            self.add_user(node, fence);
        }
        PrefixLock::new(lock.node(), lock.scope())
    }

    /// Releases a lock. Nodes that become idle join the young end of the eviction order, deepest first. Nodes that can
    /// no longer match are dropped at once, and their pages appended to `freed`. O(nodes that become idle or
    /// deferred, and pages dropped).
    ///
    /// # Panics
    /// Possibly, if the lock is not of this tree.
    pub fn unlock(&mut self, lock: PrefixLock, fence: &mut Fence, freed: &mut Vec<PageId>) {
        self.branches += 1;
        let keep = lock.scope().generation == self.generation;
        let mut at = lock.node();
        while let Some(node) = at {
            let usage = &mut self.usage[node];
            assert!(usage.lock_count > 0, "T3: a lock is counted until it is released");
            usage.lock_count -= 1;
            if usage.lock_count > 0 {
                self.begin_deferred(node, fence);
                return;
            }
            at = self.link[node].parent;
            self.become_idle(node, keep, freed);
        }
    }

    pub(super) fn become_idle(&mut self, node: NodeKey, keep: bool, freed: &mut Vec<PageId>) {
        let entries = self.link[node].span.pages();
        if keep {
            let pages = match self.ages.is_some() {
                true => self.stamp_idle(node, entries),
                false => entries,
            };
            self.protected -= pages;
            self.evictable += pages;
            self.order.enter(&mut self.usage, node);
        } else {
            self.protected -= self.device_pages(node, entries);
            match self.swap.is_some() {
                true => self.detach_entries(node, entries, false, freed),
                false => self.detach_pages(node, entries, false, freed),
            }
            self.despawn(node);
        }
    }

    /// Moves a lock from its node to one below it: the path above stays locked throughout.
    pub(super) fn move_lock(&mut self, lock: &mut PrefixLock, node: NodeKey, fence: &mut Fence) {
        let (old, scope) = (lock.node(), lock.scope());
        if old == Some(node) {
            return;
        }
        self.add_user(node, fence);
        if let Some(old) = old {
            // The path to `node` goes through `old`, so `old` does not become idle.
            self.usage[old].lock_count -= 1;
            debug_assert!(self.usage[old].lock_count > 0, "T3: a locked child counts");
        }
        *lock = PrefixLock::new(Some(node), scope);
    }

    fn add_user(&mut self, node: NodeKey, fence: &mut Fence) {
        self.branches += 1;
        let mut at = Some(node);
        while let Some(node) = at {
            self.stop_deferred(node, fence);
            let usage = &mut self.usage[node];
            usage.lock_count += 1;
            if usage.lock_count > 1 {
                return;
            }
            let Link { parent, span } = self.link[node];
            let pages = match self.swap.is_some() {
                true => self.leave_idle(node),
                false => span.pages(),
            };
            self.order.leave(&mut self.usage, node);
            at = parent;
            self.evictable -= pages;
            self.protected += pages;
        }
    }

    /// Returns the number of idle pages of a match, which a lock would make unevictable. O(idle nodes, and tails).
    pub(crate) fn idle_pages(&self, found: &PrefixMatch) -> u32 {
        let pages = self.idle_node_pages(found);
        pages + self.idle_tail_pages(found, None)
    }

    /// Returns [`PrefixTree::idle_pages`] as of the completion of `step`, if no other call comes first.
    pub(crate) fn idle_pages_after(&self, found: &PrefixMatch, step: StepId) -> u32 {
        let pages = self.node_pages_after(found, step);
        pages + self.idle_tail_pages(found, Some(step))
    }

    /// Returns the number of idle pages of a match, without the pages of cells.
    #[inline]
    pub(crate) fn idle_node_pages(&self, found: &PrefixMatch) -> u32 {
        self.pages_while(found, |node| self.usage[node].lock_count == 0)
    }

    /// Returns [`PrefixTree::idle_node_pages`] as of the completion of `step`.
    pub(crate) fn node_pages_after(&self, found: &PrefixMatch, step: StepId) -> u32 {
        self.pages_while(found, |node| {
            let deferred = self.is_deferred(node) && self.deferred[node].step <= step;
            self.usage[node].lock_count == 0 || deferred
        })
    }

    /// Returns the number of device pages of a match, from its end up to the first node for which `is_one` is false.
    fn pages_while(&self, found: &PrefixMatch, is_one: impl Fn(NodeKey) -> bool) -> u32 {
        let (mut at, mut pages) = (found.node, 0);
        let mut here = found.pages_in_node;
        while let Some(node) = at
            && is_one(node)
        {
            pages += self.device_pages(node, here);
            at = self.link[node].parent;
            here = at.map_or(0, |parent| self.link[parent].span.pages());
        }
        pages
    }
}
