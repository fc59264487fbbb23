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
//! Not here: the form of an event (`event.rs`), hashes (`chain.rs`).

use std::ops::Range;
use std::sync::Arc;

use bytemuck::Zeroable;
use slotmap::{Key, KeyData};

use crate::event::{Event, Medium, Stored};
use crate::hash::{Hashing, NamespaceNames, PageHash, PageHashes};
use crate::id::{Namespace, NodeKey, PrefixLock, Scope, StepId, TokenId};
use crate::memory::{Memory, OutOfMemory};

use super::PrefixTree;
use super::column::RareColumn;

/// One event without its hashes and tokens.
#[derive(Clone)]
struct Record {
    /// Number of pages.
    count: u32,
    medium: Medium,
    stored: Option<StoredPages>,
}

/// Pages that were stored: their namespace, the page before them, and the step that computes them or a later one.
#[derive(Clone)]
struct StoredPages {
    namespace: Namespace,
    /// The names at the time of storing: the namespace may be forgotten before the drain.
    names: Arc<NamespaceNames>,
    parent: Option<PageHash>,
    step: StepId,
}

/// The events since the last drain.
pub(super) struct EventBuffer {
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
    /// By node, the state of the last walk over the whole tree.
    walked: RareColumn<Walked>,
    /// Number of walks so far.
    walks: u64,
}

/// Holds the buffer during a drain and puts it back into the tree, even if the sink panics. A sink that panics may have
/// lost events, so the next drain then starts over.
struct Drain<'a> {
    tree: &'a mut PrefixTree,
    events: Option<EventBuffer>,
    is_done: bool,
}

