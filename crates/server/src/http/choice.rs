//! A choice as its client reads it: converts tokens to text, up to a stop string.

use super::job::Logprob;
use super::prompt::PromptText;
use super::stop::StopMatcher;
use kvarena_host::decoder::Decoder;
use kvarena_host::stream::Finish;
use kvarena_host::text::Text;

/// A token of a choice or of its echoed prompt, with its log-probability.
#[derive(Clone, PartialEq, Debug)]
pub struct GeneratedToken {
    pub token: u32,
    /// Log-probability of the token; `None` for the first token of a prompt.
    pub logprob: Option<Logprob>,
    /// Characters of the choice's text before the token.
    pub offset: usize,
    /// Whether no text precedes the token, neither of the choice nor of its prompt.
    pub is_first: bool,
}

/// Rules that end a choice.
#[derive(Clone, Default, Debug)]
pub struct Stops {
    pub strings: Vec<String>,
    /// Tokens that end the choice and do not belong to its text.
    pub tokens: Vec<u32>,
    /// Tokens before the first one whose text may end a stop string.
    pub min_tokens: u32,
}

/// A prompt with which its choices begin.
#[derive(Clone, Default, Debug)]
pub struct Echo {
    pub tokens: Vec<u32>,
    /// The text, and the offset of each token.
    pub text: PromptText,
    /// The log-probabilities, if requested.
    pub logprobs: Vec<Option<Logprob>>,
}

/// A new chunk of a choice.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Piece {
    pub choice: u32,
    pub text: String,
    /// Tokens of this text, if log-probabilities are known.
    pub tokens: Vec<GeneratedToken>,
    /// Reason for the end of the choice, in its last chunk.
    pub finish: Option<Finish>,
}

impl Piece {
    /// Joins two consecutive chunks.
    pub fn join(first: Option<Self>, second: Option<Self>) -> Option<Self> {
        match (first, second) {
            (Some(mut first), Some(second)) => {
                first.text += &second.text;
                first.tokens.extend(second.tokens);
                Some(Self { finish: second.finish, ..first })
            }
            (first, second) => first.or(second),
        }
    }
}

/// A choice, running or ended.
#[derive(Default)]
pub struct Choice {
    number: u32,
    decoder: Decoder,
    stops: StopMatcher,
    /// See [`Stops`].
    stop_tokens: Vec<u32>,
    /// See [`Stops`].
    min_tokens: u32,
    /// Generated tokens, including the stop token.
    tokens: u32,
    /// Characters decoded.
    decoded: usize,
    /// Characters emitted.
    given: usize,
    /// Tokens whose text has not been emitted.
    pending: Vec<GeneratedToken>,
    finish: Option<Finish>,
}

impl Choice {
    /// Returns a choice without tokens. `decoder` continues the text of the prompt.
    pub fn new(number: u32, stops: Stops, decoder: Decoder) -> Self {
        let Stops { strings, tokens: stop_tokens, min_tokens } = stops;
        let stops = StopMatcher::new(strings);
        Self { number, stops, stop_tokens, min_tokens, decoder, ..Self::default() }
    }

    /// Returns the text and tokens of the prompt with their log-probabilities. The offsets of the choice's own tokens
    /// then start after the prompt's text.
    pub fn echo(&mut self, prompt: &Echo) -> Piece {
        let PromptText { text, offsets } = &prompt.text;
        self.decoded = text.chars().count();
        self.given = self.decoded;
        let tokens = prompt.tokens.iter().zip(offsets).zip(&prompt.logprobs).enumerate();
        let tokens = tokens.map(|(i, ((&token, &offset), logprob))| GeneratedToken {
            token,
            logprob: logprob.clone(),
            offset,
            is_first: i == 0,
        });
        Piece { choice: self.number, text: text.clone(), tokens: tokens.collect(), finish: None }
    }

