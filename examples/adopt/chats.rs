//! Serves the same chats with both block managers and a model that reads K and V through block tables. One wrong block
//! would change the tokens.

use super::blocks::EngineBlocks;
use super::hash_blocks::HashBlocks;
use super::manager::BlockManager;
use super::serve::{Counts, Request, Scheduler, Step};

const BLOCKS: usize = 96;
const BLOCK_SIZE: usize = 16;
const RUNNING: usize = 12;
const MAX_LEN: usize = 512;

/// Twelve chats of four turns over two system prompts. A second answer is forked from each fourth request.
fn requests() -> impl Iterator<Item = Request> {
    (0..48).map(|id| {
        let (chat, turn) = (id % 12, id / 12);
        let token = |i| if i < 100 { 1 + (chat % 2) as u32 * 1000 + i } else { 10_000 + chat as u32 * 1000 + i };
        let mut request = Request::new(2 * id, (0..120 + 60 * turn as u32).map(token).collect(), 50);
        request.second = (id % 4 == 0).then_some(2 * id + 1);
        request
    })
}

fn mix(x: u64) -> u64 {
    let x = (x ^ x >> 31).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x ^ x >> 29
}

/// Runs a model without weights. K and V of a token are a hash of the token and of K and V before it.
fn compute(memory: &mut [u64], step: &Step<'_>, sampled: &mut Vec<u32>) {
    for &[source, target] in &step.inputs.copies {
        let [source, target] = [source, target].map(|block| block as usize * BLOCK_SIZE);
        memory.copy_within(source..source + BLOCK_SIZE, target);
    }
    let mut slots = step.inputs.slots.iter();
    for (scheduled, table) in step.batch.iter().zip(step.tables.chunks(step.width)) {
        let slot = |at: usize| table[at / BLOCK_SIZE] as usize * BLOCK_SIZE + at % BLOCK_SIZE;
        for (at, &written) in (scheduled.start..scheduled.end).zip(slots.by_ref()) {
            let before = if at == 0 { 0 } else { memory[slot(at - 1)] };
            memory[written as usize] = mix(before ^ u64::from(scheduled.tokens[at]));
        }
        sampled.push(sample(scheduled.id, (0..scheduled.end).map(|at| memory[slot(at)])));
    }
}

fn sample(id: u64, cache: impl Iterator<Item = u64>) -> u32 {
    cache.fold(id, |hash, kv| mix(hash ^ kv)) as u32 % 32_000
}

/// Returns the tokens of a request that runs alone, without blocks.
fn alone(mut request: Request) -> Vec<u32> {
    let mut cache = Vec::new();
    while request.tokens.len() < request.len {
        for &token in &request.tokens[cache.len()..] {
            cache.push(mix(cache.last().copied().unwrap_or(0) ^ u64::from(token)));
        }
        request.tokens.push(sample(request.id, cache.iter().copied()));
    }
    request.tokens
}

/// Serves the chats, prints what happened and checks their tokens.
fn serve(name: &str, manager: impl BlockManager) {
    let mut scheduler = Scheduler::new(manager, RUNNING, 256, MAX_LEN / BLOCK_SIZE);
    scheduler.waiting.extend(requests());
    let mut memory = vec![0; BLOCKS * BLOCK_SIZE];
    while !scheduler.is_done() {
        scheduler.step(&mut |step, sampled| compute(&mut memory, step, sampled));
    }
    let Scheduler { manager, finished, counts, .. } = &mut scheduler;
    for request in requests() {
        let tokens = |id| finished.iter().find(|done| done.id == id).map(|done| &done.tokens);
        let first = alone(request.clone());
        assert_eq!(tokens(request.id), Some(&first), "request {}", request.id);
        if let Some(id) = request.second {
            let prefix = first[..request.tokens.len() + 1].to_vec();
            let second = alone(Request { id, tokens: prefix, ..request });
            assert_eq!(tokens(id), Some(&second), "request {id}");
        }
    }
    assert_eq!(manager.num_free_blocks(), manager.num_usable_blocks(), "no block is lost");
    assert!(manager.reset_prefix_cache(), "no request is left");
    let Counts { steps, prompt_tokens, hit_tokens, preemptions, forks } = *counts;
    println!(
        "{name:14} {:>8} {steps:>5} {hit_tokens:>6} / {prompt_tokens} {preemptions:>11} {forks:>5}",
        finished.len()
    );
}

pub fn run() {
    println!("{BLOCKS} blocks of {BLOCK_SIZE} tokens, at most {RUNNING} running requests");
    println!("manager        requests steps cached / prompt tokens preemptions forks");
    serve("Engine<Outbox>", EngineBlocks::new(BLOCKS as u32, BLOCK_SIZE as u32, RUNNING as u32, MAX_LEN as u32));
    serve("HashMap", HashBlocks::new(BLOCKS, BLOCK_SIZE));
    println!("each request's tokens equal those that it gets alone, without blocks");
}
