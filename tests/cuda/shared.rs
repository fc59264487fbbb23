//! A process with another CUDA user, such as torch or cudarc: both use one primary context, with any context current in
//! any thread.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;
use std::thread;

use cust::sys;
use kvarena::backend::cuda::{Cuda, CudaError, CudaOptions, CudaStream, DeviceBuffer, Gpu};
use kvarena::config::StepBounds;
use kvarena::plan::StepEnd;
use kvarena::{Backend, Capacity, KvDtype, KvShape, LayerId, PoolConfig};

use crate::gpu;
use crate::plans::{self, first_token, small_table};

fn ok(result: sys::CUresult) {
    assert_eq!(result, sys::CUresult::CUDA_SUCCESS);
}

/// The other user: the primary context, memory in it, and a stream.
struct Other {
    context: sys::CUcontext,
    address: u64,
    stream: sys::CUstream,
}

impl Other {
    fn new() -> Self {
        let (mut context, mut address, mut stream) = (null_mut(), 0, null_mut());
        // SAFETY: all are valid memory for their values; there is a device 0, and its context is current.
        unsafe {
            ok(sys::cuDevicePrimaryCtxRetain(&mut context, 0));
            ok(sys::cuCtxSetCurrent(context));
            ok(sys::cuMemAlloc_v2(&mut address, 256));
            ok(sys::cuStreamCreate(&mut stream, 1));
        }
        Self { context, address, stream }
    }

    /// Writes and reads the user's memory; the user makes its context current.
    fn work(&self, byte: u8) {
        let (source, mut target) = ([byte; 256], [0_u8; 256]);
        // SAFETY: all three ranges are 256 bytes and live.
        unsafe {
            ok(sys::cuCtxSetCurrent(self.context));
            ok(sys::cuMemcpyHtoD_v2(self.address, source.as_ptr().cast::<c_void>(), 256));
            ok(sys::cuMemcpyDtoH_v2(target.as_mut_ptr().cast::<c_void>(), self.address, 256));
        }
        assert_eq!(source, target);
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // SAFETY: all of it belongs to the user and is freed once.
        unsafe {
            ok(sys::cuCtxSetCurrent(self.context));
            ok(sys::cuStreamDestroy_v2(self.stream));
            ok(sys::cuMemFree_v2(self.address));
            ok(sys::cuCtxSetCurrent(null_mut()));
            ok(sys::cuDevicePrimaryCtxRelease_v2(0));
        }
    }
}

/// Opens a backend on the other user's stream.
fn open(gpu: &Gpu, other: &Other) -> Cuda {
    // SAFETY: the stream is of the primary context and outlives the backend.
    let stream = unsafe { CudaStream::from_raw(gpu, other.stream as usize as u64, Arc::new(())) };
    let stream = stream.expect("not the per-thread stream");
    let options = CudaOptions { stream: Some(stream), ..CudaOptions::new(gpu) };
    let (capacity, dtype) = (Capacity::Pages(8), KvDtype::Bf16);
    let config = PoolConfig { capacity, dtype, shape: KvShape::heads(1, 64), ..PoolConfig::default() };
    let table = small_table();
    plans::open(options, config, &table, StepBounds { steps: 2, tokens: 4 })
}

/// Runs a step of one token into the first slot, and checks it.
fn step(cuda: &mut Cuda, step: u64) -> Result<(), CudaError> {
    let plan = first_token(step);
    cuda.begin(&plan)?;
    let row = DeviceBuffer::of(cuda.gpu(), &[step as u16; 64])?;
    cuda.store_cache(&plan, LayerId::new(0), row.rows(0, None), row.rows(0, None))?;
    cuda.end(StepEnd::Complete(plan.step));
    cuda.synchronize()?;
    assert_eq!(cuda.pool().read::<u16>(0, 64)?, [step as u16; 64]);
    Ok(())
}

#[test]
fn the_primary_context_is_shared() {
    let Some(gpu) = gpu() else { return };
    let other = Other::new();
    let mut cuda = open(&gpu, &other);
    for turn in 1..=3 {
        step(&mut cuda, turn).expect("a step after the other user");
        other.work(turn as u8);
    }
    let mut current = null_mut();
    cuda.synchronize().expect("nothing failed");
    // SAFETY: `current` is valid memory for one handle.
    ok(unsafe { sys::cuCtxGetCurrent(&mut current) });
    assert_eq!(current, other.context, "one context for both");

    // A thread without a current context.
    thread::scope(|scope| {
        let there = scope.spawn(|| step(&mut cuda, 4));
        there.join().expect("no panic").expect("a step in another thread");
    });

    // Another context is current, as in a library with its own context.
    let mut foreign = null_mut();
    // SAFETY: `foreign` is valid memory for one handle; there is a device 0.
    ok(unsafe { sys::cuCtxCreate_v2(&mut foreign, 0, 0) });
    step(&mut cuda, 5).expect("a step over another context");
    other.work(5);
    // SAFETY: our context, destroyed once; it contains nothing, and it is not current here.
    ok(unsafe { sys::cuCtxDestroy_v2(foreign) });

    // The backend is dropped while no context is current, and frees nothing of the other user.
    // SAFETY: no context is a valid context to make current.
    ok(unsafe { sys::cuCtxSetCurrent(null_mut()) });
    drop(cuda);
    drop(gpu);
    other.work(6);
}

#[test]
fn a_stream_keeps_its_owner_until_the_backend_drops_it() {
    let Some(gpu) = gpu() else { return };
    let other = Other::new();
    let (handle, owner) = (other.stream as usize as u64, Arc::new(()));
    // SAFETY: the stream is of the primary context, and is destroyed at the end of the test.
    let of = |handle| unsafe { CudaStream::from_raw(&gpu, handle, owner.clone()) };
    let stream = of(handle).expect("a stream");
    let clone = stream.clone();
    assert_eq!(Arc::strong_count(&owner), 2);
    drop(stream);
    assert_eq!(Arc::strong_count(&owner), 2, "a clone is left");
    drop(clone);
    assert_eq!(Arc::strong_count(&owner), 1);
    // The default stream has two handles. The per-thread stream is not one stream, so no work can be ordered on it.
    for handle in [0, 1] {
        let stream = of(handle).expect("the default stream");
        assert_eq!((stream.raw(), stream.synchronize()), (0, Ok(())));
    }
    assert_eq!(of(2).map(|_| ()), Err(CudaError::PerThreadStream));
}
