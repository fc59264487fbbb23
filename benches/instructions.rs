//! Runs one case for a profiler: `instructions CASE PAGE_SIZE CALLS`. Only the code that `measured` calls is counted.
//! Without a case, the program lists the cases. `benches/instructions.sh` counts their instructions with callgrind.
//!
//! Most trees are ten times smaller than in the table of `cases/work.rs`, because callgrind is slow. The work of a call
//! is the same.

mod cases;

use cases::chats;
use cases::decode::Decode;
use cases::evict::{Evict, SAMPLE};
use cases::hit::{Hit, HitFloor, Miss, full_cache};
use cases::insert::{Cycle, Insert, InsertFloor};
use cases::lead::Lead;
use cases::manager::BlockManager;
use cases::managers::ManagedChats;
use cases::nested::{Nested, hostile_bytes, read_hostile};
use cases::pages::AllocFree;
use cases::tree::TreeCase;

const SEQUENCES: usize = 1000;
const CASES: [&str; 34] = [
    "hit",
    "hit_floor",
    "miss",
    "insert",
    "insert_floor",
    "cycle",
    "evict_1000",
    "evict_10000",
    "evict_100000",
    "evict_1000000",
    "alloc_free",
    "plan",
    "plan_2_tracks",
    "plan_4_tracks",
    "plan_state",
    "plan_marks",
    "step",
    "step_state",
    "admission",
    "admission_behind",
    "admission_hit",
    "nested_plan_2000",
    "nested_plan_4000",
    "nested_levels_2000",
    "nested_levels_4000",
    "nested_bytes_2000",
    "nested_bytes_4000",
    "replay",
    "tree_match",
    "tree_lock",
    "tree_extend",
    "tree_evict",
    "chats_engine",
    "chats_hash_map",
];

/// The profiler counts only the instructions of this function and of its callees.
#[inline(never)]
fn measured(calls: usize, call: &mut dyn FnMut()) {
    for _ in 0..calls {
        call();
    }
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let [case, page_size, calls] = &args[..] else {
        CASES.iter().for_each(|case| println!("{case}"));
        return;
    };
    let page_size: u32 = page_size.parse().expect("a page size");
    let calls: usize = calls.parse().expect("a number of calls");
    run(case, page_size, calls);
}

fn run(case: &str, page_size: u32, calls: usize) {
    if let Some(mut call) = unprepared(case, page_size) {
        return measured(calls, &mut *call);
    }
    match case {
        "insert" => {
            let mut insert = Insert::new(page_size, SEQUENCES);
            let mut left = calls;
            while left > 0 {
                let round = left.min(insert.room());
                measured(round, &mut || insert.call());
                insert.restore();
                left -= round;
            }
        }
        "plan" | "plan_2_tracks" | "plan_4_tracks" | "plan_state" | "plan_marks" => {
            let tracks = case.trim_matches(|c: char| !c.is_ascii_digit()).parse().unwrap_or(1);
            let mut decode = match case {
                "plan_state" => Decode::with_states(page_size, 256, 1024, 1),
                "plan_marks" => Decode::with_states(page_size, 256, 256, 69),
                _ => Decode::with_tracks(page_size, 256, 1024, tracks),
            };
            for _ in 0..calls {
                decode.prepare();
                let mut step = None;
                measured(1, &mut || {
                    if case == "plan_marks" {
                        decode.mark();
                    }
                    step = Some(decode.plan());
                });
                decode.rest(step.expect("the step is planned"));
            }
        }
        "step" | "step_state" => {
            let mut decode = match case {
                "step_state" => Decode::with_states(page_size, 256, 1024, 1),
                _ => Decode::new(page_size, 256, 1024),
            };
            for _ in 0..calls {
                decode.prepare();
                measured(1, &mut || decode.step());
            }
        }
        "replay" => {
            // A call is a request. Requests differ, so the case runs all of them: `calls` must be their total.
            assert_eq!(calls, chats::REQUESTS);
            let (texts, mut cache) = (chats::texts(calls), chats::cache(page_size));
            measured(1, &mut || _ = chats::serve(&texts, &mut cache));
        }
        "chats_engine" => managed(ManagedChats::engine(page_size), calls),
        "chats_hash_map" => managed(ManagedChats::hash(page_size), calls),
        "tree_extend" | "tree_evict" => tree(case, page_size, calls),
        _ if case.starts_with("nested_") => {
            let (kind, rows) = case["nested_".len()..].split_once('_').expect("a case");
            nested(kind, rows.parse().expect("a number of rows"), calls);
        }
        _ => evict(case, page_size, calls),
    }
}

