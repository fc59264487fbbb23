//! The choice of a token from logits: greedy, or a seeded draw with temperature, min-p, top-k and top-p.
//!
//! A draw takes the token with the maximum of `logit / temperature + noise`. The noise is Gumbel's, from a hash of
//! seed, sample, index and token. A draw therefore does not depend on the noise of earlier draws, and a GPU may draw in
//! any order. This file is the specification of `ptx/src/sample.cu`.

/// Sampling parameters.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sampling {
    /// Temperature; 0 always chooses the most likely token.
    pub temperature: f32,
    /// The draw considers this many of the most likely tokens, and those that tie with the last of them. 0 considers
    /// all.
    pub top_k: u32,
    /// The draw considers the fewest most likely tokens that together reach this probability, and those that tie with
    /// the last of them.
    pub top_p: f32,
    /// The draw considers tokens with at least this share of the most likely token's probability. Applied before
    /// `top_k` and `top_p`.
    pub min_p: f32,
    /// Seed of the draws.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0 }
    }
}

impl Sampling {
    /// Returns whether the draw may exclude tokens.
    pub fn filters(&self) -> bool {
        self.temperature > 0.0 && (self.top_k > 0 || self.top_p < 1.0 || self.min_p > 0.0)
    }

    /// Returns the key of the noise for new token number `index` of sample number `sample`.
    pub fn key(&self, sample: u32, index: u32) -> u64 {
        // Seed and position are hashed apart, because they would cancel each other if they were joined first.
        let (mut seed, mut position) = (self.seed, u64::from(sample) << 32 | u64::from(index));
        splitmix(&mut (splitmix(&mut seed).rotate_left(32) ^ splitmix(&mut position)))
    }

    /// Chooses a token; among equal values the first one. Equal keys and logits give equal tokens. Tokens with a logit
    /// of minus infinity are forbidden. If all are, returns token 0.
    pub fn choose(&self, key: u64, logits: &[f32]) -> u32 {
        let least = if self.filters() { self.least(logits) } else { f32::NEG_INFINITY };
        let mut best: Option<(f32, u32)> = None;
        for (&logit, id) in logits.iter().zip(0..) {
            if !(logit >= least && logit > f32::NEG_INFINITY) {
                continue;
            }
            let warm = self.temperature > 0.0;
            let score = if warm { logit * (1.0 / self.temperature) + gumbel(key, id) } else { logit };
            if best.is_none_or(|(most, _)| score > most) {
                best = Some((score, id));
            }
        }
        best.map_or(0, |(_, token)| token)
    }

    /// Returns the maximum distance from the greatest logit that `min_p` allows.
    pub fn depth(&self) -> f32 {
        if self.min_p > 0.0 { -self.temperature * self.min_p.ln() } else { f32::INFINITY }
    }

    /// Returns the least logit that min-p, then top-k and then top-p keep. Probabilities are integer multiples of the
    /// greatest probability times 2^-32, so their sums do not depend on the order.
    fn least(&self, logits: &[f32]) -> f32 {
        let mut order: Vec<f32> = logits.iter().copied().filter(|x| !x.is_nan()).collect();
        order.sort_unstable_by(|a, b| b.total_cmp(a));
        let Some(&top) = order.first() else { return f32::NEG_INFINITY };
        if self.min_p > 0.0 {
            let least = top - self.depth();
            order.retain(|&logit| logit >= least);
        }
        if self.top_k > 0 && (self.top_k as usize) < order.len() {
            let least = order[self.top_k as usize - 1];
            order.retain(|&logit| logit >= least);
        }
        if self.top_p >= 1.0 {
            return order[order.len() - 1];
        }
        let weight = |&x: &f32| (f64::from(((x - top) * (1.0 / self.temperature)).exp()) * (1_u64 << 32) as f64) as u64;
        let total: u64 = order.iter().map(weight).sum();
        let wanted = ((f64::from(self.top_p) * total as f64) as u64).max(1);
        let mut mass = 0;
        let reached = order.iter().find(|&logit| {
            mass += weight(logit);
            mass >= wanted
        });
        *reached.unwrap_or(&order[order.len() - 1])
    }
}

