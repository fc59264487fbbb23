//! The pages of the states that the rows of each open step read and write.
//!
//! The page table words of a row's state change with the row's next plan, which may begin before the host computes this
//! one. So a backend copies the words of a plan's rows when the plan begins.
//!
//! Most rows of a decoding batch update their states in place, so their words equal those of the step before. Each
//! change gives a row's words a new version. A list of an ended step keeps its words, and a new step copies only those
//! of other versions. [`StateColumns`] does the same for the arrays of kernels.

use std::collections::VecDeque;

use super::OpenSteps;
use crate::id::{PageId, RowId, StepId};
use crate::layout::TableShape;
use crate::plan::{BatchPlan, PageCopy, TableWrite};

/// The version of the words of padding rows.
const PADDING: u64 = 0;

/// The words of one step's rows.
#[derive(Debug, Default)]
struct StepList {
    step: StepId,
    /// By row, the version of its words; [`PADDING`] for padding, whose words have no meaning.
    versions: Vec<u64>,
    /// `[row, part, page of the state]`: the pages to read, then those to write.
    words: Vec<u32>,
}

/// The pages of states, by open step.
#[derive(Debug)]
pub struct StepStates {
    /// Number of pages of a state; 0 without states.
    pages: usize,
    /// Index of the first word of a state in the page tables.
    first: u32,
    /// The words of states in the page tables.
    words: Vec<u32>,
    /// The version of the words of each row.
    versions: Vec<u64>,
    /// The last version.
    last_version: u64,
    steps: VecDeque<StepList>,
    /// Lists of ended steps, for reuse; the last one is the newest.
    spare: Vec<StepList>,
    /// An empty list, for reuse.
    copies: Vec<PageCopy>,
}

impl StepStates {
    /// Creates the list of an empty backend.
    pub fn new(table: &TableShape) -> Self {
        let (pages, first) = (table.state_pages as usize, table.state_word(RowId::new(0), 0));
        let words = vec![0; table.words() - first as usize];
        let versions: Vec<_> = (PADDING + 1..).take(if pages > 0 { table.rows as usize } else { 0 }).collect();
        let last_version = PADDING + versions.len() as u64;
        let (steps, spare) = (VecDeque::new(), Vec::new());
        Self { pages, first, words, versions, last_version, steps, spare, copies: Vec::new() }
    }

    /// Applies the checked table writes of a plan that begins, and copies the words of its rows. O(rows + table writes
    /// + pages of the states that differ from those of the spare list).
    pub fn begin(&mut self, plan: &BatchPlan<'_>) {
        if self.pages == 0 {
            return;
        }
        let words = self.row_words();
        for TableWrite { index, value } in plan.table_writes {
            if let Some(index) = index.checked_sub(self.first) {
                self.words[index as usize] = *value;
                self.last_version += 1;
                self.versions[index as usize / words] = self.last_version;
            }
        }
        // A step that failed to begin is still in the list. The steps that begin have rising numbers.
        while self.steps.back().is_some_and(|list| list.step >= plan.step) {
            self.spare.extend(self.steps.pop_back());
        }
        let mut list = self.spare.pop().unwrap_or_default();
        list.step = plan.step;
        list.versions.resize(plan.rows.len(), PADDING);
        list.words.resize(plan.rows.len() * words, 0);
        for ((row, version), own) in plan.rows.iter().zip(&mut list.versions).zip(list.words.chunks_exact_mut(words)) {
            let now = if row.kv_len > 0 { self.versions[row.row.index()] } else { PADDING };
            let row = row.row.index();
            if std::mem::replace(version, now) != now && now != PADDING {
                own.copy_from_slice(&self.words[row * words..(row + 1) * words]);
            }
        }
        self.steps.push_back(list);
    }

    /// Drops the pages of steps that are no longer open.
    pub fn end(&mut self, open: &OpenSteps) {
        while let Some(at) = self.steps.iter().position(|list| !open.contains(list.step)) {
            self.spare.extend(self.steps.remove(at));
        }
    }

    /// Returns the number of words of a row.
    pub fn row_words(&self) -> usize {
        2 * self.pages
    }

    fn list(&self, step: StepId) -> Option<&StepList> {
        self.steps.iter().find(|list| list.step == step)
    }

