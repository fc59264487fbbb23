//! Drops while the device still uses the memory: memory is freed after the work, in any order of the drops.

use std::any::Any;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::yield_now;
use std::time::{Duration, Instant};

use cust::sys;
use kvarena::backend::OpenBackend;
use kvarena::backend::cuda::{CudaOptions, CudaStream, DeviceBuffer, Gpu, Prepare};
use kvarena::config::StepBounds;
use kvarena::id::{MoveId, SwapPageId};
use kvarena::layout::{Layout, PoolLayout};
use kvarena::plan::PageMove;
use kvarena::{Attend, Backend, Capacity, KvDtype, KvShape, LayerId, PageId, PoolConfig};

use crate::plans::{first_token, small_table};
use crate::{device, gpu};

fn pool(layers: u32, layout: Layout) -> PoolLayout {
    let config = PoolConfig {
        layers,
        shape: KvShape::heads(8, 128),
        dtype: KvDtype::Bf16,
        layout,
        capacity: Capacity::Pages(40),
        swap_pages: 40,
        ..PoolConfig::default()
    };
    config.layout().expect("a small pool")
}

/// Opens a backend with work in flight on all kinds of memory; returns it with the memory that the work uses.
fn at_work(gpu: &Gpu, layers: u32, layout: Layout) -> Vec<Box<dyn Any>> {
    let stream = CudaStream::new(gpu).expect("a stream");
    let options = CudaOptions { stream: Some(stream.clone()), ..CudaOptions::new(gpu) };
    let pool = pool(layers, layout);
    let table = small_table();
    let mut cuda = options.open(&pool, &table, StepBounds { steps: 2, tokens: 4 }).expect("a small pool");
    let rows = DeviceBuffer::of(gpu, &[0_u16; 8 * 128]).expect("memory");
    let mut out = DeviceBuffer::new(gpu, rows.bytes()).expect("memory");
    let attend = Attend::new(8, 128);
    cuda.prepare(&Prepare::new(&[attend])).expect("a served shape");
    cuda.synchronize().expect("nothing failed");

    while cuda.swap_pages() < 40 {
        yield_now();
    }
    let moves = |first| -> Vec<_> {
        let pair = |i| PageMove { device: PageId::new(first + i), swap: SwapPageId::new(i) };
        (0..20).map(pair).collect()
    };
    cuda.save_pages(MoveId::new(1), &moves(0)).expect("pages of the pool");
    cuda.load_pages(MoveId::new(2), &moves(20)).expect("pages of the pool");
    let plan = first_token(1);
    cuda.begin(&plan).expect("a valid plan");
    let layer = LayerId::new(0);
    cuda.store_cache(&plan, layer, rows.rows(0, None), rows.rows(0, None)).expect("a store");
    cuda.attend(&plan, layer, &attend, rows.rows(0, None), out.rows_mut(0, None), None).expect("attention");
    vec![Box::new(cuda), Box::new(rows), Box::new(out), Box::new(stream)]
}

#[test]
fn memory_is_freed_after_the_work_that_uses_it() {
    let Some(gpu) = gpu() else { return };
    // Kernels move the pages, or copy engines do, or both do with device memory in between.
    for (layers, layout) in [(1, Layout::PageFirst), (8, Layout::PageFirst), (8, Layout::LayerFirst)] {
        for first in 0..4 {
            let mut parts = at_work(&gpu, layers, layout);
            let other = CudaStream::new(&gpu).expect("a stream");
            drop(parts.remove(first));
            other.synchronize().expect("nothing failed");
            drop(at_work(&gpu, layers, layout));
            other.synchronize().expect("nothing failed");
        }
    }
}

/// Work of another library. It ends on request, or after five seconds, so that a failing test ends.
#[derive(Default)]
struct Others {
    may: AtomicBool,
    done: AtomicBool,
}

unsafe extern "C" fn work(others: *mut c_void) {
    // SAFETY: the test waits for the stream before it drops `others`.
    let others = unsafe { &*others.cast::<Others>() };
    let start = Instant::now();
    while !others.may.load(Ordering::Acquire) && start.elapsed() < Duration::from_secs(5) {
        yield_now();
    }
    others.done.store(true, Ordering::Release);
}

