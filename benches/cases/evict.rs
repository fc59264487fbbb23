//! Evict: remove 256 tokens from a tree of N leaves of 256 tokens each, with shuffled ages.

use std::hint::black_box;

use kvarena::PageId;

use super::sample::median_ns;
use super::{Cache, whole_pages, work};

/// Number of calls in a sample. The evicted pages of a sample fill one list, which is reused as a host reuses its list.
pub const SAMPLE: usize = 100;

/// Maximum number of pages of a tree whose memory is prefaulted, as in an engine. At page_size 1 such a tree takes 160
/// to 180 bytes a page.
const TOUCHED_MAX: u32 = 1 << 26;

/// Returns whether this machine has the memory for a tree and for its [`EvictFloor`].
pub fn fits(page_size: u32, leaves: usize) -> bool {
    let pages = leaves as u64 * u64::from(whole_pages(work::LEAF_LEN, page_size));
    let bytes_per_page = if pages <= u64::from(TOUCHED_MAX) { 240 } else { 60 };
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.is_none_or(|kib| pages * bytes_per_page <= kib * 1024)
}

/// A tree that loses one leaf in each call. Only the tree is measured: the pages return to the pool in `restore`.
pub struct Evict {
    cache: Cache,
    leaves: usize,
    pages_per_leaf: u32,
    /// Evicted pages of the last calls.
    list: Vec<PageId>,
    evicted: Vec<PageId>,
    order: Vec<u32>,
    done: usize,
}

impl Evict {
    pub fn new(page_size: u32, leaves: usize) -> Self {
        let tokens = leaves * work::LEAF_LEN + work::PROMPTS * work::PROMPT_LEN;
        let pages = whole_pages(tokens, page_size);
        let mut cache =
            if pages <= TOUCHED_MAX { Cache::new(pages, page_size) } else { Cache::untouched(pages, page_size) };
        for i in 0..leaves {
            cache.cycle(&work::leaf_sequence(i));
        }
        assert_eq!(cache.pool.free_count(), 0, "the tree fills the pool");
        let order = work::touch_order(leaves);
        for &leaf in &order {
            cache.touch(&work::leaf_sequence(leaf as usize));
        }
        let pages_per_leaf = whole_pages(work::LEAF_LEN, page_size);
        let list = work::slab(SAMPLE * pages_per_leaf as usize);
        let mut evict = Self { cache, leaves, pages_per_leaf, list, evicted: Vec::new(), order, done: 0 };
        evict.list.clear();
        evict
    }

    /// Evicts a part of the tree without measuring it. If memory was not touched for a while, the first accesses wait
    /// for the operating system.
    pub fn warm_up(&mut self) {
        (0..self.leaves / 50).for_each(|_| self.call());
        self.restore();
    }

    /// Returns the number of calls until a tenth of the tree is evicted.
    pub fn calls(&self) -> usize {
        (self.leaves / 10).saturating_sub(self.done)
    }

    pub fn call(&mut self) {
        if self.list.len() == self.list.capacity() {
            self.empty_list();
        }
        self.cache.tree.evict(self.pages_per_leaf, &mut self.list);
        self.done += 1;
    }

    /// Measures samples of [`SAMPLE`] calls each, and restores the tree.
    pub fn samples(&mut self) -> Vec<f64> {
        let samples = (0..self.calls().min(1000) / SAMPLE).map(|_| {
            let ns = median_ns(1, SAMPLE, || self.call());
            self.empty_list();
            ns
        });
        let samples = samples.collect();
        self.restore();
        samples
    }

    /// Empties the list between samples, so that no measured call has to empty it.
    pub fn empty_list(&mut self) {
        self.evicted.append(&mut self.list);
    }

    /// Checks that the oldest leaves were evicted, and inserts them again as the youngest.
    pub fn restore(&mut self) {
        self.empty_list();
        assert_eq!(self.evicted.len(), self.done * self.pages_per_leaf as usize);
        self.cache.pool.free_cached(&self.evicted);
        self.evicted.clear();
        let gone: Vec<u32> = self.order.drain(..self.done).collect();
        self.done = 0;
        for leaf in gone {
            let prompt = whole_pages(work::PROMPT_LEN, self.cache.tree.page_size());
            let found = self.cache.cycle(&work::leaf_sequence(leaf as usize));
            assert_eq!(found, prompt, "the oldest leaf is evicted, and its prompt stays");
            self.order.push(leaf);
        }
    }

    pub fn cache(&self) -> &Cache {
        &self.cache
    }
}

/// The lower bound: only the memory accesses that an eviction needs, in slabs as large as the tree's. For each leaf, in
/// the order of ages, it reads a word in each of two columns, a word in a child table, and the leaf's page ids. It
/// writes only the copied ids.
pub struct EvictFloor {
    columns: [Vec<[u32; 8]>; 2],
    table: Vec<[u32; 3]>,
    pages: Vec<PageId>,
    pages_per_leaf: usize,
    order: Vec<u32>,
    next: usize,
    list: Vec<PageId>,
}

impl EvictFloor {
    pub fn new(page_size: u32, leaves: usize) -> Self {
        let pages_per_leaf = whole_pages(work::LEAF_LEN, page_size) as usize;
        let pages = leaves * pages_per_leaf;
        Self {
            columns: [work::slab(leaves), work::slab(leaves)],
            table: work::slab((2 * pages).next_power_of_two()),
            pages: work::slab(pages),
            pages_per_leaf,
            order: work::touch_order(leaves),
            next: 0,
            list: work::slab(SAMPLE * pages_per_leaf),
        }
    }

    /// See [`Evict::warm_up`].
    pub fn warm_up(&mut self) {
        (0..self.order.len() / 50).for_each(|_| self.call());
    }

    pub fn call(&mut self) {
        let leaf = self.order[self.next] as usize;
        let place = self.next % SAMPLE * self.pages_per_leaf;
        self.next = (self.next + 1) % self.order.len();
        let count = self.pages_per_leaf;
        let entry = leaf.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 20 & (self.table.len() - 1);
        black_box(self.columns[0][leaf][0] ^ self.columns[1][leaf][0] ^ self.table[entry][0]);
        self.list[place..place + count].copy_from_slice(&self.pages[leaf * count..][..count]);
        black_box(&self.list);
    }
}
