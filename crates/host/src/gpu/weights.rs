//! A model's weights in device memory, all in bf16: q, k and v of a layer in one matrix, gate and up in another.
//!
//! One allocation contains everything; each tensor first gets its offset and is then filled. The weights of a layer's
//! norms are folded into the matrices that read the normed rows, and are replaced by ones.

use std::path::Path;
use std::ptr::{null, null_mut};

use cudarc::driver::sys;
use kvarena::backend::cuda::DeviceBuffer;

use super::device::Device;
use super::error::{GpuError, GpuResult, driver};
use super::files::Files;
use super::kernels::{FillParams, FoldParams};
use crate::config::ModelConfig;
use crate::error::Result;
use crate::family::Family;
use crate::source::Random;

/// Alignment of tensors in bytes.
const ALIGN: u64 = 256;

/// Device addresses of a layer's weights.
#[derive(Clone, Copy, Default, Debug)]
pub struct LayerWeights {
    /// `[hidden]`
    pub attention_norm: u64,
    /// `[q_heads + 2 * kv_heads, head_dim, hidden]`
    pub qkv: u64,
    /// `[head_dim]`, 0 if the family has none
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
    /// `[vocab, hidden]`: the embedding, if they are tied
    pub output: u64,
    /// f32 `[head_dim / 2]`
    pub frequencies: u64,
}

/// A rank and the number of ranks that share a model.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Share {
    /// The rank's number.
    pub rank: usize,
    /// How many ranks there are.
    pub ranks: usize,
}

impl Share {
    /// The whole model.
    pub const WHOLE: Self = Self { rank: 0, ranks: 1 };

    /// Returns the shape of the rank's model: its part of the heads and of the MLP's width.
    ///
    /// # Errors
    /// The sizes cannot be divided by the ranks.
    pub fn of(self, config: &ModelConfig) -> GpuResult<ModelConfig> {
        let ModelConfig { q_heads, kv_heads, intermediate, .. } = *config;
        let part = |value: usize, what| match value.is_multiple_of(self.ranks) {
            true => Ok(value / self.ranks),
            false => Err(GpuError::Ranks { ranks: self.ranks, what }),
        };
        Ok(ModelConfig {
            q_heads: part(q_heads, "query heads")?,
            kv_heads: part(kv_heads, "heads of K and V")?,
            intermediate: part(intermediate, "intermediate size")?,
            ..config.clone()
        })
    }
}

/// The part of a tensor that a rank has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Cut {
    Whole,
    /// Its part of the rows.
    Rows,
    /// Its part of each row.
    Cols,
}

/// A tensor and its place.
struct NamedTensor {
    name: String,
    /// Of the whole tensor.
    shape: Vec<usize>,
    cut: Cut,
    at: u64,
}

impl NamedTensor {
    fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Assigns consecutive places to tensors.
struct Offsets {
    list: Vec<NamedTensor>,
    end: u64,
    ranks: usize,
}

impl Offsets {
    fn add(&mut self, name: String, shape: &[usize], cut: Cut) -> u64 {
        let at = self.end;
        let cut = if self.ranks == 1 { Cut::Whole } else { cut };
        let tensor = NamedTensor { name, shape: shape.to_vec(), cut, at };
        let parts = if cut == Cut::Whole { 1 } else { self.ranks };
        self.end += 2 * (tensor.elements() / parts) as u64;
        self.list.push(tensor);
        at
    }

    fn aligned(&mut self, name: String, shape: &[usize]) -> u64 {
        self.aligned_part(name, shape, Cut::Whole)
    }

    fn aligned_part(&mut self, name: String, shape: &[usize], cut: Cut) -> u64 {
        self.end = self.end.next_multiple_of(ALIGN);
        self.add(name, shape, cut)
    }

    fn layer(&mut self, config: &ModelConfig, index: usize) -> LayerWeights {
        let ModelConfig { hidden, intermediate, head_dim, q_heads, kv_heads, .. } = *config;
        let name = |part: &str| format!("model.layers.{index}.{part}.weight");
        let (q, kv) = (q_heads * head_dim, kv_heads * head_dim);
        let mut weights = LayerWeights {
            attention_norm: self.aligned(name("input_layernorm"), &[hidden]),
            mlp_norm: self.aligned(name("post_attention_layernorm"), &[hidden]),
            qkv: self.aligned_part(name("self_attn.q_proj"), &[q, hidden], Cut::Rows),
            ..LayerWeights::default()
        };
        self.add(name("self_attn.k_proj"), &[kv, hidden], Cut::Rows);
        self.add(name("self_attn.v_proj"), &[kv, hidden], Cut::Rows);
        weights.o = self.aligned_part(name("self_attn.o_proj"), &[hidden, q], Cut::Cols);
        let (gate, up) = (name("mlp.gate_proj"), name("mlp.up_proj"));
        weights.gate_up = self.aligned_part(gate, &[intermediate, hidden], Cut::Rows);
        self.add(up, &[intermediate, hidden], Cut::Rows);
        weights.down = self.aligned_part(name("mlp.down_proj"), &[hidden, intermediate], Cut::Cols);
        if config.family == Family::Qwen3 {
            weights.q_norm = self.aligned(name("self_attn.q_norm"), &[head_dim]);
            weights.k_norm = self.aligned(name("self_attn.k_norm"), &[head_dim]);
        }
        weights
    }
}

impl Weights {
    /// Copies a share of a model directory's tensors to the device; `config` is the whole model's.
    ///
    /// # Errors
    /// Any error of `checkpoint.rs`, a model that cannot be divided by the ranks, or too little memory.
    pub fn read(device: &Device, config: &ModelConfig, share: Share, dir: &Path) -> Result<Self> {
        let files = Files::open(dir)?;
        Self::make(device, config, share, |memory, at, tensor| {
            let bytes = files.bf16(&tensor.name, &tensor.shape)?;
            Ok(memory.write(at, &bytes).map_err(GpuError::from)?)
        })
    }

