//! The states of sequences: for each row, the places of up to three states, and the place of the current one.
//!
//! ```text
//! admitted with a hit     place 0: cell of the hit   <- current
//! plan                    reads place 0, writes place 1: pages of the row   <- current
//! more plans              read and write place 1, until an item ends at a mark
//! commit at the mark      place 1: a new cell   <- current; place 0 is left when its reader commits
//! plan                    reads place 1, writes place 0: new pages of the row   <- current
//! ```
//!
//! * S10. The current place has the state behind the last planned token. There is none before the first plan of a
//!   sequence without a hit, which reads page 0. A *lost* state can only be computed again, after a preemption.
//! * S11. A row owns the pages of at most two states, and of one unless an item of an open step reads another place.
//!
//! `prefix/cells.rs` stores the cells, `system/states.rs` moves states between rows and cells.

use super::row::{RowMut, Stores};
use super::{Sequence, SequenceTable};
use crate::id::{CellId, PageId};
use crate::memory::{Memory, OutOfMemory};
use crate::plan::TableWrite;
use crate::step::StateUse;

/// Number of places of a row: for a cell that an item reads, and two states of the row's own.
const PLACES: usize = 3;

/// The owner of the pages of a place.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum StateOwner {
    /// The place is empty.
    #[default]
    Nobody,
    /// The row.
    Row,
    /// A cell of the prefix tree, which counts the row as a user.
    Cell(CellId),
}

/// One place of a row.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct StatePlace {
    pub owner: StateOwner,
    /// Number of tokens behind which the state is.
    pub len: u32,
    /// The mark at which the last item ended that wrote the place, in pages, until the item commits. 0: none.
    pub mark: u32,
    /// Whether the mark is one where prompts part, so that no later state supersedes it.
    pub is_junction: bool,
}

/// The current state of a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Current {
    /// Zeros: the sequence has no planned tokens.
    #[default]
    Fresh,
    /// The state of a place.
    At(u8),
    /// An item that wrote its own input was undone.
    Lost,
}

/// The states of a row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowStates {
    pub places: [StatePlace; PLACES],
    pub current: Current,
    /// Whether a later state of this row supersedes the cell of its hit.
    pub supersedes: bool,
    /// What the next plan reads and writes.
    next: StateUse,
    /// The parts of the last use, as far as the row's words in the page tables still describe them.
    sent: [u8; 2],
}

impl Default for RowStates {
    fn default() -> Self {
        let (places, current, next) = (Default::default(), Current::Fresh, StateUse::default());
        Self { places, current, supersedes: false, next, sent: UNSENT }
    }
}

/// Value of [`RowStates::sent`] for words that the next plan must send.
const UNSENT: [u8; 2] = [u8::MAX; 2];

impl RowStates {
    fn place(&self, index: u8) -> &StatePlace {
        &self.places[usize::from(index)]
    }

    fn empty_place(&self) -> Option<u8> {
        self.places.iter().position(|place| place.owner == StateOwner::Nobody).map(|at| at as u8)
    }

    /// Records that the words for the pages of a place are outdated.
    fn unsend(&mut self, at: u8) {
        self.sent.iter_mut().filter(|sent| **sent == at + 1).for_each(|sent| *sent = u8::MAX);
    }

    fn owned(&self) -> usize {
        self.places.iter().filter(|place| place.owner == StateOwner::Row).count()
    }
}

/// The pages that the next plan of a row takes for its state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum StateNeed {
    /// None: the plan updates the row's own state.
    InPlace,
    /// Those of one state.
    Pages,
    /// Those of one state, or none if the mark at which the current state waits is given up.
    Optional,
}

/// The states of all rows.
#[derive(Default)]
pub(super) struct States {
    /// Number of pages of a state; 0 without states.
    pages: u32,
    rows: Vec<RowStates>,
    /// `[row, place, page]`.
    ids: Vec<PageId>,
}

impl States {
    pub fn new(rows: u32, pages: u32, memory: &mut Memory) -> Result<Self, OutOfMemory> {
        let ids = u64::from(rows) * PLACES as u64 * u64::from(pages);
        Ok(Self { pages, rows: memory.filled(rows.into(), RowStates::default())?, ids: memory.zeroed(ids)? })
    }

    fn range(&self, row: usize, place: u8) -> std::ops::Range<usize> {
        let pages = self.pages as usize;
        let first = (row * PLACES + usize::from(place)) * pages;
        first..first + pages
    }

    pub fn has_any(&self) -> bool {
        self.pages > 0
    }

    pub fn pages_of(&self, row: usize, place: u8) -> &[PageId] {
        &self.ids[self.range(row, place)]
    }

