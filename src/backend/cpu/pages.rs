//! A host's way to the pool's bytes: to look at them, and to move pages out and in.

use std::ops::Range;

use super::Cpu;
use super::error::CpuError;
use super::rows::Elements;
use crate::backend::check::{self, PlanError};
use crate::id::{LayerId, PageId, SlotId};
use crate::layout::{PlaneName, PoolLayout};

impl Cpu {
    /// What one slot holds in a plane, such as K or V: `[heads, elements]`.
    ///
    /// # Errors
    /// Past the layers or slots, or a plane that the pool does not have by slot.
    pub fn slot(
        &self,
        plane: PlaneName,
        layer: LayerId,
        slot: SlotId,
    ) -> Result<Elements<'_>, CpuError> {
        check::layer(layer, &self.layout)?;
        let slot_count = self.layout.slot_count();
        if slot.raw() >= slot_count {
            return Err(PlanError::Slot { slot, slot_count }.into());
        }
        let row = self.layout.row(plane, layer, slot);
        let of = self.layout.planes().iter().find(|of| of.name == plane);
        let (row, of) = row.zip(of).ok_or(CpuError::Plane { plane })?;
        Ok(self.pool.elements(of.dtype, row.start as usize..row.end as usize))
    }

    /// The bytes of one contiguous [piece](PoolLayout::piece) of a page.
    ///
    /// # Errors
    /// Past the pages or pieces.
    pub fn page_piece(&self, page: PageId, piece: u32) -> Result<&[u8], CpuError> {
        check::page(page, self.layout.page_count())?;
        let pieces = self.layout.pieces_per_page();
        if piece >= pieces {
            return Err(CpuError::Piece { piece, pieces });
        }
        Ok(&self.pool.bytes()[bytes_of(&self.layout, page, piece)])
    }

    /// Copies a page out, `page_bytes` in the order `[plane, layer, piece]`, whatever the layout: to offload it, or to
    /// move it to another pool with [`Cpu::write_page`].
    ///
    /// # Errors
    /// Past the pages, or into a buffer of another size.
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

    /// Copies a page in, as [`Cpu::read_page`] gave it.
    ///
    /// # Errors
    /// Past the pages, or from a buffer of another size.
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

    fn check_page(&self, page: PageId, actual: usize) -> Result<(), CpuError> {
        check::page(page, self.layout.page_count())?;
        let wanted = self.layout.page_bytes();
        let right = actual as u64 == wanted;
        if right { Ok(()) } else { Err(CpuError::PageBytes { actual, wanted }) }
    }
}

/// Where a piece of a page lies in the pool's bytes. The pool is in memory, so its size fits `usize`.
pub(super) fn bytes_of(layout: &PoolLayout, page: PageId, piece: u32) -> Range<usize> {
    let range = layout.piece(page, piece);
    range.start as usize..range.end as usize
}

#[cfg(test)]
mod tests;