    /// Returns the pages that row `row` of an open plan reads, and those that it writes. Returns `None` for padding,
    /// and for a row that the plan did not have when it began.
    pub fn pages(&self, plan: &BatchPlan<'_>, row: usize) -> Option<[&[PageId]; 2]> {
        plan.rows.get(row).filter(|row| row.kv_len > 0)?;
        let words = self.row_words();
        let pages = self.list(plan.step)?.words.get(row * words..(row + 1) * words)?;
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

/// The states of the rows of one plan in the form of kernels: by part and page of the state, the pages of all rows.
#[allow(dead_code, reason = "only the GPU backend and benches use it")]
#[derive(Debug)]
pub struct StateColumns {
    /// Maximum number of rows.
    capacity: usize,
    /// By row, the version of its column.
    versions: Vec<u64>,
    /// `[part, page of the state, row]`; `u32::MAX` for padding.
    words: Vec<u32>,
    /// The changed rows, for reuse.
    changed: Vec<usize>,
}

#[allow(dead_code, reason = "only the GPU backend and benches use it")]
impl StateColumns {
    /// Creates the columns of at most `capacity` rows, all padding.
    pub fn new(states: &StepStates, capacity: usize) -> Self {
        let capacity = if states.pages > 0 { capacity } else { 0 };
        let (versions, words) = (vec![PADDING; capacity], vec![u32::MAX; capacity * states.row_words()]);
        Self { capacity, versions, words, changed: Vec::with_capacity(capacity) }
    }

    /// Writes the pages that the first `rows` rows of an open step read, then those that they write, u32
    /// `[2, pages of a state, rows]`, `stride` words from one page of a state to the next. Padding has `u32::MAX`, and
    /// so has a row that the step did not have when it began. O(words) to copy, and O(changed columns) to write them.
    pub fn put(&mut self, states: &StepStates, step: StepId, rows: usize, out: &mut [u32], stride: usize) {
        if self.capacity == 0 {
            return; // There are no states.
        }
        let (list, row_words) = (states.list(step), states.row_words());
        self.changed.clear();
        for row in 0..rows {
            let now = list.and_then(|list| list.versions.get(row)).copied().unwrap_or(PADDING);
            if std::mem::replace(&mut self.versions[row], now) != now {
                self.changed.push(row);
            }
        }
        let (versions, words) = (&self.versions, list.map_or(&[][..], |list| &list.words));
        let word = |page: usize, row: usize| match versions[row] {
            PADDING => u32::MAX,
            _ => words[row * row_words + page],
        };
        let columns = self.words.chunks_exact_mut(self.capacity.max(1)).enumerate();
        if self.changed.len() > rows / 4 {
            // In this order, the writes are contiguous.
            for (page, column) in columns {
                column[..rows].iter_mut().enumerate().for_each(|(row, out)| *out = word(page, row));
            }
        } else {
            for (page, column) in columns {
                self.changed.iter().for_each(|&row| column[row] = word(page, row));
            }
        }
        for (out, column) in out.chunks_mut(stride).zip(self.words.chunks_exact(self.capacity.max(1))) {
            out[..rows].copy_from_slice(&column[..rows]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Null;
    use crate::config::EngineConfig;
    use crate::engine::Engine;
    use crate::id::{Namespace, SeqKey, TokenId};
    use crate::layout::{Capacity, Groups, PoolConfig, Reach, StatePart};
    use crate::plan::{Extend, Keep, PlanSize, StepEnd, StepScratch};

    /// Sequences with states of several pages.
    struct Batches {
        engine: Engine<Null>,
        states: StepStates,
        columns: StateColumns,
        open: OpenSteps,
        seqs: Vec<SeqKey>,
        /// The words of the page tables, from all plans.
        tables: Vec<u32>,
    }

    impl Batches {
        const ROWS: usize = 40;

        fn new() -> Self {
            let groups = Groups::new(&[Reach::All, Reach::State], &[0, 1, 1, 1]).expect("two groups");
            let groups = groups.with_state(1, &[StatePart { heads: 1, head_bytes: 512 }]).expect("a state");
            let (page_size, capacity) = (2, Capacity::Pages(2000));
            let pool = PoolConfig { layers: 4, groups, page_size, capacity, ..PoolConfig::default() };
            let config = EngineConfig { max_sequences: Self::ROWS as u32, state_margin: 0, ..pool.into() };
            let engine = Engine::new(config, Null).expect("a valid config");
            let table = engine.shape().table;
            let states = StepStates::new(&table);
            let columns = StateColumns::new(&states, Self::ROWS);
            let tables = vec![0; table.words()];
            Self { engine, states, columns, open: OpenSteps::new(4), seqs: Vec::new(), tables }
        }

        fn admit(&mut self, count: u32) {
            for _ in 0..count {
                let first = self.engine.stats().admissions as u32 * 8;
                let prompt: Vec<_> = (first..first + 7).map(TokenId::new).collect();
                self.seqs.push(self.engine.admit(Namespace::default(), &prompt, 0).expect("there is room"));
            }
        }

        /// Plans one step of all sequences and `padding` rows, and compares the columns and the pages of rows.
        fn step(&mut self, scratch: &mut StepScratch, padding: u32) {
            let engine = &mut self.engine;
            for &seq in &self.seqs {
                if engine.extend_max(seq).expect("it is live") == 0 {
                    engine.append(seq, &[TokenId::new(1)]).expect("there is room");
                }
            }
            let len = |&seq: &SeqKey| Extend { seq, len: engine.next_len(seq, 3).expect("it is live") };
            let items: Vec<_> = self.seqs.iter().map(len).collect();
            let tokens = (items.iter().map(|item| item.len).sum::<u32>() + padding) as usize;
            let size = PlanSize { rows: items.len() + padding as usize, tokens };
            let plan = engine.plan_padded(scratch, &items, &[], size).expect("there is room");
            plan.table_writes.iter().for_each(|write| self.tables[write.index as usize] = write.value);
            self.open.begin(plan.step);
            self.states.begin(&plan);
            let (rows, words, table) = (plan.rows.len(), self.states.row_words(), engine.shape().table);
            let stride = rows.next_multiple_of(4);
            let mut out = vec![7; words * stride];
            self.columns.put(&self.states, plan.step, rows, &mut out, stride);
            for (at, row) in plan.rows.iter().enumerate() {
                let first = table.state_word(row.row, 0) as usize;
                let want: Vec<u32> = match row.kv_len {
                    0 => vec![u32::MAX; words],
                    _ => self.tables[first..first + words].to_vec(),
                };
                let got: Vec<u32> = (0..words).map(|page| out[page * stride + at]).collect();
                assert_eq!(got, want, "row {at}");
                let pages = self.states.pages(&plan, at).map(|pages| pages.concat());
                let want = (row.kv_len > 0).then(|| PageId::from_raw(&want).to_vec());
                assert_eq!(pages, want, "row {at}");
            }
            let step = plan.step;
            self.engine.commit(step).expect("it is open");
            self.engine.complete(step).expect("it is committed");
            self.open.end(StepEnd::Complete(step));
            self.states.end(&self.open);
        }
    }

    /// Batches grow, shrink and change their order, so that columns change one by one and in whole blocks.
    #[test]
    fn columns_have_the_words_of_their_step() {
        let (mut batches, mut scratch) = (Batches::new(), StepScratch::new());
        for round in 0..40 {
            if round % 8 == 0 && batches.seqs.len() > 20 {
                batches.seqs.drain(..18).for_each(|seq| batches.engine.finish(seq).expect("it is live"));
            }
            match round % 8 {
                0 => batches.admit(if round % 16 == 0 { 20 } else { 3 }),
                3 => {
                    let seq = batches.seqs.remove(round % 5);
                    batches.engine.finish(seq).expect("it is live");
                }
                5 => batches.seqs.reverse(),
                6 => {
                    let seq = batches.seqs[round % 7];
                    batches.engine.preempt(seq, Keep::Publish).expect("it runs");
                    batches.engine.resume(seq, 0).expect("there is room");
                }
                _ => {}
            }
            batches.step(&mut scratch, round as u32 % 3);
            batches.step(&mut scratch, 0);
        }
    }

    /// A step that did not begin has no words.
    #[test]
    fn an_unknown_step_has_padding_alone() {
        let mut batches = Batches::new();
        let words = batches.states.row_words();
        assert!(words >= 4, "a state has several pages");
        let mut out = vec![7; words * 4];
        batches.columns.put(&batches.states, StepId::new(9), 4, &mut out, 4);
        assert!(out.iter().all(|&word| word == u32::MAX));
    }
}
