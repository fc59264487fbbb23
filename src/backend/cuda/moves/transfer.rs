//! Copies pages between a pool and pinned memory, in the order of one stream.
//!
//! * Copy engines move contiguous pages. A part of a load copies only some layers of each page. Copy engines move these
//!   parts too, because adjacent layers are contiguous in each plane of such a page. The driver takes many copies in
//!   one call (CUDA 12.8 and newer), so no time is lost between them.
//! * Pages of many pieces take two copies. To save them, a kernel gathers them in staging memory on the device, and
//!   copy engines move the staging memory; to load them, the kernel scatters the staging memory afterwards.
//! * The kernel alone moves small pages. It reads and writes pinned memory directly.
//!
//! `swap_moves.rs` orders the streams.

use super::copy::copy_on_device;
use super::direction::Direction;
use crate::backend::cuda::driver::gpu::Gpu;
use crate::backend::cuda::driver::memory::DeviceBuffer;
use crate::backend::cuda::driver::raw::{RawStream, raw};
use crate::backend::cuda::driver::sys;
use crate::backend::cuda::error::{CudaError, check};
use crate::backend::cuda::store::pages::Pages;
use crate::id::PageId;
use crate::plan::{PageCopy, PageMove};

/// Minimum bytes of a page that the copy engines move; the kernel moves smaller pages. On an H100 the kernel saves and
/// loads pages of 16 KiB at 47 GB/s. The copy engines move pages of 32, 64, 128 and 256 KiB at 23, 33, 41 and 47 GB/s.
/// They leave the multiprocessors to other work.
const BATCHED_BYTES: u64 = 128 << 10;
/// The same limit for drivers that take one copy in a call. Each call costs some microseconds.
const SINGLE_BYTES: u64 = 256 << 10;
/// Maximum bytes of the staging memory, in which pages of many pieces become contiguous. A larger page gets as much.
const STAGING_BYTES: u64 = 32 << 20;
/// Maximum number of copies in one call of the driver. On an H100, both directions together copy pages of 2.25 MiB at
/// 94 to 96 GB/s with 32 copies a call. With 1 or 128 copies a call they reach 89 to 92 GB/s; with 1,024 copies they
/// reach 85 to 91 GB/s.
const CALL_RANGES: usize = 32;

/// Copies pages in one direction.
#[derive(Debug)]
pub(super) struct Transfer {
    direction: Direction,
    batch: Option<BatchCopy>,
    /// Whether the copy engines move the pages.
    by_engines: bool,
    /// Device memory in which the kernel gathers and scatters pages; `None` if the copy engines or the kernel move all
    /// pages directly.
    staging: Option<DeviceBuffer>,
    /// The copies of the kernel's last launch. Each launch reuses this allocation.
    copies: Vec<PageCopy>,
}

impl Transfer {
    pub fn new(gpu: &Gpu, direction: Direction, pool: &Pages) -> Result<Self, CudaError> {
        let batch = BatchCopy::find();
        let least = if batch.is_some() { BATCHED_BYTES } else { SINGLE_BYTES };
        let by_engines = pool.page_bytes() >= least;
        let mut staging = None;
        if by_engines && !pool.is_packed() {
            let pages = (STAGING_BYTES / pool.page_bytes()).clamp(1, pool.count.into());
            staging = Some(DeviceBuffer::lasting(gpu, pages * pool.page_bytes())?);
        }
        Ok(Self { direction, batch, by_engines, staging, copies: Vec::new() })
    }

    pub fn is_by_engines(&self) -> bool {
        self.by_engines
    }

    /// Submits moves between the pool and swap memory. `pool` and `swap` describe whole pages, or the same layers of
    /// them. The caller has checked the moves.
    pub fn submit(
        &mut self,
        gpu: &Gpu,
        pool: &Pages,
        swap: &Pages,
        moves: &[PageMove],
        stream: RawStream,
    ) -> Result<(), CudaError> {
        if !self.by_engines {
            let ends = moves.iter().map(|pages| (pages.device, PageId::new(pages.swap.raw())));
            return self.on_device(gpu, pool, swap, ends, stream);
        }
        let Some(staging) = &self.staging else {
            let pairs = moves.iter().map(|pages| (pages.device.raw(), pages.swap.raw()));
            return self.by_engines(pool, swap, pairs, stream);
        };
        let most = staging.bytes() / pool.page_bytes();
        let staging = Pages::packed(staging.address(), pool, most as u32);
        for moves in moves.chunks(most as usize) {
            let ends = || moves.iter().zip(0..).map(|(pages, at)| (pages.device, PageId::new(at)));
            let pairs = moves.iter().zip(0..).map(|(pages, at)| (at, pages.swap.raw()));
            if self.direction == Direction::Save {
                self.on_device(gpu, pool, &staging, ends(), stream)?;
            }
            self.by_engines(&staging, swap, pairs, stream)?;
            if self.direction == Direction::Load {
                self.on_device(gpu, pool, &staging, ends(), stream)?;
            }
        }
        Ok(())
    }

