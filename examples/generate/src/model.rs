//! Llama and Qwen3: weights, and one forward pass over the new tokens of a step.
//!
//! The pass knows neither pages nor sequences: it hands q, k and v of each layer to an [`Attention`] and takes the
//! attended rows back. Not here: reading files (`checkpoint.rs`), pages and backends (`cpu.rs`).

use std::path::Path;

use crate::checkpoint::Checkpoint;
use crate::clock::{Clock, Part};
use crate::config::{Family, ModelConfig};
use crate::error::Result;
use crate::matrix::{Matrix, Numbers};
use crate::ops::{self, Angles};

/// Stores a layer's K and V, and attends.
pub trait Attention {
    /// What can go wrong.
    type Error;

    /// `q` and `out` are `[tokens, q_heads, head_dim]`, `k` and `v` are `[tokens, kv_heads, head_dim]`.
    ///
    /// # Errors
    /// Its own; the pass then ends with it.
    fn layer(
        &mut self,
        layer: usize,
        window: Option<u32>,
        qkv: [&[f32]; 3],
        out: &mut [f32],
    ) -> std::result::Result<(), Self::Error>;
}

/// A projection.
struct Linear {
    weight: Matrix,
    bias: Option<Vec<f32>>,
}

struct Layer {
    attention_norm: Vec<f32>,
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    q_norm: Option<Vec<f32>>,
    k_norm: Option<Vec<f32>>,
    mlp_norm: Vec<f32>,
    gate: Linear,
    up: Linear,
    down: Linear,
}

/// A model in memory.
pub struct Model {
    /// Its shape.
    pub config: ModelConfig,
    embedding: Matrix,
    layers: Vec<Layer>,
    norm: Vec<f32>,
    /// None: the embedding, turned.
    output: Option<Matrix>,
}

/// The new tokens of a step.
#[derive(Clone, Copy, Debug)]
pub struct Pass<'a> {
    /// Tokens, each below the vocabulary's size.
    pub tokens: &'a [u32],
    /// The position of each.
    pub positions: &'a [u32],
    /// Rows whose logits are wanted.
    pub wanted: &'a [usize],
}

/// Activations of a pass, reused from step to step.
#[derive(Default)]
pub struct Workspace {
    angles: Angles,
    x: Vec<f32>,
    normed: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    attended: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    turned: Vec<f32>,
    /// `[wanted, vocab]`, of the last pass.
    pub logits: Vec<f32>,
}

/// Where tensors come from: a checkpoint or a random number generator.
pub trait Source {
    /// A matrix `[rows, cols]`.
    ///
    /// # Errors
    /// It is missing or of another shape.
    fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<Matrix>;

    /// The weight of a norm, or a bias.
    ///
    /// # Errors
    /// It is missing or of another shape.
    fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>>;
}

impl Source for Checkpoint {
    fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<Matrix> {
        Checkpoint::matrix(self, name, rows, cols)
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>> {
        Checkpoint::vector(self, name, len)
    }
}

impl Model {
    /// Reads a model directory.
    ///
    /// # Errors
    /// Everything that `config.rs` and `checkpoint.rs` refuse.
    pub fn read(dir: &Path) -> Result<Self> {
        Self::build(ModelConfig::read(dir)?, &mut Checkpoint::read(dir)?)
    }

    /// Takes all tensors that `config` asks for out of `source`.
    ///
    /// # Errors
    /// One is missing or of another shape.
    pub fn build(config: ModelConfig, source: &mut impl Source) -> Result<Self> {
        let (vocab, hidden) = (config.vocab, config.hidden);
        let layer = |i| Layer::build(&config, source, i);
        let layers = (0..config.layers).map(layer).collect::<Result<_>>()?;
        let embedding = source.matrix("model.embed_tokens.weight", vocab, hidden)?;
        let norm = source.vector("model.norm.weight", hidden)?;
        let output = match config.tied {
            true => None,
            false => Some(source.matrix("lm_head.weight", vocab, hidden)?),
        };
        Ok(Self { embedding, layers, norm, output, config })
    }

    /// Bytes of all matrices.
    pub fn bytes(&self) -> usize {
        let layers =
            self.layers.iter().flat_map(Layer::linears).map(|linear| linear.weight.bytes());
        layers.sum::<usize>()
            + self.embedding.bytes()
            + self.output.as_ref().map_or(0, Matrix::bytes)
    }

