//! The memory of a pool, and the only addresses and strides of its planes that kernels receive.

use std::sync::Arc;

use super::given::GivenPool;
use super::pages::{Pieces, Rows};
use crate::backend::cuda::driver::gpu::Gpu;
use crate::backend::cuda::driver::memory::DeviceBuffer;
use crate::backend::cuda::error::CudaError;
use crate::layout::{PlaneName, PoolLayout, Strides};

/// The memory of a pool. Pools of several shapes share it.
#[derive(Clone, Debug)]
pub struct PoolMemory {
    /// The backend's own memory, in the order of [`PoolLayout`]; empty if the host gave the memory.
    own: Arc<DeviceBuffer>,
    given: Option<Arc<Given>>,
}

/// Memory that the host gave.
#[derive(Debug)]
struct Given {
    pool: GivenPool,
    /// Device addresses, u64 `[plane, lane]`, of page 0.
    table: DeviceBuffer,
}

impl PoolMemory {
    /// Allocates a pool's memory, or checks and takes that of the host.
    pub fn new(gpu: &Gpu, layout: &PoolLayout, given: Option<GivenPool>) -> Result<Self, CudaError> {
        let Some(pool) = given else {
            return Ok(Self { own: Arc::new(DeviceBuffer::lasting(gpu, layout.total_bytes())?), given: None });
        };
        pool.check(gpu, layout)?;
        let planes = [0, 1].into_iter().flat_map(|plane| pool.layers.iter().map(move |layer| layer[plane]));
        let addresses: Vec<u64> = planes.map(|plane| pool.address(plane)).collect();
        let mut table = DeviceBuffer::lasting(gpu, size_of_val(&addresses[..]) as u64)?;
        table.write(0, &addresses)?;
        Ok(Self { own: Arc::new(DeviceBuffer::lasting(gpu, 0)?), given: Some(Arc::new(Given { pool, table })) })
    }

    /// Returns the backend's own memory, which is empty if the host gave the memory.
    pub fn own(&self) -> &DeviceBuffer {
        &self.own
    }

    /// Returns the strides of K and V, or of latent rows. Kernels take one set for both.
    pub fn strides(&self, layout: &PoolLayout) -> Strides {
        if let Some(Given { pool, .. }) = self.given.as_deref() {
            let GivenPool { page, slot, head, .. } = *pool;
            return Strides { origin: 0, lane: 0, page, slot, head };
        }
        let [k, v] = names(layout).map(|name| layout.strides(name).expect("the pool has its shape's planes"));
        assert_eq!(Strides { origin: k.origin, ..v }, k, "K and V have equal strides");
        k
    }

    /// Returns the device addresses of page 0, slot 0, head 0 of K and of V by lane; equal for latent rows.
    pub fn origins(&self, layout: &PoolLayout) -> Vec<[u64; 2]> {
        if let Some(Given { pool, .. }) = self.given.as_deref() {
            return pool.layers.iter().map(|planes| planes.map(|plane| pool.address(plane))).collect();
        }
        let planes = names(layout).map(|name| layout.strides(name).expect("the pool has its shape's planes"));
        (0..layout.lanes()).map(|lane| planes.map(|plane| self.own.address() + plane.lane_origin(lane))).collect()
    }

    /// Returns the pieces of a page in the order of a page, in groups of equal pieces. K and V form one group.
    pub fn pieces(&self, layout: &PoolLayout) -> Vec<Pieces> {
        if let Some(Given { pool, table }) = self.given.as_deref() {
            let GivenPool { page, slot, head, .. } = *pool;
            let plane = &layout.planes()[0];
            let rows = Rows { slot_stride: slot, head_stride: head, ..Rows::new(layout, plane) };
            let (piece_bytes, count) = (layout.piece_bytes(plane), 2 * layout.lanes());
            let (address, table, page_stride, piece_stride) = (0, table.address(), page, 0);
            return vec![Pieces { address, table, page_stride, piece_stride, piece_bytes, rows, count }];
        }
        own_pieces(self.own.address(), layout)
    }
}

/// Returns the pieces of a page of the backend's own memory at an address.
pub(super) fn own_pieces(address: u64, layout: &PoolLayout) -> Vec<Pieces> {
    let mut groups: Vec<Pieces> = Vec::new();
    for plane in layout.planes() {
        let Strides { origin, lane, page, slot, head } = layout.strides(plane.name).expect("the plane is the pool's");
        let pieces = Pieces {
            address: address + origin,
            table: 0,
            page_stride: page,
            piece_stride: lane,
            piece_bytes: layout.piece_bytes(plane),
            rows: Rows { slot_stride: slot, head_stride: head, ..Rows::new(layout, plane) },
            count: layout.lanes(),
        };
        match groups.last_mut() {
            Some(last) if last.continues(&pieces) => last.count += pieces.count,
            _ => groups.push(pieces),
        }
    }
    groups
}

/// Returns the planes that stores and attention use.
fn names(layout: &PoolLayout) -> [PlaneName; 2] {
    if layout.is_latent() { [PlaneName::Latent; 2] } else { [PlaneName::K, PlaneName::V] }
}
