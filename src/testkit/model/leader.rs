//! The leader of a prompt: the sequence that computes tokens of the prompt. The search looks at every sequence.

use super::Model;
use crate::id::{Scope, SeqKey, TokenId};

/// A sequence's first page that is not published, if all of its tokens and one more are known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Front {
    /// The index of the page in the sequence.
    at: usize,
    /// The time when it became the front: smaller is earlier.
    since: u64,
}

impl Model {
    /// Updates the front of a sequence. A sequence without a front gets one only if `begins` is set.
    pub(super) fn update_front(&mut self, seq: SeqKey, begins: bool) {
        let page_size = self.page_size();
        let Some(sequence) = self.sequences.get_mut(&seq) else { return };
        let at = sequence.published;
        let runs = !sequence.preempted && sequence.pending == 0;
        let has_front = runs && sequence.tokens.len() > (at + 1) * page_size;
        self.clock += 1;
        let new = Front { at, since: self.clock };
        sequence.front = match sequence.front {
            Some(old) if has_front && old.at == at => Some(old),
            old => (has_front && (begins || old.is_some())).then_some(new),
        };
    }

    /// Returns the leader of a prompt, and the number of the prompt's tokens in whole pages that the leader will have
    /// computed. `tokens` are all tokens of the prompt but the last.
    pub(super) fn leader(&self, scope: Scope, tokens: &[TokenId]) -> Option<(SeqKey, u32)> {
        let page_size = self.page_size();
        let cached = self.tree.matched_len(scope, tokens);
        let page =
            |tokens: &[TokenId], at: usize| tokens.get(at * page_size..(at + 1) * page_size).map(<[TokenId]>::to_vec);
        let agrees = |other: &[TokenId]| {
            (0..).take_while(|&at| page(tokens, at).is_some() && page(tokens, at) == page(other, at)).count()
        };
        page(tokens, cached)?;
        for at in (0..=cached).rev() {
            // A candidate's front is page `at`. The candidate's tokens equal the prompt's up to the end of the prompt's
            // first page that is not cached.
            let same = self.sequences.iter().filter(|(_, sequence)| {
                let agrees = sequence.scope == scope && agrees(&sequence.tokens) > cached;
                agrees && sequence.front.is_some_and(|front| front.at == at)
            });
            let first = same.min_by_key(|(_, sequence)| sequence.front.map(|front| front.since));
            if let Some((&seq, sequence)) = first {
                return Some((seq, (agrees(&sequence.tokens) * page_size) as u32));
            }
        }
        None
    }

    /// Returns the number of removals of a sequence's tokens.
    pub fn cut_count(&self, seq: SeqKey) -> usize {
        self.sequences[&seq].cuts.len()
    }

    /// `Engine::is_leading` of a leader that was found after `cuts` removals of tokens.
    pub fn is_leading(&self, seq: SeqKey, cached_len: u32, cuts: usize) -> bool {
        let Ok(sequence) = self.running(seq) else { return false };
        let (len, page_size) = (cached_len as usize, self.page_size());
        let cached = (sequence.published + sequence.pending) * page_size;
        let known = cached < len && len <= sequence.tokens.len();
        let uncut = cuts == sequence.cuts.len() || sequence.cuts.iter().all(|&left| left >= len);
        known && uncut && sequence.scope == self.next_scope(sequence.scope.namespace)
    }
}
