//! The weights of one layer, and its computation before and after the state.

use super::{DeltaConfig, DeltaStep};
use crate::error::Result;
use crate::linear::{Linear, resize};
use crate::ops;
use crate::source::Source;

/// Weights of one layer, except for the output projection.
pub struct Delta {
    pub(super) config: DeltaConfig,
    qkv: Linear,
    z: Linear,
    a: Linear,
    b: Linear,
    /// `[kernel, channels]`
    pub(super) conv: Vec<f32>,
    /// `-exp(A_log)` of each value head.
    rate: Vec<f32>,
    dt_bias: Vec<f32>,
    norm: Vec<f32>,
}

/// Activations of a pass, reused.
#[derive(Default)]
pub struct DeltaWork {
    /// `[tokens, channels]`: q, k and v before the convolution.
    pub(super) qkv: Vec<f32>,
    /// `[tokens, value_heads, value_dim]`
    z: Vec<f32>,
    /// `[tokens, value_heads]`: factors of the state.
    pub(super) decay: Vec<f32>,
    /// `[tokens, value_heads]`: strengths of the updates.
    pub(super) beta: Vec<f32>,
    /// `[kernel - 1 + tokens of a sequence, channels]`: inputs of the convolution.
    pub(super) window: Vec<f32>,
    /// `[tokens of a sequence, channels]`: outputs of the convolution.
    pub(super) mixed: Vec<f32>,
    /// `[value_heads, tokens of a sequence + 1, value_dim]`: outputs, and a row for the current update.
    pub(super) by_head: Vec<f32>,
}

impl Delta {
    /// Builds a layer. `name` is the name of the layer's `linear_attn` in the checkpoint.
    pub fn build(source: &mut dyn Source, name: &str, hidden: usize, config: &DeltaConfig) -> Result<Self> {
        let (channels, kernel, heads) = (config.channels(), config.kernel, config.value_heads);
        let part = |part: &str| format!("{name}.{part}");
        let mut linear =
            |part: &str, rows| Linear::build(source, &format!("{name}.in_proj_{part}"), rows, hidden, false);
        let [qkv, z, a, b] =
            [linear("qkv", channels)?, linear("z", config.value_width())?, linear("a", heads)?, linear("b", heads)?];
        let by_channel = source.numbers(&part("conv1d.weight"), &[channels, 1, kernel])?.to_f32();
        let conv = (0..kernel).flat_map(|tap| by_channel.iter().skip(tap).step_by(kernel)).copied().collect();
        let rate = source.vector(&part("A_log"), heads)?.into_iter().map(|x| -x.exp()).collect();
        let dt_bias = source.vector(&part("dt_bias"), heads)?;
        let norm = source.vector(&part("norm.weight"), config.value_dim)?;
        Ok(Self { config: config.clone(), qkv, z, a, b, conv, rate, dt_bias, norm })
    }

    /// Projects the normed x to the inputs of the state.
    pub fn project(&self, x: &[f32], work: &mut DeltaWork, transposed: &mut Vec<f32>) {
        self.qkv.apply(x, &mut work.qkv, transposed);
        self.z.apply(x, &mut work.z, transposed);
        self.a.apply(x, &mut work.decay, transposed);
        self.b.apply(x, &mut work.beta, transposed);
        let heads = self.config.value_heads;
        for row in work.decay.chunks_exact_mut(heads) {
            for ((x, rate), bias) in row.iter_mut().zip(&self.rate).zip(&self.dt_bias) {
                *x = (rate * softplus(*x + bias)).exp();
            }
        }
        work.beta.iter_mut().for_each(|x| *x = ops::sigmoid(*x));
    }

    /// Returns the step that updates the states of all sequences and writes `out`, `[tokens, value_heads, value_dim]`.
    pub fn step<'a>(&'a self, work: &'a mut DeltaWork, out: &'a mut Vec<f32>) -> DeltaStep<'a> {
        resize(out, work.z.len());
        DeltaStep::new(self, work, out)
    }

    /// Norms each head of the states' output, and multiplies it by `silu(z)`.
    pub fn gate(&self, out: &mut [f32], work: &DeltaWork, eps: f32) {
        ops::gated_norm(out, &work.z, &self.norm, eps);
    }
}

/// Returns `ln(1 + exp(x))`.
fn softplus(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}
