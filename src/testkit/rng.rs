//! Streams of random numbers: those of a seed, by splitmix64, and those of a fuzzer's bytes.

/// A stream of numbers that depends only on its seed or its bytes, on every machine.
#[derive(Clone, Debug)]
pub struct Rng(Source);

#[derive(Clone, Debug)]
enum Source {
    Seed(u64),
    Bytes(std::vec::IntoIter<u8>),
}

impl Rng {
    /// Creates the stream of a seed.
    pub fn new(seed: u64) -> Self {
        Self(Source::Seed(seed))
    }

    /// Creates the stream of some bytes. After the last byte, all numbers are 0.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        Self(Source::Bytes(Vec::from(bytes).into_iter()))
    }

    /// Returns whether the stream has used all of its bytes. The stream of a seed has no end.
    pub fn is_empty(&self) -> bool {
        matches!(&self.0, Source::Bytes(rest) if rest.len() == 0)
    }

    /// Returns the next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.next(8)
    }

    /// Returns the next 64 bits of a seed's stream, or the next `count` bytes.
    fn next(&mut self, count: u32) -> u64 {
        match &mut self.0 {
            Source::Seed(state) => {
                *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
                mix(*state)
            }
            Source::Bytes(rest) => (0..count).fold(0, |bits, _| bits << 8 | u64::from(rest.next().unwrap_or(0))),
        }
    }

    /// Returns a number below `bound`, which is at least 1.
    pub fn below(&mut self, bound: u64) -> u64 {
        // A fuzzer's bytes last longer if a draw takes no more of them than `bound` has.
        let bytes = (u64::BITS - (bound - 1).leading_zeros()).div_ceil(8);
        self.next(bytes) % bound
    }

    /// Returns a number in `low..=high`.
    pub fn within(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// Returns true with a probability of 1 / `n`.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// Returns one of the items, each with equal probability.
    pub fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len() as u64) as usize]
    }

    /// Returns an index, each with a probability in proportion to its weight.
    pub fn weighted(&mut self, weights: &[u64]) -> usize {
        let mut point = self.below(weights.iter().sum());
        let drawn = weights.iter().position(|&weight| {
            let here = point < weight;
            point = point.saturating_sub(weight);
            here
        });
        drawn.expect("the point is below the sum")
    }
}

/// Mixes 64 bits by a bijection.
pub fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
