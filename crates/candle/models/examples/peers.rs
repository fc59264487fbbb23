//! Compares decode steps and prompts over the bridge with candle's own model and cache. The ways take turns, and each
//! ratio is the median of the turns' ratios.
//!
//!     RAYON_NUM_THREADS=2 taskset -c 0,1 cargo run --release -p kvarena-candle-models --example peers
//!     cargo run --release -p kvarena-candle-models --features cuda --example peers -- --gpu --sizes 16x512,64x1024
//!
//! On the CPU, the model has 8 layers, hidden size 512, 8 query and 2 KV heads of 64, in f32. `RAYON_NUM_THREADS` sets
//! candle's threads, and the bridge uses every core of the process. On a GPU, the model has the shape of Qwen3-0.6B.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Instant;

use candle::{D, DType, Device, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use clap::Parser;
use kvarena::testkit::rng::Rng;
use kvarena::{Capacity, EngineConfig, Extend, KvDtype, Namespace, PoolConfig, SeqKey, TokenId};
#[cfg(feature = "cuda")]
use kvarena_candle::Graphs;
use kvarena_candle::{KvArena, Step};
use kvarena_candle_models::Outcome;
use kvarena_candle_models::models::qwen3 as unpatched;
use kvarena_candle_models::paged::qwen3 as paged;
use serde_json::{Value, json};

/// Turns of decode steps, after some that load kernels and capture a graph.
const DECODES: usize = 15;
const WARM: usize = 3;

const SIZES: &str = "1x512,1x4096,16x512,16x1024,16x2048,16x4096,64x512,64x1024,64x2048,64x4096";

#[derive(Parser)]
struct Args {
    /// Compare on the first GPU, in bf16; needs feature `cuda`.
    #[arg(long)]
    gpu: bool,
    /// Sizes on the GPU: sequences x tokens of each.
    #[arg(long, value_delimiter = ',', default_value = SIZES)]
    sizes: Vec<String>,
}

fn main() -> Outcome {
    let args = Args::parse();
    let mut peers = Peers::new(args.gpu)?;
    println!("| | candle, ms | bridge, ms | with graphs, ms | candle / bridge |\n|---|---|---|---|---|");
    if !args.gpu {
        peers.decode("decode, 16 x 512", &[512; 16])?;
        peers.decode("decode, 16 x 2048", &[2048; 16])?;
        let unequal: Vec<usize> = (0..16).map(|at| 256 + 32 * at).collect();
        peers.decode("decode, 16 lengths of 256 to 736", &unequal)?;
        peers.prompts("a prompt with 480 of 512 tokens cached", (1, 512), 480)?;
        return peers.prompts("a prompt with none of 512 tokens cached", (1, 512), 0);
    }
    for size in &args.sizes {
        let (batch, len) = size.split_once('x').ok_or("a size is sequences x tokens")?;
        let (batch, len): (usize, usize) = (batch.parse()?, len.parse()?);
        let rows = [
            peers.decode(&format!("decode, {size}"), &vec![len; batch]),
            peers.prompts(&format!("prefill, {size}"), (batch, len), 0),
            peers.prompts(&format!("prefill, {size}, all but 32 tokens cached"), (batch, len), len - 32),
        ];
        // candle's own cache may not fit the GPU.
        rows.into_iter().filter_map(Result::err).for_each(|error| println!("| {size} | {error} |"));
    }
    Ok(())
}

/// Two Qwen3 models with the same random weights: candle's, and the patched one.
struct Peers {
    device: Device,
    config: Value,
    unpatched: unpatched::ModelForCausalLM,
    paged: paged::ModelForCausalLM,
    /// Maximum number of tokens of a step.
    step_tokens: usize,
    /// Turns of prompts, after one that loads kernels.
    prefills: usize,
    rng: Rng,
}

impl Peers {
    fn new(gpu: bool) -> Outcome<Self> {
        let (device, dtype) = kvarena_candle_models::device(gpu)?;
        #[cfg(feature = "cuda")]
        if let Device::Cuda(cuda) = &device {
            // SAFETY: no tensor exists, and all later ones stay on this stream.
            unsafe { cuda.disable_event_tracking() };
        }
        let [layers, hidden, intermediate, q_heads, kv_heads, head_dim, vocab] =
            if gpu { [28, 1024, 3072, 16, 8, 128, 151_936] } else { [8, 512, 1536, 8, 2, 64, 4096] };
        let config = json!({
            "model_type": "qwen3", "dtype": "bfloat16", "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": intermediate,
            "num_hidden_layers": layers, "num_attention_heads": q_heads, "head_dim": head_dim,
            "num_key_value_heads": kv_heads, "max_position_embeddings": 8192, "sliding_window": null,
            "max_window_layers": layers, "tie_word_embeddings": true, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
            "use_sliding_window": false, "hidden_act": "silu", "attention_bias": false,
        });
        let weights = VarBuilder::from_backend(Box::new(Random::default()), dtype, device.clone());
        let paged = paged::ModelForCausalLM::new(&serde_json::from_value(config.clone())?, weights.clone())?;
        let unpatched = unpatched::ModelForCausalLM::new(&serde_json::from_value(config.clone())?, weights)?;
        let (step_tokens, prefills) = if gpu { (8192, 3) } else { (2048, 15) };
        Ok(Self { device, config, unpatched, paged, step_tokens, prefills, rng: Rng::new(1) })
    }

    fn arena(&self, tokens: usize) -> Outcome<KvArena> {
        let pool = PoolConfig {
            dtype: if self.device.is_cpu() { KvDtype::F32 } else { KvDtype::Bf16 },
            page_size: 16,
            capacity: Capacity::Pages(tokens.div_ceil(16) as u32),
            ..PoolConfig::from_hf(&self.config.to_string())?
        };
        let config = EngineConfig { max_step_tokens: self.step_tokens as u32, ..pool.into() };
        Ok(KvArena::new(config, &self.device)?)
    }

    fn random(&mut self, len: usize) -> Vec<u32> {
        let vocab = self.config["vocab_size"].as_u64().expect("a number");
        (0..len).map(|_| self.rng.below(vocab) as u32).collect()
    }

    /// Compares decode steps of sequences of these lengths. candle's model computes sequences of one length together,
    /// and others one by one.
    fn decode(&mut self, name: &str, lens: &[usize]) -> Outcome {
        let prompts: Vec<_> = lens.iter().map(|&len| self.random(len)).collect();
        let mut arena = self.arena(lens.iter().map(|len| len + 2 * (DECODES + WARM) + 16).sum())?;
        let seqs = self.prefill(&mut arena, &prompts)?;
        let items: Vec<Extend> = seqs.iter().map(|&seq| Extend { seq, len: 1 }).collect();
        let together = if lens.iter().all(|len| *len == lens[0]) { lens.len() } else { 1 };
        let mut groups = Vec::new();
        for group in prompts.chunks(together) {
            let mut model = self.unpatched.clone();
            self.prefill_unpatched(&mut model, group)?;
            groups.push((model, group[0].len()));
        }
        #[cfg(feature = "cuda")]
        let mut graphs = Graphs::new(&arena, &self.paged, next)?;
        let ways = if self.device.is_cpu() { 2 } else { 3 };
        self.compare(name, ways, WARM..WARM + DECODES, |way, turn| {
            if way == 0 {
                for (model, len) in &mut groups {
                    let input = Tensor::from_vec(vec![turn as u32; together], (together, 1), &self.device)?;
                    tokens(&model.forward(&input, *len + turn)?)?;
                }
                return Ok(());
            }
            seqs.iter().try_for_each(|&seq| arena.engine.append(seq, &[TokenId::new(turn as u32)]))?;
            #[cfg_attr(not(feature = "cuda"), expect(unused_mut, reason = "a graph replaces the inputs"))]
            let mut step = arena.step_padded(&items, items.len())?;
            #[cfg(feature = "cuda")]
            let chosen = if way == 2 { graphs.forward(&mut step)? } else { next(&self.paged, &step)? };
            #[cfg(not(feature = "cuda"))]
            let chosen = next(&self.paged, &step)?;
            chosen.to_vec1::<u32>()?;
            let id = step.launched();
            Ok(arena.close(id)?)
        })
    }

    /// Compares prompts whose first `cached` tokens are in the arena. candle's model computes all tokens.
    fn prompts(&mut self, name: &str, (batch, len): (usize, usize), cached: usize) -> Outcome {
        let first: Vec<_> = (0..batch).map(|_| self.random(len)).collect();
        let mut turns = Vec::new();
        for _ in 0..=self.prefills {
            let turn = first.iter().map(|prompt| [&prompt[..cached], &self.random(len - cached)].concat());
            turns.push(turn.collect::<Vec<_>>());
        }
        let mut arena = self.arena(batch * (len + 64))?;
        let finish =
            |arena: &mut KvArena, seqs: Vec<SeqKey>| seqs.into_iter().try_for_each(|seq| arena.engine.finish(seq));
        let seqs = self.prefill(&mut arena, &first)?;
        finish(&mut arena, seqs)?;
        let mut model = self.unpatched.clone();
        self.compare(name, 2, 1..turns.len(), |way, turn| {
            if way == 0 {
                model.clear_kv_cache();
                return self.prefill_unpatched(&mut model, &turns[turn]);
            }
            let seqs = self.prefill(&mut arena, &turns[turn])?;
            Ok(finish(&mut arena, seqs)?)
        })
    }

    /// Calls the ways in a rotating order, and prints a row of their times. The turns before the range are not
    /// measured.
    fn compare(
        &self,
        name: &str,
        ways: usize,
        turns: std::ops::Range<usize>,
        mut call: impl FnMut(usize, usize) -> Outcome,
    ) -> Outcome {
        let mut times = [const { Vec::new() }; 3];
        for turn in 0..turns.end {
            for way in (0..ways).map(|way| (way + turn) % ways) {
                self.device.synchronize()?;
                let start = Instant::now();
                call(way, turn)?;
                self.device.synchronize()?;
                if turns.contains(&turn) {
                    times[way].push(start.elapsed().as_secs_f64() * 1e3);
                }
            }
        }
        let ratio = median(times[0].iter().zip(&times[1]).map(|(candle, bridge)| candle / bridge).collect());
        let [candle, bridge, graphs] = times.map(median);
        println!("| {name} | {candle:.1} | {bridge:.1} | {graphs:.1} | {ratio:.2} |");
        Ok(())
    }

    /// Returns the tokens of each prompt in a step of several prompts.
    fn chunk(&self, prompts: &[Vec<u32>]) -> usize {
        self.step_tokens / prompts.len()
    }

    /// Admits prompts, and computes them in steps over the bridge.
    fn prefill(&self, arena: &mut KvArena, prompts: &[Vec<u32>]) -> Outcome<Vec<SeqKey>> {
        let mut seqs = Vec::new();
        for prompt in prompts {
            seqs.push(arena.engine.admit(Namespace::default(), TokenId::from_raw(prompt), 0)?);
        }
        loop {
            let mut items = Vec::new();
            for &seq in &seqs {
                let left = arena.engine.token_count(seq)? - arena.engine.planned_len(seq)?;
                if left > 0 {
                    items.push(Extend { seq, len: left.min(self.chunk(prompts) as u32) });
                }
            }
            if items.is_empty() {
                return Ok(seqs);
            }
            let step = arena.step(&items)?;
            tokens(&self.paged.forward(&step)?)?;
            let id = step.launched();
            arena.close(id)?;
        }
    }

    /// Computes prompts of one length in steps of candle's model, whose cache is empty.
    fn prefill_unpatched(&self, model: &mut unpatched::ModelForCausalLM, prompts: &[Vec<u32>]) -> Outcome {
        let (len, chunk) = (prompts[0].len(), self.chunk(prompts));
        for from in (0..len).step_by(chunk) {
            let part: Vec<&[u32]> = prompts.iter().map(|prompt| &prompt[from..len.min(from + chunk)]).collect();
            let part = Tensor::from_vec(part.concat(), (prompts.len(), part[0].len()), &self.device)?;
            tokens(&model.forward(&part, from)?)?;
        }
        Ok(())
    }
}

/// Returns the likeliest token of each row.
fn next(model: &paged::ModelForCausalLM, step: &Step<'_>) -> candle::Result<Tensor> {
    model.forward(step)?.argmax(D::Minus1)
}

/// Copies the likeliest token of each row to the host.
fn tokens(logits: &Tensor) -> candle::Result<Vec<u32>> {
    logits.argmax(D::Minus1)?.flatten_all()?.to_vec1()
}

/// Returns the median, or NaN without times.
fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Weights by name, so that both models have the same weights.
#[derive(Default)]
struct Random(Mutex<HashMap<String, Tensor>>);

impl SimpleBackend for Random {
    fn get(&self, shape: candle::Shape, name: &str, _: Init, dtype: DType, device: &Device) -> candle::Result<Tensor> {
        let mut all = self.0.lock().expect("one thread");
        if let Some(tensor) = all.get(name) {
            return Ok(tensor.clone());
        }
        let tensor = if name.contains("norm") {
            Tensor::ones(shape, dtype, device)?
        } else {
            Tensor::randn(0f32, 0.02, shape, device)?.to_dtype(dtype)?
        };
        all.insert(name.to_owned(), tensor.clone());
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle::Result<Tensor> {
        Err(candle::Error::msg(format!("{name}: random weights need a shape")))
    }

    fn contains_tensor(&self, name: &str) -> bool {
        !name.contains("bias")
    }
}
