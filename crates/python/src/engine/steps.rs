//! Calls about one step, and its plan.

use kvarena::backend::Either;
use kvarena::id::MoveId;
use kvarena::plan::{BatchPlan, OwnedPlan, PageMove, SlotMapping};
use kvarena::{TokenId, Work};
use pyo3::exceptions::{PyMemoryError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyList;

use super::{Engine, extends};
use crate::arguments::{Count, Id};
use crate::array::Array;
use crate::errors::{of_core, of_engine};

/// The plan of one step. Each array is a copy of its own, so keep it instead of reading the attribute again.
#[pyclass(frozen, module = "kvarena")]
pub struct Plan {
    owned: OwnedPlan,
}

impl Plan {
    fn plan(&self) -> BatchPlan<'_> {
        self.owned.plan()
    }
}

#[pymethods]
impl Plan {
    /// The step, for `commit`, `complete` and `abort`.
    #[getter]
    fn step(&self) -> u64 {
        self.plan().step.raw()
    }

    /// The new tokens of all sequences, int32; -1 for a token that is not known yet.
    #[getter]
    fn tokens(&self) -> Array {
        Array::new(bytemuck::cast_slice::<u32, i32>(TokenId::as_raw(self.plan().tokens)).to_vec())
    }

    /// The position of each new token, int32.
    #[getter]
    fn positions(&self) -> Array {
        Array::new(bytemuck::cast_slice::<u32, i32>(self.plan().positions).to_vec())
    }

    /// The slot of K and V of each new token, int32 or int64.
    #[getter]
    fn slot_mapping(&self) -> Array {
        match self.plan().slot_mapping {
            SlotMapping::I32(slots) => Array::new(slots.to_vec()),
            SlotMapping::I64(slots) => Array::new(slots.to_vec()),
        }
    }

    /// A row for each sequence, int32: its row in the page tables, its first query row, its new tokens, and its tokens
    /// once the step is computed.
    #[getter]
    fn rows(&self) -> Array {
        let plan = self.plan();
        Array::rows(bytemuck::cast_slice(plan.rows).to_vec() as Vec<i32>, plan.rows.len(), 4)
    }

    fn __repr__(&self) -> String {
        let plan = self.plan();
        let (rows, tokens) = (plan.rows.len(), plan.token_count());
        format!("<kvarena.Plan of step {}: {rows} sequences, {tokens} tokens>", plan.step.raw())
    }
}

#[pymethods]
impl Engine {
    /// Plans a step for (sequence, number of new tokens) items, and takes the pages that they need.
    ///
    /// Raises OutOfPages: complete the step that the error names, or preempt a sequence.
    fn plan(&mut self, items: Vec<(Id, Count)>) -> PyResult<Plan> {
        self.check_process()?;
        let items = extends(items);
        let scratch = self.scratch.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
        let plan = self.core.plan_batch(scratch, &items).map_err(of_engine)?;
        Ok(Plan { owned: OwnedPlan::from(&plan) })
    }

    /// Commits a step: its tokens have K and V, and whole pages may be shared.
    fn commit(&mut self, step: Id) -> PyResult<()> {
        self.get_mut()?.commit(step.step()).map_err(of_core)
    }

    /// Completes all steps up to `step`: the device has finished them, and their pages return.
    fn complete(&mut self, step: Id) -> PyResult<()> {
        self.get_mut()?.complete(step.step()).map_err(of_core)
    }

    /// Undoes a planned step and all later ones.
    fn abort(&mut self, step: Id) -> PyResult<()> {
        self.get_mut()?.abort(step.step()).map_err(of_core)
    }

    /// The newest step, 0 before the first.
    #[getter]
    fn newest_step(&self) -> u64 {
        self.core.newest_step().raw()
    }

