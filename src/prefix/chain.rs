//! Hashes of cached pages, for routers and other callers that identify prefixes by hashes. Only engines whose config
//! sets `hashing` have them.
//!
//! A column stores the hash of each page by the number of its entry (`entry_list.rs`). So a split moves no hash, and
//! the hash of a freed entry is no longer read. A page is hashed when it is added, if its prefix is of the present
//! generation. A second child table finds nodes by the hash of their first page. Nodes of an old generation stay in it
//! until they are despawned. No walk reaches them, since walks begin at prefixes of the present generation.
//!
//! * T9. Every page of the present generation has the hash of its prefix. The hash of a node's first page finds the
//!   node.
//!
//! Not here: how a hash is computed (`hash/`), events (`events.rs`).

mod check;

use std::ops::Range;

use crate::event::{Event, Medium};
use crate::hash::{Hashing, Named, Names, PageHash};
use crate::id::{Namespace, NodeKey, PageId, PrefixLock, Scope};
use crate::memory::{Memory, OutOfMemory};

use super::cell_events::{CellChange, CellChanges};
use super::child_table::ChildTable;
use super::column::RareColumn;
use super::entry_list::EntryLists;
use super::events::{EventBuffer, StoredPages};
use super::hashes::{Hashes, named};
use super::nodes::{Cursor, Nodes, Sides};
use super::{PrefixMatch, PrefixTree};

/// Bit that is set in the hash of each node in the table, so that 0 stands for no hash.
const LISTED: u32 = 1 << 31;

/// The column of hashes, the table that finds nodes by them, and the events about hashed pages.
pub(super) struct Chain {
    hashes: Hashes,
    /// Nodes by the hash of their first page.
    firsts: ChildTable,
    /// A node's hash in `firsts`, or 0.
    listed: RareColumn<u32>,
    /// The events, if the config enables them.
    pub events: Option<EventBuffer>,
}

impl Chain {
    /// Creates the columns for `node_count` nodes and as many pages.
    pub fn new(node_count: u32, hash_bits: u32, hashing: Hashing, memory: &mut Memory) -> Result<Self, OutOfMemory> {
        Ok(Self {
            hashes: Hashes::new(node_count, hashing, memory)?,
            firsts: ChildTable::new(node_count, hash_bits, memory)?,
            listed: RareColumn::new(node_count, memory)?,
            events: None,
        })
    }

    /// Returns the recipe of the hashes.
    pub fn hashing(&self) -> Hashing {
        self.hashes.hashing
    }

    /// Returns the hash of an entry's page.
    pub fn of(&self, entry: u32) -> PageHash {
        self.hashes.of(entry)
    }

    /// Returns the namespace of the prefixes of the present generation whose first page has this entry. O(1).
    pub fn namespace_of(&self, nodes: &Nodes, first: u32) -> Namespace {
        let is_it =
            |node| nodes.link[node].parent.is_none() && EntryLists::first_entry(&nodes.link[node].list) == first;
        let node = self.find(self.of(first), is_it).expect("T9: the hash of a first page finds its node");
        nodes.scope[node].namespace
    }

    fn list(&mut self, node: NodeKey, first: u32) {
        let hash = self.firsts.hash_number(self.of(first).to_u64()) | LISTED;
        self.listed[node] = hash;
        self.firsts.insert(hash, node);
    }

    /// Returns the node that the table lists under a hash and that `is_it` accepts.
    fn find(&self, hash: PageHash, mut is_it: impl FnMut(NodeKey) -> bool) -> Option<NodeKey> {
        self.firsts.find(self.firsts.hash_number(hash.to_u64()) | LISTED, &mut is_it)
    }

