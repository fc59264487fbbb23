//! Tests that the figures of a sequential replay equal those of naive models exactly, and that a batched replay serves
//! all requests.

use std::num::NonZeroUsize;

use indicatif::ProgressBar;
use kvarena::layout::Reach;
use kvarena::testkit::tiers::{Figures, Setting, Tiers};

use crate::args::Args;
use crate::request::Request;

fn engine(requests: &[Request], args: &Args) -> Figures {
    let outcome = crate::serve(args, requests, &ProgressBar::hidden()).expect("serving succeeds");
    let stored: u64 = requests.iter().map(|r| u64::from(r.stored_len())).sum();
    if outcome.tally.skipped == 0 && outcome.tally.preemptions == 0 {
        assert_eq!(outcome.tally.requests, requests.len() as u64);
        assert_eq!(outcome.stats.computed_tokens + outcome.tally.hit_tokens, stored);
    }
    let s = outcome.stats;
    assert_eq!((s.private_pages, s.protected_pages, s.fenced_pages), (0, 0, 0), "{s:?}");
    assert_eq!((s.sequences, s.steps), (0, 0), "{s:?}");
    outcome.totals()
}

/// Returns the figures of a naive model.
fn naive(requests: &[Request], args: &Args) -> Figures {
    let mut groups = vec![(Reach::All, 1)];
    if let Some(given) = &args.groups {
        let further = 1..given.groups.count();
        groups.extend(further.map(|group| (given.groups.reach(group), given.groups.layers_of(group) as usize)));
    }
    let mut tiers = Tiers::new(Setting {
        page_size: args.page_size as usize,
        step_tokens: args.step_tokens.unwrap_or(u32::MAX) as usize,
        groups,
        state_margin: args.state_margin as usize,
        state_gap: args.state_gap as usize,
        keep_used_states: args.keep_used,
        device: args.pages.expect("the test sets the pages") as usize,
        swap: args.swap_pages as usize,
        ahead: args.ahead as usize,
        store: args.store,
        record_pages: args.record_pages as usize,
    });
    let restart = args.restart.map_or(usize::MAX, NonZeroUsize::get);
    let (mut tokens, mut output) = (Vec::new(), Vec::new());
    for (done, request) in requests.iter().enumerate() {
        if done == restart {
            tiers.restart();
        }
        request.write_prompt(&mut tokens);
        let prompt = tokens.len();
        request.write_stored_output(&mut output);
        tokens.extend(&output);
        tiers.serve(&tokens, prompt);
    }
    tiers.figures()
}

fn args(line: &str) -> Args {
    use clap::Parser;
    let words = std::iter::once("replay").chain(line.split_whitespace());
    Args::try_parse_from(words).expect("the test's command line is valid")
}

fn committed_trace() -> Vec<Request> {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/trace.jsonl");
    let [all, some] = [usize::MAX, 3].map(|max| crate::trace::read(file.as_ref(), max, None).expect("a valid trace"));
    assert_eq!((all.len(), &some[..]), (20, &all[..3]));
    all
}

#[test]
fn sequential_figures_are_exact() {
    let trace = committed_trace();
    for (page_size, pages) in [(512, 8), (512, 12), (512, 20), (512, 200), (128, 40), (16, 300), (100, 90), (1, 5000)] {
        let args = args(&format!("--sequential --pages {pages} --page-size {page_size}"));
        let naive = naive(&trace, &args);
        assert_eq!(engine(&trace, &args), naive, "{pages} pages of {page_size}");
    }
    // A hand-written program in another language computed these figures.
    let args = args("--sequential --pages 12 --page-size 512");
    let Figures { hit_tokens, evicted_pages, skipped, .. } = engine(&trace, &args);
    assert_eq!((hit_tokens, evicted_pages, skipped), (19_968, 28, 0));
}

#[test]
fn sequential_chats_are_exact() {
    let requests = crate::chat::generate(700, 5);
    for (page_size, pages) in [(256, 90), (256, 500), (64, 900)] {
        let args = args(&format!("--sequential --pages {pages} --page-size {page_size}"));
        let naive = naive(&requests, &args);
        assert!(naive.hit_tokens > 0 && naive.evicted_pages > 0, "{naive:?}");
        assert_eq!(engine(&requests, &args), naive, "{pages} pages of {page_size}");
    }
}

#[test]
fn sequential_chats_with_groups_are_exact() {
    let requests = crate::chat::generate(500, 7);
    let mut skipped = 0;
    for (page_size, step_tokens, groups, pages) in [
        (256, 4096, "window:128x1", 150),
        (256, 1024, "window:1024x6", 200),
        (64, 512, "window:1024x2,chunk:2048x1", 600),
        (64, 8192, "chunk:1024x3", 900),
        (100, 300, "window:1x1,window:250x1,chunk:64x2", 300),
        (16, 1000, "chunk:16x1,window:17x1", 1200),
    ] {
        let args = args(&format!(
            "--sequential --pages {pages} --page-size {page_size} --step-tokens {step_tokens} --groups {groups}"
        ));
        let naive = naive(&requests, &args);
        assert!(naive.full_hit_tokens > naive.hit_tokens, "{groups}: {naive:?}");
        assert!(naive.hit_tokens > 0 && naive.evicted_cells > 0, "{groups}: {naive:?}");
        assert_eq!(engine(&requests, &args), naive, "{args:?}");
        skipped += naive.skipped;
    }
    assert!(skipped > 0);
}

