//! Changes of logits before a token is chosen: penalties, biases and forbidden tokens.
//!
//! A request's [`Shaping`] and the tokens of its stream produce a list of [`Edit`]s for each draw, so a runner stores
//! no state of streams. [`PreparedShaping`] contains the edits that all draws share; a draw adds the edits of its
//! [`DrawHistory`]. The order is that of vLLM: forbidden tokens, biases, then penalties. Log-probabilities are those of
//! the unchanged logits.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

/// Rules of a request for its logits.
#[derive(Clone, PartialEq, Debug)]
pub struct Shaping {
    /// Repetition penalty of tokens in the prompt or the answer: it divides positive logits and multiplies negative
    /// ones. 1 has no effect.
    pub repetition: f32,
    /// Subtracted from a token's logit for each occurrence in the answer.
    pub frequency: f32,
    /// Subtracted from the logit of each token in the answer.
    pub presence: f32,
    /// Pairs of a token and the number that is added to its logit. Each token occurs once.
    pub bias: Vec<(u32, f32)>,
    /// Allowed tokens; `None` allows all.
    pub allowed: Option<Vec<u32>>,
    /// Sequences of one or more tokens. The last token of a sequence must not follow the tokens before it.
    pub bad_words: Vec<Vec<u32>>,
    /// Tokens that an answer must have before its stop tokens are allowed.
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

/// Change of one token's logit: adds `before`, then divides or multiplies by the repetition penalty, then adds `after`.
#[derive(Clone, Copy, PartialEq, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Edit {
    /// The token.
    pub token: u32,
    /// First summand.
    pub before: f32,
    /// Divides a positive sum and multiplies a negative one.
    pub repetition: f32,
    /// Last summand.
    pub after: f32,
}

/// Range of a draw's edits in a step's list.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Edits {
    /// Index of the first edit.
    pub start: u32,
    /// Number of edits.
    pub count: u32,
    /// Whether tokens without an edit are forbidden.
    pub only: bool,
}

impl Edits {
    /// Returns whether the edits change nothing.
    pub fn is_none(&self) -> bool {
        self.count == 0 && !self.only
    }
}

impl Edit {
    /// Returns an edit that changes nothing.
    pub fn none(token: u32) -> Self {
        Self { token, before: 0.0, repetition: 1.0, after: 0.0 }
    }

    /// Returns an edit that forbids a token, even if other edits are joined to it.
    fn forbid(token: u32) -> Self {
        Self { after: f32::NEG_INFINITY, ..Self::none(token) }
    }

    /// Returns whether the edit forbids its token. Penalties and biases are finite.
    fn forbids(&self) -> bool {
        self.after == f32::NEG_INFINITY
    }

    /// Returns the edited logit.
    pub fn apply(&self, logit: f32) -> f32 {
        let logit = logit + self.before;
        let scaled = if logit > 0.0 { logit / self.repetition } else { logit * self.repetition };
        scaled + self.after
    }

    /// Adds another edit of the token. All edits of a request have its repetition penalty or none.
    fn join(&mut self, other: &Self) {
        self.before += other.before;
        self.after += other.after;
        if other.repetition != 1.0 {
            self.repetition = other.repetition;
        }
    }
}

impl Shaping {
    /// Returns whether the shaping changes nothing.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the tokens that the shaping names.
    pub fn tokens(&self) -> impl Iterator<Item = u32> {
        let biased = self.bias.iter().map(|&(token, _)| token);
        let allowed = self.allowed.iter().flatten();
        biased.chain(allowed.chain(self.bad_words.iter().flatten()).copied())
    }

    /// Returns whether there is a penalty, so that edits depend on the tokens of the answer.
    pub fn penalises(&self) -> bool {
        (self.repetition, self.frequency, self.presence) != (1.0, 0.0, 0.0)
    }

    /// Returns whether edits depend on the tokens of the answer, so that a draw needs the preceding token.
    pub fn needs_history(&self) -> bool {
        self.penalises() || self.bad_words.iter().any(|word| word.len() > 1)
    }

