//! What the GPU's half has to show: tokens, steps beside candle's own cache, the bridge's own time, order.
//!
//!     cargo run --release -p kvarena-candle-models --features cuda --example gpu -- tokens replays cost order graphs
//!
//! `steps` is `graphs` without graphs. Both take sizes: `steps:16x512,64x1024`.
//!
//! Needs a GPU, and a CUDA toolkit to build candle's kernels.

mod cost;
mod order;
mod shape;
mod steps;
mod tokens;

use std::error::Error;
use std::time::Instant;

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

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
            "order" => order::run()?,
            other => {
                return Err(format!(
                    "{other} is none of tokens, replays, steps, graphs, cost, order"
                )
                .into());
            }
        }
        println!("[{part}: {:.1} s]\n", start.elapsed().as_secs_f64());
    }
    Ok(())
}

/// Returns the median of some times.
fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(f64::NAN)
}
