//! Replay: 16,000 requests of 8-turn chats through a cache of 200,000 tokens, prompts and answers cached, exact LRU.
//!
//! At most 32 requests are in flight; a user's last one is finished before his next one starts, the oldest one when
//! there are too many, or when pages are short.

use std::collections::VecDeque;

use kvarena::testkit::cpu_work::{ChatRequest, Chats};

use super::{Cache, Started};

const IN_FLIGHT: usize = 32;
const CACHE_TOKENS: u32 = 200_000;

#[derive(Clone, Copy, Debug, Default)]
pub struct Served {
    pub hit_tokens: u64,
    pub prompt_tokens: u64,
}

impl Served {
    pub fn hit_rate(&self) -> f64 {
        self.hit_tokens as f64 / self.prompt_tokens as f64
    }
}

/// Serves all requests with a fresh cache.
pub fn serve(chats: &Chats, cache: &mut Cache) -> Served {
    let page_size = u64::from(cache.tree.page_size());
    let mut served = Served::default();
    let mut in_flight: VecDeque<(ChatRequest, Started)> = VecDeque::with_capacity(IN_FLIGHT);
    for &request in &chats.requests {
        if let Some(i) = in_flight.iter().position(|(other, _)| other.user == request.user) {
            let (other, started) = in_flight.remove(i).expect("it was found");
            cache.finish(started, full(chats, other));
        }
        if in_flight.len() == IN_FLIGHT {
            finish_oldest(chats, cache, &mut in_flight);
        }
        let prompt = &full(chats, request)[..request.prompt_len as usize];
        let started = loop {
            match cache.start(prompt, request.full_len as usize) {
                Some(started) => break started,
                None => finish_oldest(chats, cache, &mut in_flight),
            }
        };
        served.hit_tokens += u64::from(started.matched_pages) * page_size;
        served.prompt_tokens += u64::from(request.prompt_len);
        in_flight.push_back((request, started));
    }
    while !in_flight.is_empty() {
        finish_oldest(chats, cache, &mut in_flight);
    }
    served
}

pub fn cache(page_size: u32) -> Cache {
    Cache::new(CACHE_TOKENS / page_size, page_size)
}

fn full(chats: &Chats, request: ChatRequest) -> &[kvarena::TokenId] {
    &chats.tokens[request.start as usize..][..request.full_len as usize]
}

fn finish_oldest(
    chats: &Chats,
    cache: &mut Cache,
    in_flight: &mut VecDeque<(ChatRequest, Started)>,
) {
    let (request, started) = in_flight.pop_front().expect("somebody holds the pages");
    cache.finish(started, full(chats, request));
}