    /// Returns the number of generated tokens, including the stop token.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    pub fn is_done(&self) -> bool {
        self.finish.is_some()
    }

    /// Processes a token, and returns the new chunk for its client, if any.
    pub fn token(&mut self, text: &Text, token: u32, logprob: Option<Logprob>) -> Option<Piece> {
        if self.is_done() {
            return None;
        }
        self.tokens += 1;
        if self.stop_tokens.contains(&token) {
            return None;
        }
        if logprob.is_some() {
            let (offset, is_first) = (self.decoded, self.decoder.is_at_start());
            self.pending.push(GeneratedToken { token, logprob, offset, is_first });
        }
        let decoded = self.decoder.push(text, token);
        let piece = self.read(&decoded);
        (self.is_done() || !piece.text.is_empty()).then_some(piece)
    }

    /// Processes the end, and returns the last chunk for the client; `None` if a stop string has already ended the
    /// choice.
    pub fn done(&mut self, text: &Text, finish: Finish) -> Option<Piece> {
        if self.is_done() {
            return None;
        }
        let decoded = self.decoder.rest(text);
        let mut piece = self.read(&decoded);
        if !self.is_done() {
            piece.text += &self.stops.rest();
            piece.tokens.append(&mut self.pending);
            self.finish = Some(finish);
        }
        Some(Piece { finish: self.finish, ..piece })
    }

    fn read(&mut self, decoded: &str) -> Piece {
        self.decoded += decoded.chars().count();
        let may_stop = self.tokens > self.min_tokens;
        let (text, found) = if may_stop { self.stops.push(decoded) } else { (self.stops.push_open(decoded), false) };
        self.given += text.chars().count();
        let certain = self.pending.partition_point(|token| token.offset < self.given);
        let tokens = self.pending.drain(..certain).collect();
        self.finish = found.then_some(Finish::Stop);
        Piece { choice: self.number, text, tokens, finish: self.finish }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logprob(own: f32) -> Option<Logprob> {
        Some(Logprob { own, top: Vec::new() })
    }

    fn choice(number: u32, stop: &str, min_tokens: u32) -> Choice {
        let stops = Stops { strings: vec![stop.into()], tokens: vec![9], min_tokens };
        Choice::new(number, stops, Decoder::default())
    }

    /// Without a tokenizer, the text of token 12 is "12", after a space unless it is the first one.
    #[test]
    fn tokens_are_returned_with_their_text() {
        let text = Text::default();
        let mut choice = choice(3, "2 7", 0);
        let piece = choice.token(&text, 5, logprob(-1.0)).expect("certain at once");
        assert_eq!((piece.choice, &piece.text[..], piece.tokens.len()), (3, "5", 1));
        assert!(piece.tokens[0].is_first);
        // The end of the text may be the beginning of the stop string.
        let piece = choice.token(&text, 12, logprob(-2.0)).expect("the 1 is certain");
        assert_eq!((&piece.text[..], piece.tokens[0].token, piece.tokens[0].offset), (" 1", 12, 1));
        let piece = choice.token(&text, 8, logprob(-3.0)).expect("no stop string");
        assert_eq!((&piece.text[..], piece.tokens[0].offset, piece.finish), ("2 8", 4, None));
        assert_eq!(choice.token(&text, 2, logprob(-4.0)).expect("a space").text, " ");
        let piece = choice.token(&text, 77, logprob(-5.0)).expect("it stops");
        assert_eq!((&piece.text[..], &piece.tokens[..]), ("", &[][..]));
        assert_eq!((piece.finish, choice.tokens()), (Some(Finish::Stop), 5));
        assert_eq!(choice.token(&text, 1, None), None, "tokens after the stop string are ignored");
        assert_eq!((choice.done(&text, Finish::Cancelled), choice.tokens()), (None, 5));
    }

    #[test]
    fn the_end_emits_held_back_text() {
        let text = Text::default();
        let mut choice = choice(0, "7 7 7", 0);
        assert_eq!(choice.token(&text, 7, logprob(-1.0)), None);
        assert_eq!(choice.token(&text, 9, logprob(-2.0)), None);
        let piece = choice.done(&text, Finish::Stop).expect("the end");
        assert_eq!((&piece.text[..], piece.tokens.len()), ("7", 1));
        assert_eq!((piece.finish, choice.tokens()), (Some(Finish::Stop), 2));
    }

    /// A stop string ends a choice only with text of a token after the first `min_tokens`. It may begin before.
    #[test]
    fn stop_strings_wait_for_the_minimum_of_tokens() {
        let text = Text::default();
        let ends = [(0, ""), (2, "7 7 "), (3, "7 7 7 "), (4, "7 7 7 7 8 "), (5, "7 7 7 7 8 ")];
        for (min_tokens, expected) in ends {
            let mut choice = choice(0, "7", min_tokens);
            let pieces = [7, 7, 7, 7, 8, 7].map(|token| choice.token(&text, token, None));
            let shown: String = pieces.iter().flatten().map(|piece| &piece.text[..]).collect();
            assert_eq!((&shown[..], choice.finish), (expected, Some(Finish::Stop)), "{min_tokens}");
        }
        let mut choice = choice(0, "7 8", 1);
        let pieces = [7, 8, 7].map(|token| choice.token(&text, token, None));
        let shown: String = pieces.iter().flatten().map(|piece| &piece.text[..]).collect();
        assert_eq!((&shown[..], choice.tokens()), ("", 2), "the string ends with the second token");
    }
}
