//! The end of a step: computes logits of the rows that draw a token, and chooses the tokens.

use kvarena::backend::cuda::DeviceBuffer;

use super::super::device::Device;
use super::super::error::GpuError;
use super::super::kernels::{DeviceDraw, SampleParams, ShapedParams};
use super::super::products::Op;
use super::{Forward, Parts, StepAddresses};

/// Maximum number of blocks of a launch of `sample`, unless it has more draws. All draws get the same number of blocks.
const SAMPLE_BLOCKS: usize = 512;

impl Forward {
    /// Computes logits of the rows that draw a token, as many at a time as the limits allow, and chooses tokens.
    pub(super) fn choose(
        &self,
        device: &Device,
        step: StepAddresses,
        parts: Parts,
        mut each: impl FnMut(usize, usize) -> Result<(), GpuError>,
    ) -> Result<(), GpuError> {
        for first in (0..step.draw_count).step_by(self.limits.logits) {
            let count = (step.draw_count - first).min(self.limits.logits);
            let draws = step.draws + (first * size_of::<DeviceDraw>()) as u64;
            if parts.products {
                self.product(device, Op::Logits, count, self.logits_operands(draws))?;
            }
            if parts.small {
                self.sample(device, (first, count), step)?;
            }
            each(first, count)?;
        }
        Ok(())
    }

    fn sample(&self, device: &Device, (first, count): (usize, usize), step: StepAddresses) -> Result<(), GpuError> {
        let at = |buffer: &DeviceBuffer, bytes: u64| buffer.address() + bytes * first as u64;
        let params = SampleParams {
            logits: self.logits.address(),
            draws: step.draws + (first * size_of::<DeviceDraw>()) as u64,
            thresholds: if step.filtered { at(&self.thresholds, 4) } else { 0 },
            best: at(&self.best, 8),
            counters: at(&self.counters, 4),
            sampled: at(&self.sampled, 4),
            host: step.host_tokens,
            vocab: self.config.vocab as u32,
            first: first as u32,
        };
        let kernels = &device.kernels;
        let blocks = (SAMPLE_BLOCKS / count).clamp(1, (self.config.vocab / 2048).max(1));
        // SAFETY: the vocabulary was checked in `new`, and for shapes by `Shapes::list`; logits and the arrays have
        // memory for the draws.
        unsafe {
            if step.filtered {
                kernels.sample_filter.launch(device.raw(), (count as u32, 1), 1024, &params)?;
            }
            kernels.sample.launch(device.raw(), (blocks as u32, count as u32), 256, &params)?;
            let Some([shapes, edits]) = step.shapes else { return Ok(()) };
            let SampleParams { logits, draws, sampled, host, vocab, first, .. } = params;
            let params = ShapedParams { logits, draws, shapes, edits, sampled, host, vocab, first };
            kernels.sample_shaped.launch(device.raw(), (count as u32, 1), 1024, &params)
        }
    }
}