/// Returns the Gumbel noise of one token.
pub fn gumbel(key: u64, token: u32) -> f32 {
    let mut h = token.wrapping_mul(0x9E37_79B9).wrapping_add(key as u32);
    h = (h ^ (h >> 16)).wrapping_mul(0x85EB_CA6B);
    h ^= (key >> 32) as u32;
    h = (h ^ (h >> 13)).wrapping_mul(0xC2B2_AE35);
    h ^= h >> 16;
    let unit = h as f32 * 2_f32.powi(-32) + 2_f32.powi(-33); // above 0; 1 by rounding makes the noise minus infinity
    -(-(-unit).ln_1p()).ln()
}

/// Hashes in [`gumbel`] from here on round to 1 as f32, so that their noise is minus infinity.
const ROUNDS_TO_ONE: u32 = u32::MAX - 127;
/// Upper bound of the tokens for which [`finite`] excludes that noise.
const TOKENS_MAX: u32 = 1 << 19;

/// Returns the first key from `key` on with which the noise of all tokens below 2^19 is finite. It is `key` itself for
/// 98 of 100 keys. With other keys `ptx/src/sample_shaped.cu`, which supports fewer tokens, could choose token 0
/// instead of the only allowed one.
pub fn finite(mut key: u64) -> u64 {
    while !has_finite_noise(key) {
        key = splitmix(&mut key);
    }
    key
}

/// Returns whether [`gumbel`] is finite for each token below [`TOKENS_MAX`]. Inverts the hash.
fn has_finite_noise(key: u64) -> bool {
    let token = |hash: u32| {
        let mut h = hash ^ (hash >> 16);
        h = h.wrapping_mul(0x7ED1_B41D); // the inverse of 0xC2B2_AE35
        h ^= (h >> 13) ^ (h >> 26);
        h ^= (key >> 32) as u32;
        h = h.wrapping_mul(0xA5CB_9243); // the inverse of 0x85EB_CA6B
        h ^= h >> 16;
        h.wrapping_sub(key as u32).wrapping_mul(0x144C_BC89) // the inverse of 0x9E37_79B9
    };
    (ROUNDS_TO_ONE..=u32::MAX).all(|hash| token(hash) >= TOKENS_MAX)
}

