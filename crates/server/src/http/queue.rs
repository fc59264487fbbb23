//! A bounded queue of accepted jobs that have not begun, between the clients' threads and the engine's thread.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The reason for which a push failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PushError {
    Full,
    Closed,
}

/// A queue of jobs that can be closed.
#[derive(Debug)]
pub struct Queue<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
    max: usize,
}

#[derive(Debug)]
struct State<T> {
    jobs: VecDeque<T>,
    /// Number of waiting streams of taken jobs. `take` updates it; waiting for jobs sets it to 0.
    waiting: usize,
    is_closed: bool,
}

impl<T> Queue<T> {
    /// Creates a queue for `max` waiting jobs, including the waiting streams of taken jobs.
    pub fn new(max: usize) -> Self {
        let state = State { jobs: VecDeque::new(), waiting: 0, is_closed: false };
        Self { state: Mutex::new(state), changed: Condvar::new(), max }
    }

    /// Pushes all jobs of a request, or none. The queue accepts a whole request while it has room for one more job, so
    /// the jobs of the last request may exceed the limit.
    ///
    /// # Errors
    /// The queue is full or closed.
    pub fn push(&self, jobs: Vec<T>) -> Result<(), PushError> {
        let mut state = self.lock();
        if state.is_closed {
            return Err(PushError::Closed);
        }
        if state.jobs.len() + state.waiting >= self.max {
            return Err(PushError::Full);
        }
        state.jobs.extend(jobs);
        self.changed.notify_one();
        Ok(())
    }

    /// Takes all jobs in order, without waiting. `waiting` is the number of waiting streams of jobs taken earlier.
    pub fn take(&self, waiting: usize, jobs: &mut Vec<T>) {
        let mut state = self.lock();
        jobs.extend(state.jobs.drain(..));
        // Each job taken now has one waiting stream.
        state.waiting = waiting + jobs.len();
    }

    /// Waits for jobs; returns false if the queue is empty and closed. The caller has no waiting stream.
    pub fn wait(&self) -> bool {
        let mut state = self.lock();
        state.waiting = 0;
        let state = self
            .changed
            .wait_while(state, |state| state.jobs.is_empty() && !state.is_closed)
            .unwrap_or_else(PoisonError::into_inner);
        !state.jobs.is_empty()
    }

    /// Waits for jobs for at most `time`; returns whether there are jobs or the queue is closed.
    pub fn wait_at_most(&self, time: Duration) -> bool {
        let mut state = self.lock();
        state.waiting = 0;
        let is_idle = |state: &mut State<T>| state.jobs.is_empty() && !state.is_closed;
        let waited = self.changed.wait_timeout_while(state, time, is_idle);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Closes the queue; jobs in it stay.
    pub fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_all();
    }

    pub fn is_closed(&self) -> bool {
        self.lock().is_closed
    }

    /// Returns the number of jobs in the queue and of waiting streams of taken jobs.
    pub fn waiting(&self) -> usize {
        let state = self.lock();
        state.jobs.len() + state.waiting
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        // A panic leaves the queue consistent, because each change is one call.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use super::*;

    fn taken(queue: &Queue<u32>, waiting: usize) -> Vec<u32> {
        let mut jobs = Vec::new();
        queue.take(waiting, &mut jobs);
        jobs
    }

    #[test]
    fn a_full_queue_refuses_until_jobs_begin() {
        let queue = Queue::new(2);
        assert_eq!(queue.push(vec![1]), Ok(()));
        assert_eq!(queue.push(vec![2, 3]), Ok(()), "the jobs of one request stay together");
        assert_eq!(queue.push(vec![4]), Err(PushError::Full));
        assert_eq!(taken(&queue, 0), [1, 2, 3]);
        assert_eq!((queue.push(vec![4]), queue.waiting()), (Err(PushError::Full), 3));
        assert!(taken(&queue, 1).is_empty(), "two have begun");
        assert_eq!(queue.push(vec![4]), Ok(()));
        assert_eq!(queue.push(vec![5]), Err(PushError::Full));
    }

    #[test]
    fn a_closed_queue_returns_its_jobs() {
        let queue = Queue::new(2);
        assert!(!queue.wait_at_most(Duration::from_millis(1)));
        queue.push(vec![1]).expect("there is room");
        queue.close();
        assert_eq!((queue.push(vec![2]), queue.is_closed()), (Err(PushError::Closed), true));
        assert!(queue.wait() && queue.wait_at_most(Duration::ZERO));
        assert_eq!(taken(&queue, 0), [1]);
        assert!(!queue.wait());
    }

    #[test]
    fn a_waiting_server_is_woken() {
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
                    while queue.push(vec![job]) == Err(PushError::Full) {
                        thread::yield_now();
                    }
                }
            })
        };
        let askers: Vec<_> = (0..4).map(|i| asking(100 * i)).collect();
        askers.into_iter().for_each(|asker| asker.join().expect("no panic"));
        queue.close();
        let mut jobs = serving.join().expect("no panic");
        let pushed_by = |i: u32| jobs.iter().copied().filter(move |job| job / 100 == i);
        assert!((0..4).all(|i| pushed_by(i).is_sorted()), "first come, first taken");
        jobs.sort_unstable();
        assert!(jobs.into_iter().eq(0..400), "each is taken once");
    }
}
