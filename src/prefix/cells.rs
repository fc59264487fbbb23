//! Cells: the cached pages of the groups of limited reach, at entries of the tree's spans.
//!
//! A cell is the pages of one such group at one entry, one for each track. Sequences use each cell separately, and
//! independently of the locks on nodes: a window moves on while its prefix stays locked.
//!
//! * G1. A cell belongs to an entry of a live span, and the entry names it; its device pages are Cached. All other
//!   cells are free.
//! * G2. The users of a cell are the held places of sequences that name the cell, released places that wait for a step,
//!   and sequences that wait for its load. A used cell's node is locked.
//! * G3. A cell without users is in the idle list. A cell whose users all wait for a step is in the deferred list of
//!   the last such step. Any other cell is in no list. Stamps rise along the idle list.
//! * G5. Deferred lists are in the order of their steps. The fence counts the pages of a list as idle after its step.
//!
//! Cells and nodes are stamped by one counter as they become idle (`ages.rs`), so that eviction takes the older one
//! first.
//!
//! With swap memory, a cell has all of its pages on the device, all of them in swap memory, or both. It moves whole, as
//! an entry does.
//!
//! Not here: moves of cells to swap memory and back (`cell_moves.rs`), which places of a sequence name which cell
//! (`sequence/`), when cells are made and used (`system/`).

use std::collections::VecDeque;
use std::ops::Range;

use bytemuck::{Pod, Zeroable};

use crate::fence::Fence;
use crate::id::{CellId, PageId, StepId, SwapPageId};
use crate::layout::Limits;
use crate::memory::{Memory, OutOfMemory};

use super::ages::Ages;
use super::residency::{Residency, Seek};

/// One cell. A cell that was never used is all zeros.
#[derive(Clone, Copy, Default, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Cell {
    pub stamp: u64,
    /// The last step that one of the waiting users waits for.
    pub until: StepId,
    pub users: u32,
    /// Number of `users` that only wait for a step.
    pub waiting: u32,
    pub entry: u32,
    pub group: u16,
    /// Where the pages are: [`DEVICE`], [`SWAP`] or both; and [`SAVING`].
    pub sides: u16,
    older: CellId,
    younger: CellId,
}

/// The cell has pages of the pool.
pub(super) const DEVICE: u16 = 1;
/// The cell has swap pages.
pub(super) const SWAP: u16 = 2;
/// The engine has not yet passed the cell's save to the backend.
pub(super) const SAVING: u16 = 4;

impl Cell {
    /// Returns where the pages are, in the form of a node with one entry.
    pub fn residency(&self) -> Residency {
        let [device, swap_start] = [DEVICE, SWAP].map(|side| u32::from(self.sides & side > 0));
        Residency { device, swap_start: 1 - swap_start }
    }
}

/// The ends of a list of cells.
#[derive(Clone, Copy, Default)]
pub(super) struct Ends {
    pub oldest: CellId,
    pub youngest: CellId,
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
    /// The first free cell; `younger` links the free cells.
    free: CellId,
}

/// All cells.
pub(super) struct Cells {
    pub limits: Limits,
    groups: [Group; 3],
    entry_count: usize,
    of_entry: Vec<CellId>,
    pub cells: Vec<Cell>,
    pages: Vec<PageId>,
    /// Swap pages of the cells, indexed like `pages`; empty without swap memory.
    pub swap_pages: Vec<SwapPageId>,
    pub idle: Ends,
    /// The oldest idle cell that may have what each [`Seek`] looks for. Only with swap memory.
    pub cursors: [CellId; 3],
    /// Cells whose saves the engine has not yet passed to the backend.
    pub saving: Vec<CellId>,
    /// A list for each step that deferred cells wait for.
    pub deferred: VecDeque<(StepId, Ends)>,
    /// Number of cells that an entry names.
    pub count: u32,
    pub evicted: u64,
    /// Number of pages of removed cells, and number of removed cells that were on the device.
    pub removed: [u64; 2],
}

impl Cells {
    pub fn new(
        limits: Limits,
        [device_pages, swap_pages]: [u32; 2],
        entry_count: u32,
        max_steps: u32,
        memory: &mut Memory,
    ) -> Result<Self, OutOfMemory> {
        let page_count = device_pages + swap_pages;
        let saving = if swap_pages > 0 { device_pages } else { 0 };
        let mut groups = [Group::default(); 3];
        let (mut base, mut page_base) = (1, 0);
        for held in limits.held_groups(0) {
            let group = &mut groups[held.group as usize];
            *group = Group { tracks: held.tracks, base, page_base, ..Group::default() };
            let room = page_count / held.tracks;
            base += room;
            page_base += (room * held.tracks) as usize;
        }
        let entry_count = entry_count as usize;
        Ok(Self {
            groups,
            entry_count,
            of_entry: memory.zeroed((entry_count * limits.count() as usize) as u64)?,
            cells: memory.zeroed(base.into())?,
            pages: memory.zeroed(page_base as u64)?,
            swap_pages: memory.zeroed(if swap_pages > 0 { page_base as u64 } else { 0 })?,
            idle: Ends::default(),
            cursors: [CellId::NONE; 3],
            saving: memory.reserved(saving.into())?,
            deferred: memory.queue(u64::from(max_steps) + 1)?,
            count: 0,
            evicted: 0,
            removed: [0; 2],
            limits,
        })
    }

