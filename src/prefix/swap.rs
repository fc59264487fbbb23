//! Pages in swap memory: evicted pages keep their entries in the tree and come back when a prompt matches them.
//! `nodes.rs` stores which entries of a node have device pages and which have swap pages.
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
//! Cells move by the same rules, each as an entry of its own (`cells.rs`).
//!
//! The tree owns the pool of swap pages, because locking an idle node frees the swap pages of its clean entries.
//!
//! Not here: moves to swap memory (`evict.rs`, `saves.rs`) and back (`loads.rs`), the contents of pages.

mod check;

use crate::id::{MoveId, NodeKey, PageId, PrefixLock, SwapPageId};
use crate::memory::{Memory, OutOfMemory};
use crate::plan::PageMove;
use crate::stats::Stats;
use crate::swap::SwapPool;

use super::TreeShape;
use super::entry_list::EntryLists;
use super::fetches::Fetches;
use super::loads::LoadBatch;
use super::nodes::{NO_PAGE, NO_SWAP_PAGE, Nodes, Sides};
use super::puts::Puts;
use super::saves::SaveBatch;

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
    /// Pages of entries and cells dropped from the tree to make room or after a failed save, unless a store has them.
    pub lost: u64,
    /// Pages whose save failed.
    pub failed: u64,
}

impl SwapCounts {
    /// Counts pages that are saved at their eviction.
    pub fn add_forced(&mut self, pages: u32) {
        self.saved += u64::from(pages);
        self.forced += u64::from(pages);
    }
}

/// The columns and counters of swap memory.
pub(crate) struct Swap {
    pub(super) pool: SwapPool,
    /// The swap page of each entry; [`NO_SWAP_PAGE`] for an entry without one.
    pub(super) of_entry: Vec<SwapPageId>,
    /// Clean entries of idle nodes, and pages of clean cells.
    pub(super) clean: u32,
    /// The saves that the engine has not yet passed to the backend.
    pub(super) saves: SaveBatch,
    /// Nodes whose entries a load or a sequence has just brought to the device, each with the number of these entries.
    pub(super) loaded_nodes: Vec<(NodeKey, u32)>,
    /// Number of the last batch of saves or loads for the backend.
    pub(super) last_move: MoveId,
    /// The last load to each device page, the last load of all, and the last load that is known to be done.
    loads: Vec<MoveId>,
    last_load: MoveId,
    done_load: MoveId,
    pub(super) puts: Puts,
    pub(super) fetches: Fetches,
    /// Number of swap pages; the pages of the stage follow them.
    swap_pages: u32,
    stage_pages: u32,
    pub(super) counts: SwapCounts,
}

impl Swap {
    /// Creates the columns.
    pub(super) fn new(shape: &TreeShape, memory: &mut Memory) -> Result<Self, OutOfMemory> {
        let &TreeShape { page_count, swap_pages, stage_pages, .. } = shape;
        let entries = EntryLists::entry_count(shape.nodes());
        Ok(Self {
            pool: SwapPool::new(swap_pages, shape.record_pages > 1, memory)?,
            of_entry: memory.filled(entries.into(), NO_SWAP_PAGE)?,
            clean: 0,
            saves: SaveBatch::new(page_count, memory)?,
            loaded_nodes: memory.reserved(page_count.into())?,
            last_move: MoveId::default(),
            loads: memory.zeroed(page_count.into())?,
            last_load: MoveId::default(),
            done_load: MoveId::default(),
            puts: Puts::new(shape, memory)?,
            fetches: Fetches::new(if shape.has_stores() { swap_pages } else { 0 }, memory)?,
            swap_pages,
            stage_pages,
            counts: SwapCounts::default(),
        })
    }

    /// Makes the swap pages below `ready` usable, and the stage once all its pages are ready.
    pub fn set_ready(&mut self, ready: u32) {
        self.pool.set_ready(ready);
        if ready >= self.swap_pages + self.stage_pages {
            self.puts.set_ready(self.swap_pages);
        }
    }

    /// Writes the counters and levels of swap memory into `stats`.
    pub(super) fn count(&self, stats: &mut Stats) {
        let SwapCounts { saved, forced, loaded, evicted, lost, failed } = self.counts;
        (stats.saved_pages, stats.forced_pages, stats.failed_saves) = (saved, forced, failed);
        (stats.loaded_pages, stats.swap_evicted_pages, stats.lost_pages) = (loaded, evicted, lost);
        (stats.put_pages, stats.fetched_pages) = (self.puts.done, self.fetches.fetched);
        stats.clean_pages = self.clean;
        stats.swap_cached_pages = self.pool.cached_count();
        stats.swap_free_pages = self.pool.free_count();
    }

    /// Returns the numbers of Cached and of free swap pages.
    #[cfg(test)]
    pub fn page_counts(&self) -> (u32, u32) {
        (self.pool.cached_count(), self.pool.free_count())
    }

    /// Returns the locks of fetches, for audits.
    pub fn fetch_locks(&self) -> impl Iterator<Item = &PrefixLock> {
        self.fetches.locks()
    }

    /// Returns whether a swap page belongs to an entry or a cell.
    #[cfg(any(test, feature = "testkit"))]
    pub fn is_cached(&self, page: SwapPageId) -> bool {
        self.pool.is_cached(page)
    }

