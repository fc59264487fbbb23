//! A row of K or V as a pool holds it.

use super::case::{bytes, round};
use crate::id::{LayerId, PageId};
use crate::layout::{KvScales, PlaneName, PoolLayout, Scaling};
use crate::testkit::quantised::{quantise, value};

/// What one token's K or V becomes in one layer.
pub(super) struct Stored {
    plane: PlaneName,
    /// `[heads, elements]`
    row: Vec<u8>,
    /// Where scales are made, the plane of them and one for each head.
    scales: Option<(PlaneName, Vec<f32>)>,
    /// What the bytes stand for, exactly.
    pub values: Vec<f64>,
}

impl Stored {
    pub fn new(
        layout: &PoolLayout,
        given: Option<&KvScales>,
        plane: PlaneName,
        layer: LayerId,
        row: &[f32],
    ) -> Self {
        let Some(scaling) = layout.scaling() else {
            let dtype = layout.dtype().rows();
            let values = row.iter().map(|&x| round(dtype, x).into()).collect();
            return Self { plane, row: bytes(dtype, row), scales: None, values };
        };
        let made = scaling == Scaling::ByToken;
        let side = usize::from(plane == PlaneName::V);
        let (mut quantised, mut scales, mut values) = (Vec::new(), Vec::new(), Vec::new());
        for (head, numbers) in (0..).zip(row.chunks_exact(layout.head_dim() as usize)) {
            let given = given.map_or(1.0, |given| given.get(layer, head)[side]);
            let (bytes, scale) = quantise(numbers, (!made).then_some(given));
            values.extend(bytes.iter().map(|&byte| f64::from(scale) * value(byte)));
            quantised.extend(bytes);
            scales.push(scale);
        }
        let scales_plane = [PlaneName::KScales, PlaneName::VScales][side];
        let scales = made.then_some((scales_plane, scales));
        Self { plane, row: quantised, scales, values }
    }

    /// Writes it to a page, `[plane, L, piece]`: K and V slot after slot in their piece, scales head after head.
    pub fn write(&self, layout: &PoolLayout, layer: LayerId, offset: u32, page: &mut [u8]) {
        let piece = |plane| {
            let strides = layout.page_strides(plane).expect("the pool has it");
            strides.row(layer, PageId::new(0), 0) as usize
        };
        let mut put = |at: usize, bytes: &[u8]| page[at..at + bytes.len()].copy_from_slice(bytes);
        put(piece(self.plane) + offset as usize * self.row.len(), &self.row);
        let Some((plane, scales)) = &self.scales else { return };
        for (head, scale) in scales.iter().enumerate() {
            let at = head * layout.page_size() as usize + offset as usize;
            put(piece(*plane) + 4 * at, &scale.to_le_bytes());
        }
    }
}
