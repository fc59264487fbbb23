//! The distance of the device's logits from the reference's.
//!
//! Rounding differs, so tokens may differ if two logits are close. The f32 reference therefore recomputes the logits of
//! each stream of the device. In the reference, the logit of each token of the stream must be within [`TOKEN_BOUND`] of
//! the best logit. The RMS difference of all logits must be within [`LOGITS_BOUND`]. Both bounds are in standard
//! deviations of the logits. A deliberate fault must fail this check.
//!
//! If streams read a subset of positions, the reference selects its own subset. Rounding may exchange two positions of
//! nearly equal scores, and in models of random weights the V of two positions differ greatly. The bounds are therefore
//! wider ([`FEW_TOKEN_BOUND`], [`FEW_LOGITS_BOUND`]). The core's tests compare the lists for given q and K, bit by bit.

use std::collections::hash_map::Entry;

use super::{Case, NEW_TOKENS, Setting};
use crate::common::{contiguous, reference};
use kvarena_host::sample::Sampling;

/// Maximum distance of a token's logit from the best one.
const TOKEN_BOUND: f64 = 0.1;
/// Maximum RMS difference of logits.
pub const LOGITS_BOUND: f64 = 0.03;
/// Like `TOKEN_BOUND`, if streams read a subset of positions; wrong channels yield 4 to 5.
const FEW_TOKEN_BOUND: f64 = 2.0;
/// Like `LOGITS_BOUND`, if streams read a subset; wrong channels yield 0.75 to 0.83, correct channels 0.07 to 0.11.
const FEW_LOGITS_BOUND: f64 = 0.25;
/// Like `LOGITS_BOUND`, for models with experts: rounding routes some tokens to another expert, which also changes the
/// later tokens. The median of the tokens stays within `LOGITS_BOUND`.
pub const EXPERTS_BOUND: f64 = 0.15;
/// Layers of the models for which the bounds were measured.
const LAYERS: f64 = 3.0;

/// The distance of a run from the reference, in standard deviations of the logits.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Distance {
    /// Maximum distance of a token's logit from the best one.
    pub token: f64,
    /// RMS difference of all logits.
    pub logits: f64,
    /// Median over tokens of the RMS difference of a token's logits.
    pub median: f64,
    /// Number of generated tokens.
    pub tokens: usize,
    pub is_close: bool,
}

impl Case {
    /// Returns the distance of a setting's tokens from the reference.
    pub fn distance(&mut self, setting: Setting) -> Distance {
        self.record_continuations(setting);
        let collected = self.serve(setting, Sampling::default());
        let (vocab, mut few) = (self.model.config.vocab, false);
        let (mut sum, mut sum_squares) = (0.0, 0.0);
        // For each token, the distance of its logit from the best one, and the squared differences of its logits.
        let (mut gaps, mut differences) = (Vec::new(), Vec::new());
        for (key, tokens) in &collected.tokens {
            let prompt = &self.prompts[key.0];
            let mut stream = [&prompt[..], tokens].concat();
            stream.pop(); // nothing follows the last token
            let from = prompt.len() - 1;
            let reads = setting.sparse.filter(|&top| (top as usize) < stream.len());
            few |= reads.is_some();
            let (device, reference) = (&collected.logits[key], self.reference(stream, from, reads));
            let ended = tokens.iter().position(|token| Some(*token) == setting.stop);
            let whole = ended.map_or(NEW_TOKENS as usize, |last| last + 1);
            assert_eq!((device.len(), tokens.len()), (reference.len(), whole), "{setting:?}: logits and tokens");
            let logits = device.chunks_exact(vocab).zip(reference.chunks_exact(vocab));
            for (&token, (device, reference)) in tokens.iter().zip(logits) {
                let pairs = device.iter().zip(reference).map(|(&a, &b)| (f64::from(a), f64::from(b)));
                differences.push(pairs.map(|(a, b)| (a - b).powi(2)).sum::<f64>());
                sum += reference.iter().map(|&b| f64::from(b)).sum::<f64>();
                sum_squares += reference.iter().map(|&b| f64::from(b).powi(2)).sum::<f64>();
                let best = reference.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                gaps.push(f64::from(best - reference[token as usize]));
            }
        }
        let count = (gaps.len() * vocab) as f64;
        let deviation = (sum_squares / count - (sum / count).powi(2)).sqrt();
        let token = gaps.iter().copied().fold(0.0, f64::max) / deviation;
        let logits = (differences.iter().sum::<f64>() / count).sqrt() / deviation;
        differences.sort_by(f64::total_cmp);
        let median = (differences[differences.len() / 2] / vocab as f64).sqrt() / deviation;
        let is_close = self.is_close(few, [token, logits, median]);
        Distance { token, logits, median, tokens: gaps.len(), is_close }
    }

    /// Returns whether a distance is within the bounds. `few` tells whether some stream read a subset of positions.
    fn is_close(&self, few: bool, [token, logits, median]: [f64; 3]) -> bool {
        // Each layer adds its rounding.
        let factor = (self.model.config.layers as f64 / LAYERS).max(1.0).sqrt();
        let bounds = if few { [FEW_TOKEN_BOUND, FEW_LOGITS_BOUND] } else { [TOKEN_BOUND, LOGITS_BOUND] };
        let [token_bound, logits_bound] = bounds.map(|bound| factor * bound);
        if self.model.config.experts.is_some() {
            return median <= logits_bound && logits <= factor * EXPERTS_BOUND;
        }
        token <= token_bound && logits <= logits_bound
    }

    /// Returns the reference's logits of a stream's tokens from `from` on. They are computed once.
    fn reference(&mut self, stream: Vec<u32>, from: usize, reads: Option<u32>) -> &[f32] {
        let entry = match self.reference.entry((stream, reads)) {
            Entry::Occupied(known) => return known.into_mut(),
            Entry::Vacant(entry) => entry,
        };
        let (model, labels, stream) = (&self.model, &self.labels, &entry.key().0);
        let logits = match reads {
            Some(top) => reference::logits(model, stream, from, (top, labels)).expect("channels"),
            None => contiguous::logits(model, stream, from),
        };
        entry.insert(logits)
    }
}
