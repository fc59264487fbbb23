//! Models and tokenizers in GGUF files. `data/gguf/make.py` writes the files, and what transformers and the package
//! `gguf` make of them.

mod common;

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use common::contiguous::greedy;
use common::files::Dir;
use common::gguf::{pair, string, tensor, whole};
use common::serving::{Setting, requests, serve};
use half::{bf16, f16};
use kvarena_host::error::Result;
use kvarena_host::gguf::Gguf;
use kvarena_host::model::Model;
use kvarena_host::source::Source;
use kvarena_host::text::{Message, Text};
use serde_json::Value;

/// Bytes of the header of `llama-tied.gguf`.
const HEADER: u64 = 13_037;

const MODELS: [&str; 3] = ["llama", "llama-tied", "gemma3"];

fn file(name: &str) -> PathBuf {
    common::dir("gguf").join(format!("{name}.gguf"))
}

fn open(name: &str) -> Gguf {
    Gguf::open(&file(name)).expect("the file opens")
}

/// Reads the tokenizer of a file whose vocabulary has `vocab` tokens.
fn text(path: &Path, vocab: usize) -> Result<Text> {
    Gguf::open(path)?.text(vocab, None)
}

fn json(name: &str) -> Value {
    let text = fs::read(common::dir("gguf").join(name)).expect("the file exists");
    serde_json::from_slice(&text).expect("JSON")
}

fn ids(value: &Value) -> Vec<u32> {
    let ids = value.as_array().expect("a list").iter();
    ids.map(|id| id.as_u64().expect("an id") as u32).collect()
}

fn hash(numbers: &[f32]) -> u64 {
    numbers
        .iter()
        .flat_map(|x| x.to_le_bytes())
        .fold(0xCBF2_9CE4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3))
}

#[test]
fn dequantised_tensors_have_the_bits_of_the_reference() {
    let expected = json("models.json");
    for name in MODELS {
        let gguf = open(name);
        let mut source = &gguf;
        for (tensor, expected) in expected[name]["tensors"].as_object().expect("tensors") {
            let shape: Vec<usize> = ids(&expected["shape"]).into_iter().map(|n| n as usize).collect();
            let numbers = source.numbers(tensor, &shape).expect("the tensor is read").to_f32();
            assert_eq!(hash(&numbers), expected["hash"], "{name}: {tensor}: {:?}", &numbers[..4]);
        }
    }
    for kind in ["llama", "gemma3"] {
        let types = expected[kind]["types"].as_array().expect("types");
        let types: BTreeSet<&str> = types.iter().filter_map(Value::as_str).collect();
        let all = "BF16 F16 F32 Q4_0 Q4_1 Q4_K Q5_0 Q5_1 Q5_K Q6_K Q8_0";
        assert_eq!(types, all.split(' ').collect(), "{kind}");
    }
}

#[test]
fn logits_and_tokens_are_those_of_the_reference() {
    let expected = json("models.json");
    for name in MODELS {
        let model = Model::read(&file(name)).expect("the model loads");
        let mut cases = Vec::new();
        for case in expected[name]["cases"].as_array().expect("cases") {
            let (prompt, tokens) = (ids(&case["prompt"]), ids(&case["tokens"]));
            let (found, first) = greedy(&model, &prompt, tokens.len(), usize::MAX);
            assert_eq!(found, tokens, "{name}");
            let logits = case["logits"].as_array().expect("logits");
            assert_eq!(logits.len(), first.len(), "{name}");
            for (actual, expected) in first.iter().zip(logits) {
                let off = (f64::from(*actual) - expected.as_f64().expect("a number")).abs();
                assert!(off < 1e-4, "{name}: {actual} is not {expected}");
            }
            cases.push(common::Case { prompt, tokens, first_logits_head: Vec::new() });
        }
        let ran = serve(&model, &requests(&cases), Setting::default());
        for (number, case) in cases.iter().enumerate() {
            assert_eq!(ran.collected.tokens[&(number, 0)], case.tokens, "{name}, case {number}");
        }
    }
}

