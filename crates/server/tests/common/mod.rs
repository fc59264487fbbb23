//! Shared helpers of the program's tests: the host's models and cases, and runs of the program.

#![allow(dead_code, unused_imports)] // each test uses a part

#[path = "../../../host/tests/common/mod.rs"]
mod host;
pub mod listening;
pub mod load;
pub mod valkey;

pub use host::*;
use serde_json::{Value, json};

/// Exit code for a command line or a request that cannot be served.
pub const REQUEST: i32 = 2;
/// Exit code for a model or a GPU that cannot be used.
pub const MODEL: i32 = 3;

/// A chat template that joins the contents of messages.
pub const JOINED: &str = "{{ messages | map(attribute='content') | join(' ') }}";

/// Result of a run of the program.
pub struct Ran {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Ran {
    /// Returns the run, which must have succeeded.
    #[track_caller]
    pub fn ok(self) -> Self {
        assert_eq!(self.code, Some(0), "{}", self.err);
        self
    }

    /// Returns the JSON lines of a run, which must have succeeded.
    #[track_caller]
    pub fn lines(self) -> Vec<Value> {
        self.ok().out.lines().map(|line| serde_json::from_str(line).expect("a JSON line")).collect()
    }
}

/// Returns the path of a golden model's directory.
pub fn folder(model: &str) -> String {
    dir(model).to_str().expect("UTF-8").to_owned()
}

/// Returns the golden cases of a model as JSON lines of requests.
pub fn golden_requests(model: &str) -> String {
    let request = |case: Case| json!({ "prompt": case.prompt, "max_new_tokens": case.tokens.len() }).to_string() + "\n";
    cases(model).into_iter().map(request).collect()
}

/// Runs the program, and expects an error that contains these words.
#[track_caller]
pub fn refuses(arguments: &[&str], code: i32, words: &[&str]) {
    let Ran { code: actual, out, err } = run_server(arguments, "hello\n");
    assert_eq!((actual, &out[..]), (Some(code), ""), "{arguments:?}: {err}");
    for word in words {
        assert!(err.contains(word), "{arguments:?}: {word:?} is not in: {err}");
    }
    assert!(!err.contains("panicked"), "{err}");
    // The command line's own messages also contain its usage.
    assert!(err.starts_with("error: ") || err.trim().lines().count() == 1, "{err}");
}

/// Runs the program on the tiny Qwen3 model.
pub fn tiny(arguments: &[&str], input: &str) -> Ran {
    run_server(&[&["--model", &folder("qwen3-tiny")], arguments].concat(), input)
}

/// Serves four prompts of `len` tokens twice, one at a time. Returns the tokens of each, and the report's line about
/// swap memory.
pub fn serve_twice(variables: &[(&str, &str)], arguments: &[&str], len: usize) -> (Vec<Value>, String) {
    let prompt = |n: usize| (0..len).map(|i| (7 * n + i * i) % 500).collect::<Vec<_>>();
    let request = |n| json!({ "prompt": prompt(n), "max_new_tokens": 4 }).to_string() + "\n";
    let requests: String = (0..4).chain(0..4).map(request).collect();
    let fixed = ["--json", "--requests", "-", "--concurrency", "1"];
    let ran = run_server_with(variables, &[&fixed[..], arguments].concat(), &requests);
    let line = ran.err.lines().find(|line| line.starts_with("swap memory")).unwrap_or_default().to_owned();
    let tokens: Vec<Value> = ran.lines().into_iter().map(|mut line| line["tokens"].take()).collect();
    let tokens: Vec<Value> = tokens.into_iter().filter(Value::is_array).collect();
    assert_eq!(tokens.len(), 8, "{variables:?}");
    (tokens, line)
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
