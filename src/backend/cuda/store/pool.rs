//! K and V in device memory, in either layout, and their addresses for kernels.

use std::ops::Range;
use std::sync::Arc;

use super::scales::Scales;
use crate::backend::by_shape::ByShape;
use crate::backend::cuda::driver::gpu::Gpu;
use crate::backend::cuda::driver::memory::DeviceBuffer;
use crate::backend::cuda::error::CudaError;
use crate::backend::cuda::kernels::params::{LayerRope, LayerScales};
use crate::backend::cuda::kernels::{Kernel, Selection};
use crate::backend::{PlanError, check};
use crate::id::LayerId;
use crate::layout::{Dtype, KvScales, LabelChannels, PLANES_MAX, PlaneName, PoolLayout, Strides};

/// A pool in device memory, for the layers of one shape. The memory is not initialised: no result depends on a
/// slot that was not stored.
#[derive(Debug)]
pub struct Pool {
    memory: Arc<DeviceBuffer>,
    layout: PoolLayout,
    /// Index of the shape, which distinguishes variants of attention.
    shape: usize,
    k: Strides,
    /// Strides of V. They differ from those of K only in the origin, because kernels take one set of strides.
    v: Strides,
    /// Strides of the rotary part of quantised latent rows.
    rope: Option<Strides>,
    pages: Pages,
    scales: Scales,
    /// The properties that select its kernels.
    selection: Selection,
    /// The kernel that rotates rows, if there is one.
    rotates: Option<&'static Kernel>,
    /// The fingerprint of a page's bytes.
    fingerprint: u64,
}

impl Pool {
    /// Creates the pool of one shape in `memory`. The caller has checked scales and channels.
    pub fn new(
        gpu: &Gpu,
        memory: Arc<DeviceBuffer>,
        layout: PoolLayout,
        shape: usize,
        selection: Selection,
        scales: Option<&KvScales>,
        labels: Option<&LabelChannels>,
    ) -> Result<Self, CudaError> {
        let names = if layout.is_latent() { [PlaneName::Latent; 2] } else { [PlaneName::K, PlaneName::V] };
        let [k, v] = names.map(|name| layout.strides(name).expect("the pool has its shape's planes"));
        assert_eq!(Strides { origin: k.origin, ..v }, k, "K and V have equal strides");
        let pages = Pages::new(memory.address(), &layout);
        let fingerprint = layout.page_fingerprint(scales, labels);
        let scales = Scales::new(gpu, &layout, scales, memory.address())?;
        let rope = layout.strides(PlaneName::Rope);
        let rotates = selection.rope();
        Ok(Self { memory, layout, shape, k, v, rope, pages, scales, selection, rotates, fingerprint })
    }

    pub fn shape(&self) -> usize {
        self.shape
    }

    /// Returns the element type of the host's rows.
    pub fn rows(&self) -> Dtype {
        self.selection.rows
    }

    pub fn selection(&self) -> &Selection {
        &self.selection
    }

    pub fn rotates(&self) -> Option<&'static Kernel> {
        self.rotates
    }

    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// Returns the scales of a layer of the pool; zeros if the pool is not quantised.
    pub fn scales(&self, layer: LayerId) -> LayerScales {
        self.scales.of_layer(layer, self.layout.place(layer).lane)
    }

    /// Returns the rotary part of a layer's quantised latent rows.
    pub fn rope(&self, layer: LayerId) -> Option<LayerRope> {
        self.rope.as_ref().map(|strides| LayerRope {
            at: self.memory.address() + strides.lane_origin(self.layout.place(layer).lane),
            page_stride: strides.page,
            slot_stride: strides.slot as u32,
            elements: self.layout.head_dim() - self.layout.value_dim(),
        })
    }

    pub fn layout(&self) -> &PoolLayout {
        &self.layout
    }

    pub fn memory(&self) -> &DeviceBuffer {
        &self.memory
    }

    /// Returns the device addresses of page 0, slot 0 of one layer's K and V; they are equal for latent rows.
    pub fn origins(&self, layer: LayerId) -> Result<[u64; 2], CudaError> {
        check::layer(layer, &self.layout)?;
        let lane = self.layout.place(layer).lane;
        Ok([self.k, self.v].map(|strides| self.memory.address() + strides.lane_origin(lane)))
    }

    /// Returns the strides of K and V.
    pub fn strides(&self) -> &Strides {
        &self.k
    }

    pub fn pages(&self) -> &Pages {
        &self.pages
    }
}

impl ByShape<Pool> {
    /// Returns the pool for the group of a layer.
    pub fn of_layer(&self, layer: LayerId) -> Result<&Pool, PlanError> {
        let layout = &self.of_group(0).layout;
        check::layer(layer, layout)?;
        Ok(self.of_group(layout.place(layer).group))
    }
}

