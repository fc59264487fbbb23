//! Copies of whole pages by a kernel: inside a pool, between two pools, and between a pool and pinned memory. Each
//! pool may be layer-first or page-first. One kernel copies between both layouts, and one copies from and to pools in
//! memory of the host. Their parameters contain the page ids.
//!
//! The callers choose the pages. `transfer.rs` also uses the copy engines.

use crate::backend::cuda::driver::gpu::Gpu;
use crate::backend::cuda::driver::launch::Start;
use crate::backend::cuda::driver::raw::RawStream;
use crate::backend::cuda::error::{CudaError, Limit};
use crate::backend::cuda::kernels::params::{COPY_PAGES_MAX, CopyHeadsParams, CopyPagesParams, HeadPlaces, wide_magic};
use crate::backend::cuda::kernels::{COPY_HEADS, COPY_PAGES};
use crate::backend::cuda::store::pages::{Pages, Pieces};
use crate::id::PageId;
use crate::plan::PageCopy;

/// Units, of 2, 4 or 16 bytes each, that one block of `copy_pages` moves.
const BLOCK_UNITS: u32 = 1024;

/// Copies checked pages, between any memory that the device can access, in the stream's order.
pub fn copy_on_device(
    gpu: &Gpu,
    source: &Pages,
    target: &Pages,
    copies: &[PageCopy],
    stream: RawStream,
) -> Result<(), CudaError> {
    if !source.is_like(target) {
        return Err(CudaError::PageShape);
    }
    let copy = if source.has_table() || target.has_table() { copy_heads } else { copy_pieces };
    // If pages are contiguous on both sides, each page is copied as one piece.
    if source.is_packed() && target.is_packed() {
        return copy_pieces(gpu, &source.whole(), &target.whole(), copies, stream);
    }
    let mut groups = source.groups().iter().zip(target.groups());
    // Checks all groups before the first launch, so that `PageBytes` leaves all pages unchanged.
    groups.clone().try_for_each(|(source, target)| Units::new(source, target).map(|_| ()))?;
    groups.try_for_each(|(source, target)| copy(gpu, source, target, copies, stream))
}

/// The sizes of a unit, a piece and a page in a launch of `copy_pages`. The kernel counts units in 32 bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Units {
    /// Bytes of a unit.
    bytes: u32,
    /// Units of one piece.
    piece: u32,
    /// Units of all pieces of one page.
    page: u32,
}

impl Units {
    /// Returns the units that fit both source and target.
    fn new(source: &Pieces, target: &Pieces) -> Result<Self, CudaError> {
        let strides = |pieces: &Pieces| [pieces.address, pieces.page_stride, pieces.piece_stride];
        let [a, b, c] = strides(source);
        let [d, e, f] = strides(target);
        let bytes = unit_bytes(&[source.piece_bytes, a, b, c, d, e, f]);
        // Threads of the last block compute indices up to `BLOCK_UNITS` beyond the page; these must fit in 32 bits.
        Limit::PageBytes.check(source.bytes(), u64::from(u32::MAX - BLOCK_UNITS) * u64::from(bytes))?;
        let units = |n: u64| (n / u64::from(bytes)) as u32;
        Ok(Self { bytes, piece: units(source.piece_bytes), page: units(source.bytes()) })
    }
}

/// Copies pieces of one size, for pages that were checked.
fn copy_pieces(
    gpu: &Gpu,
    source: &Pieces,
    target: &Pieces,
    copies: &[PageCopy],
    stream: RawStream,
) -> Result<(), CudaError> {
    let units = Units::new(source, target)?;
    let mut params = CopyPagesParams {
        source: source.address,
        target: target.address,
        source_page_stride: source.page_stride,
        source_piece_stride: source.piece_stride,
        target_page_stride: target.page_stride,
        target_piece_stride: target.piece_stride,
        piece_magic: wide_magic(units.piece.into()),
        piece_units: units.piece,
        page_units: units.page,
        unit_bytes: units.bytes,
        reserved: 0,
        copies: [PageCopy { source: PageId::new(0), target: PageId::new(0) }; COPY_PAGES_MAX],
    };
    for copies in copies.chunks(COPY_PAGES_MAX) {
        params.copies[..copies.len()].copy_from_slice(copies);
        let grid = (units.page.div_ceil(BLOCK_UNITS), copies.len() as u32);
        // SAFETY: each page was checked against its side's count, so all addresses are inside the two memories.
        unsafe { gpu.launch(COPY_PAGES, grid, (COPY_PAGES.threads(), 1), stream, &params, Start::InOrder) }?;
    }
    Ok(())
}

