//! Cells: the cached pages of the groups other than group 0, at entries of the tree's lists.
//!
//! A cell is the pages of one such group at one entry: one for each track, or those of a state behind the entry's
//! tokens. Sequences use each cell separately, and independently of the locks on nodes: a window moves on while its
//! prefix stays locked.
//!
//! * G1. A cell belongs to an entry of a live list, and the entry names it; its device pages are Cached. All other
//!   cells are free.
//! * G2. The users of a cell are the held places of sequences that name the cell, released places that wait for a step,
//!   and the sequences that wait for a load and the fetches whose tails contain it. A used cell's node is locked.
//! * G3. A cell without users is in the idle list. A cell whose users all wait for a step is in the deferred list of
//!   the last such step. Any other cell is in no list. Stamps rise along the idle list.
//! * G5. Deferred lists are in the order of their steps. The fence counts the pages of a list as idle after its step.
//!
//! * G7. The cell of a state has the state behind its entry's last token. No plan writes its pages.
//! * G8. Its users are rows whose current state it is or whose open item reads it, and waiting sequences and fetches
//!   whose tails contain it.
//!
//! Cells and nodes are stamped by one counter as they become idle (`ages.rs`), so that eviction takes the older one
//! first. A cell with a state is *superseded* if the last sequence that read it keeps a later state: conversations go
//! on from the later one. It then becomes the oldest one, unless prompts part at it.
//!
//! For cells, the invariants of swap memory (`swap.rs`) are:
//!
//! * H1, H2. A cell has all of its pages on the device, or in swap memory, or both. Its swap pages are Cached.
//! * H3. A used cell is not clean, but it may be in swap memory alone. Clean cells are counted with the clean entries.
//! * H4. No idle cell older than a cursor has what the cursor looks for.
//!
//! `users.rs` counts users and keeps the lists. Not here: which cells are evicted and saved (`evict.rs`), which places
//! of a sequence name which cell (`sequence/`), when cells are made and used (`system/`).

mod check;
mod users;

use std::collections::VecDeque;
use std::ops::Range;

use bytemuck::{Pod, Zeroable};

use crate::event::Medium;
use crate::id::{CellId, NodeKey, PageId, StepId, SwapPageId};
use crate::layout::Limits;
use crate::memory::{Memory, OutOfMemory};
use crate::plan::PageMove;

use super::ages::Ages;
use super::cell_events::{CellChange, CellChanges};
use super::cursors::{Cursors, Seek};
use super::entry_list::EntryLists;
use super::nodes::{NO_PAGE, NO_SWAP_PAGE, Nodes, Sides};
use super::swap::Swap;
use super::{SizeInfo, TreeShape};

/// One cell. A cell that was never used is all zeros.
#[derive(Clone, Copy, Default, Pod, Zeroable)]
#[repr(C)]
struct Cell {
    stamp: u64,
    /// The last step that one of the waiting users waits for.
    until: StepId,
    users: u32,
    /// Number of `users` that only wait for a step.
    waiting: u32,
    entry: u32,
    group: u16,
    /// Where the pages are: [`DEVICE`], [`SWAP`] or both; and [`SAVING`], [`STORED`], [`JUNCTION`], [`SUPERSEDED`].
    sides: u16,
    older: CellId,
    younger: CellId,
}

/// The cell has pages of the pool.
const DEVICE: u16 = 1;
/// The cell has swap pages.
const SWAP: u16 = 2;
/// The engine has not yet passed the cell's save to the backend.
const SAVING: u16 = 4;
/// A store has the pages.
const STORED: u16 = 8;
/// Prompts part at the end of the cell's entry, so no later state supersedes the cell.
const JUNCTION: u16 = 16;
/// The last user that left read the cell's state and keeps a later one.
const SUPERSEDED: u16 = 32;

impl Cell {
    /// Returns where the pages are, in the form of a node with one entry.
    fn sides(&self) -> Sides {
        let [device, in_swap] = [DEVICE, SWAP].map(|side| u32::from(self.sides & side > 0));
        Sides { device, swap_start: 1 - in_swap }
    }
}

