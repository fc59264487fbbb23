//! What the tests share: the golden models and their cases.

#![allow(dead_code)] // each test takes what it needs

pub mod byte_tokenizer;
pub mod files;
#[cfg(feature = "cuda")]
pub mod gpu;
pub mod serving;

use std::path::{Path, PathBuf};

use serde_json::Value;

/// The golden models of the root package's test data with heads of K and V and one MLP a layer.
pub const MODELS: [&str; 2] = ["qwen3-tiny", "llama-tiny"];

/// Those with experts: latent rows, and sinks.
pub const MIXTURES: [&str; 2] = ["deepseek-tiny", "gpt-oss-tiny"];

/// A golden model's directory.
pub fn dir(model: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data").join(model)
}

/// One golden case: what the reference framework generates.
pub struct Case {
    pub prompt: Vec<u32>,
    pub tokens: Vec<u32>,
    pub first_logits_head: Vec<f64>,
}

/// The cases of a golden model.
pub fn cases(model: &str) -> Vec<Case> {
    let text =
        std::fs::read_to_string(dir(model).join("golden.json")).expect("golden.json is there");
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

/// Whether two logits agree to 1e-3 relative; logits below 0.01 in magnitude to 1e-5.
pub fn agree(actual: f64, expected: f64) -> bool {
    (actual - expected).abs() <= 1e-3 * expected.abs().max(0.01)
}

/// What the program did.
pub struct Ran {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

/// Runs the program on the tiny Qwen3 model.
pub fn tiny(arguments: &[&str], input: &str) -> Ran {
    let dir = dir("qwen3-tiny");
    generate(&[&["--model", dir.to_str().expect("UTF-8")], arguments].concat(), input)
}

/// Runs the program with these arguments and this standard input.
pub fn generate(arguments: &[&str], input: &str) -> Ran {
    generate_with(&[], arguments, input)
}

/// The same with environment variables.
pub fn generate_with(variables: &[(&str, &str)], arguments: &[&str], input: &str) -> Ran {
    use std::io::Write;
    use std::process::{Command, Stdio};
    let mut child = Command::new(env!("CARGO_BIN_EXE_generate"))
        .args(arguments)
        .envs(variables.iter().copied())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    // A program that refuses its arguments does not read its input.
    let _ = child.stdin.take().expect("piped").write_all(input.as_bytes());
    let output = child.wait_with_output().expect("the program ends");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    Ran { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}
