//! The CUDA backend on a GPU: the contract of backends, byte parity, graphs, ranks, large pools, the engine's replay.
//!
//! Without a GPU, each test that needs one prints that it was skipped, and passes. `tests/cuda/fake_driver/run.sh` runs
//! the tests over a driver that runs the kernels' PTX on the CPU. `KVARENA_SEEDS=1000..2000` runs other seeds.
#![allow(unsafe_code)]

mod contract;
mod copies;
mod drive;
mod dropped;
mod errors;
mod fp8;
mod given;
mod given_memory;
mod graph;
mod groups;
mod large;
mod latent;
mod move_order;
mod on_gpu;
mod padding;
mod pages;
mod plans;
mod prepared;
mod ranks;
mod repeated;
mod replay;
mod shared;
mod spans;
mod sparse;
mod staged;
mod states;
mod swap_memory;
mod upload;

use std::ops::Deref;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvarena::backend::cuda::Gpu;

/// Only one test at a time uses the device: captures forbid waits of other tests, and large pools need all of its
/// memory.
static DEVICE: Mutex<()> = Mutex::new(());

/// The first device, locked against other tests.
struct Held {
    gpu: Gpu,
    _held: MutexGuard<'static, ()>,
}

impl Deref for Held {
    type Target = Gpu;

    fn deref(&self) -> &Gpu {
        &self.gpu
    }
}

fn gpu() -> Option<Held> {
    // A test that failed leaves no state that the next test needs.
    let held = DEVICE.lock().unwrap_or_else(PoisonError::into_inner);
    device(0).map(|gpu| Held { gpu, _held: held })
}

/// Returns a device, or prints that it is missing.
fn device(ordinal: u32) -> Option<Gpu> {
    match Gpu::new(ordinal) {
        Ok(gpu) => Some(gpu),
        Err(error) => {
            println!("skipped: {error}");
            None
        }
    }
}

/// Returns the seeds of a random test: the first `count`, or a range such as `KVARENA_SEEDS=1000..2000`.
fn seeds(count: u64) -> std::ops::Range<u64> {
    let range = match std::env::var("KVARENA_SEEDS") {
        Ok(range) if range != "all" => range,
        _ => return 0..count,
    };
    let bounds = range.split_once("..").map(|(from, to)| (from.parse(), to.parse()));
    match bounds {
        Some((Ok(from), Ok(to))) => from..to,
        _ => panic!("KVARENA_SEEDS={range} is not like 0..100"),
    }
}
