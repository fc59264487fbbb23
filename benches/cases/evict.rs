//! Evict: take 256 tokens out of a tree of N leaves of 256 tokens each, whose ages are shuffled.

use kvarena::PageId;
use kvarena::testkit::cpu_work as work;

use super::{Cache, whole_pages};

/// A tree that loses one leaf a call. The tree only: the pages go back to the pool in `restore`.
pub struct Evict {
    cache: Cache,
    leaves: usize,
    pages_per_leaf: u32,
    evicted: Vec<PageId>,
    order: Vec<u32>,
    done: usize,
}

impl Evict {
    pub fn new(page_size: u32, leaves: usize) -> Self {
        let tokens = leaves * work::LEAF_LEN + work::PROMPTS * work::PROMPT_LEN;
        let pages = whole_pages(tokens, page_size);
        let mut cache = Cache::new(pages, page_size);
        for i in 0..leaves {
            cache.cycle(&work::leaf_sequence(i));
        }
        assert_eq!(cache.pool.free_count(), 0, "the tree fills the pool");
        let order = work::touch_order(leaves);
        for &leaf in &order {
            cache.touch(&work::leaf_sequence(leaf as usize));
        }
        let pages_per_leaf = whole_pages(work::LEAF_LEN, page_size);
        let evicted = Vec::with_capacity(pages as usize);
        Self { cache, leaves, pages_per_leaf, evicted, order, done: 0 }
    }

    /// Calls until a tenth of the tree is gone.
    pub fn calls(&self) -> usize {
        (self.leaves / 10).saturating_sub(self.done)
    }

    pub fn call(&mut self) {
        self.cache.tree.evict(self.pages_per_leaf, &mut self.evicted);
        self.done += 1;
    }

    /// Checks that the oldest leaves went, and puts them back as the youngest.
    pub fn restore(&mut self) {
        assert_eq!(self.evicted.len(), self.done * self.pages_per_leaf as usize);
        self.cache.pool.free_cached(&self.evicted);
        self.evicted.clear();
        let gone: Vec<u32> = self.order.drain(..self.done).collect();
        self.done = 0;
        for leaf in gone {
            let prompt = whole_pages(work::PROMPT_LEN, self.cache.tree.page_size());
            let found = self.cache.cycle(&work::leaf_sequence(leaf as usize));
            assert_eq!(found, prompt, "the oldest leaf went, and its prompt stayed");
            self.order.push(leaf);
        }
    }

    pub fn cache(&self) -> &Cache {
        &self.cache
    }
}
