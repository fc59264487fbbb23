//! Who is computing what a prompt needs: a running sequence that will publish more of it than is cached.
//!
//! Of those whose first unpublished page the prompt has too, behind the same prefix, the one that is furthest along; of
//! several that compute the same page next, the one that came to it first. What it agrees with the prompt in behind
//! that page is compared, and has to go further than what is cached.
//!
//! Not here: whether the prompt had better wait (the host decides).

use crate::id::{Namespace, PageId, Scope, SeqKey, TokenId};
use crate::plan::Leader;
use crate::prefix::PrefixTree;
use crate::sequence::SequenceTable;

/// The leader of a prompt, if there is one. O(prompt): one look-up for each page of what is cached, and one comparison
/// from where the leader stands on; one more for a sequence that is found and agrees with the prompt's first page that
/// is not cached, but not up to there.
pub(crate) fn leader(
    prefixes: &PrefixTree,
    sequences: &SequenceTable,
    namespace: Namespace,
    prompt: &[TokenId],
) -> Option<Leader> {
    if sequences.has_no_fronts() {
        return None;
    }
    let tokens = &prompt[..prompt.len() - 1];
    let cached = prefixes.match_prefix(namespace, tokens).pages();
    let search = Search { sequences, page_size: prefixes.page_size(), tokens, cached };
    let scope = prefixes.present_scope(namespace);
    // Without another whole page there is nothing to wait for.
    search.page(cached)?;
    let (mut leader, mut at) = (search.look(scope, None, 0), 0);
    prefixes.match_pages(namespace, tokens, |pages| {
        for &page in pages {
            at += 1;
            // Deeper is further along.
            leader = search.look(scope, Some(page), at).or(leader);
        }
    });
    leader
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
    /// Pages of it that are cached.
    cached: u32,
}

impl Search<'_> {
    /// Page `index` of the prompt's tokens, if they are so many.
    fn page(&self, index: u32) -> Option<&[TokenId]> {
        let start = (index * self.page_size) as usize;
        self.tokens.get(start..start + self.page_size as usize)
    }

    /// The sequence whose front is page `at` of the prompt, if it leads.
    fn look(&self, scope: Scope, before: Option<PageId>, at: u32) -> Option<Leader> {
        let front = self.page(at)?;
        let seq = self.sequences.find_front(scope, before, at, front)?;
        // Whoever agrees further agrees in the first page that is not cached: mostly that page tells.
        let lacking = self.page(self.cached)?;
        let further = self.agrees(seq, self.cached, lacking) == 1;
        let rest = &self.tokens[(at * self.page_size) as usize..];
        let pages = if further { at + self.agrees(seq, at, rest) } else { 0 };
        (pages > self.cached).then(|| Leader::new(seq, pages * self.page_size))
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
