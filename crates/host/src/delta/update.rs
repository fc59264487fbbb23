//! The state of a sequence over its new tokens: a causal convolution of q, k and v, and a recurrence for each value
//! head.
//!
//! With the state `S`, `[key_dim, value_dim]`, and unit vectors q and k, one token computes
//! `S = decay S; S += k (beta (v - S^T k))^T; out = S^T q / sqrt(key_dim)`.

use std::ops::Range;

use half::bf16;
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;

use super::layer::{Delta, DeltaWork};
use super::{ConvDtype, StateShape};
use crate::linear::resize;
use crate::ops;

/// Added to the square of a head's length.
const EPS: f32 = 1e-6;
/// Minimum number of elements of the states, times tokens, of a core's share.
const PARALLEL_MIN: usize = 1 << 15;

/// The places of one layer's state of a sequence: [`StateShape::bytes`] or more, aligned to 4 bytes.
#[derive(Debug)]
pub enum State<'a> {
    /// The update reads and writes one place.
    InPlace(&'a mut [u8]),
    /// The update reads the first place, which a new sequence fills with zeros, and writes the second one.
    From(&'a [u8], &'a mut [u8]),
}

/// One layer's computation for the new tokens of all sequences. The owner of the states calls [`DeltaStep::update`]
/// once for each sequence.
pub struct DeltaStep<'a> {
    layer: &'a Delta,
    work: &'a mut DeltaWork,
    out: &'a mut [f32],
}

impl<'a> DeltaStep<'a> {
    pub(super) fn new(layer: &'a Delta, work: &'a mut DeltaWork, out: &'a mut [f32]) -> Self {
        Self { layer, work, out }
    }

    /// Returns the number of tokens of all sequences.
    pub fn tokens(&self) -> usize {
        self.out.len() / self.layer.config.value_width()
    }

    /// Returns the shape of the states, with this type of the convolution's part.
    pub fn shape(&self, conv: ConvDtype) -> StateShape {
        self.layer.config.state(conv)
    }

    /// Computes the tokens of one sequence, given by their range in the step, in order of their positions.
    ///
    /// # Panics
    /// If a place is too small or not aligned, the places have unequal lengths, or the range exceeds the step.
    pub fn update(&mut self, tokens: Range<usize>, state: State<'_>, conv: ConvDtype) {
        let to = match state {
            State::InPlace(place) => place,
            State::From(from, to) => {
                to.copy_from_slice(from);
                to
            }
        };
        let shape = self.shape(conv);
        let (recurrent, inputs) = to[..shape.bytes()].split_at_mut(shape.recurrent_bytes);
        self.convolve(tokens.clone(), inputs, conv);
        self.norm_keys();
        self.recur(tokens, bytemuck::cast_slice_mut(recurrent));
    }

    /// Writes `work.mixed` and replaces the stored inputs of the convolution by the latest ones.
    fn convolve(&mut self, tokens: Range<usize>, stored: &mut [u8], conv: ConvDtype) {
        let (channels, kernel) = (self.layer.config.channels(), self.layer.config.kernel);
        let DeltaWork { qkv, window, mixed, .. } = &mut *self.work;
        let old = (kernel - 1) * channels;
        resize(window, old);
        match conv {
            ConvDtype::F32 => window.copy_from_slice(bytemuck::cast_slice(stored)),
            ConvDtype::Bf16 => bytemuck::cast_slice::<_, bf16>(stored).convert_to_f32_slice(window),
        }
        window.extend_from_slice(&qkv[tokens.start * channels..tokens.end * channels]);
        resize(mixed, window.len() - old);
        for (t, out) in mixed.chunks_exact_mut(channels).enumerate() {
            out.fill(0.0);
            for (x, weight) in window[t * channels..].chunks_exact(channels).zip(self.layer.conv.chunks_exact(channels))
            {
                out.iter_mut().zip(x).zip(weight).for_each(|((out, x), weight)| *out += x * weight);
            }
            out.iter_mut().for_each(|x| *x *= ops::sigmoid(*x));
        }
        let latest = &window[window.len() - old..];
        match conv {
            ConvDtype::F32 => bytemuck::cast_slice_mut(stored).copy_from_slice(latest),
            ConvDtype::Bf16 => bytemuck::cast_slice_mut::<_, bf16>(stored).convert_from_f32_slice(latest),
        }
    }

