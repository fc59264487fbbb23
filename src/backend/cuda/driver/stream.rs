//! Streams, events and graphs, for hosts without their own CUDA binding. Hosts with a binding pass raw `CUstream`s as
//! integers, with a value that keeps them alive.

use std::any::Any;
use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::Arc;

use super::gpu::Gpu;
use super::raw::{RawStream, raw};
use super::sys;
use super::work;
use crate::backend::cuda::error::{CudaError, check};

/// `CU_STREAM_LEGACY`: the default stream, which also has handle 0.
const LEGACY: RawStream = 1;

/// `CU_STREAM_PER_THREAD`: a different stream in each thread.
const PER_THREAD: RawStream = 2;

/// A stream of the host or of this crate. Clones share it; dropping the last clone destroys a stream of this crate.
#[derive(Clone, Debug)]
pub struct CudaStream {
    shared: Arc<Handle>,
}

#[derive(Debug)]
struct Handle {
    gpu: Gpu,
    stream: RawStream,
    owner: Owner,
}

#[derive(Debug)]
enum Owner {
    ThisCrate,
    /// The driver: the default stream lives as long as its context.
    Driver,
    /// The host; the value keeps the stream alive.
    Host(#[expect(dead_code, reason = "held for its drop")] Arc<dyn Any + Send + Sync>),
}

impl CudaStream {
    /// Creates a stream that is not ordered with the default stream.
    pub fn new(gpu: &Gpu) -> Result<Self, CudaError> {
        gpu.bind()?;
        let mut stream = ptr::null_mut();
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: `stream` is valid memory for one handle; a context is bound.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut stream, flags) })?;
        Ok(Self::with(gpu, stream as usize as u64, Owner::ThisCrate))
    }

    /// Returns the device's default stream.
    pub fn default_of(gpu: &Gpu) -> Self {
        Self::with(gpu, 0, Owner::Driver)
    }

    /// Wraps the host's own stream. `owner` keeps the stream alive until the last clone of this value is dropped.
    /// Handles 0 and 1 are the default stream.
    ///
    /// # Errors
    /// [`CudaError::PerThreadStream`] for handle 2.
    ///
    /// # Safety
    /// The stream belongs to `gpu`'s primary context, and lives as long as `owner`.
    pub unsafe fn from_raw(gpu: &Gpu, stream: RawStream, owner: Arc<dyn Any + Send + Sync>) -> Result<Self, CudaError> {
        match stream {
            PER_THREAD => Err(CudaError::PerThreadStream),
            LEGACY => Ok(Self::with(gpu, 0, Owner::Host(owner))),
            _ => Ok(Self::with(gpu, stream, Owner::Host(owner))),
        }
    }

    fn with(gpu: &Gpu, stream: RawStream, owner: Owner) -> Self {
        work::add_stream(gpu.context(), stream);
        Self { shared: Arc::new(Handle { gpu: gpu.clone(), stream, owner }) }
    }

    /// Returns the raw `CUstream`.
    pub fn raw(&self) -> RawStream {
        self.shared.stream
    }

    /// Returns the device.
    pub fn gpu(&self) -> &Gpu {
        &self.shared.gpu
    }

    /// Waits for all submitted work.
    ///
    /// # Errors
    /// Any failure since the last call.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.gpu().bind()?;
        // SAFETY: the stream lives.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(raw(self.raw())) })
    }

    /// Records an event at the stream's end, and returns it.
    pub(in crate::backend::cuda) fn mark(&self) -> Result<CudaEvent, CudaError> {
        let mut event = CudaEvent::new(self.gpu(), false)?;
        event.record(self)?;
        Ok(event)
    }

    /// Captures the work that `body` submits to this stream into a graph, without running it.
    ///
    /// # Errors
    /// The errors of the body and of the driver.
    pub fn capture<E: From<CudaError>>(&self, body: impl FnOnce() -> Result<(), E>) -> Result<CudaGraph, E> {
        self.gpu().bind()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives.
        let result = unsafe { sys::cuStreamBeginCapture_v2(raw(self.raw()), mode) };
        check("cuStreamBeginCapture", result)?;
        let capture = Capture { stream: self };
        body()?;
        let graph = capture.end()?;
        let mut exec = ptr::null_mut();
        // SAFETY: `exec` is valid memory for one handle; `graph` was made above.
        let result = unsafe { sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0) };
        // SAFETY: the graph is destroyed once; the instantiated graph does not depend on it.
        unsafe { sys::cuGraphDestroy(graph) };
        check("cuGraphInstantiateWithFlags", result)?;
        Ok(CudaGraph { gpu: self.gpu().clone(), exec: exec as usize as u64 })
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let bound = self.gpu.bind().is_ok();
        work::remove_stream(self.gpu.context(), self.stream);
        if matches!(self.owner, Owner::ThisCrate) && bound {
            // SAFETY: created by cuStreamCreate, destroyed once; its work still runs to the end.
            unsafe { sys::cuStreamDestroy_v2(raw(self.stream)) };
        }
    }
}

