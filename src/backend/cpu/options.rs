//! [`CpuOptions`], which open a [`Cpu`].

use std::num::NonZeroUsize;
use std::thread;

use super::labels::SelectScratch;
use super::path::CpuPath;
use super::planes::Planes;
use super::pool::{self, Pool};
use super::simd::Isa;
use super::swap::SwapPages;
use super::{Cpu, CpuError};
use crate::backend::by_shape::ByShape;
use crate::backend::step_states::StepStates;
use crate::backend::{OpenBackend, OpenSteps};
use crate::config::StepBounds;
use crate::layout::{KvScales, LabelChannels, PoolLayout, TableShape};
use crate::memory::OutOfMemory;
use crate::plan::SpanCheck;

/// Options of a [`Cpu`].
///
/// The pool requests huge pages, because random reads of K and V otherwise miss the TLB. With huge pages, the first
/// write to a page of the pool takes a whole huge page of memory (2 MiB on x86). A pool with few pages in use may
/// therefore take its whole size.
#[derive(Clone, PartialEq, Debug)]
pub struct CpuOptions {
    /// Maximum number of threads for attention, including the caller's; 0 counts as 1. Results do not depend on it. All
    /// backends of the process share a limit: the number of cores that the first caller of attention could use.
    pub threads: usize,
    /// Instruction set of attention. Default: `None`, the set in the environment variable
    /// [`PATH_VARIABLE`](super::PATH_VARIABLE), or else the fastest of the machine.
    pub path: Option<CpuPath>,
    /// Static scales of a quantised pool ([`Scaling::Static`]), for the layers and heads of this rank
    /// ([`KvScales::local`]). Default: `None`, all 1.
    ///
    /// [`Scaling::Static`]: crate::layout::Scaling::Static
    pub scales: Option<KvScales>,
    /// Label channels, for the layers and heads of this rank ([`LabelChannels::local`]). A pool with labels requires
    /// them. Default: `None`.
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
    /// [`CpuError::OutOfMemory`]. [`CpuError::Scales`] or [`CpuError::Labels`] if the scales or channels do not fit the
    /// pool, or if a pool with labels has no channels. [`CpuError::PathName`] if the path comes from the environment
    /// variable and its value is not a path. [`CpuError::Path`] if the machine lacks the path's instructions.
    fn open(self, layout: &PoolLayout, table: &TableShape, bounds: impl Into<StepBounds>) -> Result<Cpu, CpuError> {
        let StepBounds { steps, tokens } = bounds.into();
        let refused = |error: OutOfMemory| CpuError::OutOfMemory { bytes: error.bytes };
        if let Some(scales) = &self.scales {
            scales.check_pool(layout)?;
        }
        LabelChannels::check_pool(self.labels.as_ref(), layout)?;
        let planes = ByShape::new(layout, |layout| {
            Ok::<_, CpuError>(Planes::new(layout, self.scales.as_ref(), self.labels.as_ref()))
        })?;
        let converts = |layout: &&PoolLayout| layout.dtype().is_quantised() || layout.label_channels() > 0;
        let layouts = planes.all().map(|planes| &planes.layout);
        let wide = layouts.filter(converts).map(PoolLayout::head_dim).max().unwrap_or(0);
        Ok(Cpu {
            threads: NonZeroUsize::new(self.threads).unwrap_or(NonZeroUsize::MIN),
            isa: Isa::choose(self.path)?,
            layout: *layout,
            table: *table,
            pool: Pool::new(layout)?,
            swap: SwapPages::new(layout)?,
            planes,
            wide: pool::zeroed(wide.into())?,
            words: pool::zeroed::<u32>(table.words() as u64)?,
            steps: OpenSteps::try_new(steps).map_err(refused)?,
            states: StepStates::new(table),
            max_step_tokens: tokens,
            spans: SpanCheck::default(),
            scratch: Vec::new(),
            selects: SelectScratch::default(),
            out: Vec::new(),
            softmax: Vec::new(),
        })
    }
}
