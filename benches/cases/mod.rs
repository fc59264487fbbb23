//! The measured cases. Each has a measured call, and some have a lower bound (floor). `work` has the inputs.
//! `benches/peers` and all benches except `attention` and `gpu` use the cases.
#![allow(dead_code, missing_docs)]

#[path = "../../examples/adopt/blocks.rs"]
mod blocks;
#[allow(unused_imports)]
#[path = "../../examples/replay/chat.rs"]
pub mod chat;
pub mod chats;
pub mod decode;
pub mod evict;
pub mod gather;
#[path = "../../examples/adopt/hash_blocks.rs"]
mod hash_blocks;
pub mod hit;
pub mod insert;
pub mod lead;
#[path = "../../examples/adopt/manager.rs"]
pub mod manager;
pub mod managers;
pub mod nested;
pub mod pages;
#[allow(unused_imports)]
#[path = "../../examples/replay/request.rs"]
pub mod request;
#[path = "../../examples/replay/rng.rs"]
mod rng;
pub mod sample;
#[path = "../../examples/adopt/serve.rs"]
mod serve;
pub mod tiers;
pub mod tree;
pub mod work;

use kvarena::id::PrefixLock;
use kvarena::testkit::internals::{Fence, PagePool, PrefixTree, reclaim};
use kvarena::{Namespace, PageId, TokenId};

pub const NAMESPACE: Namespace = Namespace::new(0);

/// Returns whether cargo runs the bench to measure. `cargo bench` passes `--bench`; `cargo test --benches` does not.
/// With `--test` or `--list`, a bench measures nothing, as with the standard harness.
pub fn is_measured() -> bool {
    let has = |wanted| std::env::args().any(|arg| arg == wanted);
    has("--bench") && !has("--test") && !has("--list")
}

/// Maximum pages of a sequence.
const SEQUENCE_PAGES: usize = 1 << 18;

/// A prefix tree and a page pool like an engine's, with the buffers that keep a cycle free of allocations.
pub struct Cache {
    pub tree: PrefixTree,
    pub pool: PagePool,
    pub fence: Fence,
    freed: Vec<PageId>,
    duplicates: Vec<PageId>,
    pages: Vec<PageId>,
}

impl Cache {
    pub fn new(page_count: u32, page_size: u32) -> Self {
        // An engine does the same by default.
        Self::of(PrefixTree::new(page_count, page_size, 64, true).expect("memory"), page_count)
    }

    /// Creates a cache without prefault: its memory is first touched when it is used.
    pub fn untouched(page_count: u32, page_size: u32) -> Self {
        Self::of(PrefixTree::new(page_count, page_size, 64, false).expect("memory"), page_count)
    }

    fn of(tree: PrefixTree, page_count: u32) -> Self {
        Self {
            tree,
            pool: PagePool::new(page_count).expect("memory"),
            fence: Fence::new(0, 1, 0).expect("memory"),
            freed: Vec::with_capacity(page_count as usize),
            duplicates: Vec::with_capacity(SEQUENCE_PAGES),
            pages: vec![PageId::default(); SEQUENCE_PAGES],
        }
    }

    fn page_size(&self) -> usize {
        self.tree.page_size() as usize
    }

    /// Runs the life of a request that computes the uncached part of `tokens`: match, lock, evict until enough
    /// pages are free, take pages, insert, unlock. Ignores tokens past the last whole page. Returns the number of
    /// matched pages.
    pub fn cycle(&mut self, tokens: &[TokenId]) -> u32 {
        let found = self.tree.match_prefix(NAMESPACE, tokens);
        let mut lock = self.tree.lock(&found, &mut self.fence).expect("the match is fresh");
        let matched = found.pages() as usize;
        let rest = &tokens[matched * self.page_size()..];
        let count = rest.len() / self.page_size();
        let Self { tree, pool, fence, freed, duplicates, pages } = self;
        reclaim(pool, tree, count as u64, freed);
        let own = &mut pages[..count];
        assert!(pool.alloc(own), "the pages were reclaimed");
        let rest = &rest[..count * tree.page_size() as usize];
        publish((tree, pool, fence), &mut lock, rest, own, duplicates);
        self.unlock(lock);
        found.pages()
    }

    /// Makes a cached prefix the youngest.
    pub fn touch(&mut self, tokens: &[TokenId]) {
        let found = self.tree.match_prefix(NAMESPACE, tokens);
        let lock = self.tree.lock(&found, &mut self.fence).expect("the match is fresh");
        self.unlock(lock);
    }

    /// Evicts the `count` oldest pages.
    pub fn evict(&mut self, count: u32) {
        self.freed.clear();
        self.tree.evict(count, &mut self.freed);
        self.pool.free_cached(&self.freed);
    }

    pub fn unlock(&mut self, lock: PrefixLock) {
        self.freed.clear();
        self.tree.unlock(lock, &mut self.fence, &mut self.freed);
        self.pool.free_cached(&self.freed);
    }
}

/// Inserts pages below a lock, and updates the pool: pages of the tree become cached, and duplicates free.
fn publish(
    (tree, pool, fence): (&mut PrefixTree, &mut PagePool, &mut Fence),
    lock: &mut PrefixLock,
    tokens: &[TokenId],
    own: &mut [PageId],
    duplicates: &mut Vec<PageId>,
) {
    duplicates.clear();
    let inserted = tree.insert(lock, tokens, own, duplicates, fence);
    pool.publish(&own[inserted.duplicates as usize..]);
    pool.free_private(duplicates);
}

/// Returns the number of whole pages of `tokens` tokens.
pub fn whole_pages(tokens: usize, page_size: u32) -> u32 {
    (tokens / page_size as usize) as u32
}
