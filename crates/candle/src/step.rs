//! [`Step`]: one forward pass.

use std::cell::RefCell;

use candle_core::{Device, Tensor};
#[cfg(feature = "cuda")]
use kvarena::backend::{
    Either,
    cuda::{CudaStream, GraphKey},
};
use kvarena::{Attend, BatchPlan, Engine, LayerId, StepId};

use crate::attend::attend;
use crate::{Error, Pool};

/// The inputs of a model. Rows of tokens are packed in the order of the step's items. The padding rows of
/// [`KvArena::step_padded`](crate::KvArena::step_padded) follow.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// New tokens, u32 `[rows]`.
    pub tokens: Tensor,
    /// Positions of the new tokens, u32 `[rows]`.
    pub positions: Tensor,
    /// The index of each item's last row, u32 `[items]`. The logits of this row give the item's next token. In a
    /// padded step, the indices of the padding rows follow.
    pub last_rows: Tensor,
    /// One tensor that contains the other three.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "graphs overwrite it"))]
    all: Tensor,
}

impl Inputs {
    /// Uploads all inputs as one tensor.
    fn new(plan: &BatchPlan<'_>, device: &Device) -> candle_core::Result<Self> {
        let tokens = plan.tokens.iter().map(|token| token.raw());
        let last_rows = plan.rows.iter().map(|row| row.qo_start + row.extend_len - 1);
        let (rows, items) = (plan.tokens.len(), plan.rows.len());
        let all: Vec<u32> = tokens.chain(plan.positions.iter().copied()).chain(last_rows).collect();
        Self::split(Tensor::from_vec(all, 2 * rows + items, device)?, rows)
    }

    fn split(all: Tensor, rows: usize) -> candle_core::Result<Self> {
        Ok(Self {
            tokens: all.narrow(0, 0, rows)?,
            positions: all.narrow(0, rows, rows)?,
            last_rows: all.narrow(0, 2 * rows, all.elem_count() - 2 * rows)?,
            all,
        })
    }

    /// Copies the inputs into new memory.
    #[cfg(feature = "cuda")]
    pub(crate) fn copy(&self) -> candle_core::Result<Self> {
        Self::split(self.all.copy()?, self.tokens.elem_count())
    }

    /// Overwrites these inputs with others of the same size.
    #[cfg(feature = "cuda")]
    pub(crate) fn overwrite(&self, inputs: &Self) -> candle_core::Result<()> {
        self.all.slice_set(&inputs.all, 0, 0)
    }
}

/// One forward pass over new tokens of some sequences.
///
/// It borrows the arena until [`launched`](Step::launched). A step that is dropped earlier, for
/// example after an error in the model, is aborted and leaves its sequences unchanged.
pub struct Step<'a> {
    /// The model's inputs.
    pub inputs: Inputs,
    undo: Undo<'a>,
    plan: BatchPlan<'a>,
    /// The number of the arena.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "graphs are of one arena"))]
    arena: u64,
}

/// Aborts its step when it is dropped.
struct Undo<'a> {
    engine: RefCell<&'a mut Engine<Pool>>,
    /// `None` after the launch.
    step: Option<StepId>,
}

impl Drop for Undo<'_> {
    fn drop(&mut self) {
        let Some(step) = self.step else { return };
        let engine = self.engine.get_mut();
        engine.abort(step).expect("the last step that was planned is open");
        // An error means that an earlier step is open; closing that step completes this one.
        let _ = engine.complete(step);
    }
}

impl<'a> Step<'a> {
    pub(crate) fn new(
        engine: &'a mut Engine<Pool>,
        plan: BatchPlan<'a>,
        device: &Device,
        arena: u64,
    ) -> Result<Self, Error> {
        let undo = Undo { engine: RefCell::new(engine), step: Some(plan.step()) };
        Ok(Self { inputs: Inputs::new(&plan, device)?, undo, plan, arena })
    }

    /// Returns whether the step belongs to the arena with this number.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_of(&self, arena: u64) -> bool {
        self.arena == arena
    }

    /// On a GPU, stages the plan for a graph. Returns the graph's key and the stream.
    #[cfg(feature = "cuda")]
    pub(crate) fn stage(&self) -> Result<Option<(GraphKey, CudaStream)>, Error> {
        let mut engine = self.undo.engine.borrow_mut();
        let Either::Right(cuda) = engine.backend_mut() else { return Ok(None) };
        Ok(Some((cuda.stage(&self.plan)?.graph, cuda.stream().clone())))
    }

    /// Returns the step's number, for [`KvArena::close`](crate::KvArena::close).
    pub fn id(&self) -> StepId {
        self.plan.step()
    }

    /// Returns the plan: rows, positions, slots.
    pub fn plan(&self) -> &BatchPlan<'a> {
        &self.plan
    }

    /// Stores a layer's K and V of the new tokens. Returns each token's attention over its sequence up to
    /// itself, `[rows, q_heads, head_dim]`, with the dtype of q.
    ///
    /// q is `[rows, q_heads, head_dim]`, k and v are `[rows, kv_heads, head_dim]`. A row is
    /// contiguous, and may be part of a longer row, such as that of a fused projection. On the CPU
    /// each tensor is f32, f16 or bf16; on a GPU each has the pool's type (bf16 for a quantised pool).
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Strides`], [`Error::Dtype`], [`Error::Device`]. [`Error::Engine`] if the backend
    /// rejects the layer, the parameters, overlapping rows or, on a GPU, the rows' type or alignment, or if the device
    /// fails. [`Error::Candle`] if candle cannot allocate the result.
    pub fn attend(&self, layer: usize, attend: &Attend, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor, Error> {
        self.attend_with_sinks(layer, attend, [q, k, v], None)
    }

    /// Like [`attend`](Step::attend), but with attention sinks, f32 `[q_heads]`: see
    /// [`Queries::sinks`](kvarena::backend::Queries::sinks).
    ///
    /// # Errors
    /// The errors of [`attend`](Step::attend).
    pub fn attend_with_sinks(
        &self,
        layer: usize,
        parameters: &Attend,
        qkv: [&Tensor; 3],
        sinks: Option<&Tensor>,
    ) -> Result<Tensor, Error> {
        let layer = LayerId::new(u32::try_from(layer).unwrap_or(u32::MAX));
        let mut engine = self.undo.engine.borrow_mut();
        let layout = engine.shape().layout;
        attend(engine.backend_mut(), &layout, (&self.plan, layer), parameters, qkv, sinks)
    }

    /// Ends the borrow of the arena after the last layer, and returns the step's number for
    /// [`KvArena::close`](crate::KvArena::close).
    pub fn launched(mut self) -> StepId {
        self.undo.step = None;
        self.plan.step()
    }
}