/// What has become of a cell that an entry no longer has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(u8)]
pub(super) enum Gone {
    /// The entry has the cell, or never had one.
    #[default]
    Never,
    Evicted,
    /// The cell was superseded, and therefore evicted before all others.
    Superseded,
}

/// The ends of a list of cells.
#[derive(Clone, Copy, Default)]
struct Ends {
    oldest: CellId,
    youngest: CellId,
}

/// The cells of one group. Their numbers are consecutive.
#[derive(Clone, Copy, Default)]
struct Group {
    tracks: u32,
    /// Number of the first cell.
    base: u32,
    /// Index of the first page of the first cell.
    page_base: usize,
    /// Number of cells that have been used.
    fresh: u32,
    /// Number of cells on the device.
    on_device: u32,
    /// The first free cell; `younger` links the free cells.
    free: CellId,
}

/// All cells.
pub(crate) struct Cells {
    limits: Limits,
    groups: [Group; 3],
    entry_count: usize,
    of_entry: Vec<CellId>,
    /// The [`Gone`] of the cells that entries lack, indexed like `of_entry`. An entry that is removed forgets it.
    gone: Vec<u8>,
    cells: Vec<Cell>,
    pages: Vec<PageId>,
    /// Swap pages of the cells, indexed like `pages`; empty without swap memory.
    swap_pages: Vec<SwapPageId>,
    idle: Ends,
    /// The oldest idle cell that may have what each [`Seek`] looks for.
    cursors: Cursors<CellId>,
    /// Cells whose saves the engine has not yet passed to the backend.
    saving: Vec<CellId>,
    /// A list for each step that deferred cells wait for.
    deferred: VecDeque<(StepId, Ends)>,
    /// Number of cells that an entry names.
    count: u32,
    /// Number of cells whose device pages were evicted.
    evicted: u64,
    /// Device pages of idle cells, and of used ones.
    size: SizeInfo,
    /// Changes for events, if the config enables those of cells.
    pub(super) changes: CellChanges,
}

impl Cells {
    pub(super) fn new(shape: &TreeShape, memory: &mut Memory) -> Result<Self, OutOfMemory> {
        let &TreeShape { limits, swap_pages, max_steps, .. } = shape;
        let page_count = shape.nodes();
        let saving = if swap_pages > 0 { shape.page_count } else { 0 };
        let mut groups = [Group::default(); 3];
        let (mut base, mut page_base) = (1, 0);
        for held in limits.tails(0) {
            let group = &mut groups[held.group as usize];
            *group = Group { tracks: held.tracks, base, page_base, ..Group::default() };
            let most = held.cells_in(page_count.into()) as u32;
            base += most;
            page_base += (most * held.tracks) as usize;
        }
        let entry_count = EntryLists::entry_count(page_count) as usize;
        Ok(Self {
            groups,
            entry_count,
            of_entry: memory.zeroed((entry_count * limits.count() as usize) as u64)?,
            gone: memory.zeroed((entry_count * limits.count() as usize) as u64)?,
            cells: memory.zeroed(base.into())?,
            pages: memory.zeroed(page_base as u64)?,
            swap_pages: memory.zeroed(if swap_pages > 0 { page_base as u64 } else { 0 })?,
            idle: Ends::default(),
            cursors: Cursors::START,
            saving: memory.reserved(saving.into())?,
            deferred: memory.queue(u64::from(max_steps) + 1)?,
            count: 0,
            evicted: 0,
            size: SizeInfo::default(),
            changes: CellChanges::default(),
            limits,
        })
    }

    /// Returns the cell of a group at an entry.
    pub fn at(&self, group: u32, entry: u32) -> CellId {
        self.of_entry[self.place(group, entry)]
    }

    fn place(&self, group: u32, entry: u32) -> usize {
        group as usize * self.entry_count + entry as usize
    }

