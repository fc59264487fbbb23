//! Publishing: inserts pages that a sequence has computed below the prefix that it locks, so that prompts match them.

use crate::fence::Fence;
use crate::id::{NodeKey, PageId, PrefixLock, TokenId};

use super::nodes::{Cursor, NO_PAGE};
use super::{PrefixTree, Usage};

/// The result of an insertion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub struct Inserted {
    /// Number of leading pages that the tree already contained on the device: the caller's pages are duplicates. The
    /// tree now owns the other pages.
    pub duplicates: u32,
}

/// Returns the number of leading pages of a run that are on the device.
#[cold]
fn on_device(pages: &[PageId]) -> usize {
    pages.iter().take_while(|page| **page != NO_PAGE).count()
}

impl PrefixTree {
    /// Publishes whole pages that follow the locked prefix, and moves the lock to their end.
    ///
    /// If the tree already has a page on the device, the tree's page replaces the caller's in `pages`, and the caller's
    /// is appended to `duplicates`. If the tree has a page in swap memory alone, it takes the caller's page. A leaf
    /// that only this lock uses grows in place. O(pages).
    ///
    /// # Panics
    /// If there are not `page_size` tokens for each page, or the tree has no room for them.
    pub fn insert(
        &mut self,
        lock: &mut PrefixLock,
        tokens: &[TokenId],
        pages: &mut [PageId],
        duplicates: &mut Vec<PageId>,
        fence: &mut Fence,
    ) -> Inserted {
        assert_eq!(tokens.len(), pages.len() * self.nodes.page_size as usize, "whole pages");
        // A decoding sequence grows its own leaf step after step: there is nothing to look up.
        let (mut leaf, mut known, mut own) = (self.own_leaf(lock), 0, 0);
        if leaf.is_none() {
            (known, own) = self.walk_duplicates(lock, tokens, pages, duplicates, fence);
            leaf = self.own_leaf(lock);
        }
        if known < pages.len() {
            let tokens = &tokens[known * self.nodes.page_size as usize..];
            self.attach(lock, leaf, tokens, &pages[known..]);
        }
        Inserted { duplicates: known as u32 - own }
    }

    /// Moves the lock along the pages that the tree already has. Returns their number, and how many of the last ones
    /// were in swap memory alone: the tree has taken the caller's pages for these.
    fn walk_duplicates(
        &mut self,
        lock: &mut PrefixLock,
        tokens: &[TokenId],
        pages: &mut [PageId],
        duplicates: &mut Vec<PageId>,
        fence: &mut Fence,
    ) -> (usize, u32) {
        let start = Cursor { node: lock.node(), pages_in_node: 0 };
        let (mut known, mut loaded) = (0, 0);
        let has_swap = self.has_swap();
        let (cursor, _) = self.nodes.walk(start, lock.scope(), tokens, |found| {
            // Entries in swap memory alone follow those on the device.
            let here = if has_swap { on_device(found) } else { found.len() };
            let own = &mut pages[known..known + here];
            duplicates.extend_from_slice(own);
            own.copy_from_slice(&found[..here]);
            known += found.len();
        });
        if known > 0
            && let Some(node) = cursor.node
        {
            let node = self.split(node, cursor.pages_in_node);
            self.move_lock(lock, node, fence);
            if has_swap {
                loaded = self.load_computed(lock, &pages[..known]);
                self.published_pages += u64::from(loaded);
            }
        }
        self.duplicate_pages += known as u64 - u64::from(loaded);
        (known, loaded)
    }

    /// Returns the node of a lock if it is a leaf and this lock is its only user. Such a node grows in place.
    pub(super) fn own_leaf(&self, lock: &PrefixLock) -> Option<NodeKey> {
        let node = lock.node()?;
        let Usage { lock_count, child_count, .. } = self.usage[node];
        (lock_count == 1 && child_count == 0).then_some(node)
    }

    /// Moves a lock to a new child of its node. The child was never idle, so no list contains it.
    pub(super) fn adopt(&mut self, lock: &mut PrefixLock, node: NodeKey) {
        // The parent loses this lock and gains a locked child.
        self.usage[node].lock_count = 1;
        *lock = PrefixLock::new(Some(node), lock.scope());
    }
}
