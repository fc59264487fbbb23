//! [`OpenSteps`]: the set of a backend's open steps, for rule B8 of `Backend`.

use std::collections::VecDeque;

use crate::id::StepId;
use crate::memory::{OutOfMemory, reserved};
use crate::plan::StepEnd;

/// The steps that have begun and not ended, in ascending order.
#[derive(Clone, Debug)]
pub struct OpenSteps {
    open: VecDeque<StepId>,
    max: u32,
    /// The greatest step that has begun or ended.
    last: StepId,
}

impl OpenSteps {
    /// Creates an empty set of at most `max` steps, 8 bytes each.
    ///
    /// # Panics
    /// If the allocation fails.
    pub fn new(max: u32) -> Self {
        Self::try_new(max).expect("memory for the open steps")
    }

    /// Does the same as [`OpenSteps::new`], but returns an error if the allocation fails.
    pub(super) fn try_new(max: u32) -> Result<Self, OutOfMemory> {
        Ok(Self { open: reserved(max.into())?.into(), max, last: StepId::default() })
    }

    /// Returns the maximum number of open steps.
    pub fn max(&self) -> u32 {
        self.max
    }

    /// Returns the greatest step that has begun or ended, or 0. Only greater steps can begin.
    pub fn last(&self) -> StepId {
        self.last
    }

    /// Returns whether one more step may begin.
    pub fn has_room(&self) -> bool {
        self.open.len() < self.max as usize
    }

    /// Returns whether a step has begun and has not ended. O(open steps).
    pub fn contains(&self, step: StepId) -> bool {
        self.open.iter().rev().any(|&open| open == step)
    }

    /// Begins a step.
    ///
    /// # Panics
    /// If the step is not after [`OpenSteps::last`], or [`OpenSteps::has_room`] is false.
    pub fn begin(&mut self, step: StepId) {
        assert!(step > self.last && self.has_room(), "B2: the caller checked the step");
        self.open.push_back(step);
        self.last = step;
    }

    /// Ends the steps that `end` covers. The step in `end` can no longer begin. O(steps that end).
    pub fn end(&mut self, end: StepEnd) {
        match end {
            StepEnd::Complete(step) => {
                while self.open.front().is_some_and(|&open| open <= step) {
                    self.open.pop_front();
                }
                self.last = self.last.max(step);
            }
            StepEnd::Abort(step) => {
                while self.open.back().is_some_and(|&open| open >= step) {
                    self.open.pop_back();
                }
                self.last = self.last.max(step);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begun_steps(numbers: &[u64], max: u32) -> OpenSteps {
        let mut steps = OpenSteps::new(max);
        numbers.iter().for_each(|&number| steps.begin(StepId::new(number)));
        steps
    }

    fn open_numbers(steps: &OpenSteps) -> Vec<u64> {
        (0..20).filter(|&number| steps.contains(StepId::new(number))).collect()
    }

    #[test]
    fn steps_are_open_until_they_end() {
        let mut steps = begun_steps(&[1, 2, 4, 5, 7], 5);
        assert!(!steps.has_room());
        steps.end(StepEnd::Complete(StepId::new(2)));
        assert_eq!(open_numbers(&steps), [4, 5, 7]);
        steps.end(StepEnd::Complete(StepId::new(1))); // The watermark is 2.
        steps.end(StepEnd::Abort(StepId::new(5)));
        assert_eq!(open_numbers(&steps), [4]);
        assert_eq!(steps.last(), StepId::new(7), "an aborted step cannot begin again");
        steps.begin(StepId::new(8));
        steps.end(StepEnd::Complete(StepId::new(9))); // A fork's copies are a step without a plan.
        assert_eq!((open_numbers(&steps), steps.last()), (vec![], StepId::new(9)));
        steps.end(StepEnd::Abort(StepId::new(10))); // Step 10 never began.
        assert_eq!(steps.last(), StepId::new(10));
    }

    #[test]
    #[should_panic(expected = "B2")]
    fn steps_up_to_the_last_do_not_begin() {
        let mut steps = begun_steps(&[1], 5);
        steps.end(StepEnd::Abort(StepId::new(3)));
        steps.begin(StepId::new(2));
    }
}
