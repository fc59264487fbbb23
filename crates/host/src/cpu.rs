//! Steps on the CPU: activations in f32, K and V in host memory.

use kvarena::backend::{CpuError, CpuState, Queries};
use kvarena::{Attend, Backend, BatchPlan, Cpu, LayerId};

use crate::calibrate::Largest;
use crate::clock::{Clock, Part};
use crate::config::ModelConfig;
use crate::delta::{CACHED_CONV, DeltaStep, State};
use crate::error::{Error, Result};
use crate::model::{Attention, AttentionInputs, Model, Pass, Workspace};
use crate::runner::{Runner, Work};
use crate::shaping::{self, Edits};
use crate::sparse::channels::Measured;
use crate::sparse::reader::Reader;

/// Runs a model on the CPU.
pub struct CpuRunner<'m> {
    model: &'m Model,
    work: Workspace,
    tokens: Vec<u32>,
    wanted: Vec<usize>,
    /// For each draw, the row of its logits. Draws of the same token share a row.
    rows: Vec<usize>,
    /// The tokens chosen by the last step.
    last_tokens: Vec<u32>,
    /// Logits of a draw with edits.
    edited: Vec<f32>,
    measured: Option<Measured>,
    largest: Option<Largest>,
    reader: Option<Reader>,
}

impl<'m> CpuRunner<'m> {
    /// Creates a runner of this model.
    pub fn new(model: &'m Model) -> Self {
        Self {
            model,
            work: Workspace::default(),
            tokens: Vec::new(),
            wanted: Vec::new(),
            rows: Vec::new(),
            last_tokens: Vec::new(),
            edited: Vec::new(),
            measured: None,
            largest: None,
            reader: None,
        }
    }

    /// Measures the importance of each channel of K from now on.
    pub fn measure(self) -> Self {
        Self { measured: Some(Measured::new(&self.model.config)), ..self }
    }

    /// Returns the measurement, if there was one.
    pub fn measured(&self) -> Option<&Measured> {
        self.measured.as_ref()
    }

    /// Measures the largest values of K and V from now on, for static scales.
    pub fn calibrate(self) -> Self {
        Self { largest: Some(Largest::new(&self.model.config)), ..self }
    }

    /// Returns the largest values, if they were measured.
    pub fn largest(&self) -> Option<&Largest> {
        self.largest.as_ref()
    }

    /// From now on, rows of one new token read only the positions that labels select. The backend's pool must store
    /// labels.
    pub fn read_sparsely(self, reader: Reader) -> Self {
        Self { reader: Some(reader), ..self }
    }

    /// Returns the reader of selected positions, if there is one.
    pub fn reader(&self) -> Option<&Reader> {
        self.reader.as_ref()
    }
}

