//! Upload of a step's tokens and draws to the device, and download of the chosen tokens.
//!
//! The device has one image, at fixed addresses, so that graphs can contain these addresses:
//!
//! ```text
//! host address of this step's chosen tokens, padded to 64 bytes | DeviceDraw [draws_max] | i32 tokens [tokens_max]
//! ```
//!
//! The kernels write the chosen tokens to pinned memory.
//!
//! Each step writes the image into a staging buffer of pinned memory. A kernel copies it in the stream's order, after
//! the previous step has read its own image. A staging buffer, its chosen tokens and its events are reused
//! `STAGING_BUFFERS` steps later. At most `STAGING_BUFFERS - 2` steps are in flight, so the device has finished with
//! them by then. `send` asserts this.

use kvarena::backend::cuda::{CudaEvent, DeviceBuffer, PinnedBuffer};

use super::device::Device;
use super::error::GpuError;
use super::kernels::{DeviceDraw, LoadStepParams};

/// Number of staging buffers.
pub(super) const STAGING_BUFFERS: usize = 4;
const DRAWS_AT: usize = 64;

/// The image and its staging buffers.
#[derive(Debug)]
pub(super) struct Images {
    image: DeviceBuffer,
    staging: Vec<Staging>,
    tokens_at: usize,
    tokens_max: usize,
    draws_max: usize,
}

/// The host's data of a step in flight.
#[derive(Debug)]
struct Staging {
    image: PinnedBuffer,
    host_tokens: PinnedBuffer,
    /// Events recorded before the step's plan is sent, and after its last kernel.
    begun: CudaEvent,
    done: CudaEvent,
}

impl Images {
    /// Allocates memory for steps of this many tokens and draws.
    pub(super) fn new(device: &Device, tokens_max: usize, draws_max: usize) -> Result<Self, GpuError> {
        let gpu = &device.gpu;
        let tokens_at = DRAWS_AT + draws_max * size_of::<DeviceDraw>();
        let bytes = (tokens_at + 4 * tokens_max).next_multiple_of(64);
        let open = |_| {
            Ok(Staging {
                image: PinnedBuffer::new(gpu, bytes)?,
                host_tokens: PinnedBuffer::new(gpu, 4 * draws_max)?,
                begun: CudaEvent::new(gpu, true)?,
                done: CudaEvent::new(gpu, true)?,
            })
        };
        let staging = (0..STAGING_BUFFERS).map(open).collect::<Result<_, GpuError>>()?;
        Ok(Self { image: device.zeros(bytes)?, staging, tokens_at, tokens_max, draws_max })
    }

    /// Returns the maximum number of draws of a step.
    pub(super) fn draws_max(&self) -> usize {
        self.draws_max
    }

    /// Returns the device address of the draws.
    pub(super) fn draws(&self) -> u64 {
        self.image.address() + DRAWS_AT as u64
    }

    /// Returns the device address of the tokens.
    pub(super) fn tokens(&self) -> u64 {
        self.image.address() + self.tokens_at as u64
    }

    /// Returns the device address that contains the host address of the chosen tokens.
    pub(super) fn host_tokens(&self) -> u64 {
        self.image.address()
    }

    /// Records the start of step `number`, before its plan is sent.
    pub(super) fn begin(&mut self, device: &Device, number: u64) -> Result<(), GpuError> {
        Ok(self.staging[staging_of(number)].begun.record(&device.stream)?)
    }

    /// Sends step `number`'s tokens, padded to `tokens`, and its draws, padded to `draw_count`.
    pub(super) fn send(
        &mut self,
        device: &Device,
        number: u64,
        (inputs, tokens): (&[i32], usize),
        (draws, draw_count): (&[DeviceDraw], usize),
    ) -> Result<(), GpuError> {
        assert!(inputs.len() <= tokens && tokens <= self.tokens_max);
        assert!(draws.len() <= draw_count && draw_count <= self.draws_max);
        let tokens_at = self.tokens_at;
        let staging = &mut self.staging[staging_of(number)];
        assert!(staging.done.is_done()?, "the previous step of the staging buffer is done");
        let host_tokens = staging.host_tokens.as_slice().as_ptr() as u64;
        let bytes = staging.image.as_mut_slice();
        bytes[..8].copy_from_slice(&host_tokens.to_le_bytes());
        let (own, padding) = bytes[DRAWS_AT..tokens_at].split_at_mut(size_of_val(draws));
        own.copy_from_slice(bytemuck::cast_slice(draws));
        padding[..(draw_count - draws.len()) * size_of::<DeviceDraw>()].fill(0);
        let (own, padding) = bytes[tokens_at..].split_at_mut(size_of_val(inputs));
        own.copy_from_slice(bytemuck::cast_slice(inputs));
        padding[..4 * (tokens - inputs.len())].fill(0);
        let source = staging.image.as_slice().as_ptr() as u64;
        // The kernel does not copy the draws from `draw_count` on.
        let first = ((DRAWS_AT + draw_count * size_of::<DeviceDraw>()) / 16) as u32;
        let second = (4 * tokens).div_ceil(16) as u32;
        let (target, second_at) = (self.image.address(), (tokens_at / 16) as u32);
        let params = LoadStepParams { source, target, first, second_at, second, reserved: 0 };
        let grid = ((first + second).div_ceil(256), 1);
        // SAFETY: pinned memory has one address for host and device; the staging buffer and the image have memory for
        // that many units; the staging buffer does not change until the step is done (asserted when it is reused).
        unsafe { device.kernels.load_step.launch(device.raw(), grid, 256, &params) }
    }

    /// Records the end of step `number`.
    pub(super) fn end(&mut self, device: &Device, number: u64) -> Result<(), GpuError> {
        Ok(self.staging[staging_of(number)].done.record(&device.stream)?)
    }

    /// Waits for step `number` and returns the tokens that it chose.
    pub(super) fn wait_for_tokens(&self, number: u64, count: usize) -> Result<&[u32], GpuError> {
        let staging = &self.staging[staging_of(number)];
        staging.done.synchronize()?;
        Ok(&bytemuck::cast_slice(staging.host_tokens.as_slice())[..count])
    }

    /// Returns the milliseconds from the end of the previous step to the start, and to the end, of step `number`. Both
    /// steps must be done.
    pub(super) fn times(&self, number: u64) -> Result<[f32; 2], GpuError> {
        let [before, staging] = [number - 1, number].map(|number| &self.staging[staging_of(number)]);
        Ok([staging.begun.elapsed_ms(&before.done)?, staging.done.elapsed_ms(&before.done)?])
    }
}

/// Returns the staging buffer of a step.
pub(super) fn staging_of(number: u64) -> usize {
    (number % STAGING_BUFFERS as u64) as usize
}
