//! Walks down the tree along tokens, to find the longest match and its pages. A walk changes nothing.

use crate::id::{Namespace, NodeKey, PageId, Scope, TokenId};

use super::PrefixTree;
use super::entry_list::EntryList;
use super::nodes::{Cursor, Nodes};

/// The result of a match. It locks nothing, and some changes of the tree make it stale.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PrefixMatch {
    pub(super) scope: Scope,
    /// The node where the match ends.
    pub(super) node: Option<NodeKey>,
    /// Number of that node's pages that match: at least 1, or 0 without a node.
    pub(super) pages_in_node: u32,
    pub(super) pages: u32,
    pub(super) full_pages: u32,
    pub(super) branches: bool,
    /// Number of pages before [`PrefixMatch::without_hit`].
    pub(super) hit_pages: u32,
    /// Number of pages of the longest prefix whose tails have, or have had, all their cells.
    pub(super) had_pages: u32,
    /// Whether a cell that this prefix lacks was superseded.
    pub(super) was_superseded: bool,
    pub(super) swap_pages: u32,
    pub(super) swap_cell_pages: u32,
    pub(super) epoch: u64,
}

impl PrefixMatch {
    /// Returns the number of matched pages.
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// Returns the number of pages that match in group 0, which keeps all tokens. This is more than
    /// [`PrefixMatch::pages`] if other groups lack pages that the next token reads.
    pub fn full_pages(&self) -> u32 {
        self.full_pages
    }

    /// Returns the numbers of pages of [`PrefixMatch::full_pages`] that the match lacks: because the hit was
    /// [left out](PrefixMatch::without_hit), because cells were superseded, and because cells were evicted. The tails
    /// of the other lacking pages never had all their cells.
    pub(crate) fn lost_pages(&self) -> [u32; 3] {
        let gone = self.had_pages - self.hit_pages;
        let [superseded, evicted] = if self.was_superseded { [gone, 0] } else { [0, gone] };
        [self.hit_pages - self.pages, superseded, evicted]
    }

    /// Returns whether the tree has pages after the [full match](PrefixMatch::full_pages), so that prompts part there.
    /// Only with groups of layers.
    pub(crate) fn branches(&self) -> bool {
        self.branches
    }

    /// Returns how many of [`PrefixMatch::pages`] are in swap memory alone: the last ones, to be loaded before use.
    pub fn swap_pages(&self) -> u32 {
        self.swap_pages
    }

    /// Returns the number of pages of other groups, which the next token reads, that are in swap memory alone.
    pub(crate) fn swap_cell_pages(&self) -> u32 {
        self.swap_cell_pages
    }

    /// Returns the number of matched pages that are on the device.
    pub(crate) fn device_pages(&self) -> u32 {
        self.pages - self.swap_pages
    }

    /// Returns the same match without its pages, so that the sequence uses no cached page.
    pub(crate) fn without_hit(self) -> Self {
        Self { node: None, pages_in_node: 0, pages: 0, swap_pages: 0, swap_cell_pages: 0, ..self }
    }

    /// Returns the position after the last matched page.
    pub(crate) fn end(&self) -> Cursor {
        Cursor { node: self.node, pages_in_node: self.pages_in_node }
    }

    /// Returns the namespace and generation of the match.
    pub fn scope(&self) -> Scope {
        self.scope
    }
}

/// A step of a walk.
pub(super) struct Descent {
    /// The position in the child, at least one page after its start.
    pub cursor: Cursor,
    /// Whether the cursor is at the child's end.
    pub whole: bool,
}

impl PrefixTree {
    /// Returns the longest cached prefix of `tokens`, in whole pages. With groups of layers, it is the longest prefix
    /// at whose end every group has the pages that the next token reads. O(tokens matched).
    pub fn match_prefix(&self, namespace: Namespace, tokens: &[TokenId]) -> PrefixMatch {
        self.match_pages(namespace, tokens, |_| ())
    }

    /// Returns [`PrefixTree::match_prefix`], and calls `each` with the pages that match in group 0, in order, run by
    /// run: [`PrefixMatch::full_pages`] in total. Pages in swap memory alone come last, and their page ids are invalid.
    #[inline]
    pub fn match_pages(&self, namespace: Namespace, tokens: &[TokenId], each: impl FnMut(&[PageId])) -> PrefixMatch {
        let scope = self.present_scope(namespace);
        let (cursor, pages) = self.nodes.walk(Cursor::START, scope, tokens, each);
        if self.has_cells() {
            return self.hit(scope, cursor, pages);
        }
        let swap_pages = if self.has_swap() { self.nodes.swap_only_before(cursor) } else { 0 };
        PrefixMatch { swap_pages, ..self.match_at(scope, cursor, pages) }
    }

    /// Returns the longest prefix of `tokens` in group 0. Does not count its pages in swap memory. O(tokens matched).
    pub(crate) fn match_full(&self, namespace: Namespace, tokens: &[TokenId]) -> PrefixMatch {
        let scope = self.present_scope(namespace);
        let (cursor, pages) = self.nodes.walk_from(Cursor::START, scope, tokens);
        self.match_at(scope, cursor, pages)
    }

