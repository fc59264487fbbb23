//! Pages in swap memory: evicted pages keep their entries in the tree and come back when a prompt matches them.
//!
//! ```text
//! entries of a node   0 .. swap_start .. device .. len
//! on the device       [             |            ]   those below `device`
//! in swap memory              [                  ]   those from `swap_start` on
//!                       dirty   clean   swap-only
//! ```
//!
//! * H1. A swap page is in one state (`swap/`); Cached pages belong to entries and cells.
//! * H2. Every entry has a page. A node has device pages only if its parent is entirely on the device.
//! * H3. A node in use has no clean entries. Clean entries of idle nodes are counted.
//! * H4. No node older than a cursor has what the cursor looks for: device pages, swap-only entries, dirty entries.
//! * H6. No save waits for the backend between calls, and a Cached swap page has the bytes of a save that did not fail,
//!   or of a fetch.
//!
//! By H2, all entries deeper than a swap-only entry are swap-only, and by T4 they are older. So the oldest swap-only
//! entry is the last entry of a leaf.
//!
//! Cells move by the same rules, each as an entry of its own (`cell_moves.rs`).
//!
//! The tree owns the pool of swap pages, because locking an idle node frees the swap pages of its clean entries.
//!
//! Not here: moves to swap memory (`offload.rs`) and back (`restore.rs`), the contents of pages.

use crate::event::Medium;
use crate::id::{MoveId, NodeKey, PageId, PrefixLock, SwapPageId};
use crate::memory::{Memory, OutOfMemory};
use crate::swap::SwapPool;

use super::PrefixTree;
use super::column::RareColumn;
use super::fetches::Fetches;
use super::load_batch::LoadBatch;
use super::puts::Puts;
use super::residency::{NO_PAGE, NO_SWAP_PAGE, Residency, Seek};
use super::save_batch::SaveBatch;
use super::span::SpanStore;
use super::walk::Cursor;

/// Counters of pages and of moves, over the whole run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct SwapCounts {
    /// Pages selected for saves, including cancelled and failed saves.
    pub saved: u64,
    /// Number of `saved` pages that were saved at their eviction, because no earlier save had copied them.
    pub forced: u64,
    pub loaded: u64,
    /// Swap pages of entries and cells that were dropped so that other pages could use them.
    pub evicted: u64,
    /// Pages of entries and cells dropped from the tree to make room or after a failed save. An entry is not counted if
    /// a store has its page.
    pub lost: u64,
    /// Pages whose save failed.
    pub failed: u64,
}

/// The columns and counters of swap memory.
pub(super) struct Swap {
    pub pool: SwapPool,
    /// The swap page of each entry; [`NO_SWAP_PAGE`] for an entry without one.
    pub of_entry: Vec<SwapPageId>,
    pub residency: RareColumn<Residency>,
    /// The oldest node that may have what each [`Seek`] looks for.
    pub cursors: [Option<NodeKey>; 3],
    /// Clean entries of idle nodes, and pages of clean cells.
    pub clean: u32,
    /// The saves that the engine has not yet passed to the backend.
    pub saves: SaveBatch,
    /// Nodes whose entries a load or a sequence has just restored, each with the number of these entries.
    pub restored: Vec<(NodeKey, u32)>,
    /// Number of the last batch of saves or loads for the backend.
    pub last_move: MoveId,
    /// The last load to each device page, the last load of all, and the last load that is known to be done.
    loads: Vec<MoveId>,
    last_load: MoveId,
    loaded: MoveId,
    pub puts: Puts,
    pub fetches: Fetches,
    /// Number of swap pages; the pages of the stage follow them.
    swap_pages: u32,
    stage_pages: u32,
    pub counts: SwapCounts,
    /// Number of nodes and cells that seeks have visited.
    #[cfg(test)]
    pub visits: u64,
}

impl Swap {
    fn new(
        page_count: u32,
        swap_pages: u32,
        stage_pages: Option<u32>,
        memory: &mut Memory,
    ) -> Result<Self, OutOfMemory> {
        let nodes = page_count + swap_pages;
        let entries = SpanStore::entry_count(nodes);
        let [put, fetched] = if stage_pages.is_some() { [entries, swap_pages] } else { [0; 2] };
        let stage_pages = stage_pages.unwrap_or(0);
        Ok(Self {
            pool: SwapPool::new(swap_pages, memory)?,
            of_entry: memory.filled(entries.into(), NO_SWAP_PAGE)?,
            residency: RareColumn::new(nodes, memory)?,
            cursors: [None; 3],
            clean: 0,
            saves: SaveBatch::new(page_count, memory)?,
            restored: memory.reserved(page_count.into())?,
            last_move: MoveId::default(),
            loads: memory.zeroed(page_count.into())?,
            last_load: MoveId::default(),
            loaded: MoveId::default(),
            puts: Puts::new(put, stage_pages, memory)?,
            fetches: Fetches::new(fetched, memory)?,
            swap_pages,
            stage_pages,
            counts: SwapCounts::default(),
            #[cfg(test)]
            visits: 0,
        })
    }

