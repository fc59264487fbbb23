//! Prefill and decode steps in alternation: candle's own model and cache, the bridge, the bridge
//! with graphs.

use std::time::Instant;

use candle::{D, Device, Tensor};
use kvarena::testkit::rng::Rng;
use kvarena::{Extend, SeqKey, TokenId};
use kvarena_candle::{Graphs, KvArena, Step};
use kvarena_candle_models::models::qwen3 as unpatched;
use kvarena_candle_models::paged::qwen3 as paged;

use crate::shape::{Outcome, median, next_tokens, prefill};
use crate::{QWEN3, device};

/// Maximum number of tokens of a prefill step, for both models.
const STEP_TOKENS: usize = 8192;
const DECODES: usize = 15;
const SIZES: &str = "1x512,1x4096,16x512,16x1024,16x2048,16x4096,64x512,64x1024,64x2048,64x4096";

/// Prints a decode row and a prefill row for each `batch x context` of a list. Without graphs, the graph columns are
/// NaN.
pub fn run(sizes: &str, graphs: bool) -> Outcome {
    let device = device()?;
    let (mut unpatched, paged) = QWEN3.models(&device)?;
    println!("Qwen3-0.6B's shape, bf16, random weights; ms, medians of {DECODES} decode steps by turns");
    println!("| batch x context | decode: candle | bridge | graph | candle / bridge | candle / graph |");
    println!("|---|---|---|---|---|---|");
    let mut prefills = Vec::new();
    for size in if sizes.is_empty() { SIZES } else { sizes }.split(',') {
        let (batch, context) = size.split_once('x').ok_or("a size is batch x context")?;
        let mut bench =
            Bench { device: &device, batch: batch.parse()?, context: context.parse()?, graphs, rng: Rng::new(7) };
        match bench.row(&mut unpatched, &paged) {
            Ok(prefill) => prefills.push((size, prefill)),
            Err(error) => println!("| {size} | {} |", first_line(&error.to_string())),
        }
        unpatched.clear_kv_cache();
    }
    println!("\n| batch x context | prefill: candle | bridge | candle / bridge | all but 32 tokens cached |");
    println!("|---|---|---|---|---|");
    for (size, [candle_ms, bridge_ms, cached_ms]) in prefills {
        let ratio = candle_ms / bridge_ms;
        println!("| {size} | {candle_ms:.1} | {bridge_ms:.1} | {ratio:.2} | {cached_ms:.1} |");
    }
    Ok(())
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or("")
}

struct Bench<'a> {
    device: &'a Device,
    batch: usize,
    context: usize,
    graphs: bool,
    rng: Rng,
}

