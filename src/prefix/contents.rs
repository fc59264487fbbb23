//! What the tree holds changes here and nowhere else: every page comes in by `take_in` and goes out by `give_out`. Who
//! follows the tree's contents (events, chains of hashes, copies of pages elsewhere) hangs on here.
//!
//! Both know the node, which of its pages they are, and whether its prefix is of the present generation, so that it can
//! match. The pages' tokens stand in the node's span: as soon as they have come in, and until they go out. What a node
//! does not keep, its namespace and where in the prefix it begins, its path to the root tells. A parent comes in before
//! its children and goes out after them; a split moves pages between nodes, so none comes or goes.
//!
//! Not here: who decides it (`insert.rs`, `evict.rs`, `lock.rs`), where tokens lie (`span.rs`).

use crate::id::{NodeKey, PageId, PrefixLock, TokenId};

use super::{Link, PrefixTree};

impl PrefixTree {
    /// Takes pages in behind a lock, which moves to their end: into `leaf`, its own, if it has one, else into a new
    /// node. O(pages).
    ///
    /// # Panics
    /// If the tree has no room for them.
    #[inline]
    pub(super) fn take_in(
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
        if self.chain.is_some() {
            self.follow_taken(lock, pages.len() as u32);
        }
        #[cfg(test)]
        self.log_taken(lock, pages.len() as u32);
    }

    /// Gives the last `count` pages of a node out; they are appended to `pages`, in no order to rely on. A node without
    /// any left is despawned next. O(count).
    ///
    /// `present`: whether they are of the present generation, so that they could match. Such pages were evictable: what
    /// is in use stays.
    #[inline(always)]
    pub(super) fn give_out(
        &mut self,
        node: NodeKey,
        count: u32,
        present: bool,
        pages: &mut Vec<PageId>,
    ) {
        #[cfg(test)]
        self.log_given(node, count, present);
        if self.chain.is_some() {
            self.follow_given(node, count, present);
        }
        if present {
            self.evictable -= count;
            self.epoch += 1;
        }
        self.spans.trim(&mut self.link[node].span, count, pages);
    }

    /// Pages that came in are hashed, and then told of. Apart, so that who has no followers pays for a comparison.
    #[cold]
    #[inline(never)]
    fn follow_taken(&mut self, lock: &PrefixLock, count: u32) {
        self.hash_taken(lock, count);
        self.tell_taken(lock, count);
    }

    /// Pages that go out are told of by their hashes, which are forgotten then.
    #[cold]
    #[inline(never)]
    fn follow_given(&mut self, node: NodeKey, count: u32, present: bool) {
        self.tell_given(node, count, present);
        self.hash_given(node, count);
    }
}

#[cfg(test)]
pub(crate) mod log;
