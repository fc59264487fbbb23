//! A model: weights, and one forward pass over the new tokens of a step.
//!
//! The pass is independent of pages and sequences: it passes q, k and v of each layer to an [`Attention`] and receives
//! the attended rows. `checkpoint.rs` reads files; `cpu.rs` uses pages and backends.

use std::path::Path;

use kvarena::layout::Reach;

use crate::clock::{Clock, Part};
use crate::config::ModelConfig;
use crate::delta::{Delta, DeltaStep, DeltaWork};
use crate::error::Result;
use crate::experts::{Experts, ExpertsWork};
use crate::family::Family;
use crate::latent::{Latent, LatentWork};
use crate::linear::{Linear, Mlp, MlpWork, resize};
use crate::matrix::Matrix;
use crate::model_files::ModelFiles;
use crate::ops::{self, Angles};
use crate::source::Source;

/// The inputs of one layer's attention.
#[derive(Clone, Copy, Debug)]
pub struct AttentionInputs<'a> {
    /// Tokens of the sliding window, if the layer has one.
    pub window: Option<u32>,
    /// Tokens of a chunk, if the layer reads chunks.
    pub chunk: Option<u32>,
    /// `[tokens, q_heads, head_dim]`, with the sizes of [`ModelConfig::heads_of`] here and below.
    pub q: &'a [f32],
    /// `[tokens, kv_heads, head_dim]`
    pub k: &'a [f32],
    /// `[tokens, kv_heads, head_dim]`; empty if rows are latent, because K contains V.
    pub v: &'a [f32],
    /// `[q_heads]`
    pub sinks: Option<&'a [f32]>,
}

impl AttentionInputs<'_> {
    /// Returns the first position that a query at `position` reads.
    pub fn first(&self, position: u32) -> u32 {
        let window = self.window.map_or(Reach::All, Reach::Window);
        self.chunk.map_or(window, Reach::Chunk).first(position)
    }
}

/// Stores K and V and computes attention, and owns the states of layers that keep one.
pub trait Attention {
    /// The error of attention.
    type Error;

    /// Stores K and V, and writes `out`: `[tokens, q_heads, head_dim]`, or `[tokens, q_heads, rank]` of latent rows.
    ///
    /// # Errors
    /// The implementation's error, which ends the pass.
    fn layer(
        &mut self,
        layer: usize,
        inputs: AttentionInputs<'_>,
        out: &mut [f32],
    ) -> std::result::Result<(), Self::Error>;

    /// Passes the state of each sequence in the pass to [`DeltaStep::update`], for a layer of Gated DeltaNet.
    ///
    /// # Errors
    /// The implementation's error, which ends the pass.
    fn delta(&mut self, layer: usize, step: &mut DeltaStep<'_>) -> std::result::Result<(), Self::Error>;
}

/// The projections from x to q, k and v.
enum Projections {
    /// If `v` is `None`, V is computed from the product for K. In families that gate attention, the product for q
    /// contains a gate behind each head.
    Heads {
        q: Linear,
        k: Linear,
        v: Option<Linear>,
        q_norm: Option<Vec<f32>>,
        k_norm: Option<Vec<f32>>,
    },
    Latent(Latent),
    Delta(Delta),
}

/// The part of a layer after attention.
enum Rest {
    Mlp(Mlp),
    Experts(Experts),
}

struct Layer {
    attention_norm: Vec<f32>,
    projections: Projections,
    sinks: Option<Vec<f32>>,
    o: Linear,
    mlp_norm: Vec<f32>,
    rest: Rest,
    /// Norms of the outputs of attention and of the MLP, in Gemma.
    output_norms: Option<[Vec<f32>; 2]>,
    /// Gemma 4's factor of the layer's result; 1 for other families.
    factor: f32,
}

/// A model in memory.
pub struct Model {
    /// Shape of the model.
    pub config: ModelConfig,
    embedding: Matrix,
    layers: Vec<Layer>,
    norm: Vec<f32>,
    /// The output projection; `None` if the embedding is also the output projection.
    output: Option<Matrix>,
}

/// The new tokens of a step.
#[derive(Clone, Copy, Debug)]
pub struct Pass<'a> {
    /// Tokens, each below the vocabulary's size.
    pub tokens: &'a [u32],
    /// Position of each token.
    pub positions: &'a [u32],
    /// Rows whose logits the caller requests.
    pub wanted: &'a [usize],
}