#[test]
fn tokenizers_are_those_of_the_reference() {
    for (name, cases) in json("tokenizers.json").as_object().expect("tokenizers") {
        let text = text(&file(&format!("tokenizer-{name}")), 1000).expect("a tokenizer");
        for case in cases.as_array().expect("cases") {
            let source = case["text"].as_str().expect("a text");
            let ids = ids(&case["ids"]);
            assert_eq!(text.encode(source).expect("tokens"), ids, "{name}: {source:?}");
            let decoded = case["decoded"].as_str().unwrap_or(source);
            assert_eq!(text.decode(&ids), decoded, "{name}: {source:?}");
        }
    }
}

#[test]
fn templates_and_stop_tokens_are_in_the_metadata() {
    let expected = json("models.json");
    for (name, stop) in [("llama", vec![402, 403]), ("llama-tied", vec![2]), ("gemma3", vec![1, 5])] {
        let gguf = open(name);
        let config = gguf.config().expect("a config");
        assert_eq!(config.eos, stop, "{name}");
        let text = gguf.text(config.vocab, None).expect("a tokenizer");
        let user = Message { role: "user".into(), content: "hi".into() };
        let chat = expected[name]["chat"].as_str().expect("a text");
        let tokens = text.encode_with(chat, false).expect("tokens");
        assert_eq!(text.chat(&[user]).expect("a prompt"), tokens, "{name}");
        if name == "gemma3" {
            assert_eq!(tokens[0], 2, "the template begins with bos");
        }
    }
}

/// Cuts the file at every byte of its header, and at many places of its data.
#[test]
fn truncated_files_are_refused() {
    let dir = Dir::new();
    let path = dir.write("model.gguf", fs::read(file("llama-tied")).expect("the file exists"));
    let opened = OpenOptions::new().write(true).open(&path).expect("the file opens");
    let whole = opened.metadata().expect("metadata").len();
    let data = (HEADER..whole).rev().step_by(199);
    for len in data.chain((0..HEADER).rev()) {
        opened.set_len(len).expect("the file is cut");
        let error = Gguf::open(&path).err().unwrap_or_else(|| panic!("{len} bytes open"));
        let known = ["truncated", "not a GGUF file"].iter().any(|word| error.message.contains(word));
        assert!(known, "{len} bytes: {error}");
    }
}

/// Changes a bit of each byte of the header. The model loads, or its error is typed.
#[test]
fn changed_bytes_of_the_header_do_no_harm() {
    let (dir, bytes) = (Dir::new(), fs::read(file("llama-tied")).expect("the file exists"));
    let path = dir.write("model.gguf", &bytes);
    let opened = OpenOptions::new().write(true).open(&path).expect("the file opens");
    let mut refused = 0;
    for (at, byte) in bytes.iter().enumerate().take(HEADER as usize) {
        opened.write_all_at(&[byte ^ 1 << (at % 8)], at as u64).expect("a byte is written");
        let config = Gguf::open(&path).and_then(|gguf| gguf.config());
        // Most bytes belong to tokens, which do not change the rest of the model.
        if let Ok(config) = &config
            && at % 23 == 0
        {
            let _ = (Model::read(&path), text(&path, config.vocab));
        }
        refused += usize::from(config.is_err());
        opened.write_all_at(&[*byte], at as u64).expect("a byte is written");
    }
    assert!(refused > 1000, "{refused}");
}

