//! Norm and rotation of Q and K, and the store of K and V, by the backend.

use kvarena::backend::Rope;
use kvarena::backend::cuda::{Cuda, DeviceRows, DeviceRowsMut};
use kvarena::layout::Dtype;
use kvarena::{Backend, BatchPlan, LayerId};

use super::super::error::GpuError;
use super::super::weights::qkv_stride;
use super::{Forward, InjectedFault};

impl Forward {
    /// Returns the layer of the pool that stores a layer's K and V: the same layer, except for [`InjectedFault::Page`].
    fn stored_layer(&self, layer: usize) -> usize {
        match self.fault {
            InjectedFault::Page => (layer + 1) % self.config.layers,
            _ => layer,
        }
    }

    /// Norms and rotates Q and K of a layer in place, and stores K and V in the pool.
    pub(super) fn rotate_and_store(
        &self,
        backend: &mut Cuda,
        plan: &BatchPlan<'_>,
        layer: usize,
    ) -> Result<(), GpuError> {
        let (weights, dtype) = (&self.weights.layers[layer], backend.rows());
        let (dim, stride) = (self.config.head_dim, qkv_stride(&self.config));
        let len = plan.token_count() * stride;
        let windowed = usize::from(self.config.windows[layer].is_some());
        let frequencies = match self.fault {
            InjectedFault::Rotary => self.swapped.address(),
            InjectedFault::Position => self.stretched.address(),
            _ => self.weights.frequencies[windowed],
        };
        // SAFETY: weights and rows live as long as `self`, and are accessed only in the stream's order.
        let (rope, qkv) = unsafe {
            let norm = |at: u64| (at != 0).then(|| DeviceRows::from_raw(at, dtype, dim, None));
            let rope = Rope {
                q_heads: self.config.q_heads as u32,
                q_norm: norm(weights.q_norm),
                k_norm: norm(weights.k_norm),
                eps: self.config.norm_eps,
                frequencies: DeviceRows::from_raw(frequencies, Dtype::F32, dim / 2, None),
            };
            (rope, DeviceRowsMut::from_raw(self.qkv.address(), dtype, len, Some(stride)))
        };
        let layer = LayerId::new(self.stored_layer(layer) as u32);
        Ok(backend.rope_store(plan, layer, &rope, qkv)?)
    }
}
