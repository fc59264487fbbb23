//! [`StepLog`]: the unfinished steps and their items.
//!
//! ```text
//!   planned --commit--> closed --complete (watermark)--> gone
//!      |                   ^
//!      +------abort--------+
//! ```
//!
//! * L1. Step numbers rise by one; the log contains the steps after the last complete one, in order.
//! * L2. Plans commit in order, and an abort also aborts all later plans. So all plans after an open plan are open, and
//!   the log stores the first open one. Steps of page copies are closed from the start.
//!
//! `system/` changes the sequences of a step, and `fence/` contains the pages that wait for it.

use std::collections::VecDeque;

use crate::error::Error;
use crate::id::{SeqKey, StateUse, StepId};
use crate::memory::{Memory, OutOfMemory};

/// One sequence's part in a step.
#[derive(Clone, Copy, Default, Debug)]
pub struct StepItem {
    pub seq: SeqKey,
    /// Epoch of the sequence when the item was planned.
    pub preemption_epoch: u32,
    /// The sequence's `planned_len` before the step; later rollbacks reduce it.
    pub start: u32,
    /// The sequence's `planned_len` after the step; `accept` and later rollbacks reduce it.
    pub end: u32,
    /// The sequence's `dirty_from` before the step.
    pub dirty_from: u32,
    /// Number of the sequence's previous item; 0 if there is none.
    pub previous: u64,
    /// Whether a later rollback has cut the item, or `accept` has kept none of its drafts. The step's sample is then
    /// not the sequence's next token.
    pub cut: bool,
    /// The states that the item reads and writes.
    pub state: StateUse,
}

#[derive(Clone, Copy)]
struct Step {
    /// Number of the step's first item.
    first_item: u64,
    open: bool,
    /// Number of the step's items with drafts that are not yet accepted.
    drafts: u32,
}

/// The unfinished steps and their items.
pub struct StepLog {
    max: u32,
    steps: VecDeque<Step>,
    /// The first open step.
    first_open: Option<StepId>,
    /// A ring whose length is a power of two: item `number` is at `number - origin`, modulo the length.
    items: Vec<StepItem>,
    /// Number of the first item in the ring; items count from 1.
    base: u64,
    end: u64,
    /// Number of the item at index 0. An empty ring begins at index 0 again, so few steps use few cache lines.
    origin: u64,
    completed: StepId,
}

impl StepLog {
    /// Creates a log for at most `max` unfinished steps of at most `batch` sequences each.
    ///
    /// # Errors
    /// The allocation that failed.
    pub(crate) fn new(max: u32, batch: u32, memory: &mut Memory) -> Result<Self, OutOfMemory> {
        let items = u64::from(max) * u64::from(batch);
        Ok(Self {
            max,
            steps: memory.queue(max.into())?,
            first_open: None,
            items: memory.filled(items.next_power_of_two(), StepItem::default())?,
            base: 1,
            end: 1,
            origin: 1,
            completed: StepId::default(),
        })
    }

    /// Returns the number of unfinished steps.
    pub fn len(&self) -> u32 {
        self.steps.len() as u32
    }

    /// Returns the newest step.
    pub fn newest(&self) -> StepId {
        StepId::new(self.completed.raw() + self.steps.len() as u64)
    }

    /// Checks that one more step fits in the log.
    ///
    /// # Errors
    /// [`Error::OutOfSteps`].
    pub fn check_room(&self) -> Result<(), Error> {
        if self.steps.len() < self.max as usize { Ok(()) } else { Err(Error::OutOfSteps { max: self.max }) }
    }

    /// Begins a step of `items` items, which [`StepLog::push`] adds. The caller has called [`StepLog::check_room`].
    pub(crate) fn begin(&mut self, open: bool, items: usize) -> StepId {
        assert!(self.steps.len() < self.max as usize, "the caller checked the room");
        let held = (self.end - self.base) as usize;
        assert!(held + items <= self.items.len(), "a step has at most `batch` items");
        self.steps.push_back(Step { first_item: self.end, open, drafts: 0 });
        let step = self.newest();
        if open && self.first_open.is_none() {
            self.first_open = Some(step);
        }
        step
    }

    fn index(&self, number: u64) -> usize {
        (number - self.origin) as usize & (self.items.len() - 1)
    }

    /// Adds an item to the newest step; returns its number.
    pub(crate) fn push(&mut self, item: StepItem) -> u64 {
        let (number, index) = (self.end, self.index(self.end));
        self.items[index] = item;
        self.end += 1;
        number
    }

