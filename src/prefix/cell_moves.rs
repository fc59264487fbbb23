//! Moves of cells to swap memory and back. All pages of a cell move together. Cells and entries of nodes have one
//! common order of eviction.
//!
//! For cells, the invariants of swap memory (`swap.rs`) are:
//!
//! * H1, H2. A cell has all of its pages on the device, or in swap memory, or both. Its swap pages are Cached.
//! * H3. A used cell is not clean, but it may be in swap memory alone. Clean cells are counted with the clean entries.
//! * H4. No idle cell older than a cursor has what the cursor looks for.
//!
//! Not here: moves of entries (`offload.rs`, `restore.rs`), and the choice of the cells that a sequence uses
//! (`tails.rs`).

use crate::id::{CellId, NodeKey, PageId};
use crate::plan::PageMove;

use super::PrefixTree;
use super::cells::{Cell, Cells, DEVICE, SAVING, SWAP};
use super::residency::{NO_PAGE, Seek};
use super::swap::Swap;

/// The oldest idle node or cell that a cursor finds.
#[derive(Clone, Copy)]
pub(super) enum Oldest {
    Node(NodeKey),
    Cell(CellId),
}

/// Frees the swap pages of a cell, if it has any.
pub(super) fn drop_swap_copy(cells: &mut Cells, swap: &mut Swap, cell: CellId) {
    let sides = &mut cells.cells[cell.index()].sides;
    if *sides & SWAP == 0 {
        return;
    }
    let was_clean = *sides & DEVICE > 0;
    *sides &= !(SWAP | SAVING);
    swap.clean -= if was_clean { cells.tracks(cell) } else { 0 };
    cells.swap_pages[cells.range(cell)].iter().for_each(|page| swap.free_swap_page(*page));
}

impl PrefixTree {
    /// Returns the oldest idle node or cell that has what a cursor looks for.
    pub(super) fn oldest(&mut self, seek: Seek) -> Option<Oldest> {
        let node = self.seek(seek);
        let Some(cell) = self.seek_cell(seek) else { return node.map(Oldest::Node) };
        let stamp = self.cells_ref().cells[cell.index()].stamp;
        match node {
            Some(node) if self.ages_ref().of(node) < stamp => Some(Oldest::Node(node)),
            _ => Some(Oldest::Cell(cell)),
        }
    }

    fn seek_cell(&mut self, seek: Seek) -> Option<CellId> {
        let cells = self.cells.as_ref()?;
        let mut at = cells.cursors[seek as usize];
        if seek == Seek::Dirty {
            // As for nodes: dirty cells are on the device.
            let stamp = |cell: CellId| match cell.is_some() {
                true => cells.cells[cell.index()].stamp,
                false => u64::MAX,
            };
            let other = cells.cursors[Seek::DevicePages as usize];
            at = if stamp(at) < stamp(other) { other } else { at };
        }
        while let Some(cells) = self.cells.as_ref()
            && at.is_some()
            && !seek.finds(cells.cells[at.index()].residency(), 1)
        {
            at = cells.younger(at);
            #[cfg(test)]
            self.count_visit();
        }
        self.cells_mut().cursors[seek as usize] = at;
        at.is_some().then_some(at)
    }

    /// Moves a cursor back to `cell` if the cursor is at a younger cell or at the end. The cell is idle and has what
    /// the cursor looks for.
    fn seek_cell_from(&mut self, seek: Seek, cell: CellId) {
        let cells = self.cells_mut();
        let at = cells.cursors[seek as usize];
        if !at.is_some() || cells.cells[cell.index()].stamp < cells.cells[at.index()].stamp {
            cells.cursors[seek as usize] = cell;
        }
    }

    fn cell_mut(&mut self, cell: CellId) -> &mut Cell {
        &mut self.cells_mut().cells[cell.index()]
    }

    /// Frees the device pages of an idle cell. A dirty cell is saved first; it is removed if swap pages are lacking.
    pub(super) fn offload_cell(&mut self, cell: CellId, freed: &mut Vec<PageId>) {
        let Cell { sides, entry, group, .. } = *self.cell_mut(cell);
        let tracks = self.cells_ref().tracks(cell);
        if sides & SWAP > 0 {
            self.swap_mut().clean -= tracks;
        } else if self.save_cell(cell, freed) {
            let counts = &mut self.swap_mut().counts;
            (counts.saved, counts.forced) = (counts.saved + u64::from(tracks), counts.forced + u64::from(tracks));
        } else {
            if self.cell_at(group.into(), entry) == cell {
                self.lose_idle_cell(cell, freed);
            }
            return;
        }
        self.evictable -= tracks;
        self.epoch += 1;
        let cells = self.cells_mut();
        cells.evicted += 1;
        cells.cells[cell.index()].sides &= !DEVICE;
        let own = cells.pages_mut(cell).iter_mut();
        freed.extend(own.map(|page| std::mem::replace(page, NO_PAGE)));
        self.seek_cell_from(Seek::SwapOnly, cell);
    }