/// Activations of a pass, reused from step to step.
#[derive(Default)]
pub struct Workspace {
    angles: Angles,
    window_angles: Angles,
    x: Vec<f32>,
    normed: Vec<f32>,
    q: Vec<f32>,
    /// Gates of attention's output, `[tokens, q_heads, head_dim]`, in families that have them.
    gates: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    attended: Vec<f32>,
    values: Vec<f32>,
    mlp: MlpWork,
    latent: LatentWork,
    delta: DeltaWork,
    experts: ExpertsWork,
    transposed: Vec<f32>,
    /// `[requested rows, vocab]`, of the last pass.
    pub logits: Vec<f32>,
}

impl Model {
    /// Reads a model folder or a GGUF file.
    ///
    /// # Errors
    /// The errors of [`ModelFiles`].
    pub fn read(path: &Path) -> Result<Self> {
        let files = ModelFiles::open(path)?;
        Self::build(files.config()?, &mut *files.weights()?)
    }

    /// Builds the model of `config` from the tensors of `source`.
    ///
    /// # Errors
    /// The errors of `source`.
    pub fn build(config: ModelConfig, source: &mut dyn Source) -> Result<Self> {
        let (vocab, hidden) = (config.vocab, config.hidden);
        let layer = |i| Layer::build(&config, source, i);
        let layers = (0..config.layers).map(layer).collect::<Result<_>>()?;
        let embedding = source.matrix("model.embed_tokens.weight", vocab, hidden)?;
        let norm = norm(&config, source, "model.norm.weight", hidden)?;
        let output = (!config.tied).then(|| source.matrix("lm_head.weight", vocab, hidden)).transpose()?;
        Ok(Self { embedding, layers, norm, output, config })
    }

    /// Runs the new tokens of a step through the model; the workspace then contains the requested logits.
    ///
    /// # Errors
    /// The errors of `attention`.
    ///
    /// # Panics
    /// If a token is not below the vocabulary's size, or a requested row is not below the number of tokens.
    pub fn forward<A: Attention>(
        &self,
        pass: Pass<'_>,
        attention: &mut A,
        work: &mut Workspace,
        clock: &mut Clock,
    ) -> std::result::Result<(), A::Error> {
        let (hidden, eps) = (self.config.hidden, self.config.norm_eps);
        work.angles.set(&self.config.rope, pass.positions);
        if let Some(rope) = &self.config.window_rope {
            work.window_angles.set(rope, pass.positions);
        }
        resize(&mut work.x, pass.tokens.len() * hidden);
        for (row, &token) in work.x.chunks_exact_mut(hidden).zip(pass.tokens) {
            self.embedding.row(token as usize, row);
        }
        if self.config.embedding_scale != 1.0 {
            work.x.iter_mut().for_each(|x| *x *= self.config.embedding_scale);
        }
        resize(&mut work.normed, work.x.len());
        for (i, layer) in self.layers.iter().enumerate() {
            self.attend((i, layer), pass.positions, attention, work, clock)?;
            self.rest(layer, work, clock);
            if layer.factor != 1.0 {
                work.x.iter_mut().for_each(|x| *x *= layer.factor);
            }
        }

        let wanted = pass.wanted.len();
        resize(&mut work.normed, wanted * hidden);
        for (out, &row) in work.normed.chunks_exact_mut(hidden).zip(pass.wanted) {
            ops::rms_norm(&work.x[row * hidden..(row + 1) * hidden], &self.norm, eps, out);
        }
        resize(&mut work.logits, wanted * self.config.vocab);
        let output = self.output.as_ref().unwrap_or(&self.embedding);
        clock.lap(Part::Elementwise);
        output.multiply(&work.normed, &mut work.logits, &mut work.transposed);
        if let Some(cap) = self.config.logit_cap {
            work.logits.iter_mut().for_each(|x| *x = cap * (*x / cap).tanh());
        }
        clock.lap(Part::Logits);
        Ok(())
    }

