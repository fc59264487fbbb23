//! Changes of the tree's pages: `attach_pages` adds pages and `detach_pages` removes them. Both call followers, which
//! keep other data equal to the tree's contents. The followers of an addition are swap memory, hashes and events; those
//! of a removal are events, hashes and cells. With swap memory, `detach_entries` (`swap.rs`) also removes pages, and
//! fetches add entries without device pages (`fetches.rs`).
//!
//! Followers receive the node, or the lock on it, and the number of its last pages that change. Pages can match if
//! their prefix is of the present generation; only these pages get hashes and events. The calls come after an addition
//! and before a removal, so the node's span contains the tokens of the pages. The path to the root gives the namespace
//! and the position of the node in its prefix. A parent's pages are added before those of its children and removed
//! after them. A split moves pages between nodes, so it adds and removes none.
//!
//! Not here: when pages are added and removed (`insert.rs`, `evict.rs`, `lock.rs`), where tokens are stored
//! (`span.rs`).

use crate::event::Medium;
use crate::id::{NodeKey, PageId, PrefixLock, TokenId};

use super::{Link, PrefixTree};

impl PrefixTree {
    /// Adds pages after a lock's prefix, and moves the lock to their end. They go to `leaf`, the lock's own node, or to
    /// a new node if `leaf` is `None`. O(pages).
    ///
    /// # Panics
    /// If the tree is full.
    #[inline]
    pub(super) fn attach_pages(
        &mut self,
        lock: &mut PrefixLock,
        leaf: Option<NodeKey>,
        tokens: &[TokenId],
        pages: &[PageId],
    ) {
        self.protected += pages.len() as u32;
        self.published_pages += pages.len() as u64;
        if let Some(leaf) = leaf {
            self.spans.grow(&mut self.link[leaf].span, tokens, pages);
            self.epoch += 1;
        } else {
            let span = self.spans.create(tokens, pages);
            let node = self.spawn(Link { parent: lock.node(), span }, lock.scope());
            self.adopt(lock, node);
        }
        if self.chain.is_some() | self.swap.is_some() {
            self.on_attach(lock, pages.len() as u32);
        }
        #[cfg(test)]
        self.log_attached(lock, pages.len() as u32);
    }

    /// Removes the last `count` pages of a node and their cells. Appends these pages and the cells' device pages to
    /// `pages`, in an unspecified order. If no page is left, the caller despawns the node. O(count).
    ///
    /// `present`: whether the pages are of the present generation, so that they could match. Such pages are not in use,
    /// so they count as evictable until this call.
    #[inline(always)]
    pub(super) fn detach_pages(&mut self, node: NodeKey, count: u32, present: bool, pages: &mut Vec<PageId>) {
        #[cfg(test)]
        self.log_detached(node, count, present);
        if self.chain.is_some() | self.cells.is_some() {
            self.on_detach(node, count, present, pages);
        }
        if present {
            self.evictable -= count;
            self.epoch += 1;
        }
        self.spans.trim(&mut self.link[node].span, count, Some(pages));
    }

    /// Records that added pages are on the device, hashes the pages, then emits their event. Outlined, so that a tree
    /// without followers pays one comparison.
    #[cold]
    #[inline(never)]
    fn on_attach(&mut self, lock: &PrefixLock, count: u32) {
        if self.swap.is_some() {
            let node = lock.node().expect("the lock moved to the new pages");
            self.attach_residency(node, count, lock.scope().generation == self.generation);
        }
        if self.chain.is_some() {
            self.insert_hashes(lock, count);
            self.emit_stored(lock, Medium::Device, count);
        }
    }

    /// Emits the event that pages are removed, if they could match; it contains their hashes. Then drops the hashes and
    /// the cells of the pages, and appends the device pages of these cells to `freed`.
    #[cold]
    #[inline(never)]
    pub(super) fn on_detach(&mut self, node: NodeKey, count: u32, present: bool, freed: &mut Vec<PageId>) {
        if self.chain.is_some() {
            if present {
                self.emit_detached(node, count);
            }
            self.remove_hashes(node, count);
        }
        if self.cells.is_some() {
            self.drop_cells(node, count, freed);
        }
    }
}

#[cfg(test)]
pub(crate) mod log;
