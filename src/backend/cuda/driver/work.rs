//! Which work may still use memory: all that was asked of this crate's streams, and no one else's.
//!
//! One list for the process: two handles of a device share its context, and pinned memory is any device's. A stream is
//! in it as long as a [`CudaStream`](crate::backend::cuda::CudaStream) of it lives; then an event at its end is, until
//! that is done.
//!
//! Not here: memory (`memory.rs`), streams (`stream.rs`).

use std::ptr::null_mut;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::raw::{RawContext, RawStream, is_capturing, raw};
use super::sys;
use crate::backend::cuda::error::{CudaError, check};

#[derive(Debug)]
struct Work {
    /// Of every `CudaStream` that lives, its stream; the same stream as often as there are handles of it.
    streams: Vec<(RawContext, RawStream)>,
    /// Ends of streams without a handle.
    ends: Vec<(RawContext, u64)>,
    /// Contexts with a stream whose end could not be marked: only the whole context can be waited for.
    lost: Vec<RawContext>,
    /// Memory to be freed when a wait succeeds.
    late: Vec<(RawContext, u64)>,
}

static WORK: Mutex<Work> =
    Mutex::new(Work { streams: Vec::new(), ends: Vec::new(), lost: Vec::new(), late: Vec::new() });

fn work() -> MutexGuard<'static, Work> {
    // A panic cannot leave the lists half changed.
    WORK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Work may be asked of the stream from now on.
pub(in crate::backend::cuda) fn enter(context: RawContext, stream: RawStream) {
    work().streams.push((context, stream));
}

/// A handle of the stream goes. The stream still lives, and the context is bound.
pub(in crate::backend::cuda) fn leave(context: RawContext, stream: RawStream) {
    let (mut work, entry) = (work(), (context, stream));
    let at = work.streams.iter().position(|known| *known == entry).expect("it has entered");
    work.streams.swap_remove(at);
    if work.streams.contains(&entry) {
        return;
    }
    // SAFETY: the events live until they leave the list.
    work.forget(|_, event| unsafe { sys::cuEventQuery(handle(event)) } == 0);
    match mark(stream) {
        Ok(event) => work.ends.push((context, event)),
        Err(_) => work.lost.push(context),
    }
}

/// Waits for all that was asked of this crate's streams, on every device, and binds the context. Nobody makes or gives
/// up a stream meanwhile.
pub(in crate::backend::cuda) fn wait(context: RawContext) -> Result<(), CudaError> {
    let waited = work().wait();
    bind(context)?;
    waited
}

/// Frees memory of the bound context after the work that may use it.
pub(in crate::backend::cuda) fn free(context: RawContext, address: u64) {
    work().late.push((context, address));
    // Where waiting fails, the context is broken or a stream is captured in this thread: the next wait frees it.
    let _ = wait(context);
}

/// Binds a context that may be released next, and waits for all of its work, others' too.
pub(in crate::backend::cuda) fn end(context: RawContext) {
    let mut work = work();
    // Where waiting fails, the context is broken.
    let _ = bind(context).and_then(|()| synchronize());
    work.forget(|of, _| of == context);
    work.lost.retain(|of| *of != context);
    work.free(|of| of == context);
}

impl Work {
    fn wait(&mut self) -> Result<(), CudaError> {
        self.streams.sort_unstable();
        let mut last = None;
        for &(context, stream) in &self.streams {
            if last.replace((context, stream)) == Some((context, stream)) {
                continue;
            }
            bind(context)?;
            // Waiting would end the capture with an error. What came before it, only the context can be asked for.
            if is_capturing(stream).unwrap_or(true) {
                synchronize()?;
            } else {
                // SAFETY: the stream lives: a handle of it does.
                check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(raw(stream)) })?;
            }
        }
        while let Some(&context) = self.lost.last() {
            bind(context)?;
            synchronize()?;
            self.lost.pop();
        }
        for &(_, event) in &self.ends {
            // SAFETY: the event lives until it leaves the list.
            check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(handle(event)) })?;
        }
        self.forget(|_, _| true);
        self.free(|_| true);
        Ok(())
    }

    /// Gives up marks that are done.
    fn forget(&mut self, done: impl Fn(RawContext, u64) -> bool) {
        self.ends.retain(|&(context, event)| {
            let forget = done(context, event);
            if forget {
                // SAFETY: made by `mark`, destroyed once, since it leaves the list.
                unsafe { sys::cuEventDestroy_v2(handle(event)) };
            }
            !forget
        });
    }

    /// Frees memory that no work uses any more.
    fn free(&mut self, of: impl Fn(RawContext) -> bool) {
        self.late.retain(|&(context, address)| {
            if of(context) && bind(context).is_ok() {
                // SAFETY: the address was allocated in this context and is freed once, since it leaves the list.
                unsafe { sys::cuMemFree_v2(address) };
            }
            !of(context)
        });
    }
}

fn handle(event: u64) -> sys::CUevent {
    event as usize as sys::CUevent
}

/// Waits for the whole context, which is bound.
fn synchronize() -> Result<(), CudaError> {
    // SAFETY: takes no pointers; a context is bound.
    check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
}

fn bind(context: RawContext) -> Result<(), CudaError> {
    // SAFETY: a stream's handle keeps its context, and what else is listed of a context is gone before it is (`end`).
    check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(context as usize as sys::CUcontext) })
}

/// An event at the stream's end.
fn mark(stream: RawStream) -> Result<u64, CudaError> {
    if is_capturing(stream)? {
        return Err(CudaError::NotPrepared);
    }
    let mut event = null_mut();
    let untimed = sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32;
    // SAFETY: `event` is valid memory for one handle; a context is bound.
    check("cuEventCreate", unsafe { sys::cuEventCreate(&mut event, untimed) })?;
    // SAFETY: event and stream live.
    let recorded = check("cuEventRecord", unsafe { sys::cuEventRecord(event, raw(stream)) });
    if recorded.is_err() {
        // SAFETY: made above, destroyed once.
        unsafe { sys::cuEventDestroy_v2(event) };
    }
    recorded.map(|()| event as usize as u64)
}
