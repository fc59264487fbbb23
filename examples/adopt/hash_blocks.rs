//! The block manager that most engines write: a map from chained hashes of blocks to blocks, counts of users, and a
//! queue of free blocks. It compares hashes, not tokens.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::manager::{BlockManager, NULL_BLOCK, RequestId, Scheduled, StepInputs};

#[derive(Clone, Copy, Default)]
struct Block {
    /// Number of requests that have the block. A block without users is in the queue.
    users: u32,
    /// Hash of the tokens up to the block's end, once these have K and V.
    hash: Option<u64>,
    /// Neighbours in the queue, a circle through the null block.
    prev: u32,
    next: u32,
}

#[derive(Clone)]
struct Request {
    blocks: Vec<u32>,
    /// Hashes of the whole blocks of the known tokens, or of fewer.
    hashes: Vec<u64>,
    /// Number of tokens with K and V.
    computed: usize,
}

pub struct HashBlocks {
    block_size: usize,
    blocks: Vec<Block>,
    free: usize,
    cached: HashMap<u64, u32>,
    requests: HashMap<RequestId, Request>,
    /// Id, length and hashes of the last prompt, which is looked up and then allocated.
    prompt: (RequestId, usize, Vec<u64>),
    /// The scheduled batch.
    batch: Vec<RequestId>,
    /// Copies that wait for the next step.
    copies: Vec<[u32; 2]>,
}

fn chain(parent: u64, tokens: &[u32]) -> u64 {
    let mut hasher = DefaultHasher::new();
    parent.hash(&mut hasher);
    tokens.hash(&mut hasher);
    hasher.finish()
}

impl HashBlocks {
    pub fn new(blocks: usize, block_size: usize) -> Self {
        let mut manager = Self {
            block_size,
            blocks: vec![Block::default(); blocks],
            free: 0,
            cached: HashMap::new(),
            requests: HashMap::new(),
            prompt: (0, 0, Vec::new()),
            batch: Vec::new(),
            copies: Vec::new(),
        };
        (NULL_BLOCK + 1..blocks as u32).for_each(|block| manager.push(block));
        manager
    }

    fn link(&mut self, prev: u32, next: u32) {
        self.blocks[prev as usize].next = next;
        self.blocks[next as usize].prev = prev;
    }

    /// Appends a block to the queue.
    fn push(&mut self, block: u32) {
        self.link(self.blocks[NULL_BLOCK as usize].prev, block);
        self.link(block, NULL_BLOCK);
        self.free += 1;
    }

    /// Takes a block from the queue, wherever it is.
    fn unlink(&mut self, block: u32) {
        let Block { prev, next, .. } = self.blocks[block as usize];
        self.link(prev, next);
        self.free -= 1;
    }

    /// Takes the first block of the queue for one user, and evicts its tokens.
    fn pop(&mut self) -> u32 {
        let block = self.blocks[NULL_BLOCK as usize].next;
        self.unlink(block);
        if let Some(hash) = self.blocks[block as usize].hash.take()
            && self.cached.get(&hash) == Some(&block)
        {
            self.cached.remove(&hash);
        }
        self.blocks[block as usize].users = 1;
        block
    }

    /// Adds a user to a block.
    fn touch(&mut self, block: u32) {
        if self.blocks[block as usize].users == 0 {
            self.unlink(block);
        }
        self.blocks[block as usize].users += 1;
    }

    /// Removes a user of each block. The last blocks enter the queue first, so that prefixes outlive what follows them.
    fn release(&mut self, blocks: &[u32]) {
        for &block in blocks.iter().rev() {
            self.blocks[block as usize].users -= 1;
            if self.blocks[block as usize].users == 0 {
                self.push(block);
            }
        }
    }

    fn hash_prompt(&mut self, id: RequestId, tokens: &[u32]) {
        let (last, len, hashes) = &mut self.prompt;
        if (*last, *len) == (id, tokens.len()) {
            return;
        }
        (*last, *len) = (id, tokens.len());
        hashes.clear();
        for block in tokens.chunks_exact(self.block_size) {
            hashes.push(chain(hashes.last().copied().unwrap_or(0), block));
        }
    }

    /// Returns the computed blocks of the last prompt.
    fn hits(&self) -> impl Iterator<Item = u32> {
        let (_, len, hashes) = &self.prompt;
        let whole = len.saturating_sub(1) / self.block_size;
        hashes[..whole].iter().map_while(|hash| self.cached.get(hash).copied())
    }
}

impl BlockManager for HashBlocks {
    fn num_usable_blocks(&self) -> usize {
        self.blocks.len() - 1
    }

