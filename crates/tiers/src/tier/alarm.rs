//! A thread that wakes the host at given times: when a request shall not wait longer, or a stopped store is tried
//! again.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::lock::lock;

/// Stands for a time that is too far in the future: 100 years.
const FAR: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Returns the end of a time that begins now, at most [`FAR`] in the future.
pub(super) fn after(now: Instant, time: Duration) -> Instant {
    now + time.min(FAR)
}

/// Wakes the host at given times.
pub(super) struct Alarm(Arc<Times>);

#[derive(Default)]
struct Times {
    /// The times; `None` ends the thread.
    due: Mutex<Option<BinaryHeap<Reverse<Instant>>>>,
    changed: Condvar,
}

impl Alarm {
    pub fn new(wake: Arc<dyn Fn() + Send + Sync>) -> io::Result<Self> {
        let times = Arc::new(Times { due: Mutex::new(Some(BinaryHeap::new())), changed: Condvar::new() });
        let own = Arc::clone(&times);
        std::thread::Builder::new().name("kvarena-alarm".to_owned()).spawn(move || own.run(&*wake))?;
        Ok(Self(times))
    }

    /// Wakes the host at this time.
    pub fn set(&self, time: Instant) {
        if let Some(due) = &mut *lock(&self.0.due) {
            due.push(Reverse(time));
        }
        self.0.changed.notify_one();
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        *lock(&self.0.due) = None;
        self.0.changed.notify_one();
    }
}

impl Times {
    fn run(&self, wake: &dyn Fn()) {
        let mut due = lock(&self.due);
        while let Some(times) = &mut *due {
            let now = Instant::now();
            let is_due = times.peek().is_some_and(|time| time.0 <= now);
            while times.peek().is_some_and(|time| time.0 <= now) {
                times.pop();
            }
            let next = times.peek().map(|time| time.0 - now);
            if is_due {
                drop(due);
                wake();
                due = lock(&self.due);
            } else if let Some(time) = next {
                due = self.changed.wait_timeout(due, time).unwrap_or_else(PoisonError::into_inner).0;
            } else {
                due = self.changed.wait(due).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}
