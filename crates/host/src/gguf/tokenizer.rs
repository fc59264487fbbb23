//! The tokenizer and the chat template of a GGUF file.
//!
//! A file has tokens, their types, and merges or scores. The normaliser, the pre-tokenizer and the decoder follow from
//! the model's name and, for byte-level tokenizers, from the pre-tokenizer's name. They have the structure of the
//! `tokenizer.json` that the models publish.

use std::collections::HashMap;

use serde_json::{Map, Value, json};
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::{AddedToken, DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, Tokenizer};

use super::{Gguf, Kind};
use crate::error::Result;
use crate::fields::Fields;
use crate::template::Template;
use crate::text::Text;

/// Type of tokens that are text.
const NORMAL: u64 = 1;
/// Types of tokens that are not text.
const SPECIAL: [u64; 2] = [2, 3];
/// Type of tokens that are matched before all others, although they are text.
const USER_DEFINED: u64 = 4;

/// Maximum bytes of a token. The longest tokens of published models have a few hundred.
const TOKEN_BYTES_MAX: usize = 1024;
/// Maximum bytes of the merges that follow from scores. Those of 262,144 tokens have about 4 MB.
const MERGE_BYTES_MAX: usize = 1 << 27;

const LLAMA3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
);
const TEKKEN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);

/// Panic message about JSON that this module wrote.
const PART: &str = "a part of a tokenizer";

/// Tokens in the order of their ids.
struct Vocabulary {
    tokens: Vec<String>,
    types: Vec<u64>,
}

/// The parts of a tokenizer around its vocabulary.
struct Parts {
    model: BPE,
    normalizer: Value,
    pre_tokenizer: Value,
    decoder: Value,
    /// Whether texts begin with the bos token if the file does not say.
    adds_bos: bool,
}

impl Gguf {
    /// Returns the tokenizer, with this chat template or the file's own. Without a tokenizer, prompts are token ids.
    ///
    /// # Errors
    /// A key is invalid, the tokenizer is not implemented exactly, or it has tokens beyond the model's vocabulary.
    pub fn text(&self, vocab: usize, template: Option<Template>) -> Result<Text> {
        let fields = self.fields()?;
        let config = self.tokenizer_config()?;
        let own = (template.is_none() && config["chat_template"].is_string())
            .then(|| Template::of_config(&self.path, &config));
        let template = own.transpose()?.or(template);
        let Some(model) = fields.text("tokenizer.ggml.model")? else {
            return Ok(Text::without_tokenizer(template));
        };
        let mut vocabulary = Vocabulary::read(&fields)?;
        if let Some(token) = vocabulary.tokens.get(vocab) {
            return Err(
                fields.wrong(&format!("token {token:?} has id {vocab}, but the model's vocabulary has {vocab} tokens"))
            );
        }
        let parts = match model {
            "gpt2" => byte_level(&fields, &vocabulary)?,
            "llama" => sentence_pieces(&fields, &mut vocabulary, self.kind)?,
            other => {
                let what = format!("tokenizer.ggml.model {other:?} is not implemented, only gpt2 and llama");
                return Err(fields.wrong(&what));
            }
        };
        let tokenizer = build(&fields, &vocabulary, parts)?;
        let longest = vocabulary.tokens.iter().map(String::len).max().unwrap_or(1);
        Ok(Text::new(tokenizer, template, longest))
    }

    /// Returns the chat template and the special tokens that it may use, as a `tokenizer_config.json` has them.
    ///
    /// # Errors
    /// A key is invalid.
    pub fn tokenizer_config(&self) -> Result<Value> {
        let fields = self.fields()?;
        let mut config = Map::new();
        if let Some(source) = fields.text("tokenizer.chat_template")? {
            config.insert("chat_template".to_owned(), source.into());
        }
        if fields.get("tokenizer.ggml.tokens").is_none() {
            return Ok(config.into());
        }
        let vocabulary = Vocabulary::read(&fields)?;
        for (token, name) in
            [("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")]
        {
            if let Some((text, _)) = vocabulary.named(&fields, name)? {
                config.insert(token.to_owned(), text.into());
            }
        }
        Ok(config.into())
    }
}