    /// Returns what has become of the cell of a group at an entry.
    pub(super) fn gone(&self, group: u32, entry: u32) -> Gone {
        match self.gone[self.place(group, entry)] {
            0 => Gone::Never,
            1 => Gone::Evicted,
            _ => Gone::Superseded,
        }
    }

    /// Returns the pages of a cell that is on the device, one for each track of its group.
    pub fn pages(&self, cell: CellId) -> &[PageId] {
        &self.pages[self.range(cell)]
    }

    fn pages_mut(&mut self, cell: CellId) -> &mut [PageId] {
        let range = self.range(cell);
        &mut self.pages[range]
    }

    /// Returns the indices of a cell's pages, and of its swap pages.
    pub fn range(&self, cell: CellId) -> Range<usize> {
        let Group { tracks, base, page_base, .. } = self.groups[usize::from(self.cells[cell.index()].group)];
        let first = page_base + ((cell.raw() - base) * tracks) as usize;
        first..first + tracks as usize
    }

    /// Returns the number of cells, and of cells whose device pages were evicted so far.
    pub fn counts(&self) -> (u32, u64) {
        (self.count, self.evicted)
    }

    /// Returns the numbers of device pages of cells of windows and chunks, and of cells of states.
    pub fn device_pages(&self) -> [u32; 2] {
        let pages = |group: &Group| group.on_device * group.tracks;
        let all: u32 = self.groups.iter().map(pages).sum();
        let states = self.limits.state().map_or(0, |state| pages(&self.groups[state.group as usize]));
        [all - states, states]
    }

    /// Returns the numbers of device pages of idle and of used cells.
    pub(super) fn size_info(&self) -> SizeInfo {
        self.size
    }

    /// Returns the places at which a sequence keeps pages.
    pub(super) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Returns the group of a cell and its entry.
    pub(super) fn entry_of(&self, cell: CellId) -> (u32, u32) {
        let Cell { group, entry, .. } = self.cells[cell.index()];
        (group.into(), entry)
    }

    /// Returns whether a cell that is on the device also has swap pages.
    pub(super) fn is_clean(&self, cell: CellId) -> bool {
        self.cells[cell.index()].sides & SWAP > 0
    }

    /// Returns whether a cell has pages on the device.
    pub fn is_on_device(&self, cell: CellId) -> bool {
        self.cells[cell.index()].sides & DEVICE > 0
    }

    /// Returns the number of pages that a cell has on the device.
    pub fn device_tracks(&self, cell: CellId) -> u32 {
        if self.is_on_device(cell) { self.tracks(cell) } else { 0 }
    }

    /// Returns the number of tracks of a cell's group.
    pub fn tracks(&self, cell: CellId) -> u32 {
        self.groups[usize::from(self.cells[cell.index()].group)].tracks
    }

    /// Returns the swap pages of a cell that is in swap memory.
    pub(super) fn swap_pages(&self, cell: CellId) -> &[SwapPageId] {
        &self.swap_pages[self.range(cell)]
    }

    /// Returns the groups whose cells at an entry are in a medium: bit `i` for group `i + 1`.
    pub(super) fn groups_in(&self, entry: u32, medium: Medium) -> u32 {
        let side = [DEVICE, SWAP][medium as usize];
        let is_there = |cell: CellId| cell.is_some() && self.cells[cell.index()].sides & side > 0;
        (0..self.limits.count()).map(|group| u32::from(is_there(self.at(group, entry))) << group).sum()
    }

    /// Logs that a medium has received a cell, or no longer has it.
    fn log(&mut self, cell: CellId, medium: Medium, is_stored: bool) {
        let Cell { group, entry, .. } = self.cells[cell.index()];
        self.changes.push(CellChange { group: group.into(), entry, medium, is_stored });
    }

    /// Returns whether a store has the pages of a cell.
    pub(super) fn is_stored(&self, cell: CellId) -> bool {
        self.cells[cell.index()].sides & STORED > 0
    }