/// A capture in progress. If its body fails or panics, dropping it ends the capture without a graph.
struct Capture<'a> {
    stream: &'a CudaStream,
}

impl Capture<'_> {
    /// Ends the capture and returns the graph, which the caller destroys.
    fn end(self) -> Result<sys::CUgraph, CudaError> {
        let capture = ManuallyDrop::new(self);
        let (graph, result) = capture.stop();
        check("cuStreamEndCapture", result).map(|()| graph)
    }

    fn stop(&self) -> (sys::CUgraph, u32) {
        let mut graph = ptr::null_mut();
        // The body may have left another context current.
        let _ = self.stream.gpu().bind();
        // SAFETY: `graph` is valid memory for one handle; the capture was begun in this thread, and ends once.
        let result = unsafe { sys::cuStreamEndCapture(raw(self.stream.raw()), &mut graph) };
        (graph, result)
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        let (graph, _) = self.stop();
        if !graph.is_null() {
            // SAFETY: the incomplete graph is destroyed once.
            unsafe { sys::cuGraphDestroy(graph) };
        }
    }
}

/// A captured graph of work, which can be replayed.
#[derive(Debug)]
pub struct CudaGraph {
    gpu: Gpu,
    exec: u64,
}

impl CudaGraph {
    /// Submits the captured work again.
    ///
    /// # Errors
    /// The error of a call of the CUDA driver.
    ///
    /// # Safety
    /// A graph contains only the addresses of its memory. All memory of the captured calls (backends, rows, swap pages)
    /// exists until the work is done, and no other work accesses it meanwhile. In the stream's order, the last plan
    /// that the backend [staged](crate::backend::cuda::Cuda::stage) before this launch has the captured plan's
    /// [`GraphKey`](crate::backend::cuda::GraphKey).
    pub unsafe fn launch(&self, stream: &CudaStream) -> Result<(), CudaError> {
        self.gpu.bind()?;
        let exec = self.exec as usize as sys::CUgraphExec;
        // SAFETY: the instantiated graph and the stream live; the caller guarantees the memory that the work uses.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(exec, raw(stream.raw())) })
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: instantiated by this crate, destroyed once.
            unsafe { sys::cuGraphExecDestroy(self.exec as usize as sys::CUgraphExec) };
        }
    }
}

/// An event in a stream. The event is done when all earlier work of the stream is done.
#[derive(Debug)]
pub struct CudaEvent {
    gpu: Gpu,
    event: u64,
}

impl CudaEvent {
    /// Creates an event, which counts as done until it is recorded. Only `timed` events measure time.
    pub fn new(gpu: &Gpu, timed: bool) -> Result<Self, CudaError> {
        gpu.bind()?;
        let mut event = ptr::null_mut();
        let untimed = sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32;
        let flags = if timed { 0 } else { untimed };
        // SAFETY: `event` is valid memory for one handle; a context is bound.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut event, flags) })?;
        Ok(Self { gpu: gpu.clone(), event: event as usize as u64 })
    }

    /// Returns the raw `CUevent`, for a host's own waits.
    pub fn raw(&self) -> u64 {
        self.event
    }

    fn handle(&self) -> sys::CUevent {
        self.event as usize as sys::CUevent
    }

    /// Records the event at the end of the stream's submitted work.
    pub fn record(&mut self, stream: &CudaStream) -> Result<(), CudaError> {
        self.gpu.bind()?;
        // SAFETY: event and stream live.
        check("cuEventRecord", unsafe { sys::cuEventRecord(self.handle(), raw(stream.raw())) })
    }

    /// Makes the stream wait for the event, without blocking the caller.
    pub fn block(&self, stream: &CudaStream) -> Result<(), CudaError> {
        self.gpu.bind()?;
        // SAFETY: event and stream live.
        let result = unsafe { sys::cuStreamWaitEvent(raw(stream.raw()), self.handle(), 0) };
        check("cuStreamWaitEvent", result)
    }

    /// Returns whether the event is done; the host may then call `engine.complete(step)`.
    ///
    /// # Errors
    /// A failure of earlier work.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        self.gpu.bind()?;
        // SAFETY: the event lives.
        match check("cuEventQuery", unsafe { sys::cuEventQuery(self.handle()) }) {
            Ok(()) => Ok(true),
            Err(CudaError::Driver { code: 600, .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Waits until the event is done.
    ///
    /// # Errors
    /// A failure of earlier work.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.gpu.bind()?;
        // SAFETY: the event lives.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.handle()) })
    }

    /// Returns the milliseconds from an earlier event to this one; both are timed and done.
    pub fn elapsed_ms(&self, earlier: &Self) -> Result<f32, CudaError> {
        self.gpu.bind()?;
        let mut ms = 0.0;
        // SAFETY: `ms` is valid memory for one f32; both events live.
        let result = unsafe { sys::cuEventElapsedTime(&mut ms, earlier.handle(), self.handle()) };
        check("cuEventElapsedTime", result)?;
        Ok(ms)
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: made by cuEventCreate, destroyed once.
            unsafe { sys::cuEventDestroy_v2(self.handle()) };
        }
    }
}
