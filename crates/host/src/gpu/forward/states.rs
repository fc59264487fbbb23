//! Layers that keep a state, and the gates of attention's output in their models.

use kvarena::backend::cuda::{Cuda, DeviceBuffer, StateSlots};
use kvarena::{BatchPlan, LayerId};

use super::super::delta::{self, DeltaBuffers, DeltaRows};
use super::super::device::Device;
use super::super::error::GpuError;
use super::super::kernels::GateParams;
use super::super::weights::{qkv_stride, qkv_width};
use super::Forward;
use crate::config::ModelConfig;
use crate::delta::CACHED_CONV;

/// Activations of the layers that keep a state.
#[derive(Debug)]
pub(super) struct States {
    /// `[tokens, channels]`
    mixed: DeviceBuffer,
}

impl States {
    /// Allocates the activations of `tokens` tokens, if layers keep a state.
    pub(super) fn new(device: &Device, config: &ModelConfig, tokens: usize) -> Result<Option<Self>, GpuError> {
        let Some(delta) = &config.delta else { return Ok(None) };
        Ok(Some(Self { mixed: device.zeros(2 * tokens * delta.channels())? }))
    }
}

impl Forward {
    /// Advances the states of a layer in the backend's pool, and writes its output to `attended`.
    pub(super) fn advance_states(
        &self,
        device: &Device,
        backend: &mut Cuda,
        plan: &BatchPlan<'_>,
        index: usize,
    ) -> Result<(), GpuError> {
        let (Some(config), Some(States { mixed })) = (self.config.delta_of(index), &self.states) else {
            unreachable!("layer {index} keeps a state")
        };
        let lane_bytes = backend.layout().state().map_or(0, |state| state.lane_bytes);
        assert!(config.state(CACHED_CONV).bytes() as u64 <= lane_bytes, "the pool has room for the model's states");
        let StateSlots { reads, writes, starts, states, stride, .. } =
            backend.slots(plan, LayerId::new(index as u32))?;
        let (rows, tokens) = (plan.rows.len() as u32, plan.token_count() as u32);
        let rows = DeltaRows { rows, tokens, starts, reads, writes, states, stride };
        let (projected, out) = (self.qkv.address(), self.attended.address());
        let buffers = DeltaBuffers { projected, mixed: mixed.address(), out };
        let weights = &self.weights.layers[index].delta;
        // SAFETY: `new` checked the sizes, and the activations have memory for the step. The backend checked the slots
        // and the plan; the engine's rows write pages of their own, which have the model's states.
        unsafe { delta::launch(device, config, &rows, weights, &buffers, self.config.norm_eps) }
    }

    /// Multiplies attention's output by the sigmoid of its gates, if the model has gates.
    pub(super) fn gate_attention(&self, device: &Device, tokens: usize) -> Result<(), GpuError> {
        if !self.config.family.gates_attention() {
            return Ok(());
        }
        let width = self.config.q_heads * self.config.head_dim;
        let params = GateParams {
            x: self.attended.address(),
            gates: self.qkv.address() + 2 * qkv_width(&self.config) as u64,
            width: width as u32,
            stride: qkv_stride(&self.config) as u32,
        };
        let grid = ((width / 8).div_ceil(128) as u32, tokens as u32);
        // SAFETY: both buffers have memory for the step, and heads are multiples of 8 elements.
        unsafe { device.kernels.gate.launch(device.raw(), grid, 128, &params) }
    }
}
