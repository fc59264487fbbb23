//! The states of one sequence, read and changed: what its next plan reads and writes, and what becomes of its places.
//!
//! `states.rs` has the table, and states its invariants.

use super::row::{RowMut, Stores};
use super::states::{Current, RowStates, StateNeed, StateOwner, StatePlace, UNSENT};
use super::{Sequence, SequenceTable};
use crate::id::{CellId, PageId, StateUse};
use crate::plan::TableWrite;

impl Stores {
    /// Returns whether a row's next plans update its state in place, send no words for it, and meet no mark.
    fn can_be_steady(&self, sequence: &Sequence) -> bool {
        let states = &self.states.rows[sequence.row.index()];
        let Current::At(at) = states.current else { return false };
        let place = states.place(at);
        place.owner == StateOwner::Row
            && place.mark == 0
            && states.sent == [at + 1; 2]
            && states.careful_until <= sequence.planned_len
            && self.next_mark(sequence).is_none()
    }
}

impl SequenceTable {
    /// Returns whether a group of layers keeps a state.
    #[inline]
    pub(crate) fn has_states(&self) -> bool {
        self.stores.states.has_any()
    }

    /// Returns the states of a sequence. There is a group that keeps a state.
    pub(crate) fn states(&self, sequence: &Sequence) -> &RowStates {
        &self.stores.states.rows[sequence.row.index()]
    }

    /// Returns the pages of a place of a sequence.
    pub(crate) fn state_pages(&self, sequence: &Sequence, place: u8) -> &[PageId] {
        self.stores.states.pages_of(sequence.row.index(), place)
    }

    /// Returns the places of a sequence that have an owner.
    pub(crate) fn state_places(&self, sequence: &Sequence) -> impl Iterator<Item = (u8, StatePlace)> + use<'_> {
        let states = self.stores.states.rows.get(sequence.row.index());
        let places = states.into_iter().flat_map(|states| (0..).zip(states.places));
        places.filter(|(_, place)| place.owner != StateOwner::Nobody)
    }

    /// Returns whether S10 holds for a row that counts as steady.
    pub(crate) fn can_be_steady(&self, sequence: &Sequence) -> bool {
        self.stores.can_be_steady(sequence)
    }

    /// Returns the pages of the state that a sequence's last plan reads (`part` 0) or writes (1).
    pub(crate) fn planned_state(&self, sequence: &Sequence, part: u32) -> &[PageId] {
        self.stores.pages.state(sequence.row, part)
    }
}