    /// Forgets the states of a row, which has left all its places.
    pub fn reset(&mut self, row: usize) {
        if let Some(states) = self.rows.get_mut(row) {
            *states = RowStates::default();
        }
    }

    /// Returns the pages that a promise of a row reserves for its state: those of one state, unless the row owns one.
    pub fn outstanding(&self, row: usize) -> u32 {
        self.rows.get(row).map_or(0, |states| if states.owned() > 0 { 0 } else { self.pages })
    }
}

impl Stores {
    fn next_mark(&self, sequence: &Sequence) -> Option<u32> {
        let marks = self.marks.get(sequence.row.index())?;
        let ahead = marks.waiting.iter().map(|mark| mark * self.page_size);
        ahead.filter(|&mark| mark > sequence.planned_len).min()
    }
}

impl SequenceTable {
    /// Returns whether a group of layers keeps a state.
    #[inline]
    pub(crate) fn has_states(&self) -> bool {
        self.stores.states.pages > 0
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

    /// Returns the first waiting mark of a sequence after its planned tokens, in tokens.
    pub(crate) fn next_mark(&self, sequence: &Sequence) -> Option<u32> {
        self.stores.next_mark(sequence)
    }

    /// Returns the pages of the state that a sequence's last plan reads (`part` 0) or writes (1).
    pub(crate) fn planned_state(&self, sequence: &Sequence, part: u32) -> &[PageId] {
        self.stores.pages.state(sequence.row, part)
    }
}

impl RowMut<'_> {
    /// Returns whether a group of layers keeps a state.
    pub fn has_state(&self) -> bool {
        self.stores.states.pages > 0
    }

    pub fn states(&self) -> &RowStates {
        &self.stores.states.rows[self.sequence.row.index()]
    }

    pub fn states_mut(&mut self) -> &mut RowStates {
        &mut self.stores.states.rows[self.sequence.row.index()]
    }

    pub fn state_pages(&self, place: u8) -> &[PageId] {
        self.stores.states.pages_of(self.sequence.row.index(), place)
    }

    /// Returns [`SequenceTable::next_mark`].
    pub fn next_mark(&self) -> Option<u32> {
        self.stores.next_mark(self.sequence)
    }

    /// Decides what the next plan reads and writes, and returns the pages that it takes; `None` if the state is lost.
    /// [`RowMut::give_up_mark`] may change the decision.
    pub fn begin_state(&mut self) -> Option<StateNeed> {
        let states = self.states_mut();
        let reads = match states.current {
            Current::Lost => return None,
            Current::Fresh => 0,
            Current::At(place) => place + 1,
        };
        let at = reads.checked_sub(1).map(|place| *states.place(place));
        let is_own = at.is_some_and(|place| place.owner == StateOwner::Row);
        let waits = at.is_some_and(|place| place.mark > 0);
        let empty = states.empty_place();
        let (writes, need) = match empty {
            _ if is_own && !waits => (reads, StateNeed::InPlace),
            Some(empty) if is_own => (empty + 1, StateNeed::Optional),
            None if is_own => (reads, StateNeed::InPlace),
            Some(empty) => (empty + 1, StateNeed::Pages),
            None => unreachable!("S11: a row owns at most two states, so a row that reads a cell has an empty place"),
        };
        states.next = StateUse { reads, writes };
        Some(need)
    }

    /// Makes the next plan update the current state, which waits at a mark, in its place. The mark has no effect then.
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

    /// Performs the decided use for an item that ends at the planned tokens. Takes the pages of a new state from
    /// `pages`, and passes the changed words to `write`. Returns the use.
    pub fn plan_state(&mut self, pages: &mut &[PageId], mut write: impl FnMut(TableWrite)) -> StateUse {
        let used = self.states().next;
        let at = used.writes - 1;
        let (mark, is_junction) = self.mark_at(self.sequence.planned_len);
        let Self { sequence, stores } = self;
        let (row, range) = (sequence.row, stores.states.range(sequence.row.index(), at));
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
                stores.pages.write_state(row, part, ids, &mut write);
            }
        }
        used
    }

    /// Returns the waiting mark at a length in tokens, in pages (0 for none), and whether prompts part there.
    fn mark_at(&self, len: u32) -> (u32, bool) {
        let (page_size, marks) = (self.stores.page_size, &self.stores.marks[self.sequence.row.index()]);
        let mark = len / page_size;
        if !len.is_multiple_of(page_size) || !marks.waiting.contains(&mark) {
            return (0, false);
        }
        let is_junction = (0..).zip(marks.waiting).any(|(at, waiting)| at != END_MARK && waiting == mark);
        (mark, is_junction)
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

/// Index of the waiting mark at a prompt's end, among those of a row.
pub(super) const END_MARK: usize = 1;
