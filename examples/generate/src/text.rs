//! Between text and tokens: the model's tokenizer, its chat template, and decoding as tokens arrive.
//!
//! All three are optional: a model without `tokenizer.json` takes and gives token ids.

use std::borrow::Cow;
use std::path::Path;

use minijinja::{Environment, ErrorKind, Value as Jinja, context};
use serde_json::{Value, json};
use tokenizers::Tokenizer;

use crate::config::{read_file, read_json};
use crate::error::{Error, Result};

/// A message of a chat: who says it, and what.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Message {
    /// `system`, `user` or `assistant`
    pub role: Cow<'static, str>,
    /// What is said.
    pub content: String,
}

/// A model's way with text.
#[derive(Default)]
pub struct Text {
    tokenizer: Option<Tokenizer>,
    template: Option<Template>,
}

struct Template {
    environment: Environment<'static>,
    /// `bos_token` and such, which templates write themselves.
    special: Value,
}

impl Text {
    /// Reads `tokenizer.json`, and the chat template of `chat_template.jinja` or `tokenizer_config.json`.
    ///
    /// # Errors
    /// A file that is there is damaged, or the tokenizer has tokens past the model's vocabulary.
    pub fn read(dir: &Path, vocab: usize) -> Result<Self> {
        let path = dir.join("tokenizer.json");
        if !path.exists() {
            return Ok(Self::default());
        }
        let tokenizer = Tokenizer::from_bytes(read_file(&path)?)
            .map_err(|e| Error::model(format!("{}: {e}", path.display())))?;
        let past = tokenizer.get_vocab(true).into_iter().max_by_key(|(_, id)| *id);
        if let Some((token, id)) = past.filter(|(_, id)| *id as usize >= vocab) {
            return Err(Error::model(format!(
                "{}: token {token:?} has id {id}, but the model's vocabulary has {vocab} tokens",
                path.display()
            )));
        }
        Ok(Self { tokenizer: Some(tokenizer), template: Template::read(dir)? })
    }

    /// Whether there is a tokenizer.
    pub fn has_tokenizer(&self) -> bool {
        self.tokenizer.is_some()
    }

    /// The tokens of a text. Without a tokenizer the text is a list of token ids, parted by spaces or commas.
    ///
    /// # Errors
    /// The text cannot be encoded.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_with(text, true)
    }

    fn encode_with(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        let Some(tokenizer) = &self.tokenizer else { return parse_ids(text) };
        let encoding = tokenizer.encode_fast(text, special);
        let encoding =
            encoding.map_err(|e| Error::request(format!("cannot encode the text: {e}")))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of tokens, special ones left out. Without a tokenizer: their ids, parted by spaces.
    pub fn decode(&self, tokens: &[u32]) -> String {
        match &self.tokenizer {
            Some(tokenizer) => tokenizer.decode(tokens, true).unwrap_or_default(),
            None => tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(" "),
        }
    }

    /// The prompt for the assistant's next turn: by the model's template, else the messages one after another.
    ///
    /// # Errors
    /// The template refuses the messages.
    pub fn chat(&self, messages: &[Message]) -> Result<Vec<u32>> {
        match &self.template {
            Some(template) => self.encode_with(&template.render(messages)?, false),
            None => {
                let parts: Vec<&str> = messages.iter().map(|m| m.content.as_str()).collect();
                self.encode(&parts.join(if self.has_tokenizer() { "\n" } else { " " }))
            }
        }
    }
}

fn parse_ids(text: &str) -> Result<Vec<u32>> {
    let words = text.split([' ', ',', '\t', '[', ']']).filter(|word| !word.is_empty());
    let id = |word: &str| {
        word.parse().map_err(|_| {
            Error::request(format!("the model has no tokenizer.json, and {word:?} is no token id"))
        })
    };
    words.map(id).collect()
}

impl Template {
    fn read(dir: &Path) -> Result<Option<Self>> {
        let config_path = dir.join("tokenizer_config.json");
        let config = if config_path.exists() { read_json(&config_path)? } else { Value::Null };
        let file = dir.join("chat_template.jinja");
        let source = if file.exists() {
            let bytes = read_file(&file)?;
            String::from_utf8(bytes)
                .map_err(|e| Error::model(format!("{}: {e}", file.display())))?
        } else {
            match template_of(&config) {
                Some(source) => source.to_owned(),
                None => return Ok(None),
            }
        };
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function(
            "raise_exception",
            |what: String| -> std::result::Result<Jinja, _> {
                Err(minijinja::Error::new(ErrorKind::InvalidOperation, what))
            },
        );
        environment
            .add_template_owned("chat", source)
            .map_err(|e| Error::model(format!("{}: chat template: {e}", dir.display())))?;
        let token = |name: &str| {
            // Older configs wrap a token in an object.
            let value = &config[name];
            value.as_str().or(value["content"].as_str()).unwrap_or_default().to_owned()
        };
        let special = json!({ "bos_token": token("bos_token"), "eos_token": token("eos_token") });
        Ok(Some(Self { environment, special }))
    }

