//! Serves the chats of `examples/replay`, one request at a time, through a cache of 400,000 tokens. The cache keeps
//! prompts and answers, and evicts the least recently used pages exactly.

use std::hint::black_box;

use kvarena::{PageId, TokenId};

use super::{Cache, chat, work};

/// Number of requests.
pub const REQUESTS: usize = 4000;
pub const CACHE_TOKENS: usize = 400_000;

/// Returns the prompt and the stored answer of each request.
pub fn texts(requests: usize) -> Vec<Vec<TokenId>> {
    let text = |request: &super::request::Request| {
        let (mut prompt, mut answer) = (Vec::new(), Vec::new());
        request.write_prompt(&mut prompt);
        request.write_stored_output(&mut answer);
        prompt.extend(answer);
        prompt
    };
    chat::generate(requests, 1).iter().map(text).collect()
}

/// Checks the tokens that hit in a run of [`REQUESTS`] requests against `replay --sequential --requests 4000` with as
/// many tokens. A cycle takes no page for the last, partial page of a text, so that slightly fewer pages are evicted.
pub fn check(page_size: u32, hits: &[usize]) {
    let expected = if page_size == 1 { 8_310_514 } else { 8_288_512 };
    let (hits, tolerance) = (hits.iter().sum::<usize>(), if page_size == 1 { 0 } else { 2_000 });
    assert!(hits.abs_diff(expected) <= tolerance, "{hits} tokens hit, not {expected}");
}

pub fn cache(page_size: u32) -> Cache {
    Cache::new(CACHE_TOKENS as u32 / page_size, page_size)
}

/// Serves all requests with a new cache. Returns the cached tokens of each.
pub fn serve(texts: &[Vec<TokenId>], cache: &mut Cache) -> Vec<usize> {
    let page_size = cache.tree.page_size();
    texts.iter().map(|tokens| (cache.cycle(black_box(tokens)) * page_size) as usize).collect()
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
        let pages = CACHE_TOKENS / page_size;
        let list = work::slab(pages);
        Self { page_size, tokens: work::slab(pages * page_size), pages: work::slab(pages), list, place: 0 }
    }

    pub fn serve(&mut self, texts: &[Vec<TokenId>], hits: &[usize]) {
        for (tokens, &hit) in texts.iter().zip(hits) {
            let (found, rest) = tokens.split_at(hit);
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
