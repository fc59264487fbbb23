//! Histograms of times up to 36 minutes. Each power of two has 16 buckets, so a quantile is accurate to 6 %. A
//! histogram takes 5 KB, whatever the number of times.

use std::fmt::{self, Write};
use std::time::Duration;

/// Buckets for each power of two.
const PARTS: u64 = 16;
/// Times below `1 << POWERS` nanoseconds (36 minutes) have buckets. Longer times count in the last bucket.
const POWERS: u64 = 41;
/// Upper bounds of the buckets in Prometheus's format, in microseconds.
const BOUNDS: [u64; 17] = [
    500,
    1_000,
    2_500,
    5_000,
    10_000,
    25_000,
    50_000,
    100_000,
    250_000,
    500_000,
    1_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    25_000_000,
    50_000_000,
    100_000_000,
];

/// A histogram of times.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Histogram {
    counts: Vec<u64>,
    /// Number of times in each interval that ends at a bound of [`BOUNDS`], including the bound.
    bounded: [u64; BOUNDS.len()],
    count: u64,
    sum: Duration,
    greatest: Duration,
}

impl Default for Histogram {
    fn default() -> Self {
        let counts = vec![0; ((POWERS - 3) * PARTS) as usize];
        Self { counts, bounded: [0; BOUNDS.len()], count: 0, sum: Duration::ZERO, greatest: Duration::ZERO }
    }
}

/// Returns the bucket of a number of nanoseconds. Numbers below 16 have one bucket each; each further power of two has
/// 16.
fn bucket(nanos: u64) -> usize {
    let nanos = nanos.min((1 << POWERS) - 1);
    let power = u64::from(nanos.max(PARTS).ilog2());
    let shift = power - u64::from(PARTS.ilog2());
    (shift * PARTS + (nanos >> shift)) as usize
}

/// Returns the lower bound of a bucket, in nanoseconds.
fn start(bucket: usize) -> u64 {
    let (bucket, shift) = (bucket as u64, (bucket as u64 / PARTS).saturating_sub(1));
    (bucket - shift * PARTS) << shift
}

impl Histogram {
    /// Adds a time.
    pub fn add(&mut self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.counts[bucket(nanos)] += 1;
        let bound = BOUNDS.partition_point(|&micros| micros * 1000 < nanos);
        if let Some(count) = self.bounded.get_mut(bound) {
            *count += 1;
        }
        self.count += 1;
        self.sum += time;
        self.greatest = self.greatest.max(time);
    }

    /// Returns the number of times.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns the longest time in seconds; it is exact.
    pub fn greatest(&self) -> f64 {
        self.greatest.as_secs_f64()
    }

    /// Returns the quantile `part` of all times in seconds (0.5: the median): the middle of its bucket, but at most the
    /// longest time. Returns 0 without times.
    pub fn quantile(&self, part: f64) -> f64 {
        let wanted = ((part * self.count as f64) as u64).min(self.count.saturating_sub(1));
        let mut before = 0;
        let reached = self.counts.iter().position(|count| {
            before += count;
            before > wanted
        });
        let middle = |bucket| (start(bucket) + start(bucket + 1)) as f64 / 2e9;
        reached.map_or(0.0, middle).min(self.greatest())
    }

    /// Writes the histogram in Prometheus's text format: cumulative counts, with bounds in seconds.
    ///
    /// # Errors
    /// Errors of the writer.
    pub fn prometheus(&self, out: &mut impl Write, name: &str, help: &str) -> fmt::Result {
        writeln!(out, "# HELP {name} {help}\n# TYPE {name} histogram")?;
        let mut below = 0;
        for (bound, count) in BOUNDS.iter().zip(self.bounded) {
            below += count;
            writeln!(out, "{name}_bucket{{le=\"{}\"}} {below}", *bound as f64 / 1e6)?;
        }
        let Self { count, sum, .. } = self;
        writeln!(out, "{name}_bucket{{le=\"+Inf\"}} {count}")?;
        writeln!(out, "{name}_sum {}\n{name}_count {count}", sum.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_follow_one_another() {
        assert_eq!((bucket(0), bucket(15), bucket(16), bucket(31), bucket(32)), (0, 15, 16, 31, 32));
        for index in 1..Histogram::default().counts.len() {
            assert_eq!((bucket(start(index)), bucket(start(index) - 1)), (index, index - 1));
        }
        assert_eq!(bucket(u64::MAX), Histogram::default().counts.len() - 1);
    }

    #[test]
    fn quantiles_have_an_error_of_at_most_six_percent() {
        let mut times = Histogram::default();
        assert_eq!((times.quantile(0.5), times.greatest()), (0.0, 0.0));
        for i in 1..=1000 {
            times.add(Duration::from_micros(i * 37));
        }
        for part in [0.01, 0.5, 0.9, 0.99] {
            // `part` of the times are shorter than the exact quantile.
            let (quantile, exact) = (times.quantile(part), (part * 1000.0 + 1.0) * 37e-6);
            assert!((quantile / exact - 1.0).abs() < 0.06, "{part}: {quantile} is not {exact}");
        }
        assert_eq!((times.count(), times.greatest()), (1000, 0.037));
    }

    #[test]
    fn a_monitor_reads_cumulative_counts() {
        let mut times = Histogram::default();
        for ms in [0, 1, 1, 3, 900, 400_000] {
            times.add(Duration::from_millis(ms));
        }
        let mut text = String::new();
        times.prometheus(&mut text, "t", "Some time.").expect("a write to a String succeeds");
        let counts: Vec<u64> = text
            .lines()
            .filter(|line| line.starts_with("t_bucket"))
            .map(|line| line.rsplit(' ').next().and_then(|n| n.parse().ok()).expect("a count"))
            .collect();
        // A bucket contains its upper bound.
        assert_eq!(counts, [1, 3, 3, 4, 4, 4, 4, 4, 4, 4, 5, 5, 5, 5, 5, 5, 5, 6]);
        for bound in ["0.0005", "0.001", "0.0025", "1", "100", "+Inf"] {
            assert!(text.contains(&format!("le=\"{bound}\"")), "{text}");
        }
        assert!(text.starts_with("# HELP t Some time.\n# TYPE t histogram\n"));
        assert!(text.ends_with("t_sum 400.905\nt_count 6\n"), "{text}");
    }
}
