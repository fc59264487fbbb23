//! A router that uses the published crate `dynamo-kv-router`: the crate's parser reads payloads, and the crate's index
//! finds prefixes.

use std::error::Error;

use dynamo_kv_router::RadixTree;
use dynamo_kv_router::protocols::{BlockHashOptions, WorkerWithDpRank, compute_block_hash_for_seq};
use dynamo_kv_router::zmq_wire::{ZmqEventNormalizer, decode_event_batch};
use kvarena::TokenId;
use kvarena::hash::NamespaceNames;
use kvarena_events::decode::decode;

/// Index of the prefixes that each engine caches.
pub struct Router {
    tree: RadixTree,
    normalizer: ZmqEventNormalizer,
    page_size: u32,
    /// Number of events that the parser has read.
    events: u64,
}

impl Router {
    pub fn new(page_size: u32) -> Self {
        Self { tree: RadixTree::new(), normalizer: ZmqEventNormalizer::new(page_size), page_size, events: 0 }
    }

    /// Checks and applies an engine's payload. A [`WireError`](kvarena_events::decode::WireError) leaves the index
    /// unchanged.
    pub fn check_and_apply(&mut self, engine: u64, payload: &[u8]) -> Result<(), Box<dyn Error>> {
        decode(payload)?;
        self.apply(engine, payload)
    }

    /// Applies a payload that the caller has checked. This part of [`Router::check_and_apply`] runs only code of the
    /// published crate. After an error, the events before the rejected one stay applied.
    pub fn apply(&mut self, engine: u64, payload: &[u8]) -> Result<(), Box<dyn Error>> {
        let batch = decode_event_batch(payload).map_err(|error| error.to_string())?;
        let rank = batch.data_parallel_rank.unwrap_or(0).unsigned_abs();
        for event in batch.events {
            self.events += 1;
            let event = self.normalizer.normalize(event, self.events, WorkerWithDpRank::new(engine, rank));
            let event = event.and_then(|event| event.into_router_event()).ok_or("dynamo-kv-router drops an event")?;
            self.tree.apply_event(event).map_err(|error| format!("dynamo-kv-router's index: {error:?}"))?;
        }
        Ok(())
    }

    /// Removes all pages of an engine.
    #[allow(dead_code)] // Only the tests restart engines.
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