/// Returns the call of a case whose calls need no preparation; `None` for other cases.
fn unprepared(case: &str, page_size: u32) -> Option<Box<dyn FnMut()>> {
    fn boxed<C: 'static>(mut case: C, call: impl Fn(&mut C) + 'static) -> Option<Box<dyn FnMut()>> {
        Some(Box::new(move || call(&mut case)))
    }
    let cache = || full_cache(page_size, SEQUENCES, 0);
    match case {
        "hit" => boxed(Hit::new(cache(), SEQUENCES, 64), |hit| _ = hit.call()),
        "hit_floor" => boxed(HitFloor::new(SEQUENCES, 64, page_size), |floor| _ = floor.call()),
        "tree_match" => boxed(TreeCase::new(page_size, SEQUENCES, 64), |tree| _ = tree.find()),
        "tree_lock" => boxed(TreeCase::new(page_size, SEQUENCES, 64), TreeCase::lock),
        "miss" => boxed(Miss::new(cache()), |miss| _ = miss.call()),
        "insert_floor" => boxed(InsertFloor::new(page_size, 1), InsertFloor::call),
        "cycle" => boxed(Cycle::new(page_size, SEQUENCES), |cycle| _ = cycle.call()),
        "alloc_free" => boxed(AllocFree::new(1 << 16, 50), AllocFree::call),
        "admission" | "admission_behind" => {
            boxed(Lead::new(page_size, case == "admission_behind"), |lead| lead.admission())
        }
        "admission_hit" => boxed(Lead::new(page_size, false), |lead| lead.hit()),
        _ => None,
    }
}

/// Counts steps of 64 running chats through a block manager.
fn managed<M: BlockManager>(mut chats: ManagedChats<M>, calls: usize) {
    for _ in 0..calls {
        chats.arrive();
        measured(1, &mut || chats.step());
    }
    println!("{:?}", chats.counts());
}

fn evict(case: &str, page_size: u32, calls: usize) {
    let leaves = case.strip_prefix("evict_").and_then(|leaves| leaves.parse().ok());
    let mut evict = Evict::new(page_size, leaves.expect("a case of the list"));
    let mut left = calls;
    while left > 0 {
        if evict.calls() == 0 {
            evict.restore();
        }
        let round = left.min(evict.calls()).min(SAMPLE);
        measured(round, &mut || evict.call());
        evict.empty_list();
        left -= round;
    }
}

/// Counts an extension by a page, or an eviction of [`EVICTED`](cases::tree::EVICTED) pages.
fn tree(case: &str, page_size: u32, calls: usize) {
    let mut tree = TreeCase::new(page_size, SEQUENCES, 64);
    let mut left = calls;
    while left > 0 {
        tree.start();
        let mut round = |counted, wanted: usize, call: &mut dyn FnMut()| {
            let inside = if counted { wanted.min(left) } else { 0 };
            measured(inside, call);
            (inside..wanted).for_each(|_| call());
            left -= inside;
        };
        round(case == "tree_extend", tree.room(), &mut || tree.extend());
        tree.finish();
        round(case == "tree_evict", TreeCase::evictions(), &mut || tree.evict());
        tree.check();
    }
}

fn nested(kind: &str, rows: u32, calls: usize) {
    if kind == "bytes" {
        let bytes = hostile_bytes(rows);
        return measured(calls, &mut || read_hostile(&bytes, rows));
    }
    let mut nested = Nested::new(rows);
    for _ in 0..calls {
        nested.prepare();
        if kind == "levels" {
            nested.levels(&mut |call| measured(1, call));
            continue;
        }
        let mut step = None;
        measured(1, &mut || step = Some(nested.plan()));
        nested.rest(step.expect("the step is planned"));
    }
}
