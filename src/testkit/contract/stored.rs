//! The expected form of a row of K or V in the pool.

use super::case::{bytes, round};
use crate::id::{LayerId, PageId};
use crate::layout::{Dtype, KvScales, LabelChannels, PlaneName, PoolLayout, Scaling};
use crate::testkit::quantised::{quantise, value};

/// One token's K or V in one layer of the pool.
pub(super) struct Stored {
    plane: PlaneName,
    /// The bytes of the row, `[heads, elements]`.
    row: Vec<u8>,
    /// The unquantised part of a quantised latent row.
    rope: Vec<u8>,
    /// The plane of the scales by token, and the scales of the heads.
    scales: Option<(PlaneName, Vec<f32>)>,
    /// The exact values of the bytes.
    pub values: Vec<f64>,
    /// Labels of K, `[heads, channels]`, if the pool has labels.
    pub labels: Vec<f32>,
}

/// The backend's scales and label channels.
#[derive(Clone, Debug, Default)]
pub(super) struct Given {
    pub scales: Option<KvScales>,
    pub labels: Option<LabelChannels>,
}

/// Returns the planes of k and v. In a pool of latent rows, both are in one plane.
pub(super) fn planes(layout: &PoolLayout) -> [PlaneName; 2] {
    if layout.is_latent() { [PlaneName::Latent; 2] } else { [PlaneName::K, PlaneName::V] }
}

/// Returns the labels of a row of K.
fn labels(channels: &LabelChannels, dtype: Dtype, layer: LayerId, row: &[f32]) -> Vec<f32> {
    let heads = row.chunks_exact(row.len() / channels.kv_heads() as usize);
    let of_head = |(kv_head, numbers): (u32, &[f32])| -> Vec<f32> {
        let channels = channels.get(layer, kv_head);
        channels.iter().map(|&channel| round(dtype, numbers[channel as usize])).collect()
    };
    (0..).zip(heads).flat_map(of_head).collect()
}

impl Stored {
    pub fn new(layout: &PoolLayout, given: &Given, plane: PlaneName, layer: LayerId, row: &[f32]) -> Self {
        let dtype = layout.dtype().rows();
        let channels = given.labels.as_ref().filter(|_| plane == PlaneName::K && layout.label_channels() > 0);
        let labels = channels.map_or(vec![], |channels| labels(channels, dtype, layer, row));
        let Some(scaling) = layout.scaling() else {
            let values = row.iter().map(|&x| round(dtype, x).into()).collect();
            let rope = Vec::new();
            return Self { plane, row: bytes(dtype, row), rope, scales: None, values, labels };
        };
        let made = scaling == Scaling::ByToken;
        let side = usize::from(plane == PlaneName::V);
        let (mut quantised, mut scales, mut values) = (Vec::new(), Vec::new(), Vec::new());
        let dim = layout.value_dim() as usize;
        let (row, rope) = row.split_at(layout.kv_heads() as usize * dim);
        for (head, numbers) in (0..).zip(row.chunks_exact(dim)) {
            let given = given.scales.as_ref().map_or(1.0, |given| given.get(layer, head)[side]);
            let (bytes, scale) = quantise(numbers, (!made).then_some(given));
            values.extend(bytes.iter().map(|&byte| f64::from(scale) * value(byte)));
            quantised.extend(bytes);
            scales.push(scale);
        }
        let scales_plane = [PlaneName::KScales, PlaneName::VScales][side];
        let scales = made.then_some((scales_plane, scales));
        values.extend(rope.iter().map(|&x| f64::from(round(dtype, x))));
        let rope = bytes(dtype, rope);
        Self { plane, row: quantised, rope, scales, values, labels }
    }

    /// Writes the row to a page, `[plane, lane, piece]`. Pieces of scales are ordered by head, then by slot. Other
    /// pieces contain one row after another, ordered by slot.
    pub fn write(&self, layout: &PoolLayout, layer: LayerId, offset: u32, page: &mut [u8]) {
        let piece = |plane| {
            let strides = layout.page_strides(plane).expect("the pool has it");
            strides.row(layout.place(layer).lane, PageId::new(0), 0) as usize
        };
        let mut put = |at: usize, bytes: &[u8]| page[at..at + bytes.len()].copy_from_slice(bytes);
        put(piece(self.plane) + offset as usize * self.row.len(), &self.row);
        if !self.rope.is_empty() {
            put(piece(PlaneName::Rope) + offset as usize * self.rope.len(), &self.rope);
        }
        if !self.labels.is_empty() {
            let labels = bytes(layout.dtype().rows(), &self.labels);
            put(piece(PlaneName::Labels) + offset as usize * labels.len(), &labels);
        }
        let Some((plane, scales)) = &self.scales else { return };
        for (head, scale) in scales.iter().enumerate() {
            let at = head * layout.page_size() as usize + offset as usize;
            put(piece(*plane) + 4 * at, &scale.to_le_bytes());
        }
    }
}
