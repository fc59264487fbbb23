//! Runs a model without pages, for checks: K and V are contiguous, and a simple attention sums in f64.

use std::convert::Infallible;

use kvarena_host::clock::Clock;
use kvarena_host::config::ModelConfig;
use kvarena_host::model::{Attention, AttentionInputs, Model, Pass, Workspace};
use kvarena_host::sample::Sampling;
use kvarena_host::sparse::channels::Measured;

/// K and V of one sequence, by layer. Attention over them sums in f64.
struct Contiguous<'a> {
    config: &'a ModelConfig,
    k: Vec<Vec<f32>>,
    v: Vec<Vec<f32>>,
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
}

impl<'a> Contiguous<'a> {
    fn new(config: &'a ModelConfig) -> Self {
        let layers = vec![Vec::new(); config.layers];
        Self { config, k: layers.clone(), v: layers, measured: None }
    }
}

/// Returns the logits after each token of a stream from index `from` on, `[len - from, vocab]`.
pub fn logits(model: &Model, stream: &[u32], from: usize) -> Vec<f32> {
    let mut attention = Contiguous::new(&model.config);
    let (mut work, mut clock) = (Workspace::default(), Clock::default());
    let positions: Vec<u32> = (0..stream.len() as u32).collect();
    let wanted: Vec<usize> = (from..stream.len()).collect();
    let pass = Pass { tokens: stream, positions: &positions, wanted: &wanted };
    let Ok(()) = model.forward(pass, &mut attention, &mut work, &mut clock);
    work.logits
}

/// Measures the importance of each channel of K over a stream.
pub fn measure(model: &Model, stream: &[u32], measured: &mut Measured) {
    let mut attention = Contiguous::new(&model.config);
    attention.measured = Some(measured);
    let (mut work, mut clock) = (Workspace::default(), Clock::default());
    let positions: Vec<u32> = (0..stream.len() as u32).collect();
    let pass = Pass { tokens: stream, positions: &positions, wanted: &[] };
    let Ok(()) = model.forward(pass, &mut attention, &mut work, &mut clock);
}

/// Returns `count` greedy tokens, and the logits of the first one. A pass computes up to `chunk` tokens; 0 counts as 1.
pub fn greedy(model: &Model, prompt: &[u32], count: usize, chunk: usize) -> (Vec<u32>, Vec<f32>) {
    let mut attention = Contiguous::new(&model.config);
    let (mut work, mut clock) = (Workspace::default(), Clock::default());
    let (mut stream, mut first) = (prompt.to_vec(), Vec::new());
    let mut done = 0_usize;
    while stream.len() < prompt.len() + count {
        let end = stream.len().min(done.saturating_add(chunk).max(done + 1));
        let positions: Vec<u32> = (done as u32..end as u32).collect();
        let wanted = [end - done - 1];
        let pass = Pass { tokens: &stream[done..end], positions: &positions, wanted: &wanted };
        let Ok(()) = model.forward(pass, &mut attention, &mut work, &mut clock);
        done = end;
        if done == stream.len() {
            if first.is_empty() {
                first.clone_from(&work.logits);
            }
            stream.push(Sampling::default().choose(0, &work.logits));
        }
    }
    (stream.split_off(prompt.len()), first)
}