    /// Returns the number of the next batch of moves.
    pub fn next_move(&self) -> MoveId {
        MoveId::new(self.last_move.raw() + 1)
    }

    /// Frees the swap page of an entry.
    pub fn drop_swap_page(&mut self, entry: u32) {
        let page = std::mem::replace(&mut self.of_entry[entry as usize], NO_SWAP_PAGE);
        self.free_swap_page(page);
    }

    /// Frees the swap page of an entry or a cell. Cancels the save to the page, if the engine has not yet passed the
    /// save to the backend. A cancelled batch leaves its number to the next one, so the number alone does not identify
    /// a save.
    pub fn free_swap_page(&mut self, page: SwapPageId) {
        self.pool.drop_page(page);
        if !self.saves.is_empty() && self.pool.last_save(page) == self.next_move() {
            self.saves.cancel(page);
        }
    }

    /// Returns whether dropping an entry frees its swap page, without unfinished moves.
    pub fn is_droppable(&self, entry: u32, saved: MoveId, loaded: MoveId) -> bool {
        let page = self.of_entry[entry as usize];
        !self.pool.is_read(page) && self.pool.is_idle(page, saved, loaded)
    }
}

impl PrefixTree {
    /// Turns swap memory on. The tree must be empty, and created for the device pages and the swap pages together.
    /// `stage_pages` is `None` without stores, which need hashes and one group.
    pub(crate) fn keep_swap(
        &mut self,
        page_count: u32,
        swap_pages: u32,
        stage_pages: Option<u32>,
        memory: &mut Memory,
    ) -> Result<(), OutOfMemory> {
        self.swap = Some(Box::new(Swap::new(page_count, swap_pages, stage_pages, memory)?));
        self.keep_ages(page_count + swap_pages, memory)
    }

    /// Returns whether evicted pages move to swap memory.
    #[inline]
    pub(crate) fn has_swap(&self) -> bool {
        self.swap.is_some()
    }

    pub(super) fn swap_ref(&self) -> &Swap {
        self.swap.as_ref().expect("there is swap memory")
    }

    pub(super) fn swap_mut(&mut self) -> &mut Swap {
        self.swap.as_mut().expect("there is swap memory")
    }

    /// Makes the swap pages below `ready` usable, and the stage once all its pages are ready.
    pub(crate) fn set_swap_ready(&mut self, ready: u32) {
        let swap = self.swap_mut();
        swap.pool.set_ready(ready);
        if ready >= swap.swap_pages + swap.stage_pages {
            swap.puts.set_ready(swap.swap_pages);
        }
    }

    /// Returns the counters of swap memory.
    pub(crate) fn swap_counts(&self) -> SwapCounts {
        self.swap.as_ref().map_or(SwapCounts::default(), |swap| swap.counts)
    }

    /// Returns the numbers of Cached and of free swap pages.
    pub(crate) fn swap_page_counts(&self) -> (u32, u32) {
        let pool = self.swap.as_ref().map(|swap| &swap.pool);
        pool.map_or((0, 0), |pool| (pool.cached_count(), pool.free_count()))
    }

    /// Returns the number of clean entries of idle nodes, and of pages of clean cells, in total.
    pub(crate) fn clean_pages(&self) -> u32 {
        self.swap.as_ref().map_or(0, |swap| swap.clean)
    }

    /// Returns how many of the pages before a place in the tree are in swap memory alone.
    #[cold]
    #[inline(never)]
    pub(super) fn swap_only_before(&self, at: Cursor) -> u32 {
        let (mut pages, mut next) = (0, at);
        while let Cursor { node: Some(node), pages_in_node } = next {
            let here = pages_in_node - self.device_pages(node, pages_in_node);
            if here == 0 {
                break;
            }
            pages += here;
            let parent = self.link[node].parent;
            let pages_in_node = parent.map_or(0, |parent| self.link[parent].span.pages());
            next = Cursor { node: parent, pages_in_node };
        }
        pages
    }

