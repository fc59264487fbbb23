//! A model's weights in device memory. Sinks and frequencies are f32; all other weights are bf16. One matrix of a layer
//! contains q, k and v; another contains gate and up.
//!
//! In families that gate attention, the gates follow v. In layers of Gated DeltaNet, the first matrix contains q, k, v,
//! z, a and b. `weights/heads.rs` describes the order of a head's elements.
//!
//! One allocation contains everything: tensors get places to find its size, then addresses, and are then filled. The
//! weights of the norms before `qkv` and a dense `gate_up` are folded into these matrices and are replaced by ones.

mod heads;
mod share;
mod tensor;

use half::bf16;
use kvarena::backend::cuda::DeviceBuffer;

use super::delta::DeltaWeights;
use super::device::Device;
use super::error::{GpuError, GpuResult};
use super::kernels::{FillParams, FoldParams};
use crate::config::ModelConfig;
use crate::delta::DeltaConfig;
use crate::error::Result;
use crate::experts::ExpertsConfig;
use crate::family::Family;
use crate::source::{Random, Source};
use heads::{first_width, order_of};
pub(super) use heads::{pairs_of, qkv_stride, qkv_width};
pub use share::Share;
use tensor::{Cut, Form, NamedTensor, part};

/// Alignment of tensors in bytes.
const ALIGN: u64 = 256;

/// Device addresses of a layer's weights.
#[derive(Clone, Copy, Default, Debug)]
pub struct LayerWeights {
    /// `[hidden]`
    pub attention_norm: u64,
    /// `[q_heads + 2 * kv_heads, head_dim, hidden]`, then the gates `[q_heads, head_dim, hidden]` in families that have
    /// them; `[projected_width, hidden]` in layers of Gated DeltaNet
    pub qkv: u64,
    /// `[head_dim]`, 0 if the family has none
    pub q_norm: u64,
    /// See `q_norm`.
    pub k_norm: u64,
    /// `[hidden, q_heads * head_dim]`; `[hidden, value_width]` in layers of Gated DeltaNet
    pub o: u64,
    /// `[hidden]`
    pub mlp_norm: u64,
    /// `[2, intermediate, hidden]`, 0 if there are experts
    pub gate_up: u64,
    /// `[hidden, intermediate]`, 0 if there are experts
    pub down: u64,
    /// `[q_heads + 2 * kv_heads, head_dim]`, 0 if there is none
    pub qkv_bias: u64,
    /// `[hidden]`, 0 if there is none
    pub o_bias: u64,
    /// f32 `[q_heads]`, 0 if there are none
    pub sinks: u64,
    /// Norms of the outputs of attention and of the MLP, `[hidden]`; 0 if there are none
    pub output_norms: [u64; 2],
    /// Weights of the experts; all 0 if there are none.
    pub experts: ExpertWeights,
    /// Further weights of a layer of Gated DeltaNet; all 0 in layers of attention.
    pub delta: DeltaWeights,
}

/// Device addresses of the weights of a layer's experts.
#[derive(Clone, Copy, Default, Debug)]
pub struct ExpertWeights {
    /// `[experts, hidden]`
    pub router: u64,
    /// `[experts]`
    pub router_bias: u64,
    /// `[experts, hidden, intermediate, gate and up]`
    pub gate_up: u64,
    /// `[experts, intermediate, gate and up]`
    pub gate_up_bias: u64,
    /// `[experts, intermediate, hidden]`
    pub down: u64,
    /// `[experts, hidden]`
    pub down_bias: u64,
}

/// A model's weights on the device.
#[derive(Debug)]
pub struct Weights {
    memory: DeviceBuffer,
    /// Weights of each layer.
    pub layers: Vec<LayerWeights>,
    /// `[vocab, hidden]`
    pub embedding: u64,
    /// `[hidden]`
    pub norm: u64,
    /// `[vocab, hidden]`: the embedding, if they are tied
    pub output: u64,
    /// f32 `[head_dim / 2]` each: for layers that read all tokens, and for layers with a window
    pub frequencies: [u64; 2],
}

/// Assigns consecutive addresses to tensors.
struct Places {
    list: Vec<NamedTensor>,
    base: u64,
    /// Bytes from `base` on that are assigned.
    end: u64,
    share: Share,
    /// Whether checkpoints store each norm's weight minus 1, except for the norms in layers of Gated DeltaNet.
    centres_norms: bool,
}

impl Places {
    fn add(&mut self, name: String, shape: &[usize], cut: Cut) -> u64 {
        self.add_form(name, shape, cut, Form::All)
    }

