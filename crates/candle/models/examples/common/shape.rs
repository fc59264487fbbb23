//! Creates two Qwen3 models of a given shape with the same random weights: candle's, and the patched one.

use std::collections::HashMap;
use std::error::Error;
use std::sync::Mutex;

use candle::{DType, Device, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use kvarena::testkit::rng::Rng;
use kvarena::{Capacity, EngineConfig, Extend, KvDtype, KvShape, Namespace, PoolConfig, SeqKey, TokenId};
use kvarena_candle::KvArena;
use kvarena_candle_models::models::qwen3 as unpatched;
use kvarena_candle_models::paged::qwen3 as paged;
use serde_json::json;

pub type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// Sizes of a model.
pub struct Shape {
    pub layers: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub q_heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub vocab: u32,
    pub dtype: DType,
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
        let tensor = match name.contains("norm") {
            true => Tensor::ones(shape, dtype, device)?,
            false => Tensor::randn(0f32, 0.02, shape, device)?.to_dtype(dtype)?,
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

impl Shape {
    /// Returns both models over the same weights.
    pub fn models(&self, device: &Device) -> Outcome<(unpatched::ModelForCausalLM, paged::ModelForCausalLM)> {
        let config = json!({
            "vocab_size": self.vocab, "hidden_size": self.hidden, "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers, "num_attention_heads": self.q_heads, "head_dim": self.head_dim,
            "num_key_value_heads": self.kv_heads, "max_position_embeddings": 8192, "sliding_window": null,
            "max_window_layers": self.layers, "tie_word_embeddings": true, "rope_theta": 1e6,
            "rms_norm_eps": 1e-6, "use_sliding_window": false, "hidden_act": "silu", "attention_bias": false,
        });
        let weights = Box::new(Random::default());
        let vb = VarBuilder::from_backend(weights, self.dtype, device.clone());
        let paged_config = serde_json::from_value(config.clone())?;
        let paged = paged::ModelForCausalLM::new(&paged_config, vb.clone())?;
        Ok((unpatched::ModelForCausalLM::new(&serde_json::from_value(config)?, vb)?, paged))
    }

    /// Returns an arena for `tokens` tokens.
    pub fn arena(&self, device: &Device, tokens: u32, step_tokens: u32) -> Outcome<KvArena> {
        let pool = PoolConfig {
            layers: self.layers as u32,
            shape: KvShape::heads(self.kv_heads as u32, self.head_dim as u32),
            dtype: if self.dtype == DType::BF16 { KvDtype::Bf16 } else { KvDtype::F32 },
            page_size: 16,
            capacity: Capacity::Pages(tokens.div_ceil(16)),
            ..PoolConfig::default()
        };
        let config = EngineConfig { max_step_tokens: step_tokens, ..pool.into() };
        Ok(KvArena::new(config, device)?)
    }

    /// Returns random prompts of these lengths.
    pub fn prompts(&self, lens: &[usize], rng: &mut Rng) -> Vec<Vec<u32>> {
        let mut prompt = |len| (0..len).map(|_| rng.below(self.vocab.into()) as u32).collect();
        lens.iter().map(|&len| prompt(len)).collect()
    }
}

/// Admits prompts, and computes them in steps of at most `chunk` tokens of each.
pub fn prefill(
    arena: &mut KvArena,
    model: &paged::ModelForCausalLM,
    prompts: &[Vec<u32>],
    chunk: usize,
) -> Outcome<Vec<SeqKey>> {
    let mut seqs = Vec::new();
    for prompt in prompts {
        let tokens: Vec<TokenId> = prompt.iter().copied().map(TokenId::new).collect();
        seqs.push(arena.engine.admit(Namespace::default(), &tokens, 0)?);
    }
    loop {
        let mut items = Vec::new();
        for &seq in &seqs {
            let left = arena.engine.token_count(seq)? - arena.engine.planned_len(seq)?;
            if left > 0 {
                items.push(Extend { seq, len: left.min(chunk as u32) });
            }
        }
        if items.is_empty() {
            return Ok(seqs);
        }
        let step = arena.step(&items)?;
        next_tokens(model.forward(&step)?)?;
        let id = step.launched();
        arena.close(id)?;
    }
}

/// Returns the most likely token of each row, in swap memory.
pub fn next_tokens(logits: Tensor) -> candle::Result<Vec<u32>> {
    logits.argmax(candle::D::Minus1)?.flatten_all()?.to_vec1()
}

/// Returns the median, or NaN for no times.
pub fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(f64::NAN)
}
