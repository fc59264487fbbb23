//! A bounded buffer of events about the cached prefixes, which the host drains.
//!
//! ```text
//! records  [stored 2 | removed 1 | stored 3]      pages of each event, oldest first
//! hashes   [h h      | h         | h h h   ]      of all pages
//! tokens   [tt tt    |           | tt tt tt]      of the stored pages
//! ```
//!
//! The buffer joins consecutive removals from one medium. It joins consecutive stores to one medium if each continues
//! the prefix of the one before. An overflow empties the buffer. The next drain then emits `Cleared`, and after that
//! the whole tree as stored pages. So the events suffice to follow the cache, however rarely the host drains them. A
//! sink that panics leaves the buffer as after an overflow.
//!
//! Events are about the present generation only: a page that an old generation removes later may have the same hash as
//! a page of the new one.
//!
//! An event about a cell has the hash and the tokens of the cell's entry, and counts as one page. The pages of one
//! record belong to one group.
//!
//! Not here: the form of an event (`event.rs`), hashes (`chain.rs`), the changes of cells (`cell_events.rs`).

use std::ops::Range;
use std::sync::Arc;

use bytemuck::Zeroable;
use slotmap::{Key, KeyData};

use crate::event::{Event, Medium, Stored};
use crate::hash::{Hashing, Named, Names, NamespaceNames, PageHash, PageHashes};
use crate::id::{Namespace, NodeKey, StepId, TokenId};
use crate::memory::{Memory, OutOfMemory};

use super::cell_events::{CellChange, Origins};
use super::column::RareColumn;
use super::hashes::{Hashes, named};
use super::nodes::{Nodes, Sides};

/// One event without its hashes and tokens.
#[derive(Clone)]
struct Record {
    /// Number of pages.
    count: u32,
    part: Part,
    stored: Option<StoredPages>,
}

/// The group and the medium of pages.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Part {
    group: u16,
    medium: Medium,
}

impl Part {
    fn pages(medium: Medium) -> Self {
        Self { group: 0, medium }
    }
}

/// Pages that were stored: their namespace, the page before them, and the step that computes them or a later one.
#[derive(Clone)]
pub(super) struct StoredPages {
    namespace: Namespace,
    /// The names at the time of storing: the namespace may be forgotten before the drain.
    names: Arc<NamespaceNames>,
    parent: Option<PageHash>,
    step: StepId,
}

impl StoredPages {
    pub fn new(namespace: Namespace, named: &Named, step: StepId) -> Self {
        Self { namespace, names: Arc::clone(&named.names), parent: None, step }
    }
}

/// The events since the last drain.
pub(crate) struct EventBuffer {
    /// Maximum number of pages of all records.
    capacity: u32,
    /// Number of pages of all records.
    pages: u32,
    records: Vec<Record>,
    hashes: Vec<u8>,
    tokens: Vec<TokenId>,
    /// Whether a `Cleared` precedes the records.
    cleared: bool,
    /// Whether events were lost, so that the next drain emits the whole tree.
    overflowed: bool,
    /// The step that computes the pages being published.
    step: StepId,
    /// The latest value of `step` so far.
    last_step: StepId,
    /// Where entries lie, if cells have events.
    pub(super) origins: Origins,
    /// By node, the state of the last walk over the whole tree.
    walked: RareColumn<Walked>,
    /// Number of walks so far.
    walks: u64,
}

/// Holds the buffer during a drain. A sink that panics may have lost events, so the next drain then starts over.
struct Drain<'a> {
    events: &'a mut EventBuffer,
    is_done: bool,
}

impl Drop for Drain<'_> {
    fn drop(&mut self) {
        if !self.is_done {
            self.events.restate();
        }
    }
}

/// The record of a node during a walk over the whole tree, by which the walk finds the way back down.
#[derive(Clone, Copy, Default, Zeroable)]
#[repr(C)]
struct Walked {
    /// The child from which the walk came up; 0: none.
    below: u64,
    /// Namespace of the node's prefix.
    namespace: u64,
    /// Twice the number of the walk, plus 1 if the prefix is of the present generation.
    mark: u64,
}

