//! Upload of the edits and min-p of a step's draws to the device.
//!
//! The device has one image, at a fixed address, so that graphs can contain the address:
//!
//! ```text
//! DeviceShape [draws_max] | Edit [edits_max]
//! ```
//!
//! If some draw of a step has edits or min-p, the runner writes the image into a staging buffer of pinned memory, as
//! `image.rs` does for the tokens. Other steps send nothing.

use kvarena::backend::cuda::{DeviceBuffer, PinnedBuffer};

use super::device::Device;
use super::error::GpuError;
use super::image::{STAGING_BUFFERS, staging_of};
use super::kernels::{DeviceDraw, DeviceShape, LoadStepParams, SHAPED_VOCAB_MAX};
use crate::runner::{Draw, Work};
use crate::shaping::Edit;

/// Maximum number of edits of a step, unless the vocabulary is larger. They take 4 MiB on the device and in each
/// staging buffer.
const EDITS_MAX: usize = 1 << 18;

/// The image and its staging buffers.
#[derive(Debug)]
pub(super) struct Shapes {
    image: DeviceBuffer,
    staging: Vec<PinnedBuffer>,
    shapes: Vec<DeviceShape>,
    draws_max: usize,
    edits_max: usize,
}

impl Shapes {
    /// Allocates memory for steps of this many draws from a vocabulary of this size.
    pub(super) fn new(device: &Device, draws_max: usize, vocab: usize) -> Result<Self, GpuError> {
        // A stream has at most one edit of each token, so the edits of any stream fit a step.
        let edits_max = if vocab > SHAPED_VOCAB_MAX { 0 } else { EDITS_MAX.max(vocab) };
        let bytes = draws_max * size_of::<DeviceShape>() + edits_max * size_of::<Edit>();
        let open = |_| Ok(PinnedBuffer::new(&device.gpu, bytes)?);
        let staging = (0..STAGING_BUFFERS).map(open).collect::<Result<_, GpuError>>()?;
        Ok(Self { image: device.zeros(bytes)?, staging, shapes: Vec::new(), draws_max, edits_max })
    }

    /// Returns the maximum number of edits of a step; 0 if the vocabulary is too large for the kernel.
    pub(super) fn edits_max(&self) -> usize {
        self.edits_max
    }

    /// Returns the device addresses of the shapes and the edits.
    pub(super) fn addresses(&self) -> [u64; 2] {
        let start = self.image.address();
        [start, start + (self.draws_max * size_of::<DeviceShape>()) as u64]
    }

    /// Assigns a shape to each draw that needs one. Returns whether any draw has a shape.
    ///
    /// # Errors
    /// The draws have more edits than a step may have, or the vocabulary is too large for edits and min-p.
    pub(super) fn list(&mut self, work: &Work, draws: &mut [DeviceDraw]) -> Result<bool, GpuError> {
        self.shapes.clear();
        for (draw, device) in work.draws.iter().zip(draws) {
            if draw.is_shaped() {
                self.shapes.push(shape(draw));
                device.shape = self.shapes.len() as u64;
            }
        }
        let (edits, max) = (work.edits.len(), self.edits_max);
        match self.shapes.is_empty() {
            false if max == 0 || edits > max => Err(GpuError::Edits { edits, max }),
            is_empty => Ok(!is_empty),
        }
    }

    /// Sends the listed shapes and edits of step `number`, whose staging buffer is free.
    pub(super) fn send(&mut self, device: &Device, number: u64, edits: &[Edit]) -> Result<(), GpuError> {
        let staging = &mut self.staging[staging_of(number)];
        let (first, second) = staging.as_mut_slice().split_at_mut(self.draws_max * UNIT);
        first[..size_of_val(&self.shapes[..])].copy_from_slice(bytemuck::cast_slice(&self.shapes));
        second[..size_of_val(edits)].copy_from_slice(bytemuck::cast_slice(edits));
        let params = LoadStepParams {
            source: staging.as_slice().as_ptr() as u64,
            target: self.image.address(),
            first: self.shapes.len() as u32,
            second_at: self.draws_max as u32,
            second: edits.len() as u32,
            reserved: 0,
        };
        let grid = ((params.first + params.second).div_ceil(256), 1);
        // SAFETY: pinned memory has one address for host and device; the staging buffer and the image have memory for
        // that many units (`list` checks the edits, the runner the draws); the staging buffer does not change until the
        // step is done.
        unsafe { device.kernels.load_step.launch(device.raw(), grid, 256, &params) }
    }
}

/// Bytes that `load_step` copies at a time.
const UNIT: usize = 16;
const _: () = assert!(size_of::<DeviceShape>() == UNIT && size_of::<Edit>() == UNIT);

fn shape(draw: &Draw) -> DeviceShape {
    let warm = draw.sampling.temperature > 0.0;
    DeviceShape {
        start: draw.edits.start,
        count: draw.edits.count,
        only: u32::from(draw.edits.only),
        depth: if warm { draw.sampling.depth() } else { f32::INFINITY },
    }
}
