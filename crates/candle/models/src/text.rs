//! Converts text to tokens and back by a model's `tokenizer.json`. The tiny models have none; their
//! tokens are bytes.

use std::path::Path;

use tokenizers::Tokenizer;

/// A tokenizer, or bytes.
pub struct Text(Option<Tokenizer>);

impl Text {
    /// Reads a folder's `tokenizer.json`, if it has one.
    ///
    /// # Errors
    /// The tokenizer's errors.
    pub fn load(folder: &Path) -> tokenizers::Result<Self> {
        let path = folder.join("tokenizer.json");
        Ok(Self(path.exists().then(|| Tokenizer::from_file(path)).transpose()?))
    }

    /// Returns whether there is a tokenizer.
    pub fn has_tokenizer(&self) -> bool {
        self.0.is_some()
    }

    /// Returns a text's tokens. `special` adds the special tokens with which the tokenizer begins or ends a text.
    ///
    /// # Errors
    /// The tokenizer's errors.
    pub fn encode(&self, text: &str, special: bool) -> tokenizers::Result<Vec<u32>> {
        match &self.0 {
            Some(tokenizer) => Ok(tokenizer.encode(text, special)?.get_ids().to_vec()),
            None => Ok(text.bytes().map(u32::from).collect()),
        }
    }

    /// Returns the text of tokens. Without a tokenizer, a token other than a visible ASCII character becomes a dot.
    ///
    /// # Errors
    /// The tokenizer's errors.
    pub fn decode(&self, tokens: &[u32]) -> tokenizers::Result<String> {
        let byte =
            |&token: &u32| char::from_u32(token).filter(|c| c.is_ascii_graphic()).unwrap_or('.');
        match &self.0 {
            Some(tokenizer) => tokenizer.decode(tokens, true),
            None => Ok(tokens.iter().map(byte).collect()),
        }
    }
}