    /// Divides each head of q and k in `work.mixed` by its length.
    fn norm_keys(&mut self) {
        let config = &self.layer.config;
        let keys = 2 * config.key_heads * config.key_dim;
        for row in self.work.mixed.chunks_exact_mut(config.channels()) {
            for head in row[..keys].chunks_exact_mut(config.key_dim) {
                let square: f32 = head.iter().map(|x| x * x).sum();
                let factor = 1.0 / (square + EPS).sqrt();
                head.iter_mut().for_each(|x| *x *= factor);
            }
        }
    }

    /// Updates the recurrent part with `work.mixed`, and writes the output of the tokens.
    fn recur(&mut self, tokens: Range<usize>, states: &mut [f32]) {
        let Self { layer, work, out } = self;
        let config = &layer.config;
        let (dim, width) = (config.value_dim, config.value_width());
        let (count, head_len) = (tokens.len(), config.key_dim * dim);
        resize(&mut work.by_head, (count + 1) * width);
        let DeltaWork { mixed, decay, beta, by_head, .. } = &mut **work;
        let heads_min = PARALLEL_MIN.div_ceil(head_len * count.max(1));
        let heads = states.par_chunks_mut(head_len).zip(by_head.par_chunks_mut((count + 1) * dim)).enumerate();
        heads.with_min_len(heads_min).for_each(|(head, (state, out))| {
            let (change, out) = out.split_at_mut(dim);
            let key = head / (config.value_heads / config.key_heads) * config.key_dim;
            let keys = config.key_heads * config.key_dim;
            let rows = mixed.chunks_exact(config.channels()).zip(out.chunks_exact_mut(dim));
            for (t, (row, out)) in (tokens.start..).zip(rows) {
                let inputs = Inputs {
                    q: &row[key..][..config.key_dim],
                    k: &row[keys + key..][..config.key_dim],
                    v: &row[2 * keys + head * dim..][..dim],
                    decay: decay[t * config.value_heads + head],
                    beta: beta[t * config.value_heads + head],
                };
                pulp::Arch::new().dispatch(
                    #[inline(always)]
                    || inputs.advance(state, change, out),
                );
            }
        });
        let out = &mut out[tokens.start * width..tokens.end * width];
        for (t, row) in out.chunks_exact_mut(width).enumerate() {
            let heads = by_head.chunks_exact((count + 1) * dim);
            row.chunks_exact_mut(dim)
                .zip(heads)
                .for_each(|(to, from)| to.copy_from_slice(&from[(t + 1) * dim..][..dim]));
        }
    }
}

/// The inputs of one token and head.
struct Inputs<'a> {
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    decay: f32,
    beta: f32,
}

impl Inputs<'_> {
    /// Advances a head's state by the token and writes its output. `change` is scratch.
    #[inline(always)]
    fn advance(&self, state: &mut [f32], change: &mut [f32], out: &mut [f32]) {
        let dim = out.len();
        change.fill(0.0);
        for (row, k) in state.chunks_exact_mut(dim).zip(self.k) {
            for (s, recalled) in row.iter_mut().zip(&mut *change) {
                *s *= self.decay;
                *recalled += *s * k;
            }
        }
        change.iter_mut().zip(self.v).for_each(|(x, v)| *x = self.beta * (v - *x));
        out.fill(0.0);
        for ((row, k), q) in state.chunks_exact_mut(dim).zip(self.k).zip(self.q) {
            for ((s, change), out) in row.iter_mut().zip(&*change).zip(&mut *out) {
                *s += change * k;
                *out += *s * q;
            }
        }
        let scale = 1.0 / (self.q.len() as f32).sqrt();
        out.iter_mut().for_each(|x| *x *= scale);
    }
}
