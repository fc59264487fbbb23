//! The time of steps on the device, and of the parts of a decode step.

use kvarena::BatchPlan;
use kvarena::backend::cuda::{Cuda, CudaEvent};

use super::super::error::GpuResult;
use super::super::forward::{Parts, StepAddresses};
use super::GpuRunner;

/// When a step was on the device.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct StepTime {
    /// Its tokens.
    pub tokens: usize,
    /// Whether each stream had one of them, and its drafts.
    pub decode: bool,
    /// Milliseconds from the end of the step before to its own end; none for the first of a run.
    pub period_ms: Option<f32>,
    /// Those of them in which the device had nothing to do.
    pub idle_ms: f32,
}

impl GpuRunner {
    /// Measures the parts of the next decode step of so many streams; [`GpuRunner::take_parts`] has them then. Spoils
    /// what that step computes.
    pub fn measure_parts(&mut self, streams: usize) {
        (self.measured, self.parts) = (Some(streams), None);
    }

    /// Milliseconds of a decode step: whole, attention, products, the rest.
    pub fn take_parts(&mut self) -> Option<[f32; 4]> {
        self.parts.take()
    }

    /// Measures the parts of a decode step, each as a graph.
    pub(super) fn measure(&mut self, backend: &mut Cuda, plan: &BatchPlan<'_>) -> GpuResult<()> {
        let Self { device, forward, images, .. } = self;
        let staged = backend.stage(plan)?;
        let addresses = StepAddresses {
            tokens: images.tokens(),
            draws: images.draws(),
            answers: images.answers(),
            draw_count: plan.token_count(),
            filtered: false,
            shapes: None,
        };
        let only = |attention, products, small| Parts { attention, products, small };
        let parts = [
            Parts::ALL,
            only(true, false, false),
            only(false, true, false),
            only(false, false, true),
        ];
        let mut times = [0.0; 4];
        for (time, parts) in times.iter_mut().zip(parts) {
            let graph = device.stream.capture(|| {
                forward.run(device, backend, (plan, staged), addresses, parts, |_, _| Ok(()))
            })?;
            let mut samples = Vec::new();
            let (mut begun, mut done) =
                (CudaEvent::new(&device.gpu, true)?, CudaEvent::new(&device.gpu, true)?);
            for _ in 0..12 {
                begun.record(&device.stream)?;
                // SAFETY: as where the step was launched; the same plan is staged.
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
