//! [`Graphs`]: steps of one size as CUDA graphs, captured once and replayed.
//!
//! A graph contains addresses. [`Graphs`] copies a step's inputs to buffers that the graph reads, and
//! the graph writes its result to another buffer. The pool, the page tables and the staged plan have
//! fixed addresses. The graph owns all memory that the model allocates during capture.

use std::collections::HashMap;
use std::marker::PhantomData;

use candle_core::{Device, Tensor};
use kvarena::backend::cuda::{CudaGraph, GraphKey};

use crate::{Error, Inputs, KvArena, Step};

/// A model's forward pass. It is a function without captured state, so a graph depends only on the
/// model.
pub type Forward<M> = fn(&M, &Step<'_>) -> candle_core::Result<Tensor>;

/// The graphs of a model's steps over one arena.
///
/// The first step with a [`GraphKey`] runs directly, the second is captured and launched as a graph, and later ones
/// replay the graph. Pad decode steps to a few sizes with [`KvArena::step_padded`], because steps of another size have
/// another key. On a CPU every step runs directly.
pub struct Graphs<'m, M> {
    model: &'m M,
    forward: Forward<M>,
    arena: u64,
    steps: HashMap<GraphKey, Captured>,
    /// Makes the type not `Send`: candle keeps the uploads that graphs read in thread-local memory.
    this_thread: PhantomData<*const ()>,
}

/// The memory of a graph's inputs and result. The graph exists from the second step on.
struct Captured {
    inputs: Inputs,
    out: Tensor,
    graph: Option<CudaGraph>,
}

impl<'m, M> Graphs<'m, M> {
    /// Returns an empty set of graphs.
    ///
    /// # Errors
    /// [`Error::EventTracking`] if the GPU tracks events, because a capture cannot wait for
    /// candle's events. Call `CudaDevice::disable_event_tracking` before creating any tensor.
    pub fn new(arena: &KvArena, model: &'m M, forward: Forward<M>) -> Result<Self, Error> {
        if let Device::Cuda(device) = arena.device()
            && device.is_event_tracking()
        {
            return Err(Error::EventTracking);
        }
        let steps = HashMap::new();
        Ok(Self { model, forward, arena: arena.id(), steps, this_thread: PhantomData })
    }

    /// Runs the forward pass on a step and returns its result. If a graph runs the pass, `step.inputs` become the
    /// graph's buffers.
    ///
    /// # Errors
    /// Errors of the model and of the driver. [`Error::OtherArena`] if the step belongs to another
    /// arena.
    pub fn forward(&mut self, step: &mut Step<'_>) -> Result<Tensor, Error> {
        if !step.is_of(self.arena) {
            return Err(Error::OtherArena);
        }
        let Some((key, stream)) = step.stage()? else {
            return Ok((self.forward)(self.model, step)?);
        };
        // candle keeps the uploaded shapes and strides in memory that the graph can read again.
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
        // SAFETY: all memory of the graph is alive. The model is borrowed, and the step borrows the
        // arena. `captured` owns its buffers, and candle keeps uploads as long as this thread. The
        // step's plan is staged.
        unsafe { graph.launch(&stream) }?;
        Ok(captured.out.copy()?)
    }
}
