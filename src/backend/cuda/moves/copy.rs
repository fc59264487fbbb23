//! Copies of whole pages: inside a pool, between pools of either layout, and between a pool and pinned host memory.
//!
//! All copies are asynchronous on the given stream, and return an event. On the device one kernel copies between all
//! layouts; its parameters contain the pages. To and from the host:
//!
//! * The copy engines move pages of one piece. The driver takes all of them in one call (CUDA 12.8 and newer), so no
//!   time is lost between them; older drivers use two streams.
//! * The kernel gathers (scatters) pages of many pieces in chunks of device memory, which the copy engines move.
//! * The kernel itself moves small pages; it can access pinned memory.
//!
//! Not here: the host's pages (`host_pages.rs`), the choice of pages.

use super::host_pages::{HostPages, Way};
use crate::backend::check;
use crate::backend::cuda::driver::gpu::Gpu;
use crate::backend::cuda::driver::launch::Start;
use crate::backend::cuda::driver::memory::DeviceBuffer;
use crate::backend::cuda::driver::raw::{RawStream, is_capturing, raw};
use crate::backend::cuda::driver::stream::{CudaEvent, CudaStream};
use crate::backend::cuda::driver::sys;
use crate::backend::cuda::error::{CudaError, check as check_call};
use crate::backend::cuda::kernels::COPY_PAGES;
use crate::backend::cuda::kernels::params::{COPY_PAGES_MAX, CopyPagesParams, wide_magic};
use crate::backend::cuda::store::pool::{Pages, Pieces};
use crate::id::PageId;
use crate::plan::PageCopy;

/// The kernel moves smaller pages, because the setup of a copy engine takes some microseconds.
const ENGINE_BYTES: u64 = 256 << 10;
/// Device memory for the chunks between many pieces and one.
const CHUNK_BYTES: u64 = 32 << 20;
/// Units that one block of `copy_pages` moves.
const BLOCK_UNITS: u32 = 1024;

/// Pages to copy between a pool and the host's, on a stream.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend::cuda) struct HostCopy<'a> {
    pub(in crate::backend::cuda) pool: &'a Pages,
    pub(in crate::backend::cuda) host: &'a HostPages,
    pub(in crate::backend::cuda) way: Way,
    pub(in crate::backend::cuda) copies: &'a [PageCopy],
    pub(in crate::backend::cuda) stream: &'a CudaStream,
}

impl<'a> HostCopy<'a> {
    /// Each copy's page in the pool and on the host.
    pub(in crate::backend::cuda) fn ends(self) -> impl Iterator<Item = (u32, u32)> + 'a {
        self.copies.iter().map(move |copy| match self.way {
            Way::ToHost => (copy.source.raw(), copy.target.raw()),
            Way::FromHost => (copy.target.raw(), copy.source.raw()),
        })
    }
}

/// State of copies to and from the host: two streams and two chunks of device memory, created at the first use.
#[derive(Debug)]
pub(in crate::backend::cuda) struct CopyStreams {
    streams: [CudaStream; 2],
    /// Events in the caller's stream, and in each of the two.
    fork: CudaEvent,
    joins: [CudaEvent; 2],
    /// The last copy's event, whatever its stream.
    done: CudaEvent,
    chunks: Option<[DeviceBuffer; 2]>,
    batch: Option<BatchCopy>,
}

impl CopyStreams {
    pub(in crate::backend::cuda) fn new(gpu: &Gpu) -> Result<Self, CudaError> {
        let event = || CudaEvent::new(gpu, false);
        Ok(Self {
            streams: [CudaStream::new(gpu)?, CudaStream::new(gpu)?],
            fork: event()?,
            joins: [event()?, event()?],
            done: event()?,
            chunks: None,
            batch: BatchCopy::find(),
        })
    }

    /// Copies pages between a pool and host pages.
    pub(in crate::backend::cuda) fn copy(
        &mut self,
        gpu: &Gpu,
        copy: &HostCopy<'_>,
    ) -> Result<CudaEvent, CudaError> {
        let HostCopy { pool, host, way, copies, stream } = *copy;
        if host.page_bytes != pool.page_bytes() {
            return Err(CudaError::PageShape);
        }
        let counts = match way {
            Way::ToHost => (pool.count, host.count),
            Way::FromHost => (host.count, pool.count),
        };
        check::copies(copies, counts)?;
        let capturing = is_capturing(stream.raw())?;
        let mut asked = self.ask(gpu, copy, capturing);
        if !capturing {
            asked =
                asked.and_then(|()| host.remember(way, copy.ends().map(|(_, page)| page), stream));
            if asked.is_err() {
                // Part of the copy may have started, and the caller has no event for it.
                let _ = gpu.finish();
            }
        }
        asked?;
        stream.mark()
    }

