//! Generations of prefixes. Prompts match prefixes of the present generation. A prefix of another generation is dropped
//! with its last user.

use crate::id::{Namespace, PageId, PrefixLock, Scope};

use super::PrefixTree;

impl PrefixTree {
    /// Returns the scope in which prefixes of a namespace match now.
    pub(crate) fn present_scope(&self, namespace: Namespace) -> Scope {
        Scope { namespace, generation: self.generation }
    }

    /// Returns a lock on the empty prefix in a new generation. No other prompt ever matches pages below it, and they
    /// are dropped with their last user.
    pub(crate) fn lock_private(&mut self, namespace: Namespace) -> PrefixLock {
        let generation = self.next_generation();
        PrefixLock::new(None, Scope { namespace, generation })
    }

    /// Drops all idle prefixes and appends their pages to `pages`. Prefixes in use no longer match, and are dropped
    /// with their last user. O(idle pages).
    pub(crate) fn reset(&mut self, pages: &mut Vec<PageId>) {
        self.epoch += 1;
        self.generation = self.next_generation();
        self.cells.iter_mut().for_each(|cells| _ = cells.changes.clear());
        self.events().into_iter().for_each(|events| events.clear());
        self.swap.iter_mut().for_each(|swap| swap.puts.end_generation());
        while let Some(node) = self.order.next() {
            self.size.evictable -= self.nodes.device_pages(node, self.nodes.entries(node));
            self.drop_idle(node, false, pages);
        }
    }

    /// Returns a generation that nothing belongs to yet.
    fn next_generation(&mut self) -> u64 {
        let generation = self.generation_count;
        self.generation_count += 1;
        generation
    }
}
