//! Logits copied to the host, for checks and for log-probabilities.

use half::bf16;
use kvarena::backend::cuda::PinnedBuffer;

use super::device::Device;
use super::error::GpuResult;
use super::image::{STAGING_BUFFERS, staging_of};

/// Logits of the draws of steps in flight, on the host.
#[derive(Debug)]
pub struct KeptLogits {
    /// bf16 `[STAGING_BUFFERS][draws][vocab]`
    memory: PinnedBuffer,
    draws: usize,
    vocab: usize,
}

impl KeptLogits {
    /// Allocates memory for at most this many draws of each of `STAGING_BUFFERS` steps, of `vocab` logits each.
    pub fn new(device: &Device, draws: usize, vocab: usize) -> GpuResult<Self> {
        let memory = PinnedBuffer::new(&device.gpu, STAGING_BUFFERS * draws * 2 * vocab)?;
        Ok(Self { memory, draws, vocab })
    }

    /// Copies the logits of some of a step's draws. They can be read when the step is done.
    ///
    /// # Panics
    /// If there is no memory for these draws.
    pub fn keep(&mut self, device: &Device, number: u64, logits: u64, (first, count): (usize, usize)) -> GpuResult<()> {
        assert!(first + count <= self.draws, "a step has at most {} draws", self.draws);
        let at = 2 * (self.start(number) + first * self.vocab);
        // SAFETY: there are logits of that many draws; the staging buffer is read only when the step is done.
        unsafe { device.copy_to_host(&mut self.memory, at, logits, 2 * count * self.vocab) }
    }

    fn start(&self, number: u64) -> usize {
        staging_of(number) * self.draws * self.vocab
    }

    /// Returns the logits of a step's draws: bf16 `[draws, vocab]`. The step must be done.
    pub fn logits(&self, number: u64, draws: usize) -> &[bf16] {
        let all: &[bf16] = bytemuck::cast_slice(self.memory.as_slice());
        &all[self.start(number)..][..draws * self.vocab]
    }
}
