//! Tests of the public API, one subject a file, in one binary so that it is linked once. Tests with their own
//! allocator, and those of the repository and of GPUs, are in other files.

use std::env;
use std::ops::Range;

mod attention;
mod bench_work;
mod config;
mod config_errors;
mod config_states;
mod defects;
mod drafter;
mod drafts;
mod either;
mod ended_steps;
mod engine;
mod errors;
mod events;
mod faults;
mod fork;
mod fork_saves;
mod groups;
mod host;
mod layout;
mod leaders;
mod loads;
mod managers;
mod outbox_process;
mod packed;
mod page_table;
mod plan_bytes;
mod plan_padded;
mod plan_scratch;
mod prefix_cache;
mod read_plan;
mod record_bytes;
mod refusals;
mod regression;
mod replay;
mod small_cpu;
mod states;
mod stores;
mod tree;
mod trees;

/// Returns whether `KVARENA_SEEDS` is a range. Minimum counts of a test hold for the seeds of the test alone.
fn is_range() -> bool {
    env::var("KVARENA_SEEDS").is_ok_and(|seeds| seeds != "all")
}

/// Returns the seeds of a test: the first `few`, all with `KVARENA_SEEDS=all`, as in CI, or a range such as
/// `KVARENA_SEEDS=1000..2000`.
fn seeds(few: u64, all: u64) -> Range<u64> {
    let Ok(value) = env::var("KVARENA_SEEDS") else { return 0..few };
    if value == "all" {
        return 0..all;
    }
    let bounds = value.split_once("..").map(|(from, to)| (from.parse(), to.parse()));
    match bounds {
        Some((Ok(from), Ok(to))) => from..to,
        _ => panic!("KVARENA_SEEDS={value} is neither all nor like 0..100"),
    }
}
