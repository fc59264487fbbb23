//! The parts of a layer that only some families have: biases, norms of outputs, and mixtures of experts.
//!
//! The kernels are in `add.cu`, `experts.cu` and `norm.cu` of `ptx/src`.

use kvarena::backend::cuda::DeviceBuffer;

use super::super::device::Device;
use super::super::error::GpuError;
use super::super::kernels::{BiasParams, ExpertsParams, NormAddParams, NormParams, Route, RouteParams};
use super::Forward;
use crate::config::ModelConfig;
use crate::experts::ExpertsConfig;

/// Activations of layers with experts.
#[derive(Debug)]
pub(super) struct Mixture {
    config: ExpertsConfig,
    /// `[tokens, hidden]`
    normed: DeviceBuffer,
    /// [`Route`] `[tokens, per_token]`
    routes: DeviceBuffer,
    /// `[tokens, per_token, intermediate]`
    activated: DeviceBuffer,
}

impl Mixture {
    /// Returns the number of bf16 elements that a mixture allocates for each token.
    pub(super) fn width(config: &ModelConfig) -> usize {
        let each = |experts: &ExpertsConfig| {
            config.hidden + experts.per_token * (experts.intermediate + size_of::<Route>() / 2)
        };
        config.experts.as_ref().map_or(0, each)
    }

    /// Allocates the activations of `tokens` tokens, if the model has experts.
    pub(super) fn new(device: &Device, config: &ModelConfig, tokens: usize) -> Result<Option<Self>, GpuError> {
        let Some(experts) = config.experts else { return Ok(None) };
        let chosen = tokens * experts.per_token;
        Ok(Some(Self {
            config: experts,
            normed: device.zeros(2 * tokens * config.hidden)?,
            routes: device.zeros(size_of::<Route>() * chosen)?,
            activated: device.zeros(2 * chosen * experts.intermediate)?,
        }))
    }
}

impl Forward {
    /// Adds a bias to `tokens` rows at an address, if there is a bias.
    pub(super) fn add_bias(
        &self,
        device: &Device,
        (y, bias): (u64, u64),
        width: usize,
        tokens: usize,
    ) -> Result<(), GpuError> {
        if bias == 0 {
            return Ok(());
        }
        let params = BiasParams { y, bias, width: width as u32, reserved: 0 };
        let grid = ((width / 8).div_ceil(128) as u32, tokens as u32);
        // SAFETY: the rows are activations of the step, and the bias is as long as a row.
        unsafe { device.kernels.add_bias.launch(device.raw(), grid, 128, &params) }
    }

    /// Norms the output and adds it to x, if the model norms outputs.
    pub(super) fn add_output(&self, device: &Device, weight: u64, tokens: usize) -> Result<(), GpuError> {
        let Some(output) = &self.output else { return Ok(()) };
        let (x, y, hidden) = (self.x.address(), output.address(), self.config.hidden);
        let params = NormAddParams { x, y, weight, hidden: hidden as u32, eps: self.config.norm_eps };
        let block = (hidden / 8).next_multiple_of(32) as u32;
        // SAFETY: the width was checked in `new`; x and the output have memory for the step.
        unsafe { device.kernels.norm_add.launch(device.raw(), (tokens as u32, 1), block, &params) }
    }

    /// Computes the output of a layer's experts from x. Like `Op::Down`, adds the output to x, or writes it to x or to
    /// this rank's part of the sum.
    pub(super) fn mix(&self, device: &Device, index: usize, tokens: usize) -> Result<(), GpuError> {
        let Mixture { config, normed, routes, activated } = self.mixture.as_ref().expect("the model has experts");
        let (layer, hidden) = (&self.weights.layers[index], self.config.hidden);
        let weights = &layer.experts;
        let ExpertsConfig { count, per_token, intermediate, .. } = *config;
        let (kernels, stream) = (&device.kernels, device.raw());
        let norm = NormParams {
            x: self.x.address(),
            weight: layer.mlp_norm,
            normed: normed.address(),
            draws: 0,
            hidden: hidden as u32,
            eps: self.config.norm_eps,
        };
        let route = RouteParams {
            x: normed.address(),
            weight: weights.router,
            bias: weights.router_bias,
            routes: routes.address(),
            hidden: hidden as u32,
            experts: count as u32,
            per_token: per_token as u32,
            reserved: 0,
        };
        let up = ExpertsParams {
            x: normed.address(),
            weight: weights.gate_up,
            bias: weights.gate_up_bias,
            routes: routes.address(),
            y: activated.address(),
            ins: hidden as u32,
            outs: intermediate as u32,
            per_token: per_token as u32,
            add: 0,
        };
        let target = if self.are_parts(tokens) { &self.normed } else { &self.x };
        let down = ExpertsParams {
            x: activated.address(),
            weight: weights.down,
            // The ranks sum their outputs, so only one adds the bias.
            bias: if self.leads { weights.down_bias } else { 0 },
            y: target.address(),
            ins: intermediate as u32,
            outs: hidden as u32,
            add: u32::from(self.products.adds(tokens)),
            ..up
        };
        let tokens = tokens as u32;
        let tiles = |outs: usize, each: usize| outs.div_ceil(each) as u32;
        let block = (hidden / 8).next_multiple_of(32) as u32;
        let of_up = (tokens * per_token as u32, tiles(intermediate, 128));
        // SAFETY: the widths were checked in `new`; all buffers have memory for the step, and all weights have these
        // widths.
        unsafe {
            kernels.rms_norm.launch(stream, (tokens, 1), block, &norm)?;
            kernels.route.launch(stream, (tokens, 1), 128, &route)?;
            kernels.experts_up.launch(stream, of_up, 128, &up)?;
            kernels.experts_down.launch(stream, (tokens, tiles(hidden, 256)), 128, &down)
        }
    }
}