    /// Runs the new tokens of a step through the model; the logits wanted are left in the workspace.
    ///
    /// # Errors
    /// Those of `attention`.
    ///
    /// # Panics
    /// If a token is not below the vocabulary's size.
    pub fn forward<A: Attention>(
        &self,
        pass: Pass<'_>,
        attention: &mut A,
        work: &mut Workspace,
        clock: &mut Clock,
    ) -> std::result::Result<(), A::Error> {
        let (hidden, eps) = (self.config.hidden, self.config.norm_eps);
        work.angles.set(&self.config.rope.frequencies, pass.positions);
        resize(&mut work.x, pass.tokens.len() * hidden);
        for (row, &token) in work.x.chunks_exact_mut(hidden).zip(pass.tokens) {
            self.embedding.row(token as usize, row);
        }
        resize(&mut work.normed, work.x.len());
        for (i, layer) in self.layers.iter().enumerate() {
            self.attend(i, layer, attention, work, clock)?;
            self.mlp(layer, work, clock);
        }

        let wanted = pass.wanted.len();
        resize(&mut work.normed, wanted * hidden);
        for (out, &row) in work.normed.chunks_exact_mut(hidden).zip(pass.wanted) {
            ops::rms_norm(&work.x[row * hidden..(row + 1) * hidden], &self.norm, eps, out);
        }
        resize(&mut work.logits, wanted * self.config.vocab);
        let output = self.output.as_ref().unwrap_or(&self.embedding);
        clock.lap(Part::Elementwise);
        output.multiply(&work.normed, &mut work.logits, &mut work.turned);
        clock.lap(Part::Logits);
        Ok(())
    }

    /// `x += o(attention(rotate(q), rotate(k), v))`, all of the normed x.
    fn attend<A: Attention>(
        &self,
        index: usize,
        layer: &Layer,
        attention: &mut A,
        work: &mut Workspace,
        clock: &mut Clock,
    ) -> std::result::Result<(), A::Error> {
        let ModelConfig { head_dim, q_heads, kv_heads, norm_eps: eps, .. } = self.config;
        ops::rms_norm(&work.x, &layer.attention_norm, eps, &mut work.normed);
        clock.lap(Part::Elementwise);
        layer.q.apply(&work.normed, &mut work.q, &mut work.turned);
        layer.k.apply(&work.normed, &mut work.k, &mut work.turned);
        layer.v.apply(&work.normed, &mut work.v, &mut work.turned);
        clock.lap(Part::Products);
        let q_norm = layer.q_norm.as_deref().map(|w| (w, eps));
        let k_norm = layer.k_norm.as_deref().map(|w| (w, eps));
        ops::norm_and_rotate(&mut work.q, q_heads, head_dim, q_norm, &work.angles);
        ops::norm_and_rotate(&mut work.k, kv_heads, head_dim, k_norm, &work.angles);
        clock.lap(Part::Elementwise);
        resize(&mut work.attended, work.q.len());
        let qkv = [&work.q[..], &work.k[..], &work.v[..]];
        attention.layer(index, self.config.windows[index], qkv, &mut work.attended)?;
        clock.lap(Part::Attention);
        layer.o.apply(&work.attended, &mut work.normed, &mut work.turned);
        clock.lap(Part::Products);
        ops::add(&mut work.x, &work.normed);
        Ok(())
    }

    /// `x += down(silu(gate) * up)`, all of the normed x.
    fn mlp(&self, layer: &Layer, work: &mut Workspace, clock: &mut Clock) {
        ops::rms_norm(&work.x, &layer.mlp_norm, self.config.norm_eps, &mut work.normed);
        clock.lap(Part::Elementwise);
        layer.gate.apply(&work.normed, &mut work.gate, &mut work.turned);
        layer.up.apply(&work.normed, &mut work.up, &mut work.turned);
        clock.lap(Part::Products);
        ops::silu_times(&mut work.gate, &work.up, self.config.intermediate);
        clock.lap(Part::Elementwise);
        layer.down.apply(&work.gate, &mut work.normed, &mut work.turned);
        clock.lap(Part::Products);
        ops::add(&mut work.x, &work.normed);
    }
}

impl Linear {
    fn build(
        source: &mut impl Source,
        name: &str,
        rows: usize,
        cols: usize,
        bias: bool,
    ) -> Result<Self> {
        let weight = source.matrix(&format!("{name}.weight"), rows, cols)?;
        let bias = match bias {
            true => Some(source.vector(&format!("{name}.bias"), rows)?),
            false => None,
        };
        Ok(Self { weight, bias })
    }

