//! Moves slots of rows, in all planes and tracks of a group. For each track, one launch moves the slots of at most
//! `COMPACTIONS_MAX` rows in all lanes of planes of the same shape, such as K and V.
//!
//! `system/accept.rs` chooses the slots.

use std::ops::Range;

use super::copy::unit_bytes;
use crate::backend::cuda::driver::gpu::Gpu;
use crate::backend::cuda::driver::launch::Start;
use crate::backend::cuda::driver::raw::RawStream;
use crate::backend::cuda::error::{CudaError, Limit};
use crate::backend::cuda::kernels::COMPACT_SLOTS;
use crate::backend::cuda::kernels::params::{COMPACTIONS_MAX, CompactSlotsParams};
use crate::backend::cuda::plan::tables::Tables;
use crate::backend::cuda::store::pages::{Pieces, Rows};
use crate::backend::cuda::store::pool::Pool;
use crate::plan::Compaction;

/// Moves slots in the stream's order. The caller has checked the compactions.
pub fn compact(
    gpu: &Gpu,
    pool: &Pool,
    tracks: Range<u32>,
    tables: &Tables,
    compactions: &[Compaction],
    stream: RawStream,
) -> Result<(), CudaError> {
    pool.pieces().iter().try_for_each(|pieces| compact_pieces(gpu, pieces, tracks.clone(), tables, compactions, stream))
}

fn compact_pieces(
    gpu: &Gpu,
    pieces: &Pieces,
    tracks: Range<u32>,
    tables: &Tables,
    compactions: &[Compaction],
    stream: RawStream,
) -> Result<(), CudaError> {
    let Pieces { address, table, page_stride, piece_stride, count, rows, .. } = *pieces;
    let Rows { slots, heads, head_bytes, slot_stride, head_stride } = rows;
    // If the heads of a slot are contiguous, they form one run of bytes.
    let is_contiguous = head_stride == head_bytes;
    let (runs, run_bytes) = if is_contiguous { (1, head_bytes * u64::from(heads)) } else { (heads, head_bytes) };
    let run_stride = if runs > 1 { head_stride } else { 0 };
    // The addresses of a table are multiples of 16.
    let unit = unit_bytes(&[address, piece_stride, page_stride, slot_stride, run_stride, run_bytes]);
    let all = u64::from(count) * u64::from(runs) * run_bytes;
    Limit::PageBytes.check(all, u64::from(u32::MAX - 256) * u64::from(unit))?;
    let shape = tables.shape();
    let mut params = CompactSlotsParams {
        pool: address,
        layer_stride: piece_stride,
        layer_table: table,
        page_stride,
        slot_stride,
        run_stride,
        table: tables.address(),
        page_size: slots,
        leaf_pages: shape.leaf_pages,
        leaves_per_row: shape.leaves_per_row,
        leaf_base: 0,
        layers: count,
        runs,
        run_units: (run_bytes / u64::from(unit)) as u32,
        unit_bytes: unit,
        compactions: [Compaction::default(); COMPACTIONS_MAX],
    };
    let blocks = ((all / u64::from(unit)) as u32).div_ceil(COMPACT_SLOTS.threads());
    for (some, track) in
        compactions.chunks(COMPACTIONS_MAX).flat_map(|some| tracks.clone().map(move |track| (some, track)))
    {
        params.compactions[..some.len()].copy_from_slice(some);
        params.leaf_base = tables.leaf_base(track);
        let grid = (blocks, some.len() as u32);
        // SAFETY: rows and places were checked, and the tables name only pages of the pool, so all addresses are in the
        // pool.
        unsafe { gpu.launch(COMPACT_SLOTS, grid, (COMPACT_SLOTS.threads(), 1), stream, &params, Start::InOrder) }?;
    }
    Ok(())
}
