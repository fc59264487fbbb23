//! A chat, whose prompts the model's own template renders.

use std::path::Path;

use kvarena_host::error::{Error, Result};
use kvarena_host::text::Text;
use serde_json::{Map, Value, json};

/// The messages of a chat, and the model's tokenizer and template.
pub struct Chat {
    text: Text,
    messages: Vec<Value>,
}

impl Chat {
    /// Reads `tokenizer.json` of a folder, and the template of `chat_template.jinja` or `tokenizer_config.json`.
    ///
    /// # Errors
    /// The tokenizer or the template is missing or damaged.
    pub fn read(folder: &Path) -> Result<Self> {
        let wrong = |what: &str| Error::model(format!("{}: {what}", folder.display()));
        let text = Text::read(folder, usize::MAX, None)?;
        if !text.has_tokenizer() {
            return Err(wrong("there is no tokenizer.json, and a chat needs the model's tokenizer"));
        }
        let missing = "there is no chat template, neither in chat_template.jinja nor in tokenizer_config.json; save \
                       the model's template as chat_template.jinja";
        text.template().map_err(|_| wrong(missing))?;
        Ok(Self { text, messages: Vec::new() })
    }

    /// Adds a message of the user. Returns the prompt for the answer.
    ///
    /// # Errors
    /// The template rejects the messages, or the prompt cannot be encoded.
    pub fn ask(&mut self, message: &str) -> Result<Vec<u32>> {
        self.messages.push(json!({ "role": "user", "content": message }));
        // The template writes the special tokens.
        self.text.encode_with(&self.render()?, false)
    }

    /// Adds an answer.
    pub fn answer(&mut self, tokens: &[u32]) {
        self.messages.push(json!({ "role": "assistant", "content": self.decode(tokens) }));
    }

    /// Returns the text of all messages and of the beginning of an answer.
    ///
    /// # Errors
    /// The template rejects the messages.
    pub fn render(&self) -> Result<String> {
        self.text.render(&self.messages, &Map::new())
    }

    /// Returns the text of tokens, without special ones.
    pub fn decode(&self, tokens: &[u32]) -> String {
        self.text.decode(tokens)
    }
}
