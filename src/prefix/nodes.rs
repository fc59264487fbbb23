//! The nodes: their parents, scopes and pages. Walks read these columns, down along tokens (`walk.rs`) or up from a
//! lock.
//!
//! ```text
//! entries of a node   0 .. swap_start .. device .. len
//! on the device       [             |            ]   those below `device`
//! in swap memory              [                  ]   those from `swap_start` on
//!                       dirty   clean   swap-only
//! ```
//!
//! Not here: the columns of locks and of eviction (`mod.rs`).

use std::ops::Range;

use bytemuck::Zeroable;
use slotmap::SlotMap;

use crate::id::{NodeKey, PageId, PrefixLock, Scope, SwapPageId, TokenId};
use crate::layout::{HeldGroup, Limits};

use super::child_table::ChildTable;
use super::column::RareColumn;
use super::entry_list::{EntryList, EntryLists};

/// Stands for the page of an entry that is in swap memory alone.
pub(super) const NO_PAGE: PageId = PageId::new(u32::MAX);

/// Stands for the swap page of an entry that has none.
pub(super) const NO_SWAP_PAGE: SwapPageId = SwapPageId::new(u32::MAX);

/// The column that every walk reads. A slot, which includes a version, has 32 bytes: half a cache line.
#[derive(Clone, Copy)]
pub(super) struct Link {
    pub parent: Option<NodeKey>,
    pub list: EntryList,
}

const _: () = assert!(size_of::<Link>() == 28);

/// Where the pages of a node's entries, or of a cell, are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Zeroable)]
#[repr(C)]
pub(super) struct Sides {
    /// The entries below this have device pages.
    pub device: u32,
    /// The entries from this on have swap pages.
    pub swap_start: u32,
}

/// A position on a path: a number of pages into a node, or before the first node.
#[derive(Clone, Copy)]
pub(crate) struct Cursor {
    pub node: Option<NodeKey>,
    pub pages_in_node: u32,
}

impl Cursor {
    /// Before the first node.
    pub const START: Self = Self { node: None, pages_in_node: 0 };
}

/// A walk up a path, from its deepest page to its first one.
#[derive(Clone, Copy)]
pub(crate) struct PathCursor {
    node: Option<NodeKey>,
    extent: u32,
    /// Entry of the run's first page.
    entry: u32,
    /// Place of that page in the prefix.
    place: u32,
}

/// A place in the tails of a path, and the path's entry there.
pub(crate) struct TailPlace {
    pub held: HeldGroup,
    pub place: u32,
    pub entry: u32,
}

/// The columns that walks read.
pub(crate) struct Nodes {
    pub(super) page_size: u32,
    pub(super) link: SlotMap<NodeKey, Link>,
    /// The scopes of nodes without a parent.
    pub(super) scope: RareColumn<Scope>,
    pub(super) lists: EntryLists,
    pub(super) children: ChildTable,
    /// Where the pages of each node are; only with swap memory. Without, all are on the device.
    pub(super) sides: Option<RareColumn<Sides>>,
}

impl Nodes {
    /// Returns the number of a node's entries.
    #[inline]
    pub(super) fn entries(&self, node: NodeKey) -> u32 {
        self.link[node].list.pages()
    }

    /// Returns where the pages of a node are.
    pub(super) fn sides_of(&self, node: NodeKey) -> Sides {
        let entries = self.entries(node);
        self.sides.as_ref().map_or(Sides { device: entries, swap_start: entries }, |sides| sides[node])
    }

    /// Returns [`Nodes::sides_of`], to change it. There is swap memory.
    pub(super) fn sides_mut(&mut self, node: NodeKey) -> &mut Sides {
        &mut self.sides.as_mut().expect("there is swap memory")[node]
    }

    /// Returns how many of a node's first `entries` entries have pages on the device.
    #[inline]
    pub(super) fn device_pages(&self, node: NodeKey, entries: u32) -> u32 {
        match &self.sides {
            Some(sides) => sides[node].device.min(entries),
            None => entries,
        }
    }

    /// Returns the position after a node's last page, or before all nodes.
    pub fn end_of(&self, node: Option<NodeKey>) -> Cursor {
        Cursor { node, pages_in_node: node.map_or(0, |node| self.entries(node)) }
    }

    /// Returns the position of `at` pages on the path to a position with `pages` pages before it.
    pub(super) fn cursor_at(&self, end: Cursor, pages: u32, at: u32) -> Cursor {
        let (mut cursor, mut pages) = (end, pages);
        while let Some(node) = cursor.node
            && pages - cursor.pages_in_node >= at
        {
            pages -= cursor.pages_in_node;
            cursor = self.end_of(self.link[node].parent);
        }
        cursor.pages_in_node -= pages - at;
        cursor
    }

    /// Returns the nodes on the path to a position, the deepest first, each with the number of its pages on the path.
    #[inline]
    pub(super) fn up(&self, from: Cursor) -> impl Iterator<Item = (NodeKey, u32)> {
        let mut next = from;
        std::iter::from_fn(move || {
            let Cursor { node, pages_in_node } = next;
            next = self.end_of(self.link[node?].parent);
            node.map(|node| (node, pages_in_node))
        })
    }

    /// Returns the nodes on the path to a position that have swap-only entries before it, the deepest first, each with
    /// the number of these entries.
    pub(super) fn swap_only(&self, at: Cursor) -> impl Iterator<Item = (NodeKey, u32)> {
        let swap_only = self.up(at).map(|(node, pages)| (node, pages - self.device_pages(node, pages)));
        swap_only.take_while(|&(_, pages)| pages > 0)
    }

