//! K and V in device memory, in either layout, and what kernels need to know to find them.
//!
//! All offsets are 64-bit before they are multiplied. Not here: page tables.

use super::error::CudaError;
use super::gpu::Gpu;
use super::memory::DeviceBuffer;
use crate::id::LayerId;
use crate::layout::{Kv, Layout, PoolLayout};

/// A pool in device memory. Not initialised: no kernel reads a slot that was not stored.
#[derive(Debug)]
pub(super) struct Pool {
    memory: DeviceBuffer,
    layout: PoolLayout,
}

impl Pool {
    pub(super) fn new(gpu: &Gpu, layout: PoolLayout) -> Result<Self, CudaError> {
        Ok(Self { memory: DeviceBuffer::lasting(gpu, layout.total_bytes())?, layout })
    }

    pub(super) fn layout(&self) -> &PoolLayout {
        &self.layout
    }

    pub(super) fn memory(&self) -> &DeviceBuffer {
        &self.memory
    }

    /// Device address of page 0, slot 0 of one layer's K or V.
    pub(super) fn origin(&self, kv: Kv, layer: LayerId) -> Result<u64, CudaError> {
        if layer.raw() >= self.layout.layers() {
            return Err(CudaError::Layer { layer });
        }
        let size = u64::from(self.layout.dtype().size());
        Ok(self.memory.address() + self.layout.origin(kv, layer) * size)
    }

    /// Bytes from page to page within a layer, and from slot to slot within a page.
    pub(super) fn strides(&self) -> (u64, u64) {
        let size = u64::from(self.layout.dtype().size());
        let strides = self.layout.strides();
        (strides.page * size, strides.slot * size)
    }

    pub(super) fn pages(&self) -> Pages {
        Pages::of(self.memory.address(), &self.layout)
    }
}

/// Where whole pages lie: piece `i` of page `p` at `address + p * page_stride + i * piece_stride`. A piece is one page
/// of K or V of one layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Pages {
    pub(super) address: u64,
    pub(super) page_stride: u64,
    pub(super) piece_stride: u64,
    pub(super) piece_bytes: u64,
    pub(super) pieces: u32,
    pub(super) count: u32,
}

impl Pages {
    pub(super) fn of(address: u64, layout: &PoolLayout) -> Self {
        let pieces = 2 * layout.layers();
        let page_bytes = layout.page_bytes();
        let piece_bytes = page_bytes / u64::from(pieces);
        let (page_stride, piece_stride) = match layout.layout() {
            Layout::LayerFirst => (piece_bytes, piece_bytes * u64::from(layout.page_count())),
            Layout::PageFirst => (page_bytes, piece_bytes),
        };
        let count = layout.page_count();
        Self { address, page_stride, piece_stride, piece_bytes, pieces, count }
    }

    /// Pages of `like`'s shape that lie one after another, each in one piece of memory.
    pub(super) fn packed(address: u64, like: &Pages, count: u32) -> Self {
        let page_stride = like.piece_bytes * u64::from(like.pieces);
        Self { address, page_stride, piece_stride: like.piece_bytes, count, ..*like }
    }

    /// Whether a page is one piece of memory.
    pub(super) fn is_packed(&self) -> bool {
        self.piece_stride == self.piece_bytes
    }

    pub(super) fn page_bytes(&self) -> u64 {
        self.piece_bytes * u64::from(self.pieces)
    }
}
