//! A choice as its client reads it: converts tokens to text, up to a stop string.

use super::job::Logprob;
use super::stop::StopMatcher;
use kvarena_host::stream::Finish;
use kvarena_host::text::{Decoder, Text};

/// A token of a choice or of its echoed prompt, with its log-probability.
#[derive(Clone, PartialEq, Debug)]
pub struct GeneratedToken {
    /// The token.
    pub token: u32,
    /// Log-probability of the token; `None` for the first token of a prompt.
    pub logprob: Option<Logprob>,
    /// Characters of the choice's text before the token.
    pub offset: usize,
}

/// A new chunk of a choice.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Piece {
    /// Number of the choice.
    pub choice: u32,
    /// New complete text.
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
    /// Tokens that end the choice and do not belong to its text.
    stop_tokens: Vec<u32>,
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
    /// Returns a choice without tokens.
    pub fn new(number: u32, stops: Vec<String>, stop_tokens: Vec<u32>) -> Self {
        Self { number, stops: StopMatcher::new(stops), stop_tokens, ..Self::default() }
    }

    /// Returns the text and tokens of the prompt with their log-probabilities. The offsets of the choice's own tokens
    /// then start after the prompt's text.
    pub fn echo(&mut self, text: &Text, prompt: &[u32], logprobs: &[Option<Logprob>]) -> Piece {
        let mut piece = Piece { choice: self.number, ..Piece::default() };
        for (i, &token) in prompt.iter().enumerate() {
            if let Some(logprob) = logprobs.get(i) {
                let offset = piece.text.chars().count();
                piece.tokens.push(GeneratedToken { token, logprob: logprob.clone(), offset });
            }
            piece.text += &self.decoder.push(text, token);
        }
        self.decoded = piece.text.chars().count();
        self.given = self.decoded;
        piece
    }

    /// Returns the number of generated tokens, including the stop token.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Returns whether the choice has ended.
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
            self.pending.push(GeneratedToken { token, logprob, offset: self.decoded });
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
        let (text, found) = self.stops.push(decoded);
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

    /// Without a tokenizer, the text of token 12 is "12 ".
    #[test]
    fn tokens_are_returned_with_their_text() {
        let text = Text::default();
        let mut choice = Choice::new(3, vec!["2 7".into()], vec![9]);
        let piece = choice.token(&text, 5, logprob(-1.0)).expect("certain at once");
        assert_eq!((piece.choice, &piece.text[..], piece.tokens.len()), (3, "5 ", 1));
        // The end of the text may be the beginning of the stop string.
        let piece = choice.token(&text, 12, logprob(-2.0)).expect("the 1 is certain");
        assert_eq!((&piece.text[..], piece.tokens[0].token, piece.tokens[0].offset), ("1", 12, 2));
        let piece = choice.token(&text, 8, logprob(-3.0)).expect("no stop string");
        assert_eq!((&piece.text[..], piece.tokens[0].offset, piece.finish), ("2 8 ", 5, None));
        assert_eq!(choice.token(&text, 2, logprob(-4.0)), None);
        let piece = choice.token(&text, 77, logprob(-5.0)).expect("it stops");
        assert_eq!((&piece.text[..], &piece.tokens[..]), ("", &[][..]));
        assert_eq!((piece.finish, choice.tokens()), (Some(Finish::Stop), 5));
        assert_eq!(choice.token(&text, 1, None), None, "tokens after the stop string are ignored");
        assert_eq!((choice.done(&text, Finish::Cancelled), choice.tokens()), (None, 5));
    }

    #[test]
    fn the_end_emits_held_back_text() {
        let text = Text::default();
        let mut choice = Choice::new(0, vec!["7 7 7".into()], vec![9]);
        assert_eq!(choice.token(&text, 7, logprob(-1.0)), None);
        assert_eq!(choice.token(&text, 9, logprob(-2.0)), None);
        let piece = choice.done(&text, Finish::Stop).expect("the end");
        assert_eq!((&piece.text[..], piece.tokens.len()), ("7 ", 1));
        assert_eq!((piece.finish, choice.tokens()), (Some(Finish::Stop), 2));
    }
}
