//! [`Handles`]: names of prefixes for callers of [`Tree`](crate::tree::Tree), which hold no [`PrefixLock`].
//!
//! ```text
//! handle  serial 14, node n3     name of n3  serial 14, 5 pages, 2 locks     n3 has 5 pages: the handle is valid
//! handle  serial 8,  node n7     name of n7  serial 8,  4 pages, 0 locks     n7 has 3 pages: the handle is gone
//! ```
//!
//! A node gets a serial number when a call first returns its end, and no number is given twice. A name also stores the
//! node's number of pages. If the node loses pages, the numbers differ from then on, and the handle names nothing. So
//! evictions need not visit names, and engines, which have no handles, pay nothing.
//!
//! The key of a node is no handle: its version has 31 bits, and a cache that evicts and inserts one node in turn
//! returns to the same key.
//!
//! * T12. A serial number belongs to one node. Locks by handle are part of the `lock_count` of their node, whose name
//!   is valid.
//!
//! Not here: the calls that return handles (`by_handle.rs`).
//!
//! [`PrefixLock`]: crate::id::PrefixLock

use std::collections::{HashMap, HashSet};

use bytemuck::Zeroable;

use crate::id::{Handle, NodeKey, Scope};
use crate::memory::{Memory, OutOfMemory};

use super::PrefixTree;
use super::check::Broken;
use super::column::RareColumn;
use super::nodes::Nodes;

/// Bit of a serial number that is set once a second call has returned the handle. Serial numbers of handles lack it.
const SHARED: u64 = 1;

/// Maximum number of locks by one handle, so that the locks of a node and of its children fit 32 bits.
pub(crate) const LOCKS_MAX: u32 = u32::MAX / 2;

/// The reason why a call with a handle has no effect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum HandleError {
    /// The handle's prefix is no longer cached.
    Gone,
    /// The handle has no lock.
    NotLocked,
    /// The handle has [`LOCKS_MAX`] locks.
    Locks,
}

/// The name of a node's end. All zero: no caller has a handle to it.
#[derive(Clone, Copy, Default, Zeroable)]
#[repr(C)]
struct Name {
    /// The serial number and [`SHARED`].
    serial: u64,
    /// The scope of the prefix, which a lock of the tree contains.
    scope: Scope,
    /// Number of the node's pages when it was named, less those that splits have moved to other nodes.
    pages: u32,
    /// Number of locks by handle.
    locks: u32,
}

const _: () = assert!(size_of::<Name>() == 32);

impl Name {
    fn is_of(&self, nodes: &Nodes, node: NodeKey) -> bool {
        self.serial > 0 && self.pages == nodes.entries(node)
    }
}

/// The names of a tree's nodes.
pub(crate) struct Handles {
    names: RareColumn<Name>,
    /// The last serial number.
    last: u64,
}

impl Handles {
    /// Creates the column for at most `node_count` nodes.
    pub fn new(node_count: u32, memory: &mut Memory) -> Result<Self, OutOfMemory> {
        Ok(Self { names: RareColumn::new(node_count, memory)?, last: 0 })
    }

    /// Returns the node that a handle names.
    ///
    /// # Errors
    /// [`HandleError::Gone`], also for the default handle, because the empty prefix has no node.
    #[inline]
    pub fn node_of(&self, nodes: &Nodes, handle: Handle) -> Result<NodeKey, HandleError> {
        let node = handle.node();
        let is_named = |name: &Name| name.serial & !SHARED == handle.serial() && name.is_of(nodes, node);
        if nodes.link.contains_key(node) && is_named(&self.names[node]) { Ok(node) } else { Err(HandleError::Gone) }
    }

    /// Returns the handle to a node's end, for a caller that may have it already.
    #[inline]
    pub fn name(&mut self, nodes: &Nodes, node: NodeKey, scope: Scope) -> Handle {
        if !self.names[node].is_of(nodes, node) {
            return self.rename(nodes, node, scope);
        }
        let name = &mut self.names[node];
        name.serial |= SHARED;
        Handle::new(name.serial & !SHARED, node)
    }

    /// Gives a new name to a node's end. A lock of the old name goes to the new one.
    #[inline]
    pub fn rename(&mut self, nodes: &Nodes, node: NodeKey, scope: Scope) -> Handle {
        self.last += 2;
        let Name { locks, .. } = self.names[node];
        self.names[node] = Name { serial: self.last, scope, pages: nodes.entries(node), locks };
        Handle::new(self.last, node)
    }

    /// Returns whether more than one call has returned the handle to a named node.
    pub fn is_shared(&self, node: NodeKey) -> bool {
        self.names[node].serial & SHARED > 0
    }

    /// Removes the name that an earlier node in the slot of a new node had.
    pub fn spawn(&mut self, node: NodeKey) {
        self.names[node] = Name::default();
    }