impl Vocabulary {
    fn read(fields: &Fields<'_>) -> Result<Self> {
        let tokens: Vec<String> = list(fields, "tokenizer.ggml.tokens", |token| token.as_str().map(str::to_owned))?;
        let types = match fields.get("tokenizer.ggml.token_type") {
            None => vec![NORMAL; tokens.len()],
            Some(_) => list(fields, "tokenizer.ggml.token_type", Value::as_u64)?,
        };
        if types.len() != tokens.len() {
            let (types, tokens) = (types.len(), tokens.len());
            return Err(fields.wrong(&format!("there are {types} types of {tokens} tokens")));
        }
        if let Some(token) = tokens.iter().find(|token| token.len() > TOKEN_BYTES_MAX) {
            let what = format!("a token of {} bytes is longer than {TOKEN_BYTES_MAX}", token.len());
            return Err(fields.wrong(&what));
        }
        Ok(Self { tokens, types })
    }

    fn ids(&self) -> HashMap<&str, u32> {
        self.tokens.iter().zip(0..).map(|(token, id)| (token.as_str(), id)).collect()
    }

    fn owned(&self) -> Vocab {
        self.tokens.iter().cloned().zip(0..).collect()
    }

    /// Returns the pairs of tokens whose concatenation is a token, in the order of the published merges: by the score
    /// of the result, then by the characters of both parts. The results are tokens that SentencePiece trained, with
    /// their scores, or others, whose scores are 0 in SentencePiece but not always in GGUF files.
    ///
    /// # Errors
    /// The pairs take more than [`MERGE_BYTES_MAX`].
    fn merges(&self, fields: &Fields<'_>, scores: &[f64]) -> Result<Vec<(String, String)>> {
        let ids = self.ids();
        let (mut merges, mut bytes) = (Vec::new(), 0);
        for ((token, kind), score) in self.tokens.iter().zip(&self.types).zip(scores) {
            // 0.0 + -0.0 is 0.0, which `total_cmp` needs.
            let score = 0.0 + if *kind == NORMAL { *score } else { 0.0 };
            let splits = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
            let mut pairs: Vec<_> = splits
                .enumerate()
                .filter_map(|(i, (left, right))| {
                    let pair = (*ids.get(left)?, *ids.get(right)?);
                    Some((score, (i + 1, right.chars().count()), pair, (left, right)))
                })
                .collect();
            pairs.sort_by_key(|(_, _, pair, _)| *pair);
            bytes += token.len() * pairs.len();
            if bytes > MERGE_BYTES_MAX {
                let what = format!("the tokens form merges of more than {MERGE_BYTES_MAX} bytes");
                return Err(fields.wrong(&what));
            }
            merges.extend(pairs);
        }
        merges.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.cmp(&a.1)));
        let owned = |(left, right): (&str, &str)| (left.to_owned(), right.to_owned());
        Ok(merges.into_iter().map(|(.., pair)| owned(pair)).collect())
    }

    /// Returns the token that a key such as `bos_token_id` names.
    fn named(&self, fields: &Fields<'_>, name: &str) -> Result<Option<(&str, u32)>> {
        let key = format!("tokenizer.ggml.{name}_token_id");
        let Some(&id) = fields.tokens(&key)?.first() else { return Ok(None) };
        match self.tokens.get(id as usize) {
            Some(token) => Ok(Some((token, id))),
            None => {
                let count = self.tokens.len();
                Err(fields.wrong(&format!("{key} {id} is not one of {count} tokens")))
            }
        }
    }
}

