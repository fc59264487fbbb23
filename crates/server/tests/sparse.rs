//! Tests sparse reads by running the program: contexts of up to K tokens and longer ones, the reported recall, and
//! files of channels.

mod common;

use common::files::Dir;
use common::{Ran, run_server};
use serde_json::{Value, json};

/// Models with a `head_dim` of 64, of 32, and of 64 with sinks and windows of 32 tokens in every other layer.
const MODELS: [&str; 3] = ["qwen3-tiny", "llama-tiny", "gpt-oss-tiny"];

fn run(model: &str, options: &[&str]) -> Ran {
    let fixed = ["--model", &common::folder(model), "--requests", "-", "--json", "--threads", "1"];
    run_server(&[&fixed[..], options].concat(), &common::golden_requests(model))
}

/// Returns the tokens of the streams, and the report.
fn served(model: &str, options: &[&str]) -> (Vec<Value>, Value) {
    let mut lines = run(model, options).lines();
    let report = lines.pop().expect("a report")["report"].take();
    (lines.into_iter().map(|mut line| line["tokens"].take()).collect(), report)
}

#[test]
fn sparse_reads_of_contexts_up_to_k_tokens_equal_full_reads() {
    for model in MODELS {
        let golden = common::cases(model);
        let golden: Vec<Value> = golden.iter().map(|case| json!(case.tokens)).collect();
        let options: [&[&str]; 4] = [
            &["--sparse", "400,1", "--kv-dtype", "f32"],
            &["--sparse", "400", "--page-size", "1", "--chunk", "7", "--overlap"],
            &["--sparse", "400,32", "--kv-dtype", "f16", "--layout", "layer-first"],
            &["--sparse", "2048,8", "--fail-every", "3", "--kv-dtype", "f32"],
        ];
        for options in options {
            let (tokens, report) = served(model, options);
            assert_eq!(tokens, golden, "{model} {options:?}");
            assert_eq!(report["change"]["changed_tokens"], 0);
            assert_eq!(report["change"]["tokens"], 20 * golden.len());
        }
    }
}

/// Above K tokens the output may change. The mean recall grows from 1 channel to 16 and to all. The test prints the
/// reports.
#[test]
fn recall_is_reported_above_k_tokens() {
    for model in MODELS {
        let mean = |sparse: &str| {
            let (_, report) = served(model, &["--sparse", sparse, "--kv-dtype", "f32", "--recall"]);
            println!("{model}, --sparse {sparse}: {report}");
            let recall = &report["recall"];
            let number = |name: &str| recall[name].as_f64().expect("a number");
            let (mean, least) = (number("mean"), number("least"));
            assert!(0.0 < least && least <= mean && mean <= 1.0 + 1e-9, "{model}: {recall}");
            assert!(number("held") <= number("best") + 1e-9, "{model}: {recall}");
            mean
        };
        let head_dim = if model == "llama-tiny" { "32" } else { "64" };
        for top in ["16", "32"] {
            let [few, some, _, all] = ["1", "16", "32", head_dim].map(|channels| mean(&format!("{top},{channels}")));
            assert!(few < all && some < all, "{model}, {top}: {few}, {some}, {all}");
            assert!(few < some, "{model}, {top}: {few}, {some}");
        }
    }
}

#[test]
fn channels_are_kept_in_a_file() {
    let files = Dir::new();
    let file = files.write("labels.json", "");
    let path = file.to_str().expect("UTF-8");
    let (chosen, report) = served("qwen3-tiny", &["--sparse", "24,8", "--save-labels", path]);
    assert!(report["change"]["tokens"].is_number() && report["recall"].is_null(), "{report}");
    let written = std::fs::read_to_string(&file).expect("it was written");
    assert!(written.starts_with(r#"{"layers":3,"kv_heads":2,"channels":8,"#), "{written}");
    for options in [&["--sparse", "24", "--labels", path][..], &["--sparse", "24,8", "--labels", path]] {
        let (given, report) = served("qwen3-tiny", options);
        assert_eq!(given, chosen);
        assert!(report["change"].is_null(), "no pass reads all positions: {report}");
    }
    let (given, again) = served("qwen3-tiny", &["--sparse", "24", "--labels", path, "--recall"]);
    assert_eq!((given, &again["change"]), (chosen, &report["change"]));
    // A file is refused if it has the channels of another model, or another number of channels.
    let refused = |model, options: &[&str], word: &str| {
        let ran = run(model, options);
        assert_eq!(ran.code, Some(2), "{}", ran.err);
        assert!(ran.err.contains(word), "{}", ran.err);
    };
    refused("gpt-oss-tiny", &["--sparse", "24", "--labels", path], "4 layers");
    refused("qwen3-tiny", &["--sparse", "24,9", "--labels", path], "8 channels");
    let template = files.write("joined.jinja", common::JOINED);
    let template = ["--chat-template", template.to_str().expect("UTF-8")];
    let chat = ["--sparse", "24", "--labels", path, "--chat", "--quiet", "--max-new-tokens", "3"];
    let ran = common::tiny(&[&chat[..], &template].concat(), "344 506 214\n").ok();
    assert_eq!(ran.out.split_whitespace().count(), 3);
}
