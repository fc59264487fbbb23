//! The patched models give the reference framework's tokens, whatever the chunks and joins, with and without hits.

use std::fs;
use std::path::{Path, PathBuf};

use candle::{DType, Device};
use kvarena::{Capacity, KvDtype, PoolConfig};
use kvarena_candle::KvArena;
use kvarena_candle_models::serve::{Limits, Served, serve};
use kvarena_candle_models::{Loaded, load};
use serde_json::Value;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../host/tests/data").join(name)
}

/// The prompts and their new tokens.
fn golden(name: &str) -> (Vec<Vec<u32>>, Vec<Vec<u32>>) {
    let text = fs::read_to_string(folder(name).join("golden.json")).expect("it is there");
    let all: Value = serde_json::from_str(&text).expect("JSON");
    let tokens = |value: &Value| -> Vec<u32> {
        value.as_array().expect("tokens").iter().map(|t| t.as_u64().expect("a token") as u32).collect()
    };
    let cases = all["cases"].as_array().expect("cases");
    cases.iter().map(|case| (tokens(&case["prompt"]), tokens(&case["tokens"]))).unzip()
}

fn run(loaded: &Loaded, pool: PoolConfig, prompts: &[Vec<u32>], step_tokens: u32) -> [Served; 2] {
    let new_tokens = 24;
    let mut arena = KvArena::new(pool, &Device::Cpu).expect("a small pool");
    let limits = Limits { new_tokens, step_tokens, joins: 2 };
    [(); 2].map(|()| {
        let served = serve(&loaded.model, &mut arena, prompts, &[], limits, |_, _, _| {});
        arena.engine.verify().expect("all invariants hold");
        served.expect("the prompts fit")
    })
}

#[test]
fn tokens_equal_the_references() {
    for name in ["qwen3-tiny", "llama-tiny", "gemma3-tiny"] {
        let loaded = load(&folder(name), DType::F32, &Device::Cpu).expect("a model");
        let (prompts, wanted) = golden(name);
        for (step_tokens, page_size) in [(48, 16), (512, 1), (7, 8)] {
            let capacity = Capacity::Pages(4096 / page_size);
            let pool = PoolConfig { page_size, capacity, dtype: KvDtype::F32, ..loaded.pool };
            let [first, again] = run(&loaded, pool, &prompts, step_tokens);
            for served in [&first, &again] {
                for (text, wanted) in served.texts.iter().zip(&wanted) {
                    let len = text.len().min(wanted.len());
                    assert_eq!(text[..len], wanted[..len], "{name}, steps of {step_tokens}");
                }
            }
            assert!(again.hit_tokens > again.prompt_tokens / 2, "{name}: {} hits", again.hit_tokens);
        }
    }
}
