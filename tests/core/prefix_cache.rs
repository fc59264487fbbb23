//! The example's prefix cache under a random scheduler. A memory records the prefix whose K and V each slot has, and
//! each step checks all slots that it reads. A map of whole prefixes checks every hit.

use std::collections::HashMap;

use super::seeds;
use kvarena::testkit::rng::{Rng, mix};
use kvarena::tree::TreeError;

#[path = "../../examples/adopt/prefix_cache.rs"]
mod cache;

use cache::{CacheHandle, PrefixCache};

/// A running request.
struct Request {
    tokens: Vec<u32>,
    /// The slot of each token.
    slots: Vec<u32>,
    /// Its locked prefix.
    locked: CacheHandle,
    len: usize,
}

/// A scheduler with an allocator of whole pages.
struct Host {
    rng: Rng,
    cache: PrefixCache,
    page_size: usize,
    /// First slots of free pages.
    free: Vec<u32>,
    /// The hash of the prefix that ends at the token of each slot.
    memory: Vec<u64>,
    running: Vec<Request>,
    /// The last slot of each cached prefix of whole pages, by the prefix's tokens.
    cached: HashMap<Vec<u32>, u32>,
    /// Hits, tokens read, evicted pages, refused requests, duplicate pages.
    counts: [usize; 5],
}

fn hashes(tokens: &[u32]) -> impl Iterator<Item = u64> {
    tokens.iter().scan(0, |hash, &token| {
        *hash = mix(*hash ^ u64::from(token + 1));
        Some(*hash)
    })
}

impl Host {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let page_size = rng.pick(&[1, 4, 16]);
        let pages = rng.within(20, 100) as usize;
        Self {
            rng,
            cache: PrefixCache::new(pages * page_size, page_size).expect("a valid config"),
            page_size,
            free: (0..pages).map(|page| (page * page_size) as u32).collect(),
            memory: vec![0; pages * page_size],
            running: Vec::new(),
            cached: HashMap::new(),
            counts: [0; 5],
        }
    }

    /// Returns free pages for `count` tokens after `slots`, and evicts what is lacking.
    fn allocate(&mut self, slots: &mut Vec<u32>, len: usize) -> bool {
        let wanted = len.div_ceil(self.page_size) - slots.len() / self.page_size;
        let lacking = wanted.saturating_sub(self.free.len());
        let mut evicted = Vec::new();
        match self.cache.evict(lacking * self.page_size, &mut evicted) {
            Err(TreeError::NotEvictable { .. }) => {
                self.counts[3] += 1;
                return false;
            }
            result => result.expect("it is the only error"),
        }
        self.counts[2] += evicted.len() / self.page_size;
        self.cached.retain(|_, last| !evicted.contains(last));
        self.free.extend(evicted.chunks(self.page_size).map(|page| page[0]));
        for first in self.free.drain(self.free.len() - wanted..) {
            slots.extend(first..first + self.page_size as u32);
        }
        true
    }

    fn admit(&mut self) {
        let (shared, own) = (self.rng.below(60), 1 + self.rng.below(40));
        let prompt = self.rng.below(3);
        let mut tokens: Vec<u32> = (0..shared).map(|i| (mix(prompt * 1000 + i) % 50) as u32).collect();
        tokens.extend((0..own).map(|_| self.rng.below(2) as u32));
        let known = &tokens[..tokens.len() - 1];
        let mut slots = Vec::new();
        let locked = self.cache.match_prefix(known, &mut slots);
        let pages = (1..=known.len() / self.page_size).map(|pages| &known[..pages * self.page_size]);
        let hit = pages.take_while(|prefix| self.cached.contains_key(*prefix)).last();
        assert_eq!(locked.cached_len, hit.map_or(0, <[u32]>::len), "the longest cached prefix");
        self.counts[0] += usize::from(locked.cached_len > 0);
        self.cache.lock_handle(locked, false).expect("it was just matched");
        if !self.allocate(&mut slots, tokens.len()) {
            return self.cache.lock_handle(locked, true).expect("it is locked");
        }
        let len = tokens.len() + self.rng.below(20) as usize;
        let mut request = Request { tokens, slots, locked, len };
        self.compute(&mut request, locked.cached_len);
        self.running.push(request);
    }

    /// Writes the tokens from `start` on, then reads all tokens.
    fn compute(&mut self, request: &mut Request, start: usize) {
        for (i, (hash, &slot)) in hashes(&request.tokens).zip(&request.slots).enumerate() {
            if i >= start {
                self.memory[slot as usize] = hash;
            }
            assert_eq!(self.memory[slot as usize], hash, "token {i} of the request's own prefix");
            self.counts[1] += 1;
        }
    }

    /// Appends a token to a request, or finishes it.
    fn advance(&mut self) {
        let at = self.rng.below(self.running.len() as u64) as usize;
        let mut request = self.running.swap_remove(at);
        let start = request.tokens.len();
        let mut slots = std::mem::take(&mut request.slots);
        let is_done = start >= request.len || !self.allocate(&mut slots, start + 1);
        request.slots = slots;
        if is_done {
            return self.finish(request);
        }
        request.tokens.push(self.rng.below(2) as u32);
        self.compute(&mut request, start);
        self.running.push(request);
    }

    /// Publishes a request's pages, and frees its duplicates and its last, partly filled page.
    fn finish(&mut self, request: Request) {
        let Request { tokens, slots, locked, .. } = request;
        let known = self.cache.insert_prefix(&tokens, &slots).expect("the slots are the request's own");
        assert!(known >= locked.cached_len, "the locked prefix stays cached");
        let whole = tokens.len() / self.page_size * self.page_size;
        self.counts[4] += (known - locked.cached_len) / self.page_size;
        for end in (known + self.page_size..=whole).step_by(self.page_size) {
            self.cached.insert(tokens[..end].to_vec(), slots[end - 1]);
        }
        let own = (locked.cached_len..known).chain(whole..slots.len()).step_by(self.page_size);
        self.free.extend(own.map(|at| slots[at]));
        self.cache.lock_handle(locked, true).expect("it is locked");
    }

    fn check(&self) {
        self.cache.check_integrity();
        let size = self.cache.size_info();
        assert_eq!(size.total_size(), self.cached.len() * self.page_size);
        let own: usize = self.running.iter().map(|request| request.slots.len() - request.locked.cached_len).sum();
        assert_eq!(size.total_size() + own + self.free.len() * self.page_size, self.memory.len(), "no slot is lost");
        let locked = self.running.iter().map(|request| request.locked.cached_len).max().unwrap_or(0);
        assert!(size.protected_size >= locked);
    }

    fn drain(&mut self) {
        while let Some(request) = self.running.pop() {
            self.finish(request);
        }
        assert_eq!(self.cache.size_info().protected_size, 0, "no lock is left");
        let mut slots = Vec::new();
        self.cache.reset(&mut slots);
        assert_eq!(slots.len() + self.free.len() * self.page_size, self.memory.len());
        self.cache.check_integrity();
    }
}

#[test]
fn every_read_is_of_the_requests_own_prefix() {
    let mut counts = [0; 5];
    for seed in seeds(20, 100) {
        let mut host = Host::new(seed);
        for _ in 0..1000 {
            if host.running.is_empty() || host.running.len() < 8 && host.rng.one_in(6) {
                host.admit();
            } else {
                host.advance();
            }
            host.check();
        }
        host.drain();
        (0..5).for_each(|i| counts[i] += host.counts[i]);
    }
    println!("{counts:?}");
    assert!(counts.iter().all(|&count| count > 100), "too little happened: {counts:?}");
}
