//! A host's way to the pool's bytes: to look at them, and to move pages out and in.

use std::ops::Range;

use super::error::CpuError;
use super::rows::Elements;
use super::{Cpu, Open, check};
use crate::id::{LayerId, PageId, SlotId};
use crate::layout::{Kv, PoolLayout};

impl Cpu {
    /// K or V of one slot, `[kv_heads, head_dim]`.
    ///
    /// # Errors
    /// Before `open`, or past the layers or slots.
    pub fn slot(&self, kv: Kv, layer: LayerId, slot: SlotId) -> Result<Elements<'_>, CpuError> {
        let open = self.open()?;
        check::layer(layer, &open.layout)?;
        let slot_count = open.layout.slot_count();
        if slot.raw() >= slot_count {
            return Err(CpuError::Slot { slot, slot_count });
        }
        let start = open.layout.element(kv, layer, slot) as usize;
        let len = open.layout.kv_heads() as usize * open.layout.head_dim() as usize;
        Ok(open.pool.elements().slice(start..start + len))
    }

    /// The bytes of one contiguous [piece](PoolLayout::piece) of a page.
    ///
    /// # Errors
    /// Before `open`, or past the pages or pieces.
    pub fn page_piece(&self, page: PageId, piece: u32) -> Result<&[u8], CpuError> {
        let open = self.open()?;
        check::page(page, &open.layout)?;
        let pieces = open.layout.pieces_per_page();
        if piece >= pieces {
            return Err(CpuError::Piece { piece, pieces });
        }
        Ok(&open.pool.bytes()[bytes_of(&open.layout, page, piece)])
    }

    /// Copies a page out, `page_bytes` in the order `[2 (K, V), layer, slot, kv head, head_dim]`, whatever the layout:
    /// to offload it, or to move it to another pool with [`Cpu::write_page`].
    ///
    /// # Errors
    /// Before `open`, past the pages, or into a buffer of another size.
    pub fn read_page(&self, page: PageId, target: &mut [u8]) -> Result<(), CpuError> {
        let open = self.open()?;
        open.check_page(page, target.len())?;
        let pieces = target.chunks_exact_mut(open.layout.piece_bytes() as usize);
        for (piece, target) in pieces.enumerate() {
            let source = bytes_of(&open.layout, page, piece as u32);
            target.copy_from_slice(&open.pool.bytes()[source]);
        }
        Ok(())
    }

    /// Copies a page in, as [`Cpu::read_page`] gave it.
    ///
    /// # Errors
    /// Before `open`, past the pages, or from a buffer of another size.
    pub fn write_page(&mut self, page: PageId, source: &[u8]) -> Result<(), CpuError> {
        let open = self.open.as_mut().ok_or(CpuError::NotOpen)?;
        open.check_page(page, source.len())?;
        let pieces = source.chunks_exact(open.layout.piece_bytes() as usize);
        for (piece, source) in pieces.enumerate() {
            let target = bytes_of(&open.layout, page, piece as u32);
            open.pool.bytes_mut()[target].copy_from_slice(source);
        }
        Ok(())
    }
}

impl Open {
    fn check_page(&self, page: PageId, actual: usize) -> Result<(), CpuError> {
        check::page(page, &self.layout)?;
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
