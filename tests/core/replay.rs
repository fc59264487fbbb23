//! Compares engine and tables with the naive model on seeded workloads. A failure prints the seed, and shrunk, literal
//! ops for `regression.rs`.
//!
//! `KVARENA_SEEDS=all cargo test --test core replay` runs all seeds, `KVARENA_SEEDS=1000..2000` another range;
//! `KVARENA_OPS=500` runs longer workloads.

use std::env;

use super::{is_range, seeds};
use kvarena::testkit::late::LateOptions;
use kvarena::testkit::op::Prompt;
use kvarena::testkit::page_pool::{page_ops, replay_pages};
use kvarena::testkit::prefix_tree::{prefix_ops, replay_prefix};
use kvarena::testkit::replay::Inspect;
use kvarena::testkit::shrink::{failure, literal, shrink};
use kvarena::testkit::{Op, SmallConfig, Summary, Workload, replay_on};
use kvarena::{CpuOptions, OpenBackend};

fn op_count(usual: usize) -> usize {
    match env::var("KVARENA_OPS") {
        Ok(count) => count.parse().unwrap_or_else(|_| panic!("KVARENA_OPS={count} is not a number")),
        Err(_) => usual,
    }
}

/// Checks that the seeds of a test reach each case at least as often as its count.
fn check_counts(all: &Summary, least: &[(&str, u64)]) {
    println!("{all:#?}");
    if is_range() {
        return;
    }
    for &(answer, least) in least {
        let count = all.answers.get(answer).copied().unwrap_or(0);
        assert!(count >= least, "seldom reached: {answer}, {count}");
    }
}

/// Replays ops; on failure shrinks them and panics with the literal.
fn check(seed: u64, config: &SmallConfig, ops: &[Op]) -> Summary {
    check_on(&CpuOptions::with_threads(1), seed, config, ops)
}

/// Checks as [`check`], on another backend.
fn check_on<O>(options: &O, seed: u64, config: &SmallConfig, ops: &[Op]) -> Summary
where
    O: OpenBackend<Backend: Inspect> + Clone,
{
    let run = |ops: &[Op]| replay_on(config, options.clone(), ops).map_err(|mismatch| mismatch.to_string());
    let mut summary = Summary::default();
    let failed = failure(|| run(ops).map(|done| summary = done));
    if let Some(what) = failed {
        let small = shrink(ops, |ops| failure(|| run(ops).map(|_| ())).is_some());
        let then = failure(|| run(&small).map(|_| ()));
        panic!("seed {seed}: {what}\n{config:?}\n{}fails with {then:?}", literal(&small));
    }
    summary
}

#[test]
fn engine() {
    let mut all = Summary::default();
    for seed in seeds(400, 400) {
        let mut workload = Workload::new(seed);
        let config = workload.config();
        let ops = workload.take_ops(op_count(200));
        all.add(&check(seed, &config, &ops));
    }
    // The workloads must reach every case.
    let answers = [
        "abort Ok",
        "abort UnknownStep",
        "admit EmptyPrompt",
        "admit Ok",
        "admit OutOfPages",
        "admit OutOfSequences",
        "admit OutOfTokens",
        "admit PendingToken",
        "admit TooLong",
        "admit UnnamedNamespace",
        "admission with a leader",
        "admit_batch EmptyPrompt",
        "admit_batch Ok",
        "admit_batch OutOfPages",
        "admit_batch OutOfSequences",
        "admit_batch OutOfTokens",
        "admit_batch TooLong",
        "append Ok",
        "append OutOfTokens",
        "append PendingToken",
        "append TooLong",
        "append UnknownSequence",
        "commit Ok",
        "commit StepOrder",
        "commit UnknownStep",
        "complete Ok",
        "complete StepOpen",
        "complete UnknownStep",
        "events cleared",
        "events removed",
        "events stored",
        "evicted pages",
        "finish Ok",
        "finish UnknownSequence",
        "fork Ok",
        "fork OutOfPages",
        "fork OutOfSequences",
        "fork OutOfSteps",
        "fork Preempted",
        "fork TooLong",
        "fork UnknownSequence",
        "duplicate pages",
        "hit tokens",
        "hit tokens of resumes",
        "swap hit tokens",
        "load Ok",
        "load Preempted",
        "load UnknownSequence",
        "mark MarkLen",
        "mark Ok",
        "mark Preempted",
        "pages evicted from swap memory",
        "pages loaded",
        "pages lost",
        "pages saved",
        "pages saved as they were evicted",
        "plan_batch EmptyBatch",
        "plan_batch ExtendLen",
        "plan_batch Ok",
        "plan_batch OutOfPages",
        "plan_batch OutOfSteps",
        "plan_batch Preempted",
        "plan_batch RepeatedSequence",
        "plan_batch StepTokens",
        "plan_batch UnknownSequence",
        "plan_batch promised, but later",
        "preempt Ok",
        "preempt Preempted",
        "promise Ok",
        "promise OutOfPages",
        "promise Preempted",
        "promise TooLong",
        "promise UnknownSequence",
        "reset Ok",
        "resume NotPreempted",
        "resume Ok",
        "resume OutOfPages",
        "resume TooLong",
        "rollback Ok",
        "rollback RollbackLen",
        "rollback UnknownSequence",
        "save_ahead Ok",
    ];
    check_counts(&all, &answers.map(|answer| (answer, 1)));
}