impl Drop for Drain<'_> {
    fn drop(&mut self) {
        if !self.is_done {
            self.events.iter_mut().for_each(|events| events.overflow());
        }
        self.tree.events = self.events.take();
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
    pub fn new(
        page_count: u32,
        page_size: u32,
        width: usize,
        capacity: u32,
        memory: &mut Memory,
    ) -> Result<Self, OutOfMemory> {
        let pages = u64::from(capacity);
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
            walked: RareColumn::new(page_count, memory)?,
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
    fn clear(&mut self) {
        self.empty();
        (self.cleared, self.overflowed) = (true, false);
    }

    /// Drops all records: the next drain emits the whole tree.
    fn overflow(&mut self) {
        self.empty();
        self.overflowed = true;
    }

    /// Returns whether `count` more pages fit; if not, the buffer overflows.
    fn has_room(&mut self, count: u32) -> bool {
        if !self.overflowed && count > self.capacity - self.pages {
            self.overflow();
        }
        !self.overflowed
    }

    /// Records that a medium has received pages after the page `parent`. `step` or an earlier step computes them.
    fn push_stored(
        &mut self,
        (medium, step): (Medium, StepId),
        namespace: Namespace,
        names: &Arc<NamespaceNames>,
        parent: Option<PageHash>,
        hashes: PageHashes<'_>,
        tokens: &[TokenId],
    ) {
        let (count, width) = (hashes.len() as u32, hashes.width());
        if !self.has_room(count) {
            return;
        }
        let last = self.hashes.len().checked_sub(width).map(|at| &self.hashes[at..]);
        let follows = parent.is_some_and(|parent| last == Some(parent.bytes(width)));
        match self.records.last_mut() {
            Some(Record { count: joined, medium: same, stored: Some(last) })
                if follows && last.namespace == namespace && *same == medium =>
            {
                *joined += count;
                last.step = step.max(last.step);
            }
            _ => {
                let names = Arc::clone(names);
                let stored = Some(StoredPages { namespace, names, parent, step });
                self.records.push(Record { count, medium, stored });
            }
        }
        self.pages += count;
        self.hashes.extend_from_slice(hashes.as_bytes());
        self.tokens.extend_from_slice(tokens);
    }

    /// Records that the pages of one run are removed. The runs of a span are recorded from the last to the first, so
    /// that its pages are in order of depth, deepest first.
    fn push_removed(&mut self, medium: Medium, hashes: PageHashes<'_>) {
        let count = hashes.len() as u32;
        if !self.has_room(count) {
            return;
        }
        match self.records.last_mut() {
            Some(Record { count: joined, medium: same, stored: None }) if *same == medium => {
                *joined += count;
            }
            _ => self.records.push(Record { count, medium, stored: None }),
        }
        self.pages += count;
        hashes.as_bytes().rchunks(hashes.width()).for_each(|hash| self.hashes.extend(hash));
    }

    /// Calls the sink with all records, in order.
    fn drain(&mut self, hashing: Hashing, page_size: usize, sink: &mut impl FnMut(Event<'_>)) {
        if std::mem::take(&mut self.cleared) {
            sink(Event::Cleared);
        }
        let width = hashing.width();
        let (mut hashes, mut tokens) = (&self.hashes[..], &self.tokens[..]);
        for record in &self.records {
            let own;
            (own, hashes) = hashes.split_at(record.count as usize * width);
            let own = PageHashes::new(hashing, own);
            let Some(StoredPages { namespace, names, parent, step }) = &record.stored else {
                sink(Event::Removed { medium: record.medium, hashes: own });
                continue;
            };
            let own_tokens;
            (own_tokens, tokens) = tokens.split_at(record.count as usize * page_size);
            sink(Event::Stored(Stored {
                namespace: *namespace,
                names,
                medium: record.medium,
                parent: *parent,
                hashes: own,
                tokens: own_tokens,
                step: *step,
            }));
        }
        self.empty();
    }
}

impl PrefixTree {
    /// Turns events on, for an empty tree with hashes. `capacity` is the maximum number of pages in the buffer.
    pub(crate) fn keep_events(&mut self, capacity: u32, memory: &mut Memory) -> Result<(), OutOfMemory> {
        let width = self.chain.as_ref().expect("events need hashes").hashing.width();
        self.events = Some(EventBuffer::new(self.most_pages, self.page_size, width, capacity, memory)?);
        Ok(())
    }

    /// Emits the last `count` pages of a lock's node as stored. They were just added and are hashed.
    pub(super) fn emit_stored(&mut self, lock: &PrefixLock, medium: Medium, count: u32) {
        let Some(events) = &self.events else { return };
        let (scope, step) = (lock.scope(), events.step);
        if scope.generation == self.generation {
            let node = lock.node().expect("the lock moved to the new pages");
            let end = self.link[node].span.pages();
            self.emit_places(node, scope.namespace, (medium, step), end - count..end);
        }
    }

    /// Emits that some cached pages of a node are now stored in one more medium. The node is of the present generation.
    #[cold]
    pub(super) fn emit_copied(&mut self, node: NodeKey, medium: Medium, places: Range<u32>) {
        if let Some(events) = &self.events {
            let (step, namespace) = (events.last_step, self.scope_of(node).namespace);
            self.emit_places(node, namespace, (medium, step), places);
        }
    }

    fn emit_places(&mut self, node: NodeKey, namespace: Namespace, stored: (Medium, StepId), places: Range<u32>) {
        let count = self.link[node].span.pages() - places.start;
        let before = self.entry_before(node, count);
        let (Some(events), Some(chain)) = (&mut self.events, &self.chain) else { return };
        let (mut parent, mut rest) = (before.map(|entry| chain.of(entry)), places.len() as u32);
        let names = chain.names_of(namespace);
        for (start, len) in self.spans.last_runs(&self.link[node].span, count) {
            let len = len.min(rest);
            if len == 0 {
                break;
            }
            rest -= len;
            let (hashes, tokens) = (chain.of_run(start, len), self.spans.tokens_of_run(start, len));
            events.push_stored(stored, namespace, names, parent, hashes, tokens);
            parent = Some(chain.of(start + len - 1));
        }
    }

    /// Emits that the last `count` pages of a node are removed from all media. The caller then removes them. The node
    /// is of the present generation.
    pub(super) fn emit_detached(&mut self, node: NodeKey, count: u32) {
        let end = self.link[node].span.pages();
        let swap_start = self.swap.as_ref().map_or(end, |swap| swap.residency[node].swap_start);
        self.emit_removed(node, Medium::Swap, swap_start.max(end - count)..end);
        self.emit_removed(node, Medium::Device, end - count..self.device_pages(node, end));
    }

    /// Emits that some pages of a node are removed from a medium. The caller then removes them. The node is of the
    /// present generation.
    pub(super) fn emit_removed(&mut self, node: NodeKey, medium: Medium, places: Range<u32>) {
        if places.is_empty() {
            return;
        }
        let (Some(events), Some(chain)) = (&mut self.events, &self.chain) else { return };
        let span = &self.link[node].span;
        let (count, mut behind) = (span.pages() - places.start, span.pages() - places.end);
        for (start, len) in self.spans.last_runs_back(span, count) {
            let skipped = behind.min(len);
            behind -= skipped;
            if len > skipped {
                events.push_removed(medium, chain.of_run(start, len - skipped));
            }
        }
    }

    /// Returns the namespace and generation of a node's prefix. O(nodes above).
    fn scope_of(&self, node: NodeKey) -> Scope {
        let mut first = node;
        while let Some(parent) = self.link[first].parent {
            first = parent;
        }
        self.scope[first]
    }

    /// Emits that no prefix is cached.
    pub(super) fn emit_cleared(&mut self) {
        self.events.iter_mut().for_each(|events| events.clear());
    }

    /// Sets the step that computes the pages that are published next.
    #[inline]
    pub(crate) fn publish_as_of(&mut self, step: StepId) {
        if let Some(events) = &mut self.events {
            events.step = step;
            events.last_step = events.last_step.max(step);
        }
    }

    /// Makes the next drain emit `Cleared` and then all cached pages.
    pub(crate) fn restate_events(&mut self) {
        self.events.iter_mut().for_each(|events| events.overflow());
    }

    /// Calls the sink with the events since the last drain, in order. After an overflow, calls it with `Cleared` and
    /// then with the whole tree, parents first. If the sink panics, the next drain is as after an overflow. O(pages of
    /// the events), after an overflow O(tree).
    pub(crate) fn drain_events(&mut self, mut sink: impl FnMut(Event<'_>)) {
        let events = self.events.take();
        let mut drain = Drain { tree: self, events, is_done: false };
        let (tree, Some(events)) = (&*drain.tree, &mut drain.events) else { return };
        if events.overflowed {
            (events.overflowed, events.cleared) = (false, false);
            sink(Event::Cleared);
            tree.walk_present(events, &mut sink);
        } else {
            let chain = tree.chain.as_ref().expect("events need hashes");
            events.drain(chain.hashing, tree.page_size as usize, &mut sink);
        }
        drain.is_done = true;
    }

    /// Calls the sink with all cached pages, parents first: the walk goes from each node up to the first visited one,
    /// and down again.
    fn walk_present(&self, events: &mut EventBuffer, sink: &mut impl FnMut(Event<'_>)) {
        events.walks += 1;
        let (walk, step) = (events.walks, events.last_step);
        let walked = &mut events.walked;
        for first in self.link.keys() {
            let (mut at, mut below) = (first, 0);
            if walked[first].mark / 2 == walk {
                continue;
            }
            // Up, storing the way back.
            let above = loop {
                walked[at] = Walked { below, mark: 2 * walk, ..Walked::default() };
                match self.link[at].parent {
                    Some(parent) if walked[parent].mark / 2 == walk => break walked[parent],
                    Some(parent) => (at, below) = (parent, at.data().as_ffi()),
                    None => {
                        let scope = self.scope[at];
                        let present = u64::from(scope.generation == self.generation);
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
                    self.emit_node(at, Namespace::new(above.namespace), step, sink);
                }
                match below {
                    0 => break,
                    below => at = KeyData::from_ffi(below).into(),
                }
            }
        }
    }

    /// Calls the sink with one node's pages, run by run.
    fn emit_node(&self, node: NodeKey, namespace: Namespace, step: StepId, sink: &mut impl FnMut(Event<'_>)) {
        let chain = self.chain.as_ref().expect("events need hashes");
        let names = chain.names_of(namespace);
        let link = &self.link[node];
        let mut parent = link.parent.map(|parent| chain.of(self.spans.last_entry(&self.link[parent].span)));
        let entries = link.span.pages();
        let swap_start = self.swap.as_ref().map_or(entries, |swap| swap.residency[node].swap_start);
        let device = self.device_pages(node, entries);
        let mut before = 0;
        for (start, len) in self.spans.runs(&link.span) {
            for (medium, places) in [(Medium::Device, 0..device), (Medium::Swap, swap_start..entries)] {
                let from = places.start.clamp(before, before + len) - before;
                let to = places.end.clamp(before, before + len) - before;
                if from == to {
                    continue;
                }
                let (start, len) = (start + from, to - from);
                let tokens = self.spans.tokens_of_run(start, len);
                let hashes = chain.of_run(start, len);
                let parent = if from == 0 { parent } else { Some(chain.of(start - 1)) };
                sink(Event::Stored(Stored { namespace, names, medium, parent, hashes, tokens, step }));
            }
            parent = Some(chain.of(start + len - 1));
            before += len;
        }
    }
}
