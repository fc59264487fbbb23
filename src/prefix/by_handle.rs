//! The calls of [`Tree`](crate::tree::Tree) that return handles. They are free functions over the tree and its handles,
//! so that the tree of an engine has neither.
//!
//! Not here: names of nodes (`handles.rs`).

use crate::fence::Fence;
use crate::id::{Handle, Namespace, NodeKey, PageId, PrefixLock, Scope, TokenId};

use super::PrefixTree;
use super::handles::{HandleError, Handles};
use super::nodes::Cursor;

/// Where pages are inserted.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    scope: Scope,
    /// The end of the pages that the tree already has.
    cursor: Cursor,
    /// Number of the caller's leading pages that the tree already has.
    pub known: u32,
}

/// Matches whole pages, splits the node inside which the match ends, and makes the idle nodes of the path the youngest.
/// Calls `each` with the matched pages, run by run. Returns the handle to their end, and their number. O(tokens
/// matched).
#[inline]
pub(crate) fn match_prefix(
    tree: &mut PrefixTree,
    handles: &mut Handles,
    namespace: Namespace,
    tokens: &[TokenId],
    each: impl FnMut(&[PageId]),
) -> (Handle, u32) {
    let scope = tree.present_scope(namespace);
    let (cursor, pages) = tree.nodes.walk(Cursor::START, scope, tokens, each);
    let Some(node) = split(tree, handles, cursor) else { return (Handle::default(), 0) };
    touch(tree, node);
    (handles.name(&tree.nodes, node, scope), pages)
}

/// Returns the node that ends at a position, which may be new.
#[inline]
fn split(tree: &mut PrefixTree, handles: &mut Handles, at: Cursor) -> Option<NodeKey> {
    let node = at.node?;
    let prefix = tree.split(node, at.pages_in_node);
    if prefix != node {
        handles.split(node, prefix, at.pages_in_node);
    }
    Some(prefix)
}

/// Makes the idle nodes of a path the youngest, deepest first, so that T4 holds. O(idle nodes of the path).
#[inline]
fn touch(tree: &mut PrefixTree, node: NodeKey) {
    let mut at = Some(node);
    while let Some(node) = at
        && tree.usage[node].lock_count == 0
    {
        tree.order.leave(&mut tree.usage, node);
        tree.order.enter(&mut tree.usage, node);
        at = tree.nodes.link[node].parent;
    }
}

/// Returns the place of whole pages from the root. O(tokens).
pub(crate) fn place_in(tree: &PrefixTree, namespace: Namespace, tokens: &[TokenId]) -> Place {
    let scope = tree.present_scope(namespace);
    let (cursor, known) = tree.nodes.walk_from(Cursor::START, scope, tokens);
    Place { scope, cursor, known }
}

/// Inserts the pages that the tree does not have yet. Makes the idle nodes of the whole path the youngest. Returns the
/// handle to the end. O(new tokens, and idle nodes of the path).
pub(crate) fn insert(
    tree: &mut PrefixTree,
    handles: &mut Handles,
    fence: &mut Fence,
    place: Place,
    tokens: &[TokenId],
    pages: &[PageId],
) -> Handle {
    let node = split(tree, handles, place.cursor);
    if let Some(node) = node {
        tree.add_user(node, fence);
    }
    let mut lock = PrefixLock::new(node, place.scope);
    attach(tree, handles, &mut lock, tokens, pages);
    let handle = lock.node().map_or(Handle::default(), |node| handles.name(&tree.nodes, node, place.scope));
    let mut freed = Vec::new();
    tree.unlock(lock, fence, &mut freed);
    debug_assert!(freed.is_empty(), "prefixes of the present generation stay");
    handle
}

/// Adds pages in a new node below a lock, and moves the lock to their end.
fn attach(tree: &mut PrefixTree, handles: &mut Handles, lock: &mut PrefixLock, tokens: &[TokenId], pages: &[PageId]) {
    if pages.is_empty() {
        return;
    }
    tree.attach(lock, None, tokens, pages);
    handles.spawn(lock.node().expect("the lock moved to the new pages"));
}

