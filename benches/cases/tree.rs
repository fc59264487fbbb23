//! The tree alone: match, lock, extend and evict by handle, on the cached sequences of the case `hit`.

use std::hint::black_box;

use kvarena::tree::{Handle, Tree, TreeConfig};
use kvarena::{PageId, TokenId};

use super::hit::sequence_pages;
use super::{NAMESPACE, whole_pages, work};

/// Number of running sequences.
const RUNNING: usize = 64;

/// Number of pages by which each running sequence grows in a round.
const GROWTH: usize = 16;

/// Number of pages that a call of [`TreeCase::evict`] frees.
pub const EVICTED: u32 = 16;

/// A tree of cached sequences, some of which run. A round grows the running sequences and then evicts their new pages.
pub struct TreeCase {
    tree: Tree,
    page_size: usize,
    queries: Vec<Vec<TokenId>>,
    /// Ends of the queries.
    ends: Vec<Handle>,
    /// Ends of the running sequences, which are locked.
    locked: Vec<Handle>,
    free: Vec<PageId>,
    next: usize,
    out: Vec<PageId>,
}

impl TreeCase {
    /// Creates a tree of the first `sequences` cached sequences. Calls use `rotation` of them.
    pub fn new(page_size: u32, sequences: usize, rotation: usize) -> Self {
        let pages = sequence_pages(page_size, sequences) + (RUNNING * GROWTH) as u32;
        let mut tree = Tree::new(TreeConfig::new(pages, page_size)).expect("memory");
        let mut free: Vec<PageId> = (0..pages).rev().map(PageId::new).collect();
        for s in 0..sequences {
            let tokens = work::sequence(s);
            let known = tree.find(NAMESPACE, &tokens) as usize;
            let count = whole_pages(tokens.len(), page_size) as usize;
            let mut pages = vec![PageId::default(); known];
            pages.extend(free.drain(free.len() - (count - known)..).rev());
            let inserted = tree.insert(NAMESPACE, &tokens, &pages).expect("new pages");
            assert_eq!(inserted.known as usize, known);
        }
        let queries: Vec<_> = (0..rotation).map(|i| work::sequence(work::hit_order(i) % sequences)).collect();
        let ends = queries.iter().map(|query| tree.match_prefix(NAMESPACE, query, &mut Vec::new()).handle).collect();
        let (locked, out) = (Vec::with_capacity(RUNNING), Vec::with_capacity(work::SEQUENCE_LEN));
        Self { tree, page_size: page_size as usize, queries, ends, locked, free, next: 0, out }
    }

    fn next(&mut self) -> usize {
        self.next = (self.next + 1) % self.queries.len();
        self.next
    }

    /// Matches a sequence and collects its pages.
    pub fn find(&mut self) -> u32 {
        let query = self.next();
        self.out.clear();
        let found = self.tree.match_prefix(NAMESPACE, black_box(&self.queries[query]), &mut self.out);
        black_box(&self.out);
        found.pages
    }

    /// Locks and unlocks a sequence that nothing else locks. Its prompt becomes locked and idle too.
    pub fn lock(&mut self) {
        let end = self.next();
        self.tree.lock(black_box(self.ends[end])).expect("it is cached");
        self.tree.unlock(self.ends[end], &mut self.free).expect("it is locked");
    }

    /// Starts the running sequences: each is locked and has one new page.
    pub fn start(&mut self) {
        for end in 0..RUNNING {
            self.tree.lock(self.ends[end]).expect("it is cached");
            self.locked.push(self.ends[end]);
        }
        (0..RUNNING).for_each(|_| self.extend());
    }

    /// Returns the number of calls of [`TreeCase::extend`] until the round is done.
    pub fn room(&self) -> usize {
        self.free.len()
    }

    /// Extends a running sequence by a page.
    pub fn extend(&mut self) {
        let at = self.free.len() % RUNNING;
        let page = self.free.pop().expect("there is room");
        let tokens = [TokenId::new(page.raw()); 16];
        let tokens = &tokens[..self.page_size];
        self.locked[at] = self.tree.extend(self.locked[at], tokens, &[page]).expect("it is locked").handle;
    }

    /// Ends the running sequences. The pages of this round are evicted next.
    pub fn finish(&mut self) {
        for locked in self.locked.drain(..) {
            self.tree.unlock(locked, &mut self.free).expect("it is locked");
        }
        for query in &self.queries {
            self.tree.match_prefix(NAMESPACE, query, &mut Vec::new());
        }
    }

    /// Evicts [`EVICTED`] pages.
    pub fn evict(&mut self) {
        self.tree.evict(EVICTED, &mut self.free).expect("the round's pages are idle");
    }

    /// Checks that a round ends as it began: each sequence is found whole, and nothing else is cached.
    pub fn check(&mut self) {
        let pages = whole_pages(work::SEQUENCE_LEN, self.page_size as u32);
        for _ in 0..self.queries.len() {
            assert_eq!(self.find(), pages, "a cached sequence is found whole");
        }
        assert_eq!(self.free.len(), RUNNING * GROWTH, "the pages of the round are evicted");
    }

    /// Returns the number of calls of [`TreeCase::evict`] in a round.
    pub fn evictions() -> usize {
        RUNNING * GROWTH / EVICTED as usize
    }
}