    /// Returns the shaping with the edits that all draws share. O(n log n) for n listed tokens.
    pub fn prepare(self) -> Arc<PreparedShaping> {
        let allowed = self.allowed.iter().flatten().map(|&token| Edit::none(token));
        let bias = self.bias.iter().map(|&(token, before)| Edit { before, ..Edit::none(token) });
        let words = self.bad_words.iter().filter(|word| word.len() == 1);
        let mut edits: Vec<Edit> = allowed.collect();
        sort_and_join(&mut edits);
        let listed = edits.len();
        edits.extend(bias.chain(words.map(|word| Edit::forbid(word[0]))));
        if self.allowed.is_some() {
            let (allowed, others) = edits.split_at_mut(listed);
            for edit in others {
                if let Ok(at) = allowed.binary_search_by_key(&edit.token, |edit| edit.token) {
                    allowed[at].join(edit);
                }
            }
            edits.truncate(listed);
        } else {
            sort_and_join(&mut edits);
        }
        let long_words = self.bad_words.iter().filter(|word| word.len() > 1).count();
        let forbidden = edits.iter().filter(|edit| edit.forbids()).count();
        Arc::new(PreparedShaping { edits, forbidden, long_words, rules: self })
    }
}

/// Sorts edits by token, and joins the edits of each token.
fn sort_and_join(edits: &mut Vec<Edit>) {
    edits.sort_unstable_by_key(|edit| edit.token);
    edits.dedup_by(|edit, kept| {
        let same = edit.token == kept.token;
        if same {
            kept.join(edit);
        }
        same
    });
}

/// A request's shaping, and the edits that all its draws share. The requests of one list of prompts share this value.
#[derive(Clone, PartialEq, Debug)]
pub struct PreparedShaping {
    rules: Shaping,
    /// At most one edit for each token, sorted by token. If the request restricts the tokens, only allowed tokens have
    /// edits.
    edits: Vec<Edit>,
    /// Number of edits that forbid their token.
    forbidden: usize,
    /// Number of bad words with several tokens.
    long_words: usize,
}

/// Number of occurrences of each token of an answer.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Counts(Vec<(u32, u32)>);

impl Counts {
    /// Counts a token. O(distinct tokens).
    pub fn add(&mut self, token: u32) {
        match self.0.binary_search_by_key(&token, |&(token, _)| token) {
            Ok(at) => self.0[at].1 += 1,
            Err(at) => self.0.insert(at, (token, 1)),
        }
    }

    /// Returns the number of distinct tokens.
    pub fn distinct(&self) -> usize {
        self.0.len()
    }
}

/// Tokens before a draw.
#[derive(Clone, Copy, Debug)]
pub struct DrawHistory<'a> {
    /// Tokens of the prompt, sorted and without duplicates; used only by a repetition penalty.
    pub prompt: &'a [u32],
    /// Tokens of the answer. The last token may be missing unless [`Shaping::needs_history`] returns true.
    pub answer: &'a [u32],
    /// Counts of the answer's tokens. Read only if the shaping [penalises](Shaping::penalises).
    pub counts: &'a Counts,
    /// Number of tokens of the answer before the draw.
    pub answer_len: u32,
}

impl PreparedShaping {
    /// Returns the rules of the request.
    pub fn rules(&self) -> &Shaping {
        &self.rules
    }

    /// Returns whether a first draw has an allowed token, out of `vocab` tokens. O(s log n) for s stop tokens.
    pub fn allows_some(&self, stop: &[u32], vocab: usize) -> bool {
        let only = self.rules.allowed.is_some();
        let mut early = if self.rules.min_tokens > 0 { stop.to_vec() } else { Vec::new() };
        early.sort_unstable();
        early.dedup();
        early.retain(|&token| (token as usize) < vocab && !forbids(&self.edits, only, token));
        self.forbidden + early.len() < if only { self.edits.len() } else { vocab }
    }

    /// Returns an upper bound of the edits of a draw with at most `known` distinct tokens in prompt and answer, and
    /// `stops` stop tokens.
    pub fn edits_max(&self, known: usize, stops: usize, vocab: usize) -> usize {
        if self.rules.allowed.is_some() {
            return self.edits.len();
        }
        let penalised = if self.rules.penalises() { known } else { 0 };
        let stops = if self.rules.min_tokens > 0 { stops } else { 0 };
        (self.edits.len() + self.long_words + penalised + stops).min(vocab)
    }

