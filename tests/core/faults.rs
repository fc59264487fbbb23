//! A failed call of the backend leaves the engine consistent: it verifies, agrees with the model, and continues to
//! serve.

use std::collections::BTreeMap;

use kvarena::backend::OpenBackend;
use kvarena::testkit::faults::{Failing, Fault};
use kvarena::testkit::{Family, Workload, replay_on};
use kvarena::{CpuOptions, Null};

/// Replays the workload of a seed. Adds its counts to `counts`, and returns the number of failed calls.
fn check<O>(family: Family, seed: u64, backend: Failing<O>, counts: &mut BTreeMap<String, u64>) -> u64
where
    Failing<O>: OpenBackend<Backend: kvarena::testkit::replay::Inspect>,
{
    let mut workload = Workload::new(family, seed);
    let summary = replay_on(&workload.config(), backend, &workload.take_ops(200))
        .unwrap_or_else(|mismatch| panic!("{family:?}, seed {seed}: {mismatch}"));
    summary.answers.iter().for_each(|(answer, count)| *counts.entry(answer.clone()).or_default() += count);
    summary.answers["backend failures"]
}

/// Each backend call of a workload that can fail fails once before its effect and once after it.
#[test]
fn any_one_call_fails() {
    let mut failed = 0;
    let families =
        [(Family::Any, 20), (Family::Swap, 10), (Family::Stores, 20), (Family::SwapGroups, 10), (Family::Forks, 10)];
    for (family, seeds) in families {
        for (seed, fault) in (0..seeds).flat_map(|seed| [(seed, Fault::Before), (seed, Fault::After)]) {
            for n in 0.. {
                let failures = check(family, seed, Failing::at(Null, fault, n), &mut BTreeMap::new());
                failed += failures;
                if failures == 0 {
                    break; // The workload makes no call n.
                }
            }
        }
    }
    assert!(failed > 500, "only {failed} calls failed");
}

/// Many calls fail, also saves and loads of pages and cells, and each page still contains the bytes of its owner.
#[test]
fn every_third_call_fails() {
    for (families, least) in [
        (
            &[Family::Any, Family::Swap, Family::Forks, Family::Stores][..],
            &[("plan_batch Backend", 100), ("fork Backend", 10)][..],
        ),
        (&[Family::SwapGroups], &[]),
    ] {
        let mut counts = BTreeMap::new();
        for (seed, &family) in (0..400).zip(families.iter().cycle()) {
            for fault in [Fault::Before, Fault::After] {
                check(family, seed, Failing::every(CpuOptions::with_threads(1), fault, seed % 3, 3), &mut counts);
            }
        }
        let count = |answer: &str| counts.get(answer).copied().unwrap_or(0);
        let loads = count("load Backend") + count("load of a plan Backend");
        assert!(loads > 5 && count("failed saves") > 100, "{counts:?}");
        assert!(least.iter().all(|&(answer, least)| count(answer) > least), "{counts:?}");
    }
}
