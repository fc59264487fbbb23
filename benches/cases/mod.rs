//! The cases that are measured: what each call does, and the floor that it cannot beat. Inputs are
//! those of `work`. Used by the divan benches, by the table (`targets.rs`) and by the peers' package.
#![allow(dead_code, missing_docs)]

pub mod chats;
pub mod decode;
pub mod evict;
pub mod hit;
pub mod insert;
pub mod lead;
pub mod nested;
pub mod pages;
pub mod sample;
pub mod work;

use kvarena::fence::Fence;
use kvarena::page::PagePool;
use kvarena::prefix::PrefixTree;
use kvarena::system::reclaim::reclaim;
use kvarena::{Namespace, PageId, PrefixLock, TokenId};

pub const NAMESPACE: Namespace = Namespace::new(0);

/// Pages of the longest sequence.
const SEQUENCE_PAGES: usize = 1 << 18;

/// A prefix tree and a page pool, as an engine has them, with the buffers that make a call free of allocations.
pub struct Cache {
    pub tree: PrefixTree,
    pub pool: PagePool,
    pub fence: Fence,
    freed: Vec<PageId>,
    duplicates: Vec<PageId>,
    pages: Vec<PageId>,
}

/// A sequence that holds a prefix and has pages for the rest.
pub struct Started {
    pub lock: PrefixLock,
    pub matched_pages: u32,
    /// Pages of its own, behind those matched.
    pub own: Vec<PageId>,
}

impl Cache {
    pub fn new(page_count: u32, page_size: u32) -> Self {
        let mut cache = Self::untouched(page_count, page_size);
        // As an engine does.
        cache.tree.prefault();
        cache
    }

    /// Whose memory is touched as it is used.
    pub fn untouched(page_count: u32, page_size: u32) -> Self {
        Self {
            tree: PrefixTree::new(page_count, page_size, 64),
            pool: PagePool::new(page_count),
            fence: Fence::new(0, 1, 0),
            freed: Vec::with_capacity(page_count as usize),
            duplicates: Vec::with_capacity(SEQUENCE_PAGES),
            pages: vec![PageId::default(); SEQUENCE_PAGES],
        }
    }

    fn page_size(&self) -> usize {
        self.tree.page_size() as usize
    }

    /// Match, lock, take pages (evicting the lacking ones), insert, unlock: the life of a request that computes the
    /// rest of `tokens`. Tokens past the last whole page are left out. Returns the pages matched.
    pub fn cycle(&mut self, tokens: &[TokenId]) -> u32 {
        let found = self.tree.match_prefix(NAMESPACE, tokens);
        let mut lock = self.tree.lock(&found, &mut self.fence).expect("the match is fresh");
        let matched = found.pages() as usize;
        let rest = &tokens[matched * self.page_size()..];
        let count = rest.len() / self.page_size();
        let Self { tree, pool, fence, freed, duplicates, pages } = self;
        reclaim(pool, tree, count as u64, freed);
        let own = &mut pages[..count];
        assert!(pool.alloc(own), "it was reclaimed");
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

    /// Drops the `count` oldest pages.
    pub fn evict(&mut self, count: u32) {
        self.freed.clear();
        self.tree.evict(count, &mut self.freed);
        self.pool.free_cached(&self.freed);
    }

    /// Match, lock and take all pages that `full_len` tokens need; nothing changes if they cannot be had.
    pub fn start(&mut self, prompt: &[TokenId], full_len: usize) -> Option<Started> {
        let found = self.tree.match_prefix(NAMESPACE, prompt);
        let lock = self.tree.lock(&found, &mut self.fence).expect("the match is fresh");
        let count = full_len.div_ceil(self.page_size()) - found.pages() as usize;
        let Self { tree, pool, freed, .. } = self;
        if count as u32 > pool.free_count() + tree.size_info().evictable {
            self.unlock(lock);
            return None;
        }
        reclaim(pool, tree, count as u64, freed);
        let mut own = vec![PageId::default(); count];
        assert!(pool.alloc(&mut own), "it was reclaimed");
        Some(Started { lock, matched_pages: found.pages(), own })
    }

    /// Insert what `start` computed, free duplicates and the tail, unlock.
    pub fn finish(&mut self, started: Started, tokens: &[TokenId]) {
        let Started { mut lock, matched_pages, mut own } = started;
        let size = self.page_size();
        let count = tokens.len() / size - matched_pages as usize;
        let rest = &tokens[matched_pages as usize * size..][..count * size];
        let Self { tree, pool, fence, duplicates, .. } = self;
        pool.free_private(&own[count..]);
        publish((tree, pool, fence), &mut lock, rest, &mut own[..count], duplicates);
        self.unlock(lock);
    }

    pub fn unlock(&mut self, lock: PrefixLock) {
        self.freed.clear();
        self.tree.unlock(lock, &mut self.fence, &mut self.freed);
        self.pool.free_cached(&self.freed);
    }
}

/// Inserts pages below a lock; the pool learns which are the tree's now and which nobody's.
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

/// Pages that a sequence of tokens fills.
pub fn whole_pages(tokens: usize, page_size: u32) -> u32 {
    (tokens / page_size as usize) as u32
}
