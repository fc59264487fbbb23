//! [`SequenceTable`]: tokens, pages and lengths of all sequences, one row each.
//!
//! ```text
//! tokens     0 ......... cached_len ..... planned_len ... token_len      (planned_len may pass token_len: see below)
//!            |  have K and V  |    in open plans    | known, waiting |
//! pages      [p p p p p p p p|p p p p p p p p p p p]
//!             0 .. published    .. page_len = ceil(planned_len / page_size)
//!             in the tree, under the lock | private
//! ```
//!
//! * S1. cached_len <= planned_len. page_len = ceil(planned_len / page_size), minus pending pages.
//! * S2. The first `published` pages of group 0 belong to the tree, on the path of the lock. Later pages are private to
//!   the row. In the tracks of other groups, a cell owns the pages of its place; the pages of places without a cell are
//!   private. In those tracks a row keeps only pages that tokens after the published ones read. `Limits` returns the
//!   first place that the row keeps.
//! * S3. A preempted sequence has only tokens.
//! * S4. Plans have sent the pages before `dirty_from` to the backends. The next plan must send all later ones. The
//!   first `inherited` pages are whole leaves of the page table that a parent's plans have sent permanently.
//! * S5. The user count of a leaf is the number of rows that contain it.
//! * S6. A row stores the entry of its last page and its last token, so that decoding looks up neither.
//! * S7. The total of outstanding pages is the sum over all sequences.
//!
//! planned_len exceeds token_len by the planned tokens that the host has not appended yet.
//!
//! A sequence whose last planned tokens are drafts waits for `accept` (`branches.rs`). Until then it is not planned
//! again, and the drafts' step is not committed:
//!
//! * S9. The drafts are its last item, in an open step; all their tokens are known, and none has K and V.
//!
//! `states.rs` has the states of layers that keep one (S10, S11). `inflight.rs` finds sequences by the page that they
//! compute next (S8). The tokens and pages of rows are in leaves (`token_store.rs`, `page_table.rs`).

mod audit;
mod branches;
mod drafts;
mod inflight;
mod leaf_pool;
mod page_table;
mod promises;
mod read;
mod record;
mod row;
mod row_marks;
mod row_states;
mod states;
mod token_store;
mod truncate;

use slotmap::SlotMap;

use crate::error::Error;
use crate::id::{Namespace, PrefixLock, RowId, SeqKey, StepId, TokenId};
use crate::layout::{Limits, TableShape};
use crate::memory::{Memory, OutOfMemory, slot_map};
use branches::Branches;
use inflight::InflightIndex;
use page_table::PageTable;
use token_store::TokenStore;

pub(crate) use record::{AdmissionKind, Cuts};
pub use record::{DirtyFrom, Sequence};
pub(crate) use row::RowMut;
use row::{Marks, Stores, Waits};
use states::States;
pub(crate) use states::{Current, RowStates, StateNeed, StateOwner, StatePlace};

/// Maximum number of waiting marks that the host has added to a sequence.
pub(crate) const HOST_MARKS: usize = 4;

/// All sequences.
pub struct SequenceTable {
    max: u32,
    rows: SlotMap<SeqKey, Sequence>,
    free_rows: Vec<RowId>,
    /// Number of plans, including rejected ones. It detects a sequence that a plan contains twice.
    plans: u64,
    cuts: Vec<Cuts>,
    stores: Stores,
}

impl SequenceTable {
    /// Creates an empty table. Tests use a `hash_bits` below 32 to force collisions of fronts.
    ///
    /// # Errors
    /// The allocation that failed.
    pub(crate) fn new(
        shape: &TableShape,
        page_size: u32,
        hash_bits: u32,
        memory: &mut Memory,
    ) -> Result<Self, OutOfMemory> {
        let rows = slot_map(shape.rows, memory)?;
        let free_rows = memory.listed(shape.rows.into(), (0..shape.rows).rev().map(RowId::new))?;
        let (tokens, pages) = (TokenStore::new(shape, page_size, memory)?, PageTable::new(shape, memory)?);
        let inflight = InflightIndex::new(shape.rows, hash_bits, memory)?;
        let branches = Branches::new(shape.rows, memory)?;
        let (limits, all_outstanding) = (Limits::NONE, 0);
        let (marks, waits) = (Vec::new(), Vec::new());
        let states = States::default();
        let stores =
            Stores { page_size, limits, all_outstanding, tokens, pages, marks, waits, states, inflight, branches };
        let cuts = memory.filled(shape.rows.into(), Cuts::NONE)?;
        Ok(Self { max: shape.rows, rows, free_rows, plans: 0, cuts, stores })
    }

