//! Test only: serving one request at a time, told again without an engine. Pages are entries of a map, recency is a
//! counter, eviction looks at every page. What the engine answers must be the same.

use std::collections::HashMap;

use indicatif::ProgressBar;
use kvarena::TokenId;

use crate::args::Args;
use crate::request::Request;

#[derive(Debug, PartialEq, Eq)]
struct Figures {
    hit_tokens: u64,
    evicted_pages: u64,
    skipped: u64,
}

/// A cached page: its parent in the path (0 is the root), and when it was last given up.
struct Page {
    key: (u64, Vec<TokenId>),
    idle_since: u64,
}

/// Younger than any page that is idle.
const IN_USE: u64 = u64::MAX;

/// Requests one after another, with an exact page-level LRU.
fn naive(requests: &[Request], pages: usize, page_size: usize) -> Figures {
    let mut figures = Figures { hit_tokens: 0, evicted_pages: 0, skipped: 0 };
    let mut ids: HashMap<(u64, Vec<TokenId>), u64> = HashMap::new();
    let mut cached: HashMap<u64, Page> = HashMap::new();
    let (mut last_id, mut clock) = (0, 0);
    let (mut prompt, mut output) = (Vec::new(), Vec::new());
    for request in requests {
        request.write_prompt(&mut prompt);
        request.write_stored_output(&mut output);
        let stored: Vec<TokenId> = prompt.iter().chain(&output).copied().collect();
        let wanted = stored.len().div_ceil(page_size);
        if wanted > pages {
            figures.skipped += 1;
            continue;
        }
        // Match all but the last token of the prompt.
        let mut path = vec![0];
        for page in prompt[..prompt.len() - 1].chunks_exact(page_size) {
            let Some(&id) = ids.get(&(path[path.len() - 1], page.to_vec())) else { break };
            cached.get_mut(&id).expect("it was found").idle_since = IN_USE;
            path.push(id);
        }
        let matched = path.len() - 1;
        figures.hit_tokens += (matched * page_size) as u64;
        // Take the pages that the rest needs.
        let free = pages - cached.len();
        for _ in free..wanted - matched {
            let oldest = cached.iter().min_by_key(|(_, page)| page.idle_since);
            let oldest = *oldest.expect("pages are cached").0;
            assert_ne!(cached[&oldest].idle_since, IN_USE, "a page is idle");
            let page = cached.remove(&oldest).expect("it was found");
            ids.remove(&page.key);
            figures.evicted_pages += 1;
        }
        // Keep all whole pages; the deepest page is the oldest.
        for page in stored.chunks_exact(page_size).skip(matched) {
            let key = (path[path.len() - 1], page.to_vec());
            let id = *ids.entry(key.clone()).or_insert_with(|| {
                last_id += 1;
                cached.insert(last_id, Page { key, idle_since: 0 });
                last_id
            });
            path.push(id);
        }
        for id in path[1..].iter().rev() {
            clock += 1;
            cached.get_mut(id).expect("a path's pages are cached").idle_since = clock;
        }
    }
    figures
}

fn engine(requests: &[Request], args: &Args) -> Figures {
    let outcome = crate::serve(args, requests, &ProgressBar::hidden()).expect("it serves");
    let stored: u64 = requests.iter().map(|r| u64::from(r.stored_len())).sum();
    if outcome.tally.skipped == 0 && outcome.tally.preemptions == 0 {
        assert_eq!(outcome.tally.requests, requests.len() as u64);
        assert_eq!(outcome.stats.computed_tokens + outcome.tally.hit_tokens, stored);
    }
    let s = outcome.stats;
    assert_eq!((s.private_pages, s.protected_pages, s.fenced_pages), (0, 0, 0), "{s:?}");
    assert_eq!((s.sequences, s.steps), (0, 0), "{s:?}");
    Figures {
        hit_tokens: outcome.tally.hit_tokens,
        evicted_pages: outcome.stats.evicted_pages,
        skipped: outcome.tally.skipped,
    }
}

fn args(line: &str) -> Args {
    use clap::Parser;
    let words = std::iter::once("replay").chain(line.split_whitespace());
    Args::try_parse_from(words).expect("the test's command line is good")
}

fn committed_trace() -> Vec<Request> {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/trace.jsonl");
    crate::trace::read(file.as_ref(), usize::MAX).expect("the trace is good")
}

#[test]
fn sequential_figures_are_exact() {
    let trace = committed_trace();
    for (page_size, pages) in
        [(512, 8), (512, 12), (512, 20), (512, 200), (128, 40), (16, 300), (100, 90), (1, 5000)]
    {
        let args = args(&format!("--sequential --pages {pages} --page-size {page_size}"));
        let naive = naive(&trace, pages, page_size);
        assert_eq!(engine(&trace, &args), naive, "{pages} pages of {page_size}");
    }
    // Computed by hand-written code of another language.
    let args = args("--sequential --pages 12 --page-size 512");
    let figures = Figures { hit_tokens: 19_968, evicted_pages: 28, skipped: 0 };
    assert_eq!(engine(&trace, &args), figures);
}