    /// Records that one more item of the newest step has drafts, which wait for [`StepLog::accept`].
    pub(crate) fn add_draft(&mut self) {
        self.steps.back_mut().expect("a step was begun").drafts += 1;
    }

    /// Returns whether an open step has drafts that are not yet accepted, including those of finished sequences.
    pub(crate) fn has_drafts(&self, step: StepId) -> bool {
        self.open_index(step).is_ok_and(|index| self.steps[index].drafts > 0)
    }

    /// Ends an item of an open step at `end`: the drafts before `end` are accepted. If `end` is the item's start, no
    /// draft is accepted, and the step's sample is not the sequence's next token.
    pub(crate) fn accept(&mut self, step: StepId, number: u64, end: u32) {
        let index = self.open_index(step).expect("the caller checked the step");
        self.steps[index].drafts -= 1;
        let index = self.index(number);
        let item = &mut self.items[index];
        item.cut |= end == item.start;
        item.end = end;
    }

    /// Returns the first open step from an index of the log on.
    fn find_open(&self, start: usize) -> Option<StepId> {
        let index = start + self.steps.range(start..).position(|step| step.open)?;
        Some(StepId::new(self.completed.raw() + 1 + index as u64))
    }

    fn open_index(&self, step: StepId) -> Result<usize, Error> {
        let index = step.raw().checked_sub(self.completed.raw() + 1).map(|index| index as usize);
        match index {
            Some(index) if self.steps.get(index).is_some_and(|step| step.open) => Ok(index),
            _ => Err(Error::UnknownStep { step }),
        }
    }

    /// Checks that the step is the next one to commit.
    ///
    /// # Errors
    /// [`Error::UnknownStep`], [`Error::StepOrder`].
    pub fn check_commit(&self, step: StepId) -> Result<(), Error> {
        self.open_index(step)?;
        match self.first_open {
            Some(first) if first != step => Err(Error::StepOrder { step, first }),
            _ => Ok(()),
        }
    }

    /// Checks that the step can be aborted.
    ///
    /// # Errors
    /// [`Error::UnknownStep`].
    pub fn check_abort(&self, step: StepId) -> Result<(), Error> {
        self.open_index(step).map(|_| ())
    }

    pub(crate) fn is_open(&self, step: StepId) -> bool {
        self.open_index(step).is_ok()
    }

    /// Closes an open step. O(closed steps between it and the next open one).
    pub(crate) fn close(&mut self, step: StepId) {
        let index = self.open_index(step).expect("the caller checked the step");
        self.steps[index].open = false;
        if self.first_open == Some(step) {
            self.first_open = self.find_open(index + 1);
        }
    }

    /// Returns the numbers of the items of an unfinished step.
    pub(crate) fn items_of(&self, step: StepId) -> std::ops::Range<u64> {
        let index = (step.raw() - self.completed.raw() - 1) as usize;
        let next = self.steps.get(index + 1);
        self.steps[index].first_item..next.map_or(self.end, |next| next.first_item)
    }

    /// Returns whether an item belongs to a step. Complete and unplanned steps have no items.
    pub(crate) fn is_item_of(&self, number: u64, step: StepId) -> bool {
        (self.completed < step && step <= self.newest()) && self.items_of(step).contains(&number)
    }

    /// Returns an item by number.
    pub(crate) fn item(&self, number: u64) -> StepItem {
        self.items[self.index(number)]
    }

    /// Sets the states that an item reads and writes.
    pub(crate) fn set_state(&mut self, number: u64, state: StateUse) {
        let index = self.index(number);
        self.items[index].state = state;
    }

    /// Returns an item by number, if its step is open. Number 0 is no item.
    pub(crate) fn open_item(&self, number: u64) -> Option<StepItem> {
        let is_open = number >= self.base && number < self.end && self.is_open_item(number);
        is_open.then(|| self.item(number))
    }

    /// Returns the items of open steps of one sequence, last to first. `last_item` is the sequence's last one.
    pub(crate) fn open_items(&self, last_item: u64) -> impl Iterator<Item = StepItem> {
        std::iter::successors(self.open_item(last_item), |item| self.open_item(item.previous))
    }

    /// Returns whether an item's step is unfinished and will sample the sequence's next token. Number 0 is no item.
    pub(crate) fn samples_next(&self, item: u64) -> bool {
        item >= self.base && !self.items[self.index(item)].cut
    }

    /// Returns the number of a sequence's pages whose page table words were sent by plans that can no longer be
    /// aborted. `last_item` and `dirty_from` are those of the sequence. O(unfinished steps).
    pub(crate) fn sent_for_good(&self, last_item: u64, dirty_from: u32) -> u32 {
        let (mut number, mut sent) = (last_item, dirty_from);
        while number >= self.base && self.is_open_item(number) {
            let item = self.item(number);
            (number, sent) = (item.previous, sent.min(item.dirty_from));
        }
        sent
    }

