//! Compares steps on the CPU with candle's own model and cache. Each ratio is the median of pairs of calls in
//! alternating order.
//!
//!     RAYON_NUM_THREADS=2 taskset -c 0,1 cargo run --release -p kvarena-candle-models --example peers
//!
//! The model has 8 layers, hidden size 512, 8 query and 2 KV heads of 64, in f32. Both use two
//! threads: `RAYON_NUM_THREADS` sets candle's, and the bridge uses every core of the process.

#[path = "common/shape.rs"]
mod shape;

use std::time::Instant;

use candle::{DType, Device, Tensor};
use kvarena::testkit::rng::Rng;
use kvarena::{Extend, TokenId};
use kvarena_candle_models::models::qwen3 as unpatched;
use kvarena_candle_models::paged::qwen3 as paged;
use shape::{Outcome, Shape, median, next_tokens, prefill};

const SHAPE: Shape = Shape {
    layers: 8,
    hidden: 512,
    intermediate: 1536,
    q_heads: 8,
    kv_heads: 2,
    head_dim: 64,
    vocab: 4096,
    dtype: DType::F32,
};
const BATCH: usize = 16;
const PAIRS: usize = 15;
const CHUNK: usize = 128;

fn main() -> Outcome {
    let (unpatched, paged) = SHAPE.models(&Device::Cpu)?;
    println!("| | candle, ms | bridge, ms | candle / bridge | goal |");
    println!("|---|---|---|---|---|");
    for (context, goal) in [(512, "1.2"), (2048, "1.6")] {
        decode(&format!("decode, {BATCH} x {context}"), goal, (&unpatched, &paged), &[context; BATCH])?;
    }
    let unequal: Vec<usize> = (0..BATCH).map(|at| 256 + 32 * at).collect();
    decode("decode, 16 lengths of 256 to 736", "3", (&unpatched, &paged), &unequal)?;
    prompt("12", (&unpatched, &paged), 480)?;
    // Without cached tokens, the ratio shows the gain that does not come from the cache. It has no goal.
    prompt("", (&unpatched, &paged), 0)
}

/// Runs pairs of calls in alternating order, and prints the median of the ratios.
fn pairs(
    name: &str,
    goal: &str,
    mut candle_call: impl FnMut(usize) -> Outcome,
    mut bridge_call: impl FnMut(usize) -> Outcome,
) -> Outcome {
    let mut times = [Vec::new(), Vec::new()];
    for turn in 0..PAIRS + 1 {
        for way in [turn % 2, 1 - turn % 2] {
            let start = Instant::now();
            if way == 0 { candle_call(turn) } else { bridge_call(turn) }?;
            // The first pair warms up.
            if turn > 0 {
                times[way].push(start.elapsed().as_secs_f64() * 1e3);
            }
        }
    }
    let ratios = times[0].iter().zip(&times[1]).map(|(candle, bridge)| candle / bridge).collect();
    let [candle_ms, bridge_ms] = times.map(median);
    println!("| {name} | {candle_ms:.1} | {bridge_ms:.1} | {:.2} | {goal} |", median(ratios));
    Ok(())
}

/// Measures decode steps of sequences of these lengths. candle's model computes
/// sequences of equal length as one batch, and sequences of unequal length one by one.
fn decode(
    name: &str,
    goal: &str,
    (unpatched, paged): (&unpatched::ModelForCausalLM, &paged::ModelForCausalLM),
    lens: &[usize],
) -> Outcome {
    let prompts = SHAPE.prompts(lens, &mut Rng::new(1));
    let groups: Vec<&[Vec<u32>]> = match lens.iter().all(|&len| len == lens[0]) {
        true => vec![&prompts[..]],
        false => prompts.chunks(1).collect(),
    };
    let mut candle_groups = Vec::new();
    for group in groups {
        let (mut model, len) = (unpatched.clone(), group[0].len());
        for from in (0..len).step_by(CHUNK) {
            let part: Vec<&[u32]> = group.iter().map(|prompt| &prompt[from..len.min(from + CHUNK)]).collect();
            let part = Tensor::from_vec(part.concat(), (group.len(), part[0].len()), &Device::Cpu)?;
            model.forward(&part, from)?;
        }
        candle_groups.push((model, group.len(), len));
    }
    let tokens: usize = lens.iter().map(|len| len + PAIRS + 33).sum();
    let mut arena = SHAPE.arena(&Device::Cpu, tokens as u32, (BATCH * CHUNK) as u32)?;
    let seqs = prefill(&mut arena, paged, &prompts, CHUNK)?;
    let items: Vec<Extend> = seqs.iter().map(|&seq| Extend { seq, len: 1 }).collect();
    let candle_step = |turn: usize| {
        for (model, batch, len) in &mut candle_groups {
            let input = Tensor::from_vec(vec![turn as u32; *batch], (*batch, 1), &Device::Cpu)?;
            next_tokens(model.forward(&input, *len + turn)?)?;
        }
        Ok(())
    };
    let bridge_step = |turn: usize| {
        for &seq in &seqs {
            arena.engine.append(seq, &[TokenId::new(turn as u32)])?;
        }
        let step = arena.step(&items)?;
        next_tokens(paged.forward(&step)?)?;
        let id = step.launched();
        Ok(arena.close(id)?)
    };
    pairs(name, goal, candle_step, bridge_step)
}

/// Measures a prompt of 512 tokens, of which some are cached. candle's model computes all of them.
fn prompt(
    goal: &str,
    (unpatched, paged): (&unpatched::ModelForCausalLM, &paged::ModelForCausalLM),
    cached: usize,
) -> Outcome {
    let mut prompts = SHAPE.prompts(&[512; PAIRS + 2], &mut Rng::new(2));
    let shared = prompts[0][..cached].to_vec();
    prompts.iter_mut().for_each(|prompt| prompt[..cached].copy_from_slice(&shared));
    let mut arena = SHAPE.arena(&Device::Cpu, 4096, 512)?;
    let seq = prefill(&mut arena, paged, &prompts[..1], 512)?[0];
    arena.engine.finish(seq)?;
    let mut unpatched = unpatched.clone();
    let candle_prefill = |turn: usize| {
        unpatched.clear_kv_cache();
        let input = Tensor::new(&prompts[turn + 1][..], &Device::Cpu)?.unsqueeze(0)?;
        next_tokens(unpatched.forward(&input, 0)?)?;
        Ok(())
    };
    let bridge_prefill = |turn: usize| {
        let seq = prefill(&mut arena, paged, &prompts[turn + 1..turn + 2], 512)?[0];
        Ok(arena.engine.finish(seq)?)
    };
    pairs(&format!("prompt, {cached} of 512 tokens cached"), goal, candle_prefill, bridge_prefill)
}
