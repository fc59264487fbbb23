//! `dynamo-kv-router`: an index of the prefixes of each worker, by hashes. It owns no pages and evicts nothing, so only
//! its look-up is measured. A look-up returns the number of cached pages.

use dynamo_kv_router::RadixTree;
use dynamo_kv_router::protocols::{
    BlockHashOptions, ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheStoreData,
    KvCacheStoredBlockData, RouterEvent, compute_block_hash_for_seq, compute_seq_hash_for_block,
};
use kvarena::TokenId;

use crate::Cache;

const WORKER: u64 = 0;

struct Router {
    tree: RadixTree,
    page_size: u32,
    events: u64,
}

pub fn new(_: usize, page_size: u32) -> Box<dyn Cache> {
    Box::new(Router { tree: RadixTree::new(), page_size, events: 0 })
}

impl Cache for Router {
    fn name(&self) -> &'static str {
        "dynamo-kv-router 1.6"
    }

    fn owns_pages(&self) -> bool {
        false
    }

    fn hit(&mut self, tokens: &[TokenId], out: &mut Vec<u32>) -> usize {
        let options = BlockHashOptions::default();
        let hashes = compute_block_hash_for_seq(TokenId::as_raw(tokens), self.page_size, options);
        let scores = self.tree.find_matches(hashes, false);
        let score = scores.scores.values().max().copied().unwrap_or(0);
        out.push(score);
        score as usize
    }

    fn cycle(&mut self, tokens: &[TokenId]) -> usize {
        let options = BlockHashOptions::default();
        let local = compute_block_hash_for_seq(TokenId::as_raw(tokens), self.page_size, options);
        let chained = compute_seq_hash_for_block(&local);
        let blocks = local.iter().zip(chained).map(|(&tokens_hash, hash)| KvCacheStoredBlockData {
            block_hash: ExternalSequenceBlockHash(hash),
            tokens_hash,
            mm_extra_info: None,
        });
        let stored = KvCacheStoreData { parent_hash: None, start_position: None, blocks: blocks.collect() };
        self.events += 1;
        let data = KvCacheEventData::Stored(stored);
        let event = KvCacheEvent { event_id: self.events, data, dp_rank: 0 };
        self.tree.apply_event(RouterEvent::new(WORKER, event)).expect("the event is valid");
        0
    }
}
