//! Who computes what a prompt needs, found by looking at every sequence.

use super::Model;
use crate::id::{Scope, SeqKey, TokenId};

/// A sequence's first page that is not published, if all of its tokens and one more are known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Front {
    /// The page's place in the sequence.
    at: usize,
    /// When it came to be the front: smaller is earlier.
    since: u64,
}

impl Model {
    /// Looks whether a sequence still has its front, or another one. `begins`: whether it may have one that it had not.
    pub(super) fn look_at_front(&mut self, seq: SeqKey, begins: bool) {
        let page_size = self.page_size();
        let Some(sequence) = self.sequences.get_mut(&seq) else { return };
        let at = sequence.published;
        let has_front = !sequence.preempted && sequence.tokens.len() > (at + 1) * page_size;
        self.clock += 1;
        let new = Front { at, since: self.clock };
        sequence.front = match sequence.front {
            Some(old) if has_front && old.at == at => Some(old),
            old => (has_front && (begins || old.is_some())).then_some(new),
        };
    }

    /// The leader of a prompt, all but the last token of which are `tokens`, and how many of them it will have
    /// computed.
    pub(super) fn leader(&self, scope: Scope, tokens: &[TokenId]) -> Option<(SeqKey, u32)> {
        let page_size = self.page_size();
        let cached = self.tree.matched(scope, tokens).len();
        let page = |tokens: &[TokenId], at: usize| {
            tokens.get(at * page_size..(at + 1) * page_size).map(<[TokenId]>::to_vec)
        };
        let agrees = |other: &[TokenId]| {
            (0..)
                .take_while(|&at| page(tokens, at).is_some() && page(tokens, at) == page(other, at))
                .count()
        };
        for at in (0..=cached).rev() {
            // Of those with this front, behind what the prompt begins with too, the first.
            let same = self.sequences.iter().filter(|(_, sequence)| {
                let begins = sequence.scope == scope && agrees(&sequence.tokens) > at;
                begins && sequence.front.is_some_and(|front| front.at == at)
            });
            let first = same.min_by_key(|(_, sequence)| sequence.front.map(|front| front.since));
            if let Some((&seq, sequence)) = first
                && page(&sequence.tokens, cached) == page(tokens, cached)
                && page(tokens, cached).is_some()
            {
                let pages = agrees(&sequence.tokens);
                return (pages > cached).then_some((seq, (pages * page_size) as u32));
            }
        }
        None
    }

    /// `Engine::is_leading`
    pub fn is_leading(&self, seq: SeqKey, cached_len: u32) -> bool {
        let Ok(sequence) = self.running(seq) else { return false };
        let (len, page_size) = (cached_len as usize, self.page_size());
        let known = sequence.published * page_size < len && len <= sequence.tokens.len();
        known && sequence.scope == self.next_scope(sequence.scope.namespace)
    }
}
