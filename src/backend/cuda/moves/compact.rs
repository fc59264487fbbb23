//! Moves slots of rows, in all planes and tracks of a group. For each track, one launch moves the slots of at most
//! `COMPACTIONS_MAX` rows in consecutive planes of the same shape, such as K and V.
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
use crate::backend::cuda::store::pool::Pool;
use crate::layout::{Plane, PlaneOrder, Strides};
use crate::plan::Compaction;

/// Consecutive planes of the same size and order. The stride from a plane's last layer to the next plane's first layer
/// equals the stride between layers of one plane. The kernel therefore treats them as the layers of one plane.
#[derive(Clone, Copy)]
struct PlaneRun {
    plane: Plane,
    strides: Strides,
    layers: u32,
}

/// Moves slots in the stream's order. The caller has checked the compactions.
pub fn compact(
    gpu: &Gpu,
    pool: &Pool,
    tracks: Range<u32>,
    tables: &Tables,
    compactions: &[Compaction],
    stream: RawStream,
) -> Result<(), CudaError> {
    let layout = pool.layout();
    let mut planes = layout.planes().iter();
    let mut next = planes.next();
    while let Some(&plane) = next {
        let strides = layout.strides(plane.name).expect("the plane is the pool's");
        let mut run = PlaneRun { plane, strides, layers: layout.lanes() };
        next = planes.next();
        while let Some(other) = next
            && (Plane { name: plane.name, ..*other }) == plane
        {
            run.layers += layout.lanes();
            next = planes.next();
        }
        compact_planes(gpu, pool, tracks.clone(), tables, run, compactions, stream)?;
    }
    Ok(())
}

fn compact_planes(
    gpu: &Gpu,
    pool: &Pool,
    tracks: Range<u32>,
    tables: &Tables,
    PlaneRun { plane, strides, layers }: PlaneRun,
    compactions: &[Compaction],
    stream: RawStream,
) -> Result<(), CudaError> {
    let head_bytes = u64::from(plane.elements) * u64::from(plane.dtype.size());
    // In order by slot, a token's heads form one run of bytes.
    let (runs, run_bytes) = match plane.order {
        PlaneOrder::BySlot => (1, head_bytes * u64::from(plane.heads)),
        PlaneOrder::ByPage => (plane.heads, head_bytes),
    };
    let address = pool.memory().address() + strides.origin;
    let Strides { lane, page, slot, head, .. } = strides;
    let run_stride = if runs > 1 { head } else { 0 };
    let unit = unit_bytes(&[address, lane, page, slot, run_stride, run_bytes]);
    let all = u64::from(layers) * u64::from(runs) * run_bytes;
    Limit::PageBytes.check(all, u64::from(u32::MAX - 256) * u64::from(unit))?;
    let shape = tables.shape();
    let mut params = CompactSlotsParams {
        pool: address,
        layer_stride: lane,
        page_stride: page,
        slot_stride: slot,
        run_stride,
        table: tables.address(),
        page_size: pool.layout().page_size(),
        leaf_pages: shape.leaf_pages,
        leaves_per_row: shape.leaves_per_row,
        leaf_base: 0,
        layers,
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
