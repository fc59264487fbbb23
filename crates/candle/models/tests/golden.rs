//! The patched models generate the reference framework's tokens, with several chunk sizes, with
//! prompts that join a running batch, and with and without cache hits.

use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use candle::{DType, Device, Tensor};
use kvarena::{Capacity, Extend, Namespace, PoolConfig, TokenId};
use kvarena_candle::KvArena;
use kvarena_candle_models::config::{Config, end_tokens};
use kvarena_candle_models::contiguous::Contiguous;
use kvarena_candle_models::paged::{gemma3, qwen3};
use kvarena_candle_models::serve::{Limits, Served, serve};
use kvarena_candle_models::{Loaded, load};
use serde_json::{Map, Value, json};

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../host/tests/data").join(name)
}

/// Returns the prompts and their new tokens.
fn golden(name: &str) -> (Vec<Vec<u32>>, Vec<Vec<u32>>) {
    let text = fs::read_to_string(folder(name).join("golden.json")).expect("it is there");
    let all: Value = serde_json::from_str(&text).expect("JSON");
    let tokens = |value: &Value| -> Vec<u32> {
        value.as_array().expect("tokens").iter().map(|t| t.as_u64().expect("a token") as u32).collect()
    };
    let cases = all["cases"].as_array().expect("cases");
    cases.iter().map(|case| (tokens(&case["prompt"]), tokens(&case["tokens"]))).unzip()
}

fn run(loaded: &Loaded, arena: &mut KvArena, prompts: &[Vec<u32>], step_tokens: u32) -> [Served; 2] {
    let new_tokens = NonZeroUsize::new(24).expect("not 0");
    let limits = Limits { new_tokens, step_tokens, joins: 2 };
    [(); 2].map(|()| {
        let served = serve(&loaded.model, arena, prompts, &[], limits, |_, _, _| {});
        arena.engine.verify().expect("all invariants hold");
        served.expect("the prompts fit")
    })
}

/// With feature `cuda` and a GPU, also compares its tokens.
#[test]
fn tokens_equal_the_references() {
    let on_cpu = ["qwen3-tiny", "llama-tiny", "gemma3-tiny"].map(|name| (name, DType::F32, Device::Cpu));
    let names = [("qwen3-tiny", DType::BF16), ("gemma3-tiny", DType::BF16)];
    let names = names.into_iter().chain(on_cpu.each_ref().map(|(name, dtype, _)| (*name, *dtype)));
    let gpu = Device::new_cuda_with_stream(0).ok();
    let on_gpu = gpu.iter().flat_map(|gpu| names.clone().map(|(name, dtype)| (name, dtype, gpu.clone())));
    for (name, dtype, device) in on_cpu.clone().into_iter().chain(on_gpu) {
        let loaded = load(&folder(name), dtype, &device).expect("a model");
        let (prompts, wanted) = golden(name);
        for (step_tokens, page_size) in [(48, 16), (512, 1), (7, 8)] {
            let pool = PoolConfig { page_size, capacity: Capacity::Pages(4096 / page_size), ..loaded.pool };
            let mut arena = KvArena::new(pool, &device).expect("a small pool");
            let [first, again] = run(&loaded, &mut arena, &prompts, step_tokens);
            for served in [&first, &again] {
                for (text, wanted) in served.texts.iter().zip(&wanted) {
                    assert_eq!(&text[..wanted.len()], wanted, "{name}, {dtype:?}, steps of {step_tokens}");
                }
            }
            assert!(again.hit_tokens > again.prompt_tokens / 2, "{name}: {} hits", again.hit_tokens);
        }
    }
}

/// Each group of layers takes pages of its own. With the pages of one group, only one of Gemma's sequences fits.
#[test]
fn an_arena_has_room_for_the_given_sequences() {
    for name in ["qwen3-tiny", "llama-tiny", "gemma3-tiny"] {
        let loaded = load(&folder(name), DType::F32, &Device::Cpu).expect("a model");
        let lens = [100, 17, 200];
        let config = loaded.arena(lens, 48).expect("a pool");
        let mut arena = KvArena::new(config, &Device::Cpu).expect("a small pool");
        for len in lens {
            let prompt = vec![TokenId::new(len as u32); len / 2];
            let seq = arena.engine.admit(Namespace::default(), &prompt, len as u32);
            assert!(seq.is_ok(), "{name}, {len} tokens: {seq:?}");
        }
    }
}

/// Compares the logits over both caches after each token of a text.
#[test]
fn logits_equal_those_over_candles_own_cache() {
    for name in ["qwen3-tiny", "llama-tiny"] {
        let loaded = load(&folder(name), DType::F32, &Device::Cpu).expect("a model");
        let mut own = Contiguous::load(&folder(name), DType::F32, &Device::Cpu).expect("a model");
        let pool = PoolConfig { capacity: Capacity::Pages(32), page_size: 8, ..loaded.pool };
        for (prompt, new) in golden(name).0.iter().zip(golden(name).1) {
            let mut arena = KvArena::new(pool, &Device::Cpu).expect("a small pool");
            let tokens: Vec<TokenId> = prompt.iter().copied().map(TokenId::new).collect();
            let seq = arena.engine.admit(Namespace::default(), &tokens, 0).expect("room");
            own.clear().expect("memory");
            let (mut input, mut offset) = (prompt.clone(), 0);
            for token in new {
                let step = arena.step(&[Extend { seq, len: input.len() as u32 }]).expect("room");
                let ours = loaded.model.forward(&step).and_then(|logits| logits.flatten_all());
                let theirs =
                    Tensor::new(&input[..], &Device::Cpu).and_then(|input| own.logits(&input.unsqueeze(0)?, offset));
                let [ours, theirs] =
                    [ours, theirs].map(|logits| logits.and_then(|x| x.to_vec1::<f32>()).expect("logits"));
                for (ours, theirs) in ours.iter().zip(&theirs) {
                    assert!((ours - theirs).abs() <= 1e-4, "{name}: {ours} for {theirs}");
                }
                offset += input.len();
                input = vec![token];
                let id = step.launched();
                arena.engine.append(seq, &[TokenId::new(token)]).expect("room");
                arena.close(id).expect("it was launched");
            }
        }
    }
}

