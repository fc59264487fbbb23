//! Reads a request trace in Mooncake's JSON-lines format.
//!
//! One object a line: `timestamp` (ms), `input_length`, `output_length`, and `hash_ids`, one for each 512 tokens of the
//! prompt. Equal ids mean equal content. The order of lines is the order of arrival. Traces with another block size may
//! have ids of whole blocks only.

use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::request::{Piece, Request};

/// Default number of tokens of a hash id.
const HASH_TOKENS: u32 = 512;
/// Tokens without a hash id, including sampled tokens, are numbered from here on. A small hash id owns a range of the
/// numbers below this one. Ids that are too large for such a range (64-bit hashes) are spread over the token stream.
const FIRST_OWN: u64 = 1 << 31;

/// A line of the file.
#[derive(Deserialize)]
struct Line {
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
}

/// Reason why a trace cannot be replayed, with its place.
#[derive(Debug)]
pub enum TraceError {
    /// The file cannot be opened.
    Open { file: PathBuf, source: io::Error },
    /// A line cannot be read: reading the input fails, or the line is not UTF-8.
    Read { file: PathBuf, line: usize, source: io::Error },
    /// A line is not a JSON object with the four fields.
    Json { file: PathBuf, line: usize, source: serde_json::Error },
    /// The line does not have one hash id for each block of the prompt, or for each whole block if `--block` is given.
    HashIds { file: PathBuf, line: usize, input_length: u32, expected: usize, actual: usize },
    /// The prompt has no tokens.
    EmptyPrompt { file: PathBuf, line: usize },
    /// The sum of the lengths is 2^32 - 1 or more.
    TooLong { file: PathBuf, line: usize, len: u64 },
    /// The trace has no requests.
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

/// The name of standard input on the command line.
const STANDARD_INPUT: &str = "-";

/// Returns the name of a trace: the name of `file` without its folders, or "standard input".
pub fn name(file: &Path) -> String {
    match file.as_os_str() {
        name if name == STANDARD_INPUT => "standard input".to_owned(),
        name => file.file_name().unwrap_or(name).to_string_lossy().into_owned(),
    }
}

/// Reads at most `max` requests of the trace in `file`. `block` sets the tokens of a hash id; ids may then cover whole
/// blocks only.
pub fn read(file: &Path, max: usize, block: Option<u32>) -> Result<Vec<Request>, TraceError> {
    if file.as_os_str() == STANDARD_INPUT {
        return parse(io::stdin().lock(), Path::new(&name(file)), max, block);
    }
    let opened = File::open(file).map_err(|source| TraceError::Open { file: file.into(), source })?;
    parse(BufReader::new(opened), file, max, block)
}

fn parse(input: impl BufRead, file: &Path, max: usize, block: Option<u32>) -> Result<Vec<Request>, TraceError> {
    let mut requests = Vec::new();
    let mut own = FIRST_OWN;
    for (line, text) in (1..).zip(input.lines()) {
        if requests.len() == max {
            break;
        }
        let text = text.map_err(|source| TraceError::Read { file: file.into(), line, source })?;
        if text.trim().is_empty() {
            continue;
        }
        let parsed: Line =
            serde_json::from_str(&text).map_err(|source| TraceError::Json { file: file.into(), line, source })?;
        let request = request(&parsed, own, block, file, line)?;
        own = request.output.first + u64::from(request.output.len);
        requests.push(request);
    }
    if requests.is_empty() {
        return Err(TraceError::Empty { file: file.into() });
    }
    Ok(requests)
}

/// Returns the request of a line. Its tokens without a hash id are numbered from `own` on.
fn request(line: &Line, own: u64, block: Option<u32>, file: &Path, number: usize) -> Result<Request, TraceError> {
    let (input, size) = (line.input_length, block.unwrap_or(HASH_TOKENS));
    let (expected, actual) = (input.div_ceil(size) as usize, line.hash_ids.len());
    let whole_blocks = block.is_some() && actual == (input / size) as usize;
    if input == 0 {
        return Err(TraceError::EmptyPrompt { file: file.into(), line: number });
    }
    if expected != actual && !whole_blocks {
        return Err(TraceError::HashIds { file: file.into(), line: number, input_length: input, expected, actual });
    }
    let len = u64::from(input) + u64::from(line.output_length);
    if len >= u64::from(u32::MAX) {
        return Err(TraceError::TooLong { file: file.into(), line: number, len });
    }
    let (mut left, mut prompt) = (input, Vec::new());
    for &id in &line.hash_ids {
        let len = left.min(size);
        left -= len;
        join(&mut prompt, Piece { first: first_token(id, size), len });
    }
    if left > 0 {
        prompt.push(Piece { first: own, len: left });
    }
    Ok(Request {
        arrival_ms: line.timestamp.max(0.0) as u64,
        prompt,
        // A prefill always samples one token. A trace with 0 means that the client ignores it.
        output: Piece { first: own + u64::from(left), len: line.output_length.max(1) },
    })
}

/// Appends a piece to the prompt, or extends the last piece if the new piece continues it. Traces number new blocks in
/// order, so a prompt of many blocks has few pieces.
fn join(prompt: &mut Vec<Piece>, piece: Piece) {
    match prompt.last_mut() {
        Some(last) if last.first + u64::from(last.len) == piece.first => last.len += piece.len,
        _ => prompt.push(piece),
    }
}

/// Returns the start of a hash id's tokens in the stream, which depends only on the id and the block size.
fn first_token(id: u64, size: u32) -> u64 {
    if id < FIRST_OWN / u64::from(size) {
        return id * u64::from(size);
    }
    // The shift keeps the start below 2^63, so that the end of a piece does not overflow.
    (id.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (id >> 29)) >> 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_text(text: &str) -> Result<Vec<Request>, TraceError> {
        parse(text.as_bytes(), Path::new("some.jsonl"), usize::MAX, None)
    }

    fn message(text: &str) -> String {
        parse_text(text).expect_err("the trace is invalid").to_string()
    }

    const GOOD: &str = r#"{"timestamp": 3, "input_length": 513, "output_length": 2, "hash_ids": [9, 4]}"#;

    #[test]
    fn a_line_is_a_request() {
        let requests = parse_text(&format!("{GOOD}\n\n{GOOD}\n")).expect("the trace is valid");
        let prompt = vec![Piece { first: 9 * 512, len: 512 }, Piece { first: 4 * 512, len: 1 }];
        assert_eq!(requests.len(), 2);
        assert_eq!(requests[0].prompt, prompt);
        assert_eq!(requests[0].arrival_ms, 3);
        // The same prompt, with an answer of its own.
        assert_eq!(requests[1].prompt, prompt);
        assert_eq!(requests[1].output.first, requests[0].output.first + 2);
    }

    #[test]
    fn ids_may_cover_whole_blocks_only() {
        let line = |len: u32, ids: &str| {
            format!(r#"{{"timestamp": 3, "input_length": {len}, "output_length": 2, "hash_ids": {ids}}}"#)
        };
        let read = |text: &str| parse(text.as_bytes(), Path::new("some.jsonl"), 9, Some(64));
        let text = format!("{}\n{}\n{}", line(130, "[7, 8]"), line(3, "[]"), line(130, "[9, 8, 7]"));
        let requests = read(&text).expect("the trace is valid");
        // Adjacent blocks form one piece, and the rest has its own numbers.
        let blocks = Piece { first: 7 * 64, len: 128 };
        assert_eq!(requests[0].prompt, [blocks, Piece { first: FIRST_OWN, len: 2 }]);
        assert_eq!(requests[0].output, Piece { first: FIRST_OWN + 2, len: 2 });
        assert_eq!(requests[1].prompt, [Piece { first: FIRST_OWN + 4, len: 3 }]);
        assert_eq!(requests[1].output.first, FIRST_OWN + 7);
        // With a hash id for the rest.
        let pieces = [(9 * 64, 64), (8 * 64, 64), (7 * 64, 2)].map(|(first, len)| Piece { first, len });
        assert_eq!(requests[2].prompt, pieces);
        for ids in ["[7]", "[7, 8, 9, 10]"] {
            assert!(read(&line(130, ids)).is_err(), "{ids}");
        }
        assert!(parse_text(&line(513, "[9]")).is_err());
    }

    #[test]
    fn bad_lines_are_named() {
        let not_json = format!("{GOOD}\nhello\n");
        assert_eq!(message(&not_json), "some.jsonl:2: the line is not a request in JSON");
        let field = r#"{"timestamp": 3, "input_length": -1, "output_length": 2, "hash_ids": []}"#;
        assert_eq!(message(field), "some.jsonl:1: the line is not a request in JSON");
        let missing = r#"{"timestamp": 3, "input_length": 5, "output_length": 2}"#;
        assert_eq!(message(missing), "some.jsonl:1: the line is not a request in JSON");
        let lie = r#"{"timestamp": 3, "input_length": 1025, "output_length": 2, "hash_ids": [1, 2]}"#;
        assert_eq!(
            message(&format!("{GOOD}\n{GOOD}\n{lie}")),
            "some.jsonl:3: input_length 1025 takes 3 hash_ids, but there are 2"
        );
        let long = r#"{"timestamp": 3, "input_length": 1, "output_length": 4294967295, "hash_ids": [1]}"#;
        assert_eq!(message(long), "some.jsonl:1: a request of 4294967296 tokens is too long");
        let empty = r#"{"timestamp": 3, "input_length": 0, "output_length": 2, "hash_ids": []}"#;
        assert_eq!(message(empty), "some.jsonl:1: input_length is 0");
        assert_eq!(message("\n"), "some.jsonl has no requests");
        let bytes: &[u8] = b"\xff\xfe\n";
        let error = parse(bytes, Path::new("some.jsonl"), 1, None).expect_err("not UTF-8");
        assert_eq!(error.to_string(), "some.jsonl:1: the line cannot be read");
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = read(Path::new("no/such.jsonl"), 1, None).expect_err("the file does not exist");
        assert_eq!(error.to_string(), "no/such.jsonl cannot be opened");
    }

    #[test]
    fn large_ids_do_not_overflow() {
        for size in [512, 64] {
            let small = FIRST_OWN / u64::from(size);
            let ids = [small - 1, small, u64::MAX / 2, u64::MAX - 1, u64::MAX];
            let firsts = ids.map(|id| first_token(id, size));
            for (i, a) in firsts.iter().enumerate() {
                assert!(firsts[i + 1..].iter().all(|b| a.abs_diff(*b) >= u64::from(size)));
            }
        }
    }
}
