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
//! fp8 (and its parts fp8-decode, fp8-extend, fp8-store, fp8-shared), groups, mla, mla-general, sparse, plan, tiers,
//! first; all of them by default. spans-small and tiers-small run `spans` and `tiers` in small forms on the tests'
//! driver (`tests/cuda/fake_driver`).
#![allow(unsafe_code)]

mod attention;
mod batch;
mod ceilings;
mod fp8;
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

/// A result of the bench. An error ends the program.
pub type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome<()> {
    let sections: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    // `cargo bench` passes `--bench`; `cargo test --benches` does not.
    if sections.is_empty() && !std::env::args().any(|arg| arg == "--bench") {
        return Ok(());
    }
    let wanted = |section: &str| sections.is_empty() || sections.iter().any(|a| a == section);
    let start = std::time::Instant::now();
    let gpu = match Gpu::new(0) {
        Ok(gpu) => gpu,
        Err(error) => {
            println!("skipped: {error}");
            return Ok(());
        }
    };
    let mut report = report::Report::default();
    if wanted("first") {
        host::first_step(&gpu, start, &mut report)?;
    }
    if wanted("ceil") {
        ceilings::run(&gpu, &mut report)?;
    }
    if wanted("store") {
        moves::store(&gpu, &mut report)?;
    }
    if wanted("copy") {
        moves::copy(&gpu, &mut report)?;
    }
    if wanted("decode") {
        attention::decode(&gpu, &mut report)?;
    }
    if wanted("shared") {
        attention::shared(&gpu, &mut report)?;
    }
    if wanted("sharedq") {
        attention::shared_short(&gpu, &mut report)?;
    }
    if wanted("spans") {
        spans::run(&gpu, spans::Sizes::FULL, (&spans::HEADS_128, false), &mut report)?;
    }
    if wanted("spans-dims") {
        spans::run(&gpu, spans::Sizes::FEWER, (&spans::OTHER_HEADS, false), &mut report)?;
    }
    if wanted("spans-fp8") {
        spans::run(&gpu, spans::Sizes::FULL, (&spans::HEADS_128, true), &mut report)?;
    }
    if wanted("spans-fp8-dims") {
        spans::run(&gpu, spans::Sizes::FEWER, (&spans::OTHER_HEADS, true), &mut report)?;
    }
    if sections.iter().any(|a| a == "spans-small") {
        for heads in [&spans::HEADS_128, &spans::OTHER_HEADS] {
            for over_fp8 in [false, true] {
                spans::run(&gpu, spans::Sizes::SMALL, (heads, over_fp8), &mut report)?;
            }
        }
    }
    if wanted("shortq") {
        attention::short_queries(&gpu, &mut report)?;
    }
    if wanted("extend") {
        attention::extend(&gpu, &mut report)?;
    }
    let fp8 = ["fp8-decode", "fp8-extend", "fp8-store", "fp8-shared"].map(|part| wanted("fp8") || wanted(part));
    if fp8.contains(&true) {
        fp8::run(&gpu, fp8, &mut report)?;
    }
    if wanted("groups") {
        groups::run(&gpu, &mut report)?;
    }
    if wanted("mla") {
        latent::mla(&gpu, &mut report)?;
    }
    if wanted("mla-general") {
        latent::mla_general(&gpu, &mut report)?;
    }
    if wanted("sparse") {
        sparse::run(&gpu, &mut report)?;
    }
    if wanted("plan") {
        host::plan_cost(&gpu, &mut report)?;
    }
    if wanted("tiers") {
        tiers::run(&gpu, tiers::Sizes::FULL, &mut report)?;
    }
    if sections.iter().any(|a| a == "tiers-small") {
        tiers::run(&gpu, tiers::Sizes::SMALL, &mut report)?;
    }
    report.write()
}
