//! Stores of K and V: a second run of the program hits what the first one has computed.

mod common;

use std::collections::HashSet;
use std::fs;

use common::files::Dir;
use common::listening::Listening;
use common::{REQUEST, refuses, run_server};
use serde_json::{Value, json};

/// Returns the requests of three prompts of 70 tokens.
fn requests() -> String {
    let prompt = |n: usize| (0..70).map(|i| (7 * n + i * i) % 500).collect::<Vec<_>>();
    (0..3).map(|n| json!({ "prompt": prompt(n), "max_new_tokens": 4 }).to_string() + "\n").collect()
}

/// Runs the program with a cache folder. Returns the tokens and the cached tokens of each request, and the report.
fn run(folder: &str, more: &[&str]) -> (Vec<Value>, Vec<u64>, String) {
    run_model("qwen3-tiny", folder, more)
}

fn run_model(model: &str, folder: &str, more: &[&str]) -> (Vec<Value>, Vec<u64>, String) {
    let model = common::folder(model);
    let fixed =
        ["--json", "--requests", "-", "--swap-space", "0.01", "--ignore-eos", "--cache-dir", folder, "--model", &model];
    let ran = run_server(&[&fixed[..], more].concat(), &requests());
    let report = ran.err.clone();
    let lines = ran.lines();
    let cached = lines.iter().filter_map(|line| line["cached_tokens"].as_u64()).collect();
    (lines.into_iter().map(|mut line| line["tokens"].take()).collect(), cached, report)
}

#[test]
fn a_restart_hits_what_was_computed_before() {
    let dir = Dir::new();
    let folder = dir.path().join("cache");
    let folder = folder.to_str().expect("UTF-8");
    let (tokens, cached, report) = run(folder, &[]);
    assert_eq!(cached, [0; 3]);
    assert!(report.contains("store disk: 0 of ") && report.contains(" put ("), "{report}");
    let (again, cached, report) = run(folder, &["--cache-write", "off"]);
    assert_eq!((again, cached), (tokens.clone(), vec![64; 3]), "{report}");
    // Another type of K and V, or another secret, is another cache.
    let (_, cached, _) = run(folder, &["--kv-dtype", "f32", "--cache-write", "off"]);
    assert_eq!(cached, [0; 3]);
    // Damaged files are computed again.
    let mut damaged = 0;
    damage(folder.as_ref(), &mut damaged);
    let (again, cached, report) = run(folder, &[]);
    assert_eq!((again, cached), (tokens, vec![0; 3]), "{report}");
    assert!(damaged >= 12 && report.contains("page check"), "{damaged}: {report}");
    let (_, cached, report) = run(folder, &[]);
    assert_eq!(cached, [64; 3], "{report}");
}

/// Flips a bit of the last byte of each record.
fn damage(folder: &std::path::Path, damaged: &mut usize) {
    for entry in fs::read_dir(folder).expect("it is there") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            damage(&path, damaged);
        } else if path.components().any(|part| part.as_os_str() == "v1") {
            let mut bytes = fs::read(&path).expect("it is there");
            bytes[4096] ^= 1;
            fs::write(&path, bytes).expect("it is ours");
            *damaged += 1;
        }
    }
}

#[test]
fn options_that_exclude_stores_are_refused() {
    let requests = ["--random-requests", "1:8", "--model", &common::folder("qwen3-tiny")].map(str::to_owned);
    let refuses = |options: &[&str], words: &str| {
        let arguments: Vec<_> = requests.iter().map(String::as_str).chain(options.iter().copied()).collect();
        refuses(&arguments, REQUEST, &[words]);
    };
    refuses(&["--cache-dir", "/tmp/none"], "--swap-space");
    refuses(&["--cache-url", "redis://127.0.0.1", "--swap-space", "0.01"], "--cache-secret-file");
    refuses(&["--cache-dir", "/proc/none", "--swap-space", "0.01"], "--cache-dir /proc/none");
    refuses(&["--cache-dir", "/tmp/none", "--swap-space", "0.01", "--cache-wait", "nan"], "--cache-wait NaN");
}