    /// Returns the saves to the stage that the backend has to make, and the number of their batch.
    pub fn staged(&mut self) -> Option<(MoveId, &[PageMove])> {
        (!self.puts.staged.is_empty()).then(|| (self.begin_move(), &self.puts.staged[..]))
    }

    /// Undoes the puts whose saves to the stage failed.
    pub fn fail_staged(&mut self) {
        self.puts.fail_staged(&mut self.pool, self.last_move);
    }

    /// Returns the number of the next batch of moves.
    pub(super) fn next_move(&self) -> MoveId {
        MoveId::new(self.last_move.raw() + 1)
    }

    /// Numbers a batch of moves.
    pub(super) fn begin_move(&mut self) -> MoveId {
        self.last_move = self.next_move();
        self.last_move
    }

    /// Gives an entry a swap page, and adds the save to the batch.
    pub(super) fn save_entry(&mut self, entry: u32, device: PageId, page: SwapPageId) {
        self.of_entry[entry as usize] = page;
        self.save_page(device, page);
    }

    /// Adds a save of a device page to the batch.
    pub(super) fn save_page(&mut self, device: PageId, page: SwapPageId) {
        let id = self.next_move();
        self.pool.set_save(page, id);
        self.saves.push(PageMove { device, swap: page });
    }

    /// Frees the swap page of an entry.
    pub(super) fn drop_page(&mut self, entry: u32) {
        let page = std::mem::replace(&mut self.of_entry[entry as usize], NO_SWAP_PAGE);
        self.free_page(page);
    }

    /// Frees the swap page of an entry or a cell. Cancels the save to the page, if the engine has not yet passed the
    /// save to the backend. A cancelled batch leaves its number to the next one, so the number alone does not identify
    /// a save.
    pub(super) fn free_page(&mut self, page: SwapPageId) {
        self.pool.drop_page(page);
        if !self.saves.is_empty() && self.pool.last_save(page) == self.next_move() {
            self.saves.cancel(page);
        }
    }

    /// Returns whether dropping the entry or the cell of a swap page frees this page, without unfinished moves.
    pub(super) fn is_droppable(&self, page: SwapPageId, moved: [MoveId; 2]) -> bool {
        !self.pool.is_read(page) && self.pool.is_idle(page, moved)
    }

    /// Frees the swap pages of the last `count` entries of a node, which are about to be removed, and removes those
    /// without device pages. Evicted entries are lost, unless a store has their pages. Returns the number of the
    /// others.
    pub(super) fn detach(&mut self, nodes: &mut Nodes, node: NodeKey, count: u32, is_evicted: bool) -> u32 {
        let Sides { device, swap_start } = nodes.sides_of(node);
        let entries = nodes.entries(node);
        let rest = entries - count;
        nodes.each_entry_back(node, rest..entries, |entry, _| {
            self.counts.lost += u64::from(is_evicted && !self.puts.is_stored(entry));
            self.puts.forget(entry);
        });
        nodes.each_entry_back(node, swap_start.max(rest)..entries, |entry, _| self.drop_page(entry));
        // A node in use has no clean entries.
        self.clean -= device.saturating_sub(swap_start.max(rest));
        *nodes.sides_mut(node) = Sides { device: device.min(rest), swap_start: swap_start.min(rest) };
        let on_device = device - device.min(rest);
        nodes.lists.trim(&mut nodes.link[node].list, count - on_device, None);
        on_device
    }

    /// Frees the swap pages of a node's clean entries, because the node leaves the list of idle nodes.
    pub(super) fn drop_copies(&mut self, nodes: &mut Nodes, node: NodeKey) {
        let Sides { device, swap_start } = nodes.sides_of(node);
        if swap_start < device {
            self.clean -= device - swap_start;
            nodes.sides_mut(node).swap_start = device;
            nodes.each_entry_back(node, swap_start..device, |entry, _| self.drop_page(entry));
        }
    }

    /// Numbers the moves of a load, and records that they read their swap pages.
    pub fn begin_load(&mut self, load: &LoadBatch) -> MoveId {
        let id = self.begin_move();
        load.moves().iter().for_each(|load| self.pool.set_load(load.swap, id));
        id
    }

    /// Records that the backend has accepted a load, whose moves are the last batch.
    pub fn set_loads(&mut self, load: &LoadBatch) {
        self.last_load = self.last_move;
        load.device_pages().for_each(|page| self.loads[page.index()] = self.last_load);
    }

    /// Returns whether a load may be unfinished.
    pub fn may_load(&self) -> bool {
        self.done_load < self.last_load
    }

    /// Records that all loads up to `loaded` are done.
    pub fn set_loaded(&mut self, loaded: MoveId) {
        self.done_load = self.done_load.max(loaded);
    }

    /// Returns the last load of these pages; `None` if all their loads are known to be done. O(pages).
    pub(super) fn last_load(&self, pages: impl Iterator<Item = PageId>) -> Option<MoveId> {
        let last = pages.filter(|page| *page != NO_PAGE).map(|page| self.loads[page.index()]).max();
        last.filter(|&last| last > self.done_load)
    }
}

#[cfg(test)]
mod tests;
