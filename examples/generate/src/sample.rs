//! From logits to a token: greedy, or a seeded draw with temperature and top-p.

/// How to choose tokens.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sampling {
    /// 0: always the most likely token.
    pub temperature: f32,
    /// Draw only from the most likely tokens that together reach this probability.
    pub top_p: f32,
    /// Of the draws.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 0.0, top_p: 1.0, seed: 0 }
    }
}

/// Chooses the tokens of one stream: the same seed and logits give the same tokens, whatever else runs.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    state: u64,
    /// Tokens by probability, reused.
    order: Vec<(f32, u32)>,
}

impl Sampler {
    /// The sampler of sample number `sample` of a request.
    pub fn new(sampling: Sampling, sample: u32) -> Self {
        let mut state = sampling.seed ^ (u64::from(sample) << 32);
        splitmix(&mut state);
        Self { sampling, state, order: Vec::new() }
    }

    /// Chooses a token.
    pub fn choose(&mut self, logits: &[f32]) -> u32 {
        if self.sampling.temperature <= 0.0 {
            return argmax(logits);
        }
        let max = logits[argmax(logits) as usize];
        let weight = |x: f32| ((x - max) / self.sampling.temperature).exp();
        self.order.clear();
        self.order.extend(logits.iter().zip(0..).map(|(&x, token)| (weight(x), token)));
        self.order.retain(|(weight, _)| *weight > 0.0); // drops NaN, too
        let total: f64 = self.order.iter().map(|(weight, _)| f64::from(*weight)).sum();
        let top_p = f64::from(self.sampling.top_p);
        if top_p >= 1.0 {
            return self.draw(self.order.len()).unwrap_or_else(|| argmax(logits));
        }
        // Tokens below this together miss less than 1 - top_p, so none of them is needed: most need no sorting.
        let least = total * (1.0 - top_p) / self.order.len().max(1) as f64;
        self.order.retain(|(weight, _)| f64::from(*weight) >= least);
        self.order.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let kept_mass = total * top_p;
        let mut mass = 0.0;
        let kept = self.order.iter().take_while(|(weight, _)| {
            let taken = mass < kept_mass;
            mass += f64::from(*weight);
            taken
        });
        let kept = kept.count().max(1).min(self.order.len());
        self.draw(kept).unwrap_or_else(|| argmax(logits))
    }

    /// Draws among the first `kept` of the order.
    fn draw(&mut self, kept: usize) -> Option<u32> {
        let unit = (splitmix(&mut self.state) >> 11) as f64 / (1_u64 << 53) as f64;
        let kept = &self.order[..kept];
        let mass: f64 = kept.iter().map(|(weight, _)| f64::from(*weight)).sum();
        let mut left = unit * mass;
        for &(weight, token) in kept {
            left -= f64::from(weight);
            if left < 0.0 {
                return Some(token);
            }
        }
        kept.last().map(|&(_, token)| token)
    }
}

/// The most likely token; the first of equals.
fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (i, x) in logits.iter().enumerate() {
        if *x > logits[best] {
            best = i;
        }
    }
    best as u32
}

/// The next number of the SplitMix64 sequence.
pub fn splitmix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod test {
    use super::*;

    fn draws(temperature: f32, top_p: f32, seed: u64) -> Vec<u32> {
        let mut sampler = Sampler::new(Sampling { temperature, top_p, seed }, 0);
        let logits = [1.0, 3.0, 2.0, 3.0, f32::NEG_INFINITY];
        (0..4000).map(|_| sampler.choose(&logits)).collect()
    }

    #[test]
    fn greedy_takes_the_first_of_equals() {
        assert!(draws(0.0, 1.0, 7).iter().all(|&token| token == 1));
    }

    #[test]
    fn draws_follow_the_probabilities_and_the_seed() {
        let seen = draws(1.0, 1.0, 7);
        let share = |token| seen.iter().filter(|&&t| t == token).count() as f64 / 4000.0;
        let total = 1_f64.exp() + 2_f64.exp() + 2.0 * 3_f64.exp();
        for (token, logit) in [(0, 1.0_f64), (1, 3.0), (2, 2.0), (3, 3.0)] {
            assert!((share(token) - logit.exp() / total).abs() < 0.03, "{token}: {}", share(token));
        }
        assert_eq!(share(4), 0.0);
        assert_eq!(seen, draws(1.0, 1.0, 7));
        assert_ne!(seen, draws(1.0, 1.0, 8));
    }

    #[test]
    fn top_p_keeps_the_fewest_tokens_that_reach_it() {
        assert!(draws(1.0, 0.5, 7).iter().all(|t| [1, 3].contains(t)));
        assert!(draws(1.0, 0.1, 7).iter().all(|&t| t == 1));
        assert!(draws(1.0, 0.9, 7).contains(&2) && !draws(1.0, 0.9, 7).contains(&0));
    }
}
