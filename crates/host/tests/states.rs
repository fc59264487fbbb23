//! Tests that a model whose layers keep a state generates its golden tokens over the engine's cache: states are cached
//! at marks, read by later prompts, evicted, moved to swap memory, and lost by failed steps.

mod common;

use common::serving::{Ran, SCHEDULES, Schedule, Setting, requests, serve};
use kvarena::KvDtype;
use kvarena::config::PrefixMode;

const NAME: &str = "qwen3-5-tiny";

/// Page sizes that hold the state of a layer. The first ones are the least multiples of 8.
const SIZES: [(KvDtype, [u32; 2]); 2] = [(KvDtype::F32, [24, 96]), (KvDtype::Bf16, [40, 96])];

/// Serves the golden prompts and checks their tokens, and that nothing stays in use.
fn check(setting: Setting) -> Ran {
    let cases = common::cases(NAME);
    let ran = serve(&common::model(NAME), &requests(&cases), setting);
    for (number, case) in cases.iter().enumerate() {
        assert_eq!(ran.collected.tokens[&(number, 0)], case.tokens, "case {number}, {setting:?}");
    }
    let stats = &ran.stats;
    let left = (stats.sequences, stats.steps, stats.private_pages, stats.fenced_pages, stats.protected_pages);
    assert_eq!(left, (0, 0, 0, 0, 0), "{setting:?}: all resources are released");
    ran
}

fn plain(dtype: KvDtype, page_size: u32) -> Setting {
    Setting { dtype, page_size, groups: true, ..Setting::default() }
}

#[test]
fn tokens_are_golden_in_every_setting() {
    for (dtype, sizes) in SIZES {
        for (page_size, schedule) in sizes.into_iter().flat_map(|size| SCHEDULES.map(|schedule| (size, schedule))) {
            for (prefix, overlap) in [(PrefixMode::Radix, false), (PrefixMode::Radix, true), (PrefixMode::None, true)] {
                let ran = check(Setting { prefix, overlap, schedule, ..plain(dtype, page_size) });
                let hits = ran.stats.hit_tokens > 0;
                let reuses = prefix == PrefixMode::Radix && page_size < 96;
                assert!(hits || !reuses || schedule != Schedule::OneByOne, "{page_size}: prompts share prefixes");
                assert!(!hits || prefix == PrefixMode::Radix);
                assert_eq!(ran.stats.kept_states > 0, prefix == PrefixMode::Radix, "{page_size}, {schedule:?}");
            }
        }
    }
}

#[test]
fn steps_end_at_marks() {
    for overlap in [false, true] {
        let ran = check(Setting { chunk: 48, overlap, ..plain(KvDtype::F32, 40) });
        assert!(ran.stats.kept_states > 0);
    }
}

#[test]
fn lost_states_are_computed_again() {
    // With steps of 7 tokens, no prompt reaches a mark between two failures.
    let schedules = SCHEDULES.into_iter().filter(|schedule| *schedule != Schedule::ChunksOf7);
    for (schedule, overlap) in schedules.flat_map(|schedule| [(schedule, false), (schedule, true)]) {
        let ran = check(Setting { fail_every: Some(5), schedule, overlap, ..plain(KvDtype::F32, 24) });
        assert!(ran.tally.aborted_steps > 0 && ran.tally.preemptions > 0, "{schedule:?}");
    }
}

#[test]
fn states_move_to_swap_memory() {
    let ran = check(Setting { swap_pages: 400, schedule: Schedule::SmallPool, ..plain(KvDtype::F32, 24) });
    assert!(ran.stats.saved_pages > 0, "{:?}", ran.stats);
}
