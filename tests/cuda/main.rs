//! The CUDA backend on a GPU: the contract of backends, byte parity, graphs, ranks, large pools, the engine's replay.
//!
//! Without a GPU each test prints that it was skipped, and passes. `KVARENA_SEEDS=n` sets the seeds of random tests.

mod contract;
mod copies;
mod drive;
mod errors;
mod graph;
mod large;
mod on_gpu;
mod ranks;

use kvarena::backend::cuda::Gpu;

/// The first device, or a note that there is none.
fn gpu() -> Option<Gpu> {
    device(0)
}

/// A device, or a note that it is not there.
fn device(ordinal: u32) -> Option<Gpu> {
    match Gpu::new(ordinal) {
        Ok(gpu) => Some(gpu),
        Err(error) => {
            println!("skipped: {error}");
            None
        }
    }
}

/// How many seeds a random test takes.
fn seeds(default: u64) -> std::ops::Range<u64> {
    let asked = std::env::var("KVARENA_SEEDS").ok().and_then(|n| n.parse().ok());
    0..asked.unwrap_or(default)
}