/// Returns the elements of a list.
fn list<'a, T>(fields: &Fields<'a>, key: &str, element: impl Fn(&'a Value) -> Option<T>) -> Result<Vec<T>> {
    let values = fields.get(key).and_then(Value::as_array);
    let values = values.ok_or_else(|| fields.wrong(&format!("the list {key} is missing")))?;
    let unfit = |value| fields.wrong(&format!("{key}: {value} has the wrong type"));
    values.iter().map(|value| element(value).ok_or_else(|| unfit(value))).collect()
}

/// Returns the parts of a byte-level tokenizer.
fn byte_level(fields: &Fields<'_>, vocabulary: &Vocabulary) -> Result<Parts> {
    let bytes = |regex| {
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
            "use_regex": regex })
    };
    let sequence = |first, second| json!({ "type": "Sequence", "pretokenizers": [first, second] });
    let split = |pattern| {
        let pattern = json!({ "Regex": pattern });
        json!({ "type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": false })
    };
    let key = "tokenizer.ggml.pre";
    let (pre_tokenizer, whole_words) = match fields.text(key)? {
        Some("llama-bpe" | "llama3" | "llama-v3") => (sequence(split(LLAMA3), bytes(false)), true),
        Some("tekken") => (sequence(split(TEKKEN), bytes(false)), true),
        Some("smollm") => (sequence(json!({ "type": "Digits", "individual_digits": true }), bytes(true)), false),
        Some("gpt-2") => (bytes(true), false),
        Some(other) => {
            let known = "gpt-2, llama-bpe, smollm and tekken";
            return Err(fields.wrong(&format!("{key} {other:?} is not implemented, only {known}")));
        }
        None => return Err(fields.wrong(&format!("{key} is missing: convert the model again"))),
    };
    let merges = list(fields, "tokenizer.ggml.merges", |merge| {
        let (left, right) = merge.as_str()?.split_once(' ')?;
        Some((left.to_owned(), right.to_owned()))
    })?;
    // The crate's builder panics on a merge that is longer than every token.
    let ids = vocabulary.ids();
    let is_token = |(left, right): &&(String, String)| ids.contains_key(&*format!("{left}{right}"));
    if let Some((left, right)) = merges.iter().find(|merge| !is_token(merge)) {
        let what = format!("tokenizer.ggml.merges: {left:?} and {right:?} form no token");
        return Err(fields.wrong(&what));
    }
    let model = BPE::builder().vocab_and_merges(vocabulary.owned(), merges);
    let model = model.ignore_merges(whole_words);
    Ok(Parts {
        model: model.build().map_err(|e| fields.wrong(&format!("tokenizer: {e}")))?,
        normalizer: Value::Null,
        pre_tokenizer,
        decoder: bytes(true),
        adds_bos: whole_words,
    })
}

/// Returns the parts of a SentencePiece tokenizer. Its merges are not in the file, but follow from the tokens' scores.
fn sentence_pieces(fields: &Fields<'_>, vocabulary: &mut Vocabulary, kind: Kind) -> Result<Parts> {
    if fields.flag("tokenizer.ggml.remove_extra_whitespaces")? {
        return Err(fields.wrong("tokenizer.ggml.remove_extra_whitespaces is not implemented"));
    }
    let begins_with_space = fields.flag_or("tokenizer.ggml.add_space_prefix", kind == Kind::Llama)?;
    // The converter writes tokens of spaces as they are.
    for token in vocabulary.tokens.iter_mut().filter(|token| token.chars().all(|c| c == ' ')) {
        *token = "\u{2581}".repeat(token.len());
    }
    let scores = list(fields, "tokenizer.ggml.scores", Value::as_f64)?;
    if scores.len() != vocabulary.tokens.len() {
        let (scores, tokens) = (scores.len(), vocabulary.tokens.len());
        return Err(fields.wrong(&format!("there are {scores} scores of {tokens} tokens")));
    }
    let model = BPE::builder().vocab_and_merges(vocabulary.owned(), vocabulary.merges(fields, &scores)?);
    let model = match vocabulary.named(fields, "unknown")? {
        Some((token, _)) => model.unk_token(token.to_owned()),
        None => model,
    };
    let model = model.fuse_unk(true).byte_fallback(true).build();
    let escape = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "\u{2581}" });
    let prepend = json!({ "type": "Prepend", "prepend": "\u{2581}" });
    let mut decoders = vec![
        json!({ "type": "Replace", "pattern": { "String": "\u{2581}" }, "content": " " }),
        json!({ "type": "ByteFallback" }),
        json!({ "type": "Fuse" }),
    ];
    if begins_with_space {
        decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    Ok(Parts {
        model: model.map_err(|e| fields.wrong(&format!("tokenizer: {e}")))?,
        normalizer: if begins_with_space {
            json!({ "type": "Sequence", "normalizers": [prepend, escape] })
        } else {
            escape
        },
        pre_tokenizer: Value::Null,
        decoder: json!({ "type": "Sequence", "decoders": decoders }),
        adds_bos: true,
    })
}

