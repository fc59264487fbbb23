//! Converts between text and tokens by the model's tokenizer and its chat template.
//!
//! A model without `tokenizer.json` takes prompts as token ids, and its answers are token ids.

use std::borrow::Cow;
use std::path::Path;

use serde_json::{Map, Value, json};
use tokenizers::Tokenizer;

use crate::coding::{Coding, Contents};
use crate::error::{Error, Result};
use crate::fields::read_file;
use crate::template::Template;

/// A message of a chat: its role and its text.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Message {
    /// `system`, `user` or `assistant`
    pub role: Cow<'static, str>,
    /// The text.
    pub content: String,
}

/// The tokenizer and the chat template of a model.
#[derive(Default)]
pub struct Text {
    tokenizer: Option<Tokenizer>,
    template: Option<Template>,
    /// Length of the longest entry of the vocabulary, in bytes.
    longest: usize,
    /// A token whose text is one letter. Decoders drop spaces at the start of a text, but not after this token.
    letter: Option<u32>,
    coding: Coding,
}

/// A prompt as text.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rendered {
    /// The text.
    pub text: String,
    /// Whether the tokenizer must add its special tokens. The output of a template already contains them.
    pub special: bool,
}

impl Text {
    /// Reads `tokenizer.json`, and the chat template of `chat_template.jinja` or `tokenizer_config.json`. Without
    /// `tokenizer.json` it reads nothing.
    ///
    /// # Errors
    /// An existing file is unreadable or damaged, or the tokenizer has tokens beyond the model's vocabulary.
    pub fn read(dir: &Path, vocab: usize) -> Result<Self> {
        let path = dir.join("tokenizer.json");
        if !path.exists() {
            return Ok(Self::default());
        }
        let tokenizer = Tokenizer::from_bytes(read_file(&path)?)
            .map_err(|e| Error::model(format!("{}: {e}", path.display())))?;
        let vocabulary = tokenizer.get_vocab(true);
        let longest = vocabulary.keys().map(String::len).max().unwrap_or(1);
        let past = vocabulary.into_iter().max_by_key(|(_, id)| *id);
        if let Some((token, id)) = past.filter(|(_, id)| *id as usize >= vocab) {
            return Err(Error::model(format!(
                "{}: token {token:?} has id {id}, but the model's vocabulary has {vocab} tokens",
                path.display()
            )));
        }
        Ok(Self::new(tokenizer, Template::read(dir)?, longest))
    }

    fn new(tokenizer: Tokenizer, template: Option<Template>, longest: usize) -> Self {
        let letter = ["a", "e", "x", "A"].into_iter().find_map(|letter| {
            let id = tokenizer.token_to_id(letter)?;
            (tokenizer.decode(&[id], true).ok()? == letter).then_some(id)
        });
        let coding = Coding::of(&tokenizer);
        Self { tokenizer: Some(tokenizer), template, longest, letter, coding }
    }

    /// Returns an upper bound of the bytes of a token's text. Without a tokenizer, this text is an id with its
    /// separator.
    pub fn longest_token(&self) -> usize {
        if self.has_tokenizer() { self.longest } else { 16 }
    }

    /// Returns the text of one token, also of a special one: of the first token of a text, or of a token inside a text,
    /// with its spaces.
    pub fn piece(&self, token: u32, is_first: bool) -> String {
        let own = self.decode_shown(&[token]);
        match self.letter {
            _ if is_first => own,
            None if self.has_tokenizer() => own,
            None => format!(" {own}"),
            Some(letter) => {
                let (text, before) =
                    (self.decode_shown(&[letter, token]), self.decode_shown(&[letter]));
                text.strip_prefix(&before).map_or(own, str::to_owned)
            }
        }
    }

    /// Returns the bytes of a token that may be a part of a character, so that its text may not show them.
    pub fn part(&self, token: u32) -> Option<Vec<u8>> {
        match self.contents(token)? {
            Contents::Text => None,
            Contents::Bytes(bytes) | Contents::Part(bytes) => Some(bytes),
        }
    }

    /// Returns the contents of a token; `None` if the tokenizer lacks it.
    pub fn contents(&self, token: u32) -> Option<Contents> {
        let Some(tokenizer) = &self.tokenizer else { return Some(Contents::Text) };
        tokenizer.id_to_token(token).map(|name| self.coding.contents(&name))
    }

