//! The transformer's operations other than matrix products and attention. Norms, rotations and activations divide their
//! rows among the cores.

use rayon::prelude::*;

use crate::rope::Rope;

/// Minimum number of elements of a core's share. With fewer, waking the core costs more than it saves.
const PARALLEL_MIN: usize = 1 << 15;

/// Calls `each` with every row of `x`, in parallel if that is faster.
fn for_rows(x: &mut [f32], width: usize, each: impl Fn(usize, &mut [f32]) + Send + Sync) {
    let rows_min = (PARALLEL_MIN / width).max(1);
    let rows = x.par_chunks_mut(width).enumerate().with_min_len(rows_min);
    rows.for_each(|(i, row)| each(i, row));
}

/// Computes `out[t] = x[t] / rms(x[t]) * weight`, for rows of `weight`'s length.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let width = weight.len();
    for_rows(out, width, |i, out| {
        let x = &x[i * width..(i + 1) * width];
        let scale = rms_scale(x, eps);
        for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
            *out = x * scale * w;
        }
    });
}

/// Computes `x[t] = x[t] / rms(x[t]) * weight * silu(gate[t])`, for rows of `weight`'s length.
pub fn gated_norm(x: &mut [f32], gate: &[f32], weight: &[f32], eps: f32) {
    let width = weight.len();
    for_rows(x, width, |i, x| {
        let scale = rms_scale(x, eps);
        for ((x, w), gate) in x.iter_mut().zip(weight).zip(&gate[i * width..]) {
            *x *= scale * w * gate * sigmoid(*gate);
        }
    });
}

fn rms_scale(x: &[f32], eps: f32) -> f32 {
    let mut lanes = [0.0_f32; 16];
    let chunks = x.chunks_exact(16);
    let tail: f32 = chunks.remainder().iter().map(|x| x * x).sum();
    for chunk in chunks {
        lanes.iter_mut().zip(chunk).for_each(|(lane, x)| *lane += x * x);
    }
    let mean = (lanes.iter().sum::<f32>() + tail) / x.len() as f32;
    1.0 / (mean + eps).sqrt()
}

/// Cosines and sines of a step's positions times the rope's amplitude, `[tokens, rotating pairs]` each.
#[derive(Default)]
pub struct Angles {
    /// Rotating pairs of a head.
    pairs: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Angles {
    /// Computes the angles of these positions.
    pub fn set(&mut self, rope: &Rope, positions: &[u32]) {
        self.pairs = rope.frequencies.len();
        self.cos.clear();
        self.sin.clear();
        for &position in positions {
            for f in &rope.frequencies {
                let (sin, cos) = (position as f32 * f).sin_cos();
                self.cos.push(cos * rope.amplitude);
                self.sin.push(sin * rope.amplitude);
            }
        }
    }

    /// Rotates the pairs of elements of a head of token `t`; see [`rotate_ends`].
    fn rotate(&self, t: usize, head: &mut [f32], interleaved: bool) {
        let half = head.len() / 2;
        let at = t * half..(t + 1) * half;
        let angles = self.cos[at.clone()].iter().zip(&self.sin[at]);
        let turn = |a: &mut f32, b: &mut f32, (cos, sin): (&f32, &f32)| {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        };
        if interleaved {
            head.as_chunks_mut().0.iter_mut().zip(angles).for_each(|([a, b], angle)| turn(a, b, angle));
        } else {
            let (low, high) = head.split_at_mut(half);
            low.iter_mut().zip(high).zip(angles).for_each(|((a, b), angle)| turn(a, b, angle));
        }
    }
}

/// Rotates the first elements of each head, up to the number of elements that rotate. If `norm` is given, each head
/// first gets an RMS norm with its weight and epsilon. `x` is `[tokens, heads, head_dim]`.
pub fn norm_and_rotate(x: &mut [f32], heads: usize, head_dim: usize, norm: Option<(&[f32], f32)>, angles: &Angles) {
    for_rows(x, heads * head_dim, |t, row| {
        for head in row.chunks_exact_mut(head_dim) {
            if let Some((weight, eps)) = norm {
                let scale = rms_scale(head, eps);
                head.iter_mut().zip(weight).for_each(|(x, w)| *x *= scale * w);
            }
            angles.rotate(t, &mut head[..2 * angles.pairs], false);
        }
    });
}

/// Divides each head by the root of its mean square.
pub fn norm_heads(x: &mut [f32], head_dim: usize, eps: f32) {
    for_rows(x, head_dim, |_, head| {
        let scale = rms_scale(head, eps);
        head.iter_mut().for_each(|x| *x *= scale);
    });
}

/// Rotates the last `rope` elements of each head. `x` is `[tokens, heads, head]`, with sizes `(heads, head)`. If
/// `interleaved`, the elements of a pair are adjacent; otherwise they are `rope / 2` elements apart.
pub fn rotate_ends(x: &mut [f32], (heads, head): (usize, usize), rope: usize, interleaved: bool, angles: &Angles) {
    for_rows(x, heads * head, |t, row| {
        row.chunks_exact_mut(head).for_each(|x| angles.rotate(t, &mut x[head - rope..], interleaved));
    });
}

/// Clamping limit of gpt-oss.
pub const SWIGLU_LIMIT: f32 = 7.0;

/// Computes `gate = f(gate, up)` for each element.
fn activate(gate: &mut [f32], up: &[f32], width: usize, f: impl Fn(f32, f32) -> f32 + Send + Sync) {
    for_rows(gate, width, |i, gate| {
        gate.iter_mut().zip(&up[i * width..]).for_each(|(gate, up)| *gate = f(*gate, *up));
    });
}

/// Clamps gate from above and up from both sides, and then computes `gate = gate * sigmoid(1.702 gate) * (up + 1)`.
pub fn clamped_swiglu(gate: &mut [f32], up: &[f32], width: usize) {
    activate(gate, up, width, |gate, up| {
        let (x, y) = (gate.min(SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT));
        x / (1.0 + (-1.702 * x).exp()) * (y + 1.0)
    });
}

/// Computes `gate = silu(gate) * up`.
pub fn silu_times(gate: &mut [f32], up: &[f32], width: usize) {
    activate(gate, up, width, |gate, up| gate / (1.0 + (-gate).exp()) * up);
}

/// Computes `gate = gelu(gate) * up`, with GeLU in its tanh approximation.
pub fn gelu_times(gate: &mut [f32], up: &[f32], width: usize) {
    const FACTOR: f32 = std::f32::consts::FRAC_2_SQRT_PI * std::f32::consts::FRAC_1_SQRT_2;
    activate(gate, up, width, |x, up| 0.5 * x * (1.0 + (FACTOR * (x + 0.044715 * x * x * x)).tanh()) * up);
}

/// Returns `1 / (1 + exp(-x))`.
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// Computes `x *= sigmoid(gate)`.
pub fn sigmoid_times(x: &mut [f32], gate: &[f32]) {
    x.iter_mut().zip(gate).for_each(|(x, gate)| *x *= sigmoid(*gate));
}

/// Computes `x += y`.
pub fn add(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

/// Adds a bias to every row.
pub fn add_bias(x: &mut [f32], bias: Option<&[f32]>) {
    if let Some(bias) = bias {
        x.chunks_exact_mut(bias.len()).for_each(|row| add(row, bias));
    }
}