/// Builds the tokenizer.
fn build(fields: &Fields<'_>, vocabulary: &Vocabulary, parts: Parts) -> Result<Tokenizer> {
    let named = |name: &str, is_added| match (is_added, vocabulary.named(fields, name)?) {
        (false, _) => Ok(None),
        (true, Some(token)) => Ok(Some(token)),
        (true, None) => Err(fields.wrong(&format!("tokenizer.ggml.{name}_token_id is missing"))),
    };
    let bos = named("bos", fields.flag_or("tokenizer.ggml.add_bos_token", parts.adds_bos)?)?;
    let eos = named("eos", fields.flag_or("tokenizer.ggml.add_eos_token", false)?)?;
    let wrong = |e: &dyn std::fmt::Display| fields.wrong(&format!("tokenizer: {e}"));
    let mut tokenizer = Tokenizer::new(parts.model);
    let normalizer: Option<NormalizerWrapper> = serde_json::from_value(parts.normalizer).expect(PART);
    tokenizer.with_normalizer(normalizer).map_err(|e| wrong(&e))?;
    let pre_tokenizer: Option<PreTokenizerWrapper> = serde_json::from_value(parts.pre_tokenizer).expect(PART);
    tokenizer.with_pre_tokenizer(pre_tokenizer);
    let decoder: Option<DecoderWrapper> = serde_json::from_value(parts.decoder).expect(PART);
    tokenizer.with_decoder(decoder);
    let added: Option<PostProcessorWrapper> = serde_json::from_value(around(bos, eos)).expect(PART);
    tokenizer.with_post_processor(added);
    let typed = |wanted: &'static [u64], special| {
        let tokens = vocabulary.tokens.iter().zip(&vocabulary.types);
        let tokens = tokens.filter(|(_, kind)| wanted.contains(kind));
        tokens.map(move |(token, _)| AddedToken::from(token.as_str(), special).normalized(false))
    };
    tokenizer.add_special_tokens(typed(&SPECIAL, true)).map_err(|e| wrong(&e))?;
    tokenizer.add_tokens(typed(&[USER_DEFINED], false)).map_err(|e| wrong(&e))?;
    Ok(tokenizer)
}

/// Returns the post-processor that adds these tokens around a text.
fn around(bos: Option<(&str, u32)>, eos: Option<(&str, u32)>) -> Value {
    let special = |(token, _): (&str, u32)| json!({ "SpecialToken": { "id": token, "type_id": 0 } });
    let text = |name| json!({ "Sequence": { "id": name, "type_id": 0 } });
    let single: Vec<Value> = bos.map(special).into_iter().chain([text("A")]).chain(eos.map(special)).collect();
    let tokens: Map<String, Value> = bos
        .into_iter()
        .chain(eos)
        .map(|(token, id)| (token.to_owned(), json!({ "id": token, "ids": [id], "tokens": [token] })))
        .collect();
    let pair = [text("A"), text("B")];
    json!({ "type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens })
}