    /// Records whether a store has the pages of the cell at an entry, if there is one.
    pub(super) fn set_stored(&mut self, group: u32, entry: u32, is_stored: bool) {
        let cell = self.at(group, entry);
        if cell.is_some() {
            let sides = &mut self.cells[cell.index()].sides;
            *sides = *sides & !STORED | if is_stored { STORED } else { 0 };
        }
    }

    /// Appends the device pages and the swap pages of a cell to `out`; [`NO_SWAP_PAGE`] for lacking swap pages.
    pub(super) fn write_pages(&self, cell: CellId, out: &mut Vec<(PageId, SwapPageId)>) {
        let in_swap = self.cells[cell.index()].sides & SWAP > 0;
        let pages = self.pages(cell).iter().zip(self.swap_pages(cell));
        out.extend(pages.map(|(&device, &swap)| (device, if in_swap { swap } else { NO_SWAP_PAGE })));
    }

    /// Makes a cell of these swap pages at an entry, with one user. A store has the pages.
    pub(super) fn create_fetched(&mut self, group: u32, entry: u32, pages: &[SwapPageId]) -> CellId {
        let cell = self.add(group, entry, SWAP | STORED);
        self.pages_mut(cell).fill(NO_PAGE);
        let range = self.range(cell);
        self.swap_pages[range].copy_from_slice(pages);
        self.log(cell, Medium::Swap, true);
        cell
    }

    /// Makes a cell of these pages at an entry, with one user.
    pub fn create(&mut self, group: u32, entry: u32, pages: impl Iterator<Item = PageId>) -> CellId {
        let cell = self.add(group, entry, DEVICE);
        self.pages_mut(cell).iter_mut().zip(pages).for_each(|(own, page)| *own = page);
        self.size.protected += self.tracks(cell);
        self.log(cell, Medium::Device, true);
        self.groups[group as usize].on_device += 1;
        cell
    }

    /// Adds a cell at an entry, with one user. The caller writes its pages.
    fn add(&mut self, group: u32, entry: u32, sides: u16) -> CellId {
        let cells = &mut self.groups[group as usize];
        let cell = match cells.free {
            CellId::NONE => {
                cells.fresh += 1;
                CellId::new(cells.base + cells.fresh - 1)
            }
            cell => {
                cells.free = self.cells[cell.index()].younger;
                cell
            }
        };
        self.cells[cell.index()] = Cell { users: 1, entry, group: group as u16, sides, ..Cell::default() };
        let place = self.place(group, entry);
        (self.of_entry[place], self.gone[place]) = (cell, Gone::Never as u8);
        self.count += 1;
        cell
    }

    /// Frees a cell without users; its device pages are appended to `freed`. An evicted cell's pages are lost, unless a
    /// store has them.
    pub(super) fn remove(
        &mut self,
        cell: CellId,
        is_evicted: bool,
        mut swap: Option<&mut Swap>,
        freed: &mut Vec<PageId>,
    ) {
        let Cell { users, entry, group, .. } = self.cells[cell.index()];
        assert!(users == 0, "G2: a used cell's node is locked");
        let place = self.place(group.into(), entry);
        self.gone[place] = if self.is_superseded(cell) { Gone::Superseded } else { Gone::Evicted } as u8;
        self.drop_copy(cell, swap.as_deref_mut());
        let on_device = self.is_on_device(cell);
        if is_evicted {
            self.evicted += u64::from(on_device);
            let lost = if self.is_stored(cell) { 0 } else { self.tracks(cell).into() };
            swap.into_iter().for_each(|swap| swap.counts.lost += lost);
        }
        if on_device {
            self.size.evictable -= self.tracks(cell);
            freed.extend_from_slice(self.pages(cell));
            self.log(cell, Medium::Device, false);
            self.groups[usize::from(group)].on_device -= 1;
        }
        self.unlink(None, cell);
        self.of_entry[place] = CellId::NONE;
        let group = &mut self.groups[usize::from(group)];
        self.cells[cell.index()] = Cell { younger: group.free, ..Cell::default() };
        group.free = cell;
        self.count -= 1;
    }

