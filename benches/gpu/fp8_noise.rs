//! Random contents of fp8 pools on the device, and their static scales.

use cust::sys;
use kvarena::backend::cuda::{Cuda, DeviceBuffer, Gpu};
use kvarena::layout::{KvScales, PlaneName, PoolLayout, Scaling};
use kvarena::testkit::quantised::{scales, value};
use kvarena::testkit::rng::Rng;
use kvarena::{KvDtype, LayerId, PoolConfig, SlotId};

use crate::Outcome;
use crate::batch::Noise;

/// Elements of a head, and kv heads, of the pools.
pub const HEAD_DIM: u32 = 128;
pub const KV_HEADS: u32 = 8;

/// Returns the static scales of a pool of fp8 that has them.
pub fn static_scales(config: &PoolConfig) -> Option<KvScales> {
    let has_scales = config.dtype == KvDtype::Fp8E4M3 && config.scaling == Scaling::Static;
    has_scales.then(|| scales(config.layers, KV_HEADS, 1))
}

/// Random bytes of fp8, and scales of tokens, repeated through device memory like [`Noise`].
pub struct Fp8Noise {
    bytes: (Vec<u8>, DeviceBuffer),
    scales: (Vec<f32>, DeviceBuffer),
}

impl Fp8Noise {
    pub fn new(gpu: &Gpu) -> Outcome<Self> {
        let mut rng = Rng::new(43);
        // Magnitudes up to 11, with both signs.
        let bytes: Vec<u8> = (0..24_000_008).map(|_| rng.below(0x54) as u8 | (rng.below(2) as u8) << 7).collect();
        let scales: Vec<f32> = (0..1_000_003).map(|_| (1 + rng.below(100)) as f32 / 256.0).collect();
        let on_gpu = (DeviceBuffer::of(gpu, &bytes)?, DeviceBuffer::of(gpu, &scales)?);
        Ok(Self { bytes: (bytes, on_gpu.0), scales: (scales, on_gpu.1) })
    }

    /// Returns the value of byte `at` of the pool.
    pub fn number(&self, at: u64) -> f64 {
        let all = &self.bytes.0;
        value(all[(at % all.len() as u64) as usize])
    }

    /// Returns the scale that is `at` bytes after the start of the first plane of scales.
    pub fn scale(&self, at: u64) -> f32 {
        let all = &self.scales.0;
        all[(at / 4 % all.len() as u64) as usize]
    }

    /// Returns one kv head of K or V at a slot of a filled pool.
    pub fn stored(
        &self,
        pool: &PoolLayout,
        scales: Option<&KvScales>,
        (plane, layer, slot, head): (PlaneName, LayerId, SlotId, u32),
    ) -> Vec<f64> {
        let side = usize::from(plane == PlaneName::V);
        let scale = if let Some(strides) = pool.strides([PlaneName::KScales, PlaneName::VScales][side]) {
            let (page, offset) = pool.page_of(slot);
            let first = pool.strides(PlaneName::KScales).expect("by token").origin;
            let at = strides.row(layer.raw(), page, offset) + strides.head * u64::from(head);
            self.scale(at - first)
        } else {
            scales.expect("static scales are given").get(layer, head)[side]
        };
        let row = pool.row(plane, layer, slot).expect("the pool has the plane");
        let first = row.start + u64::from(head * HEAD_DIM);
        let number = |i| self.number(i) * f64::from(scale);
        (first..first + u64::from(HEAD_DIM)).map(number).collect()
    }

    /// Fills a pool: scales in their planes, if any, `rope` noise in the unquantised part of latent rows, and bytes
    /// elsewhere.
    pub fn fill(&self, cuda: &Cuda, rope: &Noise) -> Outcome<()> {
        let (layout, pool) = (cuda.layout(), cuda.pool());
        repeat(&self.bytes.1, pool.address(), pool.bytes());
        if let Some(strides) = layout.strides(PlaneName::Rope) {
            rope.fill_from(pool, strides.origin)?;
        }
        if let Some(scales) = layout.strides(PlaneName::KScales) {
            repeat(&self.scales.1, pool.address() + scales.origin, pool.bytes() - scales.origin);
        }
        Ok(())
    }
}

/// Fills memory with copies of `source`.
fn repeat(source: &DeviceBuffer, target: u64, bytes: u64) {
    for at in (0..bytes).step_by(source.bytes() as usize) {
        let count = (bytes - at).min(source.bytes());
        // SAFETY: both ranges are inside their buffers.
        let result = unsafe { sys::cuMemcpyDtoD_v2(target + at, source.address(), count as usize) };
        assert_eq!(result as u32, 0, "cuMemcpyDtoD");
    }
    // SAFETY: takes no pointers.
    assert_eq!(unsafe { sys::cuCtxSynchronize() } as u32, 0, "cuCtxSynchronize");
}