#[test]
fn sequential_chats_are_exact() {
    let requests = crate::chat::generate(700, 5);
    for (page_size, pages) in [(256, 90), (256, 500), (64, 900)] {
        let args = args(&format!("--sequential --pages {pages} --page-size {page_size}"));
        let naive = naive(&requests, pages, page_size);
        assert!(naive.hit_tokens > 0 && naive.evicted_pages > 0, "{naive:?}");
        assert_eq!(engine(&requests, &args), naive, "{pages} pages of {page_size}");
    }
}

#[test]
fn requests_that_cannot_fit_are_skipped() {
    let trace = committed_trace();
    for schedule in ["--sequential", "--concurrency 4 --step-tokens 100"] {
        let args = args(&format!("{schedule} --pages 5 --page-size 512"));
        let figures = engine(&trace, &args);
        let long = trace.iter().filter(|r| r.stored_len() > 5 * 512).count() as u64;
        assert!(long > 0);
        assert_eq!(figures.skipped, long, "{schedule}");
    }
}

#[test]
fn without_reuse_nothing_hits_or_is_evicted() {
    let trace = committed_trace();
    for schedule in ["--sequential", "--concurrency 4 --step-tokens 300"] {
        let args = args(&format!("{schedule} --pages 40 --page-size 128 --prefix none"));
        let nothing = Figures { hit_tokens: 0, evicted_pages: 0, skipped: 0 };
        assert_eq!(engine(&trace, &args), nothing, "{schedule}");
    }
}

#[test]
fn every_request_is_served_however_small_the_pool() {
    let requests = crate::chat::generate(300, 2);
    let longest = requests.iter().map(Request::stored_len).max().expect("there are requests");
    for page_size in [1, 16, 256] {
        for (concurrency, step_tokens) in [(1, 1000), (3, 64), (40, 2), (40, 8192)] {
            for spare in [0, 1, 400] {
                let pages = longest.div_ceil(page_size) + spare / page_size;
                let args = args(&format!(
                    "--concurrency {concurrency} --step-tokens {step_tokens} --pages {pages} --page-size {page_size}"
                ));
                assert_eq!(engine(&requests, &args).skipped, 0, "{args:?}");
            }
        }
    }
}

#[test]
fn of_a_burst_one_computes_the_prompt() {
    let requests = crate::chat::burst(64, 1);
    let run = |line: &str| {
        crate::serve(&args(line), &requests, &ProgressBar::hidden()).expect("it serves")
    };
    let stored: u64 = requests.iter().map(|r| u64::from(r.stored_len())).sum();
    let [waiting, alone] = ["", " --no-waiting"].map(|how| run(&format!("--concurrency 64{how}")));
    for outcome in [&waiting, &alone] {
        assert_eq!(outcome.tally.requests, 64);
        assert_eq!(outcome.stats.computed_tokens + outcome.stats.hit_tokens, stored);
    }
    // 1,984 tokens are whole pages of 16 before the last token.
    assert_eq!((waiting.tally.followers, waiting.tally.awaited_tokens), (63, 63 * 1984));
    assert_eq!(waiting.stats.hit_tokens, 63 * 1984);
    assert_eq!((alone.tally.followers, alone.tally.awaited_tokens), (0, 0));
    // Without waiting, all that are let in by the first step compute the prompt: five, if it is of 8,192 tokens.
    assert_eq!(alone.stats.computed_tokens - waiting.stats.computed_tokens, 4 * 1984);
    let [waiting, alone] = ["", " --no-waiting"]
        .map(|how| run(&format!("--concurrency 64 --step-tokens 200000{how}")).stats);
    assert_eq!(alone.computed_tokens - waiting.computed_tokens, 63 * 1984);
    // However small the pool and the steps, all are served.
    for line in ["--pages 250", "--pages 400 --step-tokens 100", "--pages 300 --concurrency 7"] {
        assert_eq!(run(line).tally.requests, 64, "{line}");
    }
}

#[test]
fn crowding_preempts_and_a_large_pool_does_not() {
    let requests = crate::chat::generate(400, 9);
    let run = |line: &str| {
        crate::serve(&args(line), &requests, &ProgressBar::hidden()).expect("it serves").tally
    };
    let crowded = run("--concurrency 64 --pages 1500");
    let roomy = run("--concurrency 64 --pages 200000");
    assert!(crowded.preemptions > 0, "{crowded:?}");
    assert_eq!(roomy.preemptions, 0, "{roomy:?}");
    assert!(crowded.hit_tokens < roomy.hit_tokens);
    assert_eq!(crowded.output_tokens, roomy.output_tokens);
}
