//! Checks the device's draws with edits and min-p. The reference applies `shaping.rs` and `sample.rs` to the device's
//! own logits.

use super::{Case, Setting};
use kvarena_host::request::Request;
use kvarena_host::runner::Draw;
use kvarena_host::sample::{Sampling, gumbel};
use kvarena_host::shaping::{self, Counts, DrawHistory, Shaping};

/// Maximum difference of the scores of the device's token and of the expected one. The device's logarithms round
/// differently, so it may choose another token of nearly the same score.
const SCORE_BOUND: f32 = 1e-4;

/// Tokens of the smallest vocabulary that has the tokens of [`shape`].
pub(super) const VOCAB_MIN: usize = 432;

/// Gives three of every four requests a shaping, each of a different kind. One kind sets a minimum length, so its
/// requests also get stop tokens.
pub(super) fn shape(requests: &mut [Request]) {
    let penalties = Shaping { repetition: 1.7, frequency: 0.8, presence: 0.5, ..Shaping::default() };
    let limited = Shaping {
        allowed: Some((0..60).map(|i| 7 * i).collect()),
        bias: vec![(7, 3.0), (14, -2.0)],
        min_tokens: 15,
        ..Shaping::default()
    };
    let bad_words = vec![vec![228, 431], vec![9]];
    let with_bad_words = Shaping { bad_words, bias: vec![(3, 0.3)], ..Shaping::default() };
    let kinds = [penalties, limited, with_bad_words].map(Shaping::prepare);
    for (i, request) in requests.iter_mut().enumerate() {
        request.shaping = kinds.get(i % 4).cloned();
        if i % 4 == 1 {
            request.stop.extend([7, 14]);
        }
    }
}

impl Case {
    /// Checks that the device and the reference choose the same tokens from the device's logits: greedily, with min-p
    /// alone, with min-p and top-k, and with min-p and top-p. The scores of a drawn token and of the expected one may
    /// differ by `SCORE_BOUND`. Returns the number of tokens with edited logits or min-p.
    pub fn shaped_draws(&mut self, setting: Setting) -> usize {
        self.record_continuations(setting);
        let setting = Setting { shaped: true, ..setting };
        let with_min_p = Sampling { temperature: 0.8, min_p: 0.02, seed: 5, ..Sampling::default() };
        let samplings = [
            Sampling::default(),
            with_min_p,
            Sampling { top_k: 20, ..with_min_p },
            Sampling { top_p: 0.8, ..with_min_p },
        ];
        samplings.map(|sampling| self.shaped_draws_of(setting, sampling)).iter().sum()
    }

    fn shaped_draws_of(&self, setting: Setting, sampling: Sampling) -> usize {
        let served = self.serve(setting, sampling);
        let requests = self.requests(setting, sampling);
        let (mut edits, mut changes, mut edited, mut shaped_tokens) = (Vec::new(), Vec::new(), Vec::new(), 0);
        for (&(number, sample), tokens) in &served.tokens {
            let Request { prompt, stop, shaping, .. } = &requests[number];
            let logits = served.logits[&(number, sample)].chunks_exact(self.model.config.vocab);
            let mut prompt_tokens: Vec<u32> = prompt.iter().map(|token| token.raw()).collect();
            prompt_tokens.sort_unstable();
            prompt_tokens.dedup();
            let mut counts = Counts::default();
            for ((n, &token), logits) in tokens.iter().enumerate().zip(logits) {
                edits.clear();
                let (answer, answer_len) = (&tokens[..n], n as u32);
                let history = DrawHistory { prompt: &prompt_tokens, answer, counts: &counts, answer_len };
                let list = shaping.as_ref().map(|shaping| shaping.edits(history, stop, &mut changes, &mut edits));
                counts.add(token);
                shaping::apply(&edits, list.is_some_and(|list| list.only), logits, &mut edited);
                let edits = list.unwrap_or_default();
                let key = Draw { row: 0, sampling, sample, index: n as u32, edits }.key();
                let wanted = sampling.choose(key, &edited);
                let is_warm = sampling.temperature > 0.0;
                let score = |token: u32| {
                    let logit = edited[token as usize];
                    if is_warm { logit / sampling.temperature + gumbel(key, token) } else { logit }
                };
                let bound = if is_warm { SCORE_BOUND } else { 0.0 };
                assert!(
                    token == wanted || (score(token) - score(wanted)).abs() <= bound,
                    "{setting:?}, {sampling:?}: token {n} of {number}.{sample} is {token}, not {wanted}"
                );
                shaped_tokens += usize::from(edited != logits || sampling.min_p > 0.0);
            }
        }
        shaped_tokens
    }
}
