//! Tests sparse reads by running the program, on a GPU or on the stand-in driver: output, reports, files of channels,
//! and options that the program rejects before it opens a GPU. `gpu.rs` compares the GPU's tokens with the CPU's.
#![cfg(feature = "cuda")]

mod common;

use common::files::Dir;
use common::gpu::{device, lock_gpus};
use common::{REQUEST, refuses, run_server};
use kvarena_host::gpu::device::Device;
use kvarena_host::gpu::nccl::Comm;
use serde_json::{Value, json};

/// Runs the golden model's prompts. Returns the tokens of the streams and the last report.
fn served(options: &[&str]) -> (Vec<Value>, Value) {
    let fixed = ["--requests", "-", "--json", "--quiet", "--chunk", "512"];
    let lines = common::tiny(&[&fixed[..], options].concat(), &common::golden_requests("qwen3-tiny")).lines();
    let (reports, streams): (Vec<_>, Vec<_>) = lines.into_iter().partition(|line| line["report"].is_object());
    let report = reports.last().map_or(Value::Null, |line| line["report"].clone());
    (streams.into_iter().map(|mut line| line["tokens"].take()).collect(), report)
}

fn cuda(options: &[&str]) -> (Vec<Value>, Value) {
    served(&[&["--backend", "cuda"], options].concat())
}

/// Returns the shape `[layers, kv_heads, channels]` and the channels of a file.
fn channels(path: &str) -> (Value, Vec<u64>) {
    let text = std::fs::read_to_string(path).expect("the file is written");
    let file: Value = serde_json::from_str(&text).expect("JSON");
    let values = file["values"].as_array().expect("a list").iter();
    let values = values.map(|value| value.as_u64().expect("a channel")).collect();
    (json!([file["layers"], file["kv_heads"], file["channels"]]), values)
}

/// The program serves requests twice and counts the tokens that change: none if every context has at most K tokens,
/// else some.
#[test]
fn channels_are_measured_and_changes_counted() {
    let _lock = lock_gpus();
    if device().is_none() {
        return;
    }
    let files = Dir::new();
    let [own, of_cpu] = ["own.json", "cpu.json"].map(|name| files.write(name, ""));
    let [own, of_cpu] = [&own, &of_cpu].map(|path| path.to_str().expect("UTF-8"));
    let (streams, report) = cuda(&["--sparse", "24,8", "--save-labels", own]);
    let change = &report["change"];
    assert_eq!(change["tokens"], 160, "{report}");
    assert!(change["changed_tokens"].as_u64().expect("a count") > 0, "{report}");
    // The channels equal the CPU's, except some of nearly equal importance.
    served(&["--sparse", "24,8", "--save-labels", of_cpu]);
    let [(shape, own_values), (shape_of_cpu, values)] = [own, of_cpu].map(channels);
    assert_eq!(shape, shape_of_cpu);
    let heads = own_values.chunks(8).zip(values.chunks(8));
    let same: usize = heads.map(|(own, other)| own.iter().filter(|at| other.contains(at)).count()).sum();
    assert!(10 * same >= 9 * values.len(), "{same} of {} channels", values.len());
    // With a file of channels, requests are served once.
    assert_eq!(cuda(&["--sparse", "24", "--labels", own]).0, streams);

    let (_, report) = cuda(&["--sparse", "147"]);
    let unchanged = json!({ "tokens": 160, "changed_tokens": 0, "texts": 8, "changed_texts": 0 });
    assert_eq!(report["change"], unchanged);
    // Two samples for each request, and a pool whose pages do not suffice for all streams at once.
    let small = ["--sparse", "24", "--labels", own, "--pages", "20", "--n", "2"];
    assert_eq!(cuda(&small).0.len(), 16);
    // Each of two ranks uses the channels of its head; sums over ranks round differently.
    if Device::open_number(1).is_ok() && Comm::version().is_ok() {
        let spread = cuda(&["--sparse", "24", "--labels", own, "--tp", "2"]).0;
        assert_eq!(spread.len(), 8);
        assert!(spread.iter().zip(&streams).any(|(spread, one)| spread == one), "{spread:?}");
    }
    let template = files.write("joined.jinja", common::JOINED);
    let template = ["--chat-template", template.to_str().expect("UTF-8")];
    let chat = ["--backend", "cuda", "--chat", "--quiet", "--sparse", "24", "--labels", own];
    let ran = common::tiny(&[&chat[..], &template, &["--max-new-tokens", "3"]].concat(), "344 506 214\n").ok();
    assert_eq!(ran.out.split_whitespace().count(), 3);
}

/// Without `--labels`, a bench uses the first channels of each head. Its row reports K, the number of positions that a
/// stream reads.
#[test]
fn a_bench_reads_sparsely() {
    let _lock = lock_gpus();
    if device().is_none() {
        return;
    }
    let shape = ["--bench", "decode", "--random-model", "llama-tiny-64", "--json", "--quiet"];
    let sizes = ["--batch", "2", "--context", "40", "--sparse", "16,4"];
    let row = run_server(&[&shape[..], &sizes].concat(), "").lines().swap_remove(0);
    let named = ["batch", "context", "sparse"].map(|name| row[name].clone());
    assert_eq!(named, [2, 40, 16].map(Value::from), "{row}");
    assert!(row["attention_ms"].is_number(), "{row}");
}

/// The program exits with code 2 before it opens a GPU.
#[test]
fn unsupported_sparse_reads_on_a_gpu_are_refused() {
    let files = Dir::new();
    let labels = files.write("labels.json", r#"{"layers": 1, "kv_heads": 1, "channels": 2, "values": [1, 3]}"#);
    let labels = labels.to_str().expect("UTF-8");
    let refuse = |options: &[&str], words: &str| {
        let fixed = ["--backend", "cuda", "--model", &common::folder("qwen3-tiny")];
        refuses(&[&fixed[..], options].concat(), REQUEST, &[words]);
    };
    let refuse_prompt = |options: &[&str], words: &str| refuse(&[&["--prompt", "1"], options].concat(), words);
    refuse_prompt(&["--sparse", "8", "--kv-dtype", "fp8"], "--kv-dtype bf16");
    refuse_prompt(&["--sparse", "8", "--recall"], "--recall is for the CPU");
    refuse_prompt(&["--sparse", "8", "--tp", "2"], "--sparse with --tp needs --labels");
    refuse_prompt(&["--sparse", "8,65"], "label_channels 65 is above 64");
    refuse_prompt(&["--sparse", "2049"], "--sparse 2049: a sequence has at most 2048 tokens");
    refuse_prompt(&["--sparse", "65", "--pages", "4"], "at most 64 tokens");
    refuse_prompt(&["--sparse", "8", "--labels", "none.json"], "none.json");
    refuse_prompt(&["--sparse", "8,3", "--labels", labels], "2 channels");
    refuse_prompt(&["--sparse", "8", "--labels", labels], "labels of 1 layer, 1 kv head");
    refuse_prompt(&["--sparse", "8", "--draft", "2"], "--draft");
    refuse(&["--sparse", "8", "--chat"], "needs --labels");
    refuse(&["--sparse", "8", "--serve", "127.0.0.1:0"], "needs --labels");
}