#[test]
fn a_model_with_windows_hits_after_a_restart() {
    for model in ["gemma3-tiny", "gpt-oss-tiny"] {
        let dir = Dir::new();
        let folder = dir.path().join("cache");
        let folder = folder.to_str().expect("UTF-8");
        let (tokens, cached, _) = run_model(model, folder, &[]);
        assert_eq!(cached, [0; 3], "{model}");
        let (again, cached, report) = run_model(model, folder, &[]);
        assert_eq!((again, cached), (tokens, vec![64; 3]), "{model}: {report}");
    }
}

#[test]
fn monitors_read_the_counters_of_stores() {
    let (dir, model) = (Dir::new(), common::folder("qwen3-tiny"));
    let folder = dir.path().join("cache");
    let options = ["--model", &model, "--swap-space", "0.01", "--cache-dir", folder.to_str().expect("UTF-8")];
    let prompt: Vec<_> = (0..70).map(|i| (i * i) % 500).collect();
    let body = json!({ "model": "qwen3-tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0 });
    let count = |server: &Listening, name: &str| server.metric(&format!("kvarena_server_store_{name}"));
    let names = [
        r#"records_total{store="disk",what="asked"}"#,
        r#"records_total{store="disk",what="found"}"#,
        r#"records_total{store="disk",what="read"}"#,
        r#"records_total{store="disk",what="put"}"#,
        r#"records_total{store="disk",what="known"}"#,
        r#"records_total{store="disk",what="removed"}"#,
        "hit_tokens_total",
        r#"misses_total{reason="page check"}"#,
        r#"records_total{store="disk",what="passed_over"}"#,
        r#"failed_calls_total{store="disk"}"#,
        r#"queue{store="disk"}"#,
        r#"stopped{store="disk"}"#,
    ];
    let [read, put] = ["read", "put"].map(|way| format!(r#"bytes_total{{store="disk",way="{way}"}}"#));
    // A cold start, a warm one, and one whose four records are all damaged.
    let expected = [[4, 0, 0, 4, 0, 0, 0, 0], [4, 4, 4, 0, 0, 0, 64, 0], [4, 4, 0, 4, 0, 4, 0, 4]];
    let mut put_bytes = 0;
    for (run, expected) in expected.into_iter().enumerate() {
        if run == 2 {
            damage(&folder, &mut 0);
        }
        let server = Listening::start(&options);
        assert_eq!(server.post("/v1/completions", &body).0, 200);
        // The server posts its counters after the step that ends the answer, and puts when it has time.
        while count(&server, "waits_total") < 1 || count(&server, names[3]) < expected[3] {}
        let counts = names.map(|name| count(&server, name));
        assert_eq!((&counts[..8], &counts[8..]), (&expected[..], &[0; 4][..]), "run {run}");
        // Records also contain a head.
        put_bytes = put_bytes.max(count(&server, &put));
        let bytes = count(&server, &read);
        assert!(if run == 1 { bytes > 0 && bytes < put_bytes } else { bytes == 0 }, "run {run}: {bytes}, {put_bytes}");
        server.end();
    }
}

#[test]
fn an_http_server_writes_before_it_ends_and_reads_after_a_restart() {
    let (dir, model) = (Dir::new(), common::folder("qwen3-tiny"));
    let folder = dir.path().join("cache");
    let options = ["--model", &model, "--swap-space", "0.01", "--cache-dir", folder.to_str().expect("UTF-8")];
    let prompt: Vec<_> = (0..70).map(|i| (i * i) % 500).collect();
    let mut used = HashSet::new();
    for salt in [None, Some("a"), None, Some("a"), Some("b")] {
        let server = Listening::start(&options);
        let mut body = json!({ "model": "qwen3-tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0 });
        if let Some(salt) = salt {
            body["cache_salt"] = salt.into();
        }
        let (status, answer) = server.post("/v1/completions", &body);
        let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
        let is_first = used.insert(salt);
        assert_eq!((status, cached), (200, Some(if is_first { 0 } else { 64 })), "{answer}");
        server.end();
    }
}
