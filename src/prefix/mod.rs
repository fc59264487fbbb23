//! The prefixes that have K and V: a radix tree over whole pages, in columns of one arena.
//!
//! ```text
//!              (namespace, generation)                 a node is a run of whole pages:
//!                /               \                        tokens and page ids in `span`,
//!        [t t t t|t t t t]     [t t t t]                  found from its parent by its
//!          /           \                                  first page's tokens (`child_table`)
//!   [t t t t]   [t t t t|t t t t|t t t t]
//! ```
//!
//! The columns are divided by access. Walks read `link`; locks and eviction read `usage`. Few nodes have a value in
//! `scope` (nodes without a parent) and `deferred` (nodes that fenced locks hold). `shared_spans` uses `passed`. Spans
//! and the child table have their own stores. Only `spawn`, `split` and `despawn` add and remove nodes.
//! `contents.rs` describes the calls that add and remove pages.
//!
//! * T1. All columns hold the same nodes; nodes <= device pages + swap pages, since no node is empty.
//! * T2. The child table contains each node once, under its parent (or scope) and its first page's tokens; siblings'
//!   first pages differ. A lookup compares tokens, because equal hashes do not imply equal pages.
//! * T3. `lock_count` of a node = locks that end at it + its children that are locked. So a locked node's parent is
//!   locked, and only a change between idle and locked goes up the path.
//! * T4. The eviction list holds exactly the idle nodes, and a parent is always younger than its children. So
//!   the oldest node is always a leaf.
//! * T5. evictable + protected = device pages of all nodes and cells; evictable = device pages of idle nodes and cells.
//! * T6. Every entry of the span store belongs to one span, of a node or of an open fetch, or is free.
//! * T7. A locked node is deferred when each of its locks waits in the fence and each of its locked children is
//!   deferred: it will be idle soon. The fence counts the pages of such nodes by the step that they wait for.
//! * T8. Idle nodes are all of the present generation: a prefix that can no longer match is dropped with its last user.
//! * T9. This invariant concerns the hashes of pages; `chain.rs` states it.
//!
//! Not here: page states and memory. A call that removes pages appends them to the caller's buffer.

mod ages;
mod cell_moves;
mod cells;
mod chain;
mod check;
mod child_table;
mod column;
mod contents;
#[cfg(test)]
mod deep;
mod deferred;
mod events;
mod evict;
mod fetches;
mod free_entries;
mod generation;
mod insert;
mod load_batch;
mod lock;
mod offload;
mod order;
mod puts;
mod residency;
mod restore;
mod save_batch;
mod shared_spans;
mod span;
mod split;
mod swap;
mod tails;
mod walk;

use slotmap::{SecondaryMap, SlotMap};

use crate::id::{NodeKey, PageId, PrefixLock, Scope, TokenId};
use crate::memory::{Memory, OutOfMemory, reserved, secondary_map, slot_map, slot_size};
use ages::Ages;
use cells::Cells;
use chain::Chain;
use child_table::ChildTable;
use column::{RareColumn, advise_column};
use deferred::Deferred;
use events::EventBuffer;
use order::{Neighbours, Order};
use span::{Span, SpanStore};
use swap::Swap;

#[cfg(test)]
pub(crate) use contents::log::{CachedPage, LogEntry};
pub use insert::Inserted;
pub(crate) use load_batch::LoadBatch;
pub use lock::Stale;
pub use shared_spans::SharedPrefixFinder;
pub use walk::PrefixMatch;
pub(crate) use walk::common_tokens;

/// The column that every walk reads. A slot, which includes a version, has 32 bytes: half a cache line.
#[derive(Clone, Copy)]
struct Link {
    parent: Option<NodeKey>,
    span: Span,
}

/// The column that locks and eviction read. A slot, which includes a version, has 32 bytes: half a cache line.
#[derive(Clone, Copy)]
struct Usage {
    neighbours: Neighbours,
    /// Locks that end here and locked children. 0: idle.
    lock_count: u32,
    child_count: u32,
    /// Hash of the parent (or scope) and the first page. It is stored, so that a removal need not compute it again.
    hash: u32,
}

impl Usage {
    fn new(hash: u32) -> Self {
        Self { neighbours: Neighbours::default(), lock_count: 0, child_count: 0, hash }
    }
}

const _: () = assert!(size_of::<Link>() == 28 && size_of::<Usage>() == 28);

