//! Pseudo-random numbers of a seed, and the distributions of the chats.

use kvarena::testkit::rng;

pub struct Rng(rng::Rng);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(rng::Rng::new(seed))
    }

    /// Returns a number below `end`. The numbers are nearly uniform if `end` is far below 2^64.
    pub fn below(&mut self, end: u64) -> u64 {
        self.0.below(end)
    }

    /// Returns a number in `0.0..1.0`.
    pub fn unit(&mut self) -> f64 {
        (self.0.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns a log-normal number with this median, clamped to `min..=max`.
    pub fn log_normal(&mut self, median: f64, sigma: f64, min: u32, max: u32) -> u32 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        let normal = radius * (std::f64::consts::TAU * self.unit()).cos();
        (median * (sigma * normal).exp()).clamp(f64::from(min), f64::from(max)) as u32
    }
}

/// Zipf distribution: rank `r` has the weight `1 / (r + 1)^exponent`.
pub struct Zipf {
    sums: Vec<f64>,
}

impl Zipf {
    pub fn new(ranks: usize, exponent: f64) -> Self {
        let mut sum = 0.0;
        let sums = (1..=ranks).map(|rank| {
            sum += (rank as f64).powf(-exponent);
            sum
        });
        Self { sums: sums.collect() }
    }

    pub fn draw(&self, rng: &mut Rng) -> usize {
        let total = self.sums[self.sums.len() - 1];
        let point = rng.unit() * total;
        self.sums.partition_point(|&sum| sum <= point).min(self.sums.len() - 1)
    }
}
