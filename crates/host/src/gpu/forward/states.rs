//! Layers that keep a state, and the gates of attention's output in their models.

use kvarena::BatchPlan;
use kvarena::backend::cuda::DeviceBuffer;

use super::super::delta::{self, DeltaBuffers, DeltaRows};
use super::super::device::Device;
use super::super::error::GpuError;
use super::super::kernels::GateParams;
use super::super::weights::{qkv_stride, qkv_width};
use super::{Forward, Op};
use crate::config::ModelConfig;

/// Device addresses of one layer's states, and of the slots that a step's rows read and write.
#[derive(Clone, Copy, Debug)]
pub struct LayerSlots {
    /// The layer's state in slot 0.
    pub states: u64,
    /// i32 `[rows]`
    pub reads: u64,
    /// i32 `[rows]`; negative for rows of padding.
    pub writes: u64,
}

/// Device addresses of all states of a step.
#[derive(Clone, Debug)]
pub struct StateSlots {
    /// u32 `[rows + 1]`: the first token of each row, and the number of tokens.
    pub starts: u64,
    /// Bytes between slots.
    pub stride: u64,
    /// For each layer of the model its slots; `None` for layers of attention.
    pub layers: Vec<Option<LayerSlots>>,
}

/// Activations of the layers that keep a state, and the slots of the next step.
#[derive(Debug)]
pub(super) struct States {
    /// `[tokens, channels]`
    mixed: DeviceBuffer,
    slots: Option<StateSlots>,
}

impl States {
    /// Allocates the activations of `tokens` tokens, if layers keep a state.
    pub(super) fn new(device: &Device, config: &ModelConfig, tokens: usize) -> Result<Option<Self>, GpuError> {
        let Some(delta) = &config.delta else { return Ok(None) };
        Ok(Some(Self { mixed: device.zeros(2 * tokens * delta.channels())?, slots: None }))
    }
}

impl Forward {
    /// Sets the states of the following steps.
    ///
    /// # Safety
    /// Until the steps are done, the memory at the addresses lives and has the sizes of the model's states and of the
    /// steps' rows. A slot that a row writes is neither written nor read by another row.
    pub unsafe fn set_states(&mut self, slots: StateSlots) {
        if let Some(states) = &mut self.states {
            states.slots = Some(slots);
        }
    }

    /// Advances the states of a layer and writes its output to `attended`.
    pub(super) fn advance_states(&self, device: &Device, plan: &BatchPlan<'_>, index: usize) -> Result<(), GpuError> {
        debug_assert_eq!(self.first_op(index), Op::Delta);
        let missing = GpuError::Missing { what: "a layer that keeps a state, in a step without states," };
        let config = self.config.delta_of(index);
        let (Some(config), Some(States { mixed, slots: Some(slots) })) = (config, &self.states) else {
            return Err(missing);
        };
        let Some(layer) = slots.layers.get(index).copied().flatten() else { return Err(missing) };
        let rows = DeltaRows {
            rows: plan.rows.len() as u32,
            tokens: plan.token_count() as u32,
            starts: slots.starts,
            reads: layer.reads,
            writes: layer.writes,
            states: layer.states,
            stride: slots.stride,
        };
        let (projected, out) = (self.qkv.address(), self.attended.address());
        let buffers = DeltaBuffers { projected, mixed: mixed.address(), out };
        let weights = &self.weights.layers[index].delta;
        // SAFETY: `new` checked the sizes; the activations have memory for the step, and the caller of `set_states`
        // guarantees the rest.
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
