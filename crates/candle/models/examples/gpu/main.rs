//! Checks the tokens of the GPU bridge, with and without graphs. Measures its steps and those of
//! candle's own cache, its overhead, and a step's time by operation.
//!
//!     cargo run --release -p kvarena-candle-models --features cuda --example gpu -- tokens replays cost parts graphs
//!
//! `steps` measures the same steps as `graphs`, but replays no graphs. Both take sizes: `steps:16x512,64x1024`.
//!
//! The program needs a GPU, and a CUDA toolkit to build candle's kernels.

mod cost;
mod parts;
#[path = "../common/shape.rs"]
mod shape;
mod steps;
mod tokens;

use std::time::Instant;

use candle::{DType, Device};
use shape::{Outcome, Shape};

/// Qwen3-0.6B.
const QWEN3: Shape = Shape {
    layers: 28,
    hidden: 1024,
    intermediate: 3072,
    q_heads: 16,
    kv_heads: 8,
    head_dim: 128,
    vocab: 151_936,
    dtype: DType::BF16,
};

fn main() -> Outcome {
    for part in std::env::args().skip(1) {
        let start = Instant::now();
        let (name, limits) = part.split_once(':').unwrap_or((&part, ""));
        match name {
            "tokens" => tokens::run(tokens::by_steps)?,
            "replays" => tokens::run(tokens::by_graphs)?,
            "steps" => steps::run(limits, false)?,
            "graphs" => steps::run(limits, true)?,
            "cost" => cost::run()?,
            "parts" => parts::run()?,
            other => {
                return Err(format!("{other} is none of tokens, replays, steps, graphs, cost, parts").into());
            }
        }
        println!("[{part}: {:.1} s]\n", start.elapsed().as_secs_f64());
    }
    Ok(())
}

/// Returns a device with its own stream. Its event tracking is off, because this stream orders all work.
fn device() -> Outcome<Device> {
    let device = Device::new_cuda_with_stream(0)?;
    // SAFETY: no tensor exists, and all later ones stay on this stream.
    unsafe { device.as_cuda_device()?.disable_event_tracking() };
    Ok(device)
}