impl Runner for CpuRunner<'_> {
    type Backend = Cpu;

    fn config(&self) -> &ModelConfig {
        &self.model.config
    }

    fn launch(&mut self, _: &mut Cpu, _: &Work, _: &mut Clock) -> Result<()> {
        Ok(()) // `collect` computes the step.
    }

    fn collect(
        &mut self,
        backend: &mut Cpu,
        work: &Work,
        fail: bool,
        tokens: &mut Vec<u32>,
        clock: &mut Clock,
    ) -> Result<()> {
        let input = |&token: &i32| match u32::try_from(token) {
            Ok(token) => token,
            Err(_) => self.last_tokens[(-1 - token) as usize],
        };
        self.tokens.clear();
        self.tokens.extend(work.inputs.iter().map(input));
        self.wanted.clear();
        self.rows.clear();
        for draw in &work.draws {
            if self.wanted.last() != Some(&draw.row) {
                self.wanted.push(draw.row);
            }
            self.rows.push(self.wanted.len() - 1);
        }
        let plan = work.plan.plan();
        let config = &self.model.config;
        let plain = Attend::new(config.q_heads as u32, config.head_dim as u32);
        let attend = Attend { scale: config.scale, ..plain };
        let fail_at = fail.then_some(config.layers / 2);
        let Self { measured, largest, reader, .. } = self;
        let mut attention = Paged { backend, plan, attend, fail_at, measured, largest, reader };
        let pass = Pass { tokens: &self.tokens, positions: plan.positions, wanted: &self.wanted };
        self.model
            .forward(pass, &mut attention, &mut self.work, clock)
            .map_err(|error| Error::run(error.to_string()))?;
        tokens.clear();
        for (i, draw) in work.draws.iter().enumerate() {
            let key = draw.key();
            if draw.edits.is_none() {
                tokens.push(draw.sampling.choose(key, self.logits(i)));
                continue;
            }
            let Edits { start, count, only } = draw.edits;
            let edits = &work.edits[start as usize..][..count as usize];
            let mut edited = std::mem::take(&mut self.edited);
            shaping::apply(edits, only, self.logits(i), &mut edited);
            tokens.push(draw.sampling.choose(key, &edited));
            self.edited = edited;
        }
        clock.lap(Part::Sampling);
        self.last_tokens.clone_from(tokens);
        Ok(())
    }

    fn settle(&mut self, backend: &mut Cpu) -> Result<()> {
        backend.synchronize().map_err(|error| Error::run(error.to_string()))
    }

    fn edits_max(&self) -> usize {
        usize::MAX
    }

    fn keeps_logits(&self) -> bool {
        true
    }

    fn logits(&self, draw: usize) -> &[f32] {
        let vocab = self.model.config.vocab;
        &self.work.logits[self.rows[draw] * vocab..][..vocab]
    }
}

/// The error that ended a step's computation early.
#[derive(Debug)]
enum StepError {
    Backend(CpuError),
    /// The user requested a failure (`--fail-every`).
    Injected,
}

impl std::fmt::Display for StepError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Backend(error) => error.fmt(f),
            Self::Injected => f.write_str("injected failure"),
        }
    }
}

/// Attention of one planned step over the pages of a backend.
struct Paged<'a> {
    backend: &'a mut Cpu,
    plan: BatchPlan<'a>,
    attend: Attend,
    /// The layer after whose attention the step fails, if a failure was requested.
    fail_at: Option<usize>,
    measured: &'a mut Option<Measured>,
    largest: &'a mut Option<Largest>,
    reader: &'a mut Option<Reader>,
}

impl Attention for Paged<'_> {
    type Error = StepError;

    fn layer(
        &mut self,
        layer: usize,
        AttentionInputs { window, chunk, q, k, v, sinks }: AttentionInputs<'_>,
        out: &mut [f32],
    ) -> std::result::Result<(), StepError> {
        let attend = Attend { window, chunk, ..self.attend };
        let id = LayerId::new(layer as u32);
        if let Some(measured) = self.measured {
            measured.measure(layer, q, k);
        }
        if let Some(largest) = self.largest {
            largest.measure(layer, k, v);
        }
        let stored = self.backend.store_cache(&self.plan, id, k.into(), v.into());
        stored
            .and_then(|()| match self.reader {
                Some(reader) => reader.attend(self.backend, (&self.plan, id), &attend, (q, sinks), out),
                None => {
                    let queries = Queries { rows: q.into(), sinks };
                    self.backend.attend_queries(&self.plan, id, &attend, queries, out.into(), None)
                }
            })
            .map_err(StepError::Backend)?;
        if self.fail_at == Some(layer) { Err(StepError::Injected) } else { Ok(()) }
    }

    fn delta(&mut self, layer: usize, step: &mut DeltaStep<'_>) -> std::result::Result<(), StepError> {
        let id = LayerId::new(layer as u32);
        for (index, row) in self.plan.rows.iter().enumerate().filter(|(_, row)| row.kv_len > 0) {
            let state = match self.backend.state(&self.plan, id, index).map_err(StepError::Backend)? {
                CpuState::InPlace(state) => State::InPlace(state),
                CpuState::From(from, to) => State::From(from, to),
            };
            let start = row.qo_start as usize;
            step.update(start..start + row.extend_len as usize, state, CACHED_CONV);
        }
        if self.fail_at == Some(layer) { Err(StepError::Injected) } else { Ok(()) }
    }
}
