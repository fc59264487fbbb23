//! Two models of Qwen3-0.6B's shape with the same random weights: candle's own and the patched one. Also their device
//! and arena.

use std::collections::HashMap;
use std::sync::Mutex;

use candle::{DType, Device, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use kvarena::{Capacity, EngineConfig, KvDtype, KvShape, PoolConfig};
use kvarena_candle::KvArena;
use kvarena_candle_models::models::qwen3 as unpatched;
use kvarena_candle_models::paged::qwen3 as paged;
use serde_json::json;

use crate::Outcome;

pub const LAYERS: usize = 28;
pub const Q_HEADS: usize = 16;
pub const KV_HEADS: usize = 8;
pub const HEAD_DIM: usize = 128;
pub const VOCAB: u32 = 151_936;

/// Random weights by name, so that both models get the same ones.
#[derive(Default)]
struct RandomWeights(Mutex<HashMap<String, Tensor>>);

impl SimpleBackend for RandomWeights {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: Init,
        dtype: DType,
        device: &Device,
    ) -> candle::Result<Tensor> {
        let mut tensors = self.0.lock().expect("the lock is not poisoned");
        if let Some(tensor) = tensors.get(name) {
            return Ok(tensor.clone());
        }
        let tensor = match name.contains("norm") {
            true => Tensor::ones(shape, dtype, device)?,
            false => Tensor::randn(0f32, 0.02, shape, device)?.to_dtype(dtype)?,
        };
        tensors.insert(name.to_owned(), tensor.clone());
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle::Result<Tensor> {
        Err(candle::Error::msg(format!("{name}: random weights need a shape")))
    }

    fn contains_tensor(&self, name: &str) -> bool {
        !name.contains("bias")
    }
}

/// Returns candle's own model and the patched one, with the same weights.
pub fn models(device: &Device) -> Outcome<(unpatched::ModelForCausalLM, paged::ModelForCausalLM)> {
    let config = json!({
        "vocab_size": VOCAB, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": LAYERS,
        "num_attention_heads": Q_HEADS, "head_dim": HEAD_DIM, "attention_bias": false,
        "num_key_value_heads": KV_HEADS, "max_position_embeddings": 8192, "sliding_window": null,
        "max_window_layers": LAYERS, "tie_word_embeddings": true, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
        "use_sliding_window": false, "hidden_act": "silu",
    });
    let weights = Box::new(RandomWeights::default());
    let vb = VarBuilder::from_backend(weights, DType::BF16, device.clone());
    let patched =
        paged::ModelForCausalLM::new(&serde_json::from_value(config.clone())?, vb.clone())?;
    Ok((unpatched::ModelForCausalLM::new(&serde_json::from_value(config)?, vb)?, patched))
}

/// Returns an arena with pages for `tokens` tokens, and steps of at most `step_tokens`.
pub fn arena(device: &Device, tokens: u32, step_tokens: u32) -> Outcome<KvArena> {
    let pool = PoolConfig {
        layers: LAYERS as u32,
        shape: KvShape::heads(KV_HEADS as u32, HEAD_DIM as u32),
        dtype: KvDtype::Bf16,
        page_size: 16,
        capacity: Capacity::Pages(tokens.div_ceil(16)),
        ..PoolConfig::default()
    };
    let config = EngineConfig { max_step_tokens: step_tokens, ..pool.into() };
    Ok(KvArena::new(config, device)?)
}

/// Returns a device with its own stream. candle does not track its tensors by events, because the stream orders all
/// work.
pub fn device() -> Outcome<Device> {
    let device = Device::new_cuda_with_stream(0)?;
    // SAFETY: no tensor exists yet, and all tensors of the device stay on its stream.
    unsafe { device.as_cuda_device()?.disable_event_tracking() };
    Ok(device)
}
