//! A runner's options, and the sizes that decode steps are padded to.

use super::super::products::{Choice, padded_rows};
use super::super::sums::Transport;

/// Options of a [`GpuRunner`](super::GpuRunner).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GpuOptions {
    /// Maximum number of prompt tokens of a step.
    pub chunk: u32,
    /// Maximum number of streams at a time.
    pub concurrency: u32,
    /// Maximum number of drafts of a stream.
    pub drafts: u32,
    /// Whether drafts may form trees.
    pub trees: bool,
    /// Whether decode steps run as graphs.
    pub graphs: bool,
    /// The choice of products' implementations.
    pub choice: Choice,
    /// The transport of sums over ranks. `None`: peer memory if the GPUs support it, otherwise NCCL.
    pub sums: Option<Transport>,
    /// Whether the runner copies logits to the host, for checks and for log-probabilities.
    pub keep_logits: bool,
    /// Whether the runner records the times of steps on the device. The record grows with every step.
    pub keep_times: bool,
}

impl GpuOptions {
    /// Returns the maximum number of tokens of a stream in a decode step.
    pub(super) fn width(&self) -> usize {
        1 + self.drafts as usize
    }

    /// Returns the largest `padded tokens / padded rows` of all decode steps, rounded up. This is
    /// [`Prepare::decode_tokens`](kvarena::backend::cuda::Prepare).
    pub(super) fn decode_tokens(&self) -> u32 {
        let sizes = (1..=self.concurrency as usize)
            .flat_map(|streams| (streams..=streams * self.width()).map(move |tokens| padded_step(streams, tokens)));
        sizes.map(|(rows, tokens)| tokens.div_ceil(rows) as u32).max().unwrap_or(1)
    }

    /// Returns the rows and tokens of the largest padded decode step.
    pub(super) fn decode_max(&self) -> (usize, usize) {
        let streams = self.concurrency as usize;
        padded_step(streams, streams * self.width())
    }
}

/// Returns the rows and tokens of a padded decode step. If streams have drafts, the step has at least one row of
/// padding, so that each token of padding belongs to a row.
pub(super) fn padded_step(rows: usize, tokens: usize) -> (usize, usize) {
    if tokens == rows {
        return (padded_rows(rows), padded_rows(rows));
    }
    let more = padded_rows(rows + 1);
    (more, padded_rows(tokens + more - rows))
}