    /// Makes a share of the weights that [`Random`] makes, on the device.
    ///
    /// # Errors
    /// A model that cannot be divided by the ranks, or too little memory.
    pub fn random(
        device: &Device,
        config: &ModelConfig,
        share: Share,
        random: Random,
    ) -> Result<Self> {
        Self::make(device, config, share, |memory, at, tensor| {
            let (scale, offset) = match tensor.shape[..] {
                [_, cols] => (Random::scale(cols), 0.0),
                _ => (0.0, 1.0),
            };
            let count = tensor.elements() as u64;
            let seed = random.seed_of(&tensor.name);
            let out = memory.address() + at;
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
        whole: &ModelConfig,
        share: Share,
        mut fill: impl FnMut(&mut DeviceBuffer, u64, &NamedTensor) -> Result<()>,
    ) -> Result<Self> {
        let config = &share.of(whole)?;
        let (vocab, hidden) = (config.vocab, config.hidden);
        let mut offsets = Offsets { list: Vec::new(), end: 0, ranks: share.ranks };
        let mut layers: Vec<LayerWeights> =
            (0..config.layers).map(|i| offsets.layer(whole, i)).collect();
        let mut embedding = offsets.aligned("model.embed_tokens.weight".into(), &[vocab, hidden]);
        let mut norm = offsets.aligned("model.norm.weight".into(), &[hidden]);
        let mut output = match config.tied {
            true => embedding,
            false => offsets.aligned("lm_head.weight".into(), &[vocab, hidden]),
        };
        let frequencies_at = offsets.end.next_multiple_of(ALIGN);
        let parted = offsets.list.iter().filter(|tensor| tensor.cut != Cut::Whole);
        let scratch = 2 * parted.map(NamedTensor::elements).max().unwrap_or(0) as u64;
        let own = frequencies_at + 4 * config.rope.frequencies.len() as u64;
        let wanted = own + scratch;
        let free = device.gpu.free_memory().map_err(GpuError::from)?;
        if wanted > free {
            return Err(GpuError::Memory { wanted, free }.into());
        }
        let mut memory = DeviceBuffer::new(&device.gpu, own).map_err(GpuError::from)?;
        let mut scratch =
            DeviceBuffer::new(&device.gpu, scratch.max(ALIGN)).map_err(GpuError::from)?;
        for tensor in &offsets.list {
            if tensor.cut == Cut::Whole {
                fill(&mut memory, tensor.at, tensor)?;
                continue;
            }
            fill(&mut scratch, 0, tensor)?;
            part(device, tensor, share, scratch.address(), memory.address() + tensor.at)?;
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

/// Copies a rank's part of a tensor, which is whole at `source`, and waits for the copy.
fn part(
    device: &Device,
    tensor: &NamedTensor,
    share: Share,
    source: u64,
    target: u64,
) -> GpuResult<()> {
    let [rows, cols] = tensor.shape[..] else { unreachable!("norms are whole") };
    let (rows, width, first) = match tensor.cut {
        Cut::Rows => (rows / share.ranks, cols, share.rank * (rows / share.ranks) * cols),
        _ => (rows, cols / share.ranks, share.rank * (cols / share.ranks)),
    };
    let device_memory = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE;
    let copy = sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: device_memory,
        srcHost: null(),
        srcDevice: source + 2 * first as u64,
        srcArray: null_mut(),
        srcPitch: 2 * cols,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: device_memory,
        dstHost: null_mut(),
        dstDevice: target,
        dstArray: null_mut(),
        dstPitch: 2 * width,
        WidthInBytes: 2 * width,
        Height: rows,
    };
    let stream = device.raw() as usize as sys::CUstream;
    // SAFETY: source and target have memory for the tensor and the part of it; the struct outlives the call.
    driver("cuMemcpy2DAsync", unsafe { sys::cuMemcpy2DAsync_v2(&copy, stream) })?;
    Ok(device.stream.synchronize()?)
}

/// Multiplies a matrix's columns by a norm's weights, which become ones.
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
