//! Checks draws with edits and min-p against `shaping.rs` and `sample.rs` on the device's own logits.

use super::{Case, Setting};
use kvarena_host::error::{Error, Result};
use kvarena_host::request::Request;
use kvarena_host::sample::{Sampling, gumbel};
use kvarena_host::shaping::{self, Counts, History, Shaping};

/// Maximum difference of the scores of two tokens that the device may exchange: its logarithms round differently.
const SCORE_BOUND: f32 = 1e-4;

/// Gives three of four requests a shaping, each of another kind.
pub(super) fn shape(requests: &mut [Request]) {
    let penalties =
        Shaping { repetition: 1.7, frequency: 0.8, presence: 0.5, ..Shaping::default() };
    let bounded = Shaping {
        allowed: Some((0..60).map(|i| 7 * i).collect()),
        bias: vec![(7, 3.0), (14, -2.0)],
        min_tokens: 15,
        ..Shaping::default()
    };
    let bad_words = vec![vec![228, 431], vec![9]];
    let worded = Shaping { bad_words, bias: vec![(3, 0.3)], ..Shaping::default() };
    let kinds = [penalties, bounded, worded].map(Shaping::prepare);
    for (i, request) in requests.iter_mut().enumerate() {
        request.shaping = kinds.get(i % 4).cloned();
        if i % 4 == 1 {
            request.stop.extend([7, 14]);
        }
    }
}

impl Case {
    /// Checks that each token of a setting is the one that the specification chooses from the device's logits, greedily
    /// and drawn with min-p. Returns the number of tokens chosen from edited logits.
    ///
    /// # Errors
    /// The run failed, or a token differs.
    pub fn shaped_draws(&mut self, setting: Setting) -> Result<usize> {
        self.foretell(setting)?;
        let setting = Setting { shaped: true, ..setting };
        let warm = Sampling { temperature: 0.8, min_p: 0.02, seed: 5, ..Sampling::default() };
        let samplings = [
            Sampling::default(),
            warm,
            Sampling { top_k: 20, ..warm },
            Sampling { top_p: 0.8, ..warm },
        ];
        let (vocab, mut changed) = (self.model.config.vocab, 0);
        for sampling in samplings {
            let heard = self.serve(setting, sampling)?;
            let requests = self.requests(setting, sampling);
            let (mut edits, mut changes, mut edited) = (Vec::new(), Vec::new(), Vec::new());
            for (&(number, sample), tokens) in &heard.tokens {
                let Request { prompt, stop, shaping, .. } = &requests[number];
                let logits = heard.logits[&(number, sample)].chunks_exact(vocab);
                let mut known: Vec<u32> = prompt.iter().map(|token| token.raw()).collect();
                known.sort_unstable();
                known.dedup();
                let mut counts = Counts::default();
                for ((n, &token), logits) in tokens.iter().enumerate().zip(logits) {
                    edits.clear();
                    let (answer, answer_len) = (&tokens[..n], n as u32);
                    let history = History { prompt: &known, answer, counts: &counts, answer_len };
                    let list = shaping
                        .as_ref()
                        .map(|shaping| shaping.edits(history, stop, &mut changes, &mut edits));
                    counts.add(token);
                    shaping::apply(&edits, list.is_some_and(|list| list.only), logits, &mut edited);
                    let key = sampling.key(sample, n as u32);
                    let wanted = sampling.choose(key, &edited);
                    let score = |token: u32| match sampling.temperature > 0.0 {
                        true => edited[token as usize] / sampling.temperature + gumbel(key, token),
                        false => edited[token as usize],
                    };
                    let bound = if sampling.temperature > 0.0 { SCORE_BOUND } else { 0.0 };
                    let is_near = (score(token) - score(wanted)).abs() <= bound;
                    if token != wanted && !is_near {
                        return Err(Error::run(format!(
                            "{setting:?}, {sampling:?}: request {number} has token {token}, not {wanted}"
                        )));
                    }
                    changed += usize::from(edited != logits || sampling.min_p > 0.0);
                }
            }
        }
        Ok(changed)
    }
}
