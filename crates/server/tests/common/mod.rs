//! Shared helpers of the program's tests: the host's models and cases, and runs of the program.

#![allow(dead_code, unused_imports)] // each test uses a part

#[path = "../../../host/tests/common/mod.rs"]
mod host;
pub mod listening;

pub use host::*;

/// A chat template that joins the contents of messages.
pub const JOINED: &str = "{{ messages | map(attribute='content') | join(' ') }}";

/// Result of a run of the program.
pub struct Ran {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

/// Runs the program on the tiny Qwen3 model.
pub fn tiny(arguments: &[&str], input: &str) -> Ran {
    let dir = dir("qwen3-tiny");
    run_server(&[&["--model", dir.to_str().expect("UTF-8")], arguments].concat(), input)
}

/// Runs the program with these arguments and this standard input.
pub fn run_server(arguments: &[&str], input: &str) -> Ran {
    run_server_with(&[], arguments, input)
}

/// Runs the program with environment variables.
pub fn run_server_with(variables: &[(&str, &str)], arguments: &[&str], input: &str) -> Ran {
    use std::io::Write;
    use std::process::{Command, Stdio};
    let mut child = Command::new(env!("CARGO_BIN_EXE_kvarena-server"))
        .args(arguments)
        .envs(variables.iter().copied())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    // A program that rejects its arguments does not read its input.
    let _ = child.stdin.take().expect("piped").write_all(input.as_bytes());
    let output = child.wait_with_output().expect("the program ends");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    Ran { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}
