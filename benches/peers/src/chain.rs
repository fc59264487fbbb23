//! Baseline: blocks found by chained hashes, as in vLLM. A block's hash covers its tokens and its parent's hash. A hash
//! is compared instead of the tokens. Free blocks wait in one queue, oldest first, and keep their hash until they are
//! allocated.

use std::collections::HashMap;

use ahash::RandomState;
use kvarena::TokenId;

use crate::Cache;

const NONE: u32 = u32::MAX;

#[derive(Clone)]
struct Block {
    hash: Option<u64>,
    users: u32,
    prev: u32,
    next: u32,
}

struct Chain {
    page_size: usize,
    hasher: RandomState,
    by_hash: HashMap<u64, u32, RandomState>,
    /// All blocks, with their links in the free queue. The last entry is the queue's head and tail.
    blocks: Vec<Block>,
    path: Vec<u32>,
}

pub fn new(pages: usize, page_size: u32) -> Box<dyn Cache> {
    let empty = Block { hash: None, users: 0, prev: NONE, next: NONE };
    let mut chain = Chain {
        page_size: page_size as usize,
        hasher: RandomState::with_seeds(1, 2, 3, 4),
        by_hash: HashMap::with_capacity_and_hasher(pages, RandomState::with_seeds(5, 6, 7, 8)),
        blocks: vec![empty; pages + 1],
        path: Vec::new(),
    };
    let ring = pages as u32;
    (chain.blocks[pages].prev, chain.blocks[pages].next) = (ring, ring);
    (0..pages as u32).for_each(|block| chain.append(block));
    Box::new(chain)
}

impl Chain {
    fn ring(&self) -> u32 {
        self.blocks.len() as u32 - 1
    }

    fn append(&mut self, block: u32) {
        let ring = self.ring();
        let last = self.blocks[ring as usize].prev;
        self.blocks[block as usize].prev = last;
        self.blocks[block as usize].next = ring;
        self.blocks[last as usize].next = block;
        self.blocks[ring as usize].prev = block;
    }

    fn unlink(&mut self, block: u32) {
        let Block { prev, next, .. } = self.blocks[block as usize];
        self.blocks[prev as usize].next = next;
        self.blocks[next as usize].prev = prev;
    }

    /// Removes and returns the oldest free block, and drops its hash.
    fn take(&mut self) -> u32 {
        let block = self.blocks[self.ring() as usize].next;
        assert_ne!(block, self.ring(), "a block is free");
        self.unlink(block);
        if let Some(hash) = self.blocks[block as usize].hash.take() {
            self.by_hash.remove(&hash);
        }
        block
    }
}

impl Cache for Chain {
    fn name(&self) -> &'static str {
        "hash chain (as vLLM)"
    }

    fn hit(&mut self, tokens: &[TokenId], out: &mut Vec<u32>) -> usize {
        let mut hash = 0;
        for page in tokens.chunks_exact(self.page_size) {
            hash = self.hasher.hash_one((hash, TokenId::as_raw(page)));
            let Some(&block) = self.by_hash.get(&hash) else { break };
            out.push(block);
        }
        out.len()
    }

    fn cycle(&mut self, tokens: &[TokenId]) -> usize {
        let mut path = std::mem::take(&mut self.path);
        path.clear();
        let matched = self.hit(tokens, &mut path);
        for &block in &path {
            self.blocks[block as usize].users += 1;
            self.unlink(block);
        }
        for _ in matched..tokens.len() / self.page_size {
            let block = self.take();
            self.blocks[block as usize].users = 1;
            path.push(block);
        }
        let mut hash = 0;
        for (page, &block) in tokens.chunks_exact(self.page_size).zip(&path) {
            hash = self.hasher.hash_one((hash, TokenId::as_raw(page)));
            if self.blocks[block as usize].hash.is_none() {
                self.blocks[block as usize].hash = Some(hash);
                self.by_hash.insert(hash, block);
            }
        }
        // Blocks are freed deepest first, so that a parent outlives its children.
        for &block in path.iter().rev() {
            self.blocks[block as usize].users -= 1;
            self.append(block);
        }
        self.path = path;
        matched
    }
}
