//! Bookkeeping bytes of a full prefix tree and of its page pool. The bench computes the bytes from the sizes of the
//! structures, and also measures the memory of the process.
//!
//! ```text
//! cargo bench --bench bytes
//! ```
//!
//! live      nodes, child entries, span entries and extents in use, by their sizes
//! resident  memory that the process has touched for the tree and the pool, from /proc/self/statm; without prefault
//! reserved  memory that the process has allocated for the worst case: a node for each page
//!
//! The tree contains 10,000 sequences with 1,536 own tokens, or 100,000 with 256. Each begins with one of 32 shared
//! prompts of 512 tokens. Column `nodes of` contains the number of own tokens. The tree fills the pool except a few
//! pages, because some sequences continue their prompt with equal pages by chance. On systems other than Linux the
//! measured columns are 0.

mod cases;

use cases::Cache;
use cases::hit::sequence_pages;
use cases::work;
use kvarena::testkit::internals::PrefixTree;
use kvarena::{Capacity, EngineConfig, PoolConfig, TokenId};

fn main() {
    if !cases::is_measured() {
        return;
    }
    let names = ["nodes of", "page_size", "tokens", "nodes", "live", "resident", "reserved", "a node", "a page"];
    names.iter().for_each(|name| print!("{name:>12}"));
    println!("\n{:>48}{:>36}{:>12}{:>12}", "", "------- bytes a token -------", "bytes", "bytes");
    for page_size in [1, 16] {
        report("1,536", page_size, sequence_pages(page_size, work::SEQUENCES), work::SEQUENCES, work::sequence);
        let leaves = 100_000;
        let tokens = leaves * work::LEAF_LEN + work::PROMPTS * work::PROMPT_LEN;
        report("256", page_size, tokens as u32 / page_size, leaves, work::leaf_sequence);
    }
}

/// Fills a tree of `page_count` pages with sequences, and prints a line of the table.
fn report(name: &str, page_size: u32, page_count: u32, count: usize, sequence: fn(usize) -> Vec<TokenId>) {
    let before = Memory::now();
    let mut cache = Cache::untouched(page_count, page_size);
    let reserved = Memory::now().reserved - before.reserved;
    for i in 0..count {
        cache.cycle(&sequence(i));
    }
    let resident = Memory::now().resident - before.resident;
    let sizes = cache.tree.size_info();
    let pages = sizes.evictable + sizes.protected;
    assert!(pages > page_count - page_count / 1000, "the tree is full");
    let tokens = f64::from(pages * page_size);
    let nodes = cache.tree.node_count();
    print!("{name:>12}{page_size:>12}{tokens:>12}{nodes:>12}");
    for bytes in [cache.tree.live_bytes(), resident, reserved] {
        print!("{:>12.2}", bytes as f64 / tokens);
    }
    println!("{:>12}{:>12.2}", PrefixTree::BYTES_PER_NODE, page_bytes());
}

/// Returns the bytes that each page adds to the page pool, the fence and the systems' buffers.
fn page_bytes() -> f64 {
    let bytes = |pages| {
        let pool = PoolConfig { capacity: Capacity::Pages(pages), ..PoolConfig::default() };
        let limits = EngineConfig { max_tokens: 1 << 20, max_sequence_len: 1 << 10, ..EngineConfig::from(pool) };
        let bytes = limits.bytes().expect("a valid config");
        (bytes.pages + bytes.steps) as f64
    };
    (bytes(2 << 20) - bytes(1 << 20)) / f64::from(1 << 20)
}

/// Memory of the process in bytes.
#[derive(Default)]
struct Memory {
    reserved: u64,
    resident: u64,
}

impl Memory {
    fn now() -> Self {
        const SYSTEM_PAGE: u64 = 4096;
        let pages = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
        let mut pages = pages.split(' ').map_while(|pages| pages.parse::<u64>().ok());
        let mut next = || pages.next().unwrap_or(0) * SYSTEM_PAGE;
        Self { reserved: next(), resident: next() }
    }
}