#[test]
fn damaged_and_other_files_are_refused_by_name() {
    let (dir, most) = (Dir::new(), u64::MAX);
    let metadata = |pairs: &[Vec<u8>]| whole(3, 0, pairs.len() as u64, pairs);
    let tensors = |tensors: &[Vec<u8>]| whole(3, tensors.len() as u64, 0, tensors);
    let list = |kind: u32, count: u64| [&kind.to_le_bytes()[..], &count.to_le_bytes()].concat();
    let number = |n: u32| n.to_le_bytes();
    let llama = pair("general.architecture", 8, string("llama"));
    let cases = [
        (Vec::new(), "not a GGUF file: it begins with \"\""),
        (b"PK\x03\x04".to_vec(), "not a GGUF file: it begins with \"PK"),
        (whole(1, 0, 0, &[]), "version 1 of GGUF is not implemented"),
        (whole(3_u32.swap_bytes(), 0, 0, &[]), "big-endian"),
        (whole(3, most, 0, &[]), "truncated: 8 bytes at 24 exceed"),
        (whole(3, 0, most, &[]), "truncated: 8 bytes at 24 exceed"),
        (whole(3, 0, 1, &[most.to_le_bytes().to_vec()]), "18446744073709551615 bytes at 32 exceed"),
        (metadata(&[pair("a", 9, list(0, most))]), "lists of 18446744073709551615"),
        (metadata(&[pair("a", 9, list(0, 1 << 20))]), "truncated: 1 bytes at 49"),
        (metadata(&[pair("a", 9, list(9, 1))]), "lists of lists are not implemented, in the metadata \"a\""),
        (metadata(&[pair("a", 13, [])]), "unknown type 13, in the metadata \"a\""),
        (metadata(&[pair("a", 7, [2])]), "2 is neither true nor false"),
        (metadata(&[pair("a", 8, [1, 0, 0, 0, 0, 0, 0, 0, 0xFF])]), "not UTF-8"),
        (metadata(&[pair("a", 0, [1]), pair("a", 0, [1])]), "the metadata \"a\" occurs twice"),
        (metadata(&[pair("general.alignment", 4, number(0))]), "general.alignment 0"),
        (metadata(&[pair("general.alignment", 4, number(24))]), "general.alignment 24"),
        (tensors(&[tensor("t", &[0], 0, 0), tensor("t", &[0], 0, 0)]), "the tensor \"t\" occurs twice"),
        (tensors(&[tensor("t", &[1; 5], 0, 0)]), "5 dimensions are more than 4, in the tensor \"t\""),
        (
            tensors(&[tensor("t", &[most, most], 0, 0)]),
            "tensor t of shape [18446744073709551615, 18446744073709551615]",
        ),
        (tensors(&[tensor("t", &[1], 0, most)]), "tensor t of shape [1] exceeds the file"),
        (tensors(&[tensor("t", &[1], 0, 0)]), "tensor t of shape [1] exceeds the file"),
        (tensors(&[tensor("t", &[31], 8, 0)]), "tensor t has rows of 31 elements, but Q8_0 needs 32"),
        (tensors(&[tensor("t", &[256], 23, 0)]), "IQ4_XS is not implemented"),
        (tensors(&[tensor("t", &[256], 99, 0)]), "type 99 is not implemented, only F32, F16"),
        (metadata(&[]), "general.architecture is missing"),
        (
            metadata(&[pair("general.architecture", 8, string("qwen3"))]),
            "\"qwen3\" is not implemented, only llama and gemma3",
        ),
        (metadata(&[pair("general.architecture", 4, number(1))]), "general.architecture: 1 is not a text"),
        (metadata(&[llama.clone(), pair("split.count", 2, [2, 0])]), "merge them"),
        (metadata(&[llama.clone(), pair("llama.expert_count", 4, number(8))]), "experts are not implemented"),
        (metadata(&[llama]), "llama.embedding_length is missing"),
    ];
    for (bytes, message) in cases {
        let error = Model::read(&dir.write("model.gguf", &bytes)).err().expect(message).message;
        assert!(error.contains("model.gguf: ") && error.contains(message), "{error}");
    }
}

#[test]
fn biases_of_queries_are_ordered_as_their_rows() {
    let (dir, name) = (Dir::new(), "blk.0.attn_q.bias");
    let open = |tensor| {
        let heads = pair("llama.attention.head_count", 4, 2_u32.to_le_bytes());
        let body = [pair("general.architecture", 8, string("llama")), heads, tensor];
        let mut bytes = whole(3, 1, 2, &body);
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        bytes.extend((0..10).flat_map(|i| (i as f32).to_le_bytes()));
        Gguf::open(&dir.write("model.gguf", bytes)).expect("the file opens")
    };
    let own = "model.layers.0.self_attn.q_proj.bias";
    let bias = (&open(tensor(name, &[8], 0, 0))).vector(own, 8).expect("a bias");
    assert_eq!(bias, [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]);
    let error = (&open(tensor(name, &[32], 8, 0))).vector(own, 32).expect_err("no rows").message;
    assert!(error.contains("a bias in Q8_0 is not implemented"), "{error}");
}

