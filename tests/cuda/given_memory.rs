//! Pools in memory of the host, in several forms, with access to their bytes for tests.

use std::sync::Arc;

use kvarena::PageId;
use kvarena::backend::cuda::{DeviceBuffer, DeviceRegion, GivenPlane, GivenPool, Gpu};
use kvarena::layout::{PlaneName, PoolLayout};

use crate::on_gpu::write_device;

/// The bytes of gaps between heads, which nothing may write.
const GAP: u8 = 0xee;

/// A form of a pool in memory of the host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// One allocation, `[pages, layers, K and V, page_size, kv_heads, head_dim]`.
    PageLayerPlane,
    /// Tensors of each layer, `[pages, page_size, kv_heads, head_dim]`.
    Nhd,
    /// Tensors of each layer, `[pages, kv_heads, page_size, head_dim]`.
    Hnd,
    /// One allocation, `[pages, page_size, layers, V and K, kv_heads, head_dim]`, with gaps after every axis.
    Gaps,
}

impl Form {
    pub const ALL: [Self; 4] = [Self::PageLayerPlane, Self::Nhd, Self::Hnd, Self::Gaps];

    /// Returns whether memory of the host can be the pool.
    pub fn serves(layout: &PoolLayout) -> bool {
        let names = layout.planes().iter().map(|plane| plane.name).eq([PlaneName::K, PlaneName::V]);
        layout.has_one_shape() && names && head_bytes(layout).is_multiple_of(16)
    }

    /// Allocates the memory of a pool; `None` if such memory cannot be the pool.
    pub fn allocate(self, gpu: &Gpu, layout: &PoolLayout) -> Option<GivenMemory> {
        if !Self::serves(layout) {
            return None;
        }
        let head_bytes = head_bytes(layout);
        let (lanes, heads) = (u64::from(layout.lanes()), u64::from(layout.kv_heads()));
        let tensor = layout.total_bytes() / (2 * lanes);
        let mut buffers = Vec::new();
        let mut region = |bytes: u64| {
            let buffer = Arc::new(DeviceBuffer::of(gpu, &vec![GAP; bytes as usize]).expect("memory"));
            buffers.push(buffer.clone());
            // SAFETY: the buffer stays allocated while it is the owner, and only the backend and this module use it.
            unsafe { DeviceRegion::from_raw(gpu, buffer.address(), buffer.bytes(), buffer.clone()) }.expect("memory")
        };
        let mut tensors = || (0..lanes).map(|_| [region(tensor), region(tensor)]).collect();
        let pool = match self {
            Self::Nhd => GivenPool::nhd(layout, tensors()),
            Self::Hnd => GivenPool::hnd(layout, tensors()),
            Self::PageLayerPlane => GivenPool::page_layer_plane(layout, region(layout.total_bytes())),
            Self::Gaps => {
                let head = head_bytes + 16;
                let plane = heads * head + 32;
                let slot = 2 * lanes * plane + 16;
                let page = u64::from(layout.page_size()) * slot + 64;
                let of = |index: u64| GivenPlane { region: 0, origin: 48 + index * plane };
                let layers = (0..lanes).map(|lane| [of(2 * lane + 1), of(2 * lane)]).collect();
                let regions = vec![region(48 + u64::from(layout.page_count()) * page)];
                GivenPool { regions, layers, page, slot, head }
            }
        };
        Some(GivenMemory { pool, buffers, head_bytes })
    }
}

fn head_bytes(layout: &PoolLayout) -> u64 {
    let plane = layout.planes()[0];
    u64::from(plane.elements) * u64::from(plane.dtype.size())
}

/// A pool in memory of the host.
#[derive(Debug)]
pub struct GivenMemory {
    pub pool: GivenPool,
    /// The memory of each region.
    buffers: Vec<Arc<DeviceBuffer>>,
    head_bytes: u64,
}

impl GivenMemory {
    /// Calls `each` with the region and the first byte of each head of a page, in the order `[plane, lane, piece]`.
    fn heads(&self, layout: &PoolLayout, page: PageId, mut each: impl FnMut(usize, usize)) {
        let GivenPool { page: page_stride, slot: slot_stride, head: head_stride, .. } = self.pool;
        for planes in [0, 1].map(|plane| self.pool.layers.iter().map(move |layer| layer[plane])) {
            for GivenPlane { region, origin } in planes {
                let first = origin + u64::from(page.raw()) * page_stride;
                for slot in 0..u64::from(layout.page_size()) {
                    for head in 0..u64::from(layout.kv_heads()) {
                        each(region, (first + slot * slot_stride + head * head_stride) as usize);
                    }
                }
            }
        }
    }

    fn read(&self) -> Vec<Vec<u8>> {
        self.buffers.iter().map(|buffer| buffer.read(0, buffer.bytes() as usize).expect("bytes")).collect()
    }

    /// Reads the bytes of pages, each in the order `[plane, lane, piece]`.
    pub fn read_pages(&self, layout: &PoolLayout, pages: &[PageId], target: &mut [u8]) {
        let (all, len) = (self.read(), self.head_bytes as usize);
        let mut heads = target.chunks_exact_mut(len);
        for &page in pages {
            self.heads(layout, page, |region, at| {
                heads.next().expect("a head").copy_from_slice(&all[region][at..at + len]);
            });
        }
    }

    /// Writes the bytes of pages, in the same order.
    pub fn write_pages(&self, gpu: &Gpu, layout: &PoolLayout, pages: &[PageId], source: &[u8]) {
        let (mut all, len) = (self.read(), self.head_bytes as usize);
        let mut heads = source.chunks_exact(len);
        for &page in pages {
            self.heads(layout, page, |region, at| {
                all[region][at..at + len].copy_from_slice(heads.next().expect("a head"));
            });
        }
        for (buffer, bytes) in self.buffers.iter().zip(&all) {
            write_device(gpu, buffer.address(), bytes);
        }
    }

    /// Checks that nothing wrote the bytes between the heads.
    pub fn check_gaps(&self, layout: &PoolLayout) {
        let (mut all, len) = (self.read(), self.head_bytes as usize);
        for page in (0..layout.page_count()).map(PageId::new) {
            self.heads(layout, page, |region, at| all[region][at..at + len].fill(GAP));
        }
        assert!(all.iter().flatten().all(|&byte| byte == GAP), "a byte between heads has changed");
    }
}