    /// Copies pages by the kernel, between the pool and other memory.
    fn on_device(
        &mut self,
        gpu: &Gpu,
        pool: &Pages,
        other: &Pages,
        ends: impl Iterator<Item = (PageId, PageId)>,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        self.copies.clear();
        let direction = self.direction;
        self.copies.extend(ends.map(|(of_pool, of_other)| match direction {
            Direction::Save => PageCopy { source: of_pool, target: of_other },
            Direction::Load => PageCopy { source: of_other, target: of_pool },
        }));
        let (source, target) = if direction == Direction::Save { (pool, other) } else { (other, pool) };
        copy_on_device(gpu, source, target, &self.copies, stream)
    }

    /// Copies pages by the copy engines, between device memory and swap pages. The pieces of each group are contiguous
    /// in both.
    fn by_engines(
        &mut self,
        device: &Pages,
        swap: &Pages,
        pairs: impl Iterator<Item = (u32, u32)>,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        let direction = self.direction;
        // Whole pages are one range each.
        let whole = device.is_packed() && swap.is_packed();
        let count = if whole { 1 } else { swap.groups().len() };
        let range = |pages: &Pages, group: usize, page: u32| {
            let pieces = if whole { pages.whole() } else { pages.groups()[group] };
            debug_assert!(pieces.count == 1 || pieces.piece_stride == pieces.piece_bytes);
            (pieces.address + u64::from(page) * pieces.page_stride, pieces.bytes())
        };
        let mut ranges = pairs.flat_map(|(page, swap_page)| {
            (0..count).map(move |group| {
                let (pinned, bytes) = range(swap, group, swap_page);
                Range { device: range(device, group, page).0, pinned, bytes }
            })
        });
        match &mut self.batch {
            Some(batch) => batch.copy(direction, ranges, stream),
            None => ranges.try_for_each(|range| copy(direction, range, stream)),
        }
    }
}

/// A copy between device memory and pinned memory, in either direction.
#[derive(Clone, Copy, Debug)]
struct Range {
    device: u64,
    pinned: u64,
    bytes: u64,
}

/// The driver's `cuMemcpyBatchAsync`, which older drivers lack, and the arrays of its arguments.
#[derive(Debug)]
struct BatchCopy {
    function: BatchFunction,
    targets: Vec<u64>,
    sources: Vec<u64>,
    bytes: Vec<usize>,
}

/// The type of `cuMemcpyBatchAsync`. Arguments: targets, sources, sizes and the number of copies; the attributes, the
/// index of the first copy that uses each attribute, and the number of attributes; the index of a failed copy; the
/// stream.
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
    /// Type and id of a memory location, which only managed memory needs: 0.
    source_place: [i32; 2],
    target_place: [i32; 2],
    /// 1: prefer copies that leave the multiprocessors to other work.
    flags: u32,
}

impl BatchCopy {
    fn find() -> Option<Self> {
        let found = sys::find_function(c"cuMemcpyBatchAsync", 12_080)?;
        // SAFETY: the driver documents this signature for the name at this version.
        let function = unsafe { std::mem::transmute::<*mut std::ffi::c_void, BatchFunction>(found) };
        let (targets, sources, bytes) = (Vec::new(), Vec::new(), Vec::new());
        Some(Self { function, targets, sources, bytes })
    }

    /// Copies ranges in calls of [`CALL_RANGES`], so the engine copies the first ones while the host submits others.
    fn copy(
        &mut self,
        direction: Direction,
        mut ranges: impl Iterator<Item = Range>,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        loop {
            let Self { targets, sources, bytes, .. } = self;
            let (devices, pinned) = match direction {
                Direction::Save => (&mut *sources, &mut *targets),
                Direction::Load => (&mut *targets, &mut *sources),
            };
            devices.clear();
            pinned.clear();
            bytes.clear();
            for range in ranges.by_ref().take(CALL_RANGES) {
                devices.push(range.device);
                pinned.push(range.pinned);
                bytes.push(range.bytes as usize);
            }
            if self.bytes.is_empty() {
                return Ok(());
            }
            self.call(stream)?;
        }
    }

    /// Submits the copies of the arrays.
    fn call(&mut self, stream: RawStream) -> Result<(), CudaError> {
        let count = self.bytes.len();
        let (source_place, target_place) = ([0; 2], [0; 2]);
        let mut attributes = BatchAttributes { source_order: 1, source_place, target_place, flags: 1 };
        let (mut start, mut failed) = (0, 0);
        // SAFETY: the arrays contain `count` entries each, all of checked pages of pinned memory, the pool or staging
        // memory. The driver copies the arrays before it returns.
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

/// Copies one range by a copy engine.
fn copy(direction: Direction, range: Range, stream: RawStream) -> Result<(), CudaError> {
    let Range { device, pinned, bytes } = range;
    let (bytes, pinned) = (bytes as usize, pinned as usize as *mut _);
    // SAFETY: the pinned range is in a checked page of the region, the other one in a page of the pool or of staging
    // memory.
    let result = unsafe {
        match direction {
            Direction::Save => sys::cuMemcpyDtoHAsync_v2(pinned, device, bytes, raw(stream)),
            Direction::Load => sys::cuMemcpyHtoDAsync_v2(device, pinned, bytes, raw(stream)),
        }
    };
    check("cuMemcpyAsync", result)
}