    /// Appends the edits of a draw, at most one for each token and sorted by token; `changes` is scratch. O(e log e)
    /// for e edits and penalised tokens, and O(tokens of the bad words).
    pub fn edits(
        &self,
        history: DrawHistory<'_>,
        stop: &[u32],
        changes: &mut Vec<Edit>,
        edits: &mut Vec<Edit>,
    ) -> Edits {
        changes.clear();
        if self.rules.penalises() {
            self.penalties(history, changes);
        }
        let penalised = changes.len();
        for word in &self.rules.bad_words {
            let (&last, first) = word.split_last().expect("no word is empty");
            if !first.is_empty() && history.answer.ends_with(first) {
                changes.push(Edit::forbid(last));
            }
        }
        if history.answer_len < self.rules.min_tokens {
            changes.extend(stop.iter().map(|&token| Edit::forbid(token)));
        }
        if changes.len() > penalised {
            sort_and_join(changes);
        }
        let only = self.rules.allowed.is_some();
        let start = edits.len();
        merge(&self.edits, changes, only, edits);
        Edits { start: start as u32, count: (edits.len() - start) as u32, only }
    }

    /// Appends the penalties of the tokens of prompt and answer, by token.
    fn penalties(&self, DrawHistory { prompt, counts, .. }: DrawHistory<'_>, changes: &mut Vec<Edit>) {
        let Shaping { repetition, frequency, presence, .. } = self.rules;
        let penalty = |(token, count): (u32, u32)| {
            let after = if count > 0 { -(frequency * count as f32 + presence) } else { 0.0 };
            Edit { token, before: 0.0, repetition, after }
        };
        let mut counts = counts.0.iter().copied().peekable();
        for &token in if repetition == 1.0 { &[] } else { prompt } {
            while let Some(count) = counts.next_if(|count| count.0 < token) {
                changes.push(penalty(count));
            }
            changes.push(penalty(counts.next_if(|count| count.0 == token).unwrap_or((token, 0))));
        }
        changes.extend(counts.map(penalty));
    }
}

/// Joins edits with changes and appends the result to `out`. Both inputs are sorted by token. `only` drops changes of
/// tokens without edits.
fn merge(mut edits: &[Edit], changes: &[Edit], only: bool, out: &mut Vec<Edit>) {
    for change in changes {
        let (before, rest) = edits.split_at(edits.partition_point(|e| e.token < change.token));
        out.extend_from_slice(before);
        edits = rest;
        match rest.split_first() {
            Some((edit, rest)) if edit.token == change.token => {
                let mut edit = *edit;
                edit.join(change);
                out.push(edit);
                edits = rest;
            }
            _ if only => {}
            _ => out.push(*change),
        }
    }
    out.extend_from_slice(edits);
}

/// Returns whether a draw's edits forbid a token. O(log of the edits).
pub fn forbids(edits: &[Edit], only: bool, token: u32) -> bool {
    let found = edits.binary_search_by_key(&token, |edit| edit.token);
    found.map_or(only, |at| edits[at].forbids())
}

