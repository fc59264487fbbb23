//! The audit of cells: G1 to G3 and G5, and H1 to H4 for the cells of a tree with swap memory.

use std::collections::{HashMap, HashSet};

use super::{Cells, Ends, NO_PAGE, Seek, Sides, SizeInfo, some};
use crate::fence::Fence;
use crate::id::{CellId, NodeKey, PageId, StepId, SwapPageId};
use crate::prefix::PrefixTree;
use crate::prefix::check::Broken;
use crate::swap::SwapPool;

impl PrefixTree {
    /// Returns every cell that an entry names, with the node that has this entry; `None` if no node has it.
    pub(crate) fn cells_by_node(&self) -> Vec<(Option<NodeKey>, CellId)> {
        let Some(cells) = &self.cells else { return Vec::new() };
        let of_node = |node| self.nodes.lists.entries(&self.nodes.link[node].list).map(move |entry| (entry, node));
        let nodes: HashMap<u32, NodeKey> = self.nodes.link.keys().flat_map(of_node).collect();
        cells.named().map(|(_, entry, cell)| (nodes.get(&entry).copied(), cell)).collect()
    }

    /// Checks G1 to G3 and G5, except the states of pages and the fence's counts, which other audits check. `named`
    /// contains, for each cell, the number of held places that name it and of sequences that wait for its load.
    pub(crate) fn check_cells(&self, named: &HashMap<CellId, u32>, fence: &Fence) -> Result<(), Broken> {
        let Some(cells) = &self.cells else { return Ok(()) };
        let [mut idle, mut deferred] = [HashSet::new(), HashSet::new()];
        let mut stamp = 0;
        for cell in cells.list(cells.idle) {
            let of = cells.cells[cell.index()];
            let rises = of.stamp > stamp && idle.insert(cell);
            ensure(rises, "G3: stamps rise along the idle list")?;
            stamp = of.stamp;
        }
        let mut before = StepId::default();
        for &(step, ends) in &cells.deferred {
            let open = step > before && !fence.is_complete(step);
            ensure(open, "G5: deferred cells are in the order of steps, none complete")?;
            before = step;
            for cell in cells.list(ends) {
                let waits = cells.cells[cell.index()].until == step && deferred.insert(cell);
                ensure(waits, "G5: a deferred cell waits for the step of its list")?;
            }
        }
        for (group, entry, cell) in cells.named() {
            let of = cells.cells[cell.index()];
            let stands = (u32::from(of.group), of.entry) == (group, entry);
            ensure(stands, "G1: a cell belongs to the entry that names it")?;
            let users = named.get(&cell).copied().unwrap_or(0) + of.waiting;
            ensure(of.users == users, "G2: users = places that name the cell + waiting users")?;
            let waits = of.users > 0 && of.users == of.waiting;
            let listed = idle.remove(&cell) == (of.users == 0) && deferred.remove(&cell) == waits;
            ensure(listed, "G3: a cell is in the list of its state")?;
        }
        ensure(idle.is_empty() && deferred.is_empty(), "G1: cells that no entry names are free")?;
        let count = cells.named().count() == cells.count as usize;
        ensure(count, "G1: cells are counted")?;
        for (node, cell) in self.cells_by_node() {
            let Some(node) = node else {
                return Err(("G1: a cell's entry belongs to a live list", None));
            };
            let locked = cells.is_idle(cell, None) || self.usage[node].lock_count > 0;
            self.ensure(locked, "G2: a used cell's node is locked", node)?;
        }
        Ok(())
    }

    /// Returns the device pages of cells, each with its node.
    pub(in crate::prefix) fn cell_owners(&self) -> impl Iterator<Item = (NodeKey, PageId)> {
        let owned = self.cells_by_node().into_iter();
        let owned = owned.filter(|(_, cell)| self.cells().is_on_device(*cell));
        let owned = owned.filter_map(|(node, cell)| Some((node?, cell)));
        owned.flat_map(|(node, cell)| self.cells().pages(cell).iter().map(move |&page| (node, page)))
    }
}

impl Cells {
    /// Checks H1 to H4 for cells. Swap pages of cells are added to `pages`. Returns the number of clean pages of idle
    /// cells.
    pub(in crate::prefix) fn check_swap(
        &self,
        pool: &SwapPool,
        pages: &mut HashSet<SwapPageId>,
    ) -> Result<u32, Broken> {
        let mut clean = 0;
        for (_, _, cell) in self.named() {
            let Sides { device, swap_start } = self.cells[cell.index()].sides();
            ensure(swap_start <= device, "H2: every cell has its pages")?;
            let has = |page: &PageId| (*page != NO_PAGE) == (device > 0);
            let whole = self.pages(cell).iter().all(has);
            ensure(whole, "H2: a cell has all of its pages on the device, or none")?;
            if swap_start == 0 {
                let mut own = self.swap_pages[self.range(cell)].iter();
                let own = own.all(|&page| pool.is_cached(page) && pages.insert(page));
                ensure(own, "H1: a swap page belongs to one cell")?;
            }
            let is_clean = device > swap_start;
            ensure(!is_clean || self.is_idle(cell, None), "H3: a used cell is not clean")?;
            clean += if is_clean { self.tracks(cell) } else { 0 };
        }
        for seek in Seek::ALL {
            let cursor = self.cursors.at[seek as usize];
            let mut older = self.list(self.idle).take_while(|&cell| Some(cell) != cursor);
            let found = older.any(|cell| seek.finds(self.cells[cell.index()].sides(), 1));
            let what = "H4: no cell older than a cursor has what the cursor looks for";
            ensure(!found, what)?;
            let listed = cursor.is_none_or(|cursor| self.list(self.idle).any(|cell| cell == cursor));
            ensure(listed, "H4: a cursor is at an idle cell")?;
        }
        Ok(clean)
    }

    /// Returns the cells of a list, oldest first.
    pub(super) fn list(&self, ends: Ends) -> impl Iterator<Item = CellId> {
        std::iter::successors(some(ends.oldest), |cell| some(self.cells[cell.index()].younger))
    }

    /// Returns each cell that an entry names, as (group, entry, cell).
    fn named(&self) -> impl Iterator<Item = (u32, u32, CellId)> {
        let named = self.of_entry.iter().enumerate().filter(|(_, cell)| cell.is_some());
        named.map(|(at, &cell)| ((at / self.entry_count) as u32, (at % self.entry_count) as u32, cell))
    }

    /// Returns the numbers of evictable and of protected pages of cells, by counting.
    pub(in crate::prefix) fn count_sizes(&self) -> SizeInfo {
        let mut size = SizeInfo::default();
        for (_, _, cell) in self.named() {
            let count = if self.is_idle(cell, None) { &mut size.evictable } else { &mut size.protected };
            *count += self.device_tracks(cell);
        }
        size
    }

    /// Adds the number of pages of deferred cells, by step.
    pub(in crate::prefix) fn add_deferred(&self, pages: &mut HashMap<StepId, u32>) {
        for &(step, ends) in &self.deferred {
            for cell in self.list(ends) {
                *pages.entry(step).or_default() += self.device_tracks(cell);
            }
        }
    }
}

fn ensure(holds: bool, what: &'static str) -> Result<(), Broken> {
    if holds { Ok(()) } else { Err((what, None)) }
}