    /// Computes `x += o(attention(rotate(q), rotate(k), v))`, with q, k and v of the normed x. Layers of Gated DeltaNet
    /// update their states instead of attention.
    fn attend<A: Attention>(
        &self,
        (index, layer): (usize, &Layer),
        positions: &[u32],
        attention: &mut A,
        work: &mut Workspace,
        clock: &mut Clock,
    ) -> std::result::Result<(), A::Error> {
        self.project((index, layer), positions, work, clock);
        if let Projections::Delta(delta) = &layer.projections {
            attention.delta(index, &mut delta.step(&mut work.delta, &mut work.attended))?;
            clock.lap(Part::Attention);
            delta.gate(&mut work.attended, &work.delta, self.config.norm_eps);
            layer.o.apply(&work.attended, &mut work.normed, &mut work.transposed);
            clock.lap(Part::Products);
            ops::add(&mut work.x, &work.normed);
            return Ok(());
        }
        let (_, head_dim) = self.config.heads_of(index);
        let value_dim = if self.config.latent.is_some() { self.config.value_dim } else { head_dim };
        resize(&mut work.attended, work.q.len() / head_dim * value_dim);
        let inputs = AttentionInputs {
            window: self.config.windows[index],
            chunk: self.config.chunks[index],
            q: &work.q,
            k: &work.k,
            v: &work.v,
            sinks: layer.sinks.as_deref(),
        };
        attention.layer(index, inputs, &mut work.attended)?;
        clock.lap(Part::Attention);
        if self.config.family.gates_attention() {
            ops::sigmoid_times(&mut work.attended, &work.gates);
        }
        let values = match &layer.projections {
            Projections::Heads { .. } | Projections::Delta(_) => &work.attended,
            Projections::Latent(latent) => {
                let (latent_work, transposed) = (&mut work.latent, &mut work.transposed);
                latent.values(&work.attended, &mut work.values, latent_work, transposed);
                &work.values
            }
        };
        layer.o.apply(values, &mut work.normed, &mut work.transposed);
        clock.lap(Part::Products);
        self.add_output(layer.output_norms.as_ref().map(|[norm, _]| &norm[..]), work);
        Ok(())
    }

