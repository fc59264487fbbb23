//! What changes logits before a token is chosen: penalties, biases, and tokens that may not come.
//!
//! A request's [`Shaping`] and what its stream has said make a list of [`Edit`]s for each draw, so that a runner needs no
//! state of streams. The order is vLLM's: forbidden tokens, biases, then the penalties; log-probabilities are the model's
//! own, before all of these.

use std::collections::HashMap;

use bytemuck::{Pod, Zeroable};

/// What a request does to logits.
#[derive(Clone, PartialEq, Debug)]
pub struct Shaping {
    /// Divides positive logits of tokens in the prompt or the answer, and multiplies negative ones. 1: none.
    pub repetition: f32,
    /// Taken off a token's logit for each time that the answer has it.
    pub frequency: f32,
    /// Taken off the logit of a token that the answer has.
    pub presence: f32,
    /// Added to logits; a token stands once.
    pub bias: Vec<(u32, f32)>,
    /// The only tokens that may come; none: all may.
    pub allowed: Option<Vec<u32>>,
    /// Sequences of tokens whose last one may not follow the others. None is empty.
    pub bad_words: Vec<Vec<u32>>,
    /// Tokens of the answer before one of the request's stop tokens may come.
    pub min_tokens: u32,
}

impl Default for Shaping {
    fn default() -> Self {
        Self {
            repetition: 1.0,
            frequency: 0.0,
            presence: 0.0,
            bias: Vec::new(),
            allowed: None,
            bad_words: Vec::new(),
            min_tokens: 0,
        }
    }
}

/// A change of one token's logit: `before` is added, then the repetition penalty divides or multiplies, then `after` is
/// added.
#[derive(Clone, Copy, PartialEq, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Edit {
    /// The token.
    pub token: u32,
    /// Added first.
    pub before: f32,
    /// Divides what is then positive, and multiplies the rest.
    pub repetition: f32,
    /// Added last.
    pub after: f32,
}

/// Where a draw's edits are in a step's list.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Edits {
    /// The first one.
    pub start: u32,
    /// How many.
    pub count: u32,
    /// Whether tokens without an edit may not come.
    pub only: bool,
}

impl Edits {
    /// Whether they change anything.
    pub fn is_none(&self) -> bool {
        self.count == 0 && !self.only
    }
}

impl Edit {
    /// An edit that changes nothing.
    pub fn none(token: u32) -> Self {
        Self { token, before: 0.0, repetition: 1.0, after: 0.0 }
    }

    /// The logit that it makes of one.
    pub fn of(&self, logit: f32) -> f32 {
        let logit = logit + self.before;
        let scaled = if logit > 0.0 { logit / self.repetition } else { logit * self.repetition };
        scaled + self.after
    }
}

impl Shaping {
    /// Whether it changes nothing.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// The tokens that it names.
    pub fn tokens(&self) -> impl Iterator<Item = u32> {
        let biased = self.bias.iter().map(|&(token, _)| token);
        let allowed = self.allowed.iter().flatten();
        biased.chain(allowed.chain(self.bad_words.iter().flatten()).copied())
    }

    /// Whether edits depend on which tokens the answer has: a draw needs the token before it to be known.
    pub fn needs_history(&self) -> bool {
        let penalties = (self.repetition, self.frequency, self.presence) != (1.0, 0.0, 0.0);
        penalties || self.bad_words.iter().any(|word| word.len() > 1)
    }

    /// Most edits of a draw after so many tokens of prompt and answer, of a request with so many stop tokens: at most one
    /// of each token of the vocabulary.
    pub fn edits_max(&self, known: usize, stops: usize, vocab: usize) -> usize {
        let listed =
            self.bias.len() + self.bad_words.len() + self.allowed.as_ref().map_or(0, Vec::len);
        let penalties = (self.repetition, self.frequency, self.presence) != (1.0, 0.0, 0.0);
        (listed + stops + if penalties { known } else { 0 }).min(vocab)
    }

