//! The programs' options.

use std::process::{Command, Stdio};

/// `--new-tokens` must be at least 1.
#[test]
fn no_new_tokens_are_a_usage_error() {
    for program in [env!("CARGO_BIN_EXE_chat"), env!("CARGO_BIN_EXE_batch")] {
        let mut command = Command::new(program);
        let output = command.args(["--new-tokens", "0"]).stdin(Stdio::null()).output();
        let output = output.expect("the program runs");
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{program}: {error}");
        assert!(error.contains("'0' for '--new-tokens <NEW_TOKENS>'"), "{program}: {error}");
    }
}
