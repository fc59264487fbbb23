//! Converts between text and tokens: by the model's tokenizer and its chat template, and by decoding tokens as they
//! arrive.
//!
//! A model without `tokenizer.json` takes prompts as token ids, and its answers are token ids.

use std::borrow::Cow;
use std::path::Path;

use serde_json::{Map, Value, json};
use tokenizers::Tokenizer;

use crate::error::{Error, Result};
use crate::fields::read_file;
use crate::gguf::Gguf;
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
}

impl Text {
    /// Reads `tokenizer.json`, if there is one, and the chat template of `chat_template.jinja` or
    /// `tokenizer_config.json`; or the metadata of a GGUF file. `template` replaces this template.
    ///
    /// # Errors
    /// An existing file is unreadable or damaged, or see [`Text::parse`].
    pub fn read(dir: &Path, vocab: usize, template: Option<Template>) -> Result<Self> {
        let template = match template {
            Some(template) => Some(template),
            None => Template::read(dir)?,
        };
        if dir.is_file() {
            return Gguf::open(dir)?.text(vocab, template);
        }
        let path = dir.join("tokenizer.json");
        match path.exists() {
            true => Self::parse(&path, &read_file(&path)?, vocab, template),
            false => Ok(Self::without_tokenizer(template)),
        }
    }

    /// Reads the content of a `tokenizer.json`; `path` is for messages. Ignores the sections `truncation` and
    /// `padding`, as the reference does: they are left from training.
    ///
    /// # Errors
    /// The content is damaged, or a token other than an added one is beyond the model's vocabulary. Published folders
    /// have added tokens beyond it, for images; [`Limits::check`](crate::server::Limits::check) rejects their use.
    pub fn parse(
        path: &Path,
        content: &[u8],
        vocab: usize,
        template: Option<Template>,
    ) -> Result<Self> {
        let wrong = |what: String| Error::model(format!("{}: {what}", path.display()));
        let mut tokenizer = Tokenizer::from_bytes(content).map_err(|e| wrong(e.to_string()))?;
        tokenizer.with_padding(None).with_truncation(None).map_err(|e| wrong(e.to_string()))?;
        let longest = tokenizer.get_vocab(true).keys().map(String::len).max().unwrap_or(1);
        let added = tokenizer.get_added_tokens_decoder();
        let mut own = tokenizer.get_vocab(false);
        own.retain(|_, id| *id as usize >= vocab && !added.contains_key(id));
        if let Some((token, id)) = own.into_iter().max_by_key(|(_, id)| *id) {
            return Err(wrong(format!(
                "token {token:?} has id {id}, but the model's vocabulary has {vocab} tokens"
            )));
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
        Self { tokenizer: Some(tokenizer), template, longest, letter }
    }

    /// Returns an upper bound of the bytes of a token's text. Without a tokenizer, this text is an id with its
    /// separator.
    pub fn longest_token(&self) -> usize {
        if self.has_tokenizer() { self.longest } else { 16 }
    }

    /// Returns the text of one token inside a longer text, with its spaces.
    pub fn piece(&self, token: u32) -> String {
        let Some(letter) = self.letter else { return self.decode(&[token]) };
        let text = self.decode(&[letter, token]);
        let before = self.decode(&[letter]);
        text.strip_prefix(&before).map_or_else(|| self.decode(&[token]), str::to_owned)
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
        let encoding = tokenizer.encode_fast(text, special);
        let encoding =
            encoding.map_err(|e| Error::request(format!("cannot encode the text: {e}")))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Returns the text of tokens, without special ones. Without a tokenizer: their ids, separated by spaces.
    pub fn decode(&self, tokens: &[u32]) -> String {
        match &self.tokenizer {
            Some(tokenizer) => tokenizer.decode(tokens, true).unwrap_or_default(),
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

fn parse_ids(text: &str) -> Result<Vec<u32>> {
    let words = text.split([' ', ',', '\t', '[', ']']).filter(|word| !word.is_empty());
    let id = |word: &str| {
        word.parse().map_err(|_| {
            Error::request(format!(
                "the model has no tokenizer.json, and {word:?} is not a token id"
            ))
        })
    };
    words.map(id).collect()
}

/// At this number of held-back tokens, the decoder emits them even if they end inside a character. A character has at
/// most four bytes, so later tokens cannot complete it.
const HELD_MAX: usize = 8;

/// Converts tokens to text as they arrive, and holds back incomplete characters.
#[derive(Default)]
pub struct Decoder {
    tokens: Vec<u32>,
    /// Index of the first token that is decoded. The emitted tokens from here on are context, so that spaces between
    /// words are correct.
    context: usize,
    /// Number of emitted tokens.
    emitted: usize,
}

impl Decoder {
    /// Returns the text that is complete with this token.
    pub fn push(&mut self, text: &Text, token: u32) -> String {
        self.tokens.push(token);
        if !text.has_tokenizer() {
            return format!("{token} ");
        }
        let before = text.decode(&self.tokens[self.context..self.emitted]);
        let now = text.decode(&self.tokens[self.context..]);
        let is_held = self.tokens.len() - self.emitted < HELD_MAX;
        if is_held && (now.ends_with('\u{FFFD}') || now.len() <= before.len()) {
            return String::new();
        }
        self.emit(text, &before, &now)
    }

    /// Returns the held-back text at the end of the tokens, with replacement characters for invalid bytes.
    pub fn rest(&mut self, text: &Text) -> String {
        if !text.has_tokenizer() {
            return String::new();
        }
        let before = text.decode(&self.tokens[self.context..self.emitted]);
        let now = text.decode(&self.tokens[self.context..]);
        self.emit(text, &before, &now)
    }

    fn emit(&mut self, text: &Text, before: &str, now: &str) -> String {
        self.context = self.emitted;
        self.emitted = self.tokens.len();
        let new = now.strip_prefix(before).map(str::to_owned);
        // Invalid bytes may also damage the context.
        new.unwrap_or_else(|| text.decode(&self.tokens[self.context..]))
    }
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
        let parse =
            |tokenizer: &Value| Text::parse(path, tokenizer.to_string().as_bytes(), 256, None);
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

    /// A model whose tokens are single bytes.
    fn bytes() -> Text {
        let tokenizer = byte_tokenizer(256).to_string();
        let tokenizer = Tokenizer::from_bytes(tokenizer).expect("a tokenizer");
        Text::new(tokenizer, None, 1)
    }

    #[test]
    fn characters_are_emitted_whole() {
        let (text, mut decoder) = (bytes(), Decoder::default());
        let mut push = |byte: u8| decoder.push(&text, byte.into());
        assert_eq!(
            "\u{20ac}!".bytes().map(&mut push).collect::<Vec<_>>(),
            ["", "", "\u{20ac}", "!"]
        );
        assert_eq!((push(0xE2), push(0x82)), (String::new(), String::new()));
        assert_eq!(decoder.rest(&text), "\u{FFFD}\u{FFFD}", "the text ends inside a character");
        assert_eq!(decoder.rest(&text), "");
    }

    #[test]
    fn invalid_utf8_is_not_held_back_for_ever() {
        let (text, mut decoder) = (bytes(), Decoder::default());
        let decoded: String = (0..100).map(|_| decoder.push(&text, 0x80)).collect();
        assert!(
            decoded.chars().count() > 80 && decoded.chars().all(|c| c == '\u{FFFD}'),
            "{decoded:?}"
        );
        let decoded: String = (0..100).map(|i| decoder.push(&text, 97 + i % 26)).collect();
        assert!(decoded.ends_with("uv") && decoded.contains("abc"), "{decoded:?}");
    }
}
