//! The specification of the small kernels (`ptx/src/*.cu`): the same computation on the CPU. Rows are bf16, sums f32.
//!
//! Other files specify `sample` and `sample_filter` (`sample.rs`), `sample_shaped` (`shaping.rs` and `sample.rs`), and
//! `fill` (`Random` of `source.rs`).

use half::bf16;

use kvarena_host::gpu::kernels::{ProductMode, Route};
use kvarena_host::ops;

/// Converts a row to f32.
pub fn wide(row: &[bf16]) -> Vec<f32> {
    row.iter().map(|x| x.to_f32()).collect()
}

/// Converts a row to bf16.
pub fn narrow(row: &[f32]) -> Vec<bf16> {
    row.iter().map(|&x| bf16::from_f32(x)).collect()
}

/// Returns `x / rms(x) * weight`.
pub fn rms_norm(x: &[bf16], weight: &[bf16], eps: f32) -> Vec<bf16> {
    let scale = rms_scale(&wide(x), eps);
    narrow(&x.iter().zip(weight).map(|(x, w)| x.to_f32() * scale * w.to_f32()).collect::<Vec<_>>())
}

fn rms_scale(x: &[f32], eps: f32) -> f32 {
    let mean = x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32;
    1.0 / (mean + eps).sqrt()
}

/// Returns an activation of `ops`, such as `silu(gate) * up`.
pub fn activate(gate_up: &[bf16], activation: fn(&mut [f32], &[f32], usize)) -> Vec<bf16> {
    let (gate, up) = gate_up.split_at(gate_up.len() / 2);
    let mut gate = wide(gate);
    activation(&mut gate, &wide(up), up.len());
    narrow(&gate)
}

/// Returns `y + bias`.
pub fn add_bias(y: &[bf16], bias: &[bf16]) -> Vec<bf16> {
    narrow(&y.iter().zip(bias).map(|(y, b)| y.to_f32() + b.to_f32()).collect::<Vec<_>>())
}

/// Returns `x + y / rms(y) * weight`.
pub fn norm_add(x: &[bf16], y: &[bf16], weight: &[bf16], eps: f32) -> Vec<bf16> {
    let scale = rms_scale(&wide(y), eps);
    let normed = y.iter().zip(weight).map(|(y, w)| y.to_f32() * scale * w.to_f32());
    narrow(&x.iter().zip(normed).map(|(x, y)| x.to_f32() + y).collect::<Vec<_>>())
}

/// Returns the experts of a token and their weights, by decreasing weight.
pub fn route(x: &[bf16], weight: &[bf16], bias: &[bf16], per_token: usize) -> Vec<Route> {
    let x = wide(x);
    let dot = |row: &[bf16]| row.iter().zip(&x).map(|(w, x)| w.to_f32() * x).sum::<f32>();
    let rows = weight.chunks_exact(x.len()).zip(bias);
    let mut logits: Vec<_> = (0..).zip(rows.map(|(row, b)| dot(row) + b.to_f32())).collect();
    logits.sort_by(|a: &(u32, f32), b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    logits.truncate(per_token);
    let weights: Vec<f32> = logits.iter().map(|one| (one.1 - logits[0].1).exp()).collect();
    let sum: f32 = weights.iter().sum();
    let chosen = logits.iter().zip(weights);
    chosen.map(|(&(expert, _), weight)| Route { expert, weight: weight / sum }).collect()
}

/// Returns the activation of a token's expert; `weight` is `[ins, outs, gate and up]`, `bias` `[outs, gate and up]`.
pub fn expert_up(x: &[bf16], weight: &[bf16], bias: &[bf16]) -> Vec<bf16> {
    let both = times(x, weight, bias);
    let mut gate: Vec<f32> = both.iter().step_by(2).copied().collect();
    let up: Vec<f32> = both.iter().skip(1).step_by(2).copied().collect();
    ops::clamped_swiglu(&mut gate, &up, up.len());
    narrow(&gate)
}

/// Returns the output of a token's expert; `weight` is `[ins, outs]`.
pub fn expert_down(x: &[bf16], weight: &[bf16], bias: &[bf16]) -> Vec<f32> {
    times(x, weight, bias)
}

/// Multiplies a row by a matrix `[ins, outs]` and adds a bias.
fn times(x: &[bf16], weight: &[bf16], bias: &[bf16]) -> Vec<f32> {
    let mut y = wide(bias);
    for (x, row) in x.iter().zip(weight.chunks_exact(bias.len())) {
        y.iter_mut().zip(row).for_each(|(y, w)| *y += x.to_f32() * w.to_f32());
    }
    y
}

/// Sums the parts in the order of ranks, and adds the sum to `x`.
pub fn sum_ranks(x: &[bf16], ranks: &[&[bf16]]) -> Vec<bf16> {
    let one = |i: usize| {
        let parts = ranks.iter().map(|part| part[i].to_f32());
        x[i].to_f32() + parts.reduce(|sum, part| sum + part).unwrap_or_default()
    };
    narrow(&(0..x.len()).map(one).collect::<Vec<_>>())
}

fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

/// Multiplies a row of x with a matrix, which has as many rows as `y` has elements (twice as many for gate and up). If
/// `norm` is given, x is normed first. `mode` selects the operation after the product.
pub fn skinny(x: &[bf16], weight: &[bf16], norm: Option<(&[bf16], f32)>, mode: ProductMode, y: &mut [bf16]) {
    let (mut rows, mut scale) = (wide(x), 1.0);
    if let Some((weight, eps)) = norm {
        scale = rms_scale(&rows, eps);
        let weighed = rows.iter().zip(weight).map(|(x, w)| bf16::from_f32(x * w.to_f32()).to_f32());
        rows = weighed.collect();
    }
    let outs = y.len();
    let dot = |out: usize| {
        let row = &weight[out * x.len()..][..x.len()];
        scale * row.iter().zip(&rows).map(|(w, x)| w.to_f32() * x).sum::<f32>()
    };
    for (out, y) in y.iter_mut().enumerate() {
        let value = match mode {
            ProductMode::Set => dot(out),
            ProductMode::Add => y.to_f32() + dot(out),
            ProductMode::Silu => silu(dot(out)) * dot(outs + out),
        };
        *y = bf16::from_f32(value);
    }
}
