//! `kvarena.Engine`: sequences, pages, plans and pools. `requests`, `steps` and `cache` have its calls.

mod cache;
mod config;
mod requests;
mod steps;

use std::sync::Mutex;

use kvarena::backend::{Cpu, Either, Outbox};
use kvarena::plan::{Admit, Extend};
use kvarena::{Engine as Core, SeqKey, StepScratch};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use slotmap::{Key, KeyData};

use crate::arguments::{Count, Id};
use crate::long::process;

pub use requests::Admission;
pub use steps::Plan;

/// The pages, prefixes and plans of one scheduler.
///
/// `pool="outbox"`: the host has its own tensors; `drain` returns the copies that it must make. `pool="cpu"`: the
/// engine also has the memory of K and V, which `k_cache` and `v_cache` lend to torch and numpy.
///
///     engine = Engine(pages=1024, page_size=16)
///     seq = engine.admit(prompt)                  # engine.cached_len(seq) tokens need no computing
///     plan = engine.plan([(seq, engine.extend_max(seq))])
///     work = engine.drain()                       # then compute: plan.tokens, plan.positions, plan.slot_mapping
///     engine.append(seq, [sampled])
///     engine.commit(plan.step)                    # whole pages may be shared from now on
///     engine.complete(plan.step)                  # the device is done
///     engine.finish(seq)                          # the prefix stays for the next request
///
/// Sequences and steps are ints. An error leaves the engine unchanged. One thread at a time may call an engine. After
/// a fork, the child's engine with `pool="cpu"` raises RuntimeError, because its pool is not the parent's.
#[pyclass(module = "kvarena")]
pub struct Engine {
    core: Core<Either<Outbox, Cpu>>,
    /// Only `&mut self` uses it, so it is never locked.
    scratch: Mutex<StepScratch>,
    process: u64,
}

impl Engine {
    fn check_process(&self) -> PyResult<()> {
        match self.core.backend() {
            Either::Right(_) if self.process != process() => {
                Err(PyRuntimeError::new_err("the engine's pool belongs to the process that was forked"))
            }
            _ => Ok(()),
        }
    }

    /// Returns the core, unless a fork has separated the engine from its pool.
    fn get(&self) -> PyResult<&Core<Either<Outbox, Cpu>>> {
        self.check_process().map(|()| &self.core)
    }

    /// As [`Engine::get`], for calls that change the engine.
    fn get_mut(&mut self) -> PyResult<&mut Core<Either<Outbox, Cpu>>> {
        self.check_process().map(|()| &mut self.core)
    }
}

impl Id {
    /// Returns the sequence of a number. A key has fewer bits than its number, so other numbers name no sequence.
    pub fn seq(self) -> SeqKey {
        let seq = SeqKey::from(KeyData::from_ffi(self.0));
        if seq_int(seq) == self.0 { seq } else { SeqKey::null() }
    }
}

fn seq_int(seq: SeqKey) -> u64 {
    seq.data().as_ffi()
}

fn extends(items: Vec<(Id, Count)>) -> Vec<Extend> {
    items.into_iter().map(|(seq, len)| Extend { seq: seq.seq(), len: len.0 }).collect()
}

/// Returns the terms of an admission of `tokens` tokens, which are promised if no promise is given.
fn terms(promise: Option<Count>, at_most: Option<Count>, tokens: usize) -> Admit {
    let promise = promise.map_or(tokens as u32, |promise| promise.0);
    Admit { promise, at_most: at_most.map_or(u32::MAX, |at_most| at_most.0) }
}