    /// Returns how many of the pages before a position are in swap memory alone.
    #[cold]
    pub(super) fn swap_only_before(&self, at: Cursor) -> u32 {
        self.swap_only(at).map(|(_, pages)| pages).sum()
    }

    /// Returns a node's tokens and pages, run by run.
    pub(super) fn pages(&self, node: NodeKey) -> impl Iterator<Item = (&[TokenId], &[PageId])> {
        self.lists.pieces(&self.link[node].list)
    }

    /// Calls `each` with each entry at some places of a node, the last one first. `each` may rewrite the entry's page.
    pub(super) fn each_entry_back(&mut self, node: NodeKey, places: Range<u32>, each: impl FnMut(u32, &mut PageId)) {
        self.lists.each_entry_back(&self.link[node].list, places, each);
    }

    /// Returns the pages of the prefix that a lock holds, in order; for audits. O(pages).
    pub fn path(&self, lock: &PrefixLock) -> Vec<PageId> {
        let mut nodes: Vec<_> = self.up(self.end_of(lock.node())).collect();
        nodes.reverse();
        let pages = nodes.iter().flat_map(|&(node, _)| self.pages(node));
        pages.flat_map(|(_, pages)| pages.iter().copied()).collect()
    }

    /// Appends the pages of the last `count` entries of the path to a node to `pages`, in order. They are on the
    /// device. O(entries).
    pub fn last_pages(&self, node: Option<NodeKey>, count: u32, pages: &mut Vec<PageId>) {
        let (start, end) = (pages.len(), pages.len() + count as usize);
        for (node, entries) in self.up(self.end_of(node)) {
            let count = entries.min((end - pages.len()) as u32);
            if count == 0 {
                break;
            }
            for (first, len) in self.lists.last_runs_back(&self.link[node].list, count) {
                pages.extend(self.lists.pages_of_run(first, len).iter().rev());
            }
        }
        pages[start..].reverse();
    }

    /// Returns the namespace and generation of a node's prefix. O(nodes above).
    pub(super) fn scope_of(&self, node: NodeKey) -> Scope {
        let first = self.up(self.end_of(Some(node))).last();
        self.scope[first.map_or(node, |(first, _)| first)]
    }

    /// Returns the entry of the page before the last `count` pages of a node.
    pub(super) fn entry_before(&self, node: NodeKey, count: u32) -> Option<u32> {
        let link = &self.link[node];
        if count < link.list.pages() {
            return self.lists.last_runs(&link.list, count + 1).next().map(|(start, _)| start);
        }
        link.parent.map(|parent| self.last_entry(parent))
    }

    /// Returns the entry of a node's last page.
    pub(super) fn last_entry(&self, node: NodeKey) -> u32 {
        self.lists.last_entry(&self.link[node].list)
    }

    /// Returns a walk up from a position with `pages` pages before it.
    pub(super) fn path_from(&self, end: Cursor, pages: u32) -> PathCursor {
        let Cursor { node: Some(node), pages_in_node } = end else {
            return PathCursor { node: None, extent: 0, entry: 0, place: 0 };
        };
        let (extent, entry, len) = self.lists.run_of(&self.link[node].list, pages_in_node);
        PathCursor { node: Some(node), extent, entry, place: pages - len }
    }

    /// Returns a walk up the path of a lock on `pages` pages.
    pub fn path_of(&self, lock: &PrefixLock, pages: u32) -> PathCursor {
        self.path_from(self.end_of(lock.node()), pages)
    }

    /// Returns the entry of a place on a path, and moves the walk there. A call's place must not be deeper than the
    /// place of the previous call. O(runs on the way).
    pub fn entry_at(&self, at: &mut PathCursor, place: u32) -> u32 {
        while place < at.place {
            let mut node = at.node.expect("the path has the place");
            let before = self.lists.run_before(&self.link[node].list, at.extent);
            let (extent, entry, len) = before.unwrap_or_else(|| {
                node = self.link[node].parent.expect("the path has the place");
                let list = &self.link[node].list;
                self.lists.run_of(list, list.pages())
            });
            *at = PathCursor { node: Some(node), extent, entry, place: at.place - len };
        }
        at.entry + (place - at.place)
    }

    /// Returns the places of the tails of a lock's path of `pages` pages.
    pub fn lock_tails<'a>(
        &'a self,
        limits: &'a Limits,
        lock: &PrefixLock,
        pages: u32,
    ) -> impl Iterator<Item = TailPlace> + use<'a> {
        self.tails(limits, self.end_of(lock.node()), pages)
    }

    /// Returns the places of the tails of a path that ends at a position, with `pages` pages before it. The groups are
    /// in order; in each group, the last place comes first. O(tails, and runs on the way).
    pub(super) fn tails(&self, limits: &Limits, end: Cursor, pages: u32) -> impl Iterator<Item = TailPlace> {
        let path = self.path_from(end, pages);
        limits.tails(pages).flat_map(move |held| {
            let mut path = path;
            let places = (held.first..pages).rev();
            places.map(move |place| TailPlace { held, place, entry: self.entry_at(&mut path, place) })
        })
    }

    /// Returns the places of the tails of `target` pages, in the order of [`Nodes::tails`]. The path ends at a position
    /// with `pages` pages before it; later places have no entry.
    pub(super) fn tails_to<'a>(
        &'a self,
        limits: &'a Limits,
        end: Cursor,
        pages: u32,
        target: u32,
    ) -> impl Iterator<Item = (HeldGroup, u32, Option<u32>)> + use<'a> {
        let path = self.path_from(end, pages);
        limits.tails(target).flat_map(move |held| {
            let mut path = path;
            let places = (held.first..target).rev();
            places.map(move |place| (held, place, (place < pages).then(|| self.entry_at(&mut path, place))))
        })
    }
}
