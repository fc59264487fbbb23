//! Compares kvarena with published crates and simple baselines on the same work. Prints one table of medians and of
//! their ratios to kvarena's.
//!
//! ```text
//! cd benches/peers
//! cargo run --release                          the table
//! cargo run --release -- --json                rows {case, page_size, impl, ns}
//! cargo run --release -- --sequences 10000     the trees of benches/targets.rs (needs memory for the peers)
//! ```
//!
//! Every cache gets the same tokens in the same order and must match the same pages; in a replay, hit rates may differ
//! slightly. Cases that a cache does not support are omitted: an index without pages cannot cycle, a free list cannot
//! match.

#[path = "../../cases/mod.rs"]
#[allow(unused)]
mod cases;

mod btree;
mod chain;
mod free_list;
mod kvbm;
mod ours;
mod router;

use std::hint::black_box;

use cases::sample::median_ns;
use cases::{chats, work};
use kvarena::TokenId;
use serde::Serialize;

/// A cache of prefixes that owns pages, or an index of prefixes.
pub trait Cache {
    /// Name in the table.
    fn name(&self) -> &'static str;

    /// Matches whole pages and collects them in `out`. Returns their number.
    fn hit(&mut self, tokens: &[TokenId], out: &mut Vec<u32>) -> usize;

    /// Runs a cycle: match, lock, take pages (evicting), insert, unlock. Returns the number of matched pages.
    fn cycle(&mut self, tokens: &[TokenId]) -> usize;

    /// Returns whether this is a cache. The cycle of an index only publishes.
    fn owns_pages(&self) -> bool {
        true
    }
}

#[derive(Serialize)]
struct Row {
    case: &'static str,
    page_size: u32,
    #[serde(rename = "impl")]
    name: &'static str,
    ns: f64,
}

struct Options {
    json: bool,
    sequences: usize,
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let sequences = args.iter().position(|arg| arg == "--sequences").and_then(|i| args.get(i + 1));
    let options = Options {
        json: args.iter().any(|arg| arg == "--json"),
        sequences: sequences.map_or(2000, |text| text.parse().expect("--sequences takes a number")),
    };
    let mut rows = Vec::new();
    for page_size in [1, 16] {
        let own = (work::SEQUENCE_LEN - work::PROMPT_LEN) * options.sequences;
        for cache in caches(page_size, own + work::PROMPTS * work::PROMPT_LEN) {
            rows.extend(measure(cache, page_size, options.sequences));
        }
        rows.extend(replay(page_size));
    }
    rows.extend(free_list::rows());
    print(&rows, &options);
}

type New = fn(usize, u32) -> Box<dyn Cache>;

/// Creates the caches one at a time, so that only one is in memory. Each has room for `tokens` tokens.
fn caches(page_size: u32, tokens: usize) -> impl Iterator<Item = Box<dyn Cache>> {
    let all: [New; 5] = [ours::new, chain::new, btree::new, kvbm::new, router::new];
    all.into_iter().map(move |new| new(tokens / page_size as usize, page_size))
}

/// Measures the chats of `cases/chats.rs`, one request at a time. Prompts and answers are cached.
fn replay(page_size: u32) -> Vec<Row> {
    let texts = chats::texts(2000);
    let total_tokens: usize = texts.iter().map(Vec::len).sum();
    let mut first = None;
    let serve = |mut cache: Box<dyn Cache>| {
        let mut hit = 0;
        let ns = median_ns(1, 1, || {
            for tokens in &texts {
                hit += cache.cycle(black_box(tokens)) * page_size as usize;
            }
        });
        // The caches order pages by different rules, so their evictions and hit rates differ slightly.
        let (name, rate) = (cache.name(), hit as f64 / total_tokens as f64);
        let ours = *first.get_or_insert(rate);
        assert!((rate - ours).abs() < 0.02, "{name}: hit rate {rate}, kvarena's is {ours}");
        Row { case: "replay", page_size, name, ns: ns / texts.len() as f64 }
    };
    caches(page_size, chats::CACHE_TOKENS).filter(|cache| cache.owns_pages()).map(serve).collect()
}

fn measure(mut cache: Box<dyn Cache>, page_size: u32, sequences: usize) -> Vec<Row> {
    let (name, owns_pages) = (cache.name(), cache.owns_pages());
    let whole = work::SEQUENCE_LEN / page_size as usize;
    for s in 0..sequences {
        cache.cycle(&work::sequence(s));
    }
    let mut rows = Vec::new();
    let mut row = |case, ns| rows.push(Row { case, page_size, name, ns });
    let mut out = Vec::with_capacity(whole);
    let queries: Vec<_> = (0..2000).map(|i| work::sequence(work::hit_order(i) % sequences)).collect();
    for (case, rotation) in [("hit hot", 64), ("hit cold", 2000)] {
        let mut i = 0;
        let mut call = |out: &mut Vec<u32>| {
            out.clear();
            let found = cache.hit(black_box(&queries[i]), out);
            i = (i + 1) % rotation;
            found
        };
        for _ in 0..rotation {
            assert_eq!(call(&mut out), whole, "{name}: a cached sequence is found whole");
            let mut pages = out.clone();
            pages.sort_unstable();
            pages.dedup();
            assert!(!owns_pages || pages.len() == whole, "{name}: all pages differ");
        }
        row(case, time(|| _ = black_box(call(&mut out))));
    }
    let misses: Vec<_> = (0..work::MISSES).map(work::miss).collect();
    let mut i = 0;
    let mut call = || {
        i = (i + 1) % misses.len();
        out.clear();
        cache.hit(black_box(&misses[i]), &mut out)
    };
    assert!((0..work::MISSES).all(|_| call() == 0), "{name}: no page matches");
    row("miss", time(|| _ = black_box(call())));
    if owns_pages {
        let new: Vec<_> = (0..2 * sequences).map(work::new_sequence).collect();
        let prompt = work::PROMPT_LEN / page_size as usize;
        let mut i = 0;
        let mut call = || {
            i = (i + 1) % new.len();
            cache.cycle(black_box(&new[i]))
        };
        // Replaces the whole cache, so that cycles have inserted the evicted pages. At page size 1 a page may match by
        // chance.
        for _ in 0..sequences {
            let matched = call();
            assert!(matched.abs_diff(prompt) <= 1, "{name}: the prompt is cached: {matched}");
        }
        row("cycle", time(|| _ = black_box(call())));
    }
    rows
}

/// Returns the median time of a call, over fewer calls if they are slow.
fn time(mut call: impl FnMut()) -> f64 {
    let calls = if median_ns(3, 1, &mut call) > 1e5 { 1 } else { 20 };
    median_ns(100, calls, call)
}

fn print(rows: &[Row], options: &Options) {
    if options.json {
        for row in rows {
            println!("{}", serde_json::to_string(row).expect("a row is plain data"));
        }
        return;
    }
    println!("{} cached sequences of {} tokens", options.sequences, work::SEQUENCE_LEN);
    println!("{:<14}{:>10}  {:<26}{:>12}{:>10}", "case", "page_size", "impl", "median ns", "ratio");
    let mut sorted: Vec<&Row> = rows.iter().collect();
    sorted.sort_by_key(|row| (row.page_size, row.case));
    for row in sorted {
        let same = |other: &&Row| other.case == row.case && other.page_size == row.page_size;
        let ours = rows.iter().filter(same).find(|row| row.name == ours::NAME);
        let ratio = ours.map_or(f64::NAN, |ours| row.ns / ours.ns);
        println!("{:<14}{:>10}  {:<26}{:>12.1}{:>10.2}", row.case, row.page_size, row.name, row.ns, ratio);
    }
}
