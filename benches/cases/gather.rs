//! Gather: the pages of the states of 256 decoding rows, from the page table words to the arrays of kernels. The floor
//! copies such arrays.

use kvarena::StepId;
use kvarena::backend::OpenSteps;
use kvarena::id::RowId;
use kvarena::layout::TableShape;
use kvarena::plan::{BatchPlan, BatchRow, SharedSpans, SlotMapping, StepEnd, TableWrite};
use kvarena::testkit::internals::{StateColumns, StepStates};

/// Number of rows of the batch.
pub const ROWS: u32 = 256;

pub struct Gather {
    states: StepStates,
    columns: StateColumns,
    open: OpenSteps,
    rows: Vec<BatchRow>,
    out: Vec<u32>,
    step: u64,
}

impl Gather {
    /// Creates the case for states of `pages` pages. Each row updates its state in place.
    pub fn new(pages: u32) -> Self {
        let leaves = ROWS;
        let table = TableShape {
            rows: ROWS,
            leaves_per_row: 1,
            leaf_pages: 64,
            leaf_count: leaves,
            tracks: 1,
            state_pages: pages,
        };
        let states = StepStates::new(&table);
        let columns = StateColumns::new(&states, ROWS as usize);
        let row = |row| BatchRow { row: RowId::new(row), qo_start: row, extend_len: 1, kv_len: 100 };
        let (rows, out) = ((0..ROWS).map(row).collect(), vec![0; (2 * ROWS * pages) as usize]);
        let mut gather = Self { states, columns, open: OpenSteps::new(2), rows, out, step: 0 };
        let word = |row, part, page| table.state_word(RowId::new(row), part) + page;
        let words = (0..ROWS).flat_map(|row| (0..2).map(move |part| (row, part)));
        let writes = words.flat_map(|(row, part)| {
            (0..pages).map(move |page| TableWrite { index: word(row, part, page), value: row * pages + page })
        });
        let writes: Vec<_> = writes.collect();
        gather.run(&writes);
        gather
    }

    fn run(&mut self, table_writes: &[TableWrite]) {
        self.step += 1;
        let step = StepId::new(self.step);
        let no_slots = SlotMapping::I32(&[]);
        let plan = BatchPlan {
            step,
            rows: &self.rows,
            tokens: &[],
            positions: &[],
            slot_mapping: no_slots,
            track_slots: no_slots,
            table_writes,
            shared: SharedSpans::default(),
            masks: &[],
        };
        self.open.begin(step);
        self.states.begin(&plan);
        self.columns.put(&self.states, step, self.rows.len(), &mut self.out, ROWS as usize);
        self.open.end(StepEnd::Complete(step));
        self.states.end(&self.open);
    }

    /// Gathers the states of the same batch again.
    pub fn same(&mut self) {
        self.run(&[]);
    }

    /// Gathers the states of a batch whose rows have moved, as after the end of the first one.
    pub fn moved(&mut self) {
        self.rows.rotate_left(1);
        self.run(&[]);
    }

    pub fn check(&mut self) {
        self.moved();
        let pages = self.out.len() / (2 * ROWS as usize);
        for (at, row) in self.rows.iter().enumerate() {
            for part in 0..2 * pages {
                let want = row.row.raw() * pages as u32 + (part % pages) as u32;
                assert_eq!(self.out[part * ROWS as usize + at], want, "row {at}");
            }
        }
    }

    /// Copies arrays of the same size.
    pub fn floor(&mut self, from: &[u32]) {
        self.out.copy_from_slice(from);
    }

    pub fn words(&self) -> usize {
        self.out.len()
    }
}