impl EventBuffer {
    /// Creates a buffer of at most `capacity` pages for a tree of at most `node_count` nodes.
    pub(super) fn new(
        node_count: u32,
        page_size: u32,
        hashing: Hashing,
        capacity: u32,
        origins: Origins,
        memory: &mut Memory,
    ) -> Result<Self, OutOfMemory> {
        let (pages, width) = (u64::from(capacity), hashing.width());
        Ok(Self {
            capacity,
            pages: 0,
            records: memory.reserved(pages)?,
            hashes: memory.reserved(pages * width as u64)?,
            tokens: memory.reserved(pages * u64::from(page_size))?,
            cleared: false,
            overflowed: false,
            step: StepId::default(),
            last_step: StepId::default(),
            origins,
            walked: RareColumn::new(node_count, memory)?,
            walks: 0,
        })
    }

    fn empty(&mut self) {
        self.pages = 0;
        self.records.clear();
        self.hashes.clear();
        self.tokens.clear();
    }

    /// Records that the cache is empty.
    pub fn clear(&mut self) {
        self.empty();
        (self.cleared, self.overflowed) = (true, false);
    }

    /// Makes the next drain emit `Cleared` and then all cached pages, in place of the records.
    pub fn restate(&mut self) {
        self.empty();
        self.overflowed = true;
    }

    /// Returns whether `count` more pages fit; if not, the buffer overflows.
    fn has_room(&mut self, count: u32) -> bool {
        if !self.overflowed && count > self.capacity - self.pages {
            self.restate();
        }
        !self.overflowed
    }

    /// Sets the step that computes the pages that are published next.
    #[inline]
    pub fn publish_as_of(&mut self, step: StepId) {
        self.step = step;
        self.last_step = self.last_step.max(step);
    }

    /// Returns the step that computes the pages that are published now.
    pub(super) fn step(&self) -> StepId {
        self.step
    }

    /// Returns the latest step whose pages were published so far.
    pub(super) fn last_step(&self) -> StepId {
        self.last_step
    }

    /// Records that a medium has received the pages at some places of a node.
    pub(super) fn store(
        &mut self,
        nodes: &Nodes,
        hashes: &Hashes,
        node: NodeKey,
        places: Range<u32>,
        medium: Medium,
        mut stored: StoredPages,
    ) {
        let count = nodes.entries(node) - places.start;
        stored.parent = nodes.entry_before(node, count).map(|entry| hashes.of(entry));
        let mut rest = places.len() as u32;
        for (start, len) in nodes.lists.last_runs(&nodes.link[node].list, count) {
            let len = len.min(rest);
            if len == 0 {
                break;
            }
            rest -= len;
            let part = Part::pages(medium);
            self.push_stored(part, &stored, hashes.of_run(start, len), nodes.lists.tokens_of_run(start, len));
            stored.parent = Some(hashes.of(start + len - 1));
        }
    }

    /// Records that some pages of a node are removed from a medium. The caller then removes them.
    pub(super) fn remove(&mut self, nodes: &Nodes, hashes: &Hashes, node: NodeKey, places: Range<u32>, medium: Medium) {
        if places.is_empty() {
            return;
        }
        let list = &nodes.link[node].list;
        let (count, mut behind) = (list.pages() - places.start, list.pages() - places.end);
        for (start, len) in nodes.lists.last_runs_back(list, count) {
            let skipped = behind.min(len);
            behind -= skipped;
            if len > skipped {
                self.push_removed(Part::pages(medium), hashes.of_run(start, len - skipped));
            }
        }
    }

    /// Records a change of a cell, whose prefix is of the present generation.
    pub(super) fn change_cell(&mut self, nodes: &Nodes, hashes: &Hashes, names: &Names, change: CellChange) {
        let CellChange { group, entry, medium, is_stored } = change;
        let (part, own) = (Part { group: group as u16 + 1, medium }, hashes.of_run(entry, 1));
        if !is_stored {
            return self.push_removed(part, own);
        }
        let namespace = self.origins.scope(entry).namespace;
        let mut stored = StoredPages::new(namespace, named(names, namespace), self.last_step);
        stored.parent = self.origins.before(entry).map(|before| hashes.of(before));
        self.push_stored(part, &stored, own, nodes.lists.tokens_of(entry));
    }

