//! Attention by its definition, in float64 over contiguous K and V.

use std::ops::RangeInclusive;

use crate::backend::Attend;

/// The result of one query row.
#[derive(Clone, Debug)]
pub struct Exact {
    /// The output, `[value_dim]`.
    pub out: Vec<f64>,
    /// `sum_j p_j |v_j|`, `[value_dim]`: the scale of errors of the output.
    pub mass: Vec<f64>,
    /// `sum_j |v_j|` over the tokens with weights below 2^-14, divided by the sum of all weights, `[value_dim]`. The
    /// greatest weight of a token is 1 here. It is the scale of errors of f16 weights, which are multiples of 2^-24.
    pub faint: Vec<f64>,
    /// The log-sum-exp.
    pub lse: f64,
    /// `max_j |scale| sum_i |q_i k_i|`: the scale of errors of the logits.
    pub logit_mass: f64,
}

/// Returns attention of one query row at `position` over one head of `k`, `[positions, kv_heads, head_dim]`, and of
/// `v`, whose heads may be shorter. `heads` contains the number of kv heads and the index of the head. A sink of minus
/// infinity means no sink.
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

/// Returns the positions that a query at `position` sees.
pub fn sees(attend: &Attend, position: usize) -> RangeInclusive<usize> {
    let first = (position + 1).saturating_sub(attend.window.map_or(usize::MAX, |w| w as usize));
    let of_chunk = attend.chunk.map_or(0, |size| position / size as usize * size as usize);
    first.max(of_chunk)..=position
}

/// Returns [`attention`] to the given positions. Window and chunk have no effect. Without positions, the output is 0.
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
        let (sum, mass) = dot(q, &k[start(j, head_dim)..][..head_dim]);
        logit_mass = logit_mass.max(mass * scale.abs());
        logits.push(match attend.soft_cap.map(f64::from) {
            Some(cap) => cap * (scale * sum / cap).tanh(),
            None => scale * sum,
        });
    }
    let sink = f64::from(sink);
    let greatest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let max = greatest.max(sink);
    let sum: f64 = logits.iter().chain([&sink]).map(|x| (x - max).exp()).sum();
    let mut sums = [const { Vec::new() }; 3];
    sums.iter_mut().for_each(|sums| sums.resize(value_dim, 0.0));
    let [mut out, mut mass, mut faint] = sums;
    for (j, logit) in seen.zip(&logits) {
        let weight = (logit - max).exp() / sum;
        let values = &v[start(j, value_dim)..][..value_dim];
        for ((out, mass), &x) in out.iter_mut().zip(&mut mass).zip(values) {
            let part = weight * x.into();
            *out += part;
            *mass += part.abs();
        }
        if (logit - greatest).exp() < 2_f64.powi(-14) {
            let weight = (greatest - max).exp() / sum;
            faint.iter_mut().zip(values).for_each(|(faint, &x)| *faint += x.into().abs() * weight);
        }
    }
    Exact { out, mass, faint, lse: max + sum.ln(), logit_mass }
}

/// Returns the sum of the products of two rows, and the sum of their magnitudes. It adds to four sums in turn, so that
/// an addition does not wait for the one before it.
fn dot<T: Copy + Into<f64>>(q: &[f32], k: &[T]) -> (f64, f64) {
    let (mut sums, mut masses) = ([0.0; 4], [0.0; 4]);
    let (q_fours, q_rest) = q.as_chunks::<4>();
    let (k_fours, k_rest) = k.as_chunks::<4>();
    let mut add = |i: usize, q: f32, k: T| {
        let product = f64::from(q) * k.into();
        sums[i] += product;
        masses[i] += f64::abs(product);
    };
    for (q, k) in q_fours.iter().zip(k_fours) {
        (0..4).for_each(|i| add(i, q[i], k[i]));
    }
    q_rest.iter().zip(k_rest).for_each(|(&q, &k)| add(0, q, k));
    (sums.iter().sum(), masses.iter().sum())
}
