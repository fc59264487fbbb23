//! Runs reference computations on all cores.

use std::panic::resume_unwind;
use std::thread;

/// Minimum number of items of each thread but the last.
const ITEMS_MIN: usize = 4;

/// Applies `run` to each item, and returns the results in order. Each thread takes consecutive items.
///
/// # Panics
/// If `run` panics.
pub fn map<T: Sync, R: Send>(items: &[T], run: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let some = items.len().div_ceil(threads).max(ITEMS_MIN);
    let (first, rest) = items.split_at(items.len().min(some));
    let run_all = |items: &[T]| items.iter().map(&run).collect::<Vec<R>>();
    thread::scope(|scope| {
        let others: Vec<_> = rest.chunks(some).map(|items| scope.spawn(move || run_all(items))).collect();
        let mut all = run_all(first);
        for other in others {
            all.extend(other.join().unwrap_or_else(|panic| resume_unwind(panic)));
        }
        all
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn each_item_has_its_place() {
        for count in [0, 1, 3, 4, 5, 100, 101] {
            let items: Vec<usize> = (0..count).collect();
            assert!(super::map(&items, |&item| 2 * item).into_iter().eq((0..count).map(|n| 2 * n)));
        }
    }
}
