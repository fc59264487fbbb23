//! Bandwidth of memory and bus with plain kernels and copies.

use std::ffi::c_void;

use cust::sys;
use kvarena::backend::cuda::{CudaError, DeviceBuffer, Function, Gpu, Kernel, PinnedBuffer};
use kvarena::testkit::rng::Rng;

use crate::Outcome;
use crate::batch::{Noise, distinct};
use crate::kernels::{CEILING_COPY, CEILING_READ};
use crate::report::{Rate, Report};
use crate::timer::Timer;

fn launch(
    (kernel, function): (&Kernel, Function),
    blocks: u32,
    stream: u64,
    arguments: &[u64],
) -> Result<(), CudaError> {
    let mut pointers: Vec<_> = arguments.iter().map(|a| std::ptr::from_ref(a).cast_mut().cast::<c_void>()).collect();
    let stream = stream as usize as sys::CUstream;
    let (function, threads) = (function.raw() as usize as sys::CUfunction, kernel.threads());
    // SAFETY: the entries take these arguments, each at most 8 bytes; the addresses are live buffers.
    let result = unsafe {
        let (arguments, none) = (pointers.as_mut_ptr(), std::ptr::null_mut());
        sys::cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, none)
    };
    assert_eq!(result as u32, 0, "cuLaunchKernel");
    Ok(())
}

pub fn run(gpu: &Gpu, report: &mut Report) -> Outcome<()> {
    let mut timer = Timer::new(gpu)?;
    let noise = Noise::new(gpu)?;
    let stream = timer.stream.raw();
    let copy = (CEILING_COPY, gpu.compile(CEILING_COPY)?);
    let bytes = 2_u64 << 30;
    let (source, target) = (noise.buffer(gpu, bytes)?, DeviceBuffer::new(gpu, bytes)?);
    let units = bytes / 16;
    let mut best = f64::MAX;
    for per_sm in [8, 16, 32, 64, 0] {
        let blocks = match per_sm {
            0 => (units / 1024) as u32,
            n => n * gpu.multiprocessors(),
        };
        let arguments = [source.address(), target.address(), units];
        best = best.min(timer.graph(1, |_| launch(copy, blocks, stream, &arguments))?);
    }
    report.row("ceil", "copy 2 GiB", "16-byte kernel", best, Rate::Bytes(2.0 * bytes as f64), true);

    // Reads 262,144 of 1 Mi rows of 2 KiB, in K and in V: 1 GiB.
    let read = (CEILING_READ, gpu.compile(CEILING_READ)?);
    let (k, v) = (source, target);
    noise.fill(&v)?;
    let count = 1_u32 << 18;
    let mut rng = Rng::new(1);
    let sets = (0..2)
        .map(|_| Ok(DeviceBuffer::of(gpu, &distinct(&mut rng, count as usize, 1 << 20))?))
        .collect::<Outcome<Vec<_>>>()?;
    let sink = DeviceBuffer::new(gpu, 16)?;
    let mut best = f64::MAX;
    for per_sm in [4, 8, 16, 32] {
        let blocks = per_sm * gpu.multiprocessors();
        let us = timer.graph(2, |i| {
            let rows = sets[i].address();
            let arguments = [k.address(), v.address(), rows, u64::from(count), sink.address()];
            launch(read, blocks, stream, &arguments)
        })?;
        best = best.min(us);
    }
    let read = Rate::Bytes(f64::from(count) * 4096.0);
    report.row("ceil", "read random 2 KiB", "16-byte kernel", best, read, true);
    bus(gpu, &mut timer, &k, report)
}

/// Measures copies between the device and the host.
fn bus(gpu: &Gpu, timer: &mut Timer, device: &DeviceBuffer, report: &mut Report) -> Outcome<()> {
    let bytes = 512_usize << 20;
    let mut host = PinnedBuffer::new(gpu, bytes)?;
    let pinned = host.as_mut_slice().as_mut_ptr().cast::<c_void>();
    let stream = timer.stream.raw() as usize as sys::CUstream;
    let us = timer.median(|| {
        // SAFETY: both ranges are live and `bytes` long.
        let result = unsafe { sys::cuMemcpyDtoHAsync_v2(pinned, device.address(), bytes, stream) };
        assert_eq!(result as u32, 0, "cuMemcpyDtoHAsync");
        Ok(())
    })?;
    let rate = Rate::Bytes(bytes as f64);
    report.row("ceil", "device to pinned host 512 MiB", "copy engine", us, rate, true);
    let us = timer.median(|| {
        // SAFETY: both ranges are live and `bytes` long.
        let result = unsafe { sys::cuMemcpyHtoDAsync_v2(device.address(), pinned, bytes, stream) };
        assert_eq!(result as u32, 0, "cuMemcpyHtoDAsync");
        Ok(())
    })?;
    report.row("ceil", "pinned host to device 512 MiB", "copy engine", us, rate, true);
    Ok(())
}