    /// Removes the cells at the last `count` entries of a node, which are about to be removed.
    pub(super) fn detach(
        &mut self,
        nodes: &Nodes,
        node: NodeKey,
        count: u32,
        is_evicted: bool,
        mut swap: Option<&mut Swap>,
        freed: &mut Vec<PageId>,
    ) {
        for (start, len) in nodes.lists.last_runs_back(&nodes.link[node].list, count) {
            for entry in start..start + len {
                for group in 0..self.limits.count() {
                    let cell = self.at(group, entry);
                    if cell.is_some() {
                        self.remove(cell, is_evicted, swap.as_deref_mut(), freed);
                    }
                    let place = self.place(group, entry);
                    self.gone[place] = Gone::Never as u8;
                }
            }
        }
    }

    /// Returns the number of entries to take from the end of an idle node, so that their pages and their cells free at
    /// least `lacking` pages. If the whole node does not suffice, returns the number of its entries.
    pub(super) fn victims(&self, nodes: &Nodes, node: NodeKey, lacking: u32) -> u32 {
        let list = &nodes.link[node].list;
        let runs = nodes.lists.last_runs_back(list, list.pages());
        let (mut count, mut pages) = (0, 0);
        for entry in runs.flat_map(|(start, len)| (start..start + len).rev()) {
            let own = (0..self.limits.count()).map(|group| self.at(group, entry));
            pages += 1 + own.filter(|cell| cell.is_some()).map(|cell| self.tracks(cell)).sum::<u32>();
            count += 1;
            if pages >= lacking {
                break;
            }
        }
        count
    }

    /// Returns the oldest idle cell that has what a cursor looks for, and its age.
    pub(super) fn seek(&mut self, seek: Seek) -> Option<(CellId, u64)> {
        let Self { cells, cursors, .. } = self;
        let column = |cell: CellId| &cells[cell.index()];
        let has = |cell| seek.finds(column(cell).sides(), 1);
        let found = cursors.seek(seek, |cell| column(cell).stamp, |cell| some(column(cell).younger), has);
        found.map(|cell| (cell, column(cell).stamp))
    }

    fn move_back(&mut self, seek: Seek, cell: CellId) {
        let Self { cells, cursors, .. } = self;
        cursors.move_back(seek, cell, |cell| cells[cell.index()].stamp);
    }

    /// Gives an idle cell the swap page at `index` of [`Cells::range`], if there is one. Returns the number of pages.
    pub(super) fn set_swap_page(&mut self, index: usize, page: Option<SwapPageId>) -> usize {
        page.into_iter().map(|page| self.swap_pages[index] = page).count()
    }

    /// Frees swap pages that were taken for a cell which cannot be saved.
    pub(super) fn free_swap_pages(&self, range: Range<usize>, swap: &mut Swap) {
        self.swap_pages[range].iter().for_each(|page| swap.pool.drop_page(*page));
    }

    /// Adds the saves of a cell's pages to its swap pages, which are taken, to the batch.
    pub(super) fn save(&mut self, cell: CellId, swap: &mut Swap) {
        for (&device, &page) in self.pages(cell).iter().zip(&self.swap_pages[self.range(cell)]) {
            swap.save_page(device, page);
        }
        self.cells[cell.index()].sides |= SWAP | SAVING;
        self.saving.push(cell);
        self.log(cell, Medium::Swap, true);
    }

    /// Frees the device pages of an idle cell that has swap pages.
    pub(super) fn forget_device(&mut self, cell: CellId, freed: &mut Vec<PageId>) {
        self.size.evictable -= self.tracks(cell);
        self.evicted += 1;
        self.cells[cell.index()].sides &= !DEVICE;
        self.log(cell, Medium::Device, false);
        self.groups[usize::from(self.cells[cell.index()].group)].on_device -= 1;
        freed.extend(self.pages_mut(cell).iter_mut().map(|page| std::mem::replace(page, NO_PAGE)));
        self.move_back(Seek::SwapOnly, cell);
    }