/// Writes a draw's edited logits to `out`. O(vocabulary).
pub fn apply(edits: &[Edit], only: bool, logits: &[f32], out: &mut Vec<f32>) {
    out.clear();
    if only {
        out.resize(logits.len(), f32::NEG_INFINITY)
    } else {
        out.extend_from_slice(logits)
    }
    for edit in edits {
        out[edit.token as usize] = edit.apply(logits[edit.token as usize]);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::sample::splitmix;

    /// Applies a shaping field by field, as vLLM's documentation describes it.
    fn naive(shaping: &Shaping, prompt: &[u32], answer: &[u32], stop: &[u32], logits: &[f32]) -> Vec<f32> {
        let mut out = logits.to_vec();
        for token in 0..out.len() as u32 {
            let logit = &mut out[token as usize];
            let count = answer.iter().filter(|&&other| other == token).count();
            let bad = shaping.bad_words.iter().any(|word| [answer, &[token]].concat().ends_with(word));
            let early = (answer.len() as u32) < shaping.min_tokens && stop.contains(&token);
            let outside = shaping.allowed.as_ref().is_some_and(|allowed| !allowed.contains(&token));
            if bad || early || outside {
                *logit = f32::NEG_INFINITY;
                continue;
            }
            *logit += shaping.bias.iter().find(|(t, _)| *t == token).map_or(0.0, |(_, bias)| *bias);
            if count > 0 || prompt.contains(&token) {
                *logit = if *logit > 0.0 { *logit / shaping.repetition } else { *logit * shaping.repetition };
            }
            if count > 0 {
                *logit += -(shaping.frequency * count as f32 + shaping.presence);
            }
        }
        out
    }

    fn edits_after(
        prepared: &PreparedShaping,
        prompt: &[u32],
        answer: &[u32],
        stop: &[u32],
        edits: &mut Vec<Edit>,
    ) -> Edits {
        let prompt: BTreeSet<u32> = prompt.iter().copied().collect();
        let prompt: Vec<u32> = prompt.into_iter().collect();
        let mut counts = Counts::default();
        answer.iter().for_each(|&token| counts.add(token));
        let answer_len = answer.len() as u32;
        let history = DrawHistory { prompt: &prompt, answer, counts: &counts, answer_len };
        prepared.edits(history, stop, &mut Vec::new(), edits)
    }

    #[test]
    fn edits_match_the_naive_model() {
        let mut state = 5;
        let mut below = |n: u64| splitmix(&mut state) % n;
        for round in 0..3000 {
            let vocab = 24;
            let words = |count: u64, len: u64, below: &mut dyn FnMut(u64) -> u64| -> Vec<Vec<u32>> {
                (0..below(count + 1)).map(|_| (0..1 + below(len)).map(|_| below(vocab) as u32).collect()).collect()
            };
            let (bad_words, allowed) = (words(4, 3, &mut below), words(1, 9, &mut below).pop());
            let (prompt, answer) = (words(1, 9, &mut below).concat(), words(1, 12, &mut below).concat());
            let mut bias: Vec<(u32, f32)> = (0..vocab as u32).map(|t| (t, t as f32 - 7.5)).collect();
            bias.retain(|_| below(4) == 0);
            let pick = |n: u64, values: [f32; 3]| values[n as usize];
            let shaping = Shaping {
                repetition: pick(below(3), [1.0, 1.3, 0.8]),
                frequency: pick(below(3), [0.0, 0.7, -0.4]),
                presence: pick(below(3), [0.0, 1.1, -0.9]),
                bias,
                allowed,
                bad_words,
                min_tokens: below(15) as u32,
            };
            let logits: Vec<f32> = (0..vocab).map(|_| below(2001) as f32 / 100.0 - 10.0).collect();
            let mut edits = vec![Edit::none(3)];
            let stop = [9, 2];
            let prepared = shaping.clone().prepare();
            let list = edits_after(&prepared, &prompt, &answer, &stop, &mut edits);
            let sorted = edits[1..].windows(2).all(|two| two[0].token < two[1].token);
            assert!(sorted, "round {round}: {edits:?}");
            let known: BTreeSet<u32> = prompt.iter().chain(&answer).copied().collect();
            let most = prepared.edits_max(known.len(), stop.len(), vocab as usize);
            assert!(list.count as usize <= most, "round {round}: {} of {most}", list.count);
            let mut out = Vec::new();
            apply(&edits[list.start as usize..][..list.count as usize], list.only, &logits, &mut out);
            assert_eq!(out, naive(&shaping, &prompt, &answer, &stop, &logits), "round {round}: {shaping:?}");
            if shaping.is_none() {
                assert!(list.is_none());
            }
            let edits = &edits[list.start as usize..];
            let allowed = |token: &u32| !forbids(edits, list.only, *token);
            assert!((0..24).all(|t| allowed(&t) == (out[t as usize] > f32::NEG_INFINITY)));
            if answer.is_empty() {
                let some = prepared.allows_some(&stop, vocab as usize);
                assert_eq!(some, (0..24).any(|t| allowed(&t)), "round {round}: {shaping:?}");
            }
        }
    }

    /// A list as long as the vocabulary is prepared once: a draw copies it and sorts only the changes of its history.
    #[test]
    fn draws_sort_no_listed_token() {
        let allowed = Some((0..150_000).rev().collect());
        let prepared = Shaping { allowed, min_tokens: 5, ..Shaping::default() }.prepare();
        let counts = Counts::default();
        let (mut changes, mut edits) = (Vec::new(), Vec::new());
        for (answer_len, changed) in [(4, 2), (5, 0)] {
            edits.clear();
            let history = DrawHistory { prompt: &[], answer: &[], counts: &counts, answer_len };
            let list = prepared.edits(history, &[70_000, 9], &mut changes, &mut edits);
            assert_eq!((list.count, changes.len()), (150_000, changed));
            assert!(edits.iter().zip(0..).all(|(edit, token)| edit.token == token));
            let forbidden = edits.iter().filter(|edit| edit.after == f32::NEG_INFINITY).count();
            assert_eq!(forbidden, changed);
        }
    }
}
