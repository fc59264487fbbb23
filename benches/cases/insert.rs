//! Insert: publish 512 cached and 1,536 new tokens. Cycle: the whole life of such a request in a full cache: match,
//! lock, evict, allocate, insert, unlock.

use std::hint::black_box;

use super::work;
use kvarena::id::PrefixLock;
use kvarena::{PageId, TokenId};

use super::hit::full_cache;
use super::{Cache, NAMESPACE, whole_pages};

/// Number of sequences that a round inserts.
pub const ROUND: usize = 500;

/// Inserts new sequences, a round at a time. They are evicted between rounds, so every insert after the first round
/// writes to memory that was used before, but not recently.
pub struct Insert {
    cache: Cache,
    /// Number of cached sequences, without the inserted ones.
    cached: usize,
    sequences: Vec<Vec<TokenId>>,
    pages: Vec<Vec<PageId>>,
    /// Copy of `pages` from before the inserts, because inserts replace duplicates by the tree's pages.
    taken: Vec<Vec<PageId>>,
    locks: Vec<PrefixLock>,
    /// Duplicates of one call, which the engine would release after each call.
    duplicates: Vec<PageId>,
    /// Number of pages of each inserted sequence that were cached: the prompt, and sometimes one more page by chance.
    known: Vec<u32>,
}

impl Insert {
    /// Creates the case over a tree of the first `cached` sequences.
    pub fn new(page_size: u32, cached: usize) -> Self {
        // An insert passes pages for all its tokens, including cached ones; spare pages for twice a round suffice.
        let cache = full_cache(page_size, cached, 2 * ROUND);
        let sequences = (0..ROUND).map(work::new_sequence).collect();
        let mut insert = Self {
            cache,
            cached,
            sequences,
            pages: Vec::new(),
            taken: Vec::new(),
            locks: Vec::with_capacity(ROUND),
            duplicates: Vec::with_capacity(work::SEQUENCE_LEN),
            known: Vec::with_capacity(ROUND),
        };
        insert.prepare();
        insert
    }

    /// Allocates pages for a round.
    fn prepare(&mut self) {
        let count = whole_pages(work::SEQUENCE_LEN, self.cache.tree.page_size());
        let mut take = || {
            let mut pages = vec![PageId::default(); count as usize];
            assert!(self.cache.pool.alloc(&mut pages), "there is room for a round");
            pages
        };
        self.pages = (0..ROUND).map(|_| take()).collect();
        self.taken = self.pages.clone();
    }

    /// Returns the number of calls until the round is done.
    pub fn room(&self) -> usize {
        ROUND - self.locks.len()
    }

    /// Reads the tokens and pages of the next `count` sequences into the CPU caches, because a server has recently
    /// accessed the tokens and pages of a request.
    pub fn read_next(&self, count: usize) {
        let done = self.locks.len();
        let next = self.sequences.iter().skip(done).take(count);
        black_box(next.flatten().fold(0, |sum, token| sum ^ token.raw()));
        let next = self.pages.iter().skip(done).take(count);
        black_box(next.flatten().fold(0, |sum, page| sum ^ page.raw()));
    }

    /// Inserts the next sequence of the round. The lock is kept until the end of the round.
    pub fn call(&mut self) {
        let Self { cache, sequences, pages, locks, duplicates, known, .. } = self;
        let i = locks.len();
        duplicates.clear();
        let nothing = cache.tree.match_prefix(NAMESPACE, &[]);
        let mut lock = cache.tree.lock(&nothing, &mut cache.fence).expect("the match is fresh");
        let tokens = black_box(&sequences[i]);
        let inserted = cache.tree.insert(&mut lock, tokens, &mut pages[i], duplicates, &mut cache.fence);
        locks.push(lock);
        known.push(inserted.duplicates);
    }

    /// Checks and undoes the round. Also reads all cached sequences, which replaces the round's data in the CPU caches.
    pub fn restore(&mut self) {
        let page_size = self.cache.tree.page_size();
        let (prompt, whole) = (whole_pages(work::PROMPT_LEN, page_size), whole_pages(work::SEQUENCE_LEN, page_size));
        let known = std::mem::replace(&mut self.known, Vec::with_capacity(ROUND));
        for (i, pages) in self.taken.iter().enumerate() {
            let (duplicates, new) = match known.get(i) {
                Some(&known) => pages.split_at(known as usize),
                None => (&pages[..], &[][..]),
            };
            self.cache.pool.publish(new);
            self.cache.pool.free_private(duplicates);
        }
        for lock in self.locks.drain(..) {
            self.cache.unlock(lock);
        }
        self.expect(known.iter().map(|_| whole).collect());
        // All other sequences become younger, so that the new ones are the oldest.
        for s in 0..self.cached {
            self.cache.touch(&work::sequence(s));
        }
        self.cache.evict(known.iter().map(|known| whole - known).sum());
        assert!(known.iter().all(|&known| known == prompt || known == prompt + 1));
        self.expect(known);
        self.prepare();
    }

