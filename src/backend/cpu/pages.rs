//! Access to the pool's bytes: reads of slots, copies of pages, and moves of slots.

use std::ops::Range;

use super::Cpu;
use super::error::CpuError;
use super::number::Number;
use super::planes::Planes;
use super::pool::with_number;
use super::rows::Elements;
use super::scales::{Row, byte};
use crate::backend::{PlanError, check};
use crate::id::{LayerId, PageId, RowId, SlotId};
use crate::layout::{Plane, PlaneName, PoolLayout};
use crate::plan::PageCopy;

impl Cpu {
    /// Returns the numbers of one slot in a plane such as K or V, `[heads, elements]`.
    ///
    /// # Errors
    /// [`CpuError::Plan`] for a layer or slot that does not exist. [`CpuError::Plane`] if the pool does not have the
    /// plane, if the plane is quantised, or if its order is not
    /// [`PlaneOrder::BySlot`](crate::layout::PlaneOrder::BySlot). [`Cpu::read_slot`] also reads quantised planes and
    /// planes of another order.
    pub fn slot(&self, plane: PlaneName, layer: LayerId, slot: SlotId) -> Result<Elements<'_>, CpuError> {
        let found = self.check_slot(plane, layer, slot)?;
        let row = self.planes_of(layer).layout.row(plane, layer, slot);
        row.and_then(|row| self.pool.elements(found.dtype, row.start as usize..row.end as usize))
            .ok_or(CpuError::Plane { plane })
    }

    /// Returns the values of one slot in any plane, `[heads, elements]`, with quantised numbers multiplied by their
    /// scale.
    ///
    /// # Errors
    /// [`CpuError::Plan`] for a layer or slot that does not exist. [`CpuError::Plane`] if the pool does not have the
    /// plane.
    pub fn read_slot(&self, plane: PlaneName, layer: LayerId, slot: SlotId) -> Result<Vec<f32>, CpuError> {
        let found = self.check_slot(plane, layer, slot)?;
        let (page, offset) = self.layout.page_of(slot);
        let Planes { layout, scales, .. } = self.planes_of(layer);
        let strides = layout.strides(plane).expect("the pool has it");
        let lane = self.layout.place(layer).lane;
        let row = Row { side: usize::from(plane == PlaneName::V), layer, lane, page, offset };
        let elements = found.elements as usize;
        let mut all = vec![0.0; found.heads as usize * elements];
        for (head, wide) in (0..found.heads).zip(all.chunks_exact_mut(elements)) {
            with_number!(found.dtype, T => {
                let start = byte(&strides, row, head) as usize / size_of::<T>();
                T::widen(&self.pool.numbers()[start..start + elements], wide);
                if T::QUANTISED {
                    let scale = scales.of_head(self.pool.numbers(), row, head);
                    wide.iter_mut().for_each(|x| *x *= scale);
                }
            });
        }
        Ok(all)
    }

    fn planes_of(&self, layer: LayerId) -> &Planes {
        self.planes.of_group(self.layout.place(layer).group)
    }

    /// Returns a plane, if the layer and the slot exist.
    fn check_slot(&self, plane: PlaneName, layer: LayerId, slot: SlotId) -> Result<Plane, CpuError> {
        check::layer(layer, &self.layout)?;
        let slot_count = self.layout.slot_count();
        if slot.raw() >= slot_count {
            return Err(PlanError::Slot { slot, slot_count }.into());
        }
        let found = self.planes_of(layer).layout.planes().iter().find(|known| known.name == plane);
        found.copied().ok_or(CpuError::Plane { plane })
    }

    /// Returns the fingerprint of the page format ([`PoolLayout::page_fingerprint`]).
    pub fn page_fingerprint(&self) -> u64 {
        let scales = self.planes.all().find_map(|planes| planes.scales.given());
        self.layout.page_fingerprint(scales, self.planes.of_group(0).labels.channels())
    }

    /// Copies pages in order into another pool with an equal [fingerprint](Cpu::page_fingerprint); the layouts may
    /// differ.
    ///
    /// # Errors
    /// [`CpuError::Plan`] for pages that do not exist, [`CpuError::PageFingerprint`] for a pool with another
    /// fingerprint. After an error, nothing was copied.
    pub fn copy_to_pool(&self, target: &mut Cpu, copies: &[PageCopy]) -> Result<(), CpuError> {
        let fingerprints = (self.page_fingerprint(), target.page_fingerprint());
        if let (source, target) = fingerprints
            && source != target
        {
            return Err(CpuError::PageFingerprint { source, target });
        }
        check::copies(copies, (self.layout.page_count(), target.layout.page_count()))?;
        let mut page = vec![0; self.layout.page_bytes() as usize];
        for copy in copies {
            self.read_page(copy.source, &mut page)?;
            target.write_page(copy.target, &page)?;
        }
        Ok(())
    }

    /// Returns all bytes of the pool, for a host that stores K and V itself. [`PoolLayout::strides`] has the places of
    /// a plane.
    pub fn pool_mut(&mut self) -> &mut [u8] {
        self.pool.bytes_mut()
    }

    /// Returns the bytes of one contiguous [piece](PoolLayout::piece) of a page.
    ///
    /// # Errors
    /// [`CpuError::Plan`] for a page that does not exist, [`CpuError::Piece`] for a piece that does not exist.
    pub fn page_piece(&self, page: PageId, piece: u32) -> Result<&[u8], CpuError> {
        check::page(page, self.layout.page_count())?;
        let pieces = self.layout.pieces_per_page();
        if piece >= pieces {
            return Err(CpuError::Piece { piece, pieces });
        }
        Ok(&self.pool.bytes()[bytes_of(&self.layout, page, piece)])
    }

    /// Copies a page to a buffer of `page_bytes` bytes. In every layout, the bytes are ordered by plane, then by lane.
    /// [`Cpu::write_page`] of a pool with an equal [fingerprint](Cpu::page_fingerprint) reads the buffer.
    ///
    /// # Errors
    /// [`CpuError::Plan`] for a page that does not exist, [`CpuError::PageBytes`] for a buffer of another size.
    pub fn read_page(&self, page: PageId, target: &mut [u8]) -> Result<(), CpuError> {
        self.check_page(page, target.len())?;
        let mut rest = target;
        for piece in 0..self.layout.pieces_per_page() {
            let source = bytes_of(&self.layout, page, piece);
            let target = rest.split_off_mut(..source.len()).expect("pieces add up to a page");
            target.copy_from_slice(&self.pool.bytes()[source]);
        }
        Ok(())
    }

    /// Copies a page from a buffer that [`Cpu::read_page`] wrote.
    ///
    /// # Errors
    /// [`CpuError::Plan`] for a page that does not exist, [`CpuError::PageBytes`] for a buffer of another size.
    pub fn write_page(&mut self, page: PageId, source: &[u8]) -> Result<(), CpuError> {
        self.check_page(page, source.len())?;
        let mut rest = source;
        for piece in 0..self.layout.pieces_per_page() {
            let target = bytes_of(&self.layout, page, piece);
            let source = rest.split_off(..target.len()).expect("pieces add up to a page");
            self.pool.bytes_mut()[target].copy_from_slice(source);
        }
        Ok(())
    }

    /// Copies the slot at place `from` of a row to place `to`, in each track. Each head is copied separately, because
    /// heads are not contiguous in some planes.
    pub(super) fn move_slot(&mut self, row: RowId, from: u32, to: u32) {
        for group in 0..self.layout.groups().count() {
            for track in self.layout.track_range(group) {
                self.move_track_slot(row, (group, track), from, to);
            }
        }
    }

    fn move_track_slot(&mut self, row: RowId, (group, track): (u32, u32), from: u32, to: u32) {
        let page_size = self.layout.page_size();
        let slot = |place| {
            let page = self.table.track_page(&self.words, row, track, place / page_size);
            (page, place % page_size)
        };
        let (source, target) = (slot(from), slot(to));
        let layout = &self.planes.of_group(group).layout;
        for plane in layout.planes() {
            let strides = layout.strides(plane.name).expect("the plane is the pool's");
            let len = plane.elements as usize * plane.dtype.size() as usize;
            for lane in 0..layout.lanes() {
                let at =
                    |(page, offset), head| (strides.row(lane, page, offset) + strides.head * u64::from(head)) as usize;
                for head in 0..plane.heads {
                    let (source, target) = (at(source, head), at(target, head));
                    self.pool.bytes_mut().copy_within(source..source + len, target);
                }
            }
        }
    }

    fn check_page(&self, page: PageId, actual: usize) -> Result<(), CpuError> {
        check::page(page, self.layout.page_count())?;
        let wanted = self.layout.page_bytes();
        let right = actual as u64 == wanted;
        if right { Ok(()) } else { Err(CpuError::PageBytes { actual, wanted }) }
    }
}

/// Returns the byte range of a piece of a page. The pool is in memory, so its size fits `usize`.
pub(super) fn bytes_of(layout: &PoolLayout, page: PageId, piece: u32) -> Range<usize> {
    let range = layout.piece(page, piece);
    range.start as usize..range.end as usize
}

#[cfg(test)]
mod tests;
