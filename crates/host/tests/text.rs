//! Tests the text of tokens as they arrive against all tokens decoded at once by the tokenizer.

mod common;

use common::files::Dir;
use common::tokenizers::{
    byte_level, byte_level_with, sentence_piece, sentence_piece_decoder, sentence_piece_with, word_piece,
    word_piece_with,
};
use kvarena_host::decoder::Decoder;
use kvarena_host::sample::splitmix;
use kvarena_host::text::Text;
use serde_json::{Value, json};
use tokenizers::Tokenizer;

/// Random sequences of each family of tokenizers.
const SEQUENCES: u32 = 100_000;

fn read(tokenizer: &Value) -> Text {
    let dir = Dir::new();
    dir.write("tokenizer.json", tokenizer.to_string());
    Text::read(dir.path(), 1000, None).expect("a tokenizer")
}

/// Returns all text of a decoder that receives these tokens.
fn streamed(text: &Text, mut decoder: Decoder, answer: &[u32]) -> String {
    let all: String = answer.iter().map(|&token| decoder.push(text, token)).collect();
    all + &decoder.rest(text)
}

/// Checks random sequences, cut at each place into a prompt and its answer. The text of both together, and that of the
/// answer after the prompt's own text, equals the text of all tokens. Answers omit special tokens.
#[track_caller]
fn streams_as_decoded_at_once(tokenizer: &Value, sequences: u32) {
    let (text, reference) = (read(tokenizer), tokenizer.to_string());
    let reference: Tokenizer = reference.parse().expect("a tokenizer");
    let whole = |tokens: &[u32]| {
        if tokens.iter().any(|&t| reference.id_to_token(t).is_some()) {
            reference.decode(tokens, false).expect("decoded")
        } else {
            String::new()
        }
    };
    let vocab = reference.get_vocab_size(true) as u64;
    let special = reference.get_added_tokens_decoder().len() as u64;
    let (mut state, mut joined) = (1, 0);
    let mut below = |n: u64| splitmix(&mut state) % n;
    for _ in 0..sequences {
        let mut tokens: Vec<u32> = Vec::new();
        if below(16) == 0 {
            tokens.extend((0..7 + below(4)).map(|_| below(special) as u32));
        }
        for _ in 0..below(8) {
            // Words are the last tokens; one token is past the vocabulary.
            tokens.push(match below(8) {
                0 => below(special),
                1..4 => below(vocab + 1),
                _ => vocab - 1 - below(12.min(vocab)),
            } as u32);
        }
        let (mut begun, mut before) = (Decoder::default(), String::new());
        for cut in 0..=tokens.len() {
            let (prompt, answer) = tokens.split_at(cut);
            let shown = answer.iter().copied().filter(|&token| u64::from(token) >= special);
            let expected = whole(&prompt.iter().copied().chain(shown).collect::<Vec<_>>());
            let all = before.clone() + &streamed(&text, begun.clone(), answer);
            assert_eq!(all, expected, "{prompt:?} and {answer:?}");
            if let Some(&token) = answer.first() {
                before += &begun.push_shown(&text, token);
            }
            let (own, alone) = (whole(prompt), streamed(&text, Decoder::after(&text, prompt), answer));
            if expected.starts_with(&own) && !own.ends_with('\u{FFFD}') {
                joined += 1;
                assert_eq!(own + &alone, expected, "{prompt:?} then {answer:?}");
            } else {
                // The cut is inside a character, or bytes of the answer make bytes of the prompt invalid.
                assert!(expected.ends_with(&alone), "{prompt:?} then {answer:?}: {alone:?}, {expected:?}");
            }
            if cut == 0 {
                assert_eq!(text.decode(&tokens), expected);
            }
            if cut == tokens.len() {
                assert_eq!(text.decode_shown(&tokens), expected);
            }
        }
    }
    assert!(joined > 2 * sequences, "most cuts are between characters: {joined}");
}

#[test]
fn byte_level_text_is_decoded_as_it_arrives() {
    streams_as_decoded_at_once(&byte_level(), SEQUENCES);
}

#[test]
fn sentence_piece_text_is_decoded_as_it_arrives() {
    streams_as_decoded_at_once(&sentence_piece(), SEQUENCES);
}

#[test]
fn word_piece_text_is_decoded_as_it_arrives() {
    streams_as_decoded_at_once(&word_piece(), SEQUENCES);
}

