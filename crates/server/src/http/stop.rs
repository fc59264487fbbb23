//! Searches for stop strings in text that arrives in chunks; holds back text that may become a stop string.

/// Matcher of stop strings. The string that ends first wins, so the result does not depend on the chunks. Among strings
/// that end together, the longest wins.
#[derive(Clone, Default, Debug)]
pub struct StopMatcher {
    stops: Vec<String>,
    /// The end of the text so far, which may be the beginning of a stop string.
    held: String,
    /// Bytes of `held` in which no stop string may end.
    open: usize,
}

impl StopMatcher {
    /// Creates a matcher of these strings.
    ///
    /// # Panics
    /// If a string is empty.
    pub fn new(stops: Vec<String>) -> Self {
        assert!(stops.iter().all(|stop| !stop.is_empty()), "an empty string would match anywhere");
        Self { stops, ..Self::default() }
    }

    /// Returns the text that is certain after this chunk. No stop string ends in this chunk; one may begin in it.
    pub fn push_open(&mut self, piece: &str) -> String {
        self.held.push_str(piece);
        self.open = self.held.len();
        self.certain()
    }

    /// Returns the text that is certain after this chunk, and whether a stop string was found. If one was found, the
    /// text ends before it.
    pub fn push(&mut self, piece: &str) -> (String, bool) {
        self.held.push_str(piece);
        let found = self.stops.iter().filter_map(|stop| {
            let least = (self.open + 1).saturating_sub(stop.len());
            let first = (least..).find(|&at| self.held.is_char_boundary(at))?;
            let start = first + self.held[first..].find(stop)?;
            Some((start + stop.len(), start))
        });
        if let Some((_, start)) = found.min() {
            self.held.truncate(start);
            return (self.rest(), true);
        }
        (self.certain(), false)
    }

    /// Takes the text that no stop string contains.
    fn certain(&mut self) -> String {
        let certain = self.held.len() - self.beginning();
        self.open = self.open.saturating_sub(certain);
        let kept = self.held.split_off(certain);
        std::mem::replace(&mut self.held, kept)
    }

    /// Returns the held-back text at the end.
    pub fn rest(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Returns the length of the longest suffix of the held text that begins a stop string.
    fn beginning(&self) -> usize {
        let held = self.held.as_bytes();
        let longest = |stop: &String| {
            let stop = stop.as_bytes();
            let most = held.len().min(stop.len() - 1);
            (1..=most).rev().find(|&n| held.ends_with(&stop[..n])).unwrap_or(0)
        };
        self.stops.iter().map(longest).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvarena_host::sample::splitmix;

    fn all(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        all_after(0, stops, pieces)
    }

    fn all_after(open: usize, stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut matcher = StopMatcher::new(stops.iter().map(|&stop| stop.to_owned()).collect());
        let mut text: String = pieces[..open].iter().map(|piece| matcher.push_open(piece)).collect();
        for piece in &pieces[open..] {
            let (certain, found) = matcher.push(piece);
            text.push_str(&certain);
            if found {
                return (text, true);
            }
        }
        (text + &matcher.rest(), false)
    }

    #[test]
    fn a_stop_string_over_several_tokens_is_cut_off() {
        assert_eq!(all(&["END"], &["say E", "N", "D more"]), ("say ".into(), true));
        assert_eq!(all(&["END"], &["say E", "N", "d"]), ("say ENd".into(), false));
        assert_eq!(all(&["END"], &["E", "N"]), ("EN".into(), false), "the text ends inside the stop string");
        assert_eq!(all(&["aab"], &["aa", "ab"]), ("a".into(), true), "a match may begin inside a failed match");
        assert_eq!(all(&[], &["x", "y"]), ("xy".into(), false));
    }

    #[test]
    fn text_that_cannot_begin_a_stop_string_is_returned_at_once() {
        let mut matcher = StopMatcher::new(vec!["\n\n".into(), "</s>".into()]);
        assert_eq!(matcher.push("one\n"), ("one".into(), false));
        assert_eq!(matcher.push("two <"), ("\ntwo ".into(), false));
        assert_eq!(matcher.push("br>"), ("<br>".into(), false));
    }

    #[test]
    fn the_first_to_end_wins_and_then_the_longest() {
        assert_eq!(all(&["abcd", "bc"], &["xabcd"]), ("xa".into(), true));
        assert_eq!(all(&["abcd", "bc"], &["xab", "cd"]), ("xa".into(), true));
        assert_eq!(all(&["bc", "abc"], &["xabc"]), ("x".into(), true));
    }

    #[test]
    fn characters_of_several_bytes_stay_whole() {
        let euro = "\u{20ac}";
        assert_eq!(all(&[euro], &["5 \u{20ad}", "\u{20ac}"]), ("5 \u{20ad}".into(), true));
        assert_eq!(all(&["\u{20ac}!"], &[euro, "?"]), ("\u{20ac}?".into(), false));
    }

    #[test]
    fn a_stop_string_may_begin_in_open_text() {
        let mut matcher = StopMatcher::new(vec!["aba".into()]);
        assert_eq!(matcher.push_open("xaba"), "xab");
        assert_eq!(matcher.push_open("ab"), "a");
        assert_eq!(matcher.push("ab"), (String::new(), true), "`aba` ends with the next letter");
        let mut matcher = StopMatcher::new(vec!["\u{e9}b".into(), "b".into()]);
        assert_eq!(matcher.push_open("b\u{e9}b\u{e9}"), "b\u{e9}b");
        assert_eq!(matcher.push("b"), (String::new(), true));
    }

    /// Random texts, each cut at random places, give the results of a search of the whole text. In the first `open`
    /// chunks, no stop string ends.
    #[test]
    fn stop_strings_are_found_at_every_cut() {
        let mut state = 7;
        let mut below = |n: u64| splitmix(&mut state) % n;
        for _ in 0..20_000 {
            let word = |len: u64, below: &mut dyn FnMut(u64) -> u64| -> String {
                (0..len).map(|_| ['a', 'b', '\u{e9}'][below(3) as usize]).collect()
            };
            let count = 1 + below(3);
            let stops: Vec<String> = (0..count)
                .map(|_| {
                    let len = 1 + below(4);
                    word(len, &mut below)
                })
                .collect();
            let len = below(14);
            let text = word(len, &mut below);
            let mut pieces = vec![String::new()];
            for c in text.chars() {
                if below(2) == 0 {
                    pieces.push(String::new());
                }
                pieces.last_mut().expect("there is one").push(c);
            }
            let open = below(pieces.len() as u64 + 1) as usize * below(2) as usize;
            let open_bytes = pieces[..open].concat().len();
            let ends = text.char_indices().map(|(at, c)| at + c.len_utf8());
            let first = ends
                .filter(|&end| end > open_bytes)
                .filter_map(|end| {
                    let at_end = stops.iter().filter(|stop| text[..end].ends_with(*stop));
                    at_end.map(|stop| end - stop.len()).min()
                })
                .next();
            let expected = (text[..first.unwrap_or(text.len())].to_owned(), first.is_some());
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            assert_eq!(all_after(open, &stops, &pieces), expected, "{stops:?} in {pieces:?}, {open}");
        }
    }
}