    fn add_form(&mut self, name: String, shape: &[usize], cut: Cut, form: Form) -> u64 {
        let at = self.base + self.end;
        let cut = if self.share.ranks == 1 { Cut::Whole } else { cut };
        let view = match *shape {
            [rows] => [rows, 1],
            [rows, cols] => [rows, cols],
            // `Cut::Cols` takes a part of each matrix's columns. For `Cut::Rows`, a row of the view is a whole matrix.
            // A part of that row is a part of the matrix's rows.
            [count, rows, cols] if cut == Cut::Cols => [count * rows, cols],
            [count, rows, cols] => [count, rows * cols],
            _ => unreachable!("tensors have at most three dimensions"),
        };
        let cut = if shape.len() == 3 && cut == Cut::Rows { Cut::Cols } else { cut };
        let is_centred = self.centres_norms && name.contains("norm") && !name.contains("linear_attn");
        let offset = if is_centred { 1.0 } else { 0.0 };
        let bytes = if let Form::Wide(..) = form { 4 } else { 2 };
        let tensor = NamedTensor { name, shape: shape.to_vec(), view, cut, at, offset, form };
        let parts = if cut == Cut::Whole { 1 } else { self.share.ranks };
        self.end += bytes * (tensor.elements() / parts) as u64;
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
        let ModelConfig { hidden, intermediate, .. } = *config;
        let named = |part: &str| format!("model.layers.{index}.{part}");
        let name = |part: &str| format!("{}.weight", named(part));
        let mut weights = LayerWeights {
            attention_norm: self.aligned(name("input_layernorm"), &[hidden]),
            mlp_norm: self.aligned(name(config.family.mlp_norm()), &[hidden]),
            ..LayerWeights::default()
        };
        match config.delta_of(index) {
            Some(delta) => self.delta(&mut weights, hidden, delta, named),
            None => self.attention(&mut weights, config, named),
        }
        if let Some(experts) = &config.experts {
            weights.experts = self.experts(hidden, experts, named);
        } else {
            let (gate, up) = (name("mlp.gate_proj"), name("mlp.up_proj"));
            weights.gate_up = self.aligned_part(gate, &[intermediate, hidden], Cut::Rows);
            self.add(up, &[intermediate, hidden], Cut::Rows);
            let down = name("mlp.down_proj");
            weights.down = self.aligned_part(down, &[hidden, intermediate], Cut::Cols);
        }
        if config.family.norms_outputs() {
            let norms = ["post_attention_layernorm", "post_feedforward_layernorm"];
            weights.output_norms = norms.map(|norm| self.aligned(name(norm), &[hidden]));
        }
        weights
    }

    fn attention(&mut self, weights: &mut LayerWeights, config: &ModelConfig, named: impl Fn(&str) -> String) {
        let ModelConfig { hidden, head_dim, q_heads, kv_heads, .. } = *config;
        let name = |part: &str| named(&format!("self_attn.{part}.weight"));
        let (q, kv) = (q_heads * head_dim, kv_heads * head_dim);
        let order = order_of(head_dim, 2 * config.rope.frequencies.len());
        // Rows of the rank's heads, which are `stride` rows apart.
        let share = self.share;
        let rows_of = |heads: usize, stride: usize| -> Form {
            let heads = share.rows(0, heads);
            Form::Rows(heads.flat_map(|head| order.iter().map(move |row| head * stride + row)).collect())
        };
        if config.family.gates_attention() {
            self.end = self.end.next_multiple_of(ALIGN);
            let both = [2 * q, hidden];
            weights.qkv = self.add_form(name("q_proj"), &both, Cut::Whole, rows_of(q_heads, 2 * head_dim));
            self.add_form(name("k_proj"), &[kv, hidden], Cut::Whole, rows_of(kv_heads, head_dim));
            self.add(name("v_proj"), &[kv, hidden], Cut::Rows);
            let gates = self.share.rows(0, 2 * q).filter(|row| row / head_dim % 2 == 1).collect();
            self.add_form(name("q_proj"), &both, Cut::Whole, Form::Rows(gates));
        } else {
            weights.qkv = self.aligned_part(name("q_proj"), &[q, hidden], Cut::Rows);
            self.add(name("k_proj"), &[kv, hidden], Cut::Rows);
            self.add(name("v_proj"), &[kv, hidden], Cut::Rows);
        }
        weights.o = self.aligned_part(name("o_proj"), &[hidden, q], Cut::Cols);
        if config.attention_bias {
            let bias = |part: &str| named(&format!("self_attn.{part}_proj.bias"));
            weights.qkv_bias = self.aligned_part(bias("q"), &[q], Cut::Rows);
            self.add(bias("k"), &[kv], Cut::Rows);
            self.add(bias("v"), &[kv], Cut::Rows);
            weights.o_bias = self.aligned(bias("o"), &[hidden]);
        }
        if config.family == Family::GptOss {
            weights.sinks = self.aligned_part(named("self_attn.sinks"), &[q_heads], Cut::Rows);
        }
        if config.family.norms_heads() {
            [weights.q_norm, weights.k_norm] = ["q_norm", "k_norm"].map(|part| {
                self.end = self.end.next_multiple_of(ALIGN);
                let form = if order.is_sorted() { Form::All } else { Form::Rows(order.clone()) };
                self.add_form(name(part), &[head_dim], Cut::Whole, form)
            });
        }
    }

