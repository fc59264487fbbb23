//! Locks and unlocks prefixes, and counts the users of each node.
//!
//! Not here: the split where a match ends inside a node (`split.rs`).

use crate::event::Medium;
use crate::fence::Fence;
use crate::id::{NodeKey, PageId, PrefixLock, StepId};

use super::nodes::Sides;
use super::{PrefixMatch, PrefixTree};

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
        if found.epoch != self.epoch {
            return Err(Stale);
        }
        let node = found.node.map(|node| self.split(node, found.pages_in_node));
        if let Some(node) = node {
            self.add_user(node, fence);
        }
        Ok(PrefixLock::new(node, found.scope))
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
            at = self.nodes.link[node].parent;
            self.become_idle(node, keep, freed);
        }
    }

    pub(super) fn become_idle(&mut self, node: NodeKey, keep: bool, freed: &mut Vec<PageId>) {
        let entries = self.nodes.entries(node);
        let pages = self.nodes.device_pages(node, entries);
        self.size.protected -= pages;
        if keep {
            if let Some(ages) = &mut self.ages {
                let sides = self.nodes.sides_of(node);
                ages.enter(node, entries, |seek| seek.finds(sides, entries));
            }
            self.size.evictable += pages;
            self.order.enter(&mut self.usage, node);
        } else {
            self.detach(node, entries, false, freed);
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

    pub(super) fn add_user(&mut self, node: NodeKey, fence: &mut Fence) {
        self.branches += 1;
        let mut at = Some(node);
        while let Some(node) = at {
            self.stop_deferred(node, fence);
            let usage = &mut self.usage[node];
            usage.lock_count += 1;
            if usage.lock_count > 1 {
                return;
            }
            if self.swap.is_some() {
                self.drop_copies(node);
            }
            self.unlist(node);
            let pages = self.nodes.device_pages(node, self.nodes.entries(node));
            self.size.evictable -= pages;
            self.size.protected += pages;
            at = self.nodes.link[node].parent;
        }
    }

    /// Frees the swap pages of a node's clean entries, because a node in use has none.
    #[cold]
    fn drop_copies(&mut self, node: NodeKey) {
        let Sides { device, swap_start } = self.nodes.sides_of(node);
        self.emit_removed(node, Medium::Swap, swap_start..device);
        let Self { nodes, swap: Some(swap), .. } = self else { return };
        swap.drop_copies(nodes, node);
    }

    /// Returns the number of idle pages of a match, which a lock would make unevictable, now or as of the completion of
    /// `step`, if no other call comes first. O(idle nodes, and tails).
    pub(crate) fn idle_pages(&self, found: &PrefixMatch, step: Option<StepId>) -> u32 {
        let of_nodes = self.idle_node_pages(found, step);
        if !self.has_cells() {
            return of_nodes;
        }
        let idle = self.tails(found.end(), found.pages).filter(|&cell| self.cells().is_idle(cell, step));
        of_nodes + idle.map(|cell| self.cells().device_tracks(cell)).sum::<u32>()
    }

    /// Returns [`PrefixTree::idle_pages`] without the pages of cells.
    pub(crate) fn idle_node_pages(&self, found: &PrefixMatch, step: Option<StepId>) -> u32 {
        let is_idle = |node| {
            let is_deferred = |step| self.is_deferred(node) && self.deferred[node].step <= step;
            self.usage[node].lock_count == 0 || step.is_some_and(is_deferred)
        };
        let idle = self.nodes.up(found.end()).take_while(|&(node, _)| is_idle(node));
        idle.map(|(node, pages)| self.nodes.device_pages(node, pages)).sum()
    }
}