    /// Returns the cell of a group at an entry.
    pub fn at(&self, group: u32, entry: u32) -> CellId {
        self.of_entry[group as usize * self.entry_count + entry as usize]
    }

    /// Returns the pages of a cell that is on the device, one for each track of its group.
    pub fn pages(&self, cell: CellId) -> &[PageId] {
        &self.pages[self.range(cell)]
    }

    /// Returns [`Cells::pages`], to change them.
    pub fn pages_mut(&mut self, cell: CellId) -> &mut [PageId] {
        let range = self.range(cell);
        &mut self.pages[range]
    }

    /// Returns the indices of a cell's pages, and of its swap pages.
    pub fn range(&self, cell: CellId) -> Range<usize> {
        let Group { tracks, base, page_base, .. } = self.groups[usize::from(self.cells[cell.index()].group)];
        let first = page_base + ((cell.raw() - base) * tracks) as usize;
        first..first + tracks as usize
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

    /// Makes a cell of these pages at an entry, with one user.
    pub fn create(&mut self, group: u32, entry: u32, pages: impl Iterator<Item = PageId>) -> CellId {
        let of = &mut self.groups[group as usize];
        let cell = match of.free {
            CellId::NONE => {
                of.fresh += 1;
                CellId::new(of.base + of.fresh - 1)
            }
            cell => {
                of.free = self.cells[cell.index()].younger;
                cell
            }
        };
        let new = Cell { users: 1, entry, group: group as u16, sides: DEVICE, ..Cell::default() };
        self.cells[cell.index()] = new;
        self.pages_mut(cell).iter_mut().zip(pages).for_each(|(own, page)| *own = page);
        self.of_entry[group as usize * self.entry_count + entry as usize] = cell;
        self.count += 1;
        cell
    }

    /// Frees a cell without users and without swap pages; its device pages are appended to `freed`.
    pub fn remove(&mut self, cell: CellId, freed: &mut Vec<PageId>) {
        let Cell { users, entry, group, .. } = self.cells[cell.index()];
        assert!(users == 0, "G2: a used cell's node is locked");
        self.removed[0] += u64::from(self.tracks(cell));
        if self.is_on_device(cell) {
            freed.extend_from_slice(self.pages(cell));
            self.removed[1] += 1;
        }
        self.unlink(None, cell);
        self.of_entry[usize::from(group) * self.entry_count + entry as usize] = CellId::NONE;
        let of = &mut self.groups[usize::from(group)];
        self.cells[cell.index()] = Cell { younger: of.free, ..Cell::default() };
        of.free = cell;
        self.count -= 1;
    }

    /// Returns whether a cell is idle now, or will be once `step` is complete.
    pub fn is_idle_after(&self, cell: CellId, step: StepId) -> bool {
        let Cell { users, waiting, until, .. } = self.cells[cell.index()];
        users == 0 || users == waiting && until <= step
    }

    /// Returns whether a cell has no users.
    pub fn is_idle(&self, cell: CellId) -> bool {
        self.cells[cell.index()].users == 0
    }

    /// Counts one more user. Returns whether the cell was idle.
    pub fn acquire(&mut self, cell: CellId, fence: &mut Fence) -> bool {
        let Cell { users, waiting, until, .. } = self.cells[cell.index()];
        if users == 0 {
            self.unlink(None, cell);
        } else if users == waiting {
            self.unlink(Some(until), cell);
            fence.remove_idle(until, self.tracks(cell));
        }
        self.forget_waiting(cell, fence);
        self.cells[cell.index()].users += 1;
        users == 0
    }

    /// Removes the waiting users from a cell's counts, if the last step that they wait for is complete.
    fn forget_waiting(&mut self, cell: CellId, fence: &Fence) {
        let cell = &mut self.cells[cell.index()];
        if cell.waiting > 0 && fence.is_complete(cell.until) {
            cell.users -= cell.waiting;
            cell.waiting = 0;
        }
    }

    /// Removes a user now, or when `last_step` is complete. Returns whether the cell is idle now.
    pub fn release(&mut self, cell: CellId, last_step: StepId, fence: &mut Fence, ages: &mut Ages) -> bool {
        self.forget_waiting(cell, fence);
        let now = fence.is_complete(last_step);
        let of = &mut self.cells[cell.index()];
        assert!(of.users > of.waiting, "G2: a user is counted until it is removed");
        if now {
            of.users -= 1;
        } else {
            of.waiting += 1;
            of.until = of.until.max(last_step);
        }
        let Cell { users, waiting, until, .. } = *of;
        if users == 0 {
            self.become_idle(cell, ages);
        } else if users == waiting {
            fence.add_idle(until, self.tracks(cell));
            self.defer(cell, until);
        }
        users == 0
    }

    fn become_idle(&mut self, cell: CellId, ages: &mut Ages) {
        self.cells[cell.index()].stamp = ages.next(1);
        let mut ends = self.idle;
        self.link(&mut ends, cell);
        self.idle = ends;
        if !self.swap_pages.is_empty() {
            for seek in Seek::ALL {
                let cursor = &mut self.cursors[seek as usize];
                if !cursor.is_some() && seek.finds(self.cells[cell.index()].residency(), 1) {
                    *cursor = cell;
                }
            }
        }
    }

    fn defer(&mut self, cell: CellId, until: StepId) {
        let index = self.deferred.partition_point(|(step, _)| *step < until);
        if self.deferred.get(index).is_none_or(|(step, _)| *step != until) {
            self.deferred.insert(index, (until, Ends::default()));
        }
        let mut ends = self.deferred[index].1;
        self.link(&mut ends, cell);
        self.deferred[index].1 = ends;
    }

    /// Makes the cells idle that are deferred until `step` or an earlier step. Returns the number of their pages.
    pub fn complete(&mut self, step: StepId, fence: &mut Fence, ages: &mut Ages) -> u32 {
        let mut pages = 0;
        while let Some(&(until, Ends { oldest, .. })) = self.deferred.front()
            && until <= step
        {
            self.deferred.pop_front();
            let mut at = oldest;
            while at.is_some() {
                let (cell, tracks) = (at, self.tracks(at));
                at = self.cells[cell.index()].younger;
                let of = &mut self.cells[cell.index()];
                (of.users, of.waiting) = (0, 0);
                fence.remove_idle(until, tracks);
                pages += tracks;
                self.become_idle(cell, ages);
            }
        }
        pages
    }

    /// Appends a cell to the young end of a list.
    fn link(&mut self, ends: &mut Ends, cell: CellId) {
        let of = &mut self.cells[cell.index()];
        (of.older, of.younger) = (ends.youngest, CellId::NONE);
        match ends.youngest {
            CellId::NONE => ends.oldest = cell,
            older => self.cells[older.index()].younger = cell,
        }
        ends.youngest = cell;
    }

    /// Takes a cell out of the list of a step, or out of the idle list.
    fn unlink(&mut self, step: Option<StepId>, cell: CellId) {
        let Cell { older, younger, .. } = self.cells[cell.index()];
        if older.is_some() {
            self.cells[older.index()].younger = younger;
        }
        if younger.is_some() {
            self.cells[younger.index()].older = older;
        }
        let ends = match step {
            None => {
                let here = self.cursors.iter_mut().filter(|cursor| **cursor == cell);
                here.for_each(|cursor| *cursor = younger);
                &mut self.idle
            }
            Some(step) => {
                let index = self.deferred.partition_point(|(of, _)| *of < step);
                &mut self.deferred[index].1
            }
        };
        if ends.oldest == cell {
            ends.oldest = younger;
        }
        if ends.youngest == cell {
            ends.youngest = older;
        }
    }

    /// Returns the next younger cell in the list that contains a cell; [`CellId::NONE`] after the last.
    pub fn younger(&self, cell: CellId) -> CellId {
        self.cells[cell.index()].younger
    }

    /// Returns the cells of a list, oldest first.
    pub fn list(&self, ends: Ends) -> impl Iterator<Item = CellId> + '_ {
        let some = |cell: CellId| cell.is_some().then_some(cell);
        let next = move |cell: &CellId| some(self.cells[cell.index()].younger);
        std::iter::successors(some(ends.oldest), next)
    }

    /// Returns each cell that an entry names, as (group, entry, cell). For audits.
    pub fn named(&self) -> impl Iterator<Item = (u32, u32, CellId)> + '_ {
        let named = self.of_entry.iter().enumerate().filter(|(_, cell)| cell.is_some());
        named.map(|(at, &cell)| ((at / self.entry_count) as u32, (at % self.entry_count) as u32, cell))
    }
}

#[cfg(test)]
mod tests;