impl Bench<'_> {
    /// Prints a row of decode times. Returns the prefill times in ms: of candle, of the bridge, and of the bridge
    /// with all but 32 tokens cached.
    fn row(
        &mut self,
        unpatched: &mut unpatched::ModelForCausalLM,
        paged: &paged::ModelForCausalLM,
    ) -> Outcome<[f64; 3]> {
        let (batch, context) = (self.batch, self.context);
        let tokens = (batch * (context + 4 * DECODES + 16)) as u32;
        let chunk = (STEP_TOKENS / batch).min(context);
        let mut arena = QWEN3.arena(self.device, tokens, STEP_TOKENS as u32)?;
        let turns = if batch * context > 1 << 16 { 1 } else { 3 };
        let (mut times, mut seqs) = ([const { Vec::new() }; 3], Vec::new());
        // The first turn loads kernels.
        for turn in 0..=turns {
            let mut prompts = QWEN3.prompts(&vec![context; batch], &mut self.rng);
            for seq in seqs.drain(..) {
                arena.engine.finish(seq)?;
            }
            let candle_ms = self.time(|bench| bench.prefill_unpatched(unpatched, &prompts, chunk))?;
            let bridge_ms = self.time(|_| {
                seqs = prefill(&mut arena, paged, &prompts, chunk)?;
                Ok(())
            })?;
            for seq in seqs.drain(..) {
                arena.engine.finish(seq)?;
            }
            for prompt in &mut prompts {
                let fresh = &mut prompt[context - 32..];
                fresh.iter_mut().for_each(|token| *token = (*token + 1) % QWEN3.vocab);
            }
            let cached_ms = self.time(|_| {
                seqs = prefill(&mut arena, paged, &prompts, chunk)?;
                Ok(())
            })?;
            if turn > 0 {
                times[0].push(candle_ms);
                times[1].push(bridge_ms);
                times[2].push(cached_ms);
            }
        }
        let [candle_ms, bridge_ms, graph_ms] = self.decode((unpatched, paged), &mut arena, &seqs)?;
        println!(
            "| {batch}x{context} | {candle_ms:.2} | {bridge_ms:.2} | {graph_ms:.2} | {:.2} | {:.2} |",
            candle_ms / bridge_ms,
            candle_ms / graph_ms
        );
        Ok(times.map(median))
    }

    /// Returns the milliseconds until the device has finished the work of a call.
    fn time(&mut self, call: impl FnOnce(&mut Self) -> Outcome) -> Outcome<f64> {
        self.device.synchronize()?;
        let start = Instant::now();
        call(self)?;
        self.device.synchronize()?;
        Ok(start.elapsed().as_secs_f64() * 1e3)
    }

    fn prefill_unpatched(
        &mut self,
        unpatched: &mut unpatched::ModelForCausalLM,
        prompts: &[Vec<u32>],
        chunk: usize,
    ) -> Outcome {
        unpatched.clear_kv_cache();
        for from in (0..self.context).step_by(chunk) {
            let part = prompts.iter().flat_map(|prompt| &prompt[from..][..chunk]);
            let part: Vec<u32> = part.copied().collect();
            let part = Tensor::from_vec(part, (self.batch, chunk), self.device)?;
            next_tokens(unpatched.forward(&part, from)?)?;
        }
        Ok(())
    }

    /// Returns the milliseconds of a decode step of candle's model, the bridge and the graph, measured in alternation.
    fn decode(
        &mut self,
        (unpatched, paged): (&mut unpatched::ModelForCausalLM, &paged::ModelForCausalLM),
        arena: &mut KvArena,
        seqs: &[SeqKey],
    ) -> Outcome<[f64; 3]> {
        let mut graphs = Graphs::new(arena, paged, next)?;
        let items: Vec<Extend> = seqs.iter().map(|&seq| Extend { seq, len: 1 }).collect();
        let (mut times, mut offset) = ([const { Vec::new() }; 3], self.context);
        for turn in 0..DECODES + 3 {
            let ways = if self.graphs { 3 } else { 2 };
            for way in (0..ways).map(|way| (way + turn) % ways) {
                let token = self.rng.below(QWEN3.vocab.into()) as u32;
                if way > 0 {
                    for &seq in seqs {
                        arena.engine.append(seq, &[TokenId::new(token)])?;
                    }
                }
                let ms = self.time(|bench| {
                    if way == 0 {
                        let input = vec![token; bench.batch];
                        let input = Tensor::from_vec(input, (bench.batch, 1), bench.device)?;
                        next_tokens(unpatched.forward(&input, offset)?)?;
                        return Ok(());
                    }
                    let mut step = arena.step_padded(&items, items.len())?;
                    let tokens = if way == 2 { graphs.forward(&mut step)? } else { next(paged, &step)? };
                    tokens.to_vec1::<u32>()?;
                    let id = step.launched();
                    Ok(arena.close(id)?)
                })?;
                // The first two steps of a graph are not replays.
                if turn >= 3 {
                    times[way].push(ms);
                }
            }
            offset += 1;
        }
        Ok(times.map(median))
    }
}

/// Returns the likeliest next tokens.
fn next(model: &paged::ModelForCausalLM, step: &Step<'_>) -> candle::Result<Tensor> {
    model.forward(step)?.argmax(D::Minus1)
}
