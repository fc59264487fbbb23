//! Frees dropped memory after the work that may still use it: all work that was submitted to this crate's streams of
//! the same context before the drop.
//!
//! The process has one list, because two handles of a device share its context. The list contains the streams of all
//! [`CudaStream`](crate::backend::cuda::CudaStream)s. When the last handle of a stream is dropped, the list instead
//! contains an event at the stream's end, until the event is done. No thread waits while it holds the lock, because the
//! work may depend on a kernel that another thread launches next.

use std::any::Any;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::raw::{RawContext, RawStream, is_capturing, raw};
use super::sys;
use crate::backend::cuda::error::{CudaError, check};

/// Memory that its owner has dropped.
pub(super) enum Dropped {
    /// Memory of the device's memory pool. The driver frees it without a wait.
    Pool(u64),
    /// Device memory outside a pool. The driver waits for all work of the context before it frees this memory.
    Device(u64),
    /// Pinned memory, for which the driver also waits.
    Host(u64),
    /// Memory of the host. Its owner may free it in any way, so the owner is dropped after a wait.
    Given(Arc<dyn Any + Send + Sync>),
}

impl Dropped {
    fn is_pooled(&self) -> bool {
        matches!(self, Self::Pool(_))
    }

    /// Frees the memory. Its context is bound.
    fn free(self) {
        // SAFETY: the memory was allocated in the bound context. It left the list, so it is freed once, and after the
        // work that may use it.
        unsafe {
            match self {
                Self::Pool(address) | Self::Device(address) => sys::cuMemFree_v2(address),
                Self::Host(address) => sys::cuMemFreeHost(address as usize as *mut _),
                Self::Given(owner) => {
                    drop(owner);
                    0
                }
            }
        };
    }
}

/// The end of the work submitted to a stream so far.
#[derive(Debug)]
struct Mark {
    /// An event at this end. `None` if the stream was being captured or the driver failed; then only a wait for the
    /// whole context suffices.
    event: Option<u64>,
    /// Whether the whole context has been waited for.
    passed: AtomicBool,
}

/// Memory that is freed when its marks are done.
struct Waiting {
    context: RawContext,
    memory: Dropped,
    marks: Vec<Arc<Mark>>,
}

struct Work {
    /// The stream of every live `CudaStream`, once for each handle.
    streams: Vec<(RawContext, RawStream)>,
    /// The ends of streams whose last handle was dropped.
    ends: Vec<(RawContext, Arc<Mark>)>,
    /// Dropped memory in the order of the drops.
    waiting: Vec<Waiting>,
}

static WORK: Mutex<Work> = Mutex::new(Work { streams: Vec::new(), ends: Vec::new(), waiting: Vec::new() });

fn work() -> MutexGuard<'static, Work> {
    // A panic leaves no partial change of the lists.
    WORK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Registers a stream to which work may be submitted.
pub fn add_stream(context: RawContext, stream: RawStream) {
    work().streams.push((context, stream));
}

/// Removes one handle of a stream that still exists. The context is bound.
pub fn remove_stream(context: RawContext, stream: RawStream) {
    let (mut work, entry) = (work(), (context, stream));
    let at = work.streams.iter().position(|known| *known == entry).expect("a known stream");
    work.streams.swap_remove(at);
    if work.streams.contains(&entry) {
        return;
    }
    work.ends.push((context, Arc::new(Mark::new(stream))));
    work.forget(context);
}

/// Frees memory of the bound context after the work that may use it. Waits for that work only if the memory belongs to
/// no pool.
pub(super) fn free(context: RawContext, memory: Dropped) {
    let mut work = work();
    let (marks, is_pooled) = (work.marks(context), memory.is_pooled());
    work.waiting.push(Waiting { context, memory, marks });
    drop(work);
    if is_pooled {
        sweep(context, Dropped::is_pooled);
    } else {
        // The wait fails if the context is broken or a stream is captured; a later call then frees the memory.
        let _ = reclaim(context);
    }
}

/// Waits for the work that may use dropped memory of the bound context, and frees that memory. Returns whether the
/// context had dropped memory.
pub(super) fn reclaim(context: RawContext) -> Result<bool, CudaError> {
    let mut work = work();
    work.renew(context);
    let marks: Vec<_> = work.waiting_of(context).map(|memory| memory.marks.clone()).collect();
    let captured = work.is_captured(context);
    drop(work);
    // A wait for the context would invalidate the capture.
    if captured {
        return Err(CudaError::NotPrepared);
    }
    marks.iter().flatten().try_for_each(|mark| mark.wait())?;
    sweep(context, |_| true);
    Ok(!marks.is_empty())
}

