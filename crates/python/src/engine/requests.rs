//! Calls about one request.

use kvarena::TokenId;
use kvarena::plan::Keep;
use pyo3::prelude::*;

use super::{Engine, seq_int, terms};
use crate::arguments::{Count, Id, Ints};
use crate::array::Array;
use crate::errors::{of_core, of_engine};
use crate::long::{LONG_TOKENS, run};

/// The cost of admitting a prompt now.
#[pyclass(frozen, get_all, module = "kvarena")]
pub struct Admission {
    /// The number of leading tokens whose cached K and V would be used.
    cached_len: u32,
    /// The number of cached pages that are idle now, and would be in use.
    idle_pages: u32,
    /// The number of pages that the other tokens need.
    lacking_pages: u32,
    /// The number of pages that are available to the prompt.
    available_pages: u32,
    /// Whether they suffice.
    fits: bool,
    /// The step whose completion makes enough pages available, or None.
    after: Option<u64>,
}

/// Reads tokens, and copies those of a long call.
fn tokens_of(tokens: &Bound<'_, PyAny>) -> PyResult<(Ints, bool)> {
    let ints = Ints::new("tokens", tokens)?;
    let long = ints.as_slice().len() > LONG_TOKENS;
    Ok((if long { ints.owned() } else { ints }, long))
}

fn keep(publish: bool) -> Keep {
    if publish { Keep::Publish } else { Keep::Drop }
}

#[pymethods]
impl Engine {
    /// Returns the cost of admitting a prompt now. Changes nothing.
    #[pyo3(signature = (tokens, promise=None, at_most=None, namespace=Id(0)),
           text_signature = "($self, tokens, promise=None, at_most=None, namespace=0)")]
    fn admission(
        &self,
        tokens: &Bound<'_, PyAny>,
        promise: Option<Count>,
        at_most: Option<Count>,
        namespace: Id,
    ) -> PyResult<Admission> {
        let (ints, _) = tokens_of(tokens)?;
        let terms = terms(promise, at_most, ints.as_slice().len());
        let cost = self.get()?.admission(namespace.namespace(), ints.tokens(), terms).map_err(of_core)?;
        Ok(Admission {
            cached_len: cost.cached_len,
            idle_pages: cost.idle_pages,
            lacking_pages: cost.lacking_pages,
            available_pages: cost.available_pages,
            fits: cost.fits(),
            after: cost.after.map(|step| step.raw()),
        })
    }

    /// Admits a prompt, and returns its sequence. Locks its cached prefix, and takes no page yet.
    ///
    /// `promise` is the number of tokens, prompt and output together, that pages are reserved for; the prompt's by
    /// default. `at_most` limits the tokens whose cached K and V are used. Raises OutOfPages or Shortage.
    #[pyo3(signature = (tokens, promise=None, at_most=None, namespace=Id(0)),
           text_signature = "($self, tokens, promise=None, at_most=None, namespace=0)")]
    fn admit(
        &mut self,
        tokens: &Bound<'_, PyAny>,
        promise: Option<Count>,
        at_most: Option<Count>,
        namespace: Id,
    ) -> PyResult<u64> {
        let (ints, long) = tokens_of(tokens)?;
        let terms = terms(promise, at_most, ints.as_slice().len());
        let core = self.get_mut()?;
        let seq = run(tokens.py(), long, || core.admit(namespace.namespace(), ints.tokens(), terms));
        Ok(seq_int(seq.map_err(of_core)?))
    }

    /// Replaces a sequence's promise by one of `tokens` tokens in total. 0 returns the unused pages.
    fn promise(&mut self, seq: Id, tokens: Count) -> PyResult<()> {
        self.get_mut()?.promise(seq.seq(), tokens.0).map_err(of_core)
    }

    /// Appends tokens to a sequence, such as sampled ones.
    fn append(&mut self, seq: Id, tokens: &Bound<'_, PyAny>) -> PyResult<()> {
        let ints = Ints::new("tokens", tokens)?;
        self.get_mut()?.append(seq.seq(), ints.tokens()).map_err(of_core)
    }

    /// Forks a sequence. Returns the children, and the step of the copies of their last page, or None. The host does
    /// the copies (`drain`), and completes the step.
    #[pyo3(signature = (seq, count=Count(1), promise=Count(0)), text_signature = "($self, seq, count=1, promise=0)")]
    fn fork(&mut self, seq: Id, count: Count, promise: Count) -> PyResult<(Vec<u64>, Option<u64>)> {
        let forked = self.get_mut()?.fork(seq.seq(), count.0, promise.0).map_err(of_engine)?;
        Ok((forked.children.iter().copied().map(seq_int).collect(), forked.step.map(|step| step.raw())))
    }

    /// Cuts a sequence to its first `len` tokens, such as before rejected drafts.
    fn rollback(&mut self, seq: Id, len: Count) -> PyResult<()> {
        self.get_mut()?.rollback(seq.seq(), len.0).map_err(of_core)
    }

    /// Preempts a sequence: releases its pages and keeps its tokens for `resume`. With `publish=False`, pages that are
    /// not cached yet are not cached.
    #[pyo3(signature = (seq, publish=true))]
    fn preempt(&mut self, seq: Id, publish: bool) -> PyResult<()> {
        self.get_mut()?.preempt(seq.seq(), keep(publish)).map_err(of_core)
    }

    /// Admits a preempted sequence again, with the terms of `admit`; its tokens are promised by default.
    #[pyo3(signature = (seq, promise=None, at_most=None))]
    fn resume(&mut self, seq: Id, promise: Option<Count>, at_most: Option<Count>) -> PyResult<()> {
        let core = self.get_mut()?;
        let tokens = core.token_count(seq.seq()).map_err(of_core)?;
        core.resume(seq.seq(), terms(promise, at_most, tokens as usize)).map_err(of_core)
    }

    /// Finishes a sequence. Its computed whole pages stay cached, unless `publish=False` drops those that are not yet.
    #[pyo3(signature = (seq, publish=true))]
    fn finish(&mut self, seq: Id, publish: bool) -> PyResult<()> {
        self.get_mut()?.finish_with(seq.seq(), keep(publish)).map_err(of_core)
    }

    /// Returns the number of a sequence's tokens that have K and V.
    fn cached_len(&self, seq: Id) -> PyResult<u32> {
        self.get()?.cached_len(seq.seq()).map_err(of_core)
    }

    /// Returns `cached_len` plus the tokens of open plans.
    fn planned_len(&self, seq: Id) -> PyResult<u32> {
        self.get()?.planned_len(seq.seq()).map_err(of_core)
    }

    /// Returns the number of known tokens of a sequence.
    fn token_count(&self, seq: Id) -> PyResult<u32> {
        self.get()?.token_count(seq.seq()).map_err(of_core)
    }

    /// Returns the maximum number of tokens that the next plan can give a sequence.
    fn extend_max(&self, seq: Id) -> PyResult<u32> {
        self.get()?.extend_max(seq.seq()).map_err(of_core)
    }

    /// Returns the known tokens of a sequence.
    fn tokens(&self, seq: Id) -> PyResult<Array> {
        let tokens = self.get()?.tokens(seq.seq()).map_err(of_core)?;
        Ok(Array::new(tokens.map(TokenId::raw).collect::<Vec<u32>>()))
    }

    /// Returns the pages of a sequence, in order.
    fn page_table(&self, seq: Id) -> PyResult<Array> {
        let pages = self.get()?.page_table(seq.seq()).map_err(of_core)?;
        Ok(Array::new(pages.map(|page| page.raw() as i32).collect()))
    }
}