/// Returns the place of whole pages after a locked prefix. O(tokens).
///
/// # Errors
/// [`HandleError::Gone`], [`HandleError::NotLocked`], and [`HandleError::Locks`] if the lock cannot move to the end.
pub(crate) fn place_after(
    tree: &PrefixTree,
    handles: &Handles,
    handle: Handle,
    tokens: &[TokenId],
) -> Result<Place, HandleError> {
    let node = handles.node_of(&tree.nodes, handle)?;
    let scope = handles.locked_scope(node)?;
    let (mut cursor, mut known) = (tree.nodes.end_of(Some(node)), 0);
    if tree.usage[node].child_count > 0 {
        let start = Cursor { node: Some(node), pages_in_node: 0 };
        let found = tree.nodes.walk_from(start, scope, tokens);
        if found.1 > 0 {
            (cursor, known) = found;
        }
    }
    let is_known = tokens.len() == (known * tree.nodes.page_size) as usize;
    if let Some(end) = cursor.node.filter(|_| known > 0 && is_known)
        && cursor.pages_in_node == tree.nodes.entries(end)
    {
        handles.has_room(end)?;
    }
    Ok(Place { scope, cursor, known })
}

/// Inserts the pages that the tree does not have yet after a locked prefix, and moves one lock of `handle` to their
/// end. Returns the handle to the end. O(new tokens, and nodes that were idle).
///
/// If only one call has returned `handle`, its node has one lock and no child, the node grows in place, and `handle`
/// names nothing from then on.
pub(crate) fn extend(
    tree: &mut PrefixTree,
    handles: &mut Handles,
    fence: &mut Fence,
    (handle, place): (Handle, Place),
    tokens: &[TokenId],
    pages: &[PageId],
) -> Handle {
    if place.known == 0 && pages.is_empty() {
        return handle;
    }
    let Place { scope, cursor, .. } = place;
    let from = handle.node();
    let mut lock = PrefixLock::new(Some(from), scope);
    if tree.own_leaf(&lock).is_some() && !handles.is_shared(from) {
        tree.attach(&mut lock, Some(from), tokens, pages);
        return handles.rename(&tree.nodes, from, scope);
    }
    let node = split(tree, handles, cursor).expect("the place is below a node");
    tree.move_lock(&mut lock, node, fence);
    attach(tree, handles, &mut lock, tokens, pages);
    let node = lock.node().expect("the lock stays at a node");
    let end = handles.name(&tree.nodes, node, scope);
    handles.unlock(from);
    handles.lock(node);
    end
}

/// Locks a handle's prefix. O(nodes that were idle).
///
/// # Errors
/// [`HandleError::Gone`], [`HandleError::Locks`].
#[inline]
pub(crate) fn lock(
    tree: &mut PrefixTree,
    handles: &mut Handles,
    fence: &mut Fence,
    handle: Handle,
) -> Result<(), HandleError> {
    let node = handles.node_of(&tree.nodes, handle)?;
    handles.has_room(node)?;
    handles.lock(node);
    tree.add_user(node, fence);
    Ok(())
}

/// Releases a lock of a handle's prefix. If the prefix is of an old generation, appends its idle pages to `freed`.
/// O(nodes that become idle).
///
/// # Errors
/// [`HandleError::Gone`], [`HandleError::NotLocked`].
#[inline]
pub(crate) fn unlock(
    tree: &mut PrefixTree,
    handles: &mut Handles,
    fence: &mut Fence,
    handle: Handle,
    freed: &mut Vec<PageId>,
) -> Result<(), HandleError> {
    let node = handles.node_of(&tree.nodes, handle)?;
    let scope = handles.locked_scope(node)?;
    handles.unlock(node);
    tree.unlock(PrefixLock::new(Some(node), scope), fence, freed);
    Ok(())
}

/// Evicts the whole node that is evicted next, and appends its pages to `freed`. Returns the handle that named its end.
/// O(pages).
pub(crate) fn evict_node(tree: &mut PrefixTree, handles: &mut Handles, freed: &mut Vec<PageId>) -> Option<Handle> {
    let node = tree.order.next()?;
    let handle = handles.name(&tree.nodes, node, Scope::default());
    tree.drop_entries(node, tree.nodes.entries(node), freed);
    Some(handle)
}

/// Appends the pages of a handle's prefix to `pages`, in order. Returns their number. O(pages).
///
/// # Errors
/// [`HandleError::Gone`].
pub(crate) fn pages_of(
    tree: &PrefixTree,
    handles: &Handles,
    handle: Handle,
    pages: &mut Vec<PageId>,
) -> Result<u32, HandleError> {
    let node = handles.node_of(&tree.nodes, handle)?;
    let count = tree.nodes.up(tree.nodes.end_of(Some(node))).map(|(_, pages)| pages).sum();
    tree.nodes.last_pages(Some(node), count, pages);
    Ok(count)
}