    /// Submits copies that were checked.
    fn ask(&mut self, gpu: &Gpu, copy: &HostCopy<'_>, capturing: bool) -> Result<(), CudaError> {
        let HostCopy { pool, host, way, copies, stream } = *copy;
        if pool.page_bytes() < ENGINE_BYTES {
            let mapped = Pages::packed(host.address(), pool, host.count);
            let (source, target) = match way {
                Way::ToHost => (pool, &mapped),
                Way::FromHost => (&mapped, pool),
            };
            return copy_on_device(gpu, source, target, copies, stream.raw());
        }
        // A copy on another stream may still use the chunks. A capture does not see earlier work, and an event recorded
        // in it cannot be waited for afterwards.
        if !capturing {
            self.done.block(stream)?;
        }
        if pool.is_packed() {
            self.copy_packed(copy, capturing)?;
        } else {
            self.copy_pieces(gpu, copy, capturing)?;
        }
        if !capturing {
            self.done.record(stream)?;
        }
        Ok(())
    }

    /// Copies pages of one piece directly between pool and host, in two streams.
    fn copy_packed(&mut self, copy: &HostCopy<'_>, capturing: bool) -> Result<(), CudaError> {
        self.fork(copy.stream)?;
        let pool = copy.pool;
        let moves = copy
            .ends()
            .map(|(page, host)| (pool.address() + u64::from(page) * pool.page_bytes(), host));
        self.transfer(copy, moves, [0, 1], capturing)?;
        self.join(copy.stream)
    }

    /// Copies pages of many pieces: one chunk is gathered while the previous one moves to the host, or the other way
    /// round. Chunks alternate between the two streams, each with its own memory.
    fn copy_pieces(
        &mut self,
        gpu: &Gpu,
        copy: &HostCopy<'_>,
        capturing: bool,
    ) -> Result<(), CudaError> {
        let HostCopy { pool, host, way, copies, stream } = *copy;
        let pages = (CHUNK_BYTES / host.page_bytes).max(1);
        let bytes = pages * host.page_bytes;
        let addresses = match &self.chunks {
            Some(chunks) => [chunks[0].address(), chunks[1].address()],
            None if capturing => return Err(CudaError::NotPrepared),
            None => {
                let chunks =
                    [DeviceBuffer::lasting(gpu, bytes)?, DeviceBuffer::lasting(gpu, bytes)?];
                self.chunks.insert(chunks).each_ref().map(DeviceBuffer::address)
            }
        };
        self.fork(stream)?;
        for (i, copies) in copies.chunks(pages as usize).enumerate() {
            let (copy, turn) = (HostCopy { copies, ..*copy }, self.streams[i % 2].raw());
            let chunk = Pages::packed(addresses[i % 2], pool, pages as u32);
            let through = |((page, _), at): ((u32, u32), u32)| {
                let (source, target) = if way == Way::ToHost { (page, at) } else { (at, page) };
                PageCopy { source: PageId::new(source), target: PageId::new(target) }
            };
            let moves: Vec<_> = copy.ends().zip(0..).map(through).collect();
            if way == Way::ToHost {
                copy_on_device(gpu, pool, &chunk, &moves, turn)?;
            }
            let pages = copy.ends().zip(0_u64..);
            let pages =
                pages.map(|((_, host), at)| (chunk.address() + at * chunk.page_bytes(), host));
            self.transfer(&copy, pages, [i % 2; 2], capturing)?;
            if way == Way::FromHost {
                copy_on_device(gpu, &chunk, pool, &moves, turn)?;
            }
        }
        self.join(stream)
    }

