//! The prefixes that have K and V: a radix tree over whole pages, in columns of one arena.
//!
//! ```text
//!              (namespace, generation)                 a node is a run of whole pages:
//!                /               \                        tokens and page ids in `list`,
//!        [t t t t|t t t t]     [t t t t]                  found from its parent by its
//!          /           \                                  first page's tokens (`child_table`)
//!   [t t t t]   [t t t t|t t t t|t t t t]
//! ```
//!
//! The columns are divided by access. Walks read `nodes`; locks and eviction read `usage`. Few nodes have a value in
//! `deferred` (nodes that fenced locks hold). `shared_spans` uses `passed`. Only `spawn`, `split` and `despawn` add and
//! remove nodes. Cells, swap memory, and hashes with events are tables of their own; `contents.rs` informs them of
//! entries that are added and removed.
//!
//! * T1. All columns hold the same nodes; nodes <= device pages + swap pages, since no node is empty.
//! * T2. The child table contains each node once, under its parent (or scope) and its first page's tokens; siblings'
//!   first pages differ. A lookup compares tokens, because equal hashes do not imply equal pages.
//! * T3. `lock_count` of a node = locks that end at it + its children that are locked. So a locked node's parent is
//!   locked, and only a change between idle and locked goes up the path.
//! * T4. The eviction list holds exactly the idle nodes, and a parent is always younger than its children. So
//!   the oldest node is always a leaf.
//! * T5. evictable + protected = device pages of all nodes and cells; evictable = device pages of idle nodes and cells.
//! * T6. Every entry of the slab belongs to one list, of a node or of an open fetch, or is free.
//! * T7. A locked node is deferred when each of its locks waits in the fence and each of its locked children is
//!   deferred: it will be idle soon. The fence counts the pages of such nodes by the step that they wait for.
//! * T8. Idle nodes are all of the present generation: a prefix that can no longer match is dropped with its last user.
//! * T9. This invariant concerns the hashes of pages; `chain.rs` states it.
//!
//! Not here: page states and memory. A call that removes pages appends them to the caller's buffer.

mod ages;
pub(crate) mod by_handle;
mod cell_events;
mod cells;
mod chain;
mod check;
mod child_table;
mod column;
mod contents;
mod cursors;
#[cfg(test)]
mod deep;
mod deferred;
mod entry_list;
mod events;
mod evict;
mod fetches;
mod free_entries;
mod generation;
pub(crate) mod handles;
mod hashes;
mod insert;
mod loads;
mod lock;
mod nodes;
mod order;
pub(crate) mod outline;
mod puts;
mod records;
mod saves;
mod shared_spans;
mod split;
mod swap;
mod tails;
mod walk;

use slotmap::SecondaryMap;

use crate::hash::{Hashing, Names};
use crate::id::{NodeKey, Scope};
use crate::layout::Limits;
use crate::memory::{Memory, OutOfMemory, reserved, secondary_map, slot_map};
use crate::stats::Stats;
use ages::Ages;
use cell_events::{CellChanges, Origins};
use cells::Cells;
use chain::Chain;
use child_table::ChildTable;
use column::{RareColumn, advise_column};
use deferred::Deferred;
use entry_list::{EntryList, EntryLists};
use events::EventBuffer;
use nodes::{Link, Nodes};
use order::{Neighbours, Order};
use swap::Swap;

#[cfg(test)]
pub(crate) use contents::log::{CachedPage, LogEntry};
pub(crate) use loads::LoadBatch;
#[cfg(test)]
pub(crate) use lock::Stale;
pub use shared_spans::SharedPrefixFinder;
pub use walk::PrefixMatch;
pub(crate) use walk::common_tokens;

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

const _: () = assert!(size_of::<Usage>() == 28);

