//! The threads of attention: one pool for all backends of the process.
//!
//! The pool has one thread fewer than the process has cores. Its threads start at their first use and sleep without
//! work. Engines therefore start no threads, and several engines in one process share the cores.

use std::cell::Cell;
use std::num::NonZeroUsize;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{process, thread};

use rayon_core::{ThreadPool, ThreadPoolBuilder};

/// Number of threads of this process that compute attention.
static BUSY: AtomicUsize = AtomicUsize::new(0);

/// Cores that the process may use.
fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| thread::available_parallelism().map_or(1, NonZeroUsize::get))
}

/// A pool, and the process that started it.
type Pool = (u32, ThreadPool);

/// Returns the pool; `None` if there is one core or no thread can start now. A forked child has none, because it
/// inherits the pool without its threads.
fn pool() -> Option<&'static ThreadPool> {
    static POOL: OnceLock<Pool> = OnceLock::new();
    let others = cores() - 1;
    let name = |i| format!("kvarena-{i}");
    let start = || ThreadPoolBuilder::new().num_threads(others).thread_name(name).build().ok();
    let (process, pool) = if others > 0 { started(&POOL, start)? } else { return None };
    (*process == process::id()).then_some(pool)
}

/// Returns the pool, and starts it if necessary. After a failed start, the next call tries again.
fn started(pool: &OnceLock<Pool>, start: impl Fn() -> Option<ThreadPool>) -> Option<&Pool> {
    if pool.get().is_none() {
        // Of two concurrent starts, one is dropped.
        let _ = pool.set((process::id(), start()?));
    }
    pool.get()
}

/// Counts a thread as busy until it is dropped.
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

/// A job on a thread of the pool. A job may run inside another one that has yielded.
struct Job {
    busy: Option<Busy>,
}

impl Job {
    fn start() -> Self {
        let is_outermost = !INSIDE.replace(true);
        Self { busy: is_outermost.then(Busy::start) }
    }

    /// Lets jobs of other engines run, which would otherwise wait for all steps of this job. Only the outermost job
    /// yields, so that a short job never waits for the engine that yielded to it.
    fn make_way(&self) {
        if self.busy.is_some() {
            rayon_core::yield_now();
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if self.busy.is_some() {
            INSIDE.set(false);
        }
    }
}

thread_local! {
    /// Whether this thread runs a job.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Runs `workers`, the first on this thread and the others on the pool's threads, at most one for each core. Waits for
/// them.
///
/// `work` executes one step, and returns whether more steps may exist. The workers on the pool's threads also stop if
/// the process computes on more threads than it has cores, which happens if another engine computes.
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
                let job = Job::start();
                while BUSY.load(Ordering::Relaxed) <= cores() && work(worker) {
                    job.make_way();
                }
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
                    // A thread of the pool notices another engine after its step, so at most one thread is too many.
                    most.fetch_max(BUSY.load(Ordering::Relaxed), Ordering::Relaxed);
                    *own < 200 && *taken < round
                });
                assert_eq!(*taken.lock().expect("no step panics"), round);
            }
        };
        thread::scope(|scope| (0..2).for_each(|_| drop(scope.spawn(engine))));
        assert!(most.into_inner() <= cores() + 1);
    }

    #[test]
    fn a_start_that_fails_is_tried_again() {
        let pool = OnceLock::new();
        assert!(started(&pool, || None).is_none());
        let start = || ThreadPoolBuilder::new().num_threads(1).build().ok();
        assert!(started(&pool, start).is_some());
        assert!(started(&pool, || panic!("it has started")).is_some());
    }

    #[test]
    fn the_process_that_starts_the_pool_uses_it() {
        assert_eq!(pool().is_some(), cores() > 1);
    }

    #[test]
    fn a_short_call_does_not_wait_for_all_steps_of_another_engine() {
        use std::sync::atomic::AtomicBool;
        use std::time::Duration;
        let is_done = AtomicBool::new(false);
        let steps = AtomicUsize::new(0);
        thread::scope(|scope| {
            let long = scope.spawn(|| {
                share(&mut [(); 4], |()| {
                    thread::sleep(Duration::from_millis(1));
                    steps.fetch_add(1, Ordering::Relaxed) < 5_000 && !is_done.load(Ordering::Relaxed)
                });
            });
            while steps.load(Ordering::Relaxed) < 10 {
                thread::yield_now();
            }
            let short = AtomicUsize::new(0);
            share(&mut [(); 4], |()| short.fetch_add(1, Ordering::Relaxed) < 5);
            is_done.store(true, Ordering::Relaxed);
            long.join().expect("no step panics");
        });
        assert!(steps.into_inner() < 5_000, "the short call ended first");
    }

    #[test]
    #[cfg(target_os = "linux")]
    #[ignore = "a measurement: cargo test --release --lib the_pool_wakes -- --ignored --nocapture"]
    fn the_pool_wakes_fast_and_burns_nothing_between_steps() {
        use std::fs;
        use std::time::{Duration, Instant};
        // Returns the nanoseconds that the pool's threads have computed.
        let computed = || -> u64 {
            let tasks = fs::read_dir("/proc/self/task").expect("Linux lists threads");
            let tasks = tasks.map(|task| task.expect("a thread").path());
            let own = tasks
                .filter(|task| fs::read_to_string(task.join("comm")).is_ok_and(|name| name.starts_with("kvarena-")));
            own.map(|task| {
                let text = fs::read_to_string(task.join("schedstat")).expect("the thread lives");
                let first = text.split(' ').next().expect("a number");
                first.parse::<u64>().expect("a number")
            })
            .sum()
        };
        let mut wakes = Vec::new();
        let mut burnt = 0;
        for _ in 0..200 {
            thread::sleep(Duration::from_millis(1));
            let before = computed();
            thread::sleep(Duration::from_millis(4));
            burnt += computed() - before;
            let start = Instant::now();
            let caller = thread::current().id();
            let woken = Mutex::new(None);
            share(&mut [(); 2], |()| {
                let mut woken = woken.lock().expect("no step panics");
                if thread::current().id() != caller {
                    woken.get_or_insert(start.elapsed());
                }
                woken.is_none() && start.elapsed() < Duration::from_secs(1)
            });
            wakes.extend(woken.into_inner().expect("no step panics"));
        }
        wakes.sort();
        let median = wakes[wakes.len() / 2];
        println!("wakes in {:?} to {median:?} (median of {})", wakes[0], wakes.len());
        println!("computes {} us in 800 ms between steps", burnt / 1_000);
        assert!(burnt < 8_000_000, "1 % of the time");
    }
}
