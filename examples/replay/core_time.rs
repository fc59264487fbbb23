//! Measures the time that the engine's calls take. Consecutive calls may share a measurement, which saves readings of
//! the clock.

use std::time::Instant;

/// Time that the engine's calls have taken in the current step.
#[derive(Default)]
pub struct CoreTime {
    /// Nanoseconds so far.
    open: u64,
}

impl CoreTime {
    /// Runs `calls`, which call the engine, and adds their time to the current step. With `--store`, the time includes
    /// the work of the `KeyStore`.
    pub fn measure<R>(&mut self, calls: impl FnOnce() -> R) -> R {
        let start = Instant::now();
        let result = calls();
        self.open += start.elapsed().as_nanos() as u64;
        result
    }

    /// Ends the step and returns its time in nanoseconds.
    pub fn end_step(&mut self) -> u64 {
        std::mem::take(&mut self.open)
    }
}

/// Returns the percentile by the nearest rank: the smallest of the sorted values such that at least `percent` percent
/// of them are not larger. Returns 0 if there are no values.
pub fn percentile(sorted: &[u64], percent: f64) -> u64 {
    let rank = (sorted.len() as f64 * percent / 100.0).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles() {
        let values: Vec<u64> = (1..=200).collect();
        assert_eq!(percentile(&values, 50.0), 100);
        assert_eq!(percentile(&values, 99.0), 198);
        assert_eq!(percentile(&values, 100.0), 200);
        assert_eq!(percentile(&values[..1], 50.0), 1);
        assert_eq!(percentile(&[], 50.0), 0);
    }

    #[test]
    fn groups_add_up_to_steps() {
        let mut core = CoreTime::default();
        assert_eq!(core.measure(|| 5), 5);
        core.measure(|| std::thread::sleep(std::time::Duration::from_millis(2)));
        let first = core.end_step();
        let second = core.end_step();
        assert!(first >= 2_000_000, "{first}");
        assert_eq!(second, 0);
    }
}