    /// Follows a split that moved the first `pages` pages of `node` to the new node `prefix`.
    pub fn split(&mut self, node: NodeKey, prefix: NodeKey, pages: u32) {
        self.spawn(prefix);
        let name = &mut self.names[node];
        if name.serial > 0 {
            name.pages -= pages; // The end does not move.
        }
    }

    /// Checks that a node can have one more lock by handle.
    ///
    /// # Errors
    /// [`HandleError::Locks`].
    pub fn has_room(&self, node: NodeKey) -> Result<(), HandleError> {
        if self.names[node].locks < LOCKS_MAX { Ok(()) } else { Err(HandleError::Locks) }
    }

    /// Adds a lock of a named node that has room for it.
    pub fn lock(&mut self, node: NodeKey) {
        self.names[node].locks += 1;
    }

    /// Returns the scope of a locked node.
    ///
    /// # Errors
    /// [`HandleError::NotLocked`].
    pub fn locked_scope(&self, node: NodeKey) -> Result<Scope, HandleError> {
        let Name { locks, scope, .. } = self.names[node];
        if locks == 0 { Err(HandleError::NotLocked) } else { Ok(scope) }
    }

    /// Removes a lock of a locked node.
    pub fn unlock(&mut self, node: NodeKey) {
        self.names[node].locks -= 1;
    }

    /// Returns the number of locks by handle that end at each locked node, for audits. O(nodes).
    pub fn locks(&self, tree: &PrefixTree) -> HashMap<NodeKey, u32> {
        let locks = tree.nodes.link.keys().map(|node| (node, self.names[node].locks));
        locks.filter(|&(_, locks)| locks > 0).collect()
    }

