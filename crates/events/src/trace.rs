//! A trace of requests, as Mooncake publishes them: JSON lines, each with the ids of its prompt's blocks of 512 tokens.
//! Equal ids are equal tokens, which are made up here.

use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use kvarena::TokenId;
use serde::Deserialize;

/// Tokens that an id stands for.
const BLOCK: usize = 512;
/// Tokens are below this.
const VOCABULARY: u64 = 100_000;

/// A line.
#[derive(Clone, Debug, Deserialize)]
pub struct Request {
    /// Milliseconds.
    pub timestamp: u64,
    /// Tokens of the prompt.
    pub input_length: usize,
    /// Tokens of the answer.
    pub output_length: usize,
    /// Of each block of the prompt, the last one perhaps not whole.
    pub hash_ids: Vec<u64>,
}

/// Why a trace cannot be read.
#[derive(Debug)]
pub enum TraceError {
    /// The file.
    File(std::io::Error),
    /// A line that is no request.
    Line {
        /// Its number, from 1 on.
        line: usize,
        /// What is wrong.
        source: serde_json::Error,
    },
    /// A prompt longer than its blocks.
    Blocks {
        /// The line's number, from 1 on.
        line: usize,
        /// Tokens of the prompt.
        tokens: usize,
        /// Its blocks.
        blocks: usize,
    },
}

impl fmt::Display for TraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(error) => write!(f, "the trace: {error}"),
            Self::Line { line, source } => write!(f, "line {line} is no request: {source}"),
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
        let request: Request =
            serde_json::from_str(&text).map_err(|source| TraceError::Line { line, source })?;
        let (tokens, blocks) = (request.input_length, request.hash_ids.len());
        if tokens > blocks * BLOCK {
            return Err(TraceError::Blocks { line, tokens, blocks });
        }
        requests.push(request);
    }
    Ok(requests)
}

fn token(block: u64, offset: usize) -> TokenId {
    // Constants of splitmix64: neighbours have nothing in common.
    let mut x = (block * BLOCK as u64 + offset as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    TokenId::new(((x ^ x >> 27) % VOCABULARY) as u32)
}

impl Request {
    /// Its prompt.
    pub fn prompt(&self, into: &mut Vec<TokenId>) {
        into.clear();
        let blocks = self.hash_ids.iter();
        into.extend(blocks.flat_map(|&id| (0..BLOCK).map(move |at| token(id, at))));
        into.truncate(self.input_length);
    }

    /// Its answer, which is that of no other request.
    pub fn answer(&self, number: usize, into: &mut Vec<TokenId>) {
        into.clear();
        let block = 1 << 32 | (number as u64) << 8;
        into.extend(
            (0..self.output_length).map(|at| token(block + (at / BLOCK) as u64, at % BLOCK)),
        );
    }
}
