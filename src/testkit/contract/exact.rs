//! Attention as it is defined, in float64 over contiguous K and V.

use std::ops::RangeInclusive;

use crate::backend::Attend;

/// What one query row gives.
#[derive(Clone, Debug)]
pub struct Exact {
    /// The output, `[value_dim]`.
    pub out: Vec<f64>,
    /// `sum_j p_j |v_j|`, `[value_dim]`: what errors of the output are measured by.
    pub mass: Vec<f64>,
    /// The log-sum-exp.
    pub lse: f64,
    /// The largest `scale sum_i |q_i k_i|`: what errors of the logits are measured by.
    pub logit_mass: f64,
}

/// One query row at `position` over `k`, `[positions, kv_heads, head_dim]`, and `v`, whose heads may be shorter, of
/// which it reads `kv_head`; its head has a sink, or minus infinity.
pub fn attention<T: Copy + Into<f64>>(
    attend: &Attend,
    q: &[f32],
    k: &[T],
    v: &[T],
    heads: (usize, usize),
    position: usize,
    sink: f32,
) -> Exact {
    attention_to(attend, q, k, v, heads, sees(attend, position), sink)
}

/// The positions that a query at `position` sees.
pub fn sees(attend: &Attend, position: usize) -> RangeInclusive<usize> {
    let first = (position + 1).saturating_sub(attend.window.map_or(usize::MAX, |w| w as usize));
    first..=position
}

/// [`attention`] to just these positions, whatever the window; with none of them the output is 0.
pub fn attention_to<T: Copy + Into<f64>>(
    attend: &Attend,
    q: &[f32],
    k: &[T],
    v: &[T],
    (kv_heads, kv_head): (usize, usize),
    seen: impl Iterator<Item = usize> + Clone,
    sink: f32,
) -> Exact {
    let (head_dim, value_dim) = (q.len(), q.len() * v.len() / k.len());
    let start = |j: usize, dim: usize| (j * kv_heads + kv_head) * dim;
    let scale = f64::from(attend.scale);
    let mut logit_mass = 0.0_f64;
    let mut logits = Vec::new();
    for j in seen.clone() {
        let (mut sum, mut mass) = (0.0, 0.0);
        for (&q, &k) in q.iter().zip(&k[start(j, head_dim)..]) {
            let product = f64::from(q) * k.into();
            sum += product;
            mass += product.abs();
        }
        logit_mass = logit_mass.max(mass * scale.abs());
        logits.push(match attend.soft_cap.map(f64::from) {
            Some(cap) => cap * (scale * sum / cap).tanh(),
            None => scale * sum,
        });
    }
    let sink = f64::from(sink);
    let max = logits.iter().copied().fold(sink, f64::max);
    let sum: f64 = logits.iter().chain([&sink]).map(|x| (x - max).exp()).sum();
    let (mut out, mut mass) = (vec![0.0; value_dim], vec![0.0; value_dim]);
    for (j, logit) in seen.zip(&logits) {
        let weight = (logit - max).exp() / sum;
        for ((out, mass), &x) in out.iter_mut().zip(&mut mass).zip(&v[start(j, value_dim)..]) {
            let part = weight * x.into();
            *out += part;
            *mass += part.abs();
        }
    }
    Exact { out, mass, lse: max + sum.ln(), logit_mass }
}