    /// Sets the places that sequences keep in the tracks after the first. The table must be empty.
    ///
    /// # Errors
    /// The allocation that failed.
    pub(crate) fn set_limits(&mut self, limits: Limits, memory: &mut Memory) -> Result<(), OutOfMemory> {
        self.stores.limits = limits;
        self.stores.marks = memory.filled(self.max.into(), Marks::default())?;
        if limits.state().is_some() {
            self.stores.states = States::new(self.max, limits.state_pages(), memory)?;
        }
        self.stores.pages.keep_cells(limits.count(), memory)
    }

    /// Adds the records of loads to an empty table.
    ///
    /// # Errors
    /// The allocation that failed.
    pub(crate) fn keep_loads(&mut self, memory: &mut Memory) -> Result<(), OutOfMemory> {
        self.stores.waits = memory.filled(self.max.into(), Waits::default())?;
        Ok(())
    }

    /// Returns the number of pages after the published ones that a sequence's page table lacks until they are loaded.
    pub(crate) fn pending(&self, sequence: &Sequence) -> u32 {
        self.stores.pending(sequence)
    }

    /// Returns the number of a sequence's published and pending pages.
    pub(crate) fn prefix_pages(&self, sequence: &Sequence) -> u32 {
        sequence.published + self.stores.pending(sequence)
    }

    /// Returns the places that sequences keep in the tracks after the first.
    pub(crate) fn limits(&self) -> &Limits {
        &self.stores.limits
    }

    /// Returns the number of sequences, including preempted ones.
    pub fn len(&self) -> u32 {
        self.rows.len() as u32
    }

    /// Returns all sequences, in any order.
    pub fn iter(&self) -> impl Iterator<Item = (SeqKey, &Sequence)> {
        self.rows.iter()
    }

    /// Returns a sequence.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`] for a key that is finished or never existed.
    pub fn get(&self, seq: SeqKey) -> Result<&Sequence, Error> {
        self.rows.get(seq).ok_or(Error::UnknownSequence { seq })
    }

    /// Returns a sequence to change.
    pub(crate) fn get_mut(&mut self, seq: SeqKey) -> Result<&mut Sequence, Error> {
        self.rows.get_mut(seq).ok_or(Error::UnknownSequence { seq })
    }

