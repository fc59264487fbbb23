//! Memory of the process that is reserved at once and pinned in pieces, so that a host need not wait for all of it.
//!
//! Pinning 64 GiB in one thread takes most of a minute, mainly to touch the memory. Several threads therefore touch
//! each piece first.

use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{fs, thread};

use super::gpu::Gpu;
use super::sys;
use crate::backend::cuda::error::{CudaError, check};
use crate::memory::advise_huge_pages;

const SYSTEM_PAGE: usize = 4096;
/// Number of threads that touch a piece.
const TOUCHERS: usize = 4;

/// Reserved swap memory, pinned piece by piece from the first byte on. One thread pins; others may use pinned pieces.
#[derive(Debug)]
pub struct Mapping {
    gpu: Gpu,
    start: *mut u8,
    bytes: usize,
    /// Bytes of a piece: a multiple of the system's pages.
    piece: usize,
    pinned: AtomicUsize,
}

// SAFETY: this value alone owns the memory, which belongs to no thread. Users of its bytes order their accesses.
unsafe impl Send for Mapping {}
// SAFETY: the same; the count is atomic.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Reserves `bytes` bytes, to be pinned in pieces of `piece` bytes. The system backs each page when it is first
    /// touched.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`] if the address space lacks a range of this size.
    pub fn reserve(gpu: &Gpu, bytes: u64, piece: u64) -> Result<Self, CudaError> {
        let out = CudaError::OutOfMemory { bytes };
        let len = usize::try_from(bytes).map_err(|_| out.clone())?.next_multiple_of(SYSTEM_PAGE);
        let (access, kind) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
        // SAFETY: a new private mapping, at an address that the system chooses.
        let start = unsafe { libc::mmap(ptr::null_mut(), len, access, kind, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(out);
        }
        advise_huge_pages(start.addr(), len);
        let piece = (piece as usize).next_multiple_of(SYSTEM_PAGE);
        let pinned = AtomicUsize::new(0);
        Ok(Self { gpu: gpu.clone(), start: start.cast(), bytes: len, piece, pinned })
    }

    /// Touches and pins the next piece, and returns the number of pinned bytes. Only one thread calls it.
    ///
    /// # Errors
    /// [`CudaError::Pinning`], or another error of the driver.
    pub fn pin_next(&self) -> Result<u64, CudaError> {
        let pinned = self.pinned.load(Ordering::Relaxed);
        let bytes = self.piece.min(self.bytes - pinned);
        let failed = |code| CudaError::Pinning {
            code,
            bytes: self.bytes as u64,
            pinned: pinned as u64,
            limit: locked_memory_limit().filter(|&limit| limit < self.bytes as u64),
        };
        self.touch(pinned, bytes);
        self.gpu.bind()?;
        let start = self.start.wrapping_add(pinned).cast();
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the piece is mapped, consists of whole system pages, and is registered once.
        let code = unsafe { sys::cuMemHostRegister_v2(start, bytes, flags) };
        if code != 0 {
            return Err(failed(code));
        }
        let mut address = 0;
        // SAFETY: the piece was registered above; `address` is valid memory for one address.
        let result = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut address, start, 0) };
        let found = check("cuMemHostGetDevicePointer", result);
        if found.is_err() || address != start.addr() as u64 {
            // SAFETY: registered above, unregistered once.
            unsafe { sys::cuMemHostUnregister(start) };
            // CUDA_ERROR_NOT_SUPPORTED: kernels and host use different addresses.
            return Err(found.err().unwrap_or_else(|| failed(801)));
        }
        self.pinned.store(pinned + bytes, Ordering::Release);
        Ok((pinned + bytes) as u64)
    }

    /// Writes to each system page of an unused piece.
    fn touch(&self, start: usize, bytes: usize) {
        let part = bytes.div_ceil(TOUCHERS).next_multiple_of(SYSTEM_PAGE);
        let touch = |part: usize, end: usize| {
            for at in (part..end).step_by(SYSTEM_PAGE) {
                // SAFETY: the address is inside the mapping, and the piece is unused.
                unsafe { self.start.wrapping_add(start + at).write_volatile(0) };
            }
        };
        thread::scope(|scope| {
            for first in (0..bytes).step_by(part).skip(1) {
                scope.spawn(move || touch(first, bytes.min(first + part)));
            }
            touch(0, part.min(bytes));
        });
    }

    /// Returns the address of the first byte, which is the same on the host and, once pinned, on the device.
    pub fn address(&self) -> u64 {
        self.start.addr() as u64
    }

    pub fn at(&self, byte: u64) -> *mut u8 {
        self.start.wrapping_add(byte as usize)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let bound = self.gpu.bind().is_ok();
        for piece in (0..*self.pinned.get_mut()).step_by(self.piece).filter(|_| bound) {
            // SAFETY: registered once by `pin_next`, unregistered once. The owner has waited for the work on the
            // memory.
            unsafe { sys::cuMemHostUnregister(self.start.wrapping_add(piece).cast()) };
        }
        // SAFETY: mapped by `reserve`, unmapped once, and unused.
        unsafe { libc::munmap(self.start.cast(), self.bytes) };
    }
}

/// Returns the limit of bytes that a process may lock, if there is one.
fn locked_memory_limit() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is valid memory for one limit.
    let result = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) };
    (result == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// Returns the bytes of memory that the system and the process's container can still provide; `None` if unknown. Reads
/// the control group at the root of `/sys/fs/cgroup`; in a container this is the container's.
pub fn available_memory() -> Option<u64> {
    let number = |path: &str| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let info = fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    let group = "/sys/fs/cgroup/memory";
    // Tries version 2 of control groups, then version 1.
    let limit = number(&format!("{group}.max")).or_else(|| number(&format!("{group}/memory.limit_in_bytes")));
    let used = number(&format!("{group}.current")).or_else(|| number(&format!("{group}/memory.usage_in_bytes")));
    let left = limit.zip(used).map_or(u64::MAX, |(limit, used)| limit.saturating_sub(used));
    Some(left.min(kib * 1024))
}
