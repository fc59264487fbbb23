//! The time of steps on the device, and of the parts of a decode step.

use kvarena::BatchPlan;
use kvarena::backend::cuda::{Cuda, CudaEvent};

use super::super::error::GpuResult;
use super::super::forward::{Parts, StepAddresses};
use super::GpuRunner;

/// The time of a step on the device.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct StepTime {
    /// Tokens of the step.
    pub tokens: usize,
    /// Whether this is a decode step: one token of each stream, and its drafts.
    pub decode: bool,
    /// Milliseconds from the end of the previous step to this step's end. `None` for the first step, and after
    /// a settle or a measurement.
    pub period_ms: Option<f32>,
    /// Milliseconds of this period in which the device was idle.
    pub idle_ms: f32,
}

impl GpuRunner {
    /// Requests that the runner measure the parts of the next decode step of `streams` tokens.
    /// [`GpuRunner::take_parts`] returns the result. The measurement overwrites that step's results.
    pub fn measure_parts(&mut self, streams: usize) {
        (self.measured, self.parts) = (Some(streams), None);
    }

    /// Returns the median times of a decode step in milliseconds, if they were measured: of the whole step, attention,
    /// products and the rest.
    pub fn take_parts(&mut self) -> Option<[f32; 4]> {
        self.parts.take()
    }

    /// Measures the parts of a decode step, each as a graph.
    pub(super) fn measure(&mut self, backend: &mut Cuda, plan: &BatchPlan<'_>) -> GpuResult<()> {
        let Self { device, forward, images, .. } = self;
        backend.stage(plan)?;
        let addresses = StepAddresses {
            tokens: images.tokens(),
            draws: images.draws(),
            host_tokens: images.host_tokens(),
            draw_count: plan.token_count(),
            filtered: false,
            shapes: None,
        };
        let only = |attention, products, small| Parts { attention, products, small };
        let parts = [Parts::ALL, only(true, false, false), only(false, true, false), only(false, false, true)];
        let mut times = [0.0; 4];
        for (time, parts) in times.iter_mut().zip(parts) {
            let graph =
                device.stream.capture(|| forward.run(device, backend, plan, addresses, parts, |_, _| Ok(())))?;
            let mut samples = Vec::new();
            let (mut begun, mut done) = (CudaEvent::new(&device.gpu, true)?, CudaEvent::new(&device.gpu, true)?);
            for _ in 0..12 {
                begun.record(&device.stream)?;
                // SAFETY: as for the launch of the step; the same plan is staged.
                unsafe { graph.launch(&device.stream) }?;
                done.record(&device.stream)?;
                done.synchronize()?;
                samples.push(done.elapsed_ms(&begun)?);
            }
            samples.sort_by(f32::total_cmp);
            *time = samples[samples.len() / 2];
        }
        self.parts = Some(times);
        self.fresh = true;
        Ok(())
    }
}
