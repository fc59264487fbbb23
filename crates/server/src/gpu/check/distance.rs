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
use kvarena_host::contiguous;
use kvarena_host::error::{Error, Result};
use kvarena_host::sample::Sampling;
use kvarena_host::sparse::reference;

/// Maximum distance of a token's logit from the best one.
pub const TOKEN_BOUND: f64 = 0.1;
/// Maximum RMS difference of logits.
pub const LOGITS_BOUND: f64 = 0.03;
/// Like `TOKEN_BOUND`, if streams read a subset of positions; wrong channels yield 4 to 5.
pub const FEW_TOKEN_BOUND: f64 = 2.0;
/// Like `LOGITS_BOUND`, if streams read a subset; wrong channels yield 0.75 to 0.83, correct channels 0.07 to 0.11.
pub const FEW_LOGITS_BOUND: f64 = 0.25;
/// Like `LOGITS_BOUND`, for models with experts: rounding routes some tokens to another expert, which also changes the
/// later tokens. The median of the tokens stays within `LOGITS_BOUND`.
pub const EXPERTS_BOUND: f64 = 0.15;
/// Layers of the models for which the bounds were measured.
const LAYERS: f64 = 3.0;

/// The distance of a run from the reference, in standard deviations of the logits.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Distance {
    /// Maximum distance of a token's logit from the best one.
    pub token: f64,
    /// RMS difference of all logits.
    pub logits: f64,
    /// Median over tokens of the RMS difference of a token's logits.
    pub median: f64,
    /// Number of generated tokens.
    pub tokens: usize,
    /// Whether some stream read a subset of positions.
    pub few: bool,
    /// Whether the model has experts.
    pub experts: bool,
    /// Factor of the bounds.
    pub factor: f64,
}

impl Distance {
    /// Returns whether the distance is within the bounds.
    pub fn is_close(&self) -> bool {
        let [token, logits] = match self.few {
            true => [FEW_TOKEN_BOUND, FEW_LOGITS_BOUND],
            false => [TOKEN_BOUND, LOGITS_BOUND],
        };
        let factor = self.factor;
        match self.experts {
            true => self.median <= factor * logits && self.logits <= factor * EXPERTS_BOUND,
            false => self.token <= factor * token && self.logits <= factor * logits,
        }
    }
}

impl Case {
    /// Returns the distance of a setting's tokens from the reference.
    ///
    /// # Errors
    /// The run failed.
    pub fn distance(&mut self, setting: Setting) -> Result<Distance> {
        self.record_continuations(setting)?;
        let collected = self.serve(setting, Sampling::default())?;
        let vocab = self.model.config.vocab;
        // Each layer adds its rounding.
        let factor = (self.model.config.layers as f64 / LAYERS).max(1.0).sqrt();
        let experts = self.model.config.experts.is_some();
        let mut distance = Distance { factor, experts, ..Distance::default() };
        let (mut squares, mut numbers, mut sum, mut sum_squares) = (0.0, 0, 0.0, 0.0);
        let (mut gaps, mut of_tokens) = (Vec::new(), Vec::new());
        for (key, tokens) in &collected.tokens {
            let prompt = &self.golden.prompts[key.0];
            let mut stream = [&prompt[..], tokens].concat();
            stream.pop(); // nothing follows the last token
            let from = prompt.len() - 1;
            let reads = setting.sparse.filter(|&top| (top as usize) < stream.len());
            distance.few |= reads.is_some();
            let reference = self.reference(stream, from, reads)?;
            let device = &collected.logits[key];
            let ended = tokens.iter().position(|token| Some(*token) == setting.stop);
            let whole = ended.map_or(NEW_TOKENS as usize, |last| last + 1);
            if device.len() != reference.len() || tokens.len() != whole {
                let what = format!("{setting:?}: {} logits, {} tokens", device.len(), tokens.len());
                return Err(Error::run(what));
            }
            for (device, reference) in device.chunks_exact(vocab).zip(reference.chunks_exact(vocab)) {
                let mut of_token = 0.0;
                for (a, b) in device.iter().zip(reference) {
                    let (a, b) = (f64::from(*a), f64::from(*b));
                    of_token += (a - b) * (a - b);
                    sum += b;
                    sum_squares += b * b;
                }
                squares += of_token;
                of_tokens.push(of_token);
            }
            numbers += reference.len();
            for (token, logits) in tokens.iter().zip(reference.chunks_exact(vocab)) {
                let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                gaps.push(f64::from(best - logits[*token as usize]));
            }
        }
        let numbers = numbers as f64;
        let deviation = (sum_squares / numbers - (sum / numbers).powi(2)).sqrt();
        distance.token = gaps.iter().copied().fold(0.0, f64::max) / deviation;
        distance.logits = (squares / numbers).sqrt() / deviation;
        of_tokens.sort_by(f64::total_cmp);
        let median = of_tokens.get(of_tokens.len() / 2).copied().unwrap_or(0.0);
        distance.median = (median / vocab as f64).sqrt() / deviation;
        distance.tokens = gaps.len();
        Ok(distance)
    }

    /// Returns the reference's logits of a stream's tokens from `from` on. They are computed once.
    fn reference(&mut self, stream: Vec<u32>, from: usize, reads: Option<u32>) -> Result<&[f32]> {
        let entry = match self.reference.entry((stream, reads)) {
            Entry::Occupied(known) => return Ok(known.into_mut()),
            Entry::Vacant(entry) => entry,
        };
        let (model, labels, stream) = (&self.model, &self.labels, &entry.key().0);
        let logits = match reads {
            Some(top) => reference::logits(model, stream, from, (top, labels))?,
            None => contiguous::logits(model, stream, from),
        };
        Ok(entry.insert(logits))
    }
}