    fn delta(
        &mut self,
        weights: &mut LayerWeights,
        hidden: usize,
        config: &DeltaConfig,
        named: impl Fn(&str) -> String,
    ) {
        let name = |part: &str| named(&format!("linear_attn.{part}"));
        let (share, width, heads) = (self.share, config.value_width(), config.value_heads);
        let [keys, channels] = [config.key_heads * config.key_dim, config.channels()];
        // The rank's heads of q, of k and of v.
        let parts = [(0, keys), (keys, keys), (2 * keys, width)];
        let mixed: Vec<usize> = parts.into_iter().flat_map(|(first, count)| share.rows(first, count)).collect();
        let mixed = || if share.ranks == 1 { Form::All } else { Form::Rows(mixed.clone()) };
        self.end = self.end.next_multiple_of(ALIGN);
        weights.qkv = self.add_form(name("in_proj_qkv.weight"), &[channels, hidden], Cut::Whole, mixed());
        for (part, rows) in [("z", width), ("a", heads), ("b", heads)] {
            self.add(name(&format!("in_proj_{part}.weight")), &[rows, hidden], Cut::Rows);
        }
        // If the number of rows is not a multiple of 8, the matrix has more. No kernel reads their outputs.
        let rows = (channels + width + 2 * heads) / share.ranks;
        self.end += 2 * (hidden * (rows.next_multiple_of(8) - rows)) as u64;
        weights.o = self.aligned_part(name("out_proj.weight"), &[hidden, width], Cut::Cols);
        self.end = self.end.next_multiple_of(ALIGN);
        weights.delta.conv = self.add_form(name("conv1d.weight"), &[channels, 1, config.kernel], Cut::Whole, mixed());
        weights.delta.norm = self.aligned(name("norm.weight"), &[config.value_dim]);
        let mut wide = |part: &str, f| {
            self.end = self.end.next_multiple_of(ALIGN);
            self.add_form(name(part), &[heads], Cut::Whole, Form::Wide(f, share.rows(0, heads)))
        };
        weights.delta.rate = wide("A_log", |x| -x.exp());
        weights.delta.dt_bias = wide("dt_bias", |x| x);
    }

    fn experts(
        &mut self,
        hidden: usize,
        &ExpertsConfig { count, intermediate, .. }: &ExpertsConfig,
        named: impl Fn(&str) -> String,
    ) -> ExpertWeights {
        let both = 2 * intermediate;
        let name = |part: &str| named(&format!("mlp.experts.{part}"));
        let (up, down) = ([count, hidden, both], [count, intermediate, hidden]);
        ExpertWeights {
            router: self.aligned(named("mlp.router.weight"), &[count, hidden]),
            router_bias: self.aligned(named("mlp.router.bias"), &[count]),
            gate_up: self.aligned_part(name("gate_up_proj"), &up, Cut::Cols),
            gate_up_bias: self.aligned_part(name("gate_up_proj_bias"), &[count, both], Cut::Cols),
            down: self.aligned_part(name("down_proj"), &down, Cut::Rows),
            down_bias: self.aligned(name("down_proj_bias"), &[count, hidden]),
        }
    }
}

impl Weights {
    /// Copies a share of the tensors of `source` to the device, one at a time; `config` is the whole model's.
    ///
    /// # Errors
    /// The errors of `source`, a model that cannot be divided by the ranks, too little memory, or a failed driver call.
    pub fn read(device: &Device, config: &ModelConfig, share: Share, source: &mut dyn Source) -> Result<Self> {
        Self::make(device, config, share, |memory, at, tensor| tensor.copy(source, memory, at))
    }

