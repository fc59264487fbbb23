//! The pages of the states that the rows of each open step read and write.
//!
//! The page table words of a row's state change with the row's next plan, which may begin before the host computes this
//! one. So a backend copies the words of a plan's rows when the plan begins.

use std::collections::VecDeque;

use super::OpenSteps;
use crate::id::{PageId, RowId, StepId};
use crate::layout::TableShape;
use crate::plan::{BatchPlan, PageCopy, TableWrite};

/// The pages of states, by open step.
#[derive(Debug)]
pub(super) struct StepStates {
    /// Number of pages of a state; 0 without states.
    pages: usize,
    /// Index of the first word of a state in the page tables.
    first: u32,
    /// The words of states in the page tables.
    words: Vec<u32>,
    /// `[row, part, page of the state]`: the pages to read, then those to write.
    steps: VecDeque<(StepId, Vec<u32>)>,
    /// Lists of ended steps, for reuse.
    spare: Vec<Vec<u32>>,
    /// An empty list, for reuse.
    copies: Vec<PageCopy>,
}

impl StepStates {
    pub fn new(table: &TableShape) -> Self {
        let (pages, first) = (table.state_pages as usize, table.state_word(RowId::new(0), 0));
        let words = vec![0; table.words() - first as usize];
        Self { pages, first, words, steps: VecDeque::new(), spare: Vec::new(), copies: Vec::new() }
    }

    /// Applies the checked table writes of a plan that begins, and copies the words of its rows. O(pages of the rows'
    /// states + table writes).
    pub fn begin(&mut self, plan: &BatchPlan<'_>) {
        if self.pages == 0 {
            return;
        }
        for TableWrite { index, value } in plan.table_writes {
            if let Some(index) = index.checked_sub(self.first) {
                self.words[index as usize] = *value;
            }
        }
        // A step that failed to begin is still in the list. The steps that begin have rising numbers.
        while self.steps.back().is_some_and(|(step, _)| *step >= plan.step) {
            self.spare.extend(self.steps.pop_back().map(|(_, list)| list));
        }
        let mut list = self.spare.pop().unwrap_or_default();
        list.clear();
        let words = self.row_words();
        for row in plan.rows {
            let first = if row.kv_len > 0 { row.row.index() * words } else { 0 };
            list.extend_from_slice(&self.words[first..first + words]);
        }
        self.steps.push_back((plan.step, list));
    }

    /// Drops the pages of steps that are no longer open.
    pub fn end(&mut self, open: &OpenSteps) {
        while let Some(at) = self.steps.iter().position(|(step, _)| !open.contains(*step)) {
            self.spare.extend(self.steps.remove(at).map(|(_, pages)| pages));
        }
    }

    /// Returns the number of words of a row of [`StepStates::list`].
    pub fn row_words(&self) -> usize {
        2 * self.pages
    }

    /// Returns `[row, part, page of the state]` of an open step; the words of padding have no meaning.
    pub fn list(&self, step: StepId) -> &[u32] {
        self.steps.iter().find(|(other, _)| *other == step).map_or(&[], |(_, list)| list)
    }

    /// Returns the pages that row `row` of an open plan reads, and those that it writes. Returns `None` for padding,
    /// and for a row that the plan did not have when it began.
    pub fn pages(&self, plan: &BatchPlan<'_>, row: usize) -> Option<[&[PageId]; 2]> {
        plan.rows.get(row).filter(|row| row.kv_len > 0)?;
        let words = self.row_words();
        let pages = self.list(plan.step).get(row * words..(row + 1) * words)?;
        let (reads, writes) = PageId::from_raw(pages).split_at(self.pages);
        Some([reads, writes])
    }

    /// Returns the copies that make each state that an open plan writes equal to the one that it reads. The caller
    /// returns the list by [`StepStates::return_copies`].
    pub fn take_copies(&mut self, plan: &BatchPlan<'_>) -> Vec<PageCopy> {
        let mut copies = std::mem::take(&mut self.copies);
        for [reads, writes] in (0..plan.rows.len()).filter_map(|row| self.pages(plan, row)) {
            let pairs = reads.iter().zip(writes).filter(|(read, write)| read != write);
            copies.extend(pairs.map(|(&source, &target)| PageCopy { source, target }));
        }
        copies
    }

    /// Keeps the memory of a list for the next one.
    pub fn return_copies(&mut self, mut copies: Vec<PageCopy>) {
        copies.clear();
        self.copies = copies;
    }
}
