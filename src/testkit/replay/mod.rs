//! Drives an engine and the model together, and compares their results and states after every op.
//!
//! The replay also acts as the host. It maps an op's numbers to sequences, samples tokens, and stores K and V that
//! depend on the token and the text before it. `model/` computes the expected results.

mod bytes;
mod calls;
mod compare;
mod drafts;
mod host;
mod packed;
mod plans;
mod stores;

use std::collections::BTreeMap;
use std::fmt;

pub use bytes::Inspect;
use host::Host;

use super::model::Model;
use super::op::{Op, SmallConfig};
use crate::backend::{CpuOptions, OpenBackend};
use crate::engine::Engine;

/// The first difference between engine and model.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mismatch {
    /// Index of the op; `None` if the engine could not be created, or for a difference after the last op.
    pub index: Option<usize>,
    /// The op, if there is an index.
    pub op: Option<Op>,
    /// Description of the difference.
    pub what: String,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.index, self.op) {
            (Some(index), Some(op)) => write!(f, "op {index}, {op:?}: {}", self.what),
            _ => f.write_str(&self.what),
        }
    }
}

impl std::error::Error for Mismatch {}

/// Counts of results by kind. They show which calls and errors a workload covers.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Summary {
    /// Number of replayed ops.
    pub ops: u64,
    /// Counts by call and result, such as `"plan_batch OutOfPages"`, and counters such as `"hit tokens"`.
    pub answers: BTreeMap<String, u64>,
}

impl Summary {
    /// Adds the counts of another replay.
    pub fn add(&mut self, other: &Summary) {
        self.ops += other.ops;
        for (answer, count) in &other.answers {
            *self.answers.entry(answer.clone()).or_default() += count;
        }
    }

    fn count(&mut self, answer: String) {
        *self.answers.entry(answer).or_default() += 1;
    }
}

/// Replays ops on an engine with the CPU backend.
///
/// # Errors
/// The first [`Mismatch`].
pub fn replay(config: &SmallConfig, ops: &[Op]) -> Result<Summary, Mismatch> {
    replay_on(config, CpuOptions::with_threads(1), ops)
}

/// Replays ops on an engine with any backend.
///
/// # Errors
/// The first [`Mismatch`].
pub fn replay_on<B: Inspect>(
    config: &SmallConfig,
    backend: impl OpenBackend<Backend = B>,
    ops: &[Op],
) -> Result<Summary, Mismatch> {
    replay_each(config, backend, ops, |_| ())
}

/// Replays as [`replay_on`] does. `each` receives the engine before the first op and after each op.
pub(crate) fn replay_each<B: Inspect>(
    config: &SmallConfig,
    backend: impl OpenBackend<Backend = B>,
    ops: &[Op],
    mut each: impl FnMut(&mut Engine<B>),
) -> Result<Summary, Mismatch> {
    let nowhere = |what: String| Mismatch { index: None, op: None, what };
    let shape = config.engine().shape();
    let shape = shape.map_err(|error| nowhere(format!("the config: {error}")))?;
    let engine = Engine::with_hash_bits(config.engine(), backend, config.hash_bits);
    let engine = engine.map_err(|error| nowhere(error.to_string()))?;
    let mut host = Host::new(engine, Model::new(shape), config);
    each(&mut host.engine);
    for (index, &op) in ops.iter().enumerate() {
        host.apply(op).and_then(|()| host.listen()).and_then(|()| host.compare()).map_err(|what| Mismatch {
            index: Some(index),
            op: Some(op),
            what,
        })?;
        each(&mut host.engine);
    }
    host.close().map_err(|what| nowhere(format!("after the last op: {what}")))?;
    Ok(host.into_summary(ops.len()))
}

/// Returns `Ok` if both values are equal, else the difference.
fn agree<T: PartialEq + fmt::Debug>(what: &str, got: &T, want: &T) -> Result<(), String> {
    if got == want { Ok(()) } else { Err(format!("{what}: engine {got:?}, model {want:?}")) }
}
