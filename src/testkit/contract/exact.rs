//! Attention as it is defined, in float64 over contiguous K and V.

use crate::backend::Attend;

/// What one query row gives.
#[derive(Clone, Debug)]
pub struct Exact {
    /// The output, `[head_dim]`.
    pub out: Vec<f64>,
    /// `sum_j p_j |v_j|`, `[head_dim]`: what errors of the output are measured by.
    pub mass: Vec<f64>,
    /// The log-sum-exp.
    pub lse: f64,
    /// The largest `scale sum_i |q_i k_i|`: what errors of the logits are measured by.
    pub logit_mass: f64,
}

/// One query row at `position` over `k` and `v`, `[positions, kv_heads, head_dim]`, of which it reads `kv_head`.
pub fn attention(
    attend: &Attend,
    q: &[f32],
    k: &[f32],
    v: &[f32],
    (kv_heads, kv_head): (usize, usize),
    position: usize,
) -> Exact {
    let head_dim = q.len();
    let row = |x: &[f32], j: usize| -> Vec<f64> {
        let start = (j * kv_heads + kv_head) * head_dim;
        x[start..start + head_dim].iter().map(|&x| f64::from(x)).collect()
    };
    let first = (position + 1).saturating_sub(attend.window.map_or(usize::MAX, |w| w as usize));
    let scale = f64::from(attend.scale);
    let mut logit_mass = 0.0_f64;
    let mut logits = Vec::new();
    for j in first..=position {
        let products = row(k, j).into_iter().zip(q).map(|(k, &q)| k * f64::from(q));
        let (sum, mass) = products.fold((0.0, 0.0), |(sum, mass), x| (sum + x, mass + x.abs()));
        logit_mass = logit_mass.max(mass * scale.abs());
        logits.push(match attend.soft_cap.map(f64::from) {
            Some(cap) => cap * (scale * sum / cap).tanh(),
            None => scale * sum,
        });
    }
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.iter().map(|x| (x - max).exp()).sum();
    let (mut out, mut mass) = (vec![0.0; head_dim], vec![0.0; head_dim]);
    for (j, logit) in logits.iter().enumerate() {
        let weight = (logit - max).exp() / sum;
        for (i, x) in row(v, first + j).into_iter().enumerate() {
            out[i] += weight * x;
            mass[i] += weight * x.abs();
        }
    }
    Exact { out, mass, lse: max + sum.ln(), logit_mass }
}
