//! Converts tokens to text as they arrive. All emitted text together equals the text of all tokens at once.

use crate::coding::Contents;
use crate::text::Text;

/// Number of emitted tokens that are decoded again with the next ones. Tokenizers drop a space at the start of a text,
/// so the text of these tokens must be longer than one space. The bytes of an incomplete character fit in these tokens.
const CONTEXT: usize = 3;

/// Converts tokens to text as they arrive, and holds back tokens whose text depends on later ones.
#[derive(Clone, Default, Debug)]
pub struct Decoder {
    /// The last emitted tokens: at least [`CONTEXT`], or all.
    context: Vec<u32>,
    /// Tokens that are held back.
    held: Vec<u32>,
    /// Bytes of an incomplete character.
    bytes: Vec<u8>,
}

impl Decoder {
    /// Returns a decoder for the tokens after a prompt. An incomplete character at the end of the prompt belongs to the
    /// text after it. O(tokens of that character), or O(bytes at the end of the prompt) with byte fallback.
    pub fn after(text: &Text, prompt: &[u32]) -> Self {
        let mut left = CONTEXT;
        let is_old = |&token: &u32| {
            let ends_part = !matches!(text.contents(token), None | Some(Contents::Part(_)));
            left -= usize::from(ends_part && left > 0);
            left == 0
        };
        let start = prompt.iter().rposition(is_old).unwrap_or(0);
        let mut decoder = Self::default();
        prompt[start..].iter().for_each(|&token| _ = decoder.push_shown(text, token));
        let bytes: Vec<u8> = decoder.held.iter().flat_map(|&token| text.part(token)).flatten().collect();
        if incomplete(&bytes) == 0 {
            decoder.context.append(&mut decoder.held);
        }
        decoder
    }

    /// Returns whether a tokenizer may drop the space of the next token: it is the first one. Always true for
    /// byte-level tokenizers, which drop none.
    pub fn is_at_start(&self) -> bool {
        self.context.is_empty() && self.held.is_empty()
    }

    /// Returns the text that is complete with this token. Special tokens have no text.
    pub fn push(&mut self, text: &Text, token: u32) -> String {
        if text.is_special(token) { String::new() } else { self.push_shown(text, token) }
    }

    /// Returns the text that is complete with this token, which may be special.
    pub fn push_shown(&mut self, text: &Text, token: u32) -> String {
        match text.contents(token) {
            None => String::new(),
            Some(Contents::Bytes(mut bytes)) => {
                self.bytes.append(&mut bytes);
                let complete = self.bytes.len() - incomplete(&self.bytes);
                let shown = String::from_utf8_lossy(&self.bytes[..complete]).into_owned();
                self.bytes.drain(..complete);
                shown
            }
            Some(Contents::Part(_)) => {
                self.held.push(token);
                String::new()
            }
            Some(Contents::Text) => {
                self.held.push(token);
                self.emit(text)
            }
        }
    }

    /// Returns the held-back text at the end of the tokens, with replacement characters for invalid bytes.
    pub fn rest(&mut self, text: &Text) -> String {
        let bytes = std::mem::take(&mut self.bytes);
        self.emit(text) + &String::from_utf8_lossy(&bytes)
    }

    fn emit(&mut self, text: &Text) -> String {
        if self.held.is_empty() {
            return String::new();
        }
        let before = text.decode_shown(&self.context);
        let mut window = [&self.context[..], &self.held].concat();
        let now = text.decode_shown(&window);
        // Later bytes make a character at the end of a prompt invalid.
        let new = now.strip_prefix(&before).map(str::to_owned);
        let new = new.unwrap_or_else(|| text.decode_shown(&self.held));
        self.held.clear();
        window.drain(..window.len().saturating_sub(CONTEXT));
        self.context = window;
        new
    }
}

/// Returns the number of bytes at the end that begin a character and do not complete it.
fn incomplete(bytes: &[u8]) -> usize {
    let begins = |&len: &usize| {
        let end = std::str::from_utf8(&bytes[bytes.len() - len..]);
        end.is_err_and(|error| error.valid_up_to() == 0 && error.error_len().is_none())
    };
    (1..=bytes.len().min(3)).find(begins).unwrap_or(0)
}