#[test]
fn swap_memory() {
    let mut all = Summary::default();
    for seed in seeds(300, 300) {
        let mut workload = Workload::with_swap(seed);
        let config = workload.config();
        let ops = workload.take_ops(op_count(250));
        all.add(&check(seed, &config, &ops));
    }
    check_counts(
        &all,
        &[
            ("events of swap memory", 200),
            ("swap hit tokens", 200),
            ("load Ok", 500),
            ("load OutOfPages", 1),
            ("pages evicted from swap memory", 500),
            ("pages loaded", 100),
            ("pages saved", 2000),
            ("pages saved as they were evicted", 1000),
        ],
    );
}

/// Cells move to swap memory and back, each as a whole and independently of its node's pages.
#[test]
fn swap_memory_with_groups() {
    let mut all = Summary::default();
    for seed in seeds(300, 600) {
        let mut workload = Workload::with_swap_groups(seed);
        let config = workload.config();
        let ops = workload.take_ops(op_count(250));
        all.add(&check(seed, &config, &ops));
    }
    check_counts(
        &all,
        &[
            ("swap hit tokens", 50),
            ("load Ok", 500),
            ("pages evicted from swap memory", 300),
            ("pages loaded", 100),
            ("pages saved", 2000),
            ("pages saved as they were evicted", 1000),
        ],
    );
}

/// Forks evict, publish and restore pages in one call.
#[test]
fn forks_with_swap_memory() {
    let mut all = Summary::default();
    for seed in seeds(300, 600) {
        let mut workload = Workload::with_forks(seed);
        let config = workload.config();
        let ops = workload.take_ops(op_count(250));
        all.add(&check(seed, &config, &ops));
    }
    check_counts(&all, &[("fork Ok", 500), ("pages saved as they were evicted", 500), ("pages loaded", 20)]);
}

/// The backend makes moves as late as the contract allows, and no call relies on an earlier effect.
#[test]
fn late_swap_memory_with_groups() {
    let mut all = Summary::default();
    let options = LateOptions(CpuOptions::with_threads(1));
    for seed in seeds(200, 200) {
        let mut workload = Workload::with_swap_groups(seed);
        let config = workload.config();
        let ops = workload.take_ops(op_count(150));
        all.add(&check_on(&options, seed, &config, &ops));
    }
    check_counts(&all, &[("pages loaded", 21)]);
}

/// A store reads and writes swap pages while moves are late: it gets a page only after the save to it, and writes only
/// pages without an unfinished move.
#[test]
fn late_stores() {
    let mut all = Summary::default();
    let options = LateOptions(CpuOptions::with_threads(1));
    for seed in seeds(300, 600) {
        let mut workload = Workload::with_stores(seed);
        let config = workload.config();
        let ops = workload.take_ops(op_count(200));
        all.add(&check_on(&options, seed, &config, &ops));
    }
    check_counts(&all, &[("fetch of pages", 100), ("pages fetched", 5), ("pages put", 100)]);
}

#[test]
fn stores() {
    let mut all = Summary::default();
    for seed in seeds(600, 600) {
        let mut workload = Workload::with_stores(seed);
        let config = workload.config();
        let ops = workload.take_ops(op_count(250));
        all.add(&check(seed, &config, &ops));
    }
    check_counts(
        &all,
        &[
            ("fetch of pages", 200),
            ("pages fetched", 30),
            ("pages put", 500),
            ("put_done false", 100),
            ("put_done true", 500),
        ],
    );
}

