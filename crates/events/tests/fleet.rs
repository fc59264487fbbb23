//! The simulated fleet: errors of options and traces name the value or the line, and long prompts are served.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use kvarena::{Namespace, TokenId};
use kvarena_events::host::{Host, HostConfig};
use kvarena_events::trace::{TraceError, read};

const REQUEST: &str = r#"{"timestamp": 0, "input_length": 700, "output_length": 9, "hash_ids": [0, 1]}"#;

/// Writes a trace of these lines into the file `name`.
fn trace(name: &str, lines: &[&str]) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::write(&path, lines.join("\n")).expect("the folder exists");
    path
}

#[test]
fn invalid_sizes_are_errors() {
    let trace = trace("sizes.jsonl", &[REQUEST]);
    let largest = u32::MAX.to_string();
    for (page_size, pages, wanted) in [
        ("5000", None, "page_size 5000 is above 1024"),
        ("400001", None, "page_size 400001 is above 1024"),
        (&largest, Some(&largest), "page_size 4294967295 is above 1024"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvarena-events"));
        command.args(["--fleet", "1", "--page-size", page_size]).arg("--trace").arg(&trace);
        command.args(pages.into_iter().flat_map(|pages| ["--pages", pages]));
        let output = command.output().expect("the program runs");
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(error.trim_end(), format!("kvarena-events: the engine rejected the config: {wanted}"));
        assert_eq!(output.status.code(), Some(1));
    }
}

#[test]
fn a_prompt_longer_than_the_default_step_is_served() {
    let config = HostConfig { pages: 2000, ..HostConfig::default() };
    let mut host = Host::new(config).expect("the config is valid");
    let prompt: Vec<TokenId> = (0..20_000).map(TokenId::new).collect();
    assert_eq!(host.serve(Namespace::default(), &prompt, &[]), Some(0));
}

#[test]
fn errors_of_a_trace_name_the_line() {
    let line = |length: &str, id: &str| {
        format!(r#"{{"timestamp": 0, "input_length": {length}, "output_length": 9, "hash_ids": [0, {id}]}}"#)
    };
    let error =
        |name: &str, line: &str| read(&trace(name, &[REQUEST, line]), 9).expect_err("line 2 is invalid").to_string();
    assert_eq!(error("empty.jsonl", &line("0", "1")), "line 2: the prompt has no tokens");
    let large = line("700", "36028797018963968");
    assert_eq!(error("large.jsonl", &large), "line 2: id 36028797018963968 is above 36028797018963967");
    let long = line("1025", "1");
    assert_eq!(error("long.jsonl", &long), "line 2: 1025 tokens are more than 2 blocks of 512");
    assert!(error("text.jsonl", "text").starts_with("line 2 is not a request: "));
    let missing = read(&PathBuf::from("no such file"), 9);
    assert!(matches!(missing, Err(TraceError::File(_))));
}

#[test]
fn tokens_of_the_largest_id_are_generated() {
    let line = r#"{"timestamp": 0, "input_length": 512, "output_length": 0, "hash_ids": [36028797018963967]}"#;
    let requests = read(&trace("largest.jsonl", &[line]), 9).expect("a trace");
    let mut prompt = Vec::new();
    requests[0].prompt(&mut prompt);
    assert_eq!(prompt.len(), 512);
}
