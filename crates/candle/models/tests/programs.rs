//! The programs' options.

use std::path::Path;
use std::process::{Command, Stdio};

const PROGRAMS: [&str; 2] = [env!("CARGO_BIN_EXE_chat"), env!("CARGO_BIN_EXE_batch")];

/// `--new-tokens` must be at least 1.
#[test]
fn no_new_tokens_are_a_usage_error() {
    for program in PROGRAMS {
        let mut command = Command::new(program);
        let output = command.args(["--model", ".", "--new-tokens", "0"]).stdin(Stdio::null()).output();
        let output = output.expect("the program runs");
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{program}: {error}");
        assert!(error.contains("'0' for '--new-tokens <NEW_TOKENS>'"), "{program}: {error}");
    }
}

/// A program that contains the path of its sources works only on the machine that built it.
#[test]
fn programs_contain_no_build_path() {
    let path = env!("CARGO_MANIFEST_DIR").as_bytes();
    for program in PROGRAMS {
        let bytes = std::fs::read(program).expect("it was built");
        assert!(!bytes.windows(path.len()).any(|window| window == path), "{program}");
    }
}

/// The prompts run together, also those of a model whose groups of layers take several pages for the same tokens.
#[test]
fn a_batch_runs_all_prompts_together() {
    for name in ["qwen3-tiny", "gemma3-tiny"] {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../host/tests/data").join(name);
        let mut command = Command::new(env!("CARGO_BIN_EXE_batch"));
        let output = command.arg("--model").arg(model).args(["--new-tokens", "16"]).output();
        let text = String::from_utf8(output.expect("the program runs").stdout).expect("text");
        let row = text.lines().find_map(|line| line.strip_prefix("| kvarena | ")).expect("a row");
        // One of eight prompts joins in each step, and the last one takes 16 steps.
        assert!(row.starts_with("128 | 23 | "), "{name}: {text}");
    }
}
