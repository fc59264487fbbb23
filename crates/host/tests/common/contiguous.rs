//! Runs a model without pages, for checks: K and V are contiguous, a simple attention sums in f64, and a layer's state
//! has two places.

use std::convert::Infallible;

use kvarena_host::clock::Clock;
use kvarena_host::config::ModelConfig;
use kvarena_host::delta::{ConvDtype, DeltaStep, State};
use kvarena_host::model::{Attention, AttentionInputs, Model, Pass, Workspace};
use kvarena_host::sample::Sampling;
use kvarena_host::sparse::channels::Measured;

/// K, V and states of one sequence, by layer. Attention sums in f64.
pub struct Contiguous<'a> {
    config: &'a ModelConfig,
    k: Vec<Vec<f32>>,
    v: Vec<Vec<f32>>,
    /// The current place of each layer's state, and the other one. Empty before the first token.
    pub states: Vec<[Vec<f32>; 2]>,
    /// Element type of the convolution's part of the states.
    conv: ConvDtype,
    /// Passes so far. Every second one updates the states in place.
    passes: usize,
    /// Measures q and K, if requested.
    measured: Option<&'a mut Measured>,
}

impl Attention for Contiguous<'_> {
    type Error = Infallible;

    fn layer(&mut self, layer: usize, inputs: AttentionInputs<'_>, out: &mut [f32]) -> Result<(), Infallible> {
        let AttentionInputs { q, k, v, sinks, .. } = inputs;
        let q_heads = self.config.q_heads;
        let (kv_heads, head_dim) = self.config.heads_of(layer);
        let value_dim = self.config.latent.map_or(head_dim, |_| self.config.value_dim);
        let (q_row, kv_row) = (q_heads * head_dim, kv_heads * head_dim);
        let out_row = q_heads * value_dim;
        if let Some(measured) = &mut self.measured {
            measured.measure(layer, q, k);
        }
        let first = self.k[layer].len() / kv_row;
        self.k[layer].extend_from_slice(k);
        self.v[layer].extend_from_slice(v);
        // Latent rows begin with V.
        let values = if self.config.latent.is_some() { &self.k[layer] } else { &self.v[layer] };
        for (i, (q, out)) in q.chunks(q_row).zip(out.chunks_mut(out_row)).enumerate() {
            let seen = first + i + 1;
            let from = inputs.first(seen as u32 - 1) as usize;
            let heads = q.chunks(head_dim).zip(out.chunks_mut(value_dim));
            for (h, (q, out)) in heads.enumerate() {
                let at = |p: usize| p * kv_row + h / (q_heads / kv_heads) * head_dim;
                let logit = |p: usize| {
                    let k = &self.k[layer][at(p)..][..head_dim];
                    let dot: f64 = q.iter().zip(k).map(|(q, k)| f64::from(q * k)).sum();
                    dot * f64::from(self.config.scale)
                };
                let logits: Vec<f64> = (from..seen).map(logit).collect();
                let sink = sinks.map_or(f64::NEG_INFINITY, |sinks| sinks[h].into());
                let max = logits.iter().copied().fold(sink, f64::max);
                let total: f64 = logits.iter().chain([&sink]).map(|x| (x - max).exp()).sum();
                for (d, out) in out.iter_mut().enumerate() {
                    let v = |p: usize| f64::from(values[at(p) + d]);
                    let sum = |(i, x): (usize, &f64)| (x - max).exp() * v(from + i);
                    *out = (logits.iter().enumerate().map(sum).sum::<f64>() / total) as f32;
                }
            }
        }
        Ok(())
    }

    fn delta(&mut self, layer: usize, step: &mut DeltaStep<'_>) -> Result<(), Infallible> {
        let [current, other] = &mut self.states[layer];
        let len = step.shape(self.conv).bytes() / size_of::<f32>();
        current.resize(len, 0.0);
        other.resize(len, f32::NAN);
        let tokens = 0..step.tokens();
        if self.passes.is_multiple_of(2) {
            step.update(tokens, State::InPlace(bytemuck::cast_slice_mut(current)), self.conv);
        } else {
            let state = State::From(bytemuck::cast_slice(current), bytemuck::cast_slice_mut(other));
            step.update(tokens, state, self.conv);
            current.fill(f32::NAN);
            std::mem::swap(current, other);
        }
        Ok(())
    }
}

impl<'a> Contiguous<'a> {
    pub fn new(config: &'a ModelConfig, conv: ConvDtype) -> Self {
        let layers = vec![Vec::new(); config.layers];
        let states = vec![[Vec::new(), Vec::new()]; config.layers];
        Self { config, k: layers.clone(), v: layers, states, conv, passes: 0, measured: None }
    }

    /// Runs the tokens from `done` on through the model, and returns the logits after each of them.
    pub fn run(&mut self, model: &Model, tokens: &[u32], done: usize) -> Vec<f32> {
        let (mut work, mut clock) = (Workspace::default(), Clock::default());
        let positions: Vec<u32> = (done as u32..).take(tokens.len()).collect();
        let wanted: Vec<usize> = (0..tokens.len()).collect();
        let pass = Pass { tokens, positions: &positions, wanted: &wanted };
        let Ok(()) = model.forward(pass, self, &mut work, &mut clock);
        self.passes += 1;
        work.logits
    }
}

/// Returns the logits after each token of a stream from index `from` on, `[len - from, vocab]`.
pub fn logits(model: &Model, stream: &[u32], from: usize) -> Vec<f32> {
    let all = Contiguous::new(&model.config, ConvDtype::F32).run(model, stream, 0);
    all[from * model.config.vocab..].to_vec()
}

/// Measures the importance of each channel of K over a stream.
pub fn measure(model: &Model, stream: &[u32], measured: &mut Measured) {
    let mut attention = Contiguous::new(&model.config, ConvDtype::F32);
    attention.measured = Some(measured);
    attention.run(model, stream, 0);
}

/// Returns `count` greedy tokens, and the logits of the first one. A pass computes up to `chunk` tokens; 0 counts as 1.
pub fn greedy(model: &Model, prompt: &[u32], count: usize, chunk: usize) -> (Vec<u32>, Vec<f32>) {
    greedy_by(model, prompt, count, chunk, Contiguous::new(&model.config, ConvDtype::F32), |_, _| ())
}

/// Does the same with given storage. Calls `between` before each pass, with the number of computed tokens.
pub fn greedy_by(
    model: &Model,
    prompt: &[u32],
    count: usize,
    chunk: usize,
    mut storage: Contiguous<'_>,
    mut between: impl FnMut(&mut Contiguous<'_>, usize),
) -> (Vec<u32>, Vec<f32>) {
    let (mut stream, mut first) = (prompt.to_vec(), Vec::new());
    let mut done = 0_usize;
    while stream.len() < prompt.len() + count {
        let end = stream.len().min(done.saturating_add(chunk).max(done + 1));
        between(&mut storage, done);
        let mut logits = storage.run(model, &stream[done..end], done);
        done = end;
        if done == stream.len() {
            let last = logits.split_off(logits.len() - model.config.vocab);
            stream.push(Sampling::default().choose(0, &last));
            if first.is_empty() {
                first = last;
            }
        }
    }
    (stream.split_off(prompt.len()), first)
}