    /// Records that a medium has received a run of pages.
    fn push_stored(&mut self, part: Part, stored: &StoredPages, hashes: PageHashes<'_>, tokens: &[TokenId]) {
        let (count, width) = (hashes.len() as u32, hashes.width());
        if !self.has_room(count) {
            return;
        }
        let last = self.hashes.len().checked_sub(width).map(|at| &self.hashes[at..]);
        let follows = stored.parent.is_some_and(|parent| last == Some(parent.bytes(width)));
        match self.records.last_mut() {
            Some(Record { count: joined, part: same, stored: Some(last) })
                if follows && last.namespace == stored.namespace && *same == part =>
            {
                *joined += count;
                last.step = stored.step.max(last.step);
            }
            _ => self.records.push(Record { count, part, stored: Some(stored.clone()) }),
        }
        self.pages += count;
        self.hashes.extend_from_slice(hashes.as_bytes());
        self.tokens.extend_from_slice(tokens);
    }

    /// Records that the pages of one run are removed. The runs of a list are recorded from the last to the first, so
    /// that its pages are in order of depth, deepest first.
    fn push_removed(&mut self, part: Part, hashes: PageHashes<'_>) {
        let count = hashes.len() as u32;
        if !self.has_room(count) {
            return;
        }
        match self.records.last_mut() {
            Some(Record { count: joined, part: same, stored: None }) if *same == part => {
                *joined += count;
            }
            _ => self.records.push(Record { count, part, stored: None }),
        }
        self.pages += count;
        hashes.as_bytes().rchunks(hashes.width()).for_each(|hash| self.hashes.extend(hash));
    }

