//! Rotation and store of K and V: into the pool, or into rows that the backend stores.

use kvarena::backend::cuda::{DeviceBuffer, StagedPlan};
use kvarena::{LayerId, PlaneName, PoolLayout, SlotMapping, Strides};

use super::super::device::Device;
use super::super::error::GpuError;
use super::super::kernels::RopeStoreParams;
use super::{Fault, Forward};

/// Rows of K and V of a step, consecutive, for the backend's store.
#[derive(Debug)]
pub(super) struct Rotated {
    /// 0, 1, ..
    slots: DeviceBuffer,
    pub(super) k: DeviceBuffer,
    pub(super) v: DeviceBuffer,
    row_bytes: u64,
}

impl Rotated {
    /// Allocates `rows` rows of K and of V.
    pub(super) fn new(device: &Device, rows: usize, row_bytes: u64) -> Result<Self, GpuError> {
        let buffer = || device.zeros(rows * row_bytes as usize);
        let slots: Vec<i32> = (0..rows as i32).collect();
        let slots = DeviceBuffer::of(&device.gpu, &slots)?;
        Ok(Self { slots, k: buffer()?, v: buffer()?, row_bytes })
    }
}

impl Forward {
    /// Returns the layer that stores a layer's K and V.
    pub(super) fn stored_layer(&self, layer: usize) -> usize {
        match self.fault {
            Fault::Page => (layer + 1) % self.config.layers,
            _ => layer,
        }
    }

    /// Rotates Q and K of a layer, and stores K and V in the pool or in [`Rotated`].
    pub(super) fn rotate_and_store(
        &self,
        device: &Device,
        layer: usize,
        (layout, pool): (&PoolLayout, u64),
        (tokens, staged, slots): (usize, StagedPlan, SlotMapping<'_>),
    ) -> Result<(), GpuError> {
        let weights = &self.weights.layers[layer];
        let [k, v] = planes(layout);
        let stored = layout.place(LayerId::new(self.stored_layer(layer) as u32));
        let windowed = usize::from(self.config.windows[layer].is_some());
        let heads = self.config.q_heads + 2 * self.config.kv_heads;
        // A warp for each head until that fills the device; then a warp takes several heads and reuses a token's
        // angles.
        let heads_each = (tokens * heads / 16384).clamp(1, heads);
        let mut params = RopeStoreParams {
            qkv: self.qkv.address(),
            positions: staged.positions + if self.fault == Fault::Position { 4 } else { 0 },
            slots: staged.slots_of(stored.track),
            q_norm: weights.q_norm,
            k_norm: weights.k_norm,
            frequencies: match self.fault {
                Fault::Rotary => self.swapped.address(),
                _ => self.weights.frequencies[windowed],
            },
            k_pool: pool + k.lane_origin(stored.lane),
            v_pool: pool + v.lane_origin(stored.lane),
            page_stride: k.page,
            slot_stride: k.slot,
            slot_bytes: if matches!(slots, SlotMapping::I32(_)) { 4 } else { 8 },
            page_size: layout.page_size(),
            tokens: tokens as u32,
            q_heads: self.config.q_heads as u32,
            kv_heads: self.config.kv_heads as u32,
            heads_each: heads_each as u32,
            eps: self.config.norm_eps,
            reserved: 0,
        };
        if let Some(Rotated { slots, k, v, row_bytes }) = &self.rotated {
            (params.slots, params.slot_bytes, params.page_size) = (slots.address(), 4, 1);
            (params.k_pool, params.v_pool) = (k.address(), v.address());
            (params.page_stride, params.slot_stride) = (*row_bytes, *row_bytes);
        }
        let warps = tokens * heads.div_ceil(heads_each);
        let kernel = &device.kernels.rope_store[self.config.head_dim.ilog2() as usize - 6];
        // SAFETY: head_dim was checked in `new`; the staged plan's slots were checked against the pool; qkv has memory
        // for the step.
        unsafe { kernel.launch(device.raw(), (warps.div_ceil(4) as u32, 1), 128, &params) }
    }
}

/// Returns the strides of K and V in the pool, which differ only in their origin.
fn planes(layout: &PoolLayout) -> [Strides; 2] {
    let [k, v] = [PlaneName::K, PlaneName::V]
        .map(|plane| layout.strides(plane).expect("the pool is of heads"));
    assert_eq!((k.page, k.slot), (v.page, v.slot), "a slot's K and V have one width");
    [k, v]
}
