//! The users of cells, and the lists of cells without running users: idle ones, and those deferred to a step.

use crate::fence::Fence;
use crate::id::{CellId, StepId};

use super::{Ages, Cell, Cells, Ends, JUNCTION, SUPERSEDED, Seek, Swap, some};

impl Cells {
    /// Returns whether a cell has no users, now or as of the completion of `step`.
    pub fn is_idle(&self, cell: CellId, step: Option<StepId>) -> bool {
        let Cell { users, waiting, until, .. } = self.cells[cell.index()];
        users == 0 || users == waiting && step.is_some_and(|step| until <= step)
    }

    /// Counts one more user of a cell. A cell that was idle loses its clean copy.
    pub(in crate::prefix) fn acquire(&mut self, cell: CellId, swap: Option<&mut Swap>, fence: &mut Fence) {
        let Cell { users, waiting, until, .. } = self.cells[cell.index()];
        if users == 0 {
            self.unlink(None, cell);
            if self.is_on_device(cell) {
                self.drop_copy(cell, swap);
            }
            self.size.evictable -= self.device_tracks(cell);
            self.size.protected += self.device_tracks(cell);
        } else if users == waiting {
            self.unlink(Some(until), cell);
            fence.remove_idle(until, self.tracks(cell));
        }
        self.forget_waiting(cell, fence);
        self.cells[cell.index()].users += 1;
    }

    /// Removes the waiting users from a cell's counts, if the last step that they wait for is complete.
    fn forget_waiting(&mut self, cell: CellId, fence: &Fence) {
        let cell = &mut self.cells[cell.index()];
        if cell.waiting > 0 && fence.is_complete(cell.until) {
            cell.users -= cell.waiting;
            cell.waiting = 0;
        }
    }

    /// Removes a user now, or when `last_step` is complete; `superseded` as in [`Cells::is_superseded`].
    pub(in crate::prefix) fn release(
        &mut self,
        cell: CellId,
        last_step: StepId,
        superseded: bool,
        fence: &mut Fence,
        ages: &mut Ages,
    ) {
        self.set_superseded(cell, superseded);
        self.forget_waiting(cell, fence);
        let now = fence.is_complete(last_step);
        let this = &mut self.cells[cell.index()];
        assert!(this.users > this.waiting, "G2: a user is counted until it is removed");
        if now {
            this.users -= 1;
        } else {
            this.waiting += 1;
            this.until = this.until.max(last_step);
        }
        let Cell { users, waiting, until, .. } = *this;
        if users == 0 {
            self.become_idle(cell, ages);
        } else if users == waiting {
            fence.add_idle(until, self.tracks(cell));
            self.defer(cell, until);
        }
    }

    fn become_idle(&mut self, cell: CellId, ages: &mut Ages) {
        let (mut ends, sides) = (self.idle, self.cells[cell.index()].sides());
        let finds = |seek: Seek| seek.finds(sides, 1);
        if self.is_superseded(cell) {
            self.cells[cell.index()].stamp = ages.before_all();
            self.link_oldest(&mut ends, cell);
            self.cursors.push_oldest(cell, finds);
        } else {
            self.cells[cell.index()].stamp = ages.next(1);
            self.link(&mut ends, cell);
            self.cursors.push(cell, finds);
        }
        self.idle = ends;
        self.size.evictable += self.device_tracks(cell);
        self.size.protected -= self.device_tracks(cell);
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

    /// Makes the cells idle that are deferred until `step` or an earlier step.
    pub(in crate::prefix) fn complete(&mut self, step: StepId, fence: &mut Fence, ages: &mut Ages) {
        while let Some(&(until, Ends { oldest, .. })) = self.deferred.front()
            && until <= step
        {
            self.deferred.pop_front();
            let mut next = some(oldest);
            while let Some(cell) = next {
                let this = &mut self.cells[cell.index()];
                (this.users, this.waiting) = (0, 0);
                next = some(this.younger);
                fence.remove_idle(until, self.tracks(cell));
                self.become_idle(cell, ages);
            }
        }
    }

    /// Makes a cell one that no later state supersedes.
    pub fn keep_age(&mut self, cell: CellId) {
        self.cells[cell.index()].sides |= JUNCTION;
    }

    /// Records whether the user that leaves a cell supersedes it.
    fn set_superseded(&mut self, cell: CellId, superseded: bool) {
        let sides = &mut self.cells[cell.index()].sides;
        *sides = *sides & !SUPERSEDED | if superseded { SUPERSEDED } else { 0 };
    }

    /// Returns whether a cell without running users is superseded, so that it is evicted first.
    pub(in crate::prefix) fn is_superseded(&self, cell: CellId) -> bool {
        let Cell { users, waiting, sides, .. } = self.cells[cell.index()];
        users == waiting && sides & (SUPERSEDED | JUNCTION) == SUPERSEDED
    }

    /// Adds a cell to the old end of a list.
    fn link_oldest(&mut self, ends: &mut Ends, cell: CellId) {
        let this = &mut self.cells[cell.index()];
        (this.older, this.younger) = (CellId::NONE, ends.oldest);
        match ends.oldest {
            CellId::NONE => ends.youngest = cell,
            younger => self.cells[younger.index()].older = cell,
        }
        ends.oldest = cell;
    }

    /// Appends a cell to the young end of a list.
    pub(super) fn link(&mut self, ends: &mut Ends, cell: CellId) {
        let this = &mut self.cells[cell.index()];
        (this.older, this.younger) = (ends.youngest, CellId::NONE);
        match ends.youngest {
            CellId::NONE => ends.oldest = cell,
            older => self.cells[older.index()].younger = cell,
        }
        ends.youngest = cell;
    }

    /// Takes a cell out of the list of a step, or out of the idle list.
    pub(super) fn unlink(&mut self, step: Option<StepId>, cell: CellId) {
        let Cell { older, younger, .. } = self.cells[cell.index()];
        if older.is_some() {
            self.cells[older.index()].younger = younger;
        }
        if younger.is_some() {
            self.cells[younger.index()].older = older;
        }
        let ends = match step {
            None => {
                self.cursors.remove(cell, some(younger));
                &mut self.idle
            }
            Some(step) => {
                let index = self.deferred.partition_point(|(until, _)| *until < step);
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
}
