//! The scales of a quantised pool on the device: static scales, uploaded once, or planes of the pool.

use crate::backend::cuda::driver::gpu::Gpu;
use crate::backend::cuda::driver::memory::DeviceBuffer;
use crate::backend::cuda::error::CudaError;
use crate::backend::cuda::kernels::params::LayerScales;
use crate::id::LayerId;
use crate::layout::{KvScales, PlaneName, PoolLayout, Scaling, Strides};

/// Bytes of the two scales of one head, of K and of V.
const HEAD_BYTES: u32 = 8;

#[derive(Debug)]
pub enum Scales {
    /// The pool is not quantised.
    None,
    /// f32 `[layers, kv_heads, K and V]`.
    Static { memory: DeviceBuffer, kv_heads: u32 },
    /// Planes of the pool at device address `pool`.
    ByToken { pool: u64, planes: [Strides; 2] },
}

impl Scales {
    /// Returns the scales of a pool at device address `pool`. Uploads static scales: `given`, which the caller has
    /// checked, or ones.
    pub fn new(gpu: &Gpu, layout: &PoolLayout, given: Option<&KvScales>, pool: u64) -> Result<Self, CudaError> {
        Ok(match layout.scaling() {
            None => Self::None,
            Some(Scaling::ByToken) => {
                // K and V share numbers in latent rows, so they share scales.
                let v = if layout.is_latent() { PlaneName::KScales } else { PlaneName::VScales };
                let planes =
                    [PlaneName::KScales, v].map(|name| layout.strides(name).expect("the pool has planes of scales"));
                assert_eq!(Strides { origin: planes[0].origin, ..planes[1] }, planes[0]);
                Self::ByToken { pool, planes }
            }
            Some(Scaling::Static) => {
                let kv_heads = given.map_or(layout.kv_heads(), KvScales::kv_heads);
                let count = 2 * layout.layers() as usize * kv_heads as usize;
                let ones = vec![1.0_f32; if given.is_some() { 0 } else { count }];
                let values = given.map_or(&ones[..], KvScales::values);
                let mut memory = DeviceBuffer::lasting(gpu, 4 * count as u64)?;
                memory.write(0, values)?;
                Self::Static { memory, kv_heads }
            }
        })
    }

    /// Returns the scales of one layer; `lane` is its lane.
    pub fn of_layer(&self, layer: LayerId, lane: u32) -> LayerScales {
        match self {
            Self::None => LayerScales::default(),
            Self::Static { memory, kv_heads } => {
                let layer_bytes = u64::from(*kv_heads) * u64::from(HEAD_BYTES);
                let k = memory.address() + layer_bytes * u64::from(layer.raw());
                let (page_stride, head_stride) = (0, HEAD_BYTES);
                LayerScales { k, v: k + 4, page_stride, head_stride, by_token: 0 }
            }
            Self::ByToken { pool, planes } => {
                let [k, v] = planes.map(|plane| pool + plane.lane_origin(lane));
                let Strides { page, head, .. } = planes[0];

                LayerScales { k, v, page_stride: page, head_stride: head as u32, by_token: 1 }
            }
        }
    }
}
