//! The expected K and V of sequences, from which a test computes attention.

use super::stored::{Given, Stored, planes};
use crate::id::LayerId;
use crate::layout::PoolLayout;

/// K and V of one sequence in one layer, contiguous: `[positions, kv_heads, dims]` each, with the pool's rounding.
#[derive(Clone, Debug, Default)]
pub(super) struct History {
    pub k: Vec<f64>,
    pub v: Vec<f64>,
    /// `[positions, kv_heads, channels]`, if the pool has labels.
    pub labels: Vec<f32>,
}

impl History {
    /// Appends one token's rows of k and v, with the pool's rounding.
    pub fn push(&mut self, layout: &PoolLayout, given: &Given, layer: LayerId, [k, v]: [&[f32]; 2]) {
        let [k_plane, v_plane] = planes(layout);
        let stored = Stored::new(layout, given, k_plane, layer, k);
        self.v.extend(if layout.is_latent() {
            stored.values[..layout.value_dim() as usize].to_vec()
        } else {
            Stored::new(layout, given, v_plane, layer, v).values
        });
        self.k.extend(stored.values);
        self.labels.extend(stored.labels);
    }

    /// Keeps all places before `first`, and place `first + i` if bit `i` of `keep` is 1. There are `tokens` places in
    /// total.
    pub fn keep(&mut self, tokens: u32, first: u32, keep: u64) {
        let (tokens, first) = (tokens as usize, first as usize);
        keep_rows(&mut self.k, tokens, first, keep);
        keep_rows(&mut self.v, tokens, first, keep);
        keep_rows(&mut self.labels, tokens, first, keep);
    }
}

/// Applies [`History::keep`] to `rows`, which has `tokens` rows of equal length.
fn keep_rows<T: Clone>(rows: &mut Vec<T>, tokens: usize, first: usize, keep: u64) {
    let row = rows.len() / tokens;
    let kept = (0..tokens - first).filter(|bit| keep >> bit & 1 == 1);
    let kept: Vec<T> = kept.flat_map(|bit| rows[(first + bit) * row..(first + bit + 1) * row].to_vec()).collect();
    rows.truncate(first * row);
    rows.extend(kept);
}
