//! [`CpuOptions`], and how they open a [`Cpu`].

use std::num::NonZeroUsize;
use std::thread;

use super::host::HostPages;
use super::labels::SelectScratch;
use super::path::CpuPath;
use super::planes::Planes;
use super::pool::{self, Pool};
use super::simd::Isa;
use super::{Cpu, CpuError};
use crate::backend::by_shape::ByShape;
use crate::backend::{OpenBackend, OpenSteps};
use crate::config::StepBounds;
use crate::layout::{KvScales, LabelChannels, PoolLayout, TableShape};
use crate::memory::OutOfMemory;
use crate::plan::SpanCheck;

/// Options of a [`Cpu`].
///
/// The pool asks the system for huge pages, without which random pages of K and V miss the TLB. Where the system grants
/// them, the first write to a page of the pool takes a whole huge page of memory (2 MiB on x86). A pool with few pages
/// in use may therefore take up to its whole size from the system.
#[derive(Clone, PartialEq, Debug)]
pub struct CpuOptions {
    /// Most threads that compute attention, the caller's included; 0 counts as 1. Results do not depend on it. All
    /// backends of the process together use no more threads than the cores that the first caller of attention had.
    pub threads: usize,
    /// The instructions that attention computes with. Default: `None`, those that the environment variable
    /// [`PATH_VARIABLE`](super::PATH_VARIABLE) names, else the fastest that the machine has.
    pub path: Option<CpuPath>,
    /// Static scales of a quantised pool ([`Scaling::Static`]), for the layers and heads of this rank
    /// ([`KvScales::local`]). Default: `None`, 1 for all.
    ///
    /// [`Scaling::Static`]: crate::Scaling::Static
    pub scales: Option<KvScales>,
    /// The channels of K that are labels in a pool that keeps some, for the layers and heads of this rank
    /// ([`LabelChannels::local`]). Default: `None`.
    pub labels: Option<LabelChannels>,
}

impl Default for CpuOptions {
    /// Returns options for all cores that the caller may use.
    fn default() -> Self {
        Self::with_threads(thread::available_parallelism().map_or(1, NonZeroUsize::get))
    }
}

impl CpuOptions {
    /// Returns options for at most `threads` threads.
    pub const fn with_threads(threads: usize) -> Self {
        Self { threads, path: None, scales: None, labels: None }
    }
}

impl OpenBackend for CpuOptions {
    type Backend = Cpu;

    /// # Errors
    /// [`CpuError::OutOfMemory`], [`CpuError::Scales`] or [`CpuError::Labels`] that are not for this pool,
    /// [`CpuError::PathName`] if the environment variable names no path, [`CpuError::Path`] if the machine lacks its
    /// instructions.
    fn open(
        self,
        layout: &PoolLayout,
        table: &TableShape,
        bounds: impl Into<StepBounds>,
    ) -> Result<Cpu, CpuError> {
        let StepBounds { steps, tokens } = bounds.into();
        let refused = |error: OutOfMemory| CpuError::OutOfMemory { bytes: error.bytes };
        if let Some(scales) = &self.scales {
            scales.check_pool(layout)?;
        }
        LabelChannels::check_pool(self.labels.as_ref(), layout)?;
        let planes = ByShape::new(layout, |layout| {
            Ok::<_, CpuError>(Planes::new(layout, self.scales.as_ref(), self.labels.as_ref()))
        })?;
        let converts =
            |layout: &&PoolLayout| layout.dtype().is_quantised() || layout.label_channels() > 0;
        let layouts = planes.all().map(|planes| &planes.layout);
        let wide = layouts.filter(converts).map(PoolLayout::head_dim).max().unwrap_or(0);
        Ok(Cpu {
            threads: NonZeroUsize::new(self.threads).unwrap_or(NonZeroUsize::MIN),
            isa: Isa::choose(self.path)?,
            layout: *layout,
            table: *table,
            pool: Pool::new(layout)?,
            host: HostPages::new(layout)?,
            planes,
            wide: pool::zeroed(wide.into())?,
            words: pool::zeroed::<u32>(table.words() as u64)?,
            steps: OpenSteps::try_new(steps).map_err(refused)?,
            max_step_tokens: tokens,
            spans: SpanCheck::default(),
            scratch: Vec::new(),
            selects: SelectScratch::default(),
            out: Vec::new(),
            softmax: Vec::new(),
        })
    }
}