impl RowMut<'_> {
    /// Returns whether a group of layers keeps a state.
    pub fn has_state(&self) -> bool {
        self.stores.states.has_any()
    }

    pub fn states(&self) -> &RowStates {
        &self.stores.states.rows[self.sequence.row.index()]
    }

    /// Returns the states to change. The row is no longer steady.
    pub fn states_mut(&mut self) -> &mut RowStates {
        self.sequence.dirty_from.set_steady(false);
        &mut self.stores.states.rows[self.sequence.row.index()]
    }

    pub fn state_pages(&self, place: u8) -> &[PageId] {
        self.stores.states.pages_of(self.sequence.row.index(), place)
    }

    /// Decides what the next plan reads and writes, and returns the pages that it takes; `None` if the state is lost.
    /// [`RowMut::give_up_mark`] may change the decision.
    pub fn begin_state(&mut self) -> Option<StateNeed> {
        let planned_len = self.sequence.planned_len;
        let states = self.states_mut();
        let reads = match states.current {
            Current::Lost => return None,
            Current::Fresh => 0,
            Current::At(place) => place + 1,
        };
        let at = reads.checked_sub(1).map(|place| *states.place(place));
        let is_own = at.is_some_and(|place| place.owner == StateOwner::Row);
        let waits = at.is_some_and(|place| place.mark > 0) && states.owned() < 2;
        let stays = waits || planned_len < states.careful_until;
        let (writes, need) = match states.empty_place() {
            _ if is_own && !stays => (reads, StateNeed::InPlace),
            Some(empty) if is_own => (empty + 1, StateNeed::Optional),
            None if is_own => (reads, StateNeed::InPlace),
            Some(empty) => (empty + 1, StateNeed::Pages),
            None => unreachable!("S11: a row whose current state is a cell has an empty place"),
        };
        states.next = StateUse { reads, writes };
        Some(need)
    }

    /// Makes the next plan update the current state in its place. A mark at which it waits has no effect then.
    pub fn give_up_mark(&mut self) {
        let states = self.states_mut();
        states.next.writes = states.next.reads;
    }

    /// Returns whether the decided use changes a state that waits at a mark.
    pub fn gives_up_mark(&self) -> bool {
        let states = self.states();
        let StateUse { reads, writes } = states.next;
        reads == writes && states.place(writes - 1).mark > 0
    }

    /// Returns the number of page table words that the decided use sends.
    pub fn state_writes(&self) -> u32 {
        let states = self.states();
        let changed = states.sent.iter().zip(states.next.parts()).filter(|&(&sent, part)| sent != part);
        changed.count() as u32 * self.stores.states.pages
    }

    /// Performs the decided use for an item of `len` tokens that ends at the planned tokens. Takes the pages of a new
    /// state from `pages`, and writes the changed words to `writes`. Returns the use. The row may be steady then.
    pub fn plan_state(&mut self, len: u32, pages: &mut &[PageId], writes: &mut &mut [TableWrite]) -> StateUse {
        let used = self.states().next;
        let at = used.writes - 1;
        let (mark, is_junction) = self.mark_at(self.sequence.planned_len);
        let Self { sequence, stores } = self;
        let (row, range) = (sequence.row, stores.states.range(sequence.row.index(), at));
        if let Some(read) = used.reads.checked_sub(1) {
            stores.states.rows[row.index()].places[usize::from(read)].len = sequence.planned_len - len;
        }
        let place = &mut stores.states.rows[row.index()].places[usize::from(at)];
        if used.reads == used.writes && place.mark > 0 {
            // The state at the mark is about to change.
            let waiting = &mut stores.marks[row.index()].waiting;
            waiting.iter_mut().filter(|mark| **mark == place.mark).for_each(|mark| *mark = 0);
        }
        if place.owner == StateOwner::Nobody {
            stores.states.ids[range.clone()].copy_from_slice(pages.split_off(..range.len()).expect("counted"));
        }
        *place = StatePlace { owner: StateOwner::Row, len: sequence.planned_len, mark, is_junction };
        let states = &mut stores.states.rows[row.index()];
        states.current = Current::At(at);
        let sent = std::mem::replace(&mut states.sent, used.parts());
        for (part, (before, now)) in (0..).zip(sent.into_iter().zip(used.parts())) {
            if before != now {
                let ids = now.checked_sub(1).map(|place| stores.states.pages_of(row.index(), place));
                let own = writes.split_off_mut(..range.len()).expect("counted");
                stores.pages.write_state(row, part, ids, own);
            }
        }
        let is_steady = stores.can_be_steady(sequence);
        sequence.dirty_from.set_steady(is_steady);
        used
    }

    /// Makes the state of a hit's cell current.
    pub fn name_state(&mut self, cell: CellId, pages: &[PageId]) {
        let len = self.sequence.published * self.stores.page_size;
        let place = StatePlace { owner: StateOwner::Cell(cell), len, ..StatePlace::default() };
        self.put_current(place, pages);
    }

    /// Fills the first place of a row without states, and makes it current.
    pub fn put_current(&mut self, place: StatePlace, pages: &[PageId]) {
        self.put_state(0, place, pages);
        self.states_mut().current = Current::At(0);
    }

    /// Fills a place.
    pub fn put_state(&mut self, at: u8, place: StatePlace, pages: &[PageId]) {
        let range = self.stores.states.range(self.sequence.row.index(), at);
        self.stores.states.ids[range].copy_from_slice(pages);
        let states = self.states_mut();
        states.places[usize::from(at)] = place;
        states.unsend(at);
    }

    /// Empties a place and returns its owner.
    pub fn leave_state(&mut self, at: u8) -> StateOwner {
        let states = self.states_mut();
        states.unsend(at);
        std::mem::take(&mut states.places[usize::from(at)]).owner
    }

    /// Makes the row's next plan send all words of its state.
    pub fn resend_state(&mut self) {
        self.states_mut().sent = UNSENT;
    }

    /// Updates the outstanding pages of all promises after a change of the row's own states. `before` is
    /// [`RowMut::outstanding`] before the change.
    pub fn recount_outstanding(&mut self, before: u32) {
        let after = self.outstanding();
        self.stores.all_outstanding = self.stores.all_outstanding - before + after;
    }

    /// Returns whether no place of the row is its own.
    pub fn owns_no_state(&self) -> bool {
        self.states().owned() == 0
    }

    /// Returns the number of promised pages that become outstanding if a place of the row becomes a cell.
    pub fn state_cost(&self) -> u32 {
        let is_last = self.states().owned() == 1;
        if is_last && self.sequence.promised > 0 { self.stores.states.pages } else { 0 }
    }
}
