//! The shadow of the pool: the bytes that every page must have after stores and moves.

use super::TestBackend;
use super::run::World;
use super::stored::{Stored, planes};
use crate::id::{LayerId, PageId, SlotId};
use crate::layout::PoolLayout;

impl<B: TestBackend> World<'_, B> {
    /// Writes rows of k and v to a slot of the shadow.
    pub(super) fn shadow_rows(&mut self, layer: usize, slot: SlotId, rows: [&[f32]; 2]) {
        let layer = LayerId::new(layer as u32);
        let layout = self.case.of(layer).layout;
        for (plane, row) in planes(&layout).into_iter().zip(rows) {
            if !row.is_empty() {
                let stored = Stored::new(&layout, &self.given, plane, layer, row);
                let (page, offset) = layout.page_of(slot);
                stored.write(&layout, layer, offset, &mut self.shadow[page.index()]);
            }
        }
    }

    /// Copies one slot's bytes in the shadow, in all planes and lanes.
    pub(super) fn shadow_move(&mut self, layout: &PoolLayout, source: (PageId, u32), target: (PageId, u32)) {
        for plane in layout.planes() {
            let strides = layout.page_strides(plane.name).expect("the plane is the pool's");
            let len = plane.elements as usize * plane.dtype.size() as usize;
            for lane in 0..layout.lanes() {
                for head in 0..u64::from(plane.heads) {
                    let at = |offset| {
                        let row = strides.row(lane, PageId::new(0), offset);
                        (row + head * strides.head) as usize
                    };
                    let bytes = self.shadow[source.0.index()][at(source.1)..][..len].to_vec();
                    self.shadow[target.0.index()][at(target.1)..][..len].copy_from_slice(&bytes);
                }
            }
        }
    }
}
