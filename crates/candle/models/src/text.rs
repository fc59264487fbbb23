//! Converts text to tokens and back by a model's `tokenizer.json`. The tiny models have none; their
//! tokens are bytes.

use std::path::Path;

use tokenizers::Tokenizer;

/// A tokenizer, or bytes.
pub struct Text(Option<Tokenizer>);

impl Text {
    /// Reads a folder's `tokenizer.json`, if it has one. Ignores its sections `truncation` and `padding`, as the
    /// reference does: they are left from training.
    ///
    /// # Errors
    /// The tokenizer's errors.
    pub fn load(folder: &Path) -> tokenizers::Result<Self> {
        let path = folder.join("tokenizer.json");
        if !path.exists() {
            return Ok(Self(None));
        }
        let mut tokenizer = Tokenizer::from_file(path)?;
        tokenizer.with_padding(None).with_truncation(None)?;
        Ok(Self(Some(tokenizer)))
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
        let byte = |&token: &u32| char::from_u32(token).filter(|c| c.is_ascii_graphic()).unwrap_or('.');
        match &self.0 {
            Some(tokenizer) => tokenizer.decode(tokens, true),
            None => Ok(tokens.iter().map(byte).collect()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn truncation_and_padding_are_ignored() {
        let bytes: Vec<String> = (0..256).map(|id| format!(r#""<0x{id:02X}>": {id}"#)).collect();
        let tokenizer = format!(
            r#"{{
                "version": "1.0",
                "truncation": {{
                    "direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0
                }},
                "padding": {{
                    "strategy": {{ "Fixed": 32 }}, "direction": "Left", "pad_to_multiple_of": null, "pad_id": 0,
                    "pad_type_id": 0, "pad_token": "<0x00>"
                }},
                "added_tokens": [], "normalizer": null, "pre_tokenizer": null, "post_processor": null,
                "decoder": {{ "type": "ByteFallback" }},
                "model": {{
                    "type": "BPE", "vocab": {{ {} }}, "merges": [], "byte_fallback": true, "unk_token": null
                }}
            }}"#,
            bytes.join(", ")
        );
        let folder = std::env::temp_dir().join(format!("kvarena-candle-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        std::fs::write(folder.join("tokenizer.json"), tokenizer).expect("a file");
        let text = Text::load(&folder);
        std::fs::remove_dir_all(&folder).expect("the folder is ours");
        let Text(tokenizer) = text.expect("a tokenizer");
        let tokenizer = tokenizer.expect("the file exists");
        for len in [3, 16, 24, 40] {
            let encoding = tokenizer.encode("a".repeat(len), false).expect("tokens");
            assert_eq!(encoding.get_ids(), vec![97; len]);
        }
    }
}
