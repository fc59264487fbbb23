//! What should be in the pool, as stores and moves make it: the bytes of every page.
//!
//! Not here: K and V of sequences as numbers (`history.rs`).

use super::TestBackend;
use super::case::HostRows;
use super::run::World;
use super::stored::Stored;
use crate::id::{LayerId, PageId, SlotId};
use crate::layout::PlaneName;

impl<B: TestBackend> World<'_, B> {
    /// Some rows of k and v come behind what a sequence has in a layer.
    pub(super) fn remember(
        &mut self,
        sequence: usize,
        layer: usize,
        [k, v]: [&HostRows; 2],
        rows: std::ops::Range<usize>,
    ) {
        for i in rows {
            let latent = self.case.layout.is_latent();
            let [k_plane, v_plane] = self.planes();
            let stored = self.stored(k_plane, layer, k.row(i));
            let (k, labels) = (stored.values, stored.labels);
            let v = match latent {
                true => k[..self.case.layout.value_dim() as usize].to_vec(),
                false => self.stored(v_plane, layer, v.row(i)).values,
            };
            let history = &mut self.history[sequence][layer];
            history.k.extend(k);
            history.v.extend(v);
            history.labels.extend(labels);
        }
    }

    fn stored(&self, plane: PlaneName, layer: usize, row: &[f32]) -> Stored {
        let layer = LayerId::new(layer as u32);
        Stored::new(&self.case.layout, &self.given, plane, layer, row)
    }

    /// Where k and v go; latent rows hold both.
    fn planes(&self) -> [PlaneName; 2] {
        match self.case.layout.is_latent() {
            true => [PlaneName::Latent; 2],
            false => [PlaneName::K, PlaneName::V],
        }
    }

    /// Rows of k and v go to a slot.
    pub(super) fn shadow_rows(&mut self, layer: usize, slot: SlotId, rows: [&[f32]; 2]) {
        for (plane, row) in self.planes().into_iter().zip(rows) {
            if !row.is_empty() {
                self.shadow_row(plane, layer, slot, row);
            }
        }
    }

    fn shadow_row(&mut self, plane: PlaneName, layer: usize, slot: SlotId, row: &[f32]) {
        let stored = self.stored(plane, layer, row);
        let (layout, layer) = (&self.case.layout, LayerId::new(layer as u32));
        let (page, offset) = layout.page_of(slot);
        stored.write(layout, layer, offset, &mut self.shadow[page.index()]);
    }

    /// One slot's bytes in all planes and layers, from one place of the shadow to another.
    pub(super) fn shadow_move(&mut self, source: (PageId, u32), target: (PageId, u32)) {
        let layout = self.case.layout;
        for plane in layout.planes() {
            let strides = layout.page_strides(plane.name).expect("the plane is the pool's");
            let len = plane.elements as usize * plane.dtype.size() as usize;
            for layer in (0..layout.layers()).map(LayerId::new) {
                for head in 0..u64::from(plane.heads) {
                    let at = |offset| {
                        let row = strides.row(layer, PageId::new(0), offset);
                        (row + head * strides.head) as usize
                    };
                    let bytes = self.shadow[source.0.index()][at(source.1)..][..len].to_vec();
                    self.shadow[target.0.index()][at(target.1)..][..len].copy_from_slice(&bytes);
                }
            }
        }
    }
}
