//! A failed call of the backend leaves the engine consistent: it verifies, agrees with the model, and continues to
//! serve.

use kvarena::testkit::faults::{Failing, Fault};
use kvarena::testkit::{Op, SmallConfig, Summary, Workload, replay_on};
use kvarena::{CpuOptions, Null};

fn workload(seed: u64) -> (SmallConfig, Vec<Op>) {
    let mut workload = match seed % 4 {
        0 | 2 => Workload::new(seed),
        1 => Workload::with_swap(seed),
        _ => Workload::with_stores(seed),
    };
    (workload.config(), workload.take_ops(200))
}

/// A workload whose cells move to swap memory and back.
fn groups(seed: u64) -> (SmallConfig, Vec<Op>) {
    let mut workload = Workload::with_swap_groups(seed);
    (workload.config(), workload.take_ops(200))
}

/// A workload whose forks evict pages.
fn forks(seed: u64) -> (SmallConfig, Vec<Op>) {
    let mut workload = Workload::with_forks(seed);
    (workload.config(), workload.take_ops(200))
}

fn failures(summary: &Summary) -> u64 {
    let of = |answer| summary.answers.get(answer).copied().unwrap_or(0);
    of("backend failures")
}

/// Each backend call of a workload that can fail fails once before its effect and once after it.
#[test]
fn any_one_call_fails() {
    let mut failed = 0;
    for seed in 0..60 {
        let (config, ops) = match seed {
            0..40 => workload(seed),
            40..50 => groups(seed),
            _ => forks(seed),
        };
        for fault in [Fault::Before, Fault::After] {
            for n in 0.. {
                let backend = Failing::at(Null, fault, n);
                let summary = replay_on(&config, backend, &ops)
                    .unwrap_or_else(|mismatch| panic!("seed {seed}, call {n} {fault:?}: {mismatch}"));
                failed += failures(&summary);
                if failures(&summary) == 0 {
                    break; // The workload makes no call n.
                }
            }
        }
    }
    assert!(failed > 500, "only {failed} calls failed");
}

/// Many calls fail, and each page still contains the bytes of its owner.
#[test]
fn every_third_call_fails() {
    let (mut plans, mut forks, mut loads, mut saves) = (0, 0, 0, 0);
    for seed in 0..400 {
        let (config, ops) = workload(seed);
        for fault in [Fault::Before, Fault::After] {
            let backend = Failing::every(CpuOptions::with_threads(1), fault, seed % 3, 3);
            let summary = replay_on(&config, backend, &ops)
                .unwrap_or_else(|mismatch| panic!("seed {seed}, {fault:?}: {mismatch}"));
            plans += summary.answers.get("plan_batch Backend").copied().unwrap_or(0);
            for load in ["load Backend", "load of a plan Backend"] {
                loads += summary.answers.get(load).copied().unwrap_or(0);
            }
            saves += summary.answers.get("failed saves").copied().unwrap_or(0);
            forks += summary.answers.get("fork Backend").copied().unwrap_or(0);
        }
    }
    assert!(loads > 5 && saves > 100, "only {loads} loads failed, and saves of {saves} pages");
    assert!(plans > 100 && forks > 10, "only {plans} plans and {forks} forks failed");
}

/// Many saves and loads of pages and cells fail, before and after they have an effect.
#[test]
fn every_third_call_fails_with_groups() {
    let (mut loads, mut saves) = (0, 0);
    for seed in 0..400 {
        let (config, ops) = groups(seed);
        for fault in [Fault::Before, Fault::After] {
            let backend = Failing::every(CpuOptions::with_threads(1), fault, seed % 3, 3);
            let summary = replay_on(&config, backend, &ops)
                .unwrap_or_else(|mismatch| panic!("seed {seed}, {fault:?}: {mismatch}"));
            for load in ["load Backend", "load of a plan Backend"] {
                loads += summary.answers.get(load).copied().unwrap_or(0);
            }
            saves += summary.answers.get("failed saves").copied().unwrap_or(0);
        }
    }
    assert!(loads > 5 && saves > 100, "only {loads} loads failed, and saves of {saves} pages");
}