    /// Takes swap pages for an idle dirty cell, and adds the saves to the batch. Returns false if too few swap pages
    /// can be freed. Also returns false if freeing a swap page drops this cell's entry, which removes the cell.
    pub(super) fn save_cell(&mut self, cell: CellId, freed: &mut Vec<PageId>) -> bool {
        let (range, Cell { entry, group, .. }) = (self.cells_ref().range(cell), *self.cell_mut(cell));
        for at in range.clone() {
            let page = self.take_swap_page(freed);
            let is_there = self.cell_at(group.into(), entry) == cell;
            if let Some(page) = page {
                self.cells_mut().swap_pages[at] = page;
            }
            if page.is_none() || !is_there {
                let Self { cells: Some(cells), swap: Some(swap), .. } = self else { continue };
                let taken = range.start..at + usize::from(page.is_some());
                cells.swap_pages[taken].iter().for_each(|page| swap.pool.drop_page(*page));
                return false;
            }
        }
        let Self { cells: Some(cells), swap: Some(swap), .. } = self else { return false };
        let id = swap.next_move();
        for (&device, &swap_page) in cells.pages(cell).iter().zip(&cells.swap_pages[range]) {
            swap.pool.set_save(swap_page, id);
            swap.saves.push(PageMove { device, swap: swap_page });
        }
        cells.cells[cell.index()].sides |= SWAP | SAVING;
        cells.saving.push(cell);
        true
    }

    /// Removes an idle cell, and counts its pages as lost.
    pub(super) fn lose_idle_cell(&mut self, cell: CellId, freed: &mut Vec<PageId>) {
        let tracks = self.cells_ref().tracks(cell);
        let on_device = self.cells_ref().is_on_device(cell);
        self.swap_mut().counts.lost += u64::from(tracks);
        self.cells_mut().evicted += u64::from(on_device);
        self.epoch += 1;
        self.remove_cell(cell, freed);
    }

    /// Removes an idle cell, wherever its pages are.
    pub(super) fn remove_cell(&mut self, cell: CellId, freed: &mut Vec<PageId>) {
        self.drop_cell_copy(cell);
        self.evictable -= self.cells_ref().device_tracks(cell);
        self.cells_mut().remove(cell, freed);
    }

    /// Frees the swap pages of a cell, if it has any.
    pub(super) fn drop_cell_copy(&mut self, cell: CellId) {
        let Self { cells: Some(cells), swap: Some(swap), .. } = self else { return };
        drop_swap_copy(cells, swap, cell);
    }

    /// Undoes a failed batch of saves. Cells that are still on the device become dirty again; the other cells are
    /// removed.
    pub(super) fn fail_cell_saves(&mut self, freed: &mut Vec<PageId>) {
        let Some(cells) = &mut self.cells else { return };
        let mut saving = std::mem::take(&mut cells.saving);
        for cell in saving.drain(..) {
            let sides = self.cell_mut(cell).sides;
            if sides & SAVING == 0 {
                continue; // The cell has been removed, or used again, since the save.
            }
            if sides & DEVICE > 0 {
                self.drop_cell_copy(cell);
                self.seek_cell_from(Seek::Dirty, cell);
            } else {
                self.lose_idle_cell(cell, freed);
            }
        }
        self.cells_mut().saving = saving;
    }

    /// Ends the batch of saves for cells.
    pub(super) fn end_cell_saves(&mut self) {
        let Some(cells) = &mut self.cells else { return };
        for index in 0..cells.saving.len() {
            let cell = cells.saving[index];
            cells.cells[cell.index()].sides &= !SAVING;
        }
        cells.saving.clear();
    }

    /// Marks a cell that is in swap memory alone as a part of a load. Returns whether it is such a cell and was not
    /// marked yet.
    pub(super) fn claim_cell(&mut self, cell: CellId, load: u64) -> bool {
        // A used cell has no age, so its stamp stores the load.
        !self.cells_ref().is_on_device(cell) && std::mem::replace(&mut self.cell_mut(cell).stamp, load) != load
    }

    /// Assigns the first of `pages` to a cell that is in swap memory alone, and appends its loads to `moves`.
    pub(super) fn assign_cell(&mut self, cell: CellId, pages: &mut &[PageId], moves: &mut Vec<PageMove>) {
        let cells = self.cells_mut();
        let range = cells.range(cell);
        let own = pages.split_off(..range.len()).expect("they were counted");
        cells.pages_mut(cell).copy_from_slice(own);
        let swap = &cells.swap_pages[range];
        moves.extend(own.iter().zip(swap).map(|(&device, &swap_page)| PageMove { device, swap: swap_page }));
    }

    /// Attaches device pages to a cell that is in swap memory alone. A sequence has computed these pages.
    pub(crate) fn restore_cell(&mut self, cell: CellId, pages: impl Iterator<Item = PageId>) {
        let own = self.cells_mut().pages_mut(cell).iter_mut();
        own.zip(pages).for_each(|(own, page)| *own = page);
        self.cell_restored(cell);
    }

    /// Records that a used cell, which was in swap memory alone, is on the device. Its pages are already attached.
    pub(super) fn cell_restored(&mut self, cell: CellId) {
        assert!(self.swap_ref().saves.is_empty(), "the backend has received the saves");
        self.drop_cell_copy(cell);
        self.cell_mut(cell).sides = DEVICE;
        self.protected += self.cells_ref().tracks(cell);
        self.epoch += 1;
    }
}

#[cfg(test)]
mod tests;
