//! A model's weights in device memory, all in bf16: q, k and v of a layer in one matrix, gate and up in another.
//!
//! One piece of memory holds everything; first each tensor gets its offset, then it is filled. The weights of a layer's norms
//! are folded into the matrices that read what is normed, and are ones from then on.

use std::path::Path;

use kvarena::backend::cuda::DeviceBuffer;

use super::device::Device;
use super::error::{GpuError, GpuResult};
use super::files::Files;
use super::kernels::{FillParams, FoldParams};
use crate::config::{Family, ModelConfig};
use crate::error::Result;
use crate::model::Random;

/// Bytes that tensors start at multiples of.
const ALIGN: u64 = 256;

/// Device addresses of a layer's weights.
#[derive(Clone, Copy, Default, Debug)]
pub struct LayerWeights {
    /// `[hidden]`
    pub attention_norm: u64,
    /// `[q_heads + 2 * kv_heads, head_dim, hidden]`
    pub qkv: u64,
    /// `[head_dim]`, 0 where the family has none
    pub q_norm: u64,
    /// As `q_norm`.
    pub k_norm: u64,
    /// `[hidden, q_heads * head_dim]`
    pub o: u64,
    /// `[hidden]`
    pub mlp_norm: u64,
    /// `[2, intermediate, hidden]`
    pub gate_up: u64,
    /// `[hidden, intermediate]`
    pub down: u64,
}

/// A model's weights on the device.
#[derive(Debug)]
pub struct Weights {
    memory: DeviceBuffer,
    /// Layer by layer.
    pub layers: Vec<LayerWeights>,
    /// `[vocab, hidden]`
    pub embedding: u64,
    /// `[hidden]`
    pub norm: u64,
    /// `[vocab, hidden]`: the embedding, where they are tied
    pub output: u64,
    /// f32 `[head_dim / 2]`
    pub frequencies: u64,
}

/// A tensor and where it lies.
struct NamedTensor {
    name: String,
    shape: Vec<usize>,
    at: u64,
}

/// Lays tensors one after another.
#[derive(Default)]
struct Offsets {
    list: Vec<NamedTensor>,
    end: u64,
}

impl Offsets {
    fn add(&mut self, name: String, shape: &[usize]) -> u64 {
        let at = self.end;
        self.end += 2 * shape.iter().product::<usize>() as u64;
        self.list.push(NamedTensor { name, shape: shape.to_vec(), at });
        at
    }

    fn aligned(&mut self, name: String, shape: &[usize]) -> u64 {
        self.end = self.end.next_multiple_of(ALIGN);
        self.add(name, shape)
    }

    fn layer(&mut self, config: &ModelConfig, index: usize) -> LayerWeights {
        let ModelConfig { hidden, intermediate, head_dim, q_heads, kv_heads, .. } = *config;
        let name = |part: &str| format!("model.layers.{index}.{part}.weight");
        let (q, kv) = (q_heads * head_dim, kv_heads * head_dim);
        let mut weights = LayerWeights {
            attention_norm: self.aligned(name("input_layernorm"), &[hidden]),
            mlp_norm: self.aligned(name("post_attention_layernorm"), &[hidden]),
            qkv: self.aligned(name("self_attn.q_proj"), &[q, hidden]),
            ..LayerWeights::default()
        };
        self.add(name("self_attn.k_proj"), &[kv, hidden]);
        self.add(name("self_attn.v_proj"), &[kv, hidden]);
        weights.o = self.aligned(name("self_attn.o_proj"), &[hidden, q]);
        weights.gate_up = self.aligned(name("mlp.gate_proj"), &[intermediate, hidden]);
        self.add(name("mlp.up_proj"), &[intermediate, hidden]);
        weights.down = self.aligned(name("mlp.down_proj"), &[hidden, intermediate]);
        if config.family == Family::Qwen3 {
            weights.q_norm = self.aligned(name("self_attn.q_norm"), &[head_dim]);
            weights.k_norm = self.aligned(name("self_attn.k_norm"), &[head_dim]);
        }
        weights
    }
}

impl Weights {
    /// Copies a model directory's tensors to the device.
    ///
    /// # Errors
    /// What `checkpoint.rs` refuses, or too little memory.
    pub fn read(device: &Device, config: &ModelConfig, dir: &Path) -> Result<Self> {
        let files = Files::open(dir)?;
        Self::make(device, config, |memory, tensor| {
            let bytes = files.bf16(&tensor.name, &tensor.shape)?;
            Ok(memory.write(tensor.at, &bytes).map_err(GpuError::from)?)
        })
    }