    /// Checks T12. O(capacity of the tree).
    pub fn check(&self, tree: &PrefixTree) -> Result<(), Broken> {
        let mut serials = HashSet::new();
        for (node, usage) in &tree.usage {
            let name = &self.names[node];
            if name.serial == 0 {
                tree.ensure(name.locks == 0, "T12: locks by handle have a name", node)?;
                continue;
            }
            let serial = name.serial & !SHARED;
            tree.ensure(
                serial <= self.last && serials.insert(serial),
                "T12: a serial number belongs to one node",
                node,
            )?;
            tree.ensure(name.pages >= tree.nodes.entries(node), "T12: a node keeps its name or loses pages", node)?;
            let is_valid = name.is_of(&tree.nodes, node) || name.locks == 0;
            tree.ensure(is_valid, "T12: the name of a locked node is valid", node)?;
            tree.ensure(name.locks <= usage.lock_count, "T12: locks by handle are part of lock_count", node)?;
        }
        let all: u64 = self.names.values().map(|name| u64::from(name.locks)).sum();
        let of_nodes: u64 = self.locks(tree).values().map(|&locks| u64::from(locks)).sum();
        if all == of_nodes { Ok(()) } else { Err(("T12: vacant slots have no locks", None)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fence::Fence;
    use crate::id::{Namespace, PageId, TokenId};
    use crate::prefix::by_handle;

    /// A tree of pages of one token, with handles.
    struct Cache {
        tree: PrefixTree,
        handles: Handles,
        fence: Fence,
        freed: Vec<PageId>,
    }

    impl Cache {
        fn new() -> Self {
            let memory = &mut Memory::new(false);
            Self {
                tree: PrefixTree::new(20, 1, 31, false).expect("memory"),
                handles: Handles::new(20, memory).expect("memory"),
                fence: Fence::new(0, 0, 0).expect("memory"),
                freed: Vec::new(),
            }
        }

        /// Inserts a text of one token a character.
        fn insert(&mut self, text: &str) -> Handle {
            let tokens: Vec<TokenId> = text.bytes().map(|byte| TokenId::new(byte.into())).collect();
            let place = by_handle::place_in(&self.tree, Namespace::default(), &tokens);
            let new = &tokens[place.known as usize..];
            let pages: Vec<PageId> = new.iter().map(|_| PageId::new(0)).collect();
            by_handle::insert(&mut self.tree, &mut self.handles, &mut self.fence, place, new, &pages)
        }

        fn lock(&mut self, handle: Handle) -> Result<(), HandleError> {
            by_handle::lock(&mut self.tree, &mut self.handles, &mut self.fence, handle)
        }

        fn extend(&mut self, handle: Handle, text: &str) -> Result<Handle, HandleError> {
            let tokens: Vec<TokenId> = text.bytes().map(|byte| TokenId::new(byte.into())).collect();
            let place = by_handle::place_after(&self.tree, &self.handles, handle, &tokens)?;
            let new = &tokens[place.known as usize..];
            let pages: Vec<PageId> = new.iter().map(|_| PageId::new(0)).collect();
            let Self { tree, handles, fence, .. } = self;
            Ok(by_handle::extend(tree, handles, fence, (handle, place), new, &pages))
        }

        fn node_of(&self, handle: Handle) -> Result<NodeKey, HandleError> {
            self.handles.node_of(&self.tree.nodes, handle)
        }

        fn check(&self) -> Result<(), &'static str> {
            let locks = self.handles.locks(&self.tree);
            let checked = self.tree.check(&locks, &HashMap::new(), &self.fence);
            checked.and_then(|()| self.handles.check(&self.tree)).map_err(|(invariant, _)| invariant)
        }
    }

    /// The key of a node comes back after 2^31 insertions and evictions. The test makes the old handles that it would
    /// then equal from the new key.
    #[test]
    fn a_handle_is_gone_even_if_its_key_comes_back() {
        let mut cache = Cache::new();
        let old = cache.insert("ab");
        cache.tree.evict(2, &mut cache.freed);
        assert_eq!(cache.node_of(old), Err(HandleError::Gone));
        let new = cache.insert("ab");
        assert_eq!(slot(old.node()), slot(new.node()), "the slot is used again");
        let back = Handle::new(old.serial(), new.node());
        assert_eq!(cache.node_of(back), Err(HandleError::Gone));
        assert_eq!(cache.node_of(new), Ok(new.node()));
    }

    #[test]
    fn a_node_without_a_name_does_not_inherit_one() {
        // A split creates a node whose end no call returns, in the slot of a node that had a name and as many pages.
        let mut cache = Cache::new();
        let [wide, old] = ["abcd", "xy"].map(|text| cache.insert(text));
        cache.lock(wide).expect("it is cached");
        cache.tree.evict(2, &mut cache.freed);
        cache.insert("abzz");
        let prefix = cache.tree.nodes.link[wide.node()].parent.expect("a split");
        assert_eq!(slot(prefix), slot(old.node()), "the slot is used again");
        let back = Handle::new(old.serial(), prefix);
        assert_eq!(cache.node_of(back), Err(HandleError::Gone));
        // The same for a node that an extension creates.
        let mut cache = Cache::new();
        let [from, old] = ["ab", "xy"].map(|text| cache.insert(text));
        cache.lock(from).expect("it is cached");
        cache.insert("ab");
        cache.tree.evict(2, &mut cache.freed);
        let end = cache.extend(from, "cd").expect("it is locked");
        assert_eq!(slot(end.node()), slot(old.node()), "the slot is used again");
        assert_eq!(cache.node_of(Handle::new(old.serial(), end.node())), Err(HandleError::Gone));
        assert!(end.serial() > old.serial(), "a new number");
        cache.check().expect("all invariants hold");
    }

    fn slot(node: NodeKey) -> u32 {
        slotmap::Key::data(&node).as_ffi() as u32
    }

    #[test]
    fn a_handle_has_a_maximum_of_locks() {
        let mut cache = Cache::new();
        let [from, end] = ["ab", "abcd"].map(|text| cache.insert(text));
        cache.lock(from).expect("it is cached");
        cache.handles.names[end.node()].locks = LOCKS_MAX;
        assert_eq!(cache.lock(end), Err(HandleError::Locks));
        assert_eq!(cache.extend(from, "cd"), Err(HandleError::Locks), "the lock has no room at the end");
        assert!(cache.extend(from, "c").is_ok(), "it ends before");
        cache.handles.names[end.node()].locks = LOCKS_MAX - 1;
        assert_eq!(cache.lock(end), Ok(()));
    }

    #[test]
    fn the_audit_finds_broken_names() {
        let broken = |spoil: fn(&mut Name, &mut u64)| {
            let mut cache = Cache::new();
            let [locked, other] = ["ab", "abcd"].map(|text| cache.insert(text));
            cache.lock(locked).expect("it is cached");
            cache.check().expect("all invariants hold");
            assert!(other.serial() > locked.serial());
            let Handles { names, last } = &mut cache.handles;
            spoil(&mut names[locked.node()], last);
            cache.check().expect_err("the audit finds it")
        };
        assert_eq!(broken(|name, _| name.serial = 0), "T12: locks by handle have a name");
        assert_eq!(broken(|name, _| name.serial += 2), "T12: a serial number belongs to one node");
        assert_eq!(broken(|_, last| *last = 2), "T12: a serial number belongs to one node");
        assert_eq!(broken(|name, _| name.pages -= 1), "T12: a node keeps its name or loses pages");
        assert_eq!(broken(|name, _| name.pages += 1), "T12: the name of a locked node is valid");
        assert!(broken(|name, _| name.locks = 0).starts_with("T3"));
        let mut cache = Cache::new();
        let gone = cache.insert("ab");
        cache.tree.evict(2, &mut cache.freed);
        cache.handles.names[gone.node()].locks = 1;
        assert_eq!(cache.check(), Err("T12: vacant slots have no locks"));
    }
}
