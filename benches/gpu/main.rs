//! Measures the CUDA backend, and the ceilings of this machine.
//!
//! Shapes and method are those of the FlashInfer baselines. Most sections capture calls in a graph and replay it;
//! extend, fp8-extend and spans launch consecutive calls instead, and shortq does both. Sections plan and first, and
//! tiers except decode, measure the host's time. A time is a median of runs, except in first and in the parts of tiers
//! that pin memory. Data and pages are random. Calls use the layers in turn, so that the L2 cache does not serve their
//! reads. Only sections plan and first include planning.
//! Prints a table and writes JSON rows to `$OUT/kvarena.json`.
//!
//!     cargo bench --features cuda --bench gpu -- [SECTION]..
//!
//! Sections: ceil, store, copy, decode, shared, sharedq, spans, spans-dims, spans-fp8, spans-fp8-dims, shortq, extend,
//! fp8 (and its parts fp8-decode, fp8-extend, fp8-store, fp8-shared), given, groups, mla, mla-general, sparse, plan,
//! tiers, first; all of them by default. given-small, spans-small and tiers-small run `given`, `spans` and `tiers` in
//! small forms on the tests' driver (`tests/cuda/fake_driver`).
#![allow(unsafe_code)]

mod attention;
mod batch;
mod ceilings;
mod fp8;
mod fp8_noise;
mod given;
mod groups;
mod host;
mod kernels;
mod latent;
mod moves;
mod report;
mod spans;
mod sparse;
mod tiers;
mod timer;

use kvarena::backend::cuda::Gpu;
use report::Report;
use spans::{HEADS_128, OTHER_HEADS};

/// A result of the bench. An error ends the program.
pub type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

type Run = fn(&Gpu, &mut Report) -> Outcome<()>;

/// Sections after `first`, in order. Small forms run only if they are named.
const SECTIONS: [(&str, Run); 26] = [
    ("ceil", ceilings::run),
    ("store", moves::store),
    ("copy", moves::copy),
    ("decode", attention::decode),
    ("shared", attention::shared),
    ("sharedq", attention::shared_short),
    ("spans", |gpu, report| spans::run(gpu, spans::Sizes::FULL, (&HEADS_128, false), report)),
    ("spans-dims", |gpu, report| spans::run(gpu, spans::Sizes::FEWER, (&OTHER_HEADS, false), report)),
    ("spans-fp8", |gpu, report| spans::run(gpu, spans::Sizes::FULL, (&HEADS_128, true), report)),
    ("spans-fp8-dims", |gpu, report| spans::run(gpu, spans::Sizes::FEWER, (&OTHER_HEADS, true), report)),
    ("spans-small", spans::run_small),
    ("shortq", attention::short_queries),
    ("extend", attention::extend),
    ("fp8-decode", fp8::decode),
    ("fp8-extend", fp8::extend),
    ("fp8-store", fp8::store),
    ("fp8-shared", fp8::shared),
    ("given", |gpu, report| given::run(gpu, given::Sizes::FULL, report)),
    ("given-small", |gpu, report| given::run(gpu, given::Sizes::SMALL, report)),
    ("groups", groups::run),
    ("mla", latent::mla),
    ("mla-general", latent::mla_general),
    ("sparse", sparse::run),
    ("plan", host::plan_cost),
    ("tiers", |gpu, report| tiers::run(gpu, tiers::Sizes::FULL, report)),
    ("tiers-small", |gpu, report| tiers::run(gpu, tiers::Sizes::SMALL, report)),
];

fn main() -> Outcome<()> {
    let named: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    // `cargo bench` passes `--bench`; `cargo test --benches` does not.
    if named.is_empty() && !std::env::args().any(|arg| arg == "--bench") {
        return Ok(());
    }
    let wanted = |section: &str| {
        let is_named = |name: &String| name == section || (name == "fp8" && section.starts_with("fp8-"));
        named.iter().any(is_named) || (named.is_empty() && !section.ends_with("-small"))
    };
    let start = std::time::Instant::now();
    let gpu = match Gpu::new(0) {
        Ok(gpu) => gpu,
        Err(error) => {
            println!("skipped: {error}");
            return Ok(());
        }
    };
    let mut report = Report::default();
    if wanted("first") {
        host::first_step(&gpu, start, &mut report)?;
    }
    for (_, run) in SECTIONS.iter().filter(|(section, _)| wanted(section)) {
        run(&gpu, &mut report)?;
    }
    report.write()
}
