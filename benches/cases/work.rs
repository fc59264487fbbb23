//! The inputs of the CPU benches. Except for the replay, other caches were measured with the same inputs, bit for bit.
//!
//! Numbers come from a counter-based splitmix64: token `i` of stream `s` is `256 + mix((s << 32) + i) % 128000`. Only
//! the first tokens of misses and of evicted leaves are chosen otherwise.
//!
//! | case | input |
//! |---|---|
//! | hit | 10,000 cached sequences of 2,048 tokens: one of 32 prompts of 512, then 1,536 own; in all 15,376,384 |
//! | miss | 256 sequences that begin with token 7, which no cached sequence contains |
//! | insert, cycle | new sequences: 512 shared tokens and 1,536 new ones |
//! | evict | leaves of 256 tokens below the 32 prompts, touched in a shuffled order |
//! | alloc | all pages in use except a shuffled part, mostly half |
//! | replay | the generated chats of `examples/replay` |

use kvarena::TokenId;
use kvarena::testkit::advise_huge_pages;
use kvarena::testkit::rng::Rng;

/// Number of shared prompts.
pub const PROMPTS: usize = 32;
/// Tokens of a shared prompt.
pub const PROMPT_LEN: usize = 512;
/// Tokens of a sequence.
pub const SEQUENCE_LEN: usize = 2048;
/// Number of cached sequences.
pub const SEQUENCES: usize = 10_000;
/// Number of sequences that match no page.
pub const MISSES: usize = 256;
/// Tokens of a leaf of the eviction case.
pub const LEAF_LEN: usize = 256;

/// Returns splitmix64 of a counter.
fn mix(x: u64) -> u64 {
    Rng::new(x).bits()
}

/// Appends the first `len` tokens of a stream.
fn extend(tokens: &mut Vec<TokenId>, stream: u64, len: usize) {
    let base = stream << 32;
    let token = |i| TokenId::new((mix(base + i) % 128_000) as u32 + 256);
    tokens.extend((0..len as u64).map(token));
}

/// Returns shared prompt `p`.
pub fn prompt(p: usize) -> Vec<TokenId> {
    let mut tokens = Vec::with_capacity(PROMPT_LEN);
    extend(&mut tokens, 1000 + p as u64, PROMPT_LEN);
    tokens
}

fn below_prompt(p: usize, stream: u64) -> Vec<TokenId> {
    let mut tokens = Vec::with_capacity(SEQUENCE_LEN);
    extend(&mut tokens, 1000 + (p % PROMPTS) as u64, PROMPT_LEN);
    extend(&mut tokens, stream, SEQUENCE_LEN - PROMPT_LEN);
    tokens
}

/// Returns cached sequence `s`.
pub fn sequence(s: usize) -> Vec<TokenId> {
    below_prompt(s, 100_000 + s as u64)
}

/// Returns new sequence `s`.
pub fn new_sequence(s: usize) -> Vec<TokenId> {
    below_prompt(s, 200_000 + s as u64)
}

/// Returns sequence `s` that matches no page.
pub fn miss(s: usize) -> Vec<TokenId> {
    let mut tokens = Vec::with_capacity(SEQUENCE_LEN);
    extend(&mut tokens, 300_000 + s as u64, SEQUENCE_LEN);
    tokens[0] = TokenId::new(7);
    tokens
}

/// Returns the number of the sequence that call `i` matches. [`SEQUENCES`] calls match all sequences; successive calls
/// match sequences of distant numbers.
pub fn hit_order(i: usize) -> usize {
    i * 7919 % SEQUENCES
}

/// Returns sequence `i` of the eviction case: a prompt, and a leaf whose first token differs from its siblings'.
pub fn leaf_sequence(i: usize) -> Vec<TokenId> {
    let mut tokens = Vec::with_capacity(PROMPT_LEN + LEAF_LEN);
    extend(&mut tokens, 1000 + (i % PROMPTS) as u64, PROMPT_LEN);
    extend(&mut tokens, 400_000 + i as u64, LEAF_LEN);
    tokens[PROMPT_LEN] = TokenId::new(200_000 + (i / PROMPTS) as u32);
    tokens
}

/// Returns the order in which `leaves` leaves are touched, so that each has its own age.
pub fn touch_order(leaves: usize) -> Vec<u32> {
    // Trees of fewer leaves use a part of one order of 100,000 leaves.
    let mut order = shuffled(leaves.max(100_000), 1 << 50);
    order.retain(|&leaf| (leaf as usize) < leaves);
    order
}

/// Returns a shuffled order of pages. A case takes all pages, and then frees the first part of this order.
pub fn free_order(pages: usize) -> Vec<u32> {
    shuffled(pages, 1 << 51)
}

fn shuffled(count: usize, salt: u64) -> Vec<u32> {
    let mut order: Vec<u32> = (0..count as u32).collect();
    order.sort_by_key(|&i| mix(u64::from(i) + salt));
    order
}

/// Returns zeros in memory that is allocated like the core's tables. The `floor` cases use it; they measure only the
/// memory accesses of a case.
pub fn slab<T: Clone + Default>(len: usize) -> Vec<T> {
    let mut slab: Vec<T> = Vec::with_capacity(len);
    advise_huge_pages(slab.as_ptr().addr(), len * size_of::<T>());
    slab.resize(len, T::default());
    slab
}