    /// Makes the weights that [`Random`] makes, on the device.
    ///
    /// # Errors
    /// Too little memory.
    pub fn random(device: &Device, config: &ModelConfig, random: Random) -> Result<Self> {
        Self::make(device, config, |memory, tensor| {
            let (scale, offset) = match tensor.shape[..] {
                [_, cols] => (Random::scale(cols), 0.0),
                _ => (0.0, 1.0),
            };
            let count = tensor.shape.iter().product::<usize>() as u64;
            let seed = random.seed_of(&tensor.name);
            let out = memory.address() + tensor.at;
            let params = FillParams { out, count, seed, scale, offset };
            // SAFETY: the tensor has that many elements at that address.
            let filled = unsafe {
                let grid = (8 * device.gpu.multiprocessors(), 1);
                device.kernels.fill.launch(device.raw(), grid, 256, &params)
            };
            Ok(filled?)
        })
    }

    fn make(
        device: &Device,
        config: &ModelConfig,
        mut fill: impl FnMut(&mut DeviceBuffer, &NamedTensor) -> Result<()>,
    ) -> Result<Self> {
        let (vocab, hidden) = (config.vocab, config.hidden);
        let mut offsets = Offsets::default();
        let mut layers: Vec<LayerWeights> =
            (0..config.layers).map(|i| offsets.layer(config, i)).collect();
        let mut embedding = offsets.aligned("model.embed_tokens.weight".into(), &[vocab, hidden]);
        let mut norm = offsets.aligned("model.norm.weight".into(), &[hidden]);
        let mut output = match config.tied {
            true => embedding,
            false => offsets.aligned("lm_head.weight".into(), &[vocab, hidden]),
        };
        let frequencies_at = offsets.end.next_multiple_of(ALIGN);
        let wanted = frequencies_at + 4 * config.rope.frequencies.len() as u64;
        let free = device.gpu.free_memory().map_err(GpuError::from)?;
        if wanted > free {
            return Err(GpuError::Memory { wanted, free }.into());
        }
        let mut memory = DeviceBuffer::new(&device.gpu, wanted).map_err(GpuError::from)?;
        for tensor in &offsets.list {
            fill(&mut memory, tensor)?;
        }
        memory.write(frequencies_at, &config.rope.frequencies).map_err(GpuError::from)?;
        device.stream.synchronize().map_err(GpuError::from)?;

        let base = memory.address();
        for layer in &mut layers {
            let LayerWeights { attention_norm, qkv, q_norm, k_norm, o, mlp_norm, gate_up, down } =
                layer;
            for address in [attention_norm, qkv, o, mlp_norm, gate_up, down] {
                *address += base;
            }
            if config.family == Family::Qwen3 {
                *q_norm += base;
                *k_norm += base;
            }
        }
        for address in [&mut embedding, &mut norm, &mut output] {
            *address += base;
        }
        for layer in &layers {
            let heads = config.q_heads + 2 * config.kv_heads;
            fold(device, layer.qkv, heads * config.head_dim, layer.attention_norm, hidden)?;
            fold(device, layer.gate_up, 2 * config.intermediate, layer.mlp_norm, hidden)?;
        }
        device.stream.synchronize().map_err(GpuError::from)?;
        Ok(Self { memory, layers, embedding, norm, output, frequencies: base + frequencies_at })
    }

    /// Bytes of device memory.
    pub fn bytes(&self) -> u64 {
        self.memory.bytes()
    }
}

/// Multiplies a matrix's columns with a norm's weights, which are ones then.
fn fold(device: &Device, matrix: u64, rows: usize, weight: u64, cols: usize) -> GpuResult<()> {
    let (kernels, grid) = (&device.kernels, (8 * device.gpu.multiprocessors(), 1));
    let count = (rows * cols) as u64;
    let folding = FoldParams { matrix, weight, count, cols: cols as u32, reserved: 0 };
    let ones = FillParams { out: weight, count: cols as u64, offset: 1.0, ..FillParams::default() };
    // SAFETY: both tensors have that many elements.
    unsafe {
        kernels.fold.launch(device.raw(), grid, 256, &folding)?;
        kernels.fill.launch(device.raw(), grid, 256, &ones)
    }
}
