//! Generates a workload: multi-turn chats over shared system prompts, so that the example needs no data.
//!
//! Each turn's prompt is the whole conversation so far, including answers, and a new question. The popularity of
//! assistants (system prompts) and the activity of users follow Zipf's law. Some turns contain a long document, or have
//! a long answer.

use super::request::{Piece, Request};
use super::rng::{Rng, Zipf};

/// Number of assistants, each with its own system prompt.
const ASSISTANTS: usize = 32;
/// Number of open conversations.
const OPEN: usize = 104;
/// Minimum number of requests from one turn of a conversation to the next: the user reads the answer first.
const THINK: usize = 90;
/// Maximum number of turns of a conversation.
const TURNS_MAX: u32 = 12;
/// Average arrival rate in requests a second.
const RATE: f64 = 8.0;

/// Tokens of each prompt of a burst.
const BURST_PROMPT: u32 = 2000;

/// Returns requests with equal prompts that arrive at once; their answers differ.
pub fn burst(count: usize, seed: u64) -> Vec<Request> {
    let mut rng = Rng::new(seed);
    let prompt = Piece { first: 0, len: BURST_PROMPT };
    let request = |i: usize| {
        let output = Piece { first: (1 + i as u64) << 20, len: rng.log_normal(200.0, 0.7, 4, 1500) };
        Request { arrival_ms: 0, prompt: vec![prompt], output }
    };
    (0..count).map(request).collect()
}

struct Conversation {
    system: Piece,
    /// Place in the token stream of the conversation's first own token; `len` is the number of its own tokens.
    first: u64,
    len: u32,
    turns_left: u32,
    /// Index of the first request that may be the next turn.
    ready_at: usize,
}

/// Generates `count` requests; equal seeds give equal requests.
pub fn generate(count: usize, seed: u64) -> Vec<Request> {
    let mut rng = Rng::new(seed);
    let assistants = assistants(&mut rng);
    let assistant = Zipf::new(ASSISTANTS, 1.0);
    let user = Zipf::new(OPEN, 0.6);
    // A conversation owns half a million numbers of the token stream.
    let mut first = 1 << 20;
    let mut open = |rng: &mut Rng| {
        first += 1 << 19;
        let system = assistants[assistant.draw(rng)];
        let turns_left = 1 + (rng.below(u64::from(TURNS_MAX)) as u32);
        Conversation { system, first, len: 0, turns_left, ready_at: 0 }
    };
    let mut users: Vec<Conversation> = (0..OPEN).map(|_| open(&mut rng)).collect();
    let mut clock = 0.0;
    let mut requests = Vec::with_capacity(count);
    while requests.len() < count {
        let chosen = &mut users[user.draw(&mut rng)];
        if chosen.ready_at > requests.len() {
            continue;
        }
        clock += -1e3 / RATE * (1.0 - rng.unit()).ln();
        chosen.ready_at = requests.len() + THINK;
        requests.push(turn(chosen, clock as u64, &mut rng));
        if chosen.turns_left == 0 {
            let ready_at = chosen.ready_at;
            *chosen = Conversation { ready_at, ..open(&mut rng) };
        }
    }
    requests
}

fn assistants(rng: &mut Rng) -> Vec<Piece> {
    let mut first = 0;
    let mut one = |_| {
        let piece = Piece { first, len: rng.log_normal(600.0, 0.7, 64, 4096) };
        first += u64::from(piece.len);
        piece
    };
    (0..ASSISTANTS).map(&mut one).collect()
}

fn turn(conversation: &mut Conversation, arrival_ms: u64, rng: &mut Rng) -> Request {
    let document = rng.unit() < 0.04;
    let (median, max) = if document { (4000.0, 16_000) } else { (80.0, 2000) };
    conversation.len += rng.log_normal(median, 0.9, 4, max);
    let context = Piece { first: conversation.first, len: conversation.len };
    let long = rng.unit() < 0.08;
    let (median, max) = if long { (3000.0, 8000) } else { (200.0, 1500) };
    let answer = rng.log_normal(median, 0.7, 4, max);
    let output = Piece { first: context.first + u64::from(context.len), len: answer };
    conversation.len += answer;
    conversation.turns_left -= 1;
    Request { arrival_ms, prompt: vec![conversation.system, context], output }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvarena::TokenId;

    #[test]
    fn a_seed_is_a_workload() {
        assert_eq!(generate(500, 7), generate(500, 7));
        assert_ne!(generate(500, 7), generate(500, 8));
        // A longer workload begins with the shorter one.
        assert_eq!(generate(500, 7)[..], generate(900, 7)[..500]);
    }

    #[test]
    fn the_next_turn_continues_the_last_answer() {
        let requests = generate(3000, 1);
        let mut last = std::collections::HashMap::new();
        let mut continued = 0;
        for (i, request) in requests.iter().enumerate() {
            let [_, own] = request.prompt[..] else { panic!("a system prompt and a conversation") };
            if let Some((before, at)) = last.insert(own.first, (i, request.output)).map(|(j, o)| (o, j)) {
                assert!(own.first + u64::from(own.len) > before.first + u64::from(before.len));
                assert!(i - at >= THINK, "turns {at} and {i}");
                continued += 1;
            }
            let mut prompt: Vec<TokenId> = Vec::new();
            request.write_prompt(&mut prompt);
            assert_eq!(prompt.len(), request.input_len() as usize);
        }
        assert!(continued > 1500, "only {continued} of 3000 requests continue a conversation");
    }

    #[test]
    fn arrivals_rise_and_no_request_is_empty() {
        let requests = generate(1000, 3);
        assert!(requests.windows(2).all(|pair| pair[0].arrival_ms <= pair[1].arrival_ms));
        assert!(requests.iter().all(|r| r.input_len() > 0 && r.output.len > 0));
    }
}
