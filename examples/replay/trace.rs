//! Reads a request trace in Mooncake's JSON-lines format.
//!
//! One object a line: `timestamp` (ms), `input_length`, `output_length`, and `hash_ids`, one for each 512 tokens of the
//! prompt; equal ids mean equal content. The lines' order is the order of arrival.

use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::request::{Piece, Request};

/// Tokens that one hash id stands for.
const HASH_TOKENS: u32 = 512;
/// Hash ids below this own their stretch of the token stream; larger ones (64-bit hashes) are spread over it.
const SMALL_IDS: u64 = 1 << 22;
/// Sampled tokens are numbered from here: above the small ids' tokens.
const FIRST_OUTPUT: u64 = SMALL_IDS * HASH_TOKENS as u64;

/// A line as it stands in the file.
#[derive(Deserialize)]
struct Line {
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
}

/// Why a trace cannot be replayed, and where.
#[derive(Debug)]
pub enum TraceError {
    /// The file cannot be opened.
    Open { file: PathBuf, source: io::Error },
    /// A line cannot be read: the file ends early, or is not UTF-8.
    Read { file: PathBuf, line: usize, source: io::Error },
    /// A line is not a JSON object with the four fields.
    Json { file: PathBuf, line: usize, source: serde_json::Error },
    /// Not one hash id for each 512 tokens of the prompt.
    HashIds { file: PathBuf, line: usize, input_length: u32, expected: usize, actual: usize },
    /// A prompt of no tokens.
    EmptyPrompt { file: PathBuf, line: usize },
    /// Lengths whose sum does not fit 32 bits.
    TooLong { file: PathBuf, line: usize, len: u64 },
    /// No request at all.
    Empty { file: PathBuf },
}

impl fmt::Display for TraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Open { file, .. } => write!(f, "{} cannot be opened", file.display()),
            Self::Read { file, line, .. } => {
                write!(f, "{}:{line}: the line cannot be read", file.display())
            }
            Self::Json { file, line, .. } => {
                write!(f, "{}:{line}: the line is not a request in JSON", file.display())
            }
            Self::HashIds { file, line, input_length, expected, actual } => write!(
                f,
                "{}:{line}: input_length {input_length} takes {expected} hash_ids, but there are {actual}",
                file.display()
            ),
            Self::EmptyPrompt { file, line } => {
                write!(f, "{}:{line}: input_length is 0", file.display())
            }
            Self::TooLong { file, line, len } => {
                write!(f, "{}:{line}: a request of {len} tokens is too long", file.display())
            }
            Self::Empty { file } => write!(f, "{} has no requests", file.display()),
        }
    }
}

impl std::error::Error for TraceError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Open { source, .. } | Self::Read { source, .. } => Some(source),
            Self::Json { source, .. } => Some(source),
            _ => None,
        }
    }
}

/// Reads the trace in `file`, at most `max` requests of it.
pub fn read(file: &Path, max: usize) -> Result<Vec<Request>, TraceError> {
    let opened =
        File::open(file).map_err(|source| TraceError::Open { file: file.into(), source })?;
    parse(BufReader::new(opened), file, max)
}

fn parse(input: impl BufRead, file: &Path, max: usize) -> Result<Vec<Request>, TraceError> {
    let mut requests = Vec::new();
    let mut output_first = FIRST_OUTPUT;
    for (line, text) in (1..).zip(input.lines()) {
        if requests.len() == max {
            break;
        }
        let text = text.map_err(|source| TraceError::Read { file: file.into(), line, source })?;
        if text.trim().is_empty() {
            continue;
        }
        let parsed: Line = serde_json::from_str(&text).map_err(|source| TraceError::Json {
            file: file.into(),
            line,
            source,
        })?;
        let request = request(&parsed, output_first, file, line)?;
        output_first += u64::from(request.output.len);
        requests.push(request);
    }
    if requests.is_empty() {
        return Err(TraceError::Empty { file: file.into() });
    }
    Ok(requests)
}