    /// Records that the `count` pages that were just added to a node are on the device, and queues them to be put.
    pub(super) fn attach_residency(&mut self, node: NodeKey, count: u32, is_present: bool) {
        let entries = self.link[node].span.pages();
        self.swap_mut().residency[node] = Residency { device: entries, swap_start: entries };
        self.queue_puts(node, count, is_present);
    }

    /// Records the entry before each of the last `count` entries of a node, unless nothing is put. Queues these entries
    /// if they are of the present generation (`is_present`).
    fn queue_puts(&mut self, node: NodeKey, count: u32, is_present: bool) {
        if self.swap_ref().puts.is_off() {
            return;
        }
        let mut before = self.entry_before(node, count);
        let Self { swap: Some(swap), spans, link, .. } = self else { return };
        for (start, len) in spans.last_runs(&link[node].span, count) {
            for entry in start..start + len {
                swap.puts.attach(entry, before, is_present);
                before = Some(entry);
            }
        }
    }

    /// Records that the backend has accepted a load, whose moves are the last batch.
    pub(crate) fn set_loads(&mut self, load: &LoadBatch) {
        let swap = self.swap_mut();
        swap.last_load = swap.last_move;
        load.device_pages().for_each(|page| swap.loads[page.index()] = swap.last_load);
    }

    /// Returns whether a load may be unfinished.
    pub(crate) fn may_load(&self) -> bool {
        self.swap.as_ref().is_some_and(|swap| swap.loaded < swap.last_load)
    }

    /// Records that all loads up to `loaded` are done.
    pub(crate) fn set_loaded(&mut self, loaded: MoveId) {
        let swap = self.swap_mut();
        swap.loaded = swap.loaded.max(loaded);
    }

    /// Returns the last load of these pages, of the pages of a lock's path of `pages` pages, and of the cells in its
    /// tails; `None` if all these loads are known to be done. O(pages).
    pub(crate) fn last_load(
        &self,
        lock: &PrefixLock,
        pages: u32,
        others: impl Iterator<Item = PageId>,
    ) -> Option<MoveId> {
        let swap = self.swap_ref();
        let mut last = MoveId::default();
        let mut see = |page: PageId| {
            if page != NO_PAGE {
                last = last.max(swap.loads[page.index()]);
            }
        };
        others.for_each(&mut see);
        let mut at = lock.node();
        while let Some(node) = at {
            self.node_pages(node).for_each(|(_, list)| list.iter().copied().for_each(&mut see));
            at = self.link[node].parent;
        }
        if let Some(cells) = &self.cells {
            for held in cells.limits.held_groups(pages) {
                let mut path = self.path_of(lock, pages);
                for place in (held.first..pages).rev() {
                    let cell = cells.at(held.group, self.entry_at(&mut path, place));
                    if cell.is_some() {
                        cells.pages(cell).iter().copied().for_each(&mut see);
                    }
                }
            }
        }
        (last > swap.loaded).then_some(last)
    }

    /// Returns the locks of fetches, for audits.
    pub(crate) fn fetch_locks(&self) -> impl Iterator<Item = &PrefixLock> {
        self.swap.iter().flat_map(|swap| swap.fetches.locks())
    }

    /// Returns the numbers of pages put and fetched.
    pub(crate) fn store_counts(&self) -> (u64, u64) {
        self.swap.as_ref().map_or((0, 0), |swap| (swap.puts.done, swap.fetches.fetched))
    }

    /// Divides the residency of a node whose first `pages` entries went to `prefix`.
    #[cold]
    #[inline(never)]
    pub(super) fn split_residency(&mut self, node: NodeKey, prefix: NodeKey, pages: u32) {
        let residency = &mut self.swap_mut().residency;
        let Residency { device, swap_start } = residency[node];
        let first = Residency { device: device.min(pages), swap_start: swap_start.min(pages) };
        residency[prefix] = first;
        residency[node] = Residency { device: device - first.device, swap_start: swap_start - first.swap_start };
    }

    /// Stamps a node that becomes idle. Cursors that are at no node move to it if it has what they look for. Returns
    /// the number of its device pages.
    #[cold]
    #[inline(never)]
    pub(super) fn stamp_idle(&mut self, node: NodeKey, entries: u32) -> u32 {
        if let Some(ages) = &mut self.ages {
            ages.enter(node, entries);
        }
        if let Some(swap) = &mut self.swap {
            for seek in Seek::ALL {
                let cursor = &mut swap.cursors[seek as usize];
                if cursor.is_none() && seek.finds(swap.residency[node], entries) {
                    *cursor = Some(node);
                }
            }
        }
        self.device_pages(node, entries)
    }