    /// Implements [`drain_events`](super::PrefixTree::drain_events). `generation` is the present one. `cells` returns
    /// the groups of the cells that an entry has in a medium, as bits.
    pub(super) fn drain(
        &mut self,
        nodes: &Nodes,
        hashes: &Hashes,
        names: &Names,
        generation: u64,
        cells: impl Fn(u32, Medium) -> u32,
        mut sink: impl FnMut(Event<'_>),
    ) {
        let mut drain = Drain { events: self, is_done: false };
        let events = &mut *drain.events;
        if events.overflowed {
            (events.overflowed, events.cleared) = (false, false);
            sink(Event::Cleared);
            let has_cells = events.origins.are_kept();
            events.walk_present(nodes, generation, |node, namespace, step| {
                let names = &named(names, namespace).names;
                emit_node(nodes, hashes, node, namespace, names, step, &mut sink);
                if has_cells {
                    emit_cells(nodes, hashes, node, namespace, names, step, &cells, &mut sink);
                }
            });
        } else {
            events.drain_records(hashes.hashing, nodes.page_size as usize, &mut sink);
        }
        drain.is_done = true;
    }

    /// Calls the sink with all records, in order.
    fn drain_records(&mut self, hashing: Hashing, page_size: usize, sink: &mut impl FnMut(Event<'_>)) {
        if std::mem::take(&mut self.cleared) {
            sink(Event::Cleared);
        }
        let width = hashing.width();
        let (mut hashes, mut tokens) = (&self.hashes[..], &self.tokens[..]);
        for record in &self.records {
            let own;
            (own, hashes) = hashes.split_at(record.count as usize * width);
            let own = PageHashes::new(hashing, own);
            let (group, medium) = (record.part.group.into(), record.part.medium);
            let Some(StoredPages { namespace, names, parent, step }) = &record.stored else {
                sink(Event::Removed { group, medium, hashes: own });
                continue;
            };
            let own_tokens;
            (own_tokens, tokens) = tokens.split_at(record.count as usize * page_size);
            sink(Event::Stored(Stored {
                namespace: *namespace,
                names,
                group,
                medium,
                parent: *parent,
                hashes: own,
                tokens: own_tokens,
                step: *step,
            }));
        }
        self.empty();
    }

    /// Calls `emit` with all nodes of the present generation, their namespaces and the last step, parents first. The
    /// walk goes from each node up to the first visited one, and down again.
    fn walk_present(&mut self, nodes: &Nodes, generation: u64, mut emit: impl FnMut(NodeKey, Namespace, StepId)) {
        self.walks += 1;
        let (walk, step) = (self.walks, self.last_step);
        let walked = &mut self.walked;
        for first in nodes.link.keys() {
            let (mut at, mut below) = (first, 0);
            if walked[first].mark / 2 == walk {
                continue;
            }
            // Up, storing the way back.
            let above = loop {
                walked[at] = Walked { below, mark: 2 * walk, ..Walked::default() };
                match nodes.link[at].parent {
                    Some(parent) if walked[parent].mark / 2 == walk => break walked[parent],
                    Some(parent) => (at, below) = (parent, at.data().as_ffi()),
                    None => {
                        let scope = nodes.scope[at];
                        let present = u64::from(scope.generation == generation);
                        let (namespace, mark) = (scope.namespace.raw(), 2 * walk + present);
                        break Walked { namespace, mark, ..Walked::default() };
                    }
                }
            };
            // Down.
            loop {
                let below = walked[at].below;
                walked[at] = Walked { below, ..above };
                if above.mark % 2 == 1 {
                    emit(at, Namespace::new(above.namespace), step);
                }
                match below {
                    0 => break,
                    below => at = KeyData::from_ffi(below).into(),
                }
            }
        }
    }
}

/// Calls the sink with one node's pages, run by run.
fn emit_node(
    nodes: &Nodes,
    hashes: &Hashes,
    node: NodeKey,
    namespace: Namespace,
    names: &NamespaceNames,
    step: StepId,
    sink: &mut impl FnMut(Event<'_>),
) {
    let link = &nodes.link[node];
    let mut parent = link.parent.map(|parent| hashes.of(nodes.last_entry(parent)));
    let Sides { device, swap_start } = nodes.sides_of(node);
    let entries = link.list.pages();
    let mut before = 0;
    for (start, len) in nodes.lists.runs(&link.list) {
        for (medium, places) in [(Medium::Device, 0..device), (Medium::Swap, swap_start..entries)] {
            let from = places.start.clamp(before, before + len) - before;
            let to = places.end.clamp(before, before + len) - before;
            if from == to {
                continue;
            }
            let (start, len) = (start + from, to - from);
            let tokens = nodes.lists.tokens_of_run(start, len);
            let parent = if from == 0 { parent } else { Some(hashes.of(start - 1)) };
            let hashes = hashes.of_run(start, len);
            sink(Event::Stored(Stored { namespace, names, group: 0, medium, parent, hashes, tokens, step }));
        }
        parent = Some(hashes.of(start + len - 1));
        before += len;
    }
}

/// Calls the sink with the cells of one node's entries: those of neighbouring entries together.
#[expect(clippy::too_many_arguments, reason = "the columns and the fields of the events")]
fn emit_cells(
    nodes: &Nodes,
    hashes: &Hashes,
    node: NodeKey,
    namespace: Namespace,
    names: &NamespaceNames,
    step: StepId,
    cells: &impl Fn(u32, Medium) -> u32,
    sink: &mut impl FnMut(Event<'_>),
) {
    let link = &nodes.link[node];
    let mut before = link.parent.map(|parent| nodes.last_entry(parent));
    for (start, len) in nodes.lists.runs(&link.list) {
        let end = start + len;
        for medium in [Medium::Device, Medium::Swap] {
            let groups = (start..end).fold(0, |all, entry| all | cells(entry, medium));
            for group in (0..u32::BITS).filter(|group| groups >> group & 1 > 0) {
                let has = |entry: &u32| cells(*entry, medium) >> group & 1 > 0;
                let mut from = start;
                while let Some(first) = (from..end).find(has) {
                    from = (first..end).find(|entry| !has(entry)).unwrap_or(end);
                    let parent = if first == start { before } else { Some(first - 1) };
                    let (parent, hashes) = (parent.map(|entry| hashes.of(entry)), hashes.of_run(first, from - first));
                    let (tokens, group) = (nodes.lists.tokens_of_run(first, from - first), group + 1);
                    sink(Event::Stored(Stored { namespace, names, group, medium, parent, hashes, tokens, step }));
                }
            }
        }
        before = Some(end - 1);
    }
}
