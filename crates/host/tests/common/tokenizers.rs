//! Small tokenizers of three families. Their vocabularies contain tokens whose text depends on their neighbours.

#![allow(dead_code)] // each test uses a part

use serde_json::{Map, Value, json};

/// Returns `tokenizer.json` with these tokens. The first `special` tokens are special.
fn tokenizer(tokens: &[String], special: usize, decoder: Value) -> Value {
    let vocab: Map<String, Value> = tokens.iter().zip(0..).map(|(name, id)| (name.clone(), json!(id))).collect();
    let added = |(id, name): (usize, &String)| {
        json!({ "id": id, "content": name, "special": true, "normalized": false, "single_word": false,
            "lstrip": false, "rstrip": false })
    };
    json!({
        "version": "1.0",
        "added_tokens": tokens[..special].iter().enumerate().map(added).collect::<Vec<_>>(),
        "normalizer": null,
        "pre_tokenizer": null,
        "post_processor": null,
        "decoder": decoder,
        "model": { "type": "BPE", "vocab": vocab, "merges": [], "unk_token": null, "byte_fallback": false },
    })
}

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

/// Returns the letter of a byte in GPT-2's alphabet.
fn letter(byte: u8) -> char {
    let printable = |byte: u8| matches!(byte, 33..=126 | 161..=172 | 174..);
    match printable(byte) {
        true => byte.into(),
        false => {
            let before = (0..byte).filter(|&other| !printable(other)).count() as u32;
            char::from_u32(256 + before).expect("a letter")
        }
    }
}

/// Two special tokens, a token for each byte from `BYTES` on, then words and parts of characters.
pub fn byte_level() -> Value {
    byte_level_with(json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true }))
}

/// As [`byte_level`], with another decoder.
pub fn byte_level_with(decoder: Value) -> Value {
    let mut tokens = names(&["<|im_start|>", "<|im_end|>"]);
    tokens.extend((0..=255).map(|byte| letter(byte).to_string()));
    let words: [&[u8]; 9] = [
        b" the",
        b" a",
        b"user\n",
        "\u{FFFD}".as_bytes(),
        "\u{4f60}\u{597d}".as_bytes(),
        b"x\xE4\xBD",
        b"\xA0y\xE2",
        b"\x82\xAC ",
        b"\xFF\xFE",
    ];
    tokens.extend(words.iter().map(|word| word.iter().map(|&byte| letter(byte)).collect()));
    tokenizer(&tokens, 2, decoder)
}

/// Three special tokens (the second one begins each prompt), a token for each byte from `BYTES + 1` on, then words.
pub fn sentence_piece() -> Value {
    let strip = json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 });
    let mut whole = sentence_piece_with(sentence_piece_decoder(&[strip]));
    whole["normalizer"] = json!({ "type": "Sequence", "normalizers": [
        { "type": "Prepend", "prepend": "\u{2581}" },
        { "type": "Replace", "pattern": { "String": " " }, "content": "\u{2581}" },
    ]});
    whole["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": [{ "SpecialToken": { "id": "<s>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
        "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
        "special_tokens": { "<s>": { "id": "<s>", "ids": [1], "tokens": ["<s>"] } },
    });
    whole["model"]["byte_fallback"] = json!(true);
    whole
}

/// Returns the usual decoder, followed by others.
pub fn sentence_piece_decoder(more: &[Value]) -> Value {
    let parts = [
        json!({ "type": "Replace", "pattern": { "String": "\u{2581}" }, "content": " " }),
        json!({ "type": "ByteFallback" }),
        json!({ "type": "Fuse" }),
    ];
    let parts = [&parts, more].concat();
    json!({ "type": "Sequence", "decoders": parts })
}

/// As [`sentence_piece`], with another decoder.
pub fn sentence_piece_with(decoder: Value) -> Value {
    let mut tokens = names(&["<unk>", "<s>", "</s>"]);
    tokens.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
    let words = ["\u{2581}", "\u{2581}\u{2581}", "\u{2581}the", "the", "a", "t", "h", "e", ".", "\u{FFFD}", "\u{4f60}"];
    tokens.extend(names(&words));
    tokens.extend(names(&["\u{2581}t", "\u{2581}th"]));
    let mut whole = tokenizer(&tokens, 3, decoder);
    whole["model"]["merges"] = json!(["\u{2581} t", "\u{2581}t h", "\u{2581}th e"]);
    whole
}

/// Two special tokens, then words and suffixes.
pub fn word_piece() -> Value {
    word_piece_with(json!({ "type": "WordPiece", "prefix": "##", "cleanup": true }))
}

/// As [`word_piece`], with another decoder.
pub fn word_piece_with(decoder: Value) -> Value {
    let tokens = names(&[
        "[CLS]",
        "[SEP]",
        "[UNK]",
        "the",
        "cat",
        "##s",
        "##",
        ".",
        ",",
        "'",
        "n't",
        "do",
        "not",
        "'s",
        "a",
        "\u{FFFD}",
        "\u{4f60}",
        "##\u{597d}",
        "end</w>",
        "</w>",
    ]);
    let mut whole = tokenizer(&tokens, 2, decoder);
    let vocab = whole["model"]["vocab"].take();
    whole["normalizer"] = json!({ "type": "Lowercase" });
    whole["pre_tokenizer"] = json!({ "type": "BertPreTokenizer" });
    whole["model"] = json!({ "type": "WordPiece", "vocab": vocab, "unk_token": "[UNK]",
        "continuing_subword_prefix": "##", "max_input_chars_per_word": 100 });
    whole
}
