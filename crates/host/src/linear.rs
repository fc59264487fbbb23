//! Projections, and the MLP of three projections.

use crate::error::Result;
use crate::matrix::Matrix;
use crate::ops;
use crate::source::Source;

/// A projection.
pub struct Linear {
    /// `[out, in]`
    pub weight: Matrix,
    /// `[out]`
    pub bias: Option<Vec<f32>>,
}

impl Linear {
    /// Builds a projection from `NAME.weight`, `[rows, cols]`, and `NAME.bias` if `bias` is set.
    pub fn build(source: &mut dyn Source, name: &str, rows: usize, cols: usize, bias: bool) -> Result<Self> {
        let weight = source.matrix(&format!("{name}.weight"), rows, cols)?;
        let bias = bias.then(|| source.vector(&format!("{name}.bias"), rows)).transpose()?;
        Ok(Self { weight, bias })
    }

    /// Computes `out = weight * x + bias` for rows of x.
    pub fn apply(&self, x: &[f32], out: &mut Vec<f32>, transposed: &mut Vec<f32>) {
        resize(out, x.len() / self.weight.cols() * self.weight.rows());
        self.weight.multiply(x, out, transposed);
        ops::add_bias(out, self.bias.as_deref());
    }
}

/// The activation of an MLP's gate and up projections.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Activation {
    /// `silu(gate) * up`
    Silu,
    /// gpt-oss: clamps gate and up, then `gate * sigmoid(1.702 gate) * (up + 1)`.
    Clamped,
    /// `gelu(gate) * up`, GeLU by its tanh approximation.
    GeluTanh,
}

/// An MLP: `down(activation(gate, up))`.
pub struct Mlp {
    /// `[intermediate, hidden]`
    pub gate: Linear,
    /// `[intermediate, hidden]`
    pub up: Linear,
    /// `[hidden, intermediate]`
    pub down: Linear,
    /// Activation of gate and up.
    pub activation: Activation,
}

/// Buffers of an MLP, reused.
#[derive(Default)]
pub struct MlpWork {
    /// `[tokens, intermediate]`
    pub gate: Vec<f32>,
    /// `[tokens, intermediate]`
    pub up: Vec<f32>,
}

impl Mlp {
    /// Builds an MLP with SiLU from `NAME.gate_proj`, `NAME.up_proj` and `NAME.down_proj`.
    pub fn build(
        source: &mut dyn Source,
        name: &str,
        (hidden, intermediate): (usize, usize),
        bias: bool,
    ) -> Result<Self> {
        let mut projection =
            |part: &str, rows, cols| Linear::build(source, &format!("{name}.{part}_proj"), rows, cols, bias);
        Ok(Self {
            gate: projection("gate", intermediate, hidden)?,
            up: projection("up", intermediate, hidden)?,
            down: projection("down", hidden, intermediate)?,
            activation: Activation::Silu,
        })
    }

    /// Replaces gate in `work` by the activation of gate and up, which is the input of `down`.
    pub fn activate(&self, work: &mut MlpWork) {
        let width = self.gate.weight.rows();
        match self.activation {
            Activation::Silu => ops::silu_times(&mut work.gate, &work.up, width),
            Activation::Clamped => ops::clamped_swiglu(&mut work.gate, &work.up, width),
            Activation::GeluTanh => ops::gelu_times(&mut work.gate, &work.up, width),
        }
    }

    /// Computes the whole MLP.
    pub fn apply(&self, x: &[f32], out: &mut Vec<f32>, work: &mut MlpWork, transposed: &mut Vec<f32>) {
        self.gate.apply(x, &mut work.gate, transposed);
        self.up.apply(x, &mut work.up, transposed);
        self.activate(work);
        self.down.apply(&work.gate, out, transposed);
    }
}

/// Sets a buffer's length. New elements are 0; the others keep their values.
pub fn resize(buffer: &mut Vec<f32>, len: usize) {
    buffer.resize(len, 0.0);
}