    fn num_free_blocks(&self) -> usize {
        self.free
    }

    fn get_computed_blocks(&mut self, id: RequestId, prompt: &[u32]) -> usize {
        self.hash_prompt(id, prompt);
        self.hits().count() * self.block_size
    }

    fn allocate_slots(&mut self, id: RequestId, prompt: &[u32], len: usize) -> bool {
        let wanted = len.div_ceil(self.block_size);
        if let Some(request) = self.requests.get(&id) {
            let more = wanted.saturating_sub(request.blocks.len());
            if more > self.free {
                return false;
            }
            let blocks: Vec<u32> = (0..more).map(|_| self.pop()).collect();
            self.requests.get_mut(&id).expect("it is known").blocks.extend(blocks);
            return true;
        }
        self.hash_prompt(id, prompt);
        let mut blocks = Vec::with_capacity(wanted);
        blocks.extend(self.hits());
        let idle = blocks.iter().filter(|&&block| self.blocks[block as usize].users == 0).count();
        let more = wanted.saturating_sub(blocks.len());
        if more + idle > self.free {
            return false;
        }
        let computed = blocks.len() * self.block_size;
        blocks.iter().for_each(|&block| self.touch(block));
        blocks.extend((0..more).map(|_| self.pop()));
        let (.., hashes) = std::mem::take(&mut self.prompt);
        self.requests.insert(id, Request { blocks, hashes, computed });
        true
    }

    fn fork(&mut self, parent: RequestId, child: RequestId) -> bool {
        let mut request = self.requests[&parent].clone();
        let whole = request.computed / self.block_size;
        let own = request.blocks.split_off(whole);
        if own.len() > self.free {
            return false;
        }
        request.blocks.iter().for_each(|&block| self.touch(block));
        request.blocks.extend(own.iter().map(|_| self.pop()));
        if !request.computed.is_multiple_of(self.block_size) {
            self.copies.push([own[0], request.blocks[whole]]);
        }
        self.requests.insert(child, request);
        true
    }

    fn schedule(&mut self, batch: &[Scheduled<'_>], inputs: &mut StepInputs) {
        self.batch.clear();
        inputs.slots.clear();
        for &Scheduled { id, start, end, .. } in batch {
            let (blocks, size) = (&self.requests[&id].blocks, self.block_size);
            let slot = |at: usize| i64::from(blocks[at / size]) * size as i64 + (at % size) as i64;
            inputs.slots.extend((start..end).map(slot));
            self.batch.push(id);
        }
        inputs.copies.clear();
        inputs.copies.append(&mut self.copies);
    }

    fn write_block_tables(&self, width: usize, tables: &mut [u32]) {
        for (id, row) in self.batch.iter().zip(tables.chunks_exact_mut(width)) {
            let blocks = &self.requests[id].blocks;
            row[..blocks.len()].copy_from_slice(blocks);
            row[blocks.len()..].fill(NULL_BLOCK);
        }
    }

    fn get_block_ids(&self, id: RequestId, ids: &mut Vec<u32>) {
        ids.extend_from_slice(&self.requests[&id].blocks);
    }

    fn trim(&mut self, id: RequestId, len: usize) {
        let request = self.requests.get_mut(&id).expect("it is known");
        let kept = len.div_ceil(self.block_size).min(request.blocks.len());
        let cut = request.blocks.split_off(kept);
        request.hashes.truncate(len / self.block_size);
        self.release(&cut);
    }

    fn cache_blocks(&mut self, batch: &[Scheduled<'_>]) {
        let size = self.block_size;
        for &Scheduled { id, tokens, end, .. } in batch {
            let request = self.requests.get_mut(&id).expect("it is known");
            for at in request.computed / size..end / size {
                if request.hashes.len() == at {
                    let parent = request.hashes.last().copied().unwrap_or(0);
                    request.hashes.push(chain(parent, &tokens[at * size..(at + 1) * size]));
                }
                let (hash, block) = (request.hashes[at], request.blocks[at]);
                self.blocks[block as usize].hash = Some(hash);
                self.cached.entry(hash).or_insert(block);
            }
            request.computed = end;
        }
    }

    fn free(&mut self, id: RequestId) {
        let request = self.requests.remove(&id).expect("it is known");
        self.release(&request.blocks);
    }

    fn reset_prefix_cache(&mut self) -> bool {
        if self.requests.is_empty() {
            self.cached.clear();
            self.blocks.iter_mut().for_each(|block| block.hash = None);
        }
        self.requests.is_empty()
    }
}
