//! K and V in device memory, in either layout, and their addresses for kernels.

use super::memory::PoolMemory;
use super::pages::{Pages, Pieces};
use super::scales::Scales;
use crate::backend::by_shape::ByShape;
use crate::backend::cuda::driver::gpu::Gpu;
use crate::backend::cuda::driver::memory::DeviceBuffer;
use crate::backend::cuda::error::CudaError;
use crate::backend::cuda::kernels::params::{LayerRope, LayerScales};
use crate::backend::cuda::kernels::{Kernel, Selection};
use crate::backend::{PlanError, check};
use crate::id::LayerId;
use crate::layout::{Dtype, KvScales, LabelChannels, PlaneName, PoolLayout, Strides};

/// A pool in device memory, for the layers of one shape. The memory is not initialised: no result depends on a
/// slot that was not stored.
#[derive(Debug)]
pub struct Pool {
    memory: PoolMemory,
    layout: PoolLayout,
    /// Index of the shape, which distinguishes variants of attention.
    shape: usize,
    /// Strides of K and V.
    strides: Strides,
    /// Device addresses of K and of V, by lane.
    origins: Vec<[u64; 2]>,
    /// Strides of the rotary part of quantised latent rows.
    rope: Option<Strides>,
    pages: Pages,
    /// The pieces of the shape's planes, in groups of equal pieces.
    pieces: Vec<Pieces>,
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
        memory: PoolMemory,
        layout: PoolLayout,
        shape: usize,
        selection: Selection,
        scales: Option<&KvScales>,
        labels: Option<&LabelChannels>,
    ) -> Result<Self, CudaError> {
        let (strides, origins) = (memory.strides(&layout), memory.origins(&layout));
        let pieces = memory.pieces(&layout);
        let pages = Pages::new(&pieces, &layout);
        let fingerprint = layout.page_fingerprint(scales, labels);
        let scales = Scales::new(gpu, &layout, scales, memory.own().address())?;
        let rope = layout.strides(PlaneName::Rope);
        let rotates = selection.rope();
        Ok(Self {
            memory,
            layout,
            shape,
            strides,
            origins,
            rope,
            pages,
            pieces,
            scales,
            selection,
            rotates,
            fingerprint,
        })
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
            at: self.memory().address() + strides.lane_origin(self.layout.place(layer).lane),
            page_stride: strides.page,
            slot_stride: strides.slot as u32,
            elements: self.layout.head_dim() - self.layout.value_dim(),
        })
    }

    pub fn layout(&self) -> &PoolLayout {
        &self.layout
    }

    /// Returns the backend's own memory, which is empty if the host gave the memory.
    pub fn memory(&self) -> &DeviceBuffer {
        self.memory.own()
    }

    /// Returns the device addresses of page 0, slot 0 of one layer's K and V; they are equal for latent rows.
    pub fn origins(&self, layer: LayerId) -> Result<[u64; 2], CudaError> {
        check::layer(layer, &self.layout)?;
        Ok(self.origins[self.layout.place(layer).lane as usize])
    }

    /// Returns the strides of K and V.
    pub fn strides(&self) -> &Strides {
        &self.strides
    }

    pub fn pages(&self) -> &Pages {
        &self.pages
    }

    /// Returns the pieces of the planes, in groups of equal pieces.
    pub fn pieces(&self) -> &[Pieces] {
        &self.pieces
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
