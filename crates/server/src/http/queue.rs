//! What was taken in and not begun: a bounded line between those who ask, on many threads, and the one that serves.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Why nothing was pushed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refused {
    /// As many wait as may.
    Full,
    /// No more are taken.
    Closed,
}

/// A line of jobs with an end.
#[derive(Debug)]
pub struct Queue<T> {
    state: Mutex<State<T>>,
    came: Condvar,
    max: usize,
}

#[derive(Debug)]
struct State<T> {
    jobs: VecDeque<T>,
    /// Of those that were taken, how many had not begun when it was last asked.
    waiting: usize,
    is_closed: bool,
}

impl<T> Queue<T> {
    /// A line in which `max` may wait, those that were taken and have not begun included.
    pub fn new(max: usize) -> Self {
        let state = State { jobs: VecDeque::new(), waiting: 0, is_closed: false };
        Self { state: Mutex::new(state), came: Condvar::new(), max }
    }

    /// Puts in all jobs of a request, or none. They may pass the bound, which is for requests: one more is taken as
    /// long as there is room for one job.
    ///
    /// # Errors
    /// Too many wait, or no more are taken.
    pub fn push(&self, jobs: Vec<T>) -> Result<(), Refused> {
        let mut state = self.lock();
        if state.is_closed {
            return Err(Refused::Closed);
        }
        if state.jobs.len() + state.waiting >= self.max {
            return Err(Refused::Full);
        }
        state.jobs.extend(jobs);
        self.came.notify_one();
        Ok(())
    }

    /// Takes all jobs, first come first; of those taken before, `waiting` have not begun. Waits for nothing.
    pub fn take(&self, waiting: usize, jobs: &mut Vec<T>) {
        let mut state = self.lock();
        jobs.extend(state.jobs.drain(..));
        // Those taken now have not begun either.
        state.waiting = waiting + jobs.len();
    }

    /// Waits until there are jobs; false once there are none and will be none. Called where nothing waits to begin.
    pub fn wait(&self) -> bool {
        let mut state = self.lock();
        state.waiting = 0;
        let state = self
            .came
            .wait_while(state, |state| state.jobs.is_empty() && !state.is_closed)
            .unwrap_or_else(PoisonError::into_inner);
        !state.jobs.is_empty()
    }

    /// As [`Queue::wait`], at most so long; whether there are jobs, or none will come.
    pub fn wait_at_most(&self, time: Duration) -> bool {
        let mut state = self.lock();
        state.waiting = 0;
        let is_idle = |state: &mut State<T>| state.jobs.is_empty() && !state.is_closed;
        let waited = self.came.wait_timeout_while(state, time, is_idle);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Takes no more jobs from now on; those that are in stay.
    pub fn close(&self) {
        self.lock().is_closed = true;
        self.came.notify_all();
    }

    /// Whether no more are taken.
    pub fn is_closed(&self) -> bool {
        self.lock().is_closed
    }

    /// How many wait: those in the line, and those taken that had not begun.
    pub fn waiting(&self) -> usize {
        let state = self.lock();
        state.jobs.len() + state.waiting
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        // Whoever panicked left a line that is whole: each change is one call.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod test {
    use std::sync::Arc;
    use std::thread;

    use super::*;

    fn taken(queue: &Queue<u32>, waiting: usize) -> Vec<u32> {
        let mut jobs = Vec::new();
        queue.take(waiting, &mut jobs);
        jobs
    }

    #[test]
    fn a_full_line_refuses_until_some_have_begun() {
        let queue = Queue::new(2);
        assert_eq!(queue.push(vec![1]), Ok(()));
        assert_eq!(queue.push(vec![2, 3]), Ok(()), "the jobs of one request stay together");
        assert_eq!(queue.push(vec![4]), Err(Refused::Full));
        assert_eq!(taken(&queue, 0), [1, 2, 3]);
        assert_eq!((queue.push(vec![4]), queue.waiting()), (Err(Refused::Full), 3));
        assert!(taken(&queue, 1).is_empty(), "two have begun");
        assert_eq!(queue.push(vec![4]), Ok(()));
        assert_eq!(queue.push(vec![5]), Err(Refused::Full));
    }

    #[test]
    fn a_closed_line_gives_what_it_has() {
        let queue = Queue::new(2);
        assert!(!queue.wait_at_most(Duration::from_millis(1)));
        queue.push(vec![1]).expect("there is room");
        queue.close();
        assert_eq!((queue.push(vec![2]), queue.is_closed()), (Err(Refused::Closed), true));
        assert!(queue.wait() && queue.wait_at_most(Duration::ZERO));
        assert_eq!(taken(&queue, 0), [1]);
        assert!(!queue.wait());
    }

    #[test]
    fn whoever_waits_is_woken() {
        let queue = Arc::new(Queue::new(100));
        let serving = {
            let queue = Arc::clone(&queue);
            thread::spawn(move || {
                let mut jobs = Vec::new();
                while queue.wait() {
                    queue.take(0, &mut jobs);
                }
                jobs
            })
        };
        let asking = |from: u32| {
            let queue = Arc::clone(&queue);
            thread::spawn(move || {
                for job in from..from + 100 {
                    while queue.push(vec![job]) == Err(Refused::Full) {
                        thread::yield_now();
                    }
                }
            })
        };
        let askers: Vec<_> = (0..4).map(|i| asking(100 * i)).collect();
        askers.into_iter().for_each(|asker| asker.join().expect("no panic"));
        queue.close();
        let mut jobs = serving.join().expect("no panic");
        let of = |i: u32| jobs.iter().copied().filter(move |job| job / 100 == i);
        assert!((0..4).all(|i| of(i).is_sorted()), "first come, first taken");
        jobs.sort_unstable();
        assert!(jobs.into_iter().eq(0..400), "each is taken once");
    }
}
