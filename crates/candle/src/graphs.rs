//! [`Graphs`]: steps of one size as CUDA graphs, captured once and replayed.
//!
//! A graph contains addresses. It reads a step's inputs and writes the result in memory of its own. The pool, the page
//! tables and the staged plan stay where they are, and what the model allocates in between belongs to the graph.

use std::collections::HashMap;
use std::marker::PhantomData;

use candle_core::{Device, Tensor};
use kvarena::backend::cuda::{CudaGraph, GraphKey};

use crate::{Error, Inputs, KvArena, Step};

/// A model's forward pass. A function without captured state, so that a graph depends on nothing but the model.
pub type Forward<M> = fn(&M, &Step<'_>) -> candle_core::Result<Tensor>;

/// The graphs of a model's steps over one arena.
///
/// The first step of a size runs as it is, the second is captured, and later ones replay the graph. Pad decode steps to
/// a few sizes with [`KvArena::step_padded`]. On a CPU every step runs as it is.
pub struct Graphs<'m, M> {
    model: &'m M,
    forward: Forward<M>,
    arena: u64,
    steps: HashMap<GraphKey, Captured>,
    /// candle keeps uploads that graphs read in memory of this thread.
    this_thread: PhantomData<*const ()>,
}

/// The memory of a graph's inputs and result, and the graph from the second step on.
struct Captured {
    inputs: Inputs,
    out: Tensor,
    graph: Option<CudaGraph>,
}

impl<'m, M> Graphs<'m, M> {
    /// Returns an empty set of graphs.
    ///
    /// # Errors
    /// [`Error::EventTracking`] for a GPU whose event tracking is on: a capture cannot wait for candle's events. Call
    /// `CudaDevice::disable_event_tracking` before the first tensor is made.
    pub fn new(arena: &KvArena, model: &'m M, forward: Forward<M>) -> Result<Self, Error> {
        if let Device::Cuda(device) = arena.device()
            && device.is_event_tracking()
        {
            return Err(Error::EventTracking);
        }
        let steps = HashMap::new();
        Ok(Self { model, forward, arena: arena.id(), steps, this_thread: PhantomData })
    }

    /// Returns what the forward pass returns for a step.
    ///
    /// # Errors
    /// The model's and the driver's; [`Error::OtherArena`] for a step of another arena.
    pub fn forward(&mut self, step: &mut Step<'_>) -> Result<Tensor, Error> {
        if !step.is_of(self.arena) {
            return Err(Error::OtherArena);
        }
        let Some((key, stream)) = step.stage()? else {
            return Ok((self.forward)(self.model, step)?);
        };
        // Uploads of shapes and strides become copies from memory that candle keeps.
        let _cache = step.inputs.tokens.device().as_cuda_device()?.enable_cuda_graph_htod_cache();
        let Some(captured) = self.steps.get_mut(&key) else {
            let out = (self.forward)(self.model, step)?;
            let inputs = step.inputs.copy()?;
            self.steps.insert(key, Captured { inputs, out: out.copy()?, graph: None });
            return Ok(out);
        };
        captured.inputs.overwrite(&step.inputs)?;
        step.inputs = captured.inputs.clone();
        let graph = match &captured.graph {
            Some(graph) => graph,
            None => {
                let body = || -> Result<(), Error> {
                    let out = (self.forward)(self.model, step)?;
                    Ok(captured.out.slice_set(&out, 0, 0)?)
                };
                captured.graph.insert(stream.capture(body)?)
            }
        };
        // SAFETY: the memory of the graph is the model's, which is borrowed; the arena's, which the step borrows; that
        // of `captured`; and uploads, which candle keeps as long as this thread. The step's plan is staged.
        unsafe { graph.launch(&stream) }?;
        Ok(captured.out.copy()?)
    }
}