/// A planned unknown token may be the first of a chunk of the page tables, when all chunks are in use.
#[test]
fn a_pending_token_finds_no_chunk() {
    let config = SmallConfig { pages: 4, page_size: 1024, sequences: 2, tokens: 1024, ..SmallConfig::default() };
    let prompt = |len| Op::Admit(Prompt { namespace: 0, like: 0, shared: 0, len, seed: 0, promise: 0 });
    let all_of_the_first = Op::Plan { first: 0, count: 0, lens: [2; 4], twist: 255 };
    let ops = [prompt(1023), prompt(1024), all_of_the_first, all_of_the_first];
    let summary = check(0, &config, &ops);
    assert_eq!(summary.answers.get("plan_batch OutOfTokens"), Some(&1), "{summary:?}");
}

/// Nearly all pages are promised, several steps are in flight and texts are similar. Commits therefore find duplicates,
/// and pages in the fence back promises.
#[test]
fn promises_are_kept() {
    let mut all = Summary::default();
    for seed in seeds(150, 150) {
        let mut workload = Workload::new(seed);
        let config = SmallConfig {
            pages: 6 + seed as u32 % 18,
            page_size: 1 + seed as u32 % 3,
            sequences: 6,
            sequence_len: 1 << 20,
            tokens: 1 << 12,
            steps: 6,
            share_prefixes: true,
            ..workload.config()
        };
        let mut ops = workload.take_ops(op_count(200));
        for (i, op) in ops.iter_mut().enumerate() {
            match op {
                Op::Admit(prompt) | Op::AdmitBatch { prompt, .. } => {
                    (prompt.seed, prompt.promise) = (prompt.seed % 2, 1 + i as u8 % 4)
                }
                Op::Resume { promise, .. } | Op::Fork { promise, .. } => *promise = 1 + i as u8 % 4,
                // Most completions complete a single step.
                Op::Complete { pick } if i % 3 > 0 => *pick = 200,
                _ => {}
            }
        }
        all.add(&check(seed, &config, &ops));
    }
    check_counts(&all, &[("plan_batch promised, but later", 11)]);
}

/// Prompts end near the end of a page, and a chunk of the page tables has one page or two. Decoding rows then begin
/// chunks, which other workloads rarely do.
#[test]
fn rows_that_decode_begin_chunks() {
    for seed in seeds(15, 40) {
        let page_size = [341, 512, 1024][seed as usize % 3];
        let mut workload = Workload::new(seed);
        let config = SmallConfig {
            pages: 24,
            page_size,
            sequences: 6,
            sequence_len: 1 << 20,
            tokens: 24 * u64::from(page_size),
            steps: 4,
            ..workload.config()
        };
        let mut ops = workload.take_ops(op_count(120));
        for op in &mut ops {
            if let Op::Admit(prompt) | Op::Match(prompt) | Op::AdmitBatch { prompt, .. } = op {
                // The replay adds 1 to `len`, so the prompt ends 0 to 3 tokens before the end of a page.
                prompt.len = (1 + prompt.len % 4) * page_size as u16 - 1 - prompt.len / 4 % 4;
            }
        }
        check(seed, &config, &ops);
    }
}

#[test]
fn page_pool() {
    for seed in seeds(100, 300) {
        let page_count = [1, 3, 40, 63, 64, 65, 200, 4095, 4097, 9000][seed as usize % 10];
        let ops = page_ops(seed, op_count(200));
        let run = |ops: &[_]| failure(|| replay_pages(page_count, ops));
        if let Some(what) = run(&ops) {
            let small = shrink(&ops, |ops| run(ops).is_some());
            panic!("seed {seed}, {page_count} pages: {what}\n{}{:?}", literal(&small), run(&small));
        }
    }
}

#[test]
fn prefix_tree() {
    for seed in seeds(100, 300) {
        let (mut config, ops) = prefix_ops(seed, op_count(250));
        if seed % 100 == 99 {
            config.pages = 4200; // The summaries of bitmaps then have two words.
        }
        let run = |ops: &[_]| failure(|| replay_prefix(config, ops));
        if let Some(what) = run(&ops) {
            let small = shrink(&ops, |ops| run(ops).is_some());
            panic!("seed {seed}, {config:?}: {what}\n{}{:?}", literal(&small), run(&small));
        }
    }
}
