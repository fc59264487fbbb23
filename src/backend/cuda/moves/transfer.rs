//! Copies pages between a pool and pinned host memory, in the order of one stream.
//!
//! * The copy engines move pages of one piece. The driver takes all of them in one call (CUDA 12.8 and newer), so no
//!   time is lost between them.
//! * The kernel gathers (scatters) pages of many pieces in a chunk of device memory, which the copy engines move.
//! * The kernel itself moves small pages; it can access pinned memory.
//!
//! Not here: the order of streams (`host_moves.rs`).

use super::copy::copy_on_device;
use crate::backend::cuda::driver::gpu::Gpu;
use crate::backend::cuda::driver::memory::DeviceBuffer;
use crate::backend::cuda::driver::raw::{RawStream, raw};
use crate::backend::cuda::driver::sys;
use crate::backend::cuda::error::{CudaError, check};
use crate::backend::cuda::store::pool::Pages;
use crate::id::PageId;
use crate::plan::{PageCopy, PageMove};

/// The kernel moves pages of fewer bytes. On an H100 it saves and loads pages of 16 KiB at 47 GB/s; the copy engines
/// move pages of 32, 64, 128 and 256 KiB at 23, 33, 41 and 47 GB/s, and leave the multiprocessors to other work.
const BATCHED_BYTES: u64 = 128 << 10;
/// The same where each page is a call of its own, which costs some microseconds.
const SINGLE_BYTES: u64 = 256 << 10;
/// Device memory for the chunk between many pieces and one.
const CHUNK_BYTES: u64 = 32 << 20;

/// The direction of a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Way {
    Save,
    Load,
}

/// Copies of one direction.
#[derive(Debug)]
pub(super) struct Transfer {
    way: Way,
    batch: Option<BatchCopy>,
    /// Between pieces and whole pages, if the pool has pieces that the engines take.
    chunk: Option<DeviceBuffer>,
    copies: Vec<PageCopy>,
}

impl Transfer {
    pub fn new(gpu: &Gpu, way: Way, pool: &Pages) -> Result<Self, CudaError> {
        let batch = BatchCopy::find();
        let mut transfer = Self { way, batch, chunk: None, copies: Vec::new() };
        if transfer.by_engine(pool) && !pool.is_packed() {
            let pages = (CHUNK_BYTES / pool.page_bytes()).clamp(1, pool.count.into());
            transfer.chunk = Some(DeviceBuffer::lasting(gpu, pages * pool.page_bytes())?);
        }
        Ok(transfer)
    }

    fn by_engine(&self, pool: &Pages) -> bool {
        let least = if self.batch.is_some() { BATCHED_BYTES } else { SINGLE_BYTES };
        pool.page_bytes() >= least
    }

    /// Submits moves, which were checked, between a pool and host pages.
    pub fn submit(
        &mut self,
        gpu: &Gpu,
        pool: &Pages,
        host: &Pages,
        moves: &[PageMove],
        stream: RawStream,
    ) -> Result<(), CudaError> {
        if !self.by_engine(pool) {
            let ends = moves.iter().map(|of| (of.device, PageId::new(of.host.raw())));
            return self.on_device(gpu, (pool, host), ends, stream);
        }
        let Some(chunk) = &self.chunk else {
            let pairs = moves.iter().map(|of| (pool.packed_at(of.device.raw()), of));
            return self.by_engines(host, pairs, stream);
        };
        let most = chunk.bytes() / pool.page_bytes();
        let chunk = Pages::packed(chunk.address(), pool, most as u32);
        for moves in moves.chunks(most as usize) {
            let ends = || moves.iter().zip(0..).map(|(of, at)| (of.device, PageId::new(at)));
            let pairs = moves.iter().zip(0..).map(|(of, at)| (chunk.packed_at(at), of));
            if self.way == Way::Save {
                self.on_device(gpu, (pool, &chunk), ends(), stream)?;
            }
            self.by_engines(host, pairs, stream)?;
            if self.way == Way::Load {
                self.on_device(gpu, (pool, &chunk), ends(), stream)?;
            }
        }
        Ok(())
    }

    /// Copies between pages of the pool and of other memory by the kernel.
    fn on_device(
        &mut self,
        gpu: &Gpu,
        (pool, other): (&Pages, &Pages),
        ends: impl Iterator<Item = (PageId, PageId)>,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        self.copies.clear();
        let way = self.way;
        self.copies.extend(ends.map(|(of_pool, of_other)| match way {
            Way::Save => PageCopy { source: of_pool, target: of_other },
            Way::Load => PageCopy { source: of_other, target: of_pool },
        }));
        let (source, target) = if way == Way::Save { (pool, other) } else { (other, pool) };
        copy_on_device(gpu, source, target, &self.copies, stream)
    }

