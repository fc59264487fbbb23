//! The marks of one sequence, read and changed: places where it keeps its tails, and its state if it has one.

use super::row::{Marks, RowMut, Stores};
use super::{HOST_MARKS, Sequence, SequenceTable};
use crate::error::Error;

/// Index of the waiting mark at a prompt's end, among those of a row.
const END_MARK: usize = 1;

impl Stores {
    /// Returns the last kept mark of a row. Cells own the pages of the row's held places below the mark.
    pub(super) fn kept(&self, sequence: &Sequence) -> u32 {
        self.marks.get(sequence.row.index()).map_or(0, |marks| marks.kept)
    }

    /// Returns [`SequenceTable::next_mark`].
    pub(super) fn next_mark(&self, sequence: &Sequence) -> Option<u32> {
        let marks = self.marks.get(sequence.row.index())?;
        let ahead = marks.waiting.iter().map(|mark| mark * self.page_size);
        ahead.filter(|&mark| mark > sequence.planned_len).min()
    }
}

impl SequenceTable {
    /// Returns the first waiting mark of a sequence after its planned tokens, in tokens.
    pub(crate) fn next_mark(&self, sequence: &Sequence) -> Option<u32> {
        self.stores.next_mark(sequence)
    }
}

impl RowMut<'_> {
    /// Sets the first marks of an admitted, resumed or forked row. `full` is the end of its full match; `last` is the
    /// last place where an equal prompt can match.
    pub fn begin_marks(&mut self, full: u32, last: u32) {
        let Self { sequence, stores } = self;
        if let Some(marks) = stores.marks.get_mut(sequence.row.index()) {
            let kept = sequence.published;
            sequence.dirty_from.set_steady(!stores.states.has_any());
            *marks = Marks { kept, ..Marks::default() };
            let after = kept + stores.waits.get(sequence.row.index()).map_or(0, |waits| waits.pages);
            marks.waiting[..2].copy_from_slice(&[full, last].map(|mark| if mark > after { mark } else { 0 }));
        }
    }

    /// Adds a mark above the published pages.
    ///
    /// # Errors
    /// [`Error::OutOfMarks`].
    pub fn add_mark(&mut self, mark: u32) -> Result<(), Error> {
        let marks = &mut self.stores.marks[self.sequence.row.index()];
        // A mark that the host adds at a prompt's end keeps a state for longer than the prompt's own mark.
        let has_state = self.stores.states.has_any();
        let counts = |at: usize| !(has_state && at == END_MARK);
        if marks.waiting.iter().enumerate().any(|(at, &waiting)| waiting == mark && counts(at)) {
            return Ok(());
        }
        let free = marks.waiting[2..].iter_mut().find(|waiting| **waiting == 0);
        *free.ok_or(Error::OutOfMarks { max: HOST_MARKS as u32 })? = mark;
        self.sequence.dirty_from.set_steady(!has_state);
        Ok(())
    }

    /// Removes and returns the first mark within `published` pages, if any.
    pub fn take_mark(&mut self, published: u32) -> Option<u32> {
        let marks = self.stores.marks.get_mut(self.sequence.row.index())?;
        let reached = marks.waiting.iter_mut().filter(|mark| (1..=published).contains(*mark));
        reached.min_by_key(|mark| **mark).map(std::mem::take)
    }

    /// Returns the number of promised pages that become outstanding if the tails at a mark are kept.
    pub fn keep_cost(&self, mark: u32, published: u32) -> u32 {
        let Sequence { promised, page_len, .. } = *self.sequence;
        let before = self.stores.kept(self.sequence);
        let outstanding = |kept| self.stores.limits.outstanding(promised, page_len, published, kept);
        outstanding(before.max(mark)) - outstanding(before)
    }

    /// Sets the last kept mark.
    pub fn set_kept(&mut self, mark: u32) {
        let cost = self.keep_cost(mark, self.sequence.published);
        self.stores.all_outstanding += cost;
        let marks = &mut self.stores.marks[self.sequence.row.index()];
        marks.kept = marks.kept.max(mark);
    }

    /// Returns [`SequenceTable::next_mark`].
    pub fn next_mark(&self) -> Option<u32> {
        self.stores.next_mark(self.sequence)
    }

    /// Returns the waiting mark at a length in tokens, in pages (0 for none), and whether prompts part there.
    pub(super) fn mark_at(&self, len: u32) -> (u32, bool) {
        let (page_size, marks) = (self.stores.page_size, &self.stores.marks[self.sequence.row.index()]);
        let mark = len / page_size;
        if !len.is_multiple_of(page_size) || !marks.waiting.contains(&mark) {
            return (0, false);
        }
        let is_junction = (0..).zip(marks.waiting).any(|(at, waiting)| at != END_MARK && waiting == mark);
        (mark, is_junction)
    }
}