    /// Returns the match of `pages` pages that ends at a cursor. Its counts of swap pages are 0.
    #[inline]
    pub(super) fn match_at(&self, scope: Scope, cursor: Cursor, pages: u32) -> PrefixMatch {
        let Cursor { node, pages_in_node } = cursor;
        let (full_pages, epoch) = (pages, self.epoch);
        let (swap_pages, swap_cell_pages, branches) = (0, 0, false);
        PrefixMatch {
            scope,
            node,
            pages_in_node,
            pages,
            full_pages,
            branches,
            hit_pages: pages,
            had_pages: pages,
            was_superseded: false,
            swap_pages,
            swap_cell_pages,
            epoch,
        }
    }

    /// Returns the ends of the nodes on the path of a match, deepest first, and finally the start of the scope. An end
    /// is the number of pages before it, and the last of these pages. Leaves out a node that the match ends inside, and
    /// nodes with swap-only entries. O(nodes).
    pub(crate) fn ends(&self, found: &PrefixMatch) -> impl Iterator<Item = (u32, Option<PageId>)> {
        let (nodes, mut end) = (&self.nodes, found.pages);
        let ends = nodes.up(found.end()).filter_map(move |(node, pages)| {
            let here = end;
            end -= pages;
            // No sequence computes tokens after pages that are in swap memory alone.
            let is_end = pages == nodes.entries(node) && pages == nodes.device_pages(node, pages);
            is_end.then(|| (here, Some(nodes.lists.pages_of_run(nodes.last_entry(node), 1)[0])))
        });
        ends.chain([(0, None)])
    }
}

impl Nodes {
    /// Calls [`Nodes::walk`] without a callback for the pages.
    pub(super) fn walk_from(&self, start: Cursor, scope: Scope, tokens: &[TokenId]) -> (Cursor, u32) {
        self.walk(start, scope, tokens, |_| ())
    }

    /// Walks down from the end of a node as far as whole pages of `tokens` match. Returns the end of the match and its
    /// number of pages.
    pub(super) fn walk(
        &self,
        start: Cursor,
        scope: Scope,
        tokens: &[TokenId],
        mut each: impl FnMut(&[PageId]),
    ) -> (Cursor, u32) {
        let mut rest = tokens;
        let mut cursor = start;
        let mut pages = 0;
        while let Some(found) = self.descend(cursor.node, scope, rest, &mut each) {
            pages += found.cursor.pages_in_node;
            cursor = found.cursor;
            if !found.whole {
                break;
            }
            rest = &rest[(cursor.pages_in_node * self.page_size) as usize..];
        }
        (cursor, pages)
    }

    /// Walks into the child whose first page begins `tokens`, as far as they match, and calls `each` with the matched
    /// pages. Without a `parent`, the children are the first nodes of the scope. One comparison both confirms the child
    /// and measures the match, so its first page is read once.
    pub(super) fn descend(
        &self,
        parent: Option<NodeKey>,
        scope: Scope,
        tokens: &[TokenId],
        each: &mut impl FnMut(&[PageId]),
    ) -> Option<Descent> {
        let first = tokens.get(..self.page_size as usize)?;
        let hash = self.children.hash(parent, scope, first);
        let mut descent = None;
        self.children.find(hash, |node| {
            let link = &self.link[node];
            if link.parent != parent || (parent.is_none() && self.scope[node] != scope) {
                return false;
            }
            let pages_in_node = self.compare(&link.list, tokens, each);
            let whole = pages_in_node == link.list.pages();
            descent = Some(Descent { cursor: Cursor { node: Some(node), pages_in_node }, whole });
            pages_in_node > 0
        })?;
        descent
    }

    /// Returns how many pages of a list are a prefix of `tokens`, and calls `each` with them.
    #[inline]
    fn compare(&self, list: &EntryList, tokens: &[TokenId], each: &mut impl FnMut(&[PageId])) -> u32 {
        let mut rest = tokens;
        let mut matched = 0;
        for (tokens, pages) in self.lists.pieces(list) {
            // Usually the whole run matches, which needs no division.
            match rest.split_at_checked(tokens.len()) {
                Some((head, tail)) if same(tokens, head) => rest = tail,
                _ => {
                    let len = common_pages(tokens, rest, self.page_size as usize);
                    each(&pages[..len]);
                    return matched + len as u32;
                }
            }
            each(pages);
            matched += pages.len() as u32;
        }
        matched
    }
}

/// Returns whether two runs are equal. Compares raw numbers, which is one call of memcmp.
fn same(a: &[TokenId], b: &[TokenId]) -> bool {
    TokenId::as_raw(a) == TokenId::as_raw(b)
}

/// Returns the number of whole pages of the common prefix of two runs of tokens.
fn common_pages(a: &[TokenId], b: &[TokenId], page_size: usize) -> usize {
    common_tokens(a, b) / page_size
}

/// Returns the length of the common prefix of two runs. Finds the block where the runs differ, then the token.
pub(crate) fn common_tokens(a: &[TokenId], b: &[TokenId]) -> usize {
    const BLOCK: usize = 64;
    let len = a.len().min(b.len());
    let (mut a, mut b, mut before) = (&a[..len], &b[..len], 0);
    while a.len() > BLOCK && same(&a[..BLOCK], &b[..BLOCK]) {
        (a, b, before) = (&a[BLOCK..], &b[BLOCK..], before + BLOCK);
    }
    before + a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests;