    /// Returns whether a token is special, so that the text of an answer omits it.
    pub fn is_special(&self, token: u32) -> bool {
        let is_special = |tokenizer: &Tokenizer| {
            let name = tokenizer.id_to_token(token)?;
            Some(tokenizer.get_added_vocabulary().is_special_token(&name))
        };
        self.tokenizer.as_ref().and_then(is_special).unwrap_or(false)
    }

    /// Returns whether there is a tokenizer.
    pub fn has_tokenizer(&self) -> bool {
        self.tokenizer.is_some()
    }

    /// Returns the tokens of a text. Without a tokenizer, the text is a list of token ids, separated by spaces, tabs,
    /// commas or brackets.
    ///
    /// # Errors
    /// The text cannot be encoded.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_with(text, true)
    }

    /// Returns the tokens of a text, with or without the special tokens that the tokenizer adds.
    ///
    /// # Errors
    /// See [`Text::encode`].
    pub fn encode_with(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        let Some(tokenizer) = &self.tokenizer else { return parse_ids(text) };
        let encoding = tokenizer.encode_fast(text, special).map_err(not_encoded)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Returns the index of the character at which each token of a text begins. Tokens that the tokenizer adds begin
    /// where their neighbours begin.
    ///
    /// # Errors
    /// See [`Text::encode`].
    pub fn offsets(&self, text: &str) -> Result<Vec<usize>> {
        let Some(tokenizer) = &self.tokenizer else {
            // All characters of ids and separators are single bytes.
            let start = text.as_ptr().addr();
            return Ok(words(text).map(|word| word.as_ptr().addr() - start).collect());
        };
        let encoding = tokenizer.encode_char_offsets(text, true).map_err(not_encoded)?;
        let mut last = 0;
        let mut later = |&(start, _): &(usize, usize)| {
            last = start.max(last);
            last
        };
        Ok(encoding.get_offsets().iter().map(&mut later).collect())
    }

    /// Returns the text of tokens, without special ones. Without a tokenizer: their ids, separated by spaces.
    pub fn decode(&self, tokens: &[u32]) -> String {
        let shown = tokens.iter().copied().filter(|&token| !self.is_special(token));
        self.decode_shown(&shown.collect::<Vec<_>>())
    }

    /// Returns the text of tokens, with special ones.
    pub fn decode_shown(&self, tokens: &[u32]) -> String {
        match &self.tokenizer {
            // Not all decoders accept an empty list.
            Some(_) if !tokens.iter().any(|&token| self.contents(token).is_some()) => String::new(),
            Some(tokenizer) => tokenizer.decode(tokens, false).unwrap_or_default(),
            None => tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(" "),
        }
    }

    /// Returns the tokens of the prompt for the assistant's next turn. The model's template makes the prompt. Without a
    /// template, the prompt is the joined messages.
    ///
    /// # Errors
    /// The template rejects the messages, or the prompt cannot be encoded.
    pub fn chat(&self, messages: &[Message]) -> Result<Vec<u32>> {
        let message = |m: &Message| json!({ "role": m.role, "content": m.content });
        let messages: Vec<Value> = messages.iter().map(message).collect();
        let Rendered { text, special } = self.render(&messages, &Map::new())?;
        self.encode_with(&text, special)
    }

    /// Returns the text of the prompt for the assistant's next turn. `messages` have the template's form, and
    /// `arguments` are passed to the template.
    ///
    /// # Errors
    /// The template rejects the messages.
    pub fn render(&self, messages: &[Value], arguments: &Map<String, Value>) -> Result<Rendered> {
        if let Some(template) = &self.template {
            return Ok(Rendered { text: template.render(messages, arguments)?, special: false });
        }
        let parts: Vec<&str> = messages.iter().filter_map(|m| m["content"].as_str()).collect();
        let between = if self.has_tokenizer() { "\n" } else { " " };
        Ok(Rendered { text: parts.join(between), special: true })
    }
}

fn not_encoded(error: tokenizers::Error) -> Error {
    Error::request(format!("cannot encode the text: {error}"))
}

/// Returns the words of a list of token ids.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split([' ', ',', '\t', '[', ']']).filter(|word| !word.is_empty())
}

fn parse_ids(text: &str) -> Result<Vec<u32>> {
    let id = |word: &str| {
        word.parse().map_err(|_| {
            Error::request(format!(
                "the model has no tokenizer.json, and {word:?} is not a token id"
            ))
        })
    };
    words(text).map(id).collect()
}
