//! Compares the engine with the naive model on random workloads. A failure prints the seed, and shrunk, literal ops for
//! `regression.rs`.
//!
//! `KVARENA_SEEDS=all cargo test --test core replay` runs all seeds, `KVARENA_SEEDS=1000..2000` another range;
//! `KVARENA_OPS=500` runs longer workloads.

use std::env;
use std::ops::Range;

use super::{is_range, seeds};
use kvarena::CpuOptions;
use kvarena::backend::OpenBackend;
use kvarena::testkit::late::LateOptions;
use kvarena::testkit::op::Prompt;
use kvarena::testkit::posted::PostedOptions;
use kvarena::testkit::replay::Inspect;
use kvarena::testkit::shrink::{failure, literal, shrink};
use kvarena::testkit::{Family, Op, SmallConfig, Summary, Workload, replay_on};

/// Replays ops; on failure shrinks them and panics with the literal.
fn check_ops<O>(options: &O, seed: u64, config: &SmallConfig, ops: &[Op]) -> Summary
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

/// Replays a workload of `count` ops for each seed. Checks that the seeds reach each case of `least` at least as often
/// as its count.
fn check_on<O>(options: &O, family: Family, seeds: Range<u64>, count: usize, least: &[(&str, u64)])
where
    O: OpenBackend<Backend: Inspect> + Clone,
{
    let count = env::var("KVARENA_OPS").map_or(count, |count| count.parse().expect("KVARENA_OPS is a number"));
    let mut all = Summary::default();
    for seed in seeds {
        let mut workload = Workload::new(family, seed);
        let ops = workload.take_ops(count);
        all.add(&check_ops(options, seed, &workload.config(), &ops));
    }
    println!("{all:#?}");
    for &(answer, least) in least.iter().filter(|_| !is_range()) {
        let count = all.answers.get(answer).copied().unwrap_or(0);
        assert!(count >= least, "seldom reached: {answer}, {count}");
    }
}

fn check(family: Family, seeds: Range<u64>, count: usize, least: &[(&str, u64)]) {
    check_on(&CpuOptions::with_threads(1), family, seeds, count, least);
}

/// Calls and results that the workloads of any config must reach.
const REACHED: &[&str] = &[
    "abort Ok",
    "abort UnknownStep",
    "admission with a leader",
    "admit EmptyPrompt",
    "admit Ok",
    "admit OutOfPages",
    "admit OutOfSequences",
    "admit OutOfTokens",
    "admit PendingToken",
    "admit TooLong",
    "admit UnnamedNamespace",
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
    "duplicate pages",
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
    "hit tokens",
    "hit tokens of resumes",
    "load Ok",
    "load Preempted",
    "load UnknownSequence",
    "mark MarkLen",
    "mark Ok",
    "mark Preempted",
    "pages evicted from swap memory",
    "pages lost",
    "pages saved",
    "pages saved as they were evicted",
    "plan_batch CrossesMark",
    "plan_batch EmptyBatch",
    "plan_batch ExtendLen",
    "plan_batch Ok",
    "plan_batch OutOfPages",
    "plan_batch OutOfSteps",
    "plan_batch OutOfTokens",
    "plan_batch Preempted",
    "plan_batch RepeatedSequence",
    "plan_batch StateDraft",
    "plan_batch StateLost",
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
    "states kept",
];

/// Results of calls about drafts, which the workloads of drafts must reach.
const REACHED_BY_DRAFTS: &[&str] = &[
    "accept NotABranch",
    "accept NotDrafted",
    "accept Ok",
    "accept RepeatedSequence",
    "accept RollbackLen",
    "accept UnknownStep",
    "commit NotAccepted",
    "fork NotAccepted",
    "plan_batch DraftArrays",
    "plan_batch DraftMask",
    "plan_batch DraftOrder",
    "plan_batch DraftPosition",
    "plan_batch ExtendLen",
    "plan_batch NotAccepted",
    "preempt NotAccepted",
    "rollback NotAccepted",
];

/// A fuzzer draws millions of configs, so each one is valid.
#[test]
fn drawn_configs_are_valid() {
    for (family, seed) in Family::ALL.into_iter().flat_map(|family| (0..4_000).map(move |seed| (family, seed))) {
        let config = Workload::new(family, seed).config();
        if let Err(error) = config.engine().shape() {
            panic!("{family:?}, seed {seed}: {error}: {config:?}");
        }
    }
}

#[test]
fn any_config() {
    let reached: Vec<_> = REACHED.iter().map(|&answer| (answer, 1)).collect();
    check(Family::Any, seeds(400, 400), 200, &reached);
}

#[test]
fn drafts() {
    let reached: Vec<_> = REACHED_BY_DRAFTS.iter().map(|&answer| (answer, 3)).collect();
    check(Family::Drafts, seeds(200, 400), 200, &reached);
}

#[test]
fn swap_memory() {
    let least = [
        ("events of swap memory", 200),
        ("swap hit tokens", 200),
        ("load Ok", 500),
        ("pages evicted from swap memory", 500),
        ("pages loaded", 100),
        ("pages saved", 2000),
        ("pages saved as they were evicted", 1000),
    ];
    check(Family::Swap, seeds(300, 300), 250, &least);
}