    /// Computes the rotated q and k, and v, of the normed x.
    fn project(&self, (index, layer): (usize, &Layer), positions: &[u32], work: &mut Workspace, clock: &mut Clock) {
        let ModelConfig { q_heads, norm_eps: eps, .. } = self.config;
        let (kv_heads, head_dim) = self.config.heads_of(index);
        ops::rms_norm(&work.x, &layer.attention_norm, eps, &mut work.normed);
        clock.lap(Part::Elementwise);
        match &layer.projections {
            Projections::Heads { q, k, v, q_norm, k_norm } => {
                if self.config.family.gates_attention() {
                    q.apply(&work.normed, &mut work.values, &mut work.transposed);
                    split_gates(&work.values, head_dim, &mut work.q, &mut work.gates);
                } else {
                    q.apply(&work.normed, &mut work.q, &mut work.transposed);
                }
                k.apply(&work.normed, &mut work.k, &mut work.transposed);
                match v {
                    Some(v) => v.apply(&work.normed, &mut work.v, &mut work.transposed),
                    None => work.v.clone_from(&work.k),
                }
                clock.lap(Part::Products);
                if self.config.family == Family::Gemma4 {
                    ops::norm_heads(&mut work.v, head_dim, eps);
                }
                if let Some(nope) = &self.config.nope {
                    let (q, k) = ((&mut work.q[..], q_heads), (&mut work.k[..], kv_heads));
                    nope.place(index, q, k, (head_dim, eps), (positions, &work.angles));
                } else {
                    let q_norm = q_norm.as_deref().map(|w| (w, eps));
                    let k_norm = k_norm.as_deref().map(|w| (w, eps));
                    let angles = match (&self.config.window_rope, self.config.windows[index]) {
                        (Some(_), Some(_)) => &work.window_angles,
                        _ => &work.angles,
                    };
                    ops::norm_and_rotate(&mut work.q, q_heads, head_dim, q_norm, angles);
                    ops::norm_and_rotate(&mut work.k, kv_heads, head_dim, k_norm, angles);
                }
                clock.lap(Part::Elementwise);
            }
            Projections::Latent(latent) => {
                let rows = [&mut work.q, &mut work.k];
                let (x, transposed) = (&work.normed, &mut work.transposed);
                latent.project(x, &work.angles, rows, &mut work.latent, transposed);
                work.v.clear();
                clock.lap(Part::Products);
            }
            Projections::Delta(delta) => {
                delta.project(&work.normed, &mut work.delta, &mut work.transposed);
                clock.lap(Part::Products);
            }
        }
    }

    /// Adds the output in `work.normed` to `x`. Models with output norms normalise it first.
    fn add_output(&self, norm: Option<&[f32]>, work: &mut Workspace) {
        if let Some(norm) = norm {
            resize(&mut work.values, work.normed.len());
            ops::rms_norm(&work.normed, norm, self.config.norm_eps, &mut work.values);
            ops::add(&mut work.x, &work.values);
        } else {
            ops::add(&mut work.x, &work.normed);
        }
    }

    /// Adds the output of the MLP or the experts to `x`. Their input is the normed x.
    fn rest(&self, layer: &Layer, work: &mut Workspace, clock: &mut Clock) {
        resize(&mut work.normed, work.x.len());
        ops::rms_norm(&work.x, &layer.mlp_norm, self.config.norm_eps, &mut work.normed);
        clock.lap(Part::Elementwise);
        match &layer.rest {
            Rest::Mlp(mlp) => {
                mlp.gate.apply(&work.normed, &mut work.mlp.gate, &mut work.transposed);
                mlp.up.apply(&work.normed, &mut work.mlp.up, &mut work.transposed);
                clock.lap(Part::Products);
                mlp.activate(&mut work.mlp);
                clock.lap(Part::Elementwise);
                mlp.down.apply(&work.mlp.gate, &mut work.normed, &mut work.transposed);
                clock.lap(Part::Products);
                self.add_output(layer.output_norms.as_ref().map(|[_, norm]| &norm[..]), work);
            }
            Rest::Experts(experts) => {
                let (routed, transposed) = (&mut work.values, &mut work.transposed);
                experts.apply(&work.normed, routed, &mut work.experts, transposed);
                clock.lap(Part::Products);
                ops::add(&mut work.x, routed);
            }
        }
    }
}

