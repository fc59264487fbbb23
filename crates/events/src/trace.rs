//! Reads a trace of requests in Mooncake's format: JSON lines, each with the ids of its prompt's blocks of 512 tokens.
//! Tokens are generated; equal ids generate equal tokens.

use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use kvarena::TokenId;
use serde::Deserialize;

/// Tokens per id.
const BLOCK: usize = 512;
/// Largest id whose token positions fit 64 bits.
const ID_MAX: u64 = u64::MAX / BLOCK as u64;
/// Number of distinct tokens.
const VOCABULARY: u64 = 100_000;

/// Request of the trace.
#[derive(Clone, Debug, Deserialize)]
pub struct Request {
    /// Arrival in milliseconds.
    pub timestamp: u64,
    /// Tokens of the prompt.
    pub input_length: usize,
    /// Tokens of the answer.
    pub output_length: usize,
    /// Id of each block of the prompt; the last block may be partial.
    pub hash_ids: Vec<u64>,
}

/// Error of a trace.
#[derive(Debug)]
pub enum TraceError {
    /// The file cannot be read.
    File(std::io::Error),
    /// The line is not a request.
    Line {
        /// Number of the line, from 1 on.
        line: usize,
        /// Error of the JSON parser.
        source: serde_json::Error,
    },
    /// The prompt has no tokens.
    Empty {
        /// Number of the line, from 1 on.
        line: usize,
    },
    /// The id of a block is too large.
    Id {
        /// Number of the line, from 1 on.
        line: usize,
        /// Id of the block.
        id: u64,
    },
    /// The prompt is longer than its blocks.
    Blocks {
        /// Number of the line, from 1 on.
        line: usize,
        /// Tokens of the prompt.
        tokens: usize,
        /// Number of blocks.
        blocks: usize,
    },
}

impl fmt::Display for TraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(error) => write!(f, "the trace: {error}"),
            Self::Line { line, source } => write!(f, "line {line} is not a request: {source}"),
            Self::Empty { line } => write!(f, "line {line}: the prompt has no tokens"),
            Self::Id { line, id } => write!(f, "line {line}: id {id} is above {ID_MAX}"),
            Self::Blocks { line, tokens, blocks } => {
                write!(f, "line {line}: {tokens} tokens are more than {blocks} blocks of {BLOCK}")
            }
        }
    }
}

impl std::error::Error for TraceError {}

/// Reads at most `most` requests.
///
/// # Errors
/// [`TraceError`].
pub fn read(path: &Path, most: usize) -> Result<Vec<Request>, TraceError> {
    let file = BufReader::new(File::open(path).map_err(TraceError::File)?);
    let mut requests = Vec::new();
    for (index, text) in file.lines().take(most).enumerate() {
        let (line, text) = (index + 1, text.map_err(TraceError::File)?);
        let request: Request = serde_json::from_str(&text).map_err(|source| TraceError::Line { line, source })?;
        let (tokens, blocks) = (request.input_length, request.hash_ids.len());
        if tokens == 0 {
            return Err(TraceError::Empty { line });
        }
        if let Some(&id) = request.hash_ids.iter().find(|&&id| id > ID_MAX) {
            return Err(TraceError::Id { line, id });
        }
        if tokens > blocks * BLOCK {
            return Err(TraceError::Blocks { line, tokens, blocks });
        }
        requests.push(request);
    }
    Ok(requests)
}

fn token(block: u64, offset: usize) -> TokenId {
    // The first steps of splitmix64 mix the bits, so that neighbouring positions have unrelated tokens.
    let mut x = (block * BLOCK as u64 + offset as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    TokenId::new(((x ^ x >> 27) % VOCABULARY) as u32)
}

impl Request {
    /// Replaces `into` with the tokens of the prompt.
    pub fn prompt(&self, into: &mut Vec<TokenId>) {
        into.clear();
        let blocks = self.hash_ids.iter();
        into.extend(blocks.flat_map(|&id| (0..BLOCK).map(move |at| token(id, at))));
        into.truncate(self.input_length);
    }

    /// Replaces `into` with the tokens of the answer. `number` is the request's number, so answers differ.
    pub fn answer(&self, number: usize, into: &mut Vec<TokenId>) {
        into.clear();
        let block = 1 << 32 | (number as u64) << 8;
        into.extend((0..self.output_length).map(|at| token(block + (at / BLOCK) as u64, at % BLOCK)));
    }
}