    /// Appends the edits of the draw that follows `prompt` and `said`, each token once. `said_count` is the number of
    /// tokens of the answer before the draw; `said` may lack the last of them unless [`Shaping::needs_history`].
    /// O(prompt + said) with a repetition penalty, else O(said).
    pub fn edits(
        &self,
        prompt: impl Iterator<Item = u32>,
        said: &[u32],
        said_count: u32,
        stop: &[u32],
        edits: &mut Vec<Edit>,
    ) -> Edits {
        let start = edits.len();
        let mut at: HashMap<u32, usize> = HashMap::new();
        let mut edit = |edits: &mut Vec<Edit>, token: u32, change: &dyn Fn(&mut Edit)| {
            let index = *at.entry(token).or_insert_with(|| {
                edits.push(Edit::none(token));
                edits.len() - 1
            });
            change(&mut edits[index]);
        };
        for &token in self.allowed.iter().flatten() {
            edit(edits, token, &|_| ());
        }
        let listed = edits.len();
        if self.repetition != 1.0 {
            for token in prompt.chain(said.iter().copied()) {
                edit(edits, token, &|edit| edit.repetition = self.repetition);
            }
        }
        if (self.frequency, self.presence) != (0.0, 0.0) {
            let mut counts: HashMap<u32, u32> = HashMap::new();
            said.iter().for_each(|&token| *counts.entry(token).or_default() += 1);
            for (token, count) in counts {
                let penalty = self.frequency * count as f32 + self.presence;
                edit(edits, token, &|edit| edit.after -= penalty);
            }
        }
        for &(token, bias) in &self.bias {
            edit(edits, token, &|edit| edit.before += bias);
        }
        let forbid =
            |edit: &mut Edit| *edit = Edit { after: f32::NEG_INFINITY, ..Edit::none(edit.token) };
        for word in &self.bad_words {
            let (&last, first) = word.split_last().expect("no word is empty");
            if said.ends_with(first) {
                edit(edits, last, &forbid);
            }
        }
        if said_count < self.min_tokens {
            for &token in stop {
                edit(edits, token, &forbid);
            }
        }
        if self.allowed.is_some() {
            // What was listed for another reason alone may not come.
            edits[listed..].iter_mut().for_each(forbid);
        }
        // Equal steps have equal lists, whatever the order of a map.
        edits[start..].sort_unstable_by_key(|edit| edit.token);
        Edits {
            start: start as u32,
            count: (edits.len() - start) as u32,
            only: self.allowed.is_some(),
        }
    }
}

/// Applies a draw's edits to its logits. O(edits), and O(vocabulary) where only they may come.
pub fn apply(edits: &[Edit], only: bool, logits: &[f32], out: &mut Vec<f32>) {
    out.clear();
    match only {
        true => out.resize(logits.len(), f32::NEG_INFINITY),
        false => out.extend_from_slice(logits),
    }
    for edit in edits {
        out[edit.token as usize] = edit.of(logits[edit.token as usize]);
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::sample::splitmix;

    /// Applies a shaping field by field, as vLLM's documentation describes it.
    fn naive(
        shaping: &Shaping,
        prompt: &[u32],
        said: &[u32],
        stop: &[u32],
        logits: &[f32],
    ) -> Vec<f32> {
        let mut out = logits.to_vec();
        for token in 0..out.len() as u32 {
            let logit = &mut out[token as usize];
            let count = said.iter().filter(|&&other| other == token).count();
            let bad =
                shaping.bad_words.iter().any(|word| [said, &[token]].concat().ends_with(word));
            let early = (said.len() as u32) < shaping.min_tokens && stop.contains(&token);
            let outside = shaping.allowed.as_ref().is_some_and(|allowed| !allowed.contains(&token));
            if bad || early || outside {
                *logit = f32::NEG_INFINITY;
                continue;
            }
            *logit += shaping.bias.iter().find(|(t, _)| *t == token).map_or(0.0, |(_, bias)| *bias);
            if count > 0 || prompt.contains(&token) {
                *logit = if *logit > 0.0 {
                    *logit / shaping.repetition
                } else {
                    *logit * shaping.repetition
                };
            }
            if count > 0 {
                *logit += -(shaping.frequency * count as f32 + shaping.presence);
            }
        }
        out
    }

    #[test]
    fn edits_are_what_each_field_does() {
        let mut state = 5;
        let mut below = |n: u64| splitmix(&mut state) % n;
        for round in 0..3000 {
            let vocab = 24;
            let words =
                |count: u64, len: u64, below: &mut dyn FnMut(u64) -> u64| -> Vec<Vec<u32>> {
                    (0..below(count + 1))
                        .map(|_| (0..1 + below(len)).map(|_| below(vocab) as u32).collect())
                        .collect()
                };
            let (bad_words, allowed) = (words(4, 3, &mut below), words(1, 9, &mut below).pop());
            let (prompt, said) =
                (words(1, 9, &mut below).concat(), words(1, 12, &mut below).concat());
            let mut bias: Vec<(u32, f32)> =
                (0..vocab as u32).map(|t| (t, t as f32 - 7.5)).collect();
            bias.retain(|_| below(4) == 0);
            let of = |n: u64, values: [f32; 3]| values[n as usize];
            let shaping = Shaping {
                repetition: of(below(3), [1.0, 1.3, 0.8]),
                frequency: of(below(3), [0.0, 0.7, -0.4]),
                presence: of(below(3), [0.0, 1.1, -0.9]),
                bias,
                allowed: allowed.map(|mut allowed| {
                    allowed.sort_unstable();
                    allowed.dedup();
                    allowed
                }),
                bad_words,
                min_tokens: below(15) as u32,
            };
            let logits: Vec<f32> = (0..vocab).map(|_| below(2001) as f32 / 100.0 - 10.0).collect();
            let mut edits = vec![Edit::none(3)];
            let stop = [2, 9];
            let list =
                shaping.edits(prompt.iter().copied(), &said, said.len() as u32, &stop, &mut edits);
            let mut out = Vec::new();
            apply(
                &edits[list.start as usize..][..list.count as usize],
                list.only,
                &logits,
                &mut out,
            );
            assert_eq!(
                out,
                naive(&shaping, &prompt, &said, &stop, &logits),
                "round {round}: {shaping:?}"
            );
            if shaping.is_none() {
                assert!(list.is_none());
            }
        }
    }
}