    fn render(&self, messages: &[Message]) -> Result<String> {
        let message = |m: &Message| json!({ "role": m.role, "content": m.content });
        let messages: Vec<Value> = messages.iter().map(message).collect();
        let wrong = |e: minijinja::Error| Error::request(format!("chat template: {e}"));
        let template = self.environment.get_template("chat").map_err(wrong)?;
        let arguments = context! {
            messages => Jinja::from_serialize(&messages),
            add_generation_prompt => true,
            ..Jinja::from_serialize(&self.special)
        };
        template.render(arguments).map_err(wrong)
    }
}

/// The template of a tokenizer's config: a text, or the one named `default` of a list.
fn template_of(config: &Value) -> Option<&str> {
    let template = &config["chat_template"];
    let named = || template.as_array()?.iter().find(|t| t["name"] == "default");
    template.as_str().or_else(|| named()?["template"].as_str())
}

/// So many tokens that make no whole character are given out as they are: a character has four bytes at most, so that
/// these will not become one.
const HELD_MAX: usize = 8;

/// Turns tokens into text as they arrive, holding back what is not yet whole characters.
#[derive(Default)]
pub struct Decoder {
    tokens: Vec<u32>,
    /// Tokens before this are context only, so that spaces between words come out right.
    context: usize,
    /// Tokens before this have been given out.
    given: usize,
}

impl Decoder {
    /// The text that became certain with this token.
    pub fn push(&mut self, text: &Text, token: u32) -> String {
        self.tokens.push(token);
        if !text.has_tokenizer() {
            return format!("{token} ");
        }
        let before = text.decode(&self.tokens[self.context..self.given]);
        let now = text.decode(&self.tokens[self.context..]);
        let is_held = self.tokens.len() - self.given < HELD_MAX;
        if is_held && (now.ends_with('\u{FFFD}') || now.len() <= before.len()) {
            return String::new();
        }
        self.give(text, &before, &now)
    }

    /// What was held back, once no more tokens come: with a sign for what is no character.
    pub fn rest(&mut self, text: &Text) -> String {
        if !text.has_tokenizer() {
            return String::new();
        }
        let before = text.decode(&self.tokens[self.context..self.given]);
        let now = text.decode(&self.tokens[self.context..]);
        self.give(text, &before, &now)
    }

    fn give(&mut self, text: &Text, before: &str, now: &str) -> String {
        self.context = self.given;
        self.given = self.tokens.len();
        let new = now.strip_prefix(before).map(str::to_owned);
        // Bytes that make no character may spoil the context, too.
        new.unwrap_or_else(|| text.decode(&self.tokens[self.context..]))
    }
}

#[cfg(test)]
#[path = "../tests/common/byte_tokenizer.rs"]
mod byte_tokenizer;

#[cfg(test)]
mod test {
    use super::byte_tokenizer::byte_tokenizer;
    use super::*;

    /// A model that takes single bytes.
    fn bytes() -> Text {
        let tokenizer = byte_tokenizer(256).to_string();
        let tokenizer = Tokenizer::from_bytes(tokenizer).expect("a tokenizer");
        Text { tokenizer: Some(tokenizer), template: None }
    }

    #[test]
    fn characters_are_given_out_whole() {
        let (text, mut decoder) = (bytes(), Decoder::default());
        let mut push = |byte: u8| decoder.push(&text, byte.into());
        assert_eq!(
            "\u{20ac}!".bytes().map(&mut push).collect::<Vec<_>>(),
            ["", "", "\u{20ac}", "!"]
        );
        assert_eq!((push(0xE2), push(0x82)), (String::new(), String::new()));
        assert_eq!(decoder.rest(&text), "\u{FFFD}\u{FFFD}", "the end came inside a character");
        assert_eq!(decoder.rest(&text), "");
    }

    #[test]
    fn what_is_no_character_is_not_held_for_ever() {
        let (text, mut decoder) = (bytes(), Decoder::default());
        let said: String = (0..100).map(|_| decoder.push(&text, 0x80)).collect();
        assert!(said.chars().count() > 80 && said.chars().all(|c| c == '\u{FFFD}'), "{said:?}");
        let said: String = (0..100).map(|i| decoder.push(&text, 97 + i % 26)).collect();
        assert!(said.ends_with("uv") && said.contains("abc"), "{said:?}");
    }
}
