//! A router that uses the published crate `dynamo-kv-router`: the crate's parser reads payloads, and the crate's index
//! finds prefixes.
//!
//! `decode.rs` checks each payload before the parser, so an invalid payload changes nothing. [`Router::apply`] omits
//! this check.

use std::fmt;

use dynamo_kv_router::RadixTree;
use dynamo_kv_router::protocols::{BlockHashOptions, WorkerWithDpRank, compute_block_hash_for_seq};
use dynamo_kv_router::zmq_wire::{ZmqEventNormalizer, decode_event_batch};
use kvarena::{NamespaceNames, TokenId};

use crate::decode::{WireError, decode};

/// Reason why the router rejects a payload.
#[derive(Debug)]
pub enum RouterError {
    /// The payload is invalid.
    Wire(WireError),
    /// The published parser rejects a payload, or drops one of its events.
    Parser(String),
    /// The index rejects an event.
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

/// Index of the prefixes that each engine caches.
pub struct Router {
    tree: RadixTree,
    normalizer: ZmqEventNormalizer,
    page_size: u32,
    /// Number of events that the parser has read.
    pub events: u64,
}

impl Router {
    /// Creates an empty index.
    pub fn new(page_size: u32) -> Self {
        let normalizer = ZmqEventNormalizer::new(page_size);
        Self { tree: RadixTree::new(), normalizer, page_size, events: 0 }
    }

    /// Checks and applies an engine's payload.
    ///
    /// # Errors
    /// [`RouterError::Wire`] leaves the index unchanged. After [`RouterError::Parser`] or [`RouterError::Index`], the
    /// events before the rejected one stay applied.
    pub fn check_and_apply(&mut self, engine: u64, payload: &[u8]) -> Result<(), RouterError> {
        decode(payload).map_err(RouterError::Wire)?;
        self.apply(engine, payload)
    }

    /// Applies a payload that the caller has checked. This part of [`Router::check_and_apply`] runs only code of the
    /// published crate.
    ///
    /// # Errors
    /// [`RouterError::Parser`] or [`RouterError::Index`].
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

    /// Returns each engine that caches the prompt's first page, and how many of the prompt's first pages it caches.
    pub fn overlap(&self, names: &NamespaceNames, prompt: &[TokenId]) -> Vec<(u64, u32)> {
        let options = BlockHashOptions {
            lora_name: names.lora.as_deref(),
            cache_namespace: names.salt.as_deref(),
            ..BlockHashOptions::default()
        };
        let hashes = compute_block_hash_for_seq(TokenId::as_raw(prompt), self.page_size, options);
        let found = self.tree.find_matches(hashes, false);
        let mut scores: Vec<_> = found.scores.iter().map(|(worker, &pages)| (worker.worker_id, pages)).collect();
        scores.sort_unstable();
        scores
    }

    /// Returns the number of (page, engine) pairs in the index.
    pub fn pages(&self) -> usize {
        self.tree.current_size()
    }
}