/// Copies the heads of pieces of a pool in memory of the host, or to it, for pages that were checked. All addresses,
/// strides and heads are multiples of 16 bytes: of such a pool by its check, of other memory as sums of heads.
fn copy_heads(
    gpu: &Gpu,
    source: &Pieces,
    target: &Pieces,
    copies: &[PageCopy],
    stream: RawStream,
) -> Result<(), CudaError> {
    let units = Units::new(source, target)?;
    debug_assert_eq!(units.bytes, 16);
    let places = |pieces: &Pieces| HeadPlaces {
        address: pieces.address,
        table: pieces.table,
        piece_stride: pieces.piece_stride,
        page_stride: pieces.page_stride,
        slot_stride: pieces.rows.slot_stride,
        head_stride: pieces.rows.head_stride,
    };
    let head_units = (source.rows.head_bytes / 16) as u32;
    let mut params = CopyHeadsParams {
        source: places(source),
        target: places(target),
        page_units: units.page,
        piece_units: units.piece,
        slot_units: head_units * source.rows.heads,
        head_units,
        copies: [PageCopy { source: PageId::new(0), target: PageId::new(0) }; COPY_PAGES_MAX],
    };
    for copies in copies.chunks(COPY_PAGES_MAX) {
        params.copies[..copies.len()].copy_from_slice(copies);
        let grid = (units.page.div_ceil(BLOCK_UNITS), copies.len() as u32);
        // SAFETY: each page was checked against its side's count, so all addresses are inside the two memories.
        unsafe { gpu.launch(COPY_HEADS, grid, (COPY_HEADS.threads(), 1), stream, &params, Start::InOrder) }?;
    }
    Ok(())
}

/// Returns the largest of 16, 4 and 2 bytes that divides all of `multiples`; 0 if none does. It is the unit of a copy.
pub fn unit_bytes(multiples: &[u64]) -> u32 {
    let serves = |unit: &u32| multiples.iter().all(|n| n.is_multiple_of(u64::from(*unit)));
    [16, 4, 2].into_iter().find(serves).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(piece_bytes: u64, count: u32) -> Pieces {
        let page_stride = piece_bytes * u64::from(count);
        Pieces { address: 1 << 40, page_stride, piece_stride: piece_bytes, piece_bytes, count, ..Pieces::default() }
    }

    /// A page of 64 GiB must not count as 0 units, which would copy nothing.
    #[test]
    fn pages_with_too_many_units_are_rejected() {
        let units = |piece_bytes, count| {
            let pieces = pieces(piece_bytes, count);
            Units::new(&pieces, &pieces)
        };
        let small = Units { bytes: 16, piece: 2, page: 6 };
        assert_eq!(units(32, 3), Ok(small));
        let max = 16 * u64::from(u32::MAX - BLOCK_UNITS);
        let largest = Units { bytes: 16, piece: u32::MAX - BLOCK_UNITS, page: u32::MAX - BLOCK_UNITS };
        assert_eq!(units(max, 1), Ok(largest));
        let refused = |value, max| Err(CudaError::Limit { what: Limit::PageBytes, value, max });
        assert_eq!(units(max + 16, 1), refused(max + 16, max));
        // 2^32 units in one piece, the same number in 64 pieces, and more than 2^32 units of 2 bytes.
        assert_eq!(units(64 << 30, 1), refused(64 << 30, max));
        assert_eq!(units(1 << 30, 64), refused(64 << 30, max));
        let (bytes, max) = (8 * ((1 << 30) + 2), 2 * u64::from(u32::MAX - BLOCK_UNITS));
        assert_eq!(units((1 << 30) + 2, 8), refused(bytes, max));
    }
}