    /// Returns a sequence to change, with its tokens and pages.
    pub(crate) fn row_mut(&mut self, seq: SeqKey) -> Result<RowMut<'_>, Error> {
        let sequence = self.rows.get_mut(seq).ok_or(Error::UnknownSequence { seq })?;
        Ok(RowMut { sequence, stores: &mut self.stores })
    }

    /// Returns a sequence that is not preempted.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::Preempted`].
    pub fn running(&self, seq: SeqKey) -> Result<&Sequence, Error> {
        let sequence = self.get(seq)?;
        if sequence.is_preempted() { Err(Error::Preempted { seq }) } else { Ok(sequence) }
    }

    /// Checks that `rows` new rows of `tokens` tokens each fit.
    ///
    /// # Errors
    /// [`Error::OutOfSequences`], [`Error::OutOfTokens`].
    pub fn check_room(&self, rows: u32, tokens: u32) -> Result<(), Error> {
        self.check_rows(rows as usize)?;
        self.check_leaves(u64::from(rows) * u64::from(self.leaves_for(tokens)))
    }

    /// Checks that `rows` new rows fit.
    ///
    /// # Errors
    /// [`Error::OutOfSequences`].
    pub(crate) fn check_rows(&self, rows: usize) -> Result<(), Error> {
        let free = self.max as usize - self.rows.len();
        if rows <= free { Ok(()) } else { Err(Error::OutOfSequences { max: self.max }) }
    }

    pub(crate) fn leaves_for(&self, tokens: u32) -> u32 {
        self.stores.tokens.leaves_for(tokens)
    }

    /// Returns the number of the next plan, for [`Sequence::last_plan`]. A plan that fails also uses its number up, so
    /// the numbers that it has left in sequences have no effect.
    pub(crate) fn next_plan(&mut self) -> u64 {
        self.plans += 1;
        self.plans
    }

    /// Checks that `leaves` more leaves fit.
    ///
    /// # Errors
    /// [`Error::OutOfTokens`].
    pub(crate) fn check_leaves(&self, leaves: u64) -> Result<(), Error> {
        self.stores.tokens.check_free(leaves)
    }

    /// Adds a row with these tokens. The caller has checked that they fit.
    pub(crate) fn spawn(&mut self, namespace: Namespace, tokens: &[TokenId], lock: PrefixLock) -> SeqKey {
        let row = self.free_rows.pop().expect("the caller checked the rows");
        let sequence = Sequence {
            row,
            token_len: 0,
            cached_len: 0,
            planned_len: 0,
            page_len: 0,
            published: 0,
            dirty_from: DirtyFrom::new(self.stores.states.has_any()),
            inherited: 0,
            promised: 0,
            admission_kind: AdmissionKind::COUNTED,
            leaves: 0,
            last_entry: 0,
            last_token: TokenId::default(),
            preemption_epoch: 0,
            last_step: StepId::default(),
            last_item: 0,
            last_plan: 0,
            namespace,
            lock: Some(lock),
        };
        self.cuts[row.index()] = Cuts::NONE;
        if let Some(waits) = self.stores.waits.get_mut(row.index()) {
            *waits = Waits::default();
        }
        if let Some(marks) = self.stores.marks.get_mut(row.index()) {
            *marks = Marks::default();
        }
        self.stores.states.reset(row.index());
        let seq = self.rows.insert(sequence);
        self.row_mut(seq).expect("the row is new").append_tokens(tokens);
        seq
    }

    /// Removes a row that has released its lock and pages.
    pub(crate) fn despawn(&mut self, seq: SeqKey) {
        let mut sequence = self.rows.remove(seq).expect("the caller looked it up");
        assert!(sequence.lock.is_none(), "S2: a finished sequence has released its prefix");
        assert!(sequence.promised == 0, "S7: a finished sequence is promised nothing");
        assert!(!self.stores.inflight.holds(sequence.row), "S8: a finished sequence has no front");
        self.stores.tokens.shrink(sequence.row, &mut sequence.leaves, 0);
        self.stores.pages.shrink(sequence.row, sequence.page_len, 0);
        self.free_rows.push(sequence.row);
    }

    /// Adds a row with the first `tokens` tokens of another row. The caller has checked that they fit. O(tokens).
    pub(crate) fn spawn_copy(&mut self, parent: SeqKey, tokens: u32, lock: PrefixLock) -> SeqKey {
        let (from, namespace) = (self.rows[parent].row, self.rows[parent].namespace);
        let child = self.spawn(namespace, &[], lock);
        let sequence = &mut self.rows[child];
        self.stores.tokens.reserve(sequence.row, &mut sequence.leaves, tokens);
        self.stores.tokens.copy(from, sequence.row, tokens);
        self.end_tokens(child, tokens);
        child
    }

    /// Shares with a child the whole page table leaves within the parent's first `pages` pages. The child has no pages
    /// yet. The caller includes only published pages whose words were sent by plans that can no longer be aborted.
    /// Returns the number of shared pages. O(leaves).
    pub(crate) fn inherit(&mut self, parent: SeqKey, child: SeqKey, pages: u32) -> u32 {
        let from = self.rows[parent].row;
        let sequence = &mut self.rows[child];
        assert!(sequence.page_len == 0, "S4: a row inherits before it has pages");
        // In the tracks of other groups, cells own all pages that the parent keeps at these places.
        let pages = self.stores.pages.whole_leaves(pages);
        self.stores.pages.share(from, sequence.row, pages);
        (sequence.page_len, sequence.inherited) = (pages, pages);
        if pages > 0 {
            sequence.last_entry = self.stores.pages.entry(sequence.row, pages - 1);
        }
        pages
    }
}

fn pieces<'a, T: 'a>(start: u32, end: u32, piece: impl Fn(u32) -> &'a [T]) -> impl Iterator<Item = &'a [T]> {
    let mut at = start;
    std::iter::from_fn(move || {
        (at < end).then(|| {
            let piece = piece(at);
            at += piece.len() as u32;
            piece
        })
    })
}
