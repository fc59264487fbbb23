//! The threads that attention is shared with: one pool for all backends of the process.
//!
//! It has a thread for each core but the caller's, started when first used, and asleep while there is no work. So an
//! engine wakes threads and starts none, and several engines in one process share the cores.
//!
//! Not here: what is computed.

use std::num::NonZeroUsize;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use rayon_core::{ThreadPool, ThreadPoolBuilder};

/// Threads of this process that compute attention.
static BUSY: AtomicUsize = AtomicUsize::new(0);

/// Cores that the process may use.
fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| thread::available_parallelism().map_or(1, NonZeroUsize::get))
}

/// The pool; nothing where there is one core, or where no thread can be had.
fn pool() -> Option<&'static ThreadPool> {
    static POOL: OnceLock<Option<ThreadPool>> = OnceLock::new();
    let start = || {
        let others = cores() - 1;
        let name = |i| format!("kvarena-{i}");
        let build = || ThreadPoolBuilder::new().num_threads(others).thread_name(name).build().ok();
        if others > 0 { build() } else { None }
    };
    POOL.get_or_init(start).as_ref()
}

/// A thread that computes, until dropped.
struct Busy;

impl Busy {
    fn start() -> Self {
        BUSY.fetch_add(1, Ordering::Relaxed);
        Self
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        BUSY.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Lets all of `workers` work, the first on this thread and the others on the pool's; returns when all are done.
///
/// `work` takes one step at a time, and returns whether there may be another. The others also stop where the process
/// computes on more threads than it has cores: then another engine has come to need them.
pub(super) fn share<W: Send>(workers: &mut [W], work: impl Fn(&mut W) -> bool + Sync) {
    let (first, others) = workers.split_first_mut().expect("there is at least one thread");
    let own = |first: &mut W| {
        let _busy = Busy::start();
        while work(first) {}
    };
    let Some(pool) = pool().filter(|_| !others.is_empty()) else { return own(first) };
    let work = &work;
    pool.in_place_scope(|scope| {
        for worker in others.iter_mut().take(cores() - 1) {
            scope.spawn(move |_| {
                let _busy = Busy::start();
                while BUSY.load(Ordering::Relaxed) <= cores() && work(worker) {}
            });
        }
        own(first);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn every_step_is_taken_once_and_engines_together_stay_within_the_cores() {
        let most = AtomicUsize::new(0);
        let engine = || {
            for round in 0..50 {
                let taken = Mutex::new(0);
                share(&mut [0; 4], |own| {
                    let mut taken = taken.lock().expect("no step panics");
                    *taken += u64::from(*taken < round);
                    *own += 1;
                    // A pool's thread looks after a step that came with another engine: at most one too many.
                    most.fetch_max(BUSY.load(Ordering::Relaxed), Ordering::Relaxed);
                    *own < 200 && *taken < round
                });
                assert_eq!(*taken.lock().expect("no step panics"), round);
            }
        };
        thread::scope(|scope| (0..2).for_each(|_| drop(scope.spawn(engine))));
        assert!(most.into_inner() <= cores() + 1);
    }
}
