//! The bridge's overhead on the CPU: steps of 16 sequences through the bridge, and by direct calls
//! of the engine and the backend.
//!
//!     cargo run --release -p kvarena-candle --example overhead
//!
//! Both run in alternating turns; the program prints medians. Heads are small and contexts are short,
//! so attention itself takes little time.

use std::error::Error;
use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use kvarena::backend::Either;
use kvarena::{
    Attend, Backend, Capacity, CpuRows, CpuRowsMut, Extend, KvDtype, KvShape, LayerId, Namespace, PoolConfig, Queries,
    StepScratch, TokenId,
};
use kvarena_candle::KvArena;

const SEQUENCES: usize = 16;
const Q_HEADS: usize = 2;
const HEAD_DIM: usize = 16;
const TURNS: usize = 2001;
const GOAL_US: f64 = 5.0;

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

fn main() -> Outcome {
    let pool = PoolConfig {
        shape: KvShape::heads(1, HEAD_DIM as u32),
        dtype: KvDtype::F32,
        capacity: Capacity::Pages(10_000),
        ..PoolConfig::default()
    };
    let mut arena = KvArena::new(pool, &Device::Cpu)?;
    let mut items: Vec<Extend> = Vec::new();
    let tensor = |heads| Tensor::ones((SEQUENCES, heads, HEAD_DIM), DType::F32, &Device::Cpu);
    let (q, k) = (tensor(Q_HEADS)?, tensor(1)?);
    let ones = vec![1_f32; SEQUENCES * Q_HEADS * HEAD_DIM];
    let mut out = ones.clone();
    let attend = Attend::new(Q_HEADS as u32, HEAD_DIM as u32);
    let mut scratch = StepScratch::new();
    let mut times = [const { [const { Vec::new() }; 2] }; 3];
    for turn in 0..TURNS {
        // Contexts grow to 40 tokens, so sequences begin new pages in some of the steps.
        if turn % 20 == 0 {
            for item in items.drain(..) {
                arena.engine.finish(item.seq)?;
            }
            for first in 0..SEQUENCES as u32 {
                let seq = arena.engine.admit(Namespace::default(), &[TokenId::new(first)], 0)?;
                items.push(Extend { seq, len: 1 });
            }
        }
        for way in [turn % 2, 1 - turn % 2] {
            let start = Instant::now();
            let (id, planned, attended) = if way == 0 {
                let step = arena.step(&items)?;
                let planned = Instant::now();
                drop(step.attend(0, &attend, &q, &k, &k)?);
                let attended = Instant::now();
                (step.launched(), planned, attended)
            } else {
                let plan = arena.engine.plan_batch(&mut scratch, &items)?;
                let planned = Instant::now();
                let [q, k] = [&ones[..], &ones[..SEQUENCES * HEAD_DIM]].map(CpuRows::from);
                let (k, layer) = (Either::Left(k), LayerId::new(0));
                let backend = arena.engine.backend_mut();
                backend.store_cache(&plan, layer, k, k)?;
                let queries = Queries { rows: Either::Left(q), sinks: None };
                let to = Either::Left(CpuRowsMut::from(&mut out[..]));
                backend.attend_queries(&plan, layer, &attend, queries, to, None)?;
                (plan.step(), planned, Instant::now())
            };
            for item in &items {
                arena.engine.append(item.seq, &[TokenId::new(1)])?;
            }
            let closing = Instant::now();
            if way == 0 {
                arena.close(id)?;
            } else {
                arena.engine.commit(id)?;
                arena.engine.complete(id)?;
            }
            let parts = [planned - start, attended - planned, closing.elapsed()];
            for (times, part) in times.iter_mut().zip(parts) {
                times[way].push(part.as_secs_f64() * 1e6);
            }
        }
    }
    println!("{SEQUENCES} sequences, medians of {TURNS} steps, us");
    println!("| | bridge | direct calls | difference |");
    println!("|---|---|---|---|");
    let mut added = 0.0;
    for (name, ways) in ["step", "layer", "close"].into_iter().zip(times) {
        let [bridge, direct] = ways.map(median);
        println!("| {name} | {bridge:.2} | {direct:.2} | {:.2} |", bridge - direct);
        added += bridge - direct;
    }
    println!("the bridge adds {added:.2} us to a step of one layer; the goal is {GOAL_US}");
    Ok(())
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}
