//! Replays the requests of 8-turn chats through a cache of 200,000 tokens. The cache keeps prompts and answers, and
//! evicts the least recently used pages exactly.
//!
//! At most 32 requests are in flight. A user's request is finished before the user's next one starts. The oldest
//! request is finished if 32 are in flight, or if too few pages are available.

use std::collections::VecDeque;
use std::hint::black_box;

use super::work::{self, ChatRequest, Chats};
use kvarena::{PageId, TokenId};

use super::{Cache, Started};

const IN_FLIGHT: usize = 32;
const CACHE_TOKENS: u32 = 200_000;

#[derive(Clone, Debug, Default)]
pub struct Served {
    pub hit_tokens: u64,
    pub prompt_tokens: u64,
    /// Cached tokens of each request.
    pub hits: Vec<u32>,
}

impl Served {
    pub fn hit_rate(&self) -> f64 {
        self.hit_tokens as f64 / self.prompt_tokens as f64
    }
}

/// Serves all requests. `cache` is new: see [`cache()`].
pub fn serve(chats: &Chats, cache: &mut Cache) -> Served {
    let page_size = u64::from(cache.tree.page_size());
    let mut served = Served { hits: Vec::with_capacity(chats.requests.len()), ..Served::default() };
    let mut in_flight: VecDeque<(ChatRequest, Started)> = VecDeque::with_capacity(IN_FLIGHT);
    for &request in &chats.requests {
        if let Some(i) = in_flight.iter().position(|(other, _)| other.user == request.user) {
            let (other, started) = in_flight.remove(i).expect("the index is valid");
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
        served.hits.push(started.matched_pages * page_size as u32);
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

fn full(chats: &Chats, request: ChatRequest) -> &[TokenId] {
    &chats.tokens[request.start as usize..][..request.full_len as usize]
}

fn finish_oldest(chats: &Chats, cache: &mut Cache, in_flight: &mut VecDeque<(ChatRequest, Started)>) {
    let (request, started) = in_flight.pop_front().expect("a request in flight has the pages");
    cache.finish(started, full(chats, request));
}

/// The lower bound: only the reads and writes that each request needs, in a buffer as large as the cache. A request's
/// cached tokens are compared with tokens of the buffer; its other whole pages are copied to the buffer. The ids of
/// these pages are first copied out, as in an eviction, and then copied in. There are no look-ups, no eviction order
/// and no page states.
pub struct ServeFloor {
    page_size: usize,
    tokens: Vec<TokenId>,
    pages: Vec<PageId>,
    list: Vec<PageId>,
    place: usize,
}

impl ServeFloor {
    pub fn new(page_size: u32) -> Self {
        let page_size = page_size as usize;
        let pages = CACHE_TOKENS as usize / page_size;
        let list = work::slab(pages);
        Self { page_size, tokens: work::slab(pages * page_size), pages: work::slab(pages), list, place: 0 }
    }

    pub fn serve(&mut self, chats: &Chats, hits: &[u32]) {
        for (&request, &hit) in chats.requests.iter().zip(hits) {
            let (found, rest) = full(chats, request).split_at(hit as usize);
            let place = self.far_place(found.len());
            let cached = &self.tokens[place * self.page_size..][..found.len()];
            let differing = found.iter().zip(cached).fold(0, |bits, (a, b)| bits | a.raw() ^ b.raw());
            black_box(differing);
            let count = rest.len() / self.page_size;
            let place = self.far_place(rest.len());
            self.tokens[place * self.page_size..][..count * self.page_size]
                .copy_from_slice(&rest[..count * self.page_size]);
            self.list[..count].copy_from_slice(&self.pages[place..][..count]);
            black_box(&mut self.list);
            self.pages[place..][..count].copy_from_slice(&self.list[..count]);
        }
    }

    /// Returns the index of a page at which `tokens` tokens fit into the buffer. It is far from the index that the last
    /// call returned.
    fn far_place(&mut self, tokens: usize) -> usize {
        self.place += 79_190;
        self.place % (self.pages.len() - tokens.div_ceil(self.page_size))
    }
}
