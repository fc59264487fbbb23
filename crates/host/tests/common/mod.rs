//! Shared test data: the golden models and their cases.

#![allow(dead_code)] // each test uses a part

pub mod byte_tokenizer;
pub mod contiguous;
pub mod files;
pub mod gguf;
#[cfg(feature = "cuda")]
pub mod gpu;
pub mod reference;
pub mod serving;
pub mod tokenizers;
#[cfg(feature = "cuda")]
pub mod twin;
pub mod wrapped;

use std::path::{Path, PathBuf};

use kvarena_host::model::Model;
use serde_json::Value;

/// Golden models with heads of K and V, one MLP a layer, and layers that read all tokens.
pub const MODELS: [&str; 2] = ["qwen3-tiny", "llama-tiny"];

/// Golden models with experts: one with latent rows, and one with sinks.
pub const MIXTURES: [&str; 2] = ["deepseek-tiny", "gpt-oss-tiny"];

/// Golden models with layers that read a window or a chunk.
pub const GROUPED: [&str; 4] = ["gpt-oss-tiny", "gemma3-tiny", "gemma4-tiny", "llama4-tiny"];

/// Golden models in the forms in which large models are published.
pub const PUBLISHED: [&str; 3] = ["gpt-oss-mxfp4", "deepseek-fp8", "llama4-published"];

/// Returns a golden model's directory. The tests of the server include this file.
pub fn dir(model: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../host/tests/data").join(model)
}

/// Reads a golden model.
pub fn model(name: &str) -> Model {
    Model::read(&dir(name)).expect("the golden model is read")
}

/// A golden case: a prompt, and the reference framework's tokens and first logits.
pub struct Case {
    pub prompt: Vec<u32>,
    pub tokens: Vec<u32>,
    pub first_logits_head: Vec<f64>,
}

/// Returns the cases of a golden model.
pub fn cases(model: &str) -> Vec<Case> {
    let text = std::fs::read_to_string(dir(model).join("golden.json")).expect("golden.json exists");
    let golden: Value = serde_json::from_str(&text).expect("golden.json is JSON");
    let list = |value: &Value| -> Vec<f64> {
        value.as_array().expect("a list").iter().map(|x| x.as_f64().expect("a number")).collect()
    };
    let tokens = |value: &Value| list(value).iter().map(|&x| x as u32).collect();
    let case = |case: &Value| Case {
        prompt: tokens(&case["prompt"]),
        tokens: tokens(&case["tokens"]),
        first_logits_head: list(&case["first_logits_head"]),
    };
    golden["cases"].as_array().expect("cases").iter().map(case).collect()
}

/// Returns whether two logits differ by at most 1e-3 of the expected one, or by at most 1e-5 if the expected one is
/// below 0.01 in magnitude.
pub fn agree(actual: f64, expected: f64) -> bool {
    (actual - expected).abs() <= 1e-3 * expected.abs().max(0.01)
}
