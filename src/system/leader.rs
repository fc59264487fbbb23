//! Finds the leader of a prompt: a running sequence that will publish more of it than is cached.
//!
//! The first unpublished page of a candidate has the tokens of a page of the prompt, after the same prefix. The
//! candidate's tokens also equal the prompt's up to the end of the prompt's first page that is not cached. Of the
//! candidates, the one whose first unpublished page is the deepest leads. Among equals, the one that reached the page
//! first leads. The host decides whether the prompt waits.

use crate::id::{SeqKey, TokenId};
use crate::plan::Leader;
use crate::prefix::{PrefixMatch, PrefixTree, common_tokens};
use crate::sequence::SequenceTable;
use crate::system::access::access;
use crate::world::World;

/// Returns the leader of a prompt whose cached prefix is `found`, if there is one. `tokens` are those that can match.
///
/// Published prefixes end where nodes do (W2), so each node of the match costs one look-up. For each candidate, the
/// function compares its first unpublished page and the prompt's first uncached page; if these are equal, also the
/// pages between. O(nodes of the match, and tokens compared).
pub(crate) fn leader(
    prefixes: &PrefixTree,
    sequences: &SequenceTable,
    found: &PrefixMatch,
    tokens: &[TokenId],
) -> Option<Leader> {
    if sequences.has_no_fronts() {
        return None;
    }
    let (scope, cached) = (found.scope(), found.pages());
    let search = Search { sequences, page_size: prefixes.page_size(), tokens };
    // If no whole page follows the cached ones, the prompt need not wait.
    search.page(cached)?;
    let seq = prefixes.ends(found).find_map(|(at, before)| {
        let mut fronts = sequences.with_front(scope, before, at, search.page(at)?);
        fronts.find(|&seq| search.agrees(seq, cached, cached + 1) && search.agrees(seq, at, cached))
    })?;
    let pages = cached + search.common_pages(seq, cached);
    let cuts = sequences.cuts(sequences.get(seq).expect("it has a front"));
    Some(Leader { seq, cached_len: pages * search.page_size, cuts: cuts.count })
}

access! {
    /// Tables of [`is_leading`].
    struct IsLeading of &World {
        prefixes: &PrefixTree,
        sequences: &SequenceTable,
    }
}

/// Implements [`Engine::is_leading`](crate::Engine::is_leading). O(1).
///
/// A cut removes tokens of a sequence. The table stores only the number of cuts and the minimum length after a cut. If
/// a sequence was cut below `cached_len` before it was named, any later cut therefore ends its lead.
pub(crate) fn is_leading(world: &IsLeading<'_>, leader: &Leader) -> bool {
    let IsLeading { prefixes, sequences } = *world;
    let Ok(sequence) = sequences.running(leader.seq) else { return false };
    let lock = sequence.lock.as_ref().expect("it runs");
    let generation = prefixes.present_scope(sequence.namespace).generation;
    let published = sequences.prefix_pages(sequence) * prefixes.page_size();
    let cuts = sequences.cuts(sequence);
    let is_uncut = cuts.count == leader.cuts || leader.cached_len <= cuts.shortest;
    lock.scope().generation == generation
        && is_uncut
        && (published < leader.cached_len && leader.cached_len <= sequence.token_len)
}

struct Search<'a> {
    sequences: &'a SequenceTable,
    page_size: u32,
    /// The prompt's tokens that can match.
    tokens: &'a [TokenId],
}

impl<'a> Search<'a> {
    /// Returns the tokens of the prompt's page `index`, if it has that page.
    fn page(&self, index: u32) -> Option<&'a [TokenId]> {
        let start = (index * self.page_size) as usize;
        self.tokens.get(start..start + self.page_size as usize)
    }

    /// Returns whether a sequence has the prompt's pages `start..end`.
    fn agrees(&self, seq: SeqKey, start: u32, end: u32) -> bool {
        let sequence = self.sequences.get(seq).expect("it has a front");
        let [start, end] = [start, end].map(|page| page * self.page_size);
        let mut rest = &self.tokens[start as usize..end as usize];
        end <= sequence.token_len
            && self.sequences.token_pieces(sequence, start, end).all(|piece| {
                let (head, later) = rest.split_at(piece.len());
                rest = later;
                TokenId::as_raw(head) == TokenId::as_raw(piece)
            })
    }

    /// Returns the number of whole pages from page `start` on that a sequence shares with the prompt.
    fn common_pages(&self, seq: SeqKey, start: u32) -> u32 {
        let sequence = self.sequences.get(seq).expect("it has a front");
        let start = start * self.page_size;
        let (all, len) = (&self.tokens[start as usize..], sequence.token_len);
        let mut rest = all;
        for piece in self.sequences.token_pieces(sequence, start.min(len), len) {
            let common = common_tokens(piece, rest);
            rest = &rest[common..];
            if common < piece.len() {
                break;
            }
        }
        (all.len() - rest.len()) as u32 / self.page_size
    }
}
