//! The model without pages generates the golden tokens. If this test fails, the model is wrong. If only `golden.rs`
//! fails, the error is in the paged part.

mod common;

use std::fs;
use std::path::Path;

use common::contiguous::greedy;
use common::files::Dir;
use kvarena_host::checkpoint::Checkpoint;
use kvarena_host::config::ModelConfig;
use kvarena_host::files::read_json;
use kvarena_host::source::Source;
use safetensors::tensor::{Dtype, TensorView, serialize};
use serde_json::json;

#[test]
fn the_model_without_pages_generates_the_golden_tokens() {
    let others = ["deepseek-groups", "gemma3-tiny", "gemma4-tiny", "llama4-tiny", "qwen3-5-tiny"];
    let others = others.into_iter().chain(common::PUBLISHED);
    for name in common::MODELS.into_iter().chain(common::MIXTURES).chain(others) {
        let model = common::model(name);
        for (number, case) in common::cases(name).iter().enumerate() {
            for chunk in [usize::MAX, 7] {
                let (tokens, first) = greedy(&model, &case.prompt, case.tokens.len(), chunk);
                assert_eq!(tokens, case.tokens, "{name}, case {number}, chunk {chunk}");
                for (actual, expected) in first.iter().zip(&case.first_logits_head) {
                    let actual = f64::from(*actual);
                    assert!(common::agree(actual, *expected), "{name}, case {number}: {actual} is not {expected}");
                }
            }
        }
    }
}

#[test]
fn configs_equal_those_of_the_root_package() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data");
    for name in common::MODELS {
        let config = |folder: &Path| fs::read(folder.join("config.json")).expect("a config");
        assert_eq!(config(&common::dir(name)), config(&root.join(name)), "{name}");
    }
}

/// Shard b, which is read last, also holds a tensor that the index assigns to shard a.
#[test]
fn tensors_come_from_the_shard_that_the_index_names() {
    let dir = Dir::copy_of("llama-tiny");
    let whole = dir.path().join("model.safetensors");
    fs::rename(whole, dir.path().join("a.safetensors")).expect("renamed");
    let vector = |bytes| TensorView::new(Dtype::BF16, vec![1], bytes).expect("a tensor");
    let tensors = [("model.embed_tokens.weight", vector(&[0, 0])), ("other", vector(&[0, 0]))];
    dir.write("b.safetensors", serialize(tensors, None).expect("a file"));
    let index = |shard: &str| {
        let map = json!({ "model.embed_tokens.weight": "a.safetensors", "model.norm.weight": shard,
            "other": "b.safetensors" });
        dir.write("model.safetensors.index.json", json!({ "weight_map": map }).to_string());
        Checkpoint::open(dir.path())
    };
    let mut read = index("a.safetensors").expect("each shard holds its tensors");
    assert!(read.vector("model.embed_tokens.weight", 1).is_err(), "the matrix of shard a");
    let error = index("b.safetensors").map(|_| ()).expect_err("the shard lacks the tensor");
    assert!(error.message.contains("b.safetensors holds no tensor model.norm.weight"), "{error}");
}

/// In the new style, each kind of layers has a rope of its own.
#[test]
fn layers_have_the_amplitude_of_their_rope() {
    let path = common::dir("gemma3-tiny").join("config.json");
    let mut config = read_json(&path).expect("a config");
    config["rope_parameters"]["full_attention"] = json!({ "rope_type": "yarn", "rope_theta": 1e6,
        "factor": 8.0, "original_max_position_embeddings": 256 });
    let config = ModelConfig::parse(&path, &config).expect("a config");
    let amplitudes: Vec<f32> = (0..6).map(|layer| config.rope_of(layer).amplitude).collect();
    let full = (0.1 * 8_f64.ln() + 1.0) as f32;
    assert_eq!(amplitudes, [1.0, 1.0, full, 1.0, 1.0, full]);
}