/// Returns the next number of the SplitMix64 sequence.
pub fn splitmix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Neither small seeds, samples and indices nor those of one bit share a key.
    #[test]
    fn keys_do_not_alias() {
        let numbers = |small: u64| (0..small).chain((0..64).map(|bit| 1 << bit)).chain([u64::MAX]);
        let seeds: BTreeSet<u64> = numbers(40).collect();
        let samples = (1..5).flat_map(|sample| (0..9).map(move |index| sample << 32 | index));
        let positions: BTreeSet<u64> = numbers(20).chain(samples).collect();
        let key = |seed: u64, position: u64| plain(seed).key((position >> 32) as u32, position as u32);
        let keys = seeds.iter().flat_map(|&seed| positions.iter().map(move |&at| key(seed, at)));
        assert_eq!(keys.collect::<BTreeSet<u64>>().len(), seeds.len() * positions.len());
    }

    /// An edit may divide a logit by a tiny penalty.
    #[test]
    fn infinite_logits_are_kept() {
        let draws = Sampling { temperature: 1.0, ..Sampling::default() };
        for sampling in
            [draws, Sampling { top_p: 0.9, ..draws }, Sampling { top_k: 1, ..draws }, Sampling { min_p: 0.1, ..draws }]
        {
            let all = Sampling { top_p: 0.9, min_p: 0.1, ..sampling };
            for sampling in [sampling, all] {
                let least = sampling.least(&[f32::INFINITY, 1.0, f32::NEG_INFINITY]);
                assert!(least <= f32::INFINITY, "{sampling:?}");
                assert_eq!(sampling.least(&[f32::NEG_INFINITY; 2]), f32::NEG_INFINITY);
            }
        }
    }

    /// A key for which the noise of a token is minus infinity.
    fn infinite(token: u32, hash: u32) -> u64 {
        let high = |key: u64| {
            let mut h = token.wrapping_mul(0x9E37_79B9).wrapping_add(key as u32);
            h = (h ^ (h >> 16)).wrapping_mul(0x85EB_CA6B);
            let mut before = (hash ^ (hash >> 16)).wrapping_mul(0x7ED1_B41D);
            before ^= (before >> 13) ^ (before >> 26);
            h ^ before
        };
        let low = u64::from(token) << 3 | 5;
        u64::from(high(low)) << 32 | low
    }

    #[test]
    fn the_only_allowed_token_is_chosen_with_any_noise() {
        for (token, hash) in [(100, u32::MAX), (0, ROUNDS_TO_ONE), (300_000, u32::MAX - 64)] {
            let key = infinite(token, hash);
            assert_eq!(gumbel(key, token), f32::NEG_INFINITY);
            assert!(!has_finite_noise(key) && has_finite_noise(finite(key)));
            assert!(gumbel(infinite(token, ROUNDS_TO_ONE - 1), token).is_finite());
            let mut logits = vec![f32::NEG_INFINITY; 300_001];
            logits[token as usize] = -3.0;
            assert_eq!(plain(0).choose(key, &logits), token);
            assert_eq!(Sampling { top_k: 1, ..plain(0) }.choose(key, &logits), token);
        }
        // Of all keys, 1 in 64 has such a token.
        let mut state = 3;
        let rare = (0..64_000).filter(|_| !has_finite_noise(splitmix(&mut state))).count();
        assert!((800..1200).contains(&rare), "{rare}");
        for index in 0..4 {
            let key = finite(plain(9).key(0, index));
            assert!((0..TOKENS_MAX).all(|token| gumbel(key, token).is_finite()));
        }
    }

    fn draws(sampling: Sampling) -> Vec<u32> {
        let logits = [1.0, 3.0, 2.0, 3.0, f32::NEG_INFINITY];
        (0..4000).map(|index| sampling.choose(sampling.key(0, index), &logits)).collect()
    }

    fn plain(seed: u64) -> Sampling {
        Sampling { temperature: 1.0, seed, ..Sampling::default() }
    }

    #[test]
    fn greedy_takes_the_first_of_equals() {
        assert!(draws(Sampling::default()).iter().all(|&token| token == 1));
    }

    #[test]
    fn draws_follow_the_probabilities_and_the_seed() {
        let seen = draws(plain(7));
        let share = |token| seen.iter().filter(|&&t| t == token).count() as f64 / 4000.0;
        let total = 1_f64.exp() + 2_f64.exp() + 2.0 * 3_f64.exp();
        for (token, logit) in [(0, 1.0_f64), (1, 3.0), (2, 2.0), (3, 3.0)] {
            assert!((share(token) - logit.exp() / total).abs() < 0.03, "{token}: {}", share(token));
        }
        assert_eq!(share(4), 0.0);
        assert_eq!(seen, draws(plain(7)));
        assert_ne!(seen, draws(plain(8)));
    }

    #[test]
    fn top_p_keeps_the_fewest_tokens_that_reach_it() {
        let with = |top_p| draws(Sampling { top_p, ..plain(7) });
        assert!(with(0.5).iter().all(|t| [1, 3].contains(t)));
        assert!(with(0.9).contains(&2) && !with(0.9).contains(&0));
        assert!(with(0.999).contains(&0) && !with(0.999).contains(&4));
    }

    /// The temperature is 1, the logits are 3, 3, 2 and 1. Relative to the best tokens, the token of logit 2 has a
    /// probability of 0.37, and the token of logit 1 has 0.14.
    #[test]
    fn min_p_is_relative_to_the_most_likely_token() {
        let with = |min_p| draws(Sampling { min_p, ..plain(7) });
        assert!(with(0.4).iter().all(|t| [1, 3].contains(t)));
        assert!(with(0.36).contains(&2) && !with(0.36).contains(&0));
        assert!(with(0.13).contains(&0));
        let hot = draws(Sampling { min_p: 0.4, temperature: 2.0, ..plain(7) });
        assert!(hot.contains(&2), "min_p applies after the temperature");
        let both = draws(Sampling { min_p: 0.36, top_p: 0.5, ..plain(7) });
        assert!(both.iter().all(|t| [1, 3].contains(t)));
    }

    #[test]
    fn top_k_keeps_k_tokens_and_their_equals() {
        let with = |top_k| draws(Sampling { top_k, ..plain(7) });
        assert!(with(1).iter().all(|t| [1, 3].contains(t)));
        assert!(with(3).contains(&2) && !with(3).contains(&0));
        let both = draws(Sampling { top_k: 3, top_p: 0.5, ..plain(7) });
        assert!(both.iter().all(|t| [1, 3].contains(t)));
    }
}