/// Binds a context that may be released next, and waits for all its work, including that of other users.
pub(super) fn end(context: RawContext) {
    let marks = {
        let work = work();
        let ends = work.ends.iter().filter(|(known, _)| *known == context).map(|(_, mark)| mark);
        let waiting = work.waiting_of(context).flat_map(|memory| &memory.marks);
        ends.chain(waiting).cloned().collect::<Vec<_>>()
    };
    // The wait fails only if the context is broken.
    let _ = bind(context).and_then(|()| synchronize());
    marks.iter().for_each(|mark| mark.passed.store(true, Ordering::Release));
    sweep(context, |_| true);
}

/// Frees the bound context's dropped memory whose work is done.
fn sweep(context: RawContext, is_wanted: impl Fn(&Dropped) -> bool) {
    let mut work = work();
    work.renew(context);
    if !work.forget(context) {
        return;
    }
    // Memory that was dropped later has later marks in the same streams. The search therefore ends at the first memory
    // whose work is not done.
    let mut waits = false;
    let free = work.waiting.extract_if(.., |waiting| {
        let due = waiting.context == context && is_wanted(&waiting.memory) && !waits;
        let done = due && waiting.marks.iter().all(|mark| mark.is_done());
        waits |= due && !done;
        done
    });
    let free: Vec<_> = free.map(|waiting| waiting.memory).collect();
    drop(work);
    free.into_iter().for_each(Dropped::free);
}

impl Work {
    fn waiting_of(&self, context: RawContext) -> impl Iterator<Item = &Waiting> {
        self.waiting.iter().filter(move |waiting| waiting.context == context)
    }

    /// Returns the live streams of a context, with repetitions.
    fn streams_of(&self, context: RawContext) -> impl Iterator<Item = RawStream> {
        let entries = self.streams.iter().filter(move |entry| entry.0 == context);
        entries.map(|&(_, stream)| stream)
    }

    fn is_captured(&self, context: RawContext) -> bool {
        self.streams_of(context).any(|stream| is_capturing(stream).unwrap_or(true))
    }

    /// Marks the ends of all work submitted to a context's streams. The context is bound.
    fn marks(&self, context: RawContext) -> Vec<Arc<Mark>> {
        let mut streams: Vec<_> = self.streams_of(context).collect();
        streams.sort_unstable();
        streams.dedup();
        let ends = self.ends.iter().filter(|end| end.0 == context).map(|end| end.1.clone());
        ends.chain(streams.into_iter().map(|stream| Arc::new(Mark::new(stream)))).collect()
    }

    /// Replaces the marks of memory that was dropped while a stream was captured. The context is bound.
    fn renew(&mut self, context: RawContext) {
        for i in 0..self.waiting.len() {
            let waiting = &self.waiting[i];
            if waiting.context == context && waiting.marks.iter().any(|mark| mark.is_lost()) {
                self.waiting[i].marks = self.marks(context);
            }
        }
    }

    /// Removes the finished ends of a context's streams. During a capture it does nothing and returns false, because
    /// the driver then forbids event queries.
    fn forget(&mut self, context: RawContext) -> bool {
        let may = !self.is_captured(context);
        self.ends.retain(|(known, mark)| !may || *known != context || !mark.is_done());
        may
    }
}

impl Mark {
    fn new(stream: RawStream) -> Self {
        Self { event: mark(stream).ok(), passed: AtomicBool::new(false) }
    }

    /// Returns whether only a wait for the whole context covers the mark.
    fn is_lost(&self) -> bool {
        self.event.is_none() && !self.passed.load(Ordering::Acquire)
    }

    fn is_done(&self) -> bool {
        // SAFETY: the event lives as long as the mark.
        let query = |event| unsafe { sys::cuEventQuery(handle(event)) } == 0;
        self.passed.load(Ordering::Acquire) || self.event.is_some_and(query)
    }

    /// Waits for the marked work. The context is bound.
    fn wait(&self) -> Result<(), CudaError> {
        match self.event {
            _ if self.passed.load(Ordering::Acquire) => Ok(()),
            Some(event) => {
                // SAFETY: the event lives as long as the mark.
                check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(handle(event)) })
            }
            None => synchronize().map(|()| self.passed.store(true, Ordering::Release)),
        }
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        if let Some(event) = self.event {
            // SAFETY: created by `mark`, destroyed once.
            unsafe { sys::cuEventDestroy_v2(handle(event)) };
        }
    }
}

fn handle(event: u64) -> sys::CUevent {
    event as usize as sys::CUevent
}

fn synchronize() -> Result<(), CudaError> {
    // SAFETY: takes no pointers; a context is bound.
    check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
}

fn bind(context: RawContext) -> Result<(), CudaError> {
    // SAFETY: the caller's handle of the device retains its context.
    check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(context as usize as sys::CUcontext) })
}

/// Records an event at the stream's end, and returns it.
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