    /// Hashes the last `count` pages of a node, which were just added to a medium, and emits their event. The node is
    /// of the present generation.
    pub fn attach(
        &mut self,
        nodes: &Nodes,
        named: &Named,
        node: NodeKey,
        namespace: Namespace,
        medium: Medium,
        count: u32,
    ) {
        let (hashes, list) = (&mut self.hashes, &nodes.link[node].list);
        let mut hash = nodes.entry_before(node, count).map(|entry| hashes.of(entry));
        for (start, len) in nodes.lists.last_runs(list, count) {
            for entry in start..start + len {
                let page = hashes.hashing.page(named, hash, nodes.lists.tokens_of(entry));
                hashes.set(entry, page);
                hash = Some(page);
            }
        }
        let end = list.pages();
        if count == end {
            self.list(node, EntryLists::first_entry(list));
        }
        if let Some(events) = &mut self.events {
            let stored = StoredPages::new(namespace, named, events.step());
            events.store(nodes, &self.hashes, node, end - count..end, medium, stored);
        }
    }

    /// Emits that the last `count` pages of a node are removed from all media, if they could match (`is_present`), and
    /// drops the node from the table if it has no other pages. The caller then removes the pages.
    pub fn detach(&mut self, nodes: &Nodes, node: NodeKey, count: u32, is_present: bool) {
        let end = nodes.entries(node);
        if let Some(events) = self.events.as_mut().filter(|_| is_present) {
            let Sides { device, swap_start } = nodes.sides_of(node);
            let media = [(Medium::Swap, swap_start.max(end - count)..end), (Medium::Device, end - count..device)];
            for (medium, places) in media {
                events.remove(nodes, &self.hashes, node, places, medium);
            }
        }
        if count == end && self.listed[node] > 0 {
            let hash = std::mem::take(&mut self.listed[node]);
            self.firsts.remove(hash, node);
        }
    }

    /// Records where the last `count` entries of a node lie, which were just added, if cells have events.
    fn set_origins(&mut self, nodes: &Nodes, node: NodeKey, scope: Scope, count: u32) {
        let Some(events) = self.events.as_mut().filter(|events| events.origins.are_kept()) else { return };
        let mut before = nodes.entry_before(node, count);
        for (start, len) in nodes.lists.last_runs(&nodes.link[node].list, count) {
            for entry in start..start + len {
                events.origins.set(entry, scope, before);
                before = Some(entry);
            }
        }
    }

    /// Turns the changes of cells into events, except those of old generations.
    pub fn flush_cells(&mut self, nodes: &Nodes, names: &Names, generation: u64, changes: &mut CellChanges) {
        let Self { hashes, events: Some(events), .. } = self else { return };
        let mut rest = changes.list();
        while let Some(first) = rest.first() {
            // The cells of a window are made from its last place to its first one. In the other order, they make one
            // event.
            let follows = |pair: &&[CellChange]| {
                let (last, next) = (pair[0], pair[1]);
                next == CellChange { entry: next.entry, ..last }
                    && events.origins.before(last.entry) == Some(next.entry)
            };
            let more = if first.is_stored { rest.windows(2).take_while(follows).count() } else { 0 };
            let run = rest.split_off(..=more).expect("the run is a part of the list");
            for change in run.iter().rev() {
                if events.origins.scope(change.entry).generation == generation {
                    events.change_cell(nodes, hashes, names, *change);
                }
            }
        }
        if changes.clear() {
            events.restate();
        }
    }

    /// Updates the table after a split. `prefix`, the new parent of `node`, has the node's first pages and takes over
    /// its hash. `node` gets the hash of its new first page.
    #[cold]
    pub fn split(&mut self, nodes: &Nodes, node: NodeKey, prefix: NodeKey) {
        let hash = self.listed[node];
        if hash > 0 {
            self.firsts.replace(hash, node, prefix);
            self.listed[prefix] = hash;
            self.list(node, EntryLists::first_entry(&nodes.link[node].list));
        }
    }
}