/// Pieces of one size: piece `i` of page `p` is at `address + p * page_stride + i * piece_stride`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Pieces {
    pub address: u64,
    pub page_stride: u64,
    pub piece_stride: u64,
    pub piece_bytes: u64,
    pub count: u32,
}

impl Pieces {
    /// Returns the number of bytes of the pieces of one page.
    pub fn bytes(&self) -> u64 {
        self.piece_bytes * u64::from(self.count)
    }
}

/// The addresses of whole pages: the pieces of a page, in groups. The pieces of a group have the same size.
/// [`Pages::new`] puts K and V into one group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pages {
    groups: [Pieces; PLANES_MAX],
    group_count: usize,
    /// Number of pieces of one plane in a page: one for each lane, or 1 if the planes depend on the group.
    pub lanes: u32,
    /// Number of pages.
    pub count: u32,
}

impl Pages {
    pub fn new(address: u64, layout: &PoolLayout) -> Self {
        let none = Pieces::default();
        let (groups, count) = ([none; PLANES_MAX], layout.page_count());
        let mut pages = Self { groups, group_count: 0, lanes: layout.lanes(), count };
        if !layout.has_one_shape() {
            pages.lanes = 1;
            // The planes depend on the group, but every page is contiguous.
            let bytes = layout.page_bytes();
            let (piece_bytes, piece_stride, page_stride) = (bytes, bytes, bytes);
            pages.push(Pieces { address, page_stride, piece_stride, piece_bytes, count: 1 });
            return pages;
        }
        for plane in layout.planes() {
            let strides = layout.strides(plane.name).expect("the plane is the pool's");
            pages.push(Pieces {
                address: address + strides.origin,
                page_stride: strides.page,
                piece_stride: strides.lane,
                piece_bytes: layout.piece_bytes(plane),
                count: layout.lanes(),
            });
        }
        pages
    }

    /// Returns consecutive pages of the same size, each contiguous.
    pub fn packed(address: u64, like: &Pages, count: u32) -> Self {
        let mut pages = Self { count, ..*like };
        let (page_stride, mut next) = (like.page_bytes(), address);
        for group in &mut pages.groups[..like.group_count] {
            *group = Pieces { address: next, page_stride, piece_stride: group.piece_bytes, ..*group };
            next += group.bytes();
        }
        pages
    }

    /// Returns the pieces of some lanes, a group for each plane.
    pub fn part(&self, lanes: Range<u32>) -> Self {
        let mut part = Self { group_count: 0, lanes: lanes.len() as u32, ..*self };
        for group in self.groups() {
            for first in (0..group.count).step_by(self.lanes as usize) {
                let address = group.address + u64::from(first + lanes.start) * group.piece_stride;
                part.groups[part.group_count] = Pieces { address, count: part.lanes, ..*group };
                part.group_count += 1;
            }
        }
        part
    }

    /// Returns the number of planes.
    pub fn planes(&self) -> u32 {
        self.groups().iter().map(|group| group.count / self.lanes).sum()
    }

    /// Adds the pieces of the next plane. If they have the size of the last group's pieces, they join that group. In
    /// both layouts, they begin where its next piece would.
    fn push(&mut self, pieces: Pieces) {
        match self.groups[..self.group_count].last_mut() {
            Some(last) if last.piece_bytes == pieces.piece_bytes => last.count += pieces.count,
            _ => {
                self.groups[self.group_count] = pieces;
                self.group_count += 1;
            }
        }
    }

    /// Returns the groups of pieces, in the order of a page.
    pub fn groups(&self) -> &[Pieces] {
        &self.groups[..self.group_count]
    }

    /// Returns the device address of the first page.
    pub fn address(&self) -> u64 {
        self.groups[0].address
    }

    /// Returns whether a page is contiguous.
    pub fn is_packed(&self) -> bool {
        let mut end = self.address();
        self.groups().iter().all(|group| {
            let follows = group.address == end && group.piece_stride == group.piece_bytes;
            end += group.bytes();
            follows
        })
    }

    /// Returns packed pages with one piece each.
    pub fn whole(&self) -> Pieces {
        debug_assert!(self.is_packed());
        let bytes = self.page_bytes();
        Pieces { address: self.address(), page_stride: bytes, piece_stride: bytes, piece_bytes: bytes, count: 1 }
    }

    /// Returns whether pages of the two pools have pieces of the same sizes and numbers.
    pub fn is_like(&self, other: &Self) -> bool {
        let shape = |pieces: &Pieces| (pieces.piece_bytes, pieces.count);
        self.groups().iter().map(shape).eq(other.groups().iter().map(shape))
    }

    pub fn page_bytes(&self) -> u64 {
        self.groups().iter().map(Pieces::bytes).sum()
    }
}

#[cfg(test)]
mod tests;