#[test]
fn other_decoders_stream_as_they_decode_at_once() {
    let sequence = |parts: &[Value]| json!({ "type": "Sequence", "decoders": parts });
    let replace = json!({ "type": "Replace", "pattern": { "String": "y" }, "content": "Y" });
    let mut metaspace = json!({ "type": "Metaspace", "replacement": "\u{2581}", "split": true });
    metaspace["prepend_scheme"] = "always".into();
    let strip = json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 });
    let bytes = byte_level()["decoder"].take();
    for tokenizer in [
        byte_level_with(sequence(std::slice::from_ref(&bytes))),
        byte_level_with(sequence(&[bytes.clone(), json!({ "type": "Fuse" })])),
        byte_level_with(sequence(&[bytes.clone(), replace])),
        byte_level_with(sequence(&[bytes, strip])),
        sentence_piece_with(sentence_piece_decoder(&[])),
        sentence_piece_with(sequence(&[json!({ "type": "ByteFallback" }), metaspace.clone()])),
        sentence_piece_with(metaspace),
        word_piece_with(json!({ "type": "WordPiece", "prefix": "##", "cleanup": false })),
        word_piece_with(json!({ "type": "BPEDecoder", "suffix": "</w>" })),
        word_piece_with(json!({ "type": "Fuse" })),
        word_piece_with(Value::Null),
    ] {
        streams_as_decoded_at_once(&tokenizer, 5000);
    }
}

#[test]
fn characters_are_emitted_whole_and_at_once() {
    let text = read(&byte_level());
    let mut decoder = Decoder::default();
    let ids = |bytes: &[u8]| bytes.iter().map(|&byte| 2 + u32::from(byte)).collect::<Vec<_>>();
    let mut push = |token: u32| decoder.push(&text, token);
    assert_eq!(ids("\u{20ac}!".as_bytes()).into_iter().map(&mut push).collect::<Vec<_>>(), ["", "", "\u{20ac}", "!"]);
    // A replacement character may be valid text, and special tokens have none.
    let replacements = ids("\u{FFFD}".as_bytes()).repeat(9).into_iter().map(&mut push);
    assert_eq!(replacements.collect::<Vec<_>>(), ["", "", "\u{FFFD}"].repeat(9));
    let special = [0, 1].repeat(6).into_iter().map(&mut push);
    assert!(special.collect::<String>().is_empty());
    assert_eq!((push(258), push(2 + 0xE2)), (" the".into(), String::new()));
    assert_eq!(decoder.rest(&text), "\u{FFFD}", "the text ends inside a character");
    assert_eq!(decoder.rest(&text), "");
}

#[test]
fn the_first_word_keeps_its_space() {
    let text = read(&sentence_piece());
    let prompt = text.encode("the").expect("encoded");
    let word = *prompt.last().expect("a word");
    assert_eq!((prompt.len(), text.decode(&prompt)), (2, "the".into()));
    assert_eq!(streamed(&text, Decoder::after(&text, &prompt), &[word; 2]), " the the");
    assert_eq!(streamed(&text, Decoder::default(), &[word; 2]), "the the");
    assert_eq!((text.piece(word, true), text.piece(word, false)), ("the".into(), " the".into()));
}

#[test]
fn tokens_that_are_parts_of_characters_have_bytes() {
    let (bytes, fallback) = (read(&byte_level()), read(&sentence_piece()));
    assert_eq!(bytes.part(2 + 0xE2), Some(vec![0xE2]));
    assert_eq!(bytes.part(263), Some(b"x\xE4\xBD".to_vec()));
    assert_eq!((fallback.part(3 + 0xE2), fallback.part(1)), (Some(vec![0xE2]), None));
    assert_eq!(bytes.piece(2 + 0xE2, false), "\u{FFFD}");
}

/// Bytes are held back until their run ends; the cost of a long run grows with its length.
#[test]
fn a_long_run_of_bytes_is_decoded_once() {
    let text = read(&sentence_piece());
    let run: Vec<u32> = "\u{20ac}".repeat(50_000).bytes().map(|byte| 3 + u32::from(byte)).collect();
    let mut decoder = Decoder::after(&text, &run);
    assert_eq!(decoder.push(&text, 261), " the");
    assert_eq!(streamed(&text, Decoder::default(), &run).chars().count(), 50_000);
}

#[test]
fn tokens_begin_at_their_characters() {
    let text = read(&sentence_piece());
    // `<s>`, three tokens of the euro sign, one word.
    let prompt = "\u{20ac} the";
    let tokens = text.encode(prompt).expect("encoded");
    let offsets = text.offsets(prompt).expect("encoded");
    assert_eq!((tokens.len(), &offsets[..]), (6, &[0, 0, 0, 0, 0, 1][..]), "{tokens:?}");
    assert_eq!(Text::default().offsets("[1, 23\t4]").expect("ids"), [1, 4, 7]);
}