/// What a tree stores, and its limits.
#[derive(Clone, Copy)]
pub(crate) struct TreeShape {
    /// Maximum number of device pages.
    pub page_count: u32,
    pub page_size: u32,
    /// The child table uses this number of bits of its hashes. Only tests use fewer than 32; hashes are then the same
    /// in every process.
    pub hash_bits: u32,
    /// Number of swap pages, and of those of the stage, which follow them.
    pub swap_pages: u32,
    pub stage_pages: u32,
    /// Number of pages of a record of group 0 in a store.
    pub record_pages: u32,
    /// The recipe of the pages' hashes, if pages are hashed.
    pub hashing: Option<Hashing>,
    /// Maximum number of pages in the buffer of events; 0 for no events.
    pub event_pages: u32,
    /// Whether cells have events.
    pub event_cells: bool,
    /// The groups whose cached pages are in cells.
    pub limits: Limits,
    pub max_steps: u32,
}

/// The bytes that a tree allocates.
#[derive(Default)]
pub(crate) struct TreeBytes {
    pub tree: u64,
    pub swap: u64,
    pub hashes: u64,
    pub events: u64,
}

impl TreeShape {
    /// Returns the shape of a tree without hashes, events, cells and swap memory.
    pub fn new(page_count: u32, page_size: u32, hash_bits: u32) -> Self {
        Self {
            page_count,
            page_size,
            hash_bits,
            swap_pages: 0,
            stage_pages: 0,
            record_pages: 1,
            hashing: None,
            event_pages: 0,
            event_cells: false,
            limits: Limits::NONE,
            max_steps: 0,
        }
    }

    /// Returns the maximum number of nodes: no node is empty, so there are no more nodes than pages.
    fn nodes(&self) -> u32 {
        self.page_count + self.swap_pages
    }

    /// Returns whether stores put and fetch pages, which needs swap memory and hashes.
    fn has_stores(&self) -> bool {
        self.swap_pages > 0 && self.hashing.is_some()
    }

    /// Returns the maximum number of pages of a record.
    fn most_record_pages(&self) -> u32 {
        self.limits.tails(0).map(|held| held.tracks).fold(self.record_pages, u32::max)
    }
}

/// The tree.
pub struct PrefixTree {
    nodes: Nodes,
    usage: SecondaryMap<NodeKey, Usage>,
    /// The deferred users of nodes that fenced locks hold.
    deferred: RareColumn<Deferred>,
    /// Number of nodes with deferred users.
    deferred_nodes: u32,
    /// Index of a node in the list of a [`SharedPrefixFinder`]; valid only if the list has the node at this index.
    passed: RareColumn<u32>,
    order: Order,
    /// When each idle node became idle. Only with cells or swap memory: other trees need only the list of idle nodes.
    ages: Option<Box<Ages>>,
    /// Names of the namespaces, if pages are hashed.
    pub(crate) names: Names,
    /// Hashes of pages and events, if the config enables them.
    chain: Option<Chain>,
    /// Cached pages of the groups of limited reach, if there are such groups.
    cells: Option<Box<Cells>>,
    /// Pages in swap memory, if the config enables them.
    swap: Option<Box<Swap>>,
    /// Device pages of idle and of locked nodes.
    size: SizeInfo,
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
    /// Creates an empty tree of at most `page_count` pages. With `prefault`, it touches its memory. The child table
    /// uses `hash_bits` bits of its hashes. Only tests use fewer than 32; hashes are then the same in every process.
    ///
    /// # Errors
    /// The allocation that failed.
    #[cfg(any(test, feature = "testkit"))]
    pub fn new(page_count: u32, page_size: u32, hash_bits: u32, prefault: bool) -> Result<Self, OutOfMemory> {
        let shape = TreeShape::new(page_count, page_size, hash_bits);
        Self::of_shape(&shape, &mut Memory::new(prefault)).map(|(tree, _)| tree)
    }

