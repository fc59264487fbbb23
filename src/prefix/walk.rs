//! Down the tree along tokens: how far do they match, and which pages hold them. Changes nothing.

use crate::id::{Namespace, NodeKey, PageId, Scope, TokenId};

use super::PrefixTree;

/// What a match found. A copy of numbers: it holds nothing, and is [stale](super::Stale) once the tree has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PrefixMatch {
    pub(super) scope: Scope,
    /// The node where the match ends.
    pub(super) node: Option<NodeKey>,
    /// How many of that node's pages match; at least 1.
    pub(super) pages_in_node: u32,
    pub(super) pages: u32,
    pub(super) epoch: u64,
}

impl PrefixMatch {
    /// Whole pages matched.
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// The namespace and era it was made in.
    pub fn scope(&self) -> Scope {
        self.scope
    }
}

/// Where a walk stands: so many pages into a node, or before the first.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub node: Option<NodeKey>,
    pub pages_in_node: u32,
}

impl PrefixTree {
    /// The longest cached prefix of `tokens`, in whole pages. O(tokens matched).
    pub fn match_prefix(&self, namespace: Namespace, tokens: &[TokenId]) -> PrefixMatch {
        self.match_pages(namespace, tokens, |_| ())
    }

    /// [`PrefixTree::match_prefix`] that also hands the matched pages over, in order, piece by piece.
    pub fn match_pages(
        &self,
        namespace: Namespace,
        tokens: &[TokenId],
        mut each: impl FnMut(&[PageId]),
    ) -> PrefixMatch {
        let scope = self.present_scope(namespace);
        let mut rest = tokens;
        let mut place = Place { node: None, pages_in_node: 0 };
        let mut pages = 0;
        while let Some(child) = self.child(place.node, scope, rest) {
            let matched = self.compare(child, rest, &mut each);
            pages += matched;
            place = Place { node: Some(child), pages_in_node: matched };
            if matched < self.link[child].span.pages() {
                break;
            }
            rest = &rest[(matched * self.page_size) as usize..];
        }
        let Place { node, pages_in_node } = place;
        PrefixMatch { scope, node, pages_in_node, pages, epoch: self.epoch }
    }

    /// The child of `parent` (or of the scope) whose first page begins `tokens`.
    pub(super) fn child(
        &self,
        parent: Option<NodeKey>,
        scope: Scope,
        tokens: &[TokenId],
    ) -> Option<NodeKey> {
        let first = tokens.get(..self.page_size as usize)?;
        let hash = self.children.hash(parent, scope, first);
        self.children.find(hash, |node| {
            let link = &self.link[node];
            link.parent == parent
                && (parent.is_some() || self.scope[node] == scope)
                && same(self.spans.first_page(&link.span), first)
        })
    }

    /// How many pages of a node begin `tokens`, and which they are. At least 1 for a child just found.
    pub(super) fn compare(
        &self,
        node: NodeKey,
        tokens: &[TokenId],
        each: &mut impl FnMut(&[PageId]),
    ) -> u32 {
        let mut rest = tokens;
        let mut matched = 0;
        for (tokens, pages) in self.node_pages(node) {
            let len = common_pages(tokens, rest, self.page_size as usize);
            each(&pages[..len]);
            matched += len as u32;
            if len < pages.len() {
                break;
            }
            rest = &rest[tokens.len()..];
        }
        matched
    }
}

/// Compares as raw numbers, which is one call of memcmp.
fn same(a: &[TokenId], b: &[TokenId]) -> bool {
    TokenId::peel(a) == TokenId::peel(b)
}

/// Whole pages that two runs of tokens have in common from the start.
fn common_pages(a: &[TokenId], b: &[TokenId], page_size: usize) -> usize {
    let len = a.len().min(b.len() / page_size * page_size);
    if same(&a[..len], &b[..len]) {
        return len / page_size;
    }
    // They differ somewhere: find the block first, then the token.
    const BLOCK: usize = 64;
    let (mut a, mut b, mut before) = (&a[..len], &b[..len], 0);
    while a.len() > BLOCK && same(&a[..BLOCK], &b[..BLOCK]) {
        (a, b, before) = (&a[BLOCK..], &b[BLOCK..], before + BLOCK);
    }
    let tokens = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    (before + tokens) / page_size
}
