//! Medians of many short runs, which other work on the machine disturbs less than means.

use std::time::Instant;

/// Returns the nanoseconds of a call: the median over `samples` runs of `calls` calls each.
pub fn median_ns(samples: usize, calls: usize, mut call: impl FnMut()) -> f64 {
    let run = || {
        let start = Instant::now();
        for _ in 0..calls {
            call();
        }
        start.elapsed().as_nanos() as f64 / calls as f64
    };
    median(std::iter::repeat_with(run).take(samples).collect())
}

pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}