#[test]
fn sequential_chats_with_states_are_exact() {
    let requests = crate::chat::generate(600, 13);
    for (page_size, step_tokens, pages, line) in [
        (96, 8192, 300, "--groups state:20"),
        (96, 700, 250, "--groups state:9 --state-margin 0"),
        (256, 4096, 120, "--groups state:3 --state-gap 1024 --keep-used"),
        (64, 1024, 700, "--groups window:1024x2,state:8 --state-margin 40"),
        (128, 512, 400, "--groups state:12,chunk:1024x1"),
        (96, 2048, 200, "--groups state:5 --swap-pages 150 --ahead 6"),
        (64, 2048, 400, "--groups window:300x1,state:7 --swap-pages 60"),
    ] {
        let line = format!("--pages {pages} --page-size {page_size} --step-tokens {step_tokens} {line}");
        let [engine, plain] = both(&requests, &line);
        assert!(
            plain.hit_tokens > 0 && plain.evicted_cells > 0 && plain.full_hit_tokens > plain.hit_tokens,
            "{plain:?}"
        );
        assert_eq!(engine, plain, "{line}");
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
        let figures = engine(&trace, &args);
        let nothing = Figures { peak_pages: figures.peak_pages, ..Figures::default() };
        assert_eq!(figures, nothing, "{schedule}");
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
fn one_request_of_a_burst_computes_the_prompt() {
    let requests = crate::chat::burst(64, 1);
    let run = |line: &str| crate::serve(&args(line), &requests, &ProgressBar::hidden()).expect("serving succeeds");
    let stored: u64 = requests.iter().map(|r| u64::from(r.stored_len())).sum();
    let [waiting, alone] = ["", " --no-waiting"].map(|how| run(&format!("--concurrency 64{how}")));
    for outcome in [&waiting, &alone] {
        assert_eq!(outcome.tally.requests, 64);
        assert_eq!(outcome.stats.computed_tokens + outcome.stats.hit_tokens, stored);
    }
    // Before the last token of the common prompt, 1,984 tokens are in whole pages of 16.
    assert_eq!((waiting.tally.followers, waiting.tally.awaited_tokens), (63, 63 * 1984));
    assert_eq!(waiting.stats.hit_tokens, 63 * 1984);
    assert_eq!((alone.tally.followers, alone.tally.awaited_tokens), (0, 0));
    // Without waiting, all requests that the first step admits compute the prompt. A step of 8,192 tokens admits five.
    assert_eq!(alone.stats.computed_tokens - waiting.stats.computed_tokens, 4 * 1984);
    let [waiting, alone] =
        ["", " --no-waiting"].map(|how| run(&format!("--concurrency 64 --step-tokens 200000{how}")).stats);
    assert_eq!(alone.computed_tokens - waiting.computed_tokens, 63 * 1984);
    // Small pools, small steps or few running requests do not prevent service.
    for line in ["--pages 250", "--pages 400 --step-tokens 100", "--pages 300 --concurrency 7"] {
        assert_eq!(run(line).tally.requests, 64, "{line}");
    }
}

#[test]
fn crowding_preempts_and_a_large_pool_does_not() {
    let requests = crate::chat::generate(400, 9);
    let run = |line: &str| crate::serve(&args(line), &requests, &ProgressBar::hidden()).expect("served").tally;
    let crowded = run("--concurrency 64 --pages 1500");
    let roomy = run("--concurrency 64 --pages 200000");
    assert!(crowded.preemptions > 0, "{crowded:?}");
    assert_eq!(roomy.preemptions, 0, "{roomy:?}");
    assert!(crowded.hit_tokens < roomy.hit_tokens);
    assert_eq!(crowded.output_tokens, roomy.output_tokens);
}

/// Returns the figures twice: of a replay, and of a naive model made of maps.
fn both(requests: &[Request], line: &str) -> [Figures; 2] {
    let args = args(&format!("--sequential {line}"));
    [engine(requests, &args), naive(requests, &args)]
}

/// A program in another language computed these figures. A hit that waits for a load is partly on the device: only its
/// pages of group 0 that are in swap memory alone count as hits in swap memory.
#[test]
fn swap_memory_and_stores_are_exact_on_a_trace() {
    let trace = committed_trace();
    for (step_tokens, line, hits, moves) in [
        (
            8_192,
            "--page-size 512 --groups window:128x1 --pages 20 --swap-pages 30 --ahead 2",
            [19_456, 5_120, 0],
            [55, 29, 16, 0, 6, 6, 0],
        ),
        (
            2_048,
            "--page-size 512 --groups window:1024x2 --pages 50 --swap-pages 60 --ahead 4",
            [20_992, 4_096, 0],
            [71, 27, 16, 0, 0, 0, 0],
        ),
        (
            1_024,
            "--page-size 128 --groups chunk:2048x2 --pages 120 --swap-pages 300",
            [20_352, 5_120, 0],
            [336, 336, 78, 0, 0, 0, 0],
        ),
        (
            1_024,
            "--page-size 128 --groups window:300x2,chunk:1024x1 --pages 120 --swap-pages 100 --ahead 5",
            [17_280, 512, 0],
            [367, 286, 26, 0, 211, 211, 0],
        ),
        (
            1_024,
            "--page-size 128 --groups window:300x2,chunk:1024x1 --pages 120 --swap-pages 60 --ahead 5 --store",
            [17_280, 0, 4_096],
            [377, 296, 76, 54, 278, 0, 378],
        ),
        (
            1_024,
            "--page-size 128 --groups chunk:2048x2 --pages 120 --swap-pages 100 --store --restart 12",
            [17_280, 512, 7_680],
            [256, 256, 114, 96, 39, 0, 374],
        ),
        (
            2_048,
            "--page-size 512 --groups window:1024x6 --pages 60 --swap-pages 14 --ahead 3 --store --restart 11",
            [16_896, 0, 2_048],
            [189, 96, 33, 26, 136, 0, 203],
        ),
        (
            100_000,
            "--page-size 128 --pages 40 --swap-pages 12 --ahead 2 --store --record-pages 4",
            [19_712, 640, 3_584],
            [151, 121, 33, 28, 131, 20, 116],
        ),
    ] {
        let [device_hit_tokens, swap_hit_tokens, store_hit_tokens] = hits;
        let [saved_pages, forced_pages, loaded_pages, fetched_pages, swap_evicted_pages, lost_pages, put_pages] = moves;
        let line = format!("--step-tokens {step_tokens} {line}");
        let [engine, naive] = both(&trace, &line);
        assert_eq!(engine, naive, "{line}");
        let figures = Figures {
            device_hit_tokens,
            swap_hit_tokens,
            store_hit_tokens,
            saved_pages,
            forced_pages,
            loaded_pages,
            fetched_pages,
            swap_evicted_pages,
            lost_pages,
            put_pages,
            ..engine
        };
        assert_eq!(engine, figures, "{line}");
    }
}

/// A program in another language computed these figures.
#[test]
fn states_are_exact_on_a_trace() {
    let trace = committed_trace();
    for (line, figures) in [
        (
            "--pages 60 --page-size 96 --step-tokens 2048 --groups state:8 --state-margin 64",
            [9_120, 16_800, 254, 25, 56],
        ),
        (
            "--pages 150 --page-size 64 --step-tokens 1024 --groups window:300x2,state:5 --state-margin 0 --keep-used",
            [14_784, 18_752, 336, 117, 103],
        ),
    ] {
        let [engine, naive] = both(&trace, line);
        assert_eq!(engine, naive, "{line}");
        let Figures { hit_tokens, full_hit_tokens, evicted_pages, evicted_cells, peak_pages, .. } = engine;
        let own = [hit_tokens, full_hit_tokens, evicted_pages, evicted_cells, peak_pages.into()];
        assert_eq!(own, figures, "{line}");
    }
}

#[test]
fn swap_memory_is_exact() {
    let requests = crate::chat::generate(1500, 7);
    for (count, page_size, pages, host, ahead) in [
        (1500, 256, 90, 300, 0),
        (1500, 256, 90, 300, 8),
        (1500, 256, 90, 20, 30),
        (300, 64, 330, 90, 0),
        (300, 64, 400, 600, 60),
    ] {
        let requests = &requests[..count];
        let line = format!("--pages {pages} --page-size {page_size} --swap-pages {host} --ahead {ahead}");
        for store in ["", " --store", " --store --record-pages 4 --restart 200"] {
            let line = format!("{line}{store}");
            let [engine, plain] = both(requests, &line);
            assert!(plain.saved_pages > 0 && plain.swap_evicted_pages > 0, "{plain:?}");
            assert_eq!(engine, plain, "{line}");
        }
    }
}

#[test]
fn stores_with_groups_are_exact() {
    let requests = crate::chat::generate(1500, 11);
    for (step_tokens, line) in [
        (4096, "--page-size 256 --groups window:128x1 --pages 150 --swap-pages 200 --ahead 5"),
        (1024, "--page-size 256 --groups window:1024x6 --pages 200 --swap-pages 90 --ahead 9"),
        (4096, "--page-size 128 --groups chunk:1024x3 --pages 500 --swap-pages 120 --restart 700"),
        (8192, "--page-size 256 --groups window:300x2,chunk:2048x1 --pages 250 --swap-pages 40 --ahead 4"),
    ] {
        let line = format!("--store --step-tokens {step_tokens} {line}");
        let [engine, plain] = both(&requests, &line);
        assert!(plain.store_hit_tokens > 0 && plain.lost_pages == 0, "{plain:?}");
        assert_eq!(engine, plain, "{line}");
    }
}
