//! `kvbm-logical`: NVIDIA's block manager, with its LRU backend. Each measured call hashes the tokens, because a
//! request arrives as tokens. A hit locks the matched blocks and unlocks them when they are dropped.

use dynamo_tokens::TokenBlockSequence;
use kvarena::TokenId;
use kvbm_logical::manager::FrequencyTrackingCapacity;
use kvbm_logical::{BlockManager, BlockRegistry, KvbmSequenceHashProvider, SequenceHash};

use crate::Cache;

#[derive(Clone)]
struct Tier;

struct Kvbm {
    manager: BlockManager<Tier>,
    page_size: u32,
}

pub fn new(pages: usize, page_size: u32) -> Box<dyn Cache> {
    let tracker = FrequencyTrackingCapacity::Medium.create_tracker();
    let manager = BlockManager::builder()
        .block_count(pages)
        .block_size(page_size as usize)
        .registry(BlockRegistry::builder().frequency_tracker(tracker).build())
        .with_lru_backend()
        .build()
        .expect("a valid config");
    Box::new(Kvbm { manager, page_size })
}

impl Kvbm {
    fn hashes(&self, tokens: &[TokenId]) -> Vec<SequenceHash> {
        let blocks = TokenBlockSequence::from_slice(TokenId::as_raw(tokens), self.page_size, None);
        blocks.blocks().iter().map(|block| block.kvbm_sequence_hash()).collect()
    }
}

impl Cache for Kvbm {
    fn name(&self) -> &'static str {
        "kvbm-logical 1.6, LRU"
    }

    fn hit(&mut self, tokens: &[TokenId], out: &mut Vec<u32>) -> usize {
        let found = self.manager.match_blocks(&self.hashes(tokens));
        out.extend(found.iter().map(|block| block.block_id() as u32));
        found.len()
    }

    fn cycle(&mut self, tokens: &[TokenId]) -> usize {
        let hashes = self.hashes(tokens);
        let mut held = self.manager.match_blocks(&hashes);
        let matched = held.len();
        let rest = &hashes[matched..];
        let fresh = self.manager.allocate_blocks(rest.len()).expect("the rest is evictable");
        let size = self.manager.block_size();
        let staged = fresh.into_iter().zip(rest).map(|(block, &hash)| {
            block.stage(hash, size).unwrap_or_else(|_| unreachable!("the size is the manager's"))
        });
        held.extend(self.manager.register_blocks(staged.collect()));
        // Drops the deepest block first, so that a parent outlives its children.
        while held.pop().is_some() {}
        matched
    }
}