impl PrefixTree {
    /// Returns the longest cached prefix of a chain of hashes, and calls `each` with its device pages in order, run by
    /// run. O(hashes matched).
    ///
    /// The match considers group 0 alone. A prompt matches less if other groups lack pages that its next token reads.
    pub fn match_hashes(&self, chain: &[PageHash], mut each: impl FnMut(&[PageId])) -> PrefixMatch {
        let scope = self.present_scope(Namespace::default());
        let none = self.match_at(scope, Cursor::START, 0);
        let Some(column) = &self.chain else { return none };
        let nodes = &self.nodes;
        let (mut found, mut rest) = (none, chain);
        while let Some(&first) = rest.first() {
            let node = column.find(first, |node| {
                let link = &nodes.link[node];
                let present = || nodes.scope[node].generation == self.generation;
                link.parent == found.node
                    && (link.parent.is_some() || present())
                    && column.of(EntryLists::first_entry(&link.list)) == first
            });
            let Some(node) = node else { break };
            if found.node.is_none() {
                found.scope = nodes.scope[node];
            }
            let mut here = 0;
            for (start, len) in nodes.lists.runs(&nodes.link[node].list) {
                let same = column.hashes.of_run(start, len).iter().zip(&rest[here as usize..]);
                let same = same.take_while(|(cached, wanted)| cached == *wanted).count() as u32;
                let on_device = nodes.device_pages(node, here + same).saturating_sub(here);
                found.swap_pages += same - on_device;
                each(nodes.lists.pages_of_run(start, on_device));
                here += same;
                if same < len {
                    break;
                }
            }
            (found.node, found.pages_in_node) = (Some(node), here);
            found.pages += here;
            found.full_pages += here;
            rest = &rest[here as usize..];
            if here < nodes.entries(node) {
                break;
            }
        }
        found
    }

    /// Informs hashes and events that the last `count` pages of a lock's node were added to a medium.
    pub(super) fn chain_attached(&mut self, lock: &PrefixLock, medium: Medium, count: u32) {
        let Self { nodes, chain: Some(chain), names, generation, .. } = self else { return };
        let (Scope { namespace, generation: own }, Some(node)) = (lock.scope(), lock.node()) else { return };
        chain.set_origins(nodes, node, lock.scope(), count);
        if own == *generation {
            chain.attach(nodes, named(names, namespace), node, namespace, medium, count);
        }
    }

    /// Emits that some cached pages of a node are now stored in one more medium. The node is of the present generation.
    #[cold]
    pub(super) fn emit_copied(&mut self, node: NodeKey, medium: Medium, places: Range<u32>) {
        let Self { nodes, names, chain: Some(Chain { hashes, events: Some(events), .. }), .. } = self else { return };
        let namespace = nodes.scope_of(node).namespace;
        let stored = StoredPages::new(namespace, named(names, namespace), events.last_step());
        events.store(nodes, hashes, node, places, medium, stored);
    }

    /// Emits that some pages of a node are removed from a medium. The caller then removes them. The node is of the
    /// present generation.
    pub(super) fn emit_removed(&mut self, node: NodeKey, medium: Medium, places: Range<u32>) {
        let Self { nodes, chain: Some(Chain { hashes, events: Some(events), .. }), .. } = self else { return };
        events.remove(nodes, hashes, node, places, medium);
    }

    /// Calls the sink with the events since the last drain, in order. After an overflow, calls it with `Cleared` and
    /// then with the whole tree, parents first. If the sink panics, the next drain is as after an overflow. O(pages of
    /// the events), after an overflow O(tree).
    pub(crate) fn drain_events(&mut self, sink: impl FnMut(Event<'_>)) {
        let Self { nodes, names, chain: Some(chain), cells, generation, .. } = self else { return };
        if let Some(cells) = cells {
            chain.flush_cells(nodes, names, *generation, &mut cells.changes);
        }
        let Chain { hashes, events: Some(events), .. } = chain else { return };
        let cells = |entry, medium| cells.as_ref().map_or(0, |cells| cells.groups_in(entry, medium));
        events.drain(nodes, hashes, names, *generation, cells, sink);
    }

    /// Returns the buffer of events, if pages are hashed and the config enables events.
    pub(crate) fn events(&mut self) -> Option<&mut EventBuffer> {
        self.chain.as_mut()?.events.as_mut()
    }
}

#[cfg(all(test, any(feature = "sha256", feature = "xxhash")))]
impl Chain {
    /// Changes the hash of an entry, for tests of the audit.
    pub fn spoil(&mut self, entry: u32) {
        let hash = self.of(entry).to_u64();
        self.hashes.set(entry, PageHash::from(!hash));
    }

    /// Removes a node from the table of hashes, for tests of the audit.
    pub fn unlist(&mut self, node: NodeKey) {
        self.firsts.remove(self.listed[node], node);
    }
}
