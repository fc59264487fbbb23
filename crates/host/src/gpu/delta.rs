//! Launches of the kernels of Gated DeltaNet and of gated attention (`ptx/src/delta.cu`).

use super::device::Device;
use super::error::GpuError;
use super::kernels::{DeltaConvParams, DeltaGateParams, DeltaUpdateParams};
use crate::delta::{ConvDtype, DeltaConfig};

/// Tokens that a CTA of `delta_conv` computes if every row has one token, and otherwise.
const TILES: [u32; 2] = [1, 16];
/// Maximum threads of a CTA of `delta_update`. A CTA computes half as many columns of a state.
const UPDATE_THREADS: u32 = 128;

/// Device addresses of a step's rows and of one layer's states.
#[derive(Clone, Copy, Debug)]
pub struct DeltaRows {
    /// Number of rows, including padding.
    pub rows: u32,
    /// Number of tokens, including padding.
    pub tokens: u32,
    /// u32 `[rows + 1]`: the first token of each row, and the number of tokens.
    pub starts: u64,
    /// i32 `[rows]`: the slots to read.
    pub reads: u64,
    /// i32 `[rows]`: the slots to write; negative for padding.
    pub writes: u64,
    /// The layer's state in slot 0: the recurrent part in f32, then the convolution's part in bf16.
    pub states: u64,
    /// Bytes between slots, a multiple of 16.
    pub stride: u64,
}

/// Device addresses of one layer's weights.
#[derive(Clone, Copy, Default, Debug)]
pub struct DeltaWeights {
    /// bf16 `[channels, 4]`. All addresses are 0 in layers of attention.
    pub conv: u64,
    /// f32 `[value_heads]`: `-exp(A_log)`.
    pub rate: u64,
    /// f32 `[value_heads]`
    pub dt_bias: u64,
    /// bf16 `[value_dim]`
    pub norm: u64,
}

/// Device addresses of one layer's activations. The projection's rows contain q, k, v, z, a and b.
#[derive(Clone, Copy, Debug)]
pub struct DeltaBuffers {
    /// bf16 `[tokens, width]`, with the width of [`projected_width`].
    pub projected: u64,
    /// bf16 `[tokens, channels]`: scratch.
    pub mixed: u64,
    /// bf16 `[tokens, value_heads, value_dim]`: the output.
    pub out: u64,
}

/// Rejects sizes that the kernels do not support.
///
/// # Errors
/// The error names the size.
pub fn check_sizes(config: &DeltaConfig) -> Result<(), GpuError> {
    let missing = |what| Err(GpuError::Missing { what });
    if config.kernel != 4 {
        return missing("a convolution over another number of tokens than 4");
    }
    if ![32, 128].contains(&config.key_dim) {
        return missing("a state with keys of other than 32 or 128 elements");
    }
    if !config.value_dim.is_multiple_of(UPDATE_THREADS as usize / 2) && ![16, 32].contains(&config.value_dim)
        || config.value_dim > 256
    {
        return missing("a state with values of this many elements");
    }
    Ok(())
}

/// Returns the elements of a row of the layer's projection: q, k, v, z, a and b, and unused ones up to a multiple of
/// 8.
pub fn projected_width(config: &DeltaConfig) -> usize {
    (config.channels() + config.value_width() + 2 * config.value_heads).next_multiple_of(8)
}

/// Launches the kernels of one layer between its two projections: advances the states of all rows, and writes the gated
/// output. `eps` is that of the output's norm.
///
/// # Errors
/// The driver rejects a launch.
///
/// # Safety
/// The config passed [`check_sizes`]. The addresses are valid for the accesses of the kernels until these are done.
/// Slots that are written differ from each other and from those that other rows read. The context is current.
pub unsafe fn launch(
    device: &Device,
    config: &DeltaConfig,
    rows: &DeltaRows,
    weights: &DeltaWeights,
    buffers: &DeltaBuffers,
    eps: f32,
) -> Result<(), GpuError> {
    let (channels, heads, dim) = (config.channels() as u32, config.value_heads as u32, config.value_dim as u32);
    let width = projected_width(config) as u32;
    let &DeltaRows { rows: count, tokens, starts, reads, writes, states, stride } = rows;
    let &DeltaBuffers { projected, mixed, out } = buffers;
    let z = projected + 2 * u64::from(channels);
    let a = z + 2 * config.value_width() as u64;
    let tile = TILES[usize::from(tokens > count)];
    let conv = DeltaConvParams {
        x: projected,
        weight: weights.conv,
        out: mixed,
        states: states + config.state(ConvDtype::Bf16).recurrent_bytes as u64,
        stride,
        reads,
        writes,
        starts,
        width,
        channels,
        rows: count,
        tile,
    };
    let update = DeltaUpdateParams {
        x: mixed,
        a,
        b: a + 2 * u64::from(heads),
        rate: weights.rate,
        bias: weights.dt_bias,
        states,
        stride,
        reads,
        writes,
        starts,
        out,
        width,
        channels,
        key_heads: config.key_heads as u32,
        value_heads: heads,
        value_dim: dim,
        scale: 1.0 / (config.key_dim as f32).sqrt(),
    };
    let gate = DeltaGateParams {
        x: out,
        z,
        weight: weights.norm,
        tokens,
        width,
        value_heads: heads,
        value_dim: dim,
        eps,
        reserved: 0,
    };
    let (kernels, stream) = (&device.kernels, device.raw());
    let advance = if config.key_dim == 32 { &kernels.delta_update_32 } else { &kernels.delta_update_128 };
    let threads = UPDATE_THREADS.min(2 * dim);
    // SAFETY: the caller guarantees the conditions.
    unsafe {
        kernels.delta_conv.launch(stream, ((channels / 8).div_ceil(128), tokens.div_ceil(tile)), 128, &conv)?;
        advance.launch(stream, (heads * dim / (threads / 2), count), threads, &update)?;
        kernels.delta_gate.launch(stream, ((tokens * heads).div_ceil(4), 1), 128, &gate)
    }
}
