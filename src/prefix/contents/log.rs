//! A log of added and removed pages, for tests. Without swap memory, replaying its entries reproduces the contents of
//! the tree.

use std::collections::HashMap;

use crate::id::{NodeKey, PageId, PrefixLock, Scope, TokenId};
use crate::prefix::PrefixTree;

/// Pages that were added or removed.
#[derive(Debug)]
pub(crate) struct LogEntry {
    pub added: bool,
    pub present: bool,
    pub pages: Vec<(PageId, CachedPage)>,
}

/// The position of a page in its prefix, and its tokens.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct CachedPage {
    pub scope: Scope,
    /// Number of pages before it.
    pub position: u32,
    pub tokens: Vec<TokenId>,
    /// The page before it.
    pub parent: Option<PageId>,
}

impl PrefixTree {
    /// Starts the log.
    pub(crate) fn keep_log(&mut self) {
        self.log = Some(Vec::new());
    }

    /// Returns the entries since the last call.
    pub(crate) fn take_log(&mut self) -> Vec<LogEntry> {
        self.log.replace(Vec::new()).expect("a log is kept")
    }

    /// Returns the position of every page of the tree.
    pub(crate) fn held(&self) -> HashMap<PageId, CachedPage> {
        self.nodes.link.keys().flat_map(|node| self.pages_of(node)).collect()
    }

    pub(super) fn log_attached(&mut self, lock: &PrefixLock, count: u32) {
        let node = lock.node().expect("the lock moved to the new pages");
        self.log(true, lock.scope().generation == self.generation, node, count);
    }

    pub(super) fn log_detached(&mut self, node: NodeKey, count: u32, present: bool) {
        self.log(false, present, node, count);
    }

    fn log(&mut self, added: bool, present: bool, node: NodeKey, count: u32) {
        let Some(mut log) = self.log.take() else { return };
        let mut pages = self.pages_of(node);
        pages.drain(..pages.len() - count as usize);
        log.push(LogEntry { added, present, pages });
        self.log = Some(log);
    }

    /// Returns the position of each page of a node.
    fn pages_of(&self, node: NodeKey) -> Vec<(PageId, CachedPage)> {
        let (mut root, mut position, mut parent) = (node, 0, None);
        while let Some(above) = self.nodes.link[root].parent {
            root = above;
            position += self.nodes.entries(root);
            parent = parent.or_else(|| self.nodes.pages(root).last()?.1.last().copied());
        }
        let scope = self.nodes.scope[root];
        let mut cached = Vec::new();
        for (tokens, pages) in self.nodes.pages(node) {
            for (tokens, &page) in tokens.chunks(self.nodes.page_size as usize).zip(pages) {
                cached.push((page, CachedPage { scope, position, tokens: tokens.to_vec(), parent }));
                (position, parent) = (position + 1, Some(page));
            }
        }
        cached
    }
}