/// The file has one plus the published weight, in any type.
#[test]
fn norms_of_gemma_have_any_type() {
    let weights = [1.0_f32, 1.5, 3.0, 0.25];
    let f32s = weights.map(f32::to_le_bytes).concat();
    let f16s = weights.map(|w| f16::from_f32(w).to_le_bytes()).concat();
    let bf16s = weights.map(|w| bf16::from_f32(w).to_le_bytes()).concat();
    let dir = Dir::new();
    for (kind, data) in [(0, f32s), (1, f16s), (30, bf16s)] {
        let norm = tensor("output_norm.weight", &[4], kind, 0);
        let body = [pair("general.architecture", 8, string("gemma3")), norm];
        let mut bytes = whole(3, 1, 1, &body);
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        bytes.extend(data);
        let gguf = Gguf::open(&dir.write("model.gguf", bytes)).expect("the file opens");
        assert_eq!((&gguf).vector("model.norm.weight", 4).expect("a norm"), [0.0, 0.5, 2.0, -0.75]);
    }
}

/// The merge of the first file is longer than every token, on which the crate's builder panics. The tokens of the other
/// file form more than 300 MB of merges.
#[test]
fn merges_that_form_no_token_or_too_many_are_refused() {
    let dir = Dir::new();
    let texts = |texts: &[&str]| {
        let count = (texts.len() as u64).to_le_bytes();
        let strings = texts.iter().flat_map(|text| string(text)).collect();
        [8_u32.to_le_bytes().to_vec(), count.to_vec(), strings].concat()
    };
    let body = [
        pair("general.architecture", 8, string("llama")),
        pair("tokenizer.ggml.model", 8, string("gpt2")),
        pair("tokenizer.ggml.pre", 8, string("gpt-2")),
        pair("tokenizer.ggml.tokens", 9, texts(&["aa", "bb"])),
        pair("tokenizer.ggml.merges", 9, texts(&["aa bb"])),
    ];
    let error = text(&dir.write("model.gguf", whole(3, 0, 5, &body)), 1000).err();
    let message = error.expect("a wrong merge").message;
    assert!(message.contains("\"aa\" and \"bb\" form no token"), "{message}");

    let tokens = (1..1000).flat_map(|len| string(&"a".repeat(len)));
    let list = |kind: u32| [kind.to_le_bytes().to_vec(), 999_u64.to_le_bytes().to_vec()].concat();
    let body = [
        pair("general.architecture", 8, string("llama")),
        pair("tokenizer.ggml.model", 8, string("llama")),
        pair("tokenizer.ggml.tokens", 9, [list(8), tokens.collect()].concat()),
        pair("tokenizer.ggml.scores", 9, [list(6), vec![0; 4 * 999]].concat()),
    ];
    let error = text(&dir.write("model.gguf", whole(3, 0, 4, &body)), 1000).err();
    let message = error.expect("too many merges").message;
    assert!(message.contains("merges of more than"), "{message}");
}

/// Replaces a text of the metadata by one of the same length.
#[test]
fn tokenizers_and_scalings_that_are_not_implemented_are_refused_by_name() {
    let dir = Dir::new();
    for (name, from, to, message) in [
        ("tokenizer-smollm", "smollm", "falcon", "tokenizer.ggml.pre \"falcon\" is not implemented"),
        ("tokenizer-smollm", "gpt2", "bert", "tokenizer.ggml.model \"bert\" is not implemented"),
        ("tokenizer-smollm", "ggml.pre", "ggml.abc", "tokenizer.ggml.pre is missing"),
        ("tokenizer-smollm", "ggml.merges", "ggml.mergez", "tokenizer.ggml.merges is missing"),
        ("tokenizer-gemma", "ggml.scores", "ggml.scorez", "tokenizer.ggml.scores is missing"),
        ("llama-tied", "linear", "magnet", "llama.rope.scaling.type \"magnet\" is not implemented"),
        ("llama-tied", "token_embd", "token_abcd", "tensor token_embd.weight is missing"),
        ("llama-tied", "blk.0.ffn_up", "blk.0.ffn_no", "tensor blk.0.ffn_up.weight is missing"),
    ] {
        let mut bytes = fs::read(file(name)).expect("the file exists");
        let at = bytes.windows(from.len()).position(|part| part == from.as_bytes());
        let at = at.expect("the text occurs");
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        let path = dir.write("model.gguf", bytes);
        let error = match name {
            "llama-tied" => Model::read(&path).err(),
            _ => text(&path, 1000).err(),
        };
        let error = error.expect(message).message;
        assert!(error.contains(message), "{error}");
    }
    let error = text(&file("tokenizer-smollm"), 400).err().expect("too many tokens").message;
    assert!(error.contains("has id 400, but the model's vocabulary has 400 tokens"), "{error}");
}
