//! Chooses the channels of K that are labels, offline as in Double Sparsity (Yang et al. 2024, arXiv:2408.07092).
//!
//! A channel's importance is the mean absolute value of its contribution to a score, `|q * k|`, over all pairs of a
//! measured query and a measured key. Here q is the sum of the kv head's queries, as in
//! [`select`](kvarena::backend::SparseBackend::select). Over all pairs this mean is the product of the means of `|q|`
//! and `|k|`.

use std::path::Path;

use kvarena::layout::LabelChannels;
use serde_json::json;

use crate::calibrate::{Table, write_table};
use crate::config::ModelConfig;
use crate::error::{Error, Result};

/// Sums of the measurement, by channel.
#[derive(Debug)]
pub struct Measured {
    layers: usize,
    kv_heads: usize,
    head_dim: usize,
    /// `[layers, kv_heads, head_dim]`: sums of `|q|` over tokens.
    q: Vec<f64>,
    /// `[layers, kv_heads, head_dim]`: sums of `|k|` over tokens.
    k: Vec<f64>,
}

impl Measured {
    /// Starts an empty measurement for a model whose layers have one shape.
    pub fn new(config: &ModelConfig) -> Self {
        Self::with_sizes(config.layers, config.kv_heads, config.head_dim)
    }

    /// Starts an empty measurement for this many layers, heads and channels.
    fn with_sizes(layers: usize, kv_heads: usize, head_dim: usize) -> Self {
        let zeros = vec![0.0; layers * kv_heads * head_dim];
        Self { layers, kv_heads, head_dim, q: zeros.clone(), k: zeros }
    }

    /// Measures q, `[tokens, q_heads, head_dim]`, and k, `[tokens, kv_heads, head_dim]`, of a layer.
    pub fn measure(&mut self, layer: usize, q: &[f32], k: &[f32]) {
        let width = self.kv_heads * self.head_dim;
        let (q_sums, k_sums) = (&mut self.q[layer * width..], &mut self.k[layer * width..]);
        let group = q.len() / k.len();
        for (q, k) in q.chunks_exact(group * width).zip(k.chunks_exact(width)) {
            for (at, &k) in k.iter().enumerate() {
                let (head, channel) = (at / self.head_dim, at % self.head_dim);
                let queries = (head * group..(head + 1) * group).map(|h| h * self.head_dim);
                let q: f32 = queries.map(|start| q[start + channel]).sum();
                q_sums[at] += f64::from(q.abs());
                k_sums[at] += f64::from(k.abs());
            }
        }
    }

    /// Returns the `count` most important channels of each head, ascending. Of equally important channels, it chooses
    /// the lower one.
    ///
    /// # Errors
    /// A measured number is not finite.
    ///
    /// # Panics
    /// If a head has fewer channels.
    pub fn best(&self, count: u32) -> Result<LabelChannels> {
        let worth: Vec<f64> = self.q.iter().zip(&self.k).map(|(q, k)| q * k).collect();
        if !worth.iter().all(|worth| worth.is_finite()) {
            return Err(Error::run("q or K is not finite: no channels can be chosen"));
        }
        let mut values = Vec::with_capacity(self.layers * self.kv_heads * count as usize);
        for worth in worth.chunks_exact(self.head_dim) {
            let mut channels: Vec<u32> = (0..self.head_dim as u32).collect();
            channels.sort_by(|&a, &b| worth[b as usize].total_cmp(&worth[a as usize]));
            let best = &mut channels[..count as usize];
            best.sort_unstable();
            values.extend_from_slice(best);
        }
        LabelChannels::new(self.layers as u32, self.kv_heads as u32, count, values)
            .map_err(|error| Error::run(error.to_string()))
    }
}

/// Writes channels as JSON: `{"layers": .., "kv_heads": .., "channels": .., "values": [..]}`.
///
/// # Errors
/// The file cannot be written.
pub fn write(path: &Path, labels: &LabelChannels) -> Result<()> {
    let (layers, kv_heads) = (labels.layers(), labels.kv_heads());
    let (channels, values) = (labels.channels(), labels.values());
    let table = json!({"layers": layers, "kv_heads": kv_heads, "channels": channels, "values": values});
    write_table(path, &table)
}

/// Reads channels from a file of [`write()`].
///
/// # Errors
/// The file cannot be read or contains no valid channels.
pub fn read(path: &Path) -> Result<LabelChannels> {
    let table = Table::read(path)?;
    let values = table.values(|value| u32::try_from(value.as_u64()?).ok())?;
    let [layers, kv_heads, channels] = ["layers", "kv_heads", "channels"].map(|name| table.number(name));
    LabelChannels::new(layers?, kv_heads?, channels?, values).map_err(|error| table.invalid(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::Measured;
    use kvarena::LayerId;

    #[test]
    fn channels_of_great_products_are_chosen() {
        let mut measured = Measured::with_sizes(1, 2, 4);
        // Two query heads for each kv head: in channel 0, the queries of the first kv head cancel out.
        let q = [9.0, 1.0, 1.0, 0.0, -9.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0];
        let k = [9.0, 2.0, -3.0, 9.0, 1.0, -1.0, 1.0, 1.0];
        measured.measure(0, &q, &k);
        let best = measured.best(2).expect("finite");
        assert_eq!(best.get(LayerId::new(0), 0), [1, 2]);
        assert_eq!(best.get(LayerId::new(0), 1), [0, 1], "the lower of equal channels");
        measured.measure(0, &[f32::NAN; 16], &k);
        assert!(measured.best(2).is_err());
    }
}