    fn apply(&self, x: &[f32], out: &mut Vec<f32>, turned: &mut Vec<f32>) {
        resize(out, x.len() / self.weight.cols() * self.weight.rows());
        self.weight.multiply(x, out, turned);
        ops::add_bias(out, self.bias.as_deref());
    }
}

impl Layer {
    fn build(config: &ModelConfig, source: &mut impl Source, index: usize) -> Result<Self> {
        let ModelConfig { hidden, intermediate, head_dim, .. } = *config;
        let (q_width, kv_width) = (config.q_heads * head_dim, config.kv_heads * head_dim);
        let name = |part: &str| format!("model.layers.{index}.{part}");
        let mut projection = |part: &str, rows, cols| {
            let bias =
                if part.starts_with("mlp") { config.mlp_bias } else { config.attention_bias };
            Linear::build(source, &name(part), rows, cols, bias)
        };
        let q = projection("self_attn.q_proj", q_width, hidden)?;
        let k = projection("self_attn.k_proj", kv_width, hidden)?;
        let v = projection("self_attn.v_proj", kv_width, hidden)?;
        let o = projection("self_attn.o_proj", hidden, q_width)?;
        let gate = projection("mlp.gate_proj", intermediate, hidden)?;
        let up = projection("mlp.up_proj", intermediate, hidden)?;
        let down = projection("mlp.down_proj", hidden, intermediate)?;
        let mut norm = |part: &str, len| source.vector(&name(part), len);
        let mut head_norm = |part: &str| match config.family {
            Family::Qwen3 => norm(part, head_dim).map(Some),
            Family::Llama => Ok(None),
        };
        Ok(Self {
            q_norm: head_norm("self_attn.q_norm.weight")?,
            k_norm: head_norm("self_attn.k_norm.weight")?,
            attention_norm: norm("input_layernorm.weight", hidden)?,
            mlp_norm: norm("post_attention_layernorm.weight", hidden)?,
            q,
            k,
            v,
            o,
            gate,
            up,
            down,
        })
    }

    fn linears(&self) -> [&Linear; 7] {
        [&self.q, &self.k, &self.v, &self.o, &self.gate, &self.up, &self.down]
    }
}

/// Sets a buffer's length; what it holds is about to be overwritten.
fn resize(buffer: &mut Vec<f32>, len: usize) {
    buffer.resize(len, 0.0);
}

/// Random weights, for measuring a shape without its checkpoint: for each name another stretch of the SplitMix64 sequence,
/// so that whoever makes a tensor (`ptx/fill.cu` does on a GPU) makes the same.
#[derive(Clone, Copy, Debug)]
pub struct Random {
    /// Of all names' seeds.
    pub seed: u64,
}

impl Random {
    /// Where the sequence of a tensor starts.
    pub fn seed_of(&self, name: &str) -> u64 {
        // FNV-1a.
        let hash = name.bytes().fold(0xCBF2_9CE4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
        });
        crate::sample::splitmix(&mut (hash ^ self.seed))
    }

    /// Width of the uniform distribution of a matrix with so many columns: its variance is 1 / cols, so that
    /// activations neither grow nor vanish.
    pub fn scale(cols: usize) -> f32 {
        (12.0 / cols as f32).sqrt()
    }
}

impl Source for Random {
    fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<Matrix> {
        let (mut state, scale) = (self.seed_of(name), Self::scale(cols));
        let mut number = || {
            let unit = crate::sample::splitmix(&mut state) >> 40; // 24 bits
            half::bf16::from_f32((unit as f32 / (1 << 24) as f32 - 0.5) * scale)
        };
        let numbers = (0..rows * cols).map(|_| number()).collect();
        Ok(Matrix::new(rows, cols, Numbers::Bf16(numbers)))
    }

    fn vector(&mut self, _: &str, len: usize) -> Result<Vec<f32>> {
        Ok(vec![1.0; len])
    }
}