#[test]
fn dropping_a_buffer_waits_for_no_other_stream() {
    let Some(gpu) = gpu() else { return };
    let mut parts = at_work(&gpu, 1, Layout::PageFirst);
    let (mut stream, others) = (null_mut(), Others::default());
    let data = (&raw const others).cast_mut().cast();
    // SAFETY: a context is current; the stream, the function and its data live until the test waits for the stream.
    unsafe {
        assert_eq!(sys::cuStreamCreate(&mut stream, 1), sys::CUresult::CUDA_SUCCESS);
        assert_eq!(sys::cuLaunchHostFunc(stream, Some(work), data), sys::CUresult::CUDA_SUCCESS);
    }
    // Drops the rows and the output of attention, which submitted work uses.
    drop(parts.drain(1..3));
    assert!(!others.done.load(Ordering::Acquire), "the drop waited for another library");
    others.may.store(true, Ordering::Release);
    // SAFETY: the stream lives until it is destroyed.
    unsafe {
        assert_eq!(sys::cuStreamSynchronize(stream), sys::CUresult::CUDA_SUCCESS);
        assert_eq!(sys::cuStreamDestroy_v2(stream), sys::CUresult::CUDA_SUCCESS);
    }
    assert!(others.done.load(Ordering::Acquire));
}

/// The stream of another rank may be in a kernel that waits for a kernel that this thread launches after the drop.
#[test]
fn a_buffer_is_filled_and_dropped_while_other_streams_work() {
    let Some(gpu) = gpu() else { return };
    let peers = [Some((*gpu).clone()), device(1)];
    for peer in peers.into_iter().flatten() {
        let (stream, others) = (CudaStream::new(&peer).expect("a stream"), Others::default());
        let data = (&raw const others).cast_mut().cast();
        peer.bind().expect("a device");
        // SAFETY: the device's context is current; the stream, the function and its data live until the wait.
        let launched = unsafe { sys::cuLaunchHostFunc(stream.raw() as _, Some(work), data) };
        assert_eq!(launched, sys::CUresult::CUDA_SUCCESS);
        let buffer = DeviceBuffer::of(&gpu, &[1_u8; 4096]).expect("memory");
        let copy_waited = others.done.load(Ordering::Acquire);
        drop(buffer);
        let drop_waited = others.done.load(Ordering::Acquire);
        others.may.store(true, Ordering::Release);
        stream.synchronize().expect("nothing failed");
        let ordinal = peer.ordinal();
        assert!(!copy_waited, "the copy waited for a stream of device {ordinal}");
        assert!(!drop_waited, "the drop waited for a stream of device {ordinal}");
    }
}

/// The device has memory for one large buffer at a time. Each is dropped while work is in flight.
#[test]
fn dropped_memory_is_free_at_the_next_allocation() {
    let Some(gpu) = gpu() else { return };
    let bytes = gpu.free_memory().expect("a driver") / 5 * 3;
    let mut working = Vec::new();
    for round in 0..3 {
        let large = DeviceBuffer::new(&gpu, bytes);
        let large = large.unwrap_or_else(|error| panic!("round {round}: {error}"));
        working.push(at_work(&gpu, 1, Layout::PageFirst));
        drop(large);
    }
    drop(DeviceBuffer::new(&gpu, bytes).expect("memory"));
    assert!(gpu.free_memory().expect("a driver") > bytes);
}

#[test]
fn memory_dropped_in_a_capture_is_freed_later() {
    let Some(gpu) = gpu() else { return };
    let mut parts = at_work(&gpu, 1, Layout::PageFirst);
    let stream = CudaStream::new(&gpu).expect("a stream");
    let captured = stream.capture(|| {
        drop(parts.drain(1..3));
        Ok::<_, kvarena::backend::cuda::CudaError>(())
    });
    drop(captured);
    stream.synchronize().expect("nothing failed");
    drop(parts);
    drop(DeviceBuffer::new(&gpu, 1).expect("memory"));
    stream.synchronize().expect("nothing failed");
}
