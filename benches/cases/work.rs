//! The inputs of the CPU benches. Other caches were measured with the same inputs, byte for byte.
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
//! | replay | 8-turn chats of 200 users; each turn continues the previous one |

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

/// Chats of the replay.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chats {
    /// All conversations, concatenated: a system prompt and all turns.
    pub tokens: Vec<TokenId>,
    /// Turns in the order of arrival.
    pub requests: Vec<ChatRequest>,
}

/// A turn. The prompt is `tokens[start..start + prompt_len]`; prompt and answer are `tokens[start..start + full_len]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChatRequest {
    /// Index of the conversation's first token.
    pub start: u32,
    /// Tokens of the prompt: the whole conversation so far.
    pub prompt_len: u32,
    /// Tokens of prompt and answer.
    pub full_len: u32,
    /// Number of the user.
    pub user: u32,
}

const USERS: usize = 200;
const TURNS: usize = 8;
/// Maximum number of running requests. A user sends a request only if none of the user's requests is running. In
/// [`Chats::small`], the oldest requests end earlier when few users can send one.
const IN_FLIGHT: usize = 32;

struct Conversation {
    start: u32,
    len: u32,
    /// Tokens of each question and its answer.
    turns: Vec<(u32, u32)>,
    turn: usize,
}

impl Chats {
    /// Returns 1,600 requests: each user has one conversation.
    pub fn small() -> Self {
        Self::make(1600, 77)
    }

    /// Returns 16,000 requests: a user who has finished a conversation opens another.
    pub fn large() -> Self {
        Self::make(16_000, 78)
    }

    fn make(count: usize, seed: u64) -> Self {
        let mut draw = Draw { counter: seed << 32 };
        let system_lens: Vec<u32> = (0..PROMPTS).map(|_| draw.log_normal(512.0, 0.6, 64.0, 2048.0)).collect();
        let (user_cdf, system_cdf) = (zipf(USERS, 0.9), zipf(PROMPTS, 1.0));
        let once = count <= USERS * TURNS;
        let mut chats = Self::default();
        let mut open: Vec<Option<Conversation>> = (0..USERS).map(|_| None).collect();
        let mut done = [false; USERS];
        let mut in_flight: Vec<usize> = Vec::new();
        let mut conversations = 0;
        while chats.requests.len() < count {
            let user = loop {
                let user = draw.rank(&user_cdf);
                if !in_flight.contains(&user) && !done[user] {
                    break user;
                }
                let finished = done.iter().filter(|&&done| done).count();
                if once && finished + distinct(&in_flight) >= USERS {
                    in_flight.remove(0);
                }
            };
            let conversation = open[user].get_or_insert_with(|| {
                let system = draw.rank(&system_cdf);
                conversations += 1;
                chats.open(system, system_lens[system], conversations - 1, &mut draw)
            });
            let (question, answer) = conversation.turns[conversation.turn];
            let prompt_len = conversation.len + question;
            let full_len = prompt_len + answer;
            let start = conversation.start;
            chats.requests.push(ChatRequest { start, prompt_len, full_len, user: user as u32 });
            conversation.len = full_len;
            conversation.turn += 1;
            if conversation.turn == TURNS {
                open[user] = None;
                done[user] = once;
            }
            in_flight.push(user);
            if in_flight.len() >= IN_FLIGHT {
                in_flight.remove(0);
            }
        }
        chats
    }

    /// Draws the lengths of a conversation and writes its tokens.
    fn open(&mut self, system: usize, system_len: u32, number: u64, draw: &mut Draw) -> Conversation {
        let mut turn = || {
            let question = draw.log_normal(96.0, 0.9, 8.0, 1024.0);
            (question, draw.log_normal(192.0, 0.7, 8.0, 1024.0))
        };
        let turns: Vec<(u32, u32)> = (0..TURNS).map(|_| turn()).collect();
        let body: u32 = turns.iter().map(|(question, answer)| question + answer).sum();
        let start = self.tokens.len() as u32;
        extend(&mut self.tokens, 1 << 24 | system as u64, system_len as usize);
        extend(&mut self.tokens, 1 << 25 | number, body as usize);
        Conversation { start, len: system_len, turns, turn: 0 }
    }
}

fn distinct(users: &[usize]) -> usize {
    let first = |&(i, user): &(usize, &usize)| !users[..i].contains(user);
    users.iter().enumerate().filter(first).count()
}

fn zipf(ranks: usize, exponent: f64) -> Vec<f64> {
    let weights: Vec<f64> = (1..=ranks).map(|rank| 1.0 / (rank as f64).powf(exponent)).collect();
    let total: f64 = weights.iter().sum();
    let mut sum = 0.0;
    let add = |weight| {
        sum += weight / total;
        sum
    };
    weights.into_iter().map(add).collect()
}

/// Generator of random numbers from a counter.
struct Draw {
    counter: u64,
}

impl Draw {
    fn next(&mut self) -> u64 {
        self.counter += 1;
        mix(self.counter)
    }

    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn rank(&mut self, cdf: &[f64]) -> usize {
        let point = self.unit();
        cdf.partition_point(|&sum| sum < point)
    }

    fn log_normal(&mut self, median: f64, sigma: f64, min: f64, max: f64) -> u32 {
        let radius = (-2.0 * self.unit().max(1e-18).ln()).sqrt();
        let normal = radius * (2.0 * std::f64::consts::PI * self.unit()).cos();
        (median * (sigma * normal).exp()).round_ties_even().clamp(min, max) as u32
    }
}