fn request(
    line: &Line,
    output_first: u64,
    file: &Path,
    number: usize,
) -> Result<Request, TraceError> {
    let input = line.input_length;
    let (expected, actual) = (input.div_ceil(HASH_TOKENS) as usize, line.hash_ids.len());
    if input == 0 {
        return Err(TraceError::EmptyPrompt { file: file.into(), line: number });
    }
    if expected != actual {
        return Err(TraceError::HashIds {
            file: file.into(),
            line: number,
            input_length: input,
            expected,
            actual,
        });
    }
    let len = u64::from(input) + u64::from(line.output_length);
    if len >= u64::from(u32::MAX) {
        return Err(TraceError::TooLong { file: file.into(), line: number, len });
    }
    let mut left = input;
    let prompt = line.hash_ids.iter().map(|&id| {
        let len = left.min(HASH_TOKENS);
        left -= len;
        Piece { first: first_token(id), len }
    });
    Ok(Request {
        arrival_ms: line.timestamp.max(0.0) as u64,
        prompt: prompt.collect(),
        // A prefill always samples one token; a trace that says 0 means that nobody looks at it.
        output: Piece { first: output_first, len: line.output_length.max(1) },
    })
}

/// Where the 512 tokens of a hash id begin in the stream: a function of the id alone.
fn first_token(id: u64) -> u64 {
    if id < SMALL_IDS {
        return id * u64::from(HASH_TOKENS);
    }
    // Half of the range, so that a piece does not run over the end.
    (id.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (id >> 29)) >> 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_text(text: &str) -> Result<Vec<Request>, TraceError> {
        parse(text.as_bytes(), Path::new("some.jsonl"), usize::MAX)
    }

    fn message(text: &str) -> String {
        parse_text(text).expect_err("the trace is bad").to_string()
    }

    const GOOD: &str =
        r#"{"timestamp": 3, "input_length": 513, "output_length": 2, "hash_ids": [9, 4]}"#;

    #[test]
    fn a_line_becomes_a_request() {
        let requests = parse_text(&format!("{GOOD}\n\n{GOOD}\n")).expect("the trace is good");
        let prompt = vec![Piece { first: 9 * 512, len: 512 }, Piece { first: 4 * 512, len: 1 }];
        assert_eq!(requests.len(), 2);
        assert_eq!(requests[0].prompt, prompt);
        assert_eq!(requests[0].arrival_ms, 3);
        // The same prompt, but tokens of its own.
        assert_eq!(requests[1].prompt, prompt);
        assert_eq!(requests[1].output.first, requests[0].output.first + 2);
    }

    #[test]
    fn the_committed_trace_reads() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/trace.jsonl");
        assert_eq!(read(&file, usize::MAX).expect("the trace is good").len(), 20);
        assert_eq!(read(&file, 3).expect("the trace is good").len(), 3);
    }

    #[test]
    fn bad_lines_are_named() {
        let not_json = format!("{GOOD}\nhello\n");
        assert_eq!(message(&not_json), "some.jsonl:2: the line is not a request in JSON");
        let field = r#"{"timestamp": 3, "input_length": -1, "output_length": 2, "hash_ids": []}"#;
        assert_eq!(message(field), "some.jsonl:1: the line is not a request in JSON");
        let missing = r#"{"timestamp": 3, "input_length": 5, "output_length": 2}"#;
        assert_eq!(message(missing), "some.jsonl:1: the line is not a request in JSON");
        let lie =
            r#"{"timestamp": 3, "input_length": 1025, "output_length": 2, "hash_ids": [1, 2]}"#;
        assert_eq!(
            message(&format!("{GOOD}\n{GOOD}\n{lie}")),
            "some.jsonl:3: input_length 1025 takes 3 hash_ids, but there are 2"
        );
        let long =
            r#"{"timestamp": 3, "input_length": 1, "output_length": 4294967295, "hash_ids": [1]}"#;
        assert_eq!(message(long), "some.jsonl:1: a request of 4294967296 tokens is too long");
        let empty = r#"{"timestamp": 3, "input_length": 0, "output_length": 2, "hash_ids": []}"#;
        assert_eq!(message(empty), "some.jsonl:1: input_length is 0");
        assert_eq!(message("\n"), "some.jsonl has no requests");
        let bytes: &[u8] = b"\xff\xfe\n";
        let error = parse(bytes, Path::new("some.jsonl"), 1).expect_err("not UTF-8");
        assert_eq!(error.to_string(), "some.jsonl:1: the line cannot be read");
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = read(Path::new("no/such.jsonl"), 1).expect_err("there is no such file");
        assert_eq!(error.to_string(), "no/such.jsonl cannot be opened");
    }

    #[test]
    fn large_ids_do_not_overflow() {
        let ids = [SMALL_IDS - 1, SMALL_IDS, u64::MAX / 2, u64::MAX - 1, u64::MAX];
        let firsts = ids.map(first_token);
        for (i, a) in firsts.iter().enumerate() {
            assert!(firsts[i + 1..].iter().all(|b| a.abs_diff(*b) >= 512));
        }
    }
}
