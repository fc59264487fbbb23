//! Giving idle pages back: exactly as many as are asked for, oldest first, or all of them.

use crate::id::{NodeKey, PageId};

use super::PrefixTree;

impl PrefixTree {
    /// Takes exactly `count` idle pages out of the tree, oldest first and deepest first within a path; the last leaf
    /// is trimmed, not dropped. They are appended to `pages`. O(nodes and pages evicted), whatever the tree's size.
    ///
    /// # Panics
    /// If fewer pages are evictable.
    pub fn evict(&mut self, count: u32, pages: &mut Vec<PageId>) {
        assert!(count <= self.evictable, "the caller checked what is evictable");
        if count == 0 {
            return;
        }
        self.epoch += 1;
        self.evictable -= count;
        let mut rest = count;
        while rest > 0 {
            let node = self.list.oldest().expect("T5: evictable pages are in idle nodes");
            let span = &mut self.link[node].span;
            if span.pages() > rest {
                self.spans.trim(span, rest, pages);
                return;
            }
            rest -= span.pages();
            self.drop_idle(node, pages);
        }
    }

    /// Drops every idle prefix, their pages to `pages`; prefixes in use match no more and go with their last user.
    /// O(idle pages).
    pub fn reset(&mut self, pages: &mut Vec<PageId>) {
        self.epoch += 1;
        self.era = self.next_era();
        self.evictable = 0;
        while let Some(node) = self.list.oldest() {
            self.drop_idle(node, pages);
        }
    }

    fn drop_idle(&mut self, node: NodeKey, pages: &mut Vec<PageId>) {
        self.list.unlink(&mut self.age, node);
        self.despawn(node, pages);
    }
}
