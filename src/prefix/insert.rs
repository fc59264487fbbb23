//! Publishing: pages that a sequence has filled become matchable below the prefix it holds.

use crate::fence::Fence;
use crate::id::{NodeKey, PageId, PrefixLock, TokenId};

use super::walk::Place;
use super::{Age, Link, PrefixTree};

/// What an insert did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub struct Inserted {
    /// The first so many of the pages were in the tree already: the caller's are duplicates. The rest are the tree's
    /// now.
    pub duplicates: u32,
}

impl PrefixTree {
    /// Publishes whole pages that follow the locked prefix, and moves the lock to their end.
    ///
    /// Where the tree has a page already, `pages[i]` becomes the tree's, and the caller's own is appended to
    /// `duplicates`. A leaf that only this lock uses grows in place. O(pages).
    ///
    /// # Panics
    /// If `tokens` are not exactly those of `pages`, or the tree has no room for them.
    pub fn insert(
        &mut self,
        lock: &mut PrefixLock,
        tokens: &[TokenId],
        pages: &mut [PageId],
        duplicates: &mut Vec<PageId>,
        fence: &mut Fence,
    ) -> Inserted {
        assert_eq!(tokens.len(), pages.len() * self.page_size as usize, "whole pages");
        // A decoding sequence grows its own leaf step after step: there is nothing to look up.
        if pages.is_empty() || self.grow_own_leaf(lock, tokens, pages) {
            return Inserted { duplicates: 0 };
        }
        let known = self.walk_duplicates(lock, tokens, pages, duplicates, fence);
        if known < pages.len() {
            let tokens = &tokens[known * self.page_size as usize..];
            self.attach(lock, tokens, &pages[known..]);
        }
        Inserted { duplicates: known as u32 }
    }

    /// Follows what the tree has already; the lock goes along. Returns the pages passed.
    fn walk_duplicates(
        &mut self,
        lock: &mut PrefixLock,
        tokens: &[TokenId],
        pages: &mut [PageId],
        duplicates: &mut Vec<PageId>,
        fence: &mut Fence,
    ) -> usize {
        let mut place = Place { node: lock.node(), pages_in_node: 0 };
        let mut known = 0;
        loop {
            let rest = &tokens[known * self.page_size as usize..];
            let found = self.descend(place.node, lock.scope(), rest, &mut |found| {
                let own = &mut pages[known..known + found.len()];
                duplicates.extend_from_slice(own);
                own.copy_from_slice(found);
                known += found.len();
            });
            let Some(found) = found else { break };
            place = found.place;
            if !found.whole {
                break;
            }
        }
        if known > 0
            && let Some(node) = place.node
        {
            let node = self.split(node, place.pages_in_node);
            self.move_lock(lock, node, fence);
        }
        known
    }

    /// Adds pages that the tree does not have, behind the lock.
    fn attach(&mut self, lock: &mut PrefixLock, tokens: &[TokenId], pages: &[PageId]) {
        if self.grow_own_leaf(lock, tokens, pages) {
            return;
        }
        self.protected += pages.len() as u32;
        let span = self.spans.create(tokens, pages);
        let node = self.spawn(Link { parent: lock.node(), span }, lock.scope());
        self.adopt(lock, node);
    }

    /// Adds pages to the node of a lock, if it is a leaf with a single user, who holds it by this lock.
    fn grow_own_leaf(&mut self, lock: &PrefixLock, tokens: &[TokenId], pages: &[PageId]) -> bool {
        let Some(node) = lock.node() else { return false };
        let Age { lock_count, child_count, .. } = self.age[node];
        if lock_count > 1 || child_count > 0 {
            return false;
        }
        self.spans.grow(&mut self.link[node].span, tokens, pages);
        self.protected += pages.len() as u32;
        self.epoch += 1;
        true
    }

    /// Moves a lock to a new child of its node. The child was never idle, so no list knows it.
    fn adopt(&mut self, lock: &mut PrefixLock, node: NodeKey) {
        // The parent loses this lock and gains a locked child.
        self.age[node].lock_count = 1;
        *lock = PrefixLock::new(Some(node), lock.scope());
    }
}
