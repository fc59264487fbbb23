//! Eviction of idle pages: exactly as many as requested, oldest first.

use crate::id::{NodeKey, PageId};

use super::PrefixTree;
use super::column::prefetch_slot;

impl PrefixTree {
    /// Takes exactly `count` idle pages out of a tree without cells and swap memory, oldest first and deepest first
    /// within a path. Trims the last leaf if it has more pages than are needed. Appends the evicted pages to `pages`.
    /// O(nodes and pages evicted).
    ///
    /// # Panics
    /// If fewer pages are evictable.
    pub fn evict(&mut self, count: u32, pages: &mut Vec<PageId>) {
        assert!(count <= self.evictable, "the caller checked what is evictable");
        let mut rest = count;
        while rest > 0 {
            let node = self.order.next().expect("T5: evictable pages are in idle nodes");
            let held = self.link[node].span.pages();
            if held > rest {
                self.detach_pages(node, rest, true, pages);
                return;
            }
            rest -= held;
            self.drop_idle(node, true, pages);
            self.look_ahead();
        }
    }

    /// Prefetches the data of the evictions after the next one. This data is not in the CPU's caches, and the addresses
    /// depend on each other. For the second node from now, prefetches its page ids and its entry of the child table.
    /// Their addresses follow from the node's columns, so for the third node it prefetches the columns.
    pub(super) fn look_ahead(&self) {
        let Some(first) = self.order.next() else { return };
        let Some(second) = self.order.after(&self.usage, first) else { return };
        let third = self.order.after(&self.usage, second);
        let (usage, link) = (&self.usage[second], &self.link[second]);
        self.children.prefetch(usage.hash);
        self.spans.prefetch(&link.span);
        if let Some(third) = third {
            prefetch_slot(usage, second, third);
            prefetch_slot(link, second, third);
        }
    }

    /// Drops an idle node with all its pages. Inlined, since eviction calls it for each node.
    #[inline(always)]
    pub(super) fn drop_idle(&mut self, node: NodeKey, present: bool, pages: &mut Vec<PageId>) {
        let all = self.link[node].span.pages();
        self.detach_pages(node, all, present, pages);
        self.order.leave(&mut self.usage, node);
        self.despawn(node);
    }
}