/// Configs of transformers 4 and 5 give the same RoPE bases and window pattern; errors name the key.
#[test]
fn both_forms_of_a_config_are_read() {
    let text = |name: &str| fs::read_to_string(folder(name).join("config.json")).expect("a config");
    let edit = |name: &str, edit: &dyn Fn(&mut Map<String, Value>)| {
        let mut config: Map<String, Value> = serde_json::from_str(&text(name)).expect("JSON");
        edit(&mut config);
        serde_json::to_string(&config).expect("JSON")
    };
    for name in ["qwen3-tiny", "llama-tiny"] {
        let theta = |text: &str| {
            let config = Config::parse(text).expect("a served model").typed::<Value>().expect("JSON");
            config["rope_theta"].as_f64().expect("a number")
        };
        let old = edit(name, &|config| {
            let rope = config.remove("rope_parameters").expect("the form of 5");
            config.insert("rope_theta".into(), rope["rope_theta"].clone());
        });
        assert_eq!(theta(&text(name)), theta(&old));
        let without = edit(name, &|config| drop(config.remove("rope_parameters")));
        let error = Config::parse(&without).expect_err("rope_theta is missing");
        assert_eq!(error.to_string(), "config.json: the key rope_theta is missing");
        let without = edit(name, &|config| drop(config.remove("hidden_size")));
        let error = Config::parse(&without).expect("parse does not check this key").typed::<qwen3::Config>();
        assert!(error.expect_err("no size").to_string().contains("hidden_size"));
    }
    let old = edit("gemma3-tiny", &|config| {
        let rope = config.remove("rope_parameters").expect("the form of 5");
        config.insert("rope_theta".into(), rope["full_attention"]["rope_theta"].clone());
        let local = rope["sliding_attention"]["rope_theta"].clone();
        config.insert("rope_local_base_freq".into(), local);
        config.remove("layer_types");
        config.insert("sliding_window_pattern".into(), 3.into());
    });
    for text in [text("gemma3-tiny"), old] {
        let config = Config::parse(&text).and_then(|config| config.typed::<gemma3::Config>()).expect("served");
        let read = (config.rope_theta, config.rope_local_base_freq, config.sliding_window_pattern);
        assert_eq!(read, (1_000_000.0, 10_000.0, 3));
    }
    let irregular = edit("gemma3-tiny", &|config| {
        config["layer_types"][0] = "full_attention".into();
    });
    assert!(Config::parse(&irregular).expect_err("no pattern").to_string().starts_with("config.json: layer_types"));
    let scaled = edit("qwen3-tiny", &|config| {
        config["rope_parameters"]["rope_type"] = "yarn".into();
    });
    assert!(
        Config::parse(&scaled).expect_err("candle ignores it").to_string().starts_with("config.json: rope_scaling")
    );
    let other = edit("qwen3-tiny", &|config| drop(config.insert("model_type".into(), "bert".into())));
    assert_eq!(
        Config::parse(&other).expect_err("not served").to_string(),
        "config.json: model_type = \"bert\" is not supported"
    );
}

/// An id of more than 32 bits is no token.
#[test]
fn end_tokens_are_those_of_the_config() {
    for (ids, tokens) in [
        (json!(7), &[7][..]),
        (json!([7, 4294967303_u64, 8]), &[7, 8]),
        (json!(4294967303_u64), &[]),
        (Value::Null, &[]),
    ] {
        assert_eq!(end_tokens(&json!({ "eos_token_id": ids })), tokens, "{ids}");
    }
}

/// The patch contains the lines that README and guide show.
#[test]
fn the_patch_contains_documented_lines() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &str| fs::read_to_string(here.join(path)).expect("it is there");
    let patch = read("patches/qwen3.patch");
    for (path, comment) in [("../README.md", ""), ("../../../src/guide/models.rs", "//! ")] {
        let text = read(path);
        let (begin, end) = (format!("{comment}```diff"), format!("{comment}```"));
        let shown = text.lines().skip_while(|&line| line != begin).skip(1);
        let shown: Vec<&str> = shown.take_while(|&line| line != end).collect();
        assert!(shown.len() > 5, "{path}");
        for line in shown {
            let line = line.strip_prefix(comment).expect("a comment");
            assert!(patch.lines().any(|other| other == line), "{path}: {line}");
        }
    }
}

/// Patches stay short, because a reader of candle's model has to read its patch as well.
#[test]
fn patches_add_at_most_60_lines() {
    for name in ["qwen3", "llama", "gemma3", "with_tracing"] {
        let path = format!("{}/patches/{name}.patch", env!("CARGO_MANIFEST_DIR"));
        let patch = fs::read_to_string(path).expect("it is there");
        let added = patch.lines().filter(|line| line.starts_with('+') && !line.starts_with("+++")).count();
        println!("{name}: {added} lines added");
        assert!(added <= 60, "{name}: {added} lines");
    }
}