    /// Copies between device addresses and host pages by the copy engines.
    fn by_engines<'a>(
        &mut self,
        host: &Pages,
        pairs: impl Iterator<Item = (u64, &'a PageMove)>,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        let (way, bytes) = (self.way, host.page_bytes());
        let mut pairs = pairs.map(|(device, of)| (device, host.packed_at(of.host.raw())));
        match &mut self.batch {
            Some(batch) => batch.copy(way, bytes, pairs, stream),
            None => pairs.try_for_each(|pair| copy(way, bytes, pair, stream)),
        }
    }
}

/// The driver's `cuMemcpyBatchAsync`, which older drivers lack, and its arrays.
#[derive(Debug)]
struct BatchCopy {
    function: BatchFunction,
    targets: Vec<u64>,
    sources: Vec<u64>,
    bytes: Vec<usize>,
}

/// Targets, sources and sizes, and their count; attributes, their begins, and their count; the index of a failed copy.
type BatchFunction = unsafe extern "C" fn(
    *mut u64,
    *mut u64,
    *mut usize,
    usize,
    *mut BatchAttributes,
    *mut usize,
    usize,
    *mut usize,
    sys::CUstream,
) -> u32;

/// The driver's `CUmemcpyAttributes`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct BatchAttributes {
    /// 1: sources are read in the stream's order.
    source_order: i32,
    /// Type and id of a place, for managed memory: none.
    source_place: [i32; 2],
    target_place: [i32; 2],
    /// 1: leave the multiprocessors to other work.
    flags: u32,
}

impl BatchCopy {
    fn find() -> Option<Self> {
        let mut found = std::ptr::null_mut();
        // SAFETY: the name is a C string, `found` is valid memory for one pointer.
        let result =
            unsafe { sys::cuGetProcAddress(c"cuMemcpyBatchAsync".as_ptr(), &mut found, 12_080, 0) };
        if result != 0 || found.is_null() {
            return None;
        }
        // SAFETY: the driver documents this signature for the name at this version.
        let function =
            unsafe { std::mem::transmute::<*mut std::ffi::c_void, BatchFunction>(found) };
        let (targets, sources, bytes) = (Vec::new(), Vec::new(), Vec::new());
        Some(Self { function, targets, sources, bytes })
    }

    /// Copies `bytes` bytes between each device address and its host address.
    fn copy(
        &mut self,
        way: Way,
        bytes: u64,
        pairs: impl Iterator<Item = (u64, u64)>,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        let (devices, hosts) = match way {
            Way::Save => (&mut self.sources, &mut self.targets),
            Way::Load => (&mut self.targets, &mut self.sources),
        };
        devices.clear();
        hosts.clear();
        for (device, host) in pairs {
            devices.push(device);
            hosts.push(host);
        }
        let count = self.targets.len();
        if count == 0 {
            return Ok(());
        }
        self.bytes.clear();
        self.bytes.resize(count, bytes as usize);
        let (source_place, target_place) = ([0; 2], [0; 2]);
        let mut attributes =
            BatchAttributes { source_order: 1, source_place, target_place, flags: 1 };
        let (mut start, mut failed) = (0, 0);
        // SAFETY: the arrays contain `count` ranges each, all checked pages of pinned memory, the pool or a chunk. The
        // driver copies the arrays before it returns.
        let result = unsafe {
            (self.function)(
                self.targets.as_mut_ptr(),
                self.sources.as_mut_ptr(),
                self.bytes.as_mut_ptr(),
                count,
                &mut attributes,
                &mut start,
                1,
                &mut failed,
                raw(stream),
            )
        };
        check("cuMemcpyBatchAsync", result)
    }
}

/// Copies one page between a device address and a host address by a copy engine.
fn copy(
    way: Way,
    bytes: u64,
    (device, host): (u64, u64),
    stream: RawStream,
) -> Result<(), CudaError> {
    let (bytes, pinned) = (bytes as usize, host as usize as *mut _);
    // SAFETY: the host address is a checked page of pinned memory; the device address is a page of the pool or of a
    // chunk.
    let result = unsafe {
        match way {
            Way::Save => sys::cuMemcpyDtoHAsync_v2(pinned, device, bytes, raw(stream)),
            Way::Load => sys::cuMemcpyHtoDAsync_v2(device, pinned, bytes, raw(stream)),
        }
    };
    check("cuMemcpyAsync", result)
}