    /// Generates a share of the weights of [`Random`] on the device.
    ///
    /// # Errors
    /// A model that cannot be divided by the ranks, too little memory, or a failed driver call.
    pub fn random(device: &Device, config: &ModelConfig, share: Share, mut random: Random) -> Result<Self> {
        Self::make(device, config, share, |memory, at, tensor| {
            if !matches!(tensor.form, Form::All) {
                return tensor.copy(&mut random, memory, at);
            }
            let (scale, offset) = match tensor.shape[..] {
                [_, cols] | [_, _, cols] => (Random::scale(cols), 0.0),
                _ => (0.0, 1.0),
            };
            let offset = offset + tensor.offset;
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
        let centres_norms = config.family.centres_norms();
        let place = |base| {
            let mut places = Places { list: Vec::new(), base, end: 0, share, centres_norms };
            let layers: Vec<LayerWeights> = (0..config.layers).map(|i| places.layer(whole, i)).collect();
            let embedding = places.aligned("model.embed_tokens.weight".into(), &[vocab, hidden]);
            let norm = places.aligned("model.norm.weight".into(), &[hidden]);
            let mut output = embedding;
            if !config.tied {
                output = places.aligned("lm_head.weight".into(), &[vocab, hidden]);
            }
            (places, layers, [embedding, norm, output])
        };
        let places = place(0).0;
        let parted = places.list.iter().filter(|tensor| tensor.cut != Cut::Whole);
        let scratch = 2 * parted.map(NamedTensor::elements).max().unwrap_or(0) as u64;
        let tensor_bytes = places.end.next_multiple_of(ALIGN);
        let rope_bytes = 4 * pairs_of(config, &config.rope).len() as u64;
        let sinks_bytes = 4 * config.q_heads as u64;
        let own = tensor_bytes + 2 * rope_bytes + sinks_bytes * config.layers as u64;
        let wanted = own + scratch;
        let free = device.gpu.free_memory().map_err(GpuError::from)?;
        if wanted > free {
            return Err(GpuError::Memory { wanted, free }.into());
        }
        let mut memory = DeviceBuffer::new(&device.gpu, own).map_err(GpuError::from)?;
        let mut scratch = DeviceBuffer::new(&device.gpu, scratch.max(ALIGN)).map_err(GpuError::from)?;
        let base = memory.address();
        let (places, mut layers, [embedding, norm, output]) = place(base);
        for tensor in &places.list {
            if tensor.cut == Cut::Whole {
                fill(&mut memory, tensor.at - base, tensor)?;
                continue;
            }
            fill(&mut scratch, 0, tensor)?;
            part(device, tensor, share, scratch.address(), tensor.at)?;
        }
        let ropes = [&config.rope, config.window_rope.as_ref().unwrap_or(&config.rope)];
        let frequencies = [tensor_bytes, tensor_bytes + rope_bytes];
        for (at, rope) in frequencies.into_iter().zip(ropes) {
            memory.write(at, &pairs_of(config, rope)).map_err(GpuError::from)?;
        }
        let frequencies = frequencies.map(|at| base + at);
        device.stream.synchronize().map_err(GpuError::from)?;
        for (layer, to) in layers.iter_mut().zip((tensor_bytes + 2 * rope_bytes..).step_by(sinks_bytes as usize)) {
            if layer.sinks > 0 {
                widen_sinks(&mut memory, layer.sinks - base, to, config.q_heads)?;
                layer.sinks = base + to;
            }
        }
        fold_norms(device, config, &layers)?;
        Ok(Self { memory, layers, embedding, norm, output, frequencies })
    }

    /// Returns the bytes of device memory.
    pub fn bytes(&self) -> u64 {
        self.memory.bytes()
    }
}

/// Converts a layer's sinks at offset `from` to f32 at offset `to`.
fn widen_sinks(memory: &mut DeviceBuffer, from: u64, to: u64, heads: usize) -> GpuResult<()> {
    let sinks: Vec<bf16> = memory.read(from, heads)?;
    let wide: Vec<f32> = sinks.into_iter().map(bf16::to_f32).collect();
    Ok(memory.write(to, &wide)?)
}

/// Folds the norms before `qkv` and a dense `gate_up` into these matrices, and waits.
fn fold_norms(device: &Device, config: &ModelConfig, layers: &[LayerWeights]) -> GpuResult<()> {
    let ModelConfig { hidden, intermediate, .. } = *config;
    for (index, layer) in layers.iter().enumerate() {
        fold(device, layer.qkv, first_width(config, index), layer.attention_norm, hidden)?;
        if layer.gate_up > 0 {
            fold(device, layer.gate_up, 2 * intermediate, layer.mlp_norm, hidden)?;
        }
    }
    Ok(device.stream.synchronize()?)
}

/// Multiplies a matrix's columns by a norm's weights, and sets the weights to 1.
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
