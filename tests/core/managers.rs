//! The block managers of `examples/adopt`: rules of vLLM's and mistral.rs's managers, restated, and a random scheduler.

#[path = "../../examples/adopt/blocks.rs"]
mod blocks;
#[path = "../../examples/adopt/hash_blocks.rs"]
mod hash_blocks;
#[path = "../../examples/adopt/manager.rs"]
mod manager;
mod rules;
mod schedule;

use blocks::EngineBlocks;
use hash_blocks::HashBlocks;

const MAX_REQUESTS: u32 = 16;
const MAX_LEN: u32 = 256;

fn engine_blocks(blocks: usize, block_size: usize) -> EngineBlocks {
    EngineBlocks::new(blocks as u32, block_size as u32, MAX_REQUESTS, MAX_LEN)
}

fn hash_blocks(blocks: usize, block_size: usize) -> HashBlocks {
    HashBlocks::new(blocks, block_size)
}