    /// Frees the swap pages of a cell, if it has any.
    fn drop_copy(&mut self, cell: CellId, swap: Option<&mut Swap>) {
        let sides = self.cells[cell.index()].sides;
        let Some(swap) = swap.filter(|_| sides & SWAP > 0) else { return };
        if sides & DEVICE > 0 {
            swap.clean -= self.tracks(cell);
        }
        self.cells[cell.index()].sides &= !(SWAP | SAVING);
        self.log(cell, Medium::Swap, false);
        self.swap_pages[self.range(cell)].iter().for_each(|page| swap.free_page(*page));
    }

    /// Ends the batch of saves for cells. If it failed, cells that are still on the device become dirty again, and the
    /// other cells are removed. Returns the number of removed cells.
    pub(super) fn end_saves(&mut self, failed: bool, swap: &mut Swap, freed: &mut Vec<PageId>) -> u64 {
        let (mut saving, mut removed) = (std::mem::take(&mut self.saving), 0);
        for cell in saving.drain(..) {
            let sides = self.cells[cell.index()].sides;
            if sides & SAVING == 0 {
                continue; // The cell has been removed, or used again, since the save.
            }
            if !failed {
                self.cells[cell.index()].sides &= !SAVING;
            } else if sides & DEVICE > 0 {
                self.drop_copy(cell, Some(swap));
                self.move_back(Seek::Dirty, cell);
            } else {
                self.remove(cell, true, Some(swap), freed);
                removed += 1;
            }
        }
        self.saving = saving;
        removed
    }

    /// Marks a cell that is in swap memory alone as a part of a load. Returns whether it is such a cell and was not
    /// marked yet.
    pub(super) fn claim(&mut self, cell: CellId, load: u64) -> bool {
        // A used cell has no age, so its stamp stores the load.
        !self.is_on_device(cell) && std::mem::replace(&mut self.cells[cell.index()].stamp, load) != load
    }

    /// Assigns the first of `pages` to a cell that is in swap memory alone, and appends its loads to `moves`.
    pub(super) fn assign(&mut self, cell: CellId, pages: &mut &[PageId], moves: &mut Vec<PageMove>) {
        let range = self.range(cell);
        let own = pages.split_off(..range.len()).expect("they were counted");
        self.pages_mut(cell).copy_from_slice(own);
        let swap_pages = &self.swap_pages[range];
        moves.extend(own.iter().zip(swap_pages).map(|(&device, &swap)| PageMove { device, swap }));
    }

    /// Detaches the assigned pages of a cell whose load failed.
    pub(super) fn unassign(&mut self, cell: CellId) {
        self.pages_mut(cell).fill(NO_PAGE);
    }

    /// Attaches device pages, which a sequence has computed, to a cell that is in swap memory alone.
    pub(super) fn set_computed(&mut self, cell: CellId, pages: impl Iterator<Item = PageId>, swap: &mut Swap) {
        self.pages_mut(cell).iter_mut().zip(pages).for_each(|(own, page)| *own = page);
        self.set_loaded(cell, swap);
    }

    /// Records that a used cell, which was in swap memory alone, is on the device. Its pages are already attached.
    pub(super) fn set_loaded(&mut self, cell: CellId, swap: &mut Swap) {
        assert!(swap.saves.is_empty(), "the backend has received the saves");
        self.log(cell, Medium::Device, true);
        self.groups[usize::from(self.cells[cell.index()].group)].on_device += 1;
        self.drop_copy(cell, Some(swap));
        let sides = &mut self.cells[cell.index()].sides;
        *sides = *sides & (STORED | JUNCTION | SUPERSEDED) | DEVICE;
        self.size.protected += self.tracks(cell);
    }
}

/// Returns a cell that may be none as an option.
fn some(cell: CellId) -> Option<CellId> {
    cell.is_some().then_some(cell)
}

#[cfg(test)]
mod swap_tests;
#[cfg(test)]
mod tests;
