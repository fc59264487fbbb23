//! A router that believes what engines say: the index of the published crate `dynamo-kv-router`, fed by its own parser.
//!
//! Payloads are checked first (`decode.rs`): of one that is wrong nothing is taken over. Not here: how payloads come.

use std::fmt;

use dynamo_kv_router::RadixTree;
use dynamo_kv_router::protocols::{BlockHashOptions, WorkerWithDpRank, compute_block_hash_for_seq};
use dynamo_kv_router::zmq_wire::{ZmqEventNormalizer, decode_event_batch};
use kvarena::{NamespaceNames, TokenId};

use crate::decode::{WireError, decode};

/// Why a payload is not believed.
#[derive(Debug)]
pub enum RouterError {
    /// It is wrong.
    Wire(WireError),
    /// The published parser refuses what this example's takes.
    Parser(String),
    /// The index refuses an event.
    Index(String),
}

impl fmt::Display for RouterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Wire(error) => write!(f, "{error}"),
            Self::Parser(error) => write!(f, "dynamo-kv-router's parser: {error}"),
            Self::Index(error) => write!(f, "dynamo-kv-router's index: {error}"),
        }
    }
}

impl std::error::Error for RouterError {}

/// Which engine has which prefix.
pub struct Router {
    tree: RadixTree,
    normalizer: ZmqEventNormalizer,
    page_size: u32,
    /// Events taken over so far.
    pub events: u64,
}

impl Router {
    /// Creates a router without contents of any engine.
    pub fn new(page_size: u32) -> Self {
        let normalizer = ZmqEventNormalizer::new(page_size);
        Self { tree: RadixTree::new(), normalizer, page_size, events: 0 }
    }

    /// Applies a payload of an engine.
    ///
    /// # Errors
    /// [`RouterError::Wire`]: the router has applied no event of the payload.
    pub fn believe(&mut self, engine: u64, payload: &[u8]) -> Result<(), RouterError> {
        decode(payload).map_err(RouterError::Wire)?;
        self.apply(engine, payload)
    }

    /// [`Router::believe`] of a payload that is known to be right: the published crate's share of it.
    ///
    /// # Errors
    /// As [`Router::believe`].
    pub fn apply(&mut self, engine: u64, payload: &[u8]) -> Result<(), RouterError> {
        let batch = decode_event_batch(payload);
        let batch = batch.map_err(|error| RouterError::Parser(error.to_string()))?;
        let rank = batch.data_parallel_rank.unwrap_or(0).unsigned_abs();
        let worker = WorkerWithDpRank::new(engine, rank);
        for event in batch.events {
            self.events += 1;
            let event = self.normalizer.normalize(event, self.events, worker);
            let Some(event) = event.and_then(|event| event.into_router_event()) else {
                return Err(RouterError::Parser("an event is dropped".to_owned()));
            };
            let applied = self.tree.apply_event(event);
            applied.map_err(|error| RouterError::Index(format!("{error:?}")))?;
        }
        Ok(())
    }

    /// Removes all pages of an engine.
    pub fn forget(&mut self, engine: u64) {
        self.tree.clear_all_blocks(engine);
    }

    /// Returns each engine that has leading pages of a prompt, and the number of these pages.
    pub fn overlap(&self, names: &NamespaceNames, prompt: &[TokenId]) -> Vec<(u64, u32)> {
        let options = BlockHashOptions {
            lora_name: names.lora.as_deref(),
            cache_namespace: names.salt.as_deref(),
            ..BlockHashOptions::default()
        };
        let hashes = compute_block_hash_for_seq(TokenId::as_raw(prompt), self.page_size, options);
        let found = self.tree.find_matches(hashes, false);
        let mut scores: Vec<_> =
            found.scores.iter().map(|(worker, &pages)| (worker.worker_id, pages)).collect();
        scores.sort_unstable();
        scores
    }

    /// Pages that the index holds, each counted for each engine that has it.
    pub fn pages(&self) -> usize {
        self.tree.current_size()
    }
}
