//! Changes of the tree's entries: `attach` adds entries and `detach` removes them. Both inform the tables that keep
//! data of entries: cells, swap memory, hashes and events.
//!
//! The tables receive the node and the number of its last entries that change. Entries can match if their prefix is of
//! the present generation; only these get hashes and events. The calls come after an addition and before a removal, so
//! the node's list contains the tokens. The path to the root gives the namespace and the position of the node in its
//! prefix. A parent's entries are added before those of its children and removed after them. A split moves entries
//! between nodes, so it adds and removes none.
//!
//! A fetch adds entries without device pages (`fetches.rs`).
//!
//! Not here: when entries are added and removed (`insert.rs`, `evict.rs`, `lock.rs`), where tokens are stored
//! (`entry_list.rs`).

use crate::event::Medium;
use crate::id::{NodeKey, PageId, PrefixLock, TokenId};

use super::PrefixTree;
use super::nodes::{Link, Nodes, Sides};

impl PrefixTree {
    /// Adds pages after a lock's prefix, and moves the lock to their end. They go to `leaf`, the lock's own node, or to
    /// a new node if `leaf` is `None`. O(pages).
    ///
    /// # Panics
    /// If the tree is full.
    pub(super) fn attach(
        &mut self,
        lock: &mut PrefixLock,
        leaf: Option<NodeKey>,
        tokens: &[TokenId],
        pages: &[PageId],
    ) {
        self.size.protected += pages.len() as u32;
        self.published_pages += pages.len() as u64;
        if let Some(leaf) = leaf {
            let Nodes { lists, link, .. } = &mut self.nodes;
            lists.grow(&mut link[leaf].list, tokens, pages);
            self.epoch += 1;
        } else {
            let list = self.nodes.lists.create(tokens, pages);
            let node = self.spawn(Link { parent: lock.node(), list }, lock.scope());
            self.adopt(lock, node);
        }
        if self.chain.is_some() | self.swap.is_some() {
            self.on_attach(lock, pages.len() as u32);
        }
        #[cfg(test)]
        self.log_attached(lock, pages.len() as u32);
    }

    /// Removes the last `count` entries of a node and their cells. Appends the device pages of both to `pages`, in an
    /// unspecified order. If no entry is left, the caller despawns the node. O(count).
    ///
    /// `is_evicted`: whether the node is idle, so that its pages count as evictable until this call, and of the present
    /// generation, so that they could match. Otherwise the caller has counted the pages.
    pub(super) fn detach(&mut self, node: NodeKey, count: u32, is_evicted: bool, pages: &mut Vec<PageId>) {
        #[cfg(test)]
        self.log_detached(node, count, is_evicted);
        let is_followed = self.chain.is_some() | self.ages.is_some();
        let on_device = if is_followed { self.on_detach(node, count, is_evicted, pages) } else { count };
        if is_evicted {
            self.size.evictable -= on_device;
            self.epoch += 1;
        }
        let Nodes { lists, link, .. } = &mut self.nodes;
        lists.trim(&mut link[node].list, on_device, Some(pages));
    }

    /// Informs swap memory, then hashes and events, that entries are added with device pages.
    #[cold]
    fn on_attach(&mut self, lock: &PrefixLock, count: u32) {
        let node = lock.node().expect("the lock moved to the new pages");
        let is_present = lock.scope().generation == self.generation;
        if let Some(swap) = &mut self.swap {
            let entries = self.nodes.entries(node);
            *self.nodes.sides_mut(node) = Sides { device: entries, swap_start: entries };
            swap.puts.attach(&self.nodes, node, count, is_present);
        }
        self.chain_attached(lock, Medium::Device, count);
    }

    /// Informs cells, then hashes and events, then swap memory, that entries are removed. Appends the device pages of
    /// cells to `freed`. Swap memory removes the entries without device pages. Returns the number of the others.
    #[cold]
    fn on_detach(&mut self, node: NodeKey, count: u32, is_evicted: bool, freed: &mut Vec<PageId>) -> u32 {
        let Self { nodes, chain, cells, swap, names, generation, .. } = self;
        if let Some(cells) = cells {
            cells.detach(nodes, node, count, is_evicted, swap.as_deref_mut(), freed);
            // The events of cells need their entries, and come before those of the entries.
            if let Some(chain) = chain.as_mut().filter(|_| !cells.changes.list().is_empty()) {
                chain.flush_cells(nodes, names, *generation, &mut cells.changes);
            }
        }
        if let Some(chain) = chain {
            chain.detach(nodes, node, count, is_evicted);
        }
        match swap {
            Some(swap) => swap.detach(nodes, node, count, is_evicted),
            None => count,
        }
    }
}

#[cfg(test)]
pub(crate) mod log;