    /// Copies between device addresses and host pages by the copy engines, in one call or alternating between two
    /// streams.
    fn transfer(
        &self,
        copy: &HostCopy<'_>,
        pages: impl Iterator<Item = (u64, u32)>,
        turns: [usize; 2],
        capturing: bool,
    ) -> Result<(), CudaError> {
        let HostCopy { host, way, .. } = *copy;
        let streams = turns.map(|turn| self.streams[turn].raw());
        match self.batch {
            // A batch cannot be captured.
            Some(batch) if !capturing => batch.copy(way, host, pages, streams[0]),
            _ => pages
                .zip(streams.into_iter().cycle())
                .try_for_each(|((device, page), stream)| transfer(way, device, host, page, stream)),
        }
    }

    /// Makes both streams wait for the caller's stream.
    fn fork(&mut self, stream: &CudaStream) -> Result<(), CudaError> {
        self.fork.record(stream)?;
        self.streams.iter().try_for_each(|own| self.fork.block(own))
    }

    /// Makes the caller's stream wait for both.
    fn join(&mut self, stream: &CudaStream) -> Result<(), CudaError> {
        for (join, own) in self.joins.iter_mut().zip(&self.streams) {
            join.record(own)?;
            join.block(stream)?;
        }
        Ok(())
    }
}

/// The driver's `cuMemcpyBatchAsync`, which older drivers lack.
#[derive(Clone, Copy, Debug)]
struct BatchCopy(BatchFunction);

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
        Some(Self(unsafe { std::mem::transmute::<*mut std::ffi::c_void, BatchFunction>(found) }))
    }

    fn copy(
        self,
        way: Way,
        host: &HostPages,
        pages: impl Iterator<Item = (u64, u32)>,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        let (mut devices, mut pinned): (Vec<_>, Vec<_>) =
            pages.map(|(device, page)| (device, host.host_address(page) as u64)).unzip();
        let count = devices.len();
        if count == 0 {
            return Ok(());
        }
        let (targets, sources) = match way {
            Way::ToHost => (&mut pinned, &mut devices),
            Way::FromHost => (&mut devices, &mut pinned),
        };
        let mut bytes = vec![host.page_bytes as usize; count];
        let (source_place, target_place) = ([0; 2], [0; 2]);
        let mut attributes =
            BatchAttributes { source_order: 1, source_place, target_place, flags: 1 };
        let (mut start, mut failed) = (0, 0);
        // SAFETY: the arrays contain `count` ranges each, all checked pages of pinned memory, the pool or a chunk. The
        // driver copies the arrays before it returns.
        let result = unsafe {
            (self.0)(
                targets.as_mut_ptr(),
                sources.as_mut_ptr(),
                bytes.as_mut_ptr(),
                count,
                &mut attributes,
                &mut start,
                1,
                &mut failed,
                raw(stream),
            )
        };
        check_call("cuMemcpyBatchAsync", result)
    }
}

/// One page between device memory and the host, by a copy engine.
fn transfer(
    way: Way,
    device: u64,
    host: &HostPages,
    page: u32,
    stream: RawStream,
) -> Result<(), CudaError> {
    let bytes = host.page_bytes as usize;
    // SAFETY: the page was checked to be a host page, whose memory is pinned; the device range is a page of the pool or
    // of a chunk.
    let result = unsafe {
        let pinned = host.host_address(page).cast();
        match way {
            Way::ToHost => sys::cuMemcpyDtoHAsync_v2(pinned, device, bytes, raw(stream)),
            Way::FromHost => sys::cuMemcpyHtoDAsync_v2(device, pinned, bytes, raw(stream)),
        }
    };
    check_call("cuMemcpyAsync", result)
}

/// Copies pages that were checked between any memory that the device can access, in the stream's order.
pub(in crate::backend::cuda) fn copy_on_device(
    gpu: &Gpu,
    source: &Pages,
    target: &Pages,
    copies: &[PageCopy],
    stream: RawStream,
) -> Result<(), CudaError> {
    if !source.is_like(target) {
        return Err(CudaError::PageShape);
    }
    // Two packed pages are one piece each.
    if source.is_packed() && target.is_packed() {
        return copy_pieces(gpu, &source.whole(), &target.whole(), copies, stream);
    }
    let mut groups = source.groups().iter().zip(target.groups());
    // Copies none unless it can copy all.
    groups.clone().try_for_each(|(source, target)| Units::of(source, target).map(|_| ()))?;
    groups.try_for_each(|(source, target)| copy_pieces(gpu, source, target, copies, stream))
}

/// The counts with which `copy_pages` addresses the pieces of one page, in 32 bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Units {
    /// Bytes of a unit.
    bytes: u32,
    /// Units of one piece.
    piece: u32,
    /// Units of all pieces of one page.
    page: u32,
}

