//! A request: its arrival, its prompt and its answer.
//!
//! Every text is a list of pieces of one endless numbered stream of tokens. Equal pieces are equal content. Pieces are
//! small, so a trace of a hundred million tokens is stored as pieces and expanded one request at a time.

use kvarena::TokenId;

/// `len` tokens of the stream, from number `first` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    pub first: u64,
    pub len: u32,
}

/// One request of a workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Arrival in milliseconds since the start of the workload.
    pub arrival_ms: u64,
    /// The prompt, at least one token.
    pub prompt: Vec<Piece>,
    /// The sampled tokens, at least one.
    pub output: Piece,
}

impl Request {
    /// Returns the number of prompt tokens.
    pub fn input_len(&self) -> u32 {
        self.prompt.iter().map(|piece| piece.len).sum()
    }

    /// Returns the number of tokens that get K and V: all but the last sampled token.
    pub fn stored_len(&self) -> u32 {
        self.input_len() + self.output.len - 1
    }

    /// Writes the prompt into `tokens`.
    pub fn write_prompt(&self, tokens: &mut Vec<TokenId>) {
        tokens.clear();
        for &piece in &self.prompt {
            write_piece(piece, tokens);
        }
    }

    /// Writes the sampled tokens that get K and V into `tokens`.
    pub fn write_stored_output(&self, tokens: &mut Vec<TokenId>) {
        tokens.clear();
        write_piece(Piece { len: self.output.len - 1, ..self.output }, tokens);
    }

    /// Returns the `i`th sampled token.
    pub fn output_token(&self, i: u32) -> TokenId {
        token(self.output.first + u64::from(i))
    }
}

fn write_piece(piece: Piece, tokens: &mut Vec<TokenId>) {
    tokens.extend((piece.first..piece.first + u64::from(piece.len)).map(token));
}

/// Returns token number `n` of the stream. An odd factor permutes 32-bit numbers, so numbers below 2^32 give different
/// tokens, except for one pair.
fn token(n: u64) -> TokenId {
    let folded = (n ^ (n >> 32)) as u32;
    let scattered = folded.wrapping_mul(0x9E37_79B1);
    // PENDING is not a valid token, so the largest valid token replaces it.
    TokenId::new(scattered.min(TokenId::PENDING.raw() - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_of_different_numbers_differ() {
        let mut seen: Vec<u32> = (0..100_000).map(|n| token(n).raw()).collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 100_000);
    }

    #[test]
    fn the_last_sampled_token_is_not_stored() {
        let request = Request {
            arrival_ms: 0,
            prompt: vec![Piece { first: 0, len: 3 }, Piece { first: 512, len: 2 }],
            output: Piece { first: 1 << 31, len: 4 },
        };
        let (mut prompt, mut output) = (Vec::new(), Vec::new());
        request.write_prompt(&mut prompt);
        request.write_stored_output(&mut output);
        assert_eq!(prompt, [0, 1, 2, 512, 513].map(token));
        assert_eq!(output, [0, 1, 2].map(|i| request.output_token(i)));
        assert_eq!((request.input_len(), request.stored_len()), (5, 8));
    }
}
