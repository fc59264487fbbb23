//! The simulated fleet: errors of options and traces name the value or the line, and long prompts are served.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use kvarena::{Namespace, TokenId};
use kvarena_events::host::{Host, HostConfig};

const REQUEST: &str =
    r#"{"timestamp": 0, "input_length": 700, "output_length": 9, "hash_ids": [0, 1]}"#;

/// Writes a trace of lines into a file of its own.
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
        assert_eq!(
            error.trim_end(),
            format!("kvarena-events: the engine rejected the config: {wanted}")
        );
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
