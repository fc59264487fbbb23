//! A growing text, with a search for earlier occurrences of its end.
//!
//! ```text
//!   the page is full .. the page is          the last tokens occurred before: the longest match is best,
//!       ------- ----        -------          and of equally long matches the latest
//! ```
//!
//! If the continuation reaches the end of the text, it starts again after the match, as in a text that repeats.

use std::collections::HashMap;

use super::{Drafting, Drafts};

/// Maximum number of tokens of a match that are compared; longer matches count as equal.
const STRETCH_MAX: usize = 8;
/// Maximum number of earlier places that are compared, the latest first.
const PLACES_MAX: usize = 64;

/// A growing text.
#[derive(Clone, Debug, Default)]
pub struct History {
    tokens: Vec<u32>,
    /// For each place, the previous place of the same token; the place itself if there is none.
    before: Vec<u32>,
    /// The last place of each token.
    last: HashMap<u32, u32>,
}

impl History {
    /// Returns the number of tokens.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Returns whether the text is empty.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Appends tokens. O(tokens).
    pub fn extend(&mut self, tokens: impl IntoIterator<Item = u32>) {
        for token in tokens {
            let place = self.tokens.len() as u32;
            self.tokens.push(token);
            self.before.push(self.last.insert(token, place).unwrap_or(place));
        }
    }

    /// Writes guesses of the continuation to `out`: at most `rule.tokens` drafts, at most `depth` of them in a path. In
    /// a tree, the best continuation gets half of the drafts, the next one half of the rest, and so on; the best one
    /// gets the remainder. O(places compared x drafts squared).
    pub fn guess(&self, rule: Drafting, depth: usize, out: &mut Drafts) {
        out.clear();
        let Some(&root) = self.tokens.last() else { return };
        out.begin(root);
        let mut places = self.places();
        places.sort_by_key(|&(stretch, _)| std::cmp::Reverse(stretch));
        let most = rule.tokens as usize;
        if rule.tree {
            for &(_, place) in &places {
                out.add(self.behind(place).take(depth), (most - out.len()).div_ceil(2));
            }
        }
        if let Some(&(_, place)) = places.first() {
            out.add(self.behind(place).take(depth), most - out.len());
        }
    }

    /// Returns up to [`PLACES_MAX`] earlier places of the last token, the latest first, each with the length of its
    /// match with the end.
    fn places(&self) -> Vec<(usize, usize)> {
        let last = self.tokens.len() - 1;
        let before = |&place: &usize| {
            let before = self.before[place] as usize;
            (before < place).then_some(before)
        };
        let places = std::iter::successors(before(&last), before);
        places.take(PLACES_MAX).map(|place| (self.stretch(place), place)).collect()
    }

    /// Returns the length of the match between a place and the end, at most [`STRETCH_MAX`].
    fn stretch(&self, place: usize) -> usize {
        let ends = [&self.tokens[..=place], &self.tokens[..]].map(|text| text.iter().rev());
        let [there, here] = ends;
        there.zip(here).take(STRETCH_MAX).take_while(|(there, here)| there == here).count()
    }

    /// Returns the tokens after a place, repeated without end.
    fn behind(&self, place: usize) -> impl Iterator<Item = u32> {
        self.tokens[place + 1..].iter().copied().cycle()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guess(text: &[u32], tokens: u32, tree: bool, depth: usize) -> Drafts {
        let mut history = History::default();
        // The text is added in two parts, because a text grows.
        let (first, rest) = text.split_at(text.len() / 2);
        history.extend(first.iter().copied());
        history.extend(rest.iter().copied());
        assert_eq!((history.len(), history.is_empty()), (text.len(), text.is_empty()));
        let mut drafts = Drafts::default();
        drafts.begin(99);
        history.guess(Drafting { tokens, tree }, depth, &mut drafts);
        drafts
    }

    fn chain(text: &[u32], tokens: u32) -> Vec<u32> {
        let drafts = guess(text, tokens, false, 63);
        assert!(drafts.is_chain());
        drafts.guesses().to_vec()
    }

    #[test]
    fn unseen_text_has_no_drafts() {
        assert!(guess(&[], 5, true, 63).is_empty());
        assert!(chain(&[3], 5).is_empty());
        assert!(chain(&[1, 2, 3], 5).is_empty());
        assert!(guess(&[1, 2, 1, 2], 5, true, 0).is_empty(), "no depth");
    }

    #[test]
    fn the_longest_match_wins_and_of_equal_ones_the_latest() {
        // 2 occurred three times before. Two of them follow 1; 6 follows the later one of these two.
        let text = [1, 2, 5, 9, 1, 2, 6, 8, 4, 2, 7, 1, 2];
        assert_eq!(chain(&text, 1), [6]);
        assert_eq!(chain(&text, 3), [6, 8, 4]);
        assert_eq!(chain(&[2, 5, 4, 2, 6, 2], 1), [6], "a match of one token counts");
    }

    #[test]
    fn a_repeating_text_is_continued_by_its_repetition() {
        assert_eq!(chain(&[9, 4, 4], 5), [4, 4, 4, 4, 4]);
        assert_eq!(chain(&[1, 2, 3, 1, 2, 3, 1], 7), [2, 3, 1, 2, 3, 1, 2]);
    }

    #[test]
    fn a_tree_has_several_continuations() {
        let text = [1, 2, 5, 9, 1, 2, 6, 8, 4, 2, 7, 1, 2];
        let tree = guess(&text, 7, true, 63);
        // The best continuation gets four drafts, the next gets two, and the last gets one.
        assert_eq!(tree.guesses(), [6, 8, 4, 2, 5, 9, 7]);
        assert_eq!(tree.parents(), [0, 0, 1, 2, 3, 0, 5, 0]);
        let flat = guess(&text, 7, true, 1);
        assert_eq!((flat.guesses(), flat.parents()), (&[6, 5, 7][..], &[0, 0, 0, 0][..]));
        // A single continuation gets all drafts.
        let repeated = guess(&[9, 4, 4], 5, true, 63);
        assert!(repeated.is_chain());
        assert_eq!(repeated.guesses(), [4, 4, 4, 4, 4]);
    }

    /// Compares with a search without an index.
    #[test]
    fn the_index_finds_what_a_search_finds() {
        let mut state = 5;
        for round in 0..300 {
            let mut draw = |n: u64| crate::sample::splitmix(&mut state) % n;
            let words = 2 + draw(4);
            let text: Vec<u32> = (0..1 + draw(60)).map(|_| draw(words) as u32).collect();
            let last = text.len() - 1;
            let stretch = |place: usize| {
                let fits = |n: &usize| text[place + 1 - n..=place] == text[last + 1 - n..];
                (1..=STRETCH_MAX.min(place + 1)).rev().find(fits).unwrap_or(0)
            };
            // The latest of the longest matches.
            let best = (0..last).max_by_key(|&place| stretch(place)).filter(|&p| stretch(p) > 0);
            let want: Vec<u32> = match best {
                Some(place) => (0..6).map(|i| text[place + 1 + i % (last - place)]).collect(),
                None => vec![],
            };
            assert_eq!(chain(&text, 6), want, "{round}: {text:?}");
            let tree = guess(&text, 6, true, 4);
            assert!(tree.len() <= 6);
            for number in 1..tree.parents().len() {
                let depth = std::iter::successors(Some(number), |&n| (n > 0).then(|| tree.parents()[n] as usize));
                assert!(depth.count() <= 5, "at most four tokens follow the root");
            }
        }
    }
}