impl Layer {
    fn build(config: &ModelConfig, source: &mut dyn Source, index: usize) -> Result<Self> {
        let ModelConfig { hidden, q_heads, .. } = *config;
        let (_, head_dim) = config.heads_of(index);
        let name = |part: &str| format!("model.layers.{index}.{part}");
        let bias = config.attention_bias;
        let delta = config.delta_of(index);
        let (projections, attended) = match (config.latent, delta) {
            (_, Some(delta)) => {
                let projections = Delta::build(source, &name("linear_attn"), hidden, delta)?;
                (Projections::Delta(projections), delta.value_width())
            }
            (Some(latent), None) => {
                let (name, size) = (name("self_attn"), (hidden, q_heads));
                let projections = Latent::build(source, &name, size, latent)?;
                (Projections::Latent(projections), q_heads * latent.value)
            }
            (None, None) => (heads(config, source, index, name)?, q_heads * head_dim),
        };
        let sinks = match config.family {
            Family::GptOss => Some(source.vector(&name("self_attn.sinks"), q_heads)?),
            _ => None,
        };
        let (o, bias) = if delta.is_some() { ("linear_attn.out_proj", false) } else { ("self_attn.o_proj", bias) };
        let o = Linear::build(source, &name(o), hidden, attended, bias)?;
        let part = if config.nope.is_some() { "feed_forward" } else { "mlp" };
        let rest = match config.experts.filter(|experts| experts.is_in(index)) {
            Some(experts) => Rest::Experts(Experts::build(source, &name(part), hidden, experts)?),
            None => {
                let size = (hidden, config.intermediate);
                let mlp = Mlp::build(source, &name(part), size, config.mlp_bias)?;
                Rest::Mlp(Mlp { activation: config.activation, ..mlp })
            }
        };
        let mut norm = |part: &str| norm(config, source, &name(part), hidden);
        let attention_norm = norm("input_layernorm.weight")?;
        let mlp_norm = norm(&format!("{}.weight", config.family.mlp_norm()))?;
        let mut output_norms = None;
        if config.family.norms_outputs() {
            output_norms = Some([norm("post_attention_layernorm.weight")?, norm("post_feedforward_layernorm.weight")?]);
        }
        let factor = match config.family {
            Family::Gemma4 => source.vector(&name("layer_scalar"), 1)?[0],
            _ => 1.0,
        };
        Ok(Self { attention_norm, projections, sinks, o, mlp_norm, rest, output_norms, factor })
    }
}

/// Splits `[tokens, heads, 2, head_dim]` into the heads of q and their gates.
fn split_gates(both: &[f32], head_dim: usize, q: &mut Vec<f32>, gates: &mut Vec<f32>) {
    q.clear();
    gates.clear();
    for (i, head) in both.chunks_exact(head_dim).enumerate() {
        if i % 2 == 0 { &mut *q } else { &mut *gates }.extend_from_slice(head);
    }
}

/// Returns the weight of a norm. Some families' checkpoints store its difference from 1.
fn norm(config: &ModelConfig, source: &mut dyn Source, name: &str, len: usize) -> Result<Vec<f32>> {
    let mut weight = source.vector(name, len)?;
    if config.family.centres_norms() {
        weight.iter_mut().for_each(|w| *w += 1.0);
    }
    Ok(weight)
}

/// Builds a layer's projections to the heads of q, k and v.
fn heads(
    config: &ModelConfig,
    source: &mut dyn Source,
    index: usize,
    name: impl Fn(&str) -> String,
) -> Result<Projections> {
    let ModelConfig { hidden, q_heads, attention_bias: bias, .. } = *config;
    let (kv_heads, head_dim) = config.heads_of(index);
    let (q_width, kv_width) = (q_heads * head_dim, kv_heads * head_dim);
    let q_width = if config.family.gates_attention() { 2 * q_width } else { q_width };
    let q = Linear::build(source, &name("self_attn.q_proj"), q_width, hidden, bias)?;
    let k = Linear::build(source, &name("self_attn.k_proj"), kv_width, hidden, bias)?;
    let has_v = !config.k_is_v || config.windows[index].is_some();
    let v = has_v.then(|| Linear::build(source, &name("self_attn.v_proj"), kv_width, hidden, bias)).transpose()?;
    let norms = config.family.norms_heads();
    let mut head_norm = |part: &str| norms.then(|| norm(config, source, &name(part), head_dim)).transpose();
    let q_norm = head_norm("self_attn.q_norm.weight")?;
    let k_norm = head_norm("self_attn.k_norm.weight")?;
    Ok(Projections::Heads { q, k, v, q_norm, k_norm })
}
