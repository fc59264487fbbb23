//! The audit of cells: G1 to G3 and G5, and H1 to H4 for the cells of a tree with swap memory.

use std::collections::{HashMap, HashSet};

use crate::fence::Fence;
use crate::id::{CellId, NodeKey, PageId, PrefixLock, StepId, SwapPageId};
use crate::layout::HeldGroup;

use super::{Broken, PrefixTree};
use crate::prefix::residency::{NO_PAGE, Residency, Seek};

impl PrefixTree {
    /// Returns every cell that an entry names, with the node that has this entry; `None` if no node has it.
    pub(crate) fn cells_by_node(&self) -> Vec<(Option<NodeKey>, CellId)> {
        let Some(cells) = &self.cells else { return Vec::new() };
        let of_node = |node| self.spans.entries(&self.link[node].span).map(move |entry| (entry, node));
        let nodes: HashMap<u32, NodeKey> = self.link.keys().flat_map(of_node).collect();
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
                return Err(("G1: a cell's entry belongs to a live span", None));
            };
            let locked = cells.is_idle(cell) || self.usage[node].lock_count > 0;
            self.ensure(locked, "G2: a used cell's node is locked", node)?;
        }
        Ok(())
    }

    /// Checks H1 to H4 for cells. Swap pages of cells are added to `pages`. Returns the number of clean pages of idle
    /// cells.
    pub(super) fn check_swap_cells(&self, pages: &mut HashSet<SwapPageId>) -> Result<u32, Broken> {
        let (Some(cells), Some(swap)) = (&self.cells, &self.swap) else { return Ok(0) };
        let mut clean = 0;
        for (_, _, cell) in cells.named() {
            let Residency { device, swap_start } = cells.cells[cell.index()].residency();
            ensure(swap_start <= device, "H2: every cell has its pages")?;
            let has = |page: &PageId| (*page != NO_PAGE) == (device > 0);
            let whole = cells.pages(cell).iter().all(has);
            ensure(whole, "H2: a cell has all of its pages on the device, or none")?;
            if swap_start == 0 {
                let mut own = cells.swap_pages[cells.range(cell)].iter();
                let own = own.all(|&page| swap.pool.is_cached(page) && pages.insert(page));
                ensure(own, "H1: a swap page belongs to one cell")?;
            }
            let is_clean = device > swap_start;
            ensure(!is_clean || cells.is_idle(cell), "H3: a used cell is not clean")?;
            clean += if is_clean { cells.tracks(cell) } else { 0 };
        }
        self.check_cell_cursors().map(|()| clean)
    }

    fn check_cell_cursors(&self) -> Result<(), Broken> {
        let cells = self.cells_ref();
        for seek in Seek::ALL {
            let cursor = cells.cursors[seek as usize];
            let mut older = cells.list(cells.idle).take_while(|&cell| cell != cursor);
            let found = older.any(|cell| seek.finds(cells.cells[cell.index()].residency(), 1));
            let what = "H4: no cell older than a cursor has what the cursor looks for";
            ensure(!found, what)?;
            let listed = !cursor.is_some() || cells.list(cells.idle).any(|cell| cell == cursor);
            ensure(listed, "H4: a cursor is at an idle cell")?;
        }
        Ok(())
    }

    /// Returns all cells in the tails of a prefix. The prefix is the first `pages` pages of the lock's path.
    pub(crate) fn tail_cells(&self, lock: &PrefixLock, pages: u32) -> Vec<CellId> {
        let Some(cells) = &self.cells else { return Vec::new() };
        let of = |held: HeldGroup| {
            let mut path = self.path_of(lock, pages);
            let places = (held.first..pages).rev();
            places.map(move |place| cells.at(held.group, self.entry_at(&mut path, place)))
        };
        cells.limits.held_groups(pages).flat_map(of).collect()
    }

    /// Returns the numbers of evictable and of protected pages of cells.
    pub(super) fn cell_sizes(&self) -> (u32, u32) {
        let Some(cells) = &self.cells else { return (0, 0) };
        cells.named().fold((0, 0), |(idle, used), (_, _, cell)| match cells.is_idle(cell) {
            true => (idle + cells.device_tracks(cell), used),
            false => (idle, used + cells.device_tracks(cell)),
        })
    }

    /// Adds the number of pages of deferred cells, by step.
    pub(super) fn add_deferred_cells(&self, pages: &mut HashMap<StepId, u32>) {
        let Some(cells) = &self.cells else { return };
        for &(step, ends) in &cells.deferred {
            for cell in cells.list(ends) {
                *pages.entry(step).or_default() += cells.device_tracks(cell);
            }
        }
    }

    /// Returns the device pages of cells, each with its node.
    pub(super) fn cell_owners(&self) -> impl Iterator<Item = (NodeKey, PageId)> + '_ {
        let owned = self.cells_by_node().into_iter();
        let owned = owned.filter(|(_, cell)| self.is_device_cell(*cell));
        let owned = owned.filter_map(|(node, cell)| Some((node?, cell)));
        owned.flat_map(|(node, cell)| self.cell_pages(cell).iter().map(move |&page| (node, page)))
    }
}

fn ensure(holds: bool, what: &'static str) -> Result<(), Broken> {
    if holds { Ok(()) } else { Err((what, None)) }
}
