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
//!   sequence without a hit, which reads page 0. A *lost* state can only be computed again, after a preemption. A row
//!   is *steady* only if its next plans update the current state in its place, send no words for it, and meet no mark.
//! * S11. A row owns the pages of at most two states, and of one unless an item of an open step reads another place. A
//!   *careful* row may own three.
//!
//! A row that lost its state by an abort is careful after its resume, until it has computed as many new tokens as the
//! loss cost it: its items then update no state in place, if pages are left, so an abort restores the state that they
//! read. Without this rule, aborts at short intervals would let a sequence lose its state before every mark, and never
//! advance. With it, failures at least double the computed tokens, if a step is at most one ahead of the oldest open
//! step.
//!
//! `prefix/cells.rs` stores the cells, `system/states.rs` moves states between rows and cells.

use crate::id::{CellId, PageId, StateUse};
use crate::memory::{Memory, OutOfMemory};

/// Number of places of a row: for a cell that an item reads or a third state, and two states of the row's own.
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
    /// Number of tokens behind which the state is. Outdated for a lost state, and for a current state of the row's own,
    /// which is behind the planned tokens.
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
    /// Number of computed tokens behind which an abort has lost the state, until the row is resumed; 0: none.
    pub lost_at: u32,
    /// Plans that begin before this number of tokens are careful.
    pub careful_until: u32,
    /// What the next plan reads and writes.
    pub(super) next: StateUse,
    /// The parts of the last use, as far as the row's words in the page tables still describe them.
    pub(super) sent: [u8; 2],
}

impl Default for RowStates {
    fn default() -> Self {
        let (places, current, next) = (Default::default(), Current::Fresh, StateUse::default());
        Self { places, current, supersedes: false, lost_at: 0, careful_until: 0, next, sent: UNSENT }
    }
}

/// Value of [`RowStates::sent`] for words that the next plan must send.
pub(super) const UNSENT: [u8; 2] = [u8::MAX; 2];

impl RowStates {
    pub(super) fn place(&self, index: u8) -> &StatePlace {
        &self.places[usize::from(index)]
    }

    pub(super) fn empty_place(&self) -> Option<u8> {
        self.places.iter().position(|place| place.owner == StateOwner::Nobody).map(|at| at as u8)
    }

    /// Records that the words for the pages of a place are outdated.
    pub(super) fn unsend(&mut self, at: u8) {
        self.sent.iter_mut().filter(|sent| **sent == at + 1).for_each(|sent| *sent = u8::MAX);
    }

    /// Makes a resumed row of `cached_len` tokens careful if it has lost its state.
    pub(crate) fn resume(&mut self, cached_len: u32) {
        let lost_at = std::mem::take(&mut self.lost_at);
        if lost_at > 0 {
            self.careful_until = lost_at.saturating_add(lost_at.saturating_sub(cached_len));
        }
    }

    pub(super) fn owned(&self) -> usize {
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
    /// Those of one state, so that the current state stays as it is. Or none: then the mark at which it waits is given
    /// up, and an abort of the plan loses it.
    Optional,
}

/// The states of all rows.
#[derive(Default)]
pub(super) struct States {
    /// Number of pages of a state; 0 without states.
    pub(super) pages: u32,
    pub(super) rows: Vec<RowStates>,
    /// `[row, place, page]`.
    pub(super) ids: Vec<PageId>,
}

impl States {
    pub fn new(rows: u32, pages: u32, memory: &mut Memory) -> Result<Self, OutOfMemory> {
        let ids = u64::from(rows) * PLACES as u64 * u64::from(pages);
        Ok(Self { pages, rows: memory.filled(rows.into(), RowStates::default())?, ids: memory.zeroed(ids)? })
    }

    pub(super) fn range(&self, row: usize, place: u8) -> std::ops::Range<usize> {
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

    /// Forgets the states of a row for a new sequence.
    pub fn reset(&mut self, row: usize) {
        if let Some(states) = self.rows.get_mut(row) {
            *states = RowStates::default();
        }
    }

    /// Forgets the states of a row that is preempted and has left all its places, but not that it lost one.
    pub fn preempt(&mut self, row: usize) {
        if let Some(states) = self.rows.get_mut(row) {
            let RowStates { lost_at, careful_until, .. } = *states;
            *states = RowStates { lost_at, careful_until, ..RowStates::default() };
        }
    }

    /// Returns the pages that a promise of `promised` places reserves for a row's state: those of one state, unless the
    /// row owns one.
    pub fn outstanding(&self, row: usize, promised: u32) -> u32 {
        let lacks = |states: &RowStates| promised > 0 && states.owned() == 0;
        if self.rows.get(row).is_some_and(lacks) { self.pages } else { 0 }
    }
}
