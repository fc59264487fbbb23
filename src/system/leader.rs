//! Who is computing what a prompt needs: a running sequence that will publish more of it than is cached.
//!
//! Candidates are those whose first unpublished page the prompt has too, behind the same prefix; of several that
//! compute the same page next, the one that came to it first. Of those whose text has the prompt's first page that is
//! not cached, the one that is furthest along leads, if all in between agrees too.
//!
//! Not here: whether the prompt had better wait (the host decides).

use crate::id::{SeqKey, TokenId};
use crate::plan::Leader;
use crate::prefix::{PrefixMatch, PrefixTree};
use crate::sequence::SequenceTable;

/// The leader of a prompt of which `found` is cached, if there is one. O(prompt): for each page of what is cached one
/// look-up and one comparison of a page, and one comparison from where the leader stands on.
pub(crate) fn leader(
    prefixes: &PrefixTree,
    sequences: &SequenceTable,
    found: &PrefixMatch,
    prompt: &[TokenId],
) -> Option<Leader> {
    if sequences.has_no_fronts() {
        return None;
    }
    let tokens = &prompt[..prompt.len() - 1];
    let (scope, cached) = (found.scope(), found.pages());
    let search = Search { sequences, page_size: prefixes.page_size(), tokens };
    // Without another whole page there is nothing to wait for. Who computes it, leads.
    let lacking = search.page(cached)?;
    let look = |before, at| {
        let seq = sequences.find_front(scope, before, at, search.page(at)?)?;
        (search.agrees(seq, cached, lacking) > 0).then_some((seq, at))
    };
    let (mut deepest, mut at) = (look(None, 0), 0);
    prefixes.match_pages(scope.namespace, tokens, |pages| {
        for &page in pages {
            at += 1;
            deepest = look(Some(page), at).or(deepest);
        }
    });
    let (seq, at) = deepest?;
    let pages = at + search.agrees(seq, at, search.from(at));
    (pages > cached).then(|| Leader::new(seq, pages * search.page_size))
}

/// Whether a leader is still on its way to what it was named for. O(1).
pub(crate) fn is_leading(
    prefixes: &PrefixTree,
    sequences: &SequenceTable,
    leader: &Leader,
) -> bool {
    let Ok(sequence) = sequences.running(leader.seq) else { return false };
    let lock = sequence.lock.as_ref().expect("it runs");
    let generation = prefixes.present_scope(sequence.namespace).generation;
    let published = sequence.published * prefixes.page_size();
    lock.scope().generation == generation
        && (published < leader.cached_len && leader.cached_len <= sequence.token_len)
}

struct Search<'a> {
    sequences: &'a SequenceTable,
    page_size: u32,
    /// All of the prompt but its last token.
    tokens: &'a [TokenId],
}

impl<'a> Search<'a> {
    /// The prompt's tokens from page `index` on.
    fn from(&self, index: u32) -> &'a [TokenId] {
        &self.tokens[(index * self.page_size) as usize..]
    }

    /// Page `index` of the prompt's tokens, if they are so many.
    fn page(&self, index: u32) -> Option<&'a [TokenId]> {
        let start = (index * self.page_size) as usize;
        self.tokens.get(start..start + self.page_size as usize)
    }

    /// Whole pages that a sequence has in common with `tokens` from page `at` on.
    fn agrees(&self, seq: SeqKey, at: u32, tokens: &[TokenId]) -> u32 {
        let sequence = self.sequences.get(seq).expect("it has a front");
        let (mut rest, mut common) = (tokens, 0);
        let start = (at * self.page_size).min(sequence.token_len);
        for piece in self.sequences.token_pieces(sequence, start, sequence.token_len) {
            let len = piece.len().min(rest.len());
            let (head, tail) = rest.split_at(len);
            let same = TokenId::as_raw(head) == TokenId::as_raw(&piece[..len]);
            if !same || tail.is_empty() {
                let equal = head.iter().zip(piece).take_while(|(a, b)| a == b);
                return (common + equal.count() as u32) / self.page_size;
            }
            (rest, common) = (tail, common + len as u32);
        }
        common / self.page_size
    }
}