    /// Prepares a node to leave the list of idle nodes: moves cursors on, and frees the swap pages of its clean
    /// entries. Returns the number of its device pages.
    #[cold]
    #[inline(never)]
    pub(super) fn leave_idle(&mut self, node: NodeKey) -> u32 {
        let next = self.order.after(&self.usage, node);
        let Self { swap: Some(swap), .. } = self else { return 0 };
        for cursor in &mut swap.cursors {
            if *cursor == Some(node) {
                *cursor = next;
            }
        }
        let Residency { device, swap_start } = swap.residency[node];
        if swap_start < device {
            self.emit_removed(node, Medium::Swap, swap_start..device);
            let Self { swap: Some(swap), spans, link, .. } = self else { return 0 };
            swap.clean -= device - swap_start;
            swap.residency[node].swap_start = device;
            spans.each_entry_back(&link[node].span, swap_start..device, |entry, _| {
                swap.drop_swap_page(entry);
            });
        }
        device
    }

    /// Returns the oldest node that has what a cursor looks for, and moves the cursor there.
    pub(super) fn seek(&mut self, seek: Seek) -> Option<NodeKey> {
        let (cursors, ages) = (self.swap_ref().cursors, self.ages_ref());
        let mut at = cursors[seek as usize];
        if seek == Seek::Dirty {
            // Dirty entries are on the device, so nodes that evictions have passed have none.
            let younger = |(a, b)| if ages.of(a) < ages.of(b) { b } else { a };
            at = at.zip(cursors[Seek::DevicePages as usize]).map(younger);
        }
        while let Some(node) = at {
            #[cfg(test)]
            self.count_visit();
            let entries = self.link[node].span.pages();
            if seek.finds(self.swap_ref().residency[node], entries) {
                break;
            }
            at = self.order.after(&self.usage, node);
        }
        self.swap_mut().cursors[seek as usize] = at;
        at
    }

    #[cfg(test)]
    pub(super) fn count_visit(&mut self) {
        self.swap_mut().visits += 1;
    }

    /// Moves a cursor back to `node` if the cursor is at a younger node or at none. `node` is idle and has what the
    /// cursor looks for.
    pub(super) fn seek_from(&mut self, seek: Seek, node: NodeKey) {
        let ages = self.ages.as_ref().expect("there is swap memory");
        let older = self.swap_ref().cursors[seek as usize].is_none_or(|at| ages.of(node) < ages.of(at));
        if older {
            self.swap_mut().cursors[seek as usize] = Some(node);
        }
    }

    /// Drops an idle node with all its entries, wherever their pages are.
    pub(super) fn drop_entries(&mut self, node: NodeKey, present: bool, pages: &mut Vec<PageId>) {
        let all = self.link[node].span.pages();
        self.detach_entries(node, all, present, pages);
        self.leave_idle(node);
        self.order.leave(&mut self.usage, node);
        self.despawn(node);
    }

    /// Removes the last `count` entries of a node and their cells, wherever their pages are. Device pages are appended
    /// to `pages`.
    #[cold]
    #[inline(never)]
    pub(super) fn detach_entries(&mut self, node: NodeKey, count: u32, present: bool, pages: &mut Vec<PageId>) {
        if self.chain.is_some() | self.cells.is_some() {
            self.on_detach(node, count, present, pages);
        }
        let Self { swap: Some(swap), spans, link, .. } = self else { return };
        let span = &mut link[node].span;
        let (entries, Residency { device, swap_start }) = (span.pages(), swap.residency[node]);
        let rest = entries - count;
        spans.each_entry_back(span, swap_start.max(rest)..entries, |entry, _| swap.drop_swap_page(entry));
        let dropped = device - device.min(rest);
        spans.each_entry_back(span, rest..entries, |entry, _| swap.puts.forget(entry));
        // A node in use has no clean entries.
        swap.clean -= device.saturating_sub(swap_start.max(rest));
        if present {
            self.evictable -= dropped;
            self.epoch += 1;
        }
        swap.residency[node] = Residency { device: device.min(rest), swap_start: swap_start.min(rest) };
        spans.trim(span, count - dropped, None);
        spans.trim(span, dropped, Some(pages));
    }
}

#[cfg(test)]
mod tests;
