//! [`Operation`]: one layer's store and attention, for memory on the CPU or the GPU.
//!
//! `attend.rs` (CPU) and `gpu.rs` access the memory of candle's tensors.

use std::cell::{Cell, RefCell};
use std::ops::Range;

use candle_core::{Layout, Shape, Tensor};
use kvarena::backend::Queries;
use kvarena::{Attend, Backend, BatchPlan, EngineError, LayerId};

use crate::{Error, Pool};

/// One layer's attention.
pub(crate) struct Operation<'a> {
    pub(crate) pool: RefCell<&'a mut Pool>,
    pub(crate) plan: &'a BatchPlan<'a>,
    pub(crate) layer: LayerId,
    pub(crate) attend: &'a Attend,
    pub(crate) sinks: Option<&'a Tensor>,
    /// The cause of a failure; candle keeps only its text.
    pub(crate) failed: Cell<Option<Error>>,
}

impl Operation<'_> {
    /// Returns the shape of the result, `[rows, q_heads, head_dim]`.
    pub(crate) fn shape(&self, q: &Layout) -> Shape {
        q.shape().clone()
    }

    /// Stores an error, and returns its text as candle's error.
    pub(crate) fn fail(&self, error: Error) -> candle_core::Error {
        let text = candle_core::Error::msg(&error);
        self.failed.set(Some(error));
        text
    }

    /// Calls the backend's store and attention.
    pub(crate) fn run(
        &self,
        [q, k, v]: [<Pool as Backend>::Rows<'_>; 3],
        sinks: Option<<Pool as Backend>::Sinks<'_>>,
        out: <Pool as Backend>::RowsMut<'_>,
    ) -> Result<(), Error> {
        let mut pool = self.pool.borrow_mut();
        pool.store_cache(self.plan, self.layer, k, v).map_err(EngineError::Backend)?;
        let queries = Queries { rows: q, sinks };
        let attended = pool.attend_queries(self.plan, self.layer, self.attend, queries, out, None);
        Ok(attended.map_err(EngineError::Backend)?)
    }
}

/// Returns the range of elements of a tensor `[rows, heads, dim]` in its memory.
pub(crate) fn elements(at: &Layout) -> Range<usize> {
    let (dims, from) = (at.dims(), at.start_offset());
    from..from + (dims[0] - 1) * row_stride(at).unwrap_or(0) + dims[1] * dims[2]
}

/// Returns the number of elements from row to row of `[rows, heads, dim]`. It is `None` for a
/// single row, where candle's stride is arbitrary.
pub(crate) fn row_stride(at: &Layout) -> Option<usize> {
    (at.dims()[0] > 1).then_some(at.stride()[0])
}