    /// Checks the number of cached pages of each sequence.
    fn expect(&self, pages: Vec<u32>) {
        for (tokens, pages) in self.sequences.iter().zip(pages) {
            let found = self.cache.tree.match_prefix(NAMESPACE, tokens);
            assert_eq!(found.pages(), pages);
        }
    }
}

/// The lower bound of an insert: compares 2 KiB of tokens, and copies 6 KiB of tokens and their page ids to distant
/// places of large slabs.
pub struct InsertFloor {
    prompts: Vec<TokenId>,
    tokens: Vec<TokenId>,
    pages: Vec<PageId>,
    sequences: Vec<Vec<TokenId>>,
    new_pages: Vec<PageId>,
    place: usize,
    next: usize,
}

impl InsertFloor {
    const NEW: usize = work::SEQUENCE_LEN - work::PROMPT_LEN;

    /// Creates slabs for `places` sequences. The tokens of 20,000 sequences take 120 MB.
    pub fn new(page_size: u32, places: usize) -> Self {
        let new_pages = (0..whole_pages(Self::NEW, page_size)).map(PageId::new);
        Self {
            prompts: (0..work::PROMPTS).flat_map(work::prompt).collect(),
            tokens: work::slab(Self::NEW * places),
            pages: work::slab(whole_pages(Self::NEW, page_size) as usize * places),
            sequences: (0..ROUND).map(work::new_sequence).collect(),
            new_pages: new_pages.collect(),
            place: 0,
            next: 0,
        }
    }

    /// See [`Insert::read_next`].
    pub fn read_next(&self, count: usize) {
        let next = self.sequences.iter().cycle().skip(self.next).take(count);
        black_box(next.flatten().fold(0, |sum, token| sum ^ token.raw()));
    }

    pub fn call(&mut self) {
        let i = self.next;
        self.next = (i + 1) % ROUND;
        let (head, tail) = black_box(&self.sequences[i]).split_at(work::PROMPT_LEN);
        let prompt = &self.prompts[i % work::PROMPTS * work::PROMPT_LEN..][..work::PROMPT_LEN];
        if TokenId::as_raw(prompt) != TokenId::as_raw(head) {
            return;
        }
        let place = self.place;
        self.tokens[place * Self::NEW..][..Self::NEW].copy_from_slice(tail);
        let count = self.new_pages.len();
        self.pages[place * count..][..count].copy_from_slice(&self.new_pages);
        black_box((&self.tokens, &self.pages));
        // The place is far from the last one, like free places in a tree.
        self.place = (place + 7919) % (self.tokens.len() / Self::NEW);
    }
}

/// Runs requests in a full cache, one at a time. The last 1,536 tokens of each request are new.
pub struct Cycle {
    cache: Cache,
    sequences: Vec<Vec<TokenId>>,
    next: usize,
}

impl Cycle {
    /// Creates the case over a cache of `cached` sequences.
    pub fn new(page_size: u32, cached: usize) -> Self {
        let cache = full_cache(page_size, cached, 0);
        // A sequence recurs only after `2 * cached - 1` others, long after its eviction.
        let sequences = (0..2 * cached).map(work::new_sequence).collect();
        let mut cycle = Self { cache, sequences, next: 0 };
        // Replaces the whole cache once, so that each measured call evicts a sequence that an earlier call inserted.
        for _ in 0..cached {
            cycle.call();
        }
        cycle
    }

    /// See [`Insert::read_next`].
    pub fn read_next(&self, count: usize) {
        let next = self.sequences.iter().cycle().skip(self.next).take(count);
        black_box(next.flatten().fold(0, |sum, token| sum ^ token.raw()));
    }

    pub fn call(&mut self) -> u32 {
        let tokens = &self.sequences[self.next];
        self.next = (self.next + 1) % self.sequences.len();
        self.cache.cycle(black_box(tokens))
    }

    pub fn check(&mut self) {
        let prompt = whole_pages(work::PROMPT_LEN, self.cache.tree.page_size());
        for _ in 0..100 {
            let matched = self.call();
            assert!(matched.abs_diff(prompt) <= 1, "the prompt is found, the rest is not: {matched}");
        }
        assert_eq!(self.cache.pool.private_count(), 0);
        assert_eq!(self.cache.tree.size_info().protected, 0);
    }
}