    /// Returns whether an item belongs to an open step. Items of open steps follow all other items (L2).
    fn is_open_item(&self, number: u64) -> bool {
        self.first_open.is_some_and(|step| number >= self.items_of(step).start)
    }

    /// Cuts the unfinished items of one sequence at `len` tokens. `last_item` is the sequence's last one.
    /// O(unfinished steps).
    pub(crate) fn cap(&mut self, last_item: u64, len: u32) {
        let mut number = last_item;
        while number >= self.base {
            let index = self.index(number);
            let item = &mut self.items[index];
            item.cut |= item.end > len;
            (item.start, item.end) = (item.start.min(len), item.end.min(len));
            number = item.previous;
        }
    }

    /// Checks that all steps up to `step` are closed.
    ///
    /// # Errors
    /// [`Error::UnknownStep`] for a step never planned, [`Error::StepOpen`].
    pub fn check_complete(&self, step: StepId) -> Result<(), Error> {
        if step > self.newest() || step.raw() == 0 {
            return Err(Error::UnknownStep { step });
        }
        match self.first_open {
            Some(open) if open <= step => Err(Error::StepOpen { step: open }),
            _ => Ok(()),
        }
    }

    /// Removes all steps up to `step`. The caller has called [`StepLog::check_complete`].
    pub(crate) fn complete(&mut self, step: StepId) {
        let count = step.raw().saturating_sub(self.completed.raw()) as usize;
        if count == 0 {
            return;
        }
        self.base = self.items_of(step).end;
        if self.base == self.end {
            self.origin = self.base;
        }
        self.steps.drain(..count);
        self.completed = step;
    }

    /// Checks L1, and the part of L2 that does not hold by construction.
    pub(crate) fn check(&self) -> Result<(), &'static str> {
        if !self.steps.iter().is_sorted_by_key(|step| step.first_item) {
            return Err("L1: steps hold their items in order");
        }
        if self.steps.is_empty() && self.base != self.end {
            return Err("L1: every item belongs to a step");
        }
        if self.first_open != self.find_open(0) {
            return Err("L2: the log stores the first open plan");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a log of three steps: 1 is complete, 2 committed, 3 open.
    fn sound() -> StepLog {
        let mut log = StepLog::new(4, 2, &mut Memory::new(false)).expect("memory");
        for items in [1, 2, 1] {
            let step = log.begin(true, items);
            for _ in 0..items {
                log.push(StepItem::default());
            }
            if step.raw() < 3 {
                log.close(step);
            }
        }
        log.complete(StepId::new(1));
        assert_eq!(log.check(), Ok(()));
        log
    }

    /// Returns the audit's error after `spoil`.
    fn broken<T>(spoil: impl FnOnce(&mut StepLog) -> T) -> &'static str {
        let mut log = sound();
        spoil(&mut log);
        log.check().expect_err("the audit finds the error")
    }

    #[test]
    fn l1_steps_hold_their_items_in_order() {
        assert_eq!(broken(|log| log.steps.swap(0, 1)), "L1: steps hold their items in order");
        let left_over = |log: &mut StepLog| {
            log.close(StepId::new(3));
            log.complete(StepId::new(3));
            assert_eq!(log.check(), Ok(()));
            log.end += 1;
        };
        assert_eq!(broken(left_over), "L1: every item belongs to a step");
    }

    #[test]
    fn l2_the_log_stores_the_first_open_plan() {
        let known = "L2: the log stores the first open plan";
        assert_eq!(broken(|log| log.first_open = None), known);
        assert_eq!(broken(|log| log.steps[1].open = false), known);
    }

    #[test]
    fn a_commit_does_not_scan_earlier_steps() {
        // A scan of all steps in each call would take 10^12 reads.
        const STEPS: u32 = 1 << 20;
        let mut log = StepLog::new(STEPS, 1, &mut Memory::new(false)).expect("memory");
        let steps: Vec<_> = (0..STEPS).map(|i| log.begin(i % 3 > 0, 0)).collect();
        log.check().expect("all invariants hold");
        for (i, &step) in steps.iter().enumerate().filter(|(i, _)| i % 3 > 0) {
            assert_eq!(log.check_commit(step), Ok(()));
            log.close(step);
            assert!(log.check_complete(step).is_ok(), "step {i} and all before it are closed");
        }
        log.check().expect("all invariants hold");
        assert_eq!(log.check_complete(steps[STEPS as usize - 1]), Ok(()));
    }
}
