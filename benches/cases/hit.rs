//! Hit: match one of 10,000 cached sequences of 2,048 tokens in full and collect its pages. Miss: match no page.

use std::hint::black_box;

use super::work;
use kvarena::{PageId, TokenId};

use super::{Cache, NAMESPACE, whole_pages};

/// Returns a tree of the first `sequences` cached sequences, with room for `spare` more.
pub fn full_cache(page_size: u32, sequences: usize, spare: usize) -> Cache {
    let mut cache = Cache::new(sequence_pages(page_size, sequences + spare), page_size);
    for s in 0..sequences {
        cache.cycle(&work::sequence(s));
    }
    cache
}

/// Returns the number of pages of `sequences` sequences and all prompts.
pub fn sequence_pages(page_size: u32, sequences: usize) -> u32 {
    let own = (work::SEQUENCE_LEN - work::PROMPT_LEN) * sequences;
    whole_pages(own + work::PROMPTS * work::PROMPT_LEN, page_size)
}

/// Matches sequences in rotation.
pub struct Hit {
    cache: Cache,
    queries: Vec<Vec<TokenId>>,
    next: usize,
    out: Vec<PageId>,
}

impl Hit {
    /// Creates the case. `cache` contains the first `sequences` sequences; `rotation` is the number of queries.
    pub fn new(cache: Cache, sequences: usize, rotation: usize) -> Self {
        let queries = (0..rotation).map(|i| work::sequence(work::hit_order(i) % sequences));
        let queries = queries.collect();
        Self { cache, queries, next: 0, out: Vec::with_capacity(work::SEQUENCE_LEN) }
    }

    pub fn call(&mut self) -> u32 {
        let query = &self.queries[self.next];
        self.next = (self.next + 1) % self.queries.len();
        self.out.clear();
        let out = &mut self.out;
        let found = self.cache.tree.match_pages(NAMESPACE, black_box(query), |pages| out.extend_from_slice(pages));
        black_box(&*out);
        found.pages()
    }

    /// Checks up to 200 calls: each sequence is found whole, and its pages are distinct.
    pub fn check(&mut self) {
        let pages = whole_pages(work::SEQUENCE_LEN, self.cache.tree.page_size());
        for _ in 0..2 * self.queries.len().min(100) {
            assert_eq!(self.call(), pages, "a cached sequence is found whole");
            let mut out = self.out.clone();
            out.sort_unstable();
            out.dedup();
            assert_eq!(out.len(), pages as usize, "its pages are distinct");
        }
    }

    pub fn into_cache(self) -> Cache {
        self.cache
    }
}

/// The lower bound of a hit: compares the same tokens and copies the same number of page ids. The arrays are as large
/// as the tree's, and the order of accesses is the same. Prompts are separate from the other tokens.
pub struct HitFloor {
    prompts: Vec<TokenId>,
    prompt_pages: Vec<PageId>,
    /// Tokens of all sequences after their prompts, concatenated.
    own: Vec<TokenId>,
    own_pages: Vec<PageId>,
    /// Number and tokens of each queried sequence.
    queries: Vec<(usize, Vec<TokenId>)>,
    pages_per_prompt: usize,
    pages_per_own: usize,
    next: usize,
    out: Vec<PageId>,
}

impl HitFloor {
    const OWN_LEN: usize = work::SEQUENCE_LEN - work::PROMPT_LEN;

    /// See [`Hit::new`].
    pub fn new(sequences: usize, rotation: usize, page_size: u32) -> Self {
        let numbers = (0..rotation).map(|i| work::hit_order(i) % sequences);
        let queries: Vec<_> = numbers.map(|s| (s, work::sequence(s))).collect();
        let mut own: Vec<TokenId> = work::slab(sequences * Self::OWN_LEN);
        for (s, tokens) in &queries {
            own[s * Self::OWN_LEN..][..Self::OWN_LEN].copy_from_slice(&tokens[work::PROMPT_LEN..]);
        }
        let prompts: Vec<TokenId> = (0..work::PROMPTS).flat_map(work::prompt).collect();
        let pages = |tokens: &[TokenId]| -> Vec<PageId> {
            let mut pages = work::slab(whole_pages(tokens.len(), page_size) as usize);
            pages.iter_mut().zip(0..).for_each(|(page, number)| *page = PageId::new(number));
            pages
        };
        Self {
            prompt_pages: pages(&prompts),
            own_pages: pages(&own),
            prompts,
            own,
            queries,
            pages_per_prompt: work::PROMPT_LEN / page_size as usize,
            pages_per_own: Self::OWN_LEN / page_size as usize,
            next: 0,
            out: Vec::with_capacity(work::SEQUENCE_LEN),
        }
    }

    pub fn call(&mut self) -> u32 {
        let (s, query) = &self.queries[self.next];
        self.next = (self.next + 1) % self.queries.len();
        let (head, tail) = black_box(query).split_at(work::PROMPT_LEN);
        self.out.clear();
        let prompt = s % work::PROMPTS;
        let stored = &self.prompts[prompt * work::PROMPT_LEN..][..work::PROMPT_LEN];
        if same(stored, head) {
            let pages = &self.prompt_pages[prompt * self.pages_per_prompt..];
            self.out.extend_from_slice(&pages[..self.pages_per_prompt]);
        }
        if same(&self.own[s * Self::OWN_LEN..][..Self::OWN_LEN], tail) {
            let pages = &self.own_pages[s * self.pages_per_own..][..self.pages_per_own];
            self.out.extend_from_slice(pages);
        }
        black_box(&self.out).len() as u32
    }
}

fn same(a: &[TokenId], b: &[TokenId]) -> bool {
    TokenId::as_raw(a) == TokenId::as_raw(b)
}

/// Matches sequences that are not cached.
pub struct Miss {
    cache: Cache,
    queries: Vec<Vec<TokenId>>,
    next: usize,
}

impl Miss {
    pub fn new(cache: Cache) -> Self {
        Self { cache, queries: (0..work::MISSES).map(work::miss).collect(), next: 0 }
    }

    pub fn call(&mut self) -> u32 {
        let query = &self.queries[self.next];
        self.next = (self.next + 1) % self.queries.len();
        self.cache.tree.match_prefix(NAMESPACE, black_box(query)).pages()
    }

    pub fn check(&mut self) {
        for _ in 0..work::MISSES {
            assert_eq!(self.call(), 0, "no page matches");
        }
    }

    pub fn into_cache(self) -> Cache {
        self.cache
    }
}
