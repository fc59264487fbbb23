//! Converts between text and tokens by the model's tokenizer and its chat template.
//!
//! A model without a tokenizer takes prompts as token ids, and its answers are token ids.

use std::borrow::Cow;
use std::panic::catch_unwind;
use std::path::Path;

use serde_json::{Map, Value, json};
use tokenizers::Tokenizer;

use crate::coding::{Coding, Contents};
use crate::error::{Error, Result};
use crate::files::read_file;
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

impl Text {
    /// Reads a folder's `tokenizer.json`, if there is one, and the chat template of `chat_template.jinja` or
    /// `tokenizer_config.json`. `template` replaces this template.
    ///
    /// # Errors
    /// An existing file is unreadable or damaged, or see [`Text::parse`].
    pub fn read(dir: &Path, vocab: usize, template: Option<Template>) -> Result<Self> {
        let template = template.map_or_else(|| Template::read(dir), |template| Ok(Some(template)))?;
        let path = dir.join("tokenizer.json");
        if path.exists() {
            return Self::parse(&path, &read_file(&path)?, vocab, template);
        }
        Ok(Self::without_tokenizer(template))
    }

    /// Reads the content of a `tokenizer.json`; `path` is for messages. Ignores the sections `truncation` and
    /// `padding`, as the reference does: they are left from training.
    ///
    /// # Errors
    /// The content is damaged, or a token other than an added one is beyond the model's vocabulary. Published folders
    /// have added tokens beyond it, for images; [`Limits::check`](crate::server::Limits::check) rejects their use.
    pub fn parse(path: &Path, content: &[u8], vocab: usize, template: Option<Template>) -> Result<Self> {
        let wrong = |what: String| Error::model(format!("{}: {what}", path.display()));
        // The crate panics on merges that are longer than every token.
        let tokenizer = catch_unwind(|| Tokenizer::from_bytes(content));
        let tokenizer = tokenizer.unwrap_or_else(|_| Err("model.merges do not form tokens".into()));
        let mut tokenizer = tokenizer.map_err(|e| wrong(e.to_string()))?;
        tokenizer.with_padding(None).with_truncation(None).map_err(|e| wrong(e.to_string()))?;
        let longest = tokenizer.get_vocab(true).keys().map(String::len).max().unwrap_or(1);
        let added = tokenizer.get_added_tokens_decoder();
        let mut own = tokenizer.get_vocab(false);
        own.retain(|_, id| *id as usize >= vocab && !added.contains_key(id));
        if let Some((token, id)) = own.into_iter().max_by_key(|(_, id)| *id) {
            return Err(wrong(format!("token {token:?} has id {id}, but the model's vocabulary has {vocab} tokens")));
        }
        Ok(Self::new(tokenizer, template, longest))
    }

    /// Returns the text of a model without a tokenizer: prompts are token ids.
    pub fn without_tokenizer(template: Option<Template>) -> Self {
        Self { template, ..Self::default() }
    }

    pub(crate) fn new(tokenizer: Tokenizer, template: Option<Template>, longest: usize) -> Self {
        let letter = ["a", "e", "x", "A"].into_iter().find_map(|letter| {
            let id = tokenizer.token_to_id(letter)?;
            (tokenizer.decode(&[id], true).ok()? == letter).then_some(id)
        });
        let coding = Coding::new(&tokenizer);
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
                let (text, before) = (self.decode_shown(&[letter, token]), self.decode_shown(&[letter]));
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

    /// Returns the tokens of the prompt for the assistant's next turn. The model's template makes the prompt.
    ///
    /// # Errors
    /// See [`Text::render`]; or the prompt cannot be encoded.
    pub fn chat(&self, messages: &[Message]) -> Result<Vec<u32>> {
        let message = |m: &Message| json!({ "role": m.role, "content": m.content });
        let messages: Vec<Value> = messages.iter().map(message).collect();
        // The template's output already contains special tokens.
        self.encode_with(&self.render(&messages, &Map::new())?, false)
    }

    /// Returns the text of the prompt for the assistant's next turn. `messages` have the template's form, and
    /// `arguments` are passed to the template.
    ///
    /// # Errors
    /// There is no template, or it rejects the messages.
    pub fn render(&self, messages: &[Value], arguments: &Map<String, Value>) -> Result<String> {
        self.template()?.render(messages, arguments)
    }

    /// Returns the chat template.
    ///
    /// # Errors
    /// There is none.
    pub fn template(&self) -> Result<&Template> {
        let missing = "the model has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json): \
                       start the program with --chat-template FILE";
        self.template.as_ref().ok_or_else(|| Error::request(missing))
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
        word.parse().map_err(|_| Error::request(format!("the model has no tokenizer, and {word:?} is not a token id")))
    };
    words(text).map(id).collect()
}

#[cfg(test)]
#[path = "../tests/common/byte_tokenizer.rs"]
mod byte_tokenizer;

#[cfg(test)]
mod tests {
    use super::byte_tokenizer::byte_tokenizer;
    use super::*;

    #[test]
    fn added_tokens_past_the_vocabulary_are_accepted() {
        let path = Path::new("tokenizer.json");
        let parse = |tokenizer: &Value| Text::parse(path, tokenizer.to_string().as_bytes(), 256, None);
        let mut tokenizer = byte_tokenizer(256);
        let image = "<image_soft_token>";
        tokenizer["added_tokens"] = json!([{
            "id": 256, "content": image, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        }]);
        let text = parse(&tokenizer).expect("accepted");
        assert_eq!(text.encode(&format!("a{image}b")).expect("tokens"), [97, 256, 98]);
        // Some folders also list it in the vocabulary.
        tokenizer["model"]["vocab"][image] = json!(256);
        assert!(parse(&tokenizer).is_ok());
        tokenizer["model"]["vocab"]["other"] = json!(257);
        let error = parse(&tokenizer).err().expect("another token is past the vocabulary");
        assert!(error.message.contains("\"other\" has id 257"), "{error}");
    }

    /// The crate panics on this merge, which is longer than every token.
    #[test]
    fn merges_that_form_no_token_are_refused() {
        let mut tokenizer = byte_tokenizer(256);
        tokenizer["model"]["continuing_subword_prefix"] = json!("##");
        tokenizer["model"]["merges"] = json!([["<0x41>", "<0x42>"]]);
        let content = tokenizer.to_string();
        let error = Text::parse(Path::new("t.json"), content.as_bytes(), 256, None).err().expect("a damaged file");
        assert_eq!(error.message, "t.json: model.merges do not form tokens");
    }

    /// Both sections are left from training, and the reference ignores them.
    #[test]
    fn truncation_and_padding_are_ignored() {
        let mut tokenizer = byte_tokenizer(256);
        tokenizer["truncation"] = json!({
            "direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0,
        });
        tokenizer["padding"] = json!({
            "strategy": { "Fixed": 32 }, "direction": "Left", "pad_to_multiple_of": null, "pad_id": 0,
            "pad_type_id": 0, "pad_token": "<0x00>",
        });
        let content = tokenizer.to_string();
        let text = Text::parse(Path::new(""), content.as_bytes(), 256, None).expect("a tokenizer");
        for len in [3, 16, 24, 40] {
            assert_eq!(text.encode(&"a".repeat(len)).expect("tokens"), vec![97; len]);
        }
    }
}
