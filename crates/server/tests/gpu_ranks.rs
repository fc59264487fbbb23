//! Tests ranks that fail or panic, pages that one rank cannot move, and stores of all ranks' pages. The stand-ins for
//! the driver and cublasLt fail on request. A run with a failing rank must print the reason and exit with the code of
//! the error. The caller of these tests ends a run that hangs (`fake_cublaslt/run.sh`).
#![cfg(feature = "cuda")]

mod common;

use std::fs;
use std::time::Instant;

use common::files::Dir;
use common::{run_server, run_server_with, serve_twice};
use kvarena_host::gpu::device::Device;
use libloading::os::unix::{Library, Symbol};
use serde_json::{Value, json};

/// Returns whether the driver is the stand-in, with enough devices for two ranks.
fn has_stand_in() -> bool {
    // SAFETY: the driver's library may be loaded, and the symbol is only looked up.
    let found = unsafe {
        Library::new("libcuda.so.1").is_ok_and(|driver| {
            let ask: Result<Symbol<*const ()>, _> = driver.get(b"fake_ask\0");
            ask.is_ok()
        })
    };
    let found = found && Device::open_number(1).is_ok();
    if !found {
        println!("not run: this is not the stand-in driver");
    }
    found
}

/// Runs two ranks with a fault, and checks the program's messages and exit code.
fn fails(arguments: &[&str], fault: (&str, &str), code: i32, words: &[&str]) {
    let start = Instant::now();
    let all = [&["--backend", "cuda", "--tp", "2", "--concurrency", "1"], arguments].concat();
    let ran = run_server_with(&[fault], &all, "");
    println!("{fault:?}: code {:?} after {:.1?}", ran.code, start.elapsed());
    assert_eq!(ran.code, Some(code), "{fault:?}: {}", ran.err);
    assert!(words.iter().all(|word| ran.err.contains(word)), "{fault:?}: {}", ran.err);
}

/// One prompt of 9 tokens. No step has more rows than are tuned.
const SERVE: [&str; 8] =
    ["--random-model", "llama-tiny-64", "--random-requests", "1:9", "--max-new-tokens", "4", "--chunk", "64"];

/// The fault is in the first or the last kernel of a step, in a sum, or in the load of the step's plan. It occurs on
/// either rank; only rank 0 runs the last kernel.
#[test]
fn a_rank_that_cannot_launch_ends_the_program() {
    if !has_stand_in() {
        return;
    }
    for (device, kernel) in [(0, "embed"), (1, "embed"), (0, "sum_ranks"), (1, "sum_ranks"), (0, "sample")] {
        let words = format!("rank {device}: cuLaunchKernelEx failed with CUDA error 719");
        fails(&SERVE, ("FAKE_DRIVER_REFUSES", &format!("{device}:{kernel}")), 1, &[&words]);
    }
    fails(&SERVE, ("FAKE_DRIVER_REFUSES", "1:load_plan"), 1, &["rank 1: ", "719"]);
    fails(&SERVE, ("FAKE_DRIVER_REFUSES", "0:load_plan"), 1, &["719"]);
}

/// The fault is in a search for 8 algorithms, by which products are tuned, or in the search for one algorithm at the
/// launch of a step with more rows than are tuned.
#[test]
fn a_rank_that_panics_ends_the_program() {
    if !has_stand_in() {
        return;
    }
    let mut long = SERVE;
    (long[3], long[7]) = ("1:530", "800");
    for (arguments, fault) in [(SERVE, "1:8"), (SERVE, "0:8"), (long, "1:1"), (long, "0:1")] {
        let words = format!("rank {} panicked", &fault[..1]);
        fails(&arguments, ("FAKE_CUBLASLT_OVERFLOWS", fault), 101, &["out of range", &words]);
    }
}

/// Serves requests on two ranks, in a pool that holds one of them. Returns their tokens, and the report's line about
/// swap memory.
fn hosted(swap_space: Option<&str>, faults: &[(&str, &str)]) -> (Vec<Value>, String) {
    let mut arguments = vec!["--backend", "cuda", "--tp", "2", "--random-model", "llama-tiny-64", "--chunk", "64"];
    arguments.extend(["--pages", "6"]);
    arguments.extend(swap_space.iter().flat_map(|gib| ["--swap-space", gib]));
    serve_twice(faults, &arguments, 64)
}

/// Each rank moves its part of a page, and the tokens stay the same. If one rank cannot save its part, the page is not
/// saved on any rank.
#[test]
fn a_page_that_one_rank_cannot_save_is_saved_on_none() {
    if !has_stand_in() {
        return;
    }
    let (expected, _) = hosted(None, &[]);
    let (words, line) = hosted(Some("0.01"), &[]);
    assert_eq!(words, expected);
    assert!(line.contains(" loaded") && !line.contains(" 0 loaded"), "{line}");
    // The kernel `copy_pages` moves pages of this size.
    for rank in ["0", "1"] {
        let fault = format!("{rank}:copy_pages");
        let (words, line) = hosted(Some("0.01"), &[("FAKE_DRIVER_REFUSES", &fault)]);
        assert_eq!(words, expected, "{fault}");
        assert!(line.contains(" 0 tokens hit") && line.contains(" 0 loaded"), "{fault}: {line}");
    }
}

/// A restart hits what both ranks have stored. If one rank's parts are gone, nothing is hit, and they are put again.
#[test]
fn two_ranks_hit_after_a_restart_only_what_both_have_stored() {
    if !has_stand_in() {
        return;
    }
    let dir = Dir::new();
    let folder = dir.path().join("cache");
    let prompt = |n: usize| (0..40).map(|i| (7 * n + i * i) % 500).collect::<Vec<_>>();
    let request = |n| json!({ "prompt": prompt(n), "max_new_tokens": 3 }).to_string() + "\n";
    let requests: String = (0..2).map(request).collect();
    let run = || {
        let arguments =
            ["--backend", "cuda", "--tp", "2", "--random-model", "llama-tiny-64", "--chunk", "64", "--json"];
        let store = ["--requests", "-", "--pages", "12", "--swap-space", "0.01", "--cache-dir"];
        let ran = run_server(&[&arguments[..], &store, &[folder.to_str().expect("UTF-8")]].concat(), &requests);
        let report = ran.err.clone();
        let lines = ran.lines().into_iter().filter(|line| line["tokens"].is_array());
        let (tokens, cached): (Vec<_>, Vec<_>) =
            lines.map(|mut line| (line["tokens"].take(), line["cached_tokens"].as_u64())).unzip();
        (tokens, cached, report)
    };
    let (tokens, cached, report) = run();
    assert_eq!(cached, [Some(0); 2]);
    assert!(report.contains("store disk: 0 of 4 records found") && report.contains(" 8 put ("), "{report}");
    let ranks: Vec<_> = fs::read_dir(folder.join("v1")).expect("it is there").map(|rank| rank.expect("read")).collect();
    assert_eq!(ranks.len(), 2);
    for rank in ranks {
        let (again, cached, report) = run();
        assert_eq!((&again, cached), (&tokens, vec![Some(32); 2]), "{report}");
        assert!(report.contains("store disk: 4 of 4 records found, 8 read"), "{report}");
        fs::remove_dir_all(rank.path()).expect("it is ours");
        let (again, cached, report) = run();
        assert_eq!((&again, cached), (&tokens, vec![Some(0); 2]), "{report}");
    }
    assert_eq!(run().1, [Some(32); 2]);
}