/// Cells move to swap memory and back, each as a whole and independently of its node's pages.
#[test]
fn swap_memory_with_groups() {
    let least = [
        ("events of cells", 200),
        ("cells of joined events", 50),
        ("states superseded", 1),
        ("swap hit tokens", 50),
        ("mark OutOfMarks", 1),
        ("load Ok", 500),
        ("pages evicted from swap memory", 300),
        ("pages loaded", 100),
        ("pages saved", 2000),
        ("pages saved as they were evicted", 1000),
    ];
    check(Family::SwapGroups, seeds(500, 600), 250, &least);
}

/// Forks evict, publish and restore pages in one call.
#[test]
fn forks_with_swap_memory() {
    let least = [("fork Ok", 500), ("pages saved as they were evicted", 500), ("pages loaded", 20)];
    check(Family::Forks, seeds(300, 600), 250, &least);
}

/// The backend makes moves as late as the contract allows, and no call relies on an earlier effect.
#[test]
fn late_swap_memory_with_groups() {
    let options = LateOptions(CpuOptions::with_threads(1));
    check_on(&options, Family::SwapGroups, seeds(200, 200), 200, &[("pages loaded", 21)]);
}

/// A host does the work of an outbox late and from bytes, with drafts, forks, groups, swap memory and stores.
#[test]
fn posted_work() {
    let options = PostedOptions(CpuOptions::with_threads(1));
    check_on(&options, Family::Any, seeds(30, 100), 150, &[("plan_batch Ok", 100)]);
    check_on(&options, Family::Forks, seeds(30, 100), 150, &[("fork Ok", 50), ("accept Ok", 5)]);
    check_on(&options, Family::SwapGroups, seeds(60, 200), 200, &[("pages loaded", 3)]);
    check_on(&options, Family::Stores, seeds(30, 100), 150, &[("pages put", 20)]);
}

/// A store reads and writes swap pages while moves are late: it gets a page only after the save to it, and writes only
/// pages without an unfinished move.
#[test]
fn late_stores() {
    let options = LateOptions(CpuOptions::with_threads(1));
    let least = [("fetch of cells", 10), ("fetch of pages", 200), ("pages fetched", 30), ("pages put", 500)];
    check_on(&options, Family::Stores, seeds(100, 300), 900, &least);
}

/// Sequences lose their states by aborts and compute them again. Until they have made up for the loss, their items keep
/// the states that they read.
#[test]
fn lost_states() {
    let least = [("plan_batch StateLost", 100), ("states kept", 100), ("states spared after a loss", 20)];
    check(Family::States, seeds(100, 300), 300, &least);
}

#[test]
fn stores() {
    let least = [
        ("fetch of cells", 20),
        ("fetch of pages", 500),
        ("pages fetched", 100),
        ("pages put", 1000),
        ("put of a cell", 300),
        ("put_done false", 100),
        ("put_done true", 500),
        ("restate_puts Ok", 100),
    ];
    check(Family::Stores, seeds(300, 900), 900, &least);
}

#[test]
fn promises_are_kept() {
    check(Family::Promises, seeds(150, 150), 200, &[("plan_batch promised, but later", 11)]);
}

#[test]
fn rows_that_decode_begin_leaves() {
    check(Family::Leaves, seeds(15, 40), 120, &[]);
}

/// A planned unknown token may be the first of a leaf of the page tables, when all leaves are in use.
#[test]
fn a_pending_token_finds_no_leaf() {
    let config = SmallConfig { pages: 4, page_size: 1024, sequences: 2, tokens: 1024, ..SmallConfig::default() };
    let prompt = |len| Op::Admit(Prompt { namespace: 0, like: 0, shared: 0, len, seed: 0, promise: 0, limit: 0 });
    let all_of_the_first = Op::Plan { first: 0, count: 0, lens: [2; 4], twist: 255 };
    let ops = [prompt(1023), prompt(1024), all_of_the_first, all_of_the_first];
    let summary = check_ops(&CpuOptions::with_threads(1), 0, &config, &ops);
    assert_eq!(summary.answers.get("plan_batch OutOfTokens"), Some(&1), "{summary:?}");
}

/// Two items in flight end at marks, so a row has two states of its own. The next item gives up the second mark.
#[test]
fn a_third_mark_in_flight_takes_no_third_state() {
    let config = SmallConfig {
        pages: 10,
        sequences: 2,
        tokens: 400,
        hash_bits: 3,
        page_first: false,
        dtype: 4,
        layers: 2,
        groups: 11,
        swap_pages: 6,
        hashing: 1,
        event_pages: 1,
        ..SmallConfig::default()
    };
    let prompt =
        |like, shared, len, seed| Op::Admit(Prompt { namespace: 0, like, shared, len, seed, promise: 0, limit: 0 });
    let plan = |first, count, lens| Op::Plan { first, count, lens, twist: 255 };
    let ops = [
        prompt(132, 20010, 32554, 1),
        plan(1, 122, [182, 236, 98, 247]),
        Op::Commit { pick: 0 },
        prompt(245, 58015, 32993, 2),
        Op::Complete { pick: 45 },
        Op::Draft { first: 183, count: 69, seed: 174, twist: 255 },
        plan(187, 208, [178, 68, 224, 229]),
        Op::Finish { pick: 242, publish: true },
        plan(7, 253, [65, 158, 80, 226]),
        Op::Draft { first: 53, count: 213, seed: 94, twist: 255 },
    ];
    let summary = check_ops(&CpuOptions::with_threads(1), 0, &config, &ops);
    assert!(summary.answers["marks given up"] > 0, "{summary:?}");
}