/// The tree.
pub struct PrefixTree {
    page_size: u32,
    /// Maximum number of pages, on the device and in swap memory.
    most_pages: u32,
    link: SlotMap<NodeKey, Link>,
    usage: SecondaryMap<NodeKey, Usage>,
    /// The scopes of nodes without a parent.
    scope: RareColumn<Scope>,
    /// The deferred users of nodes that fenced locks hold.
    deferred: RareColumn<Deferred>,
    /// Number of nodes with deferred users.
    deferred_nodes: u32,
    /// Index of a node in the list of a [`SharedPrefixFinder`]; valid only if the list has the node at this index.
    passed: RareColumn<u32>,
    order: Order,
    /// When each idle node became idle. Only with cells or swap memory: other trees need only the list of idle nodes.
    ages: Option<Box<Ages>>,
    spans: SpanStore,
    children: ChildTable,
    /// Hashes of pages, if the config enables them.
    chain: Option<Chain>,
    /// Cached pages of the groups of limited reach, if there are such groups.
    cells: Option<Box<Cells>>,
    /// Pages in swap memory, if the config enables them.
    swap: Option<Box<Swap>>,
    /// The events, if pages are hashed and the config enables events.
    events: Option<EventBuffer>,
    /// Device pages of idle nodes and idle cells.
    evictable: u32,
    /// Device pages of locked nodes and used cells.
    protected: u32,
    /// The generation whose prefixes match.
    generation: u64,
    /// Number of generations so far.
    generation_count: u64,
    /// Number of computed pages that sequences added so far; fetched pages are not included.
    published_pages: u64,
    /// Number of inserted pages so far that the tree already contained on the device.
    duplicate_pages: u64,
    /// Counts the changes that make matches stale: splits, trims, evictions, returns to the device, growth, resets.
    epoch: u64,
    /// Counts changes of locks, and new nodes.
    branches: u64,
    #[cfg(test)]
    log: Option<Vec<contents::log::LogEntry>>,
}

/// Numbers of a tree's pages by use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SizeInfo {
    /// Device pages of idle nodes and idle cells.
    pub evictable: u32,
    /// Device pages of locked nodes and used cells.
    pub protected: u32,
}

impl PrefixTree {
    /// Creates an empty tree of at most `page_count` pages. The child table uses `hash_bits` bits of its hashes. Only
    /// tests use fewer than 32; hashes are then the same in every process.
    ///
    /// # Errors
    /// The allocation that failed.
    pub fn new(page_count: u32, page_size: u32, hash_bits: u32) -> Result<Self, OutOfMemory> {
        Self::new_in(page_count, page_size, hash_bits, &mut Memory::new(false))
    }

    /// Creates an empty tree as [`PrefixTree::new`] does, and touches its memory.
    ///
    /// # Errors
    /// The allocation that failed.
    pub fn prefaulted(page_count: u32, page_size: u32, hash_bits: u32) -> Result<Self, OutOfMemory> {
        Self::new_in(page_count, page_size, hash_bits, &mut Memory::new(true))
    }

    pub(crate) fn new_in(
        page_count: u32,
        page_size: u32,
        hash_bits: u32,
        memory: &mut Memory,
    ) -> Result<Self, OutOfMemory> {
        let mut tree = Self {
            page_size,
            most_pages: page_count,
            link: slot_map(page_count, memory)?,
            usage: secondary_map(page_count, memory)?,
            scope: RareColumn::new(page_count, memory)?,
            deferred: RareColumn::new(page_count, memory)?,
            deferred_nodes: 0,
            passed: RareColumn::new(page_count, memory)?,
            order: Order::default(),
            ages: None,
            spans: SpanStore::new(page_count, page_size, memory)?,
            children: ChildTable::new(page_count, hash_bits, memory)?,
            chain: None,
            cells: None,
            swap: None,
            events: None,
            evictable: 0,
            protected: 0,
            generation: 0,
            generation_count: 1,
            published_pages: 0,
            duplicate_pages: 0,
            epoch: 0,
            branches: 1,
            #[cfg(test)]
            log: None,
        };
        if memory.prefaults() {
            tree.prefault()?;
        }
        Ok(tree)
    }

    /// Bytes of one node's columns.
    const COLUMN_BYTES: u64 =
        (slot_size::<Link>() + slot_size::<Usage>() + size_of::<Scope>() + size_of::<Deferred>() + size_of::<u32>())
            as u64;

    /// Bytes of one node: its columns and its child entry.
    pub const BYTES_PER_NODE: u64 = Self::COLUMN_BYTES + ChildTable::BYTES_PER_NODE;

