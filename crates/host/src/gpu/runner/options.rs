//! A runner's options, and the sizes that decode steps are padded to.

use super::super::products::{Choice, padded_rows};
use super::super::sums::Transport;

/// How a [`GpuRunner`] is to work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GpuOptions {
    /// Most prompt tokens of a step.
    pub chunk: u32,
    /// Most streams at a time.
    pub concurrency: u32,
    /// Most drafts of a stream.
    pub drafts: u32,
    /// Whether they may be trees.
    pub trees: bool,
    /// Replay decode steps as graphs.
    pub graphs: bool,
    /// How the ways of products are chosen.
    pub choice: Choice,
    /// What sums over ranks go through; unless told, what the GPUs can.
    pub sums: Option<Transport>,
    /// Copy logits to the host: for checking, and for log-probabilities.
    pub keep_logits: bool,
    /// Remember when steps were on the device: not where there is no end of them.
    pub keep_times: bool,
}

impl GpuOptions {
    /// Most tokens of a stream in a decode step.
    pub(super) fn width(&self) -> usize {
        1 + self.drafts as usize
    }

    /// Most tokens for each row of a decode step, padding included.
    pub(super) fn decode_tokens(&self) -> u32 {
        let sizes = (1..=self.concurrency as usize).flat_map(|streams| {
            (streams..=streams * self.width()).map(move |tokens| padded_step(streams, tokens))
        });
        sizes.map(|(rows, tokens)| tokens.div_ceil(rows) as u32).max().unwrap_or(1)
    }

    /// Rows and tokens of the largest padded decode step.
    pub(super) fn decode_max(&self) -> (usize, usize) {
        let streams = self.concurrency as usize;
        padded_step(streams, streams * self.width())
    }
}

/// The rows and tokens that a decode step is padded to. Where streams have drafts, there is a row of padding, which the
/// tokens of padding are of.
pub(super) fn padded_step(rows: usize, tokens: usize) -> (usize, usize) {
    if tokens == rows {
        return (padded_rows(rows), padded_rows(rows));
    }
    let more = padded_rows(rows + 1);
    (more, padded_rows(tokens + more - rows))
}