impl Units {
    /// Returns the units that fit both source and target.
    fn of(source: &Pieces, target: &Pieces) -> Result<Self, CudaError> {
        let strides = |of: &Pieces| [of.address, of.page_stride, of.piece_stride];
        let [a, b, c] = strides(source);
        let [d, e, f] = strides(target);
        let bytes = unit_bytes(&[source.piece_bytes, a, b, c, d, e, f]);
        // A thread of the last block adds up to a block's units to an index, past the last unit.
        let max = u64::from(u32::MAX - BLOCK_UNITS) * u64::from(bytes);
        if source.bytes() > max {
            return Err(CudaError::PageBytes { bytes: source.bytes(), max });
        }
        let units = |n: u64| (n / u64::from(bytes)) as u32;
        Ok(Self { bytes, piece: units(source.piece_bytes), page: units(source.bytes()) })
    }
}

/// Copies pieces of one size, for pages that were checked.
fn copy_pieces(
    gpu: &Gpu,
    source: &Pieces,
    target: &Pieces,
    copies: &[PageCopy],
    stream: RawStream,
) -> Result<(), CudaError> {
    let units = Units::of(source, target)?;
    let mut params = CopyPagesParams {
        source: source.address,
        target: target.address,
        source_page_stride: source.page_stride,
        source_piece_stride: source.piece_stride,
        target_page_stride: target.page_stride,
        target_piece_stride: target.piece_stride,
        piece_magic: wide_magic(units.piece.into()),
        piece_units: units.piece,
        page_units: units.page,
        unit_bytes: units.bytes,
        reserved: 0,
        copies: [PageCopy { source: PageId::new(0), target: PageId::new(0) }; COPY_PAGES_MAX],
    };
    for copies in copies.chunks(COPY_PAGES_MAX) {
        params.copies[..copies.len()].copy_from_slice(copies);
        let grid = (units.page.div_ceil(BLOCK_UNITS), copies.len() as u32);
        // SAFETY: each page was checked against its side's count, so all addresses are inside the two memories.
        unsafe {
            gpu.launch(COPY_PAGES, grid, (COPY_PAGES.threads(), 1), stream, &params, Start::InOrder)
        }?;
    }
    Ok(())
}

/// Returns the most bytes that a thread can move at once if all of these are multiples of it; 0 if not even 2 fit.
pub(in crate::backend::cuda) fn unit_bytes(multiples: &[u64]) -> u32 {
    let serves = |unit: &u32| multiples.iter().all(|n| n.is_multiple_of(u64::from(*unit)));
    [16, 4, 2].into_iter().find(serves).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(piece_bytes: u64, count: u32) -> Pieces {
        let page_stride = piece_bytes * u64::from(count);
        Pieces { address: 1 << 40, page_stride, piece_stride: piece_bytes, piece_bytes, count }
    }

    /// A page of 64 GiB must not count as 0 units, which would copy nothing.
    #[test]
    fn a_page_of_more_units_than_a_launch_counts_is_refused() {
        let units = |piece_bytes, count| {
            let pieces = pieces(piece_bytes, count);
            Units::of(&pieces, &pieces)
        };
        let small = Units { bytes: 16, piece: 2, page: 6 };
        assert_eq!(units(32, 3), Ok(small));
        let max = 16 * u64::from(u32::MAX - BLOCK_UNITS);
        let largest =
            Units { bytes: 16, piece: u32::MAX - BLOCK_UNITS, page: u32::MAX - BLOCK_UNITS };
        assert_eq!(units(max, 1), Ok(largest));
        assert_eq!(units(max + 16, 1), Err(CudaError::PageBytes { bytes: max + 16, max }));
        // 2^32 units, in one piece and in many, also units of 2 bytes.
        assert_eq!(units(64 << 30, 1), Err(CudaError::PageBytes { bytes: 64 << 30, max }));
        assert_eq!(units(1 << 30, 64), Err(CudaError::PageBytes { bytes: 64 << 30, max }));
        let (bytes, max) = (8 * ((1 << 30) + 2), 2 * u64::from(u32::MAX - BLOCK_UNITS));
        assert_eq!(units((1 << 30) + 2, 8), Err(CudaError::PageBytes { bytes, max }));
    }
}