    /// Returns a page table for sequences, int32 [sequences, width]; the rest of a row is `fill`.
    #[pyo3(signature = (seqs, width, fill=-1), text_signature = "($self, seqs, width, fill=-1)")]
    fn tables(&self, seqs: Vec<Id>, width: Count, fill: i32) -> PyResult<Array> {
        let seqs: Vec<_> = seqs.into_iter().map(Id::seq).collect();
        let (core, width) = (self.get()?, width.0 as usize);
        // Checked before the allocation, whose size is the caller's.
        for &seq in &seqs {
            let pages = core.page_table(seq).map_err(of_core)?.count();
            if pages > width {
                let text = format!("sequence {seq:?} has {pages} pages, more than the width of {width}");
                return Err(PyValueError::new_err(text));
            }
        }
        let mut words = Vec::new();
        let size = seqs.len().saturating_mul(width);
        words.try_reserve_exact(size).map_err(|_| PyMemoryError::new_err(size))?;
        words.resize(size, 0_i32);
        let written = core.write_tables(&seqs, 0, width, fill as u32, bytemuck::cast_slice_mut(&mut words));
        written.map_err(of_core)?;
        Ok(Array::rows(words, seqs.len(), width))
    }

    /// Returns the page tables of a plan's items in FlashInfer's format, int32: qo_indptr, kv_indptr, kv_indices and
    /// kv_last_page_len.
    fn packed(&mut self, items: Vec<(Id, Count)>) -> PyResult<(Array, Array, Array, Array)> {
        self.check_process()?;
        let scratch = self.scratch.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
        let packed = self.core.packed(scratch, &extends(items)).map_err(of_core)?;
        let array = |ints: &[i32]| Array::new(ints.to_vec());
        let (rows, pages) = (array(packed.qo_indptr), array(packed.kv_indptr));
        Ok((rows, pages, array(packed.kv_indices), array(packed.kv_last_page_len)))
    }

    /// Returns the waiting work on the host's tensors, in order, and removes it. Do it before the last plan's step.
    ///
    /// ("copy", [(source page, target page)]), ("slots", [(source slot, target slot)]), ("save", move, [(page, swap
    /// page)]) or ("load", move, [(page, swap page)]). An engine with a pool does its own work.
    fn drain<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let Either::Left(outbox) = self.get_mut()?.backend_mut() else { return Ok(PyList::empty(py)) };
        let mut pieces = Vec::new();
        outbox.drain(|work| pieces.push(piece(py, work)));
        PyList::new(py, pieces.into_iter().collect::<PyResult<Vec<_>>>()?)
    }

    /// Reports that all saves up to a move are complete.
    fn saved(&mut self, id: Id) -> PyResult<()> {
        if let Either::Left(outbox) = self.get_mut()?.backend_mut() {
            outbox.saved(MoveId::new(id.0));
        }
        Ok(())
    }

    /// Reports that all loads up to a move are complete.
    fn loaded(&mut self, id: Id) -> PyResult<()> {
        if let Either::Left(outbox) = self.get_mut()?.backend_mut() {
            outbox.loaded(MoveId::new(id.0));
        }
        Ok(())
    }
}

fn piece<'py>(py: Python<'py>, work: Work<'_>) -> PyResult<Bound<'py, PyAny>> {
    let moves = |list: &[PageMove]| list.iter().map(|one| (one.device.raw(), one.swap.raw())).collect::<Vec<_>>();
    let work = match work {
        Work::Copy(copies) => {
            let pairs = copies.iter().map(|copy| (copy.source.raw(), copy.target.raw()));
            ("copy", pairs.collect::<Vec<_>>()).into_pyobject(py)?
        }
        Work::Slots(_, slots) => {
            let pairs = slots.iter().map(|one| (one.source.raw(), one.target.raw()));
            ("slots", pairs.collect::<Vec<_>>()).into_pyobject(py)?
        }
        Work::Save(id, list) => ("save", id.raw(), moves(list)).into_pyobject(py)?,
        Work::Load(id, list) => ("load", id.raw(), moves(list)).into_pyobject(py)?,
    };
    Ok(work.into_any())
}