    /// Returns the number of tokens of a page.
    pub fn page_size(&self) -> u32 {
        self.page_size
    }

    /// Touches the memory of nodes, so that later calls cause hardly any page faults. The tree must be empty.
    ///
    /// # Errors
    /// The allocation of a temporary list of all nodes, 8 bytes for each node, if it failed.
    fn prefault(&mut self) -> Result<(), OutOfMemory> {
        // The nodes are removed in reverse order, so that the arena later returns keys in ascending order.
        let link = Link { parent: None, span: Span::EMPTY };
        let capacity = self.link.capacity();
        let mut nodes = reserved(capacity as u64)?;
        for _ in 0..capacity {
            let node = self.link.insert(link);
            self.usage.insert(node, Usage::new(0));
            if nodes.is_empty() {
                // The columns begin here. Request huge pages before the loop touches the rest.
                advise_column(&self.link[node], capacity);
                advise_column(&self.usage[node], capacity);
            }
            nodes.push(node);
        }
        for node in nodes.into_iter().rev() {
            self.link.remove(node);
            self.usage.remove(node);
        }
        Ok(())
    }

    /// Returns the number of nodes.
    pub fn node_count(&self) -> usize {
        self.link.len()
    }

    /// Returns the numbers of pages by use. O(1).
    pub fn size_info(&self) -> SizeInfo {
        SizeInfo { evictable: self.evictable, protected: self.protected }
    }

    /// Returns the number of computed pages that sequences added so far. O(1).
    pub fn published_pages(&self) -> u64 {
        self.published_pages
    }

    /// Returns the number of inserted pages so far that the tree already contained on the device. O(1).
    pub fn duplicate_pages(&self) -> u64 {
        self.duplicate_pages
    }

    /// Returns the bytes in use for nodes, child entries, entries of spans and extents.
    pub fn live_bytes(&self) -> u64 {
        let nodes = self.link.len() as u64;
        nodes * Self::BYTES_PER_NODE + self.spans.live_bytes()
    }

    /// Creates a node. It has no user and is in no list; the caller counts its pages.
    #[inline(always)]
    fn spawn(&mut self, link: Link, scope: Scope) -> NodeKey {
        let first = self.spans.first_page(&link.span);
        let hash = self.children.hash(link.parent, scope, first);
        let node = self.insert_columns(link, scope, Usage::new(hash));
        self.children.insert(hash, node);
        match link.parent {
            Some(parent) => self.usage[parent].child_count += 1,
            None => self.hold_names(scope.namespace),
        }
        node
    }

    #[inline]
    fn insert_columns(&mut self, link: Link, scope: Scope, usage: Usage) -> NodeKey {
        assert!(self.link.len() < self.link.capacity(), "T1: nodes cannot outnumber pages");
        self.branches += 1;
        let node = self.link.insert(link);
        self.usage.insert(node, usage);
        if link.parent.is_none() {
            self.scope[node] = scope;
        }
        node
    }

    /// Removes a node that is idle, without pages, without children and in no list.
    fn despawn(&mut self, node: NodeKey) {
        let usage = self.usage.remove(node).expect("T1: every node has its usage");
        assert!(usage.lock_count == 0, "T3: a locked node stays");
        assert!(usage.child_count == 0, "T4: a node with children stays");
        let link = self.link.remove(node).expect("T1: every node has a link");
        self.children.remove(usage.hash, node);
        match link.parent {
            Some(parent) => self.usage[parent].child_count -= 1,
            None => self.release_names(self.scope[node].namespace),
        }
    }

    /// Returns how many of a node's first `entries` entries have pages on the device.
    #[inline]
    fn device_pages(&self, node: NodeKey, entries: u32) -> u32 {
        match &self.swap {
            Some(swap) => swap.residency[node].device.min(entries),
            None => entries,
        }
    }

    /// Returns a node's tokens and pages, run by run.
    fn node_pages(&self, node: NodeKey) -> impl Iterator<Item = (&[TokenId], &[PageId])> {
        self.spans.pieces(&self.link[node].span)
    }

    /// Returns the pages of the prefix that a lock holds, in order; for audits. O(pages).
    pub(crate) fn path(&self, lock: &PrefixLock) -> Vec<PageId> {
        let mut nodes = Vec::new();
        let mut at = lock.node();
        while let Some(node) = at {
            nodes.push(node);
            at = self.link[node].parent;
        }
        let pages = nodes.iter().rev().flat_map(|&node| self.node_pages(node));
        pages.flat_map(|(_, pages)| pages.iter().copied()).collect()
    }
}