    /// Creates an empty tree. Also returns its bytes.
    ///
    /// # Errors
    /// The allocation that failed.
    pub(crate) fn of_shape(shape: &TreeShape, memory: &mut Memory) -> Result<(Self, TreeBytes), OutOfMemory> {
        let &TreeShape { page_size, hash_bits, event_pages, .. } = shape;
        let nodes = shape.nodes();
        let mut tree = Self {
            nodes: Nodes {
                page_size,
                link: slot_map(nodes, memory)?,
                scope: RareColumn::new(nodes, memory)?,
                lists: EntryLists::new(nodes, page_size, memory)?,
                children: ChildTable::new(nodes, hash_bits, memory)?,
                sides: None,
            },
            usage: secondary_map(nodes, memory)?,
            deferred: RareColumn::new(nodes, memory)?,
            deferred_nodes: 0,
            passed: RareColumn::new(nodes, memory)?,
            order: Order::default(),
            ages: None,
            names: Names::new(shape.hashing, memory)?,
            chain: None,
            cells: None,
            swap: None,
            size: SizeInfo::default(),
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
        let mut bytes = TreeBytes { tree: memory.take_bytes(), ..TreeBytes::default() };
        if shape.swap_pages > 0 {
            tree.swap = Some(Box::new(Swap::new(shape, memory)?));
            tree.nodes.sides = Some(RareColumn::new(nodes, memory)?);
            tree.ages = Some(Box::new(Ages::new(nodes, memory)?));
            bytes.swap = memory.take_bytes();
        }
        if !shape.limits.is_none() {
            tree.cells = Some(Box::new(Cells::new(shape, memory)?));
            if tree.ages.is_none() {
                tree.ages = Some(Box::new(Ages::new(nodes, memory)?));
            }
            bytes.tree += memory.take_bytes();
        }
        if let Some(hashing) = shape.hashing {
            let mut chain = Chain::new(nodes, hash_bits, hashing, memory)?;
            bytes.hashes = memory.take_bytes();
            if event_pages > 0 {
                let cells = tree.cells.as_mut().filter(|_| shape.event_cells);
                let origins = Origins::new(nodes, cells.is_some(), memory)?;
                if let Some(cells) = cells {
                    cells.changes = CellChanges::new(event_pages, memory)?;
                }
                chain.events = Some(EventBuffer::new(nodes, page_size, hashing, event_pages, origins, memory)?);
                bytes.events = memory.take_bytes();
            }
            tree.chain = Some(chain);
        }
        Ok((tree, bytes))
    }

    /// Bytes of one node's columns.
    #[cfg(any(test, feature = "testkit"))]
    const COLUMN_BYTES: u64 = {
        use crate::memory::slot_size;
        let lists = slot_size::<Link>() + slot_size::<Usage>();
        (lists + size_of::<Scope>() + size_of::<Deferred>() + size_of::<u32>()) as u64
    };

    /// Bytes of one node: its columns and its child entry.
    #[cfg(any(test, feature = "testkit"))]
    pub const BYTES_PER_NODE: u64 = Self::COLUMN_BYTES + ChildTable::BYTES_PER_NODE;

    /// Returns the columns that walks read.
    pub(crate) fn nodes(&self) -> &Nodes {
        &self.nodes
    }

    /// Returns whether there are groups whose cached pages are in cells.
    #[inline]
    pub(crate) fn has_cells(&self) -> bool {
        self.cells.is_some()
    }

    /// Returns the cells. There are groups.
    pub(crate) fn cells(&self) -> &Cells {
        self.cells.as_ref().expect("there are groups")
    }

    /// Returns the cells, to change them. There are groups.
    pub(crate) fn cells_mut(&mut self) -> &mut Cells {
        self.cells.as_mut().expect("there are groups")
    }

    /// Returns whether evicted pages move to swap memory.
    #[inline]
    pub(crate) fn has_swap(&self) -> bool {
        self.swap.is_some()
    }

    /// Returns the columns of swap memory. There is swap memory.
    pub(crate) fn swap(&self) -> &Swap {
        self.swap.as_ref().expect("there is swap memory")
    }

    /// Returns the columns of swap memory, to change them. There is swap memory.
    pub(crate) fn swap_mut(&mut self) -> &mut Swap {
        self.swap.as_mut().expect("there is swap memory")
    }

    /// Returns the number of tokens of a page.
    pub fn page_size(&self) -> u32 {
        self.nodes.page_size
    }

    /// Touches the memory of nodes, so that later calls cause hardly any page faults. The tree must be empty.
    ///
    /// # Errors
    /// The allocation of a temporary list of all nodes, 8 bytes for each node, if it failed.
    fn prefault(&mut self) -> Result<(), OutOfMemory> {
        let links = &mut self.nodes.link;
        // The nodes are removed in reverse order, so that the arena later returns keys in ascending order.
        let link = Link { parent: None, list: EntryList::EMPTY };
        let capacity = links.capacity();
        let mut nodes = reserved(capacity as u64)?;
        for _ in 0..capacity {
            let node = links.insert(link);
            self.usage.insert(node, Usage::new(0));
            if nodes.is_empty() {
                // The columns begin here. Request huge pages before the loop touches the rest.
                advise_column(&links[node], capacity);
                advise_column(&self.usage[node], capacity);
            }
            nodes.push(node);
        }
        for node in nodes.into_iter().rev() {
            links.remove(node);
            self.usage.remove(node);
        }
        Ok(())
    }

    /// Returns the number of nodes.
    #[cfg(any(test, feature = "testkit"))]
    pub fn node_count(&self) -> usize {
        self.nodes.link.len()
    }

    /// Returns the numbers of pages by use. O(1).
    pub fn size_info(&self) -> SizeInfo {
        let cells = self.cells.as_ref().map_or(SizeInfo::default(), |cells| cells.size_info());
        let SizeInfo { evictable, protected } = self.size;
        SizeInfo { evictable: evictable + cells.evictable, protected: protected + cells.protected }
    }

    /// Writes the counters and levels of the tree into `stats`. O(1).
    pub(crate) fn count(&self, stats: &mut Stats) {
        let SizeInfo { evictable, protected } = self.size_info();
        (stats.evictable_pages, stats.protected_pages) = (evictable, protected);
        (stats.published_pages, stats.duplicate_pages) = (self.published_pages, self.duplicate_pages);
        if let Some(cells) = &self.cells {
            (stats.cells, stats.evicted_cells) = cells.counts();
            [stats.cell_pages, stats.state_pages] = cells.device_pages();
        }
        self.swap.iter().for_each(|swap| swap.count(stats));
    }

    /// Returns the bytes in use for nodes, child entries, entries of lists and extents.
    #[cfg(any(test, feature = "testkit"))]
    pub fn live_bytes(&self) -> u64 {
        self.node_count() as u64 * Self::BYTES_PER_NODE + self.nodes.lists.live_bytes()
    }

    /// Creates a node. It has no user and is in no list; the caller counts its pages.
    fn spawn(&mut self, link: Link, scope: Scope) -> NodeKey {
        let Nodes { lists, children, .. } = &self.nodes;
        let hash = children.hash(link.parent, scope, lists.first_page(&link.list));
        let node = self.insert_columns(link, scope, Usage::new(hash));
        self.nodes.children.insert(hash, node);
        match link.parent {
            Some(parent) => self.usage[parent].child_count += 1,
            None => self.names.hold(scope.namespace),
        }
        node
    }

    #[inline]
    fn insert_columns(&mut self, link: Link, scope: Scope, usage: Usage) -> NodeKey {
        assert!(self.nodes.link.len() < self.nodes.link.capacity(), "T1: nodes cannot outnumber pages");
        self.branches += 1;
        let node = self.nodes.link.insert(link);
        self.usage.insert(node, usage);
        if link.parent.is_none() {
            self.nodes.scope[node] = scope;
        }
        node
    }

    /// Removes a node that is idle, without pages, without children and in no list.
    #[inline(always)] // Saves 4 % of an eviction at page_size 16.
    fn despawn(&mut self, node: NodeKey) {
        let usage = self.usage.remove(node).expect("T1: every node has its usage");
        assert!(usage.lock_count == 0, "T3: a locked node stays");
        assert!(usage.child_count == 0, "T4: a node with children stays");
        let link = self.nodes.link.remove(node).expect("T1: every node has a link");
        self.nodes.children.remove(usage.hash, node);
        match link.parent {
            Some(parent) => self.usage[parent].child_count -= 1,
            None => self.names.release(self.nodes.scope[node].namespace),
        }
    }
}
