//! Owned memory: device memory, and pinned memory that kernels can access.

use std::marker::PhantomData;
use std::ptr;

use super::gpu::Gpu;
use super::raw::{RawStream, raw};
use super::sys;
use super::work::{self, Dropped};
use crate::backend::cuda::error::{CudaError, check, check_alloc};
use crate::layout::Dtype;

/// Device memory. Dropping it frees the memory after all work that was submitted to this crate's streams of its device.
/// A host that uses the address on other streams or devices must wait for them before the drop.
///
/// [`new`](Self::new) allocates from the device's memory pool, if there is one, so that a drop does not wait. A wait
/// could deadlock, because a pending kernel may depend on a kernel that this thread launches next. To free memory
/// outside the pool, the driver waits for all work of the context. While another stream worked for 300 ms, such a drop
/// took 300 ms; a drop of pool memory took 0.1 ms (H200).
#[derive(Debug)]
pub struct DeviceBuffer {
    gpu: Gpu,
    address: u64,
    bytes: u64,
    pooled: bool,
}

impl DeviceBuffer {
    /// Allocates `bytes` bytes of uninitialised device memory; 0 bytes allocate nothing.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`]; the driver's errors.
    pub fn new(gpu: &Gpu, bytes: u64) -> Result<Self, CudaError> {
        Self::take(gpu, bytes, gpu.has_pools())
    }

    /// Allocates memory for a backend's lifetime, outside the memory pool: attention over K and V in the memory pool
    /// takes up to 1 % longer (32 kv heads, H200).
    pub(in crate::backend::cuda) fn lasting(gpu: &Gpu, bytes: u64) -> Result<Self, CudaError> {
        Self::take(gpu, bytes, false)
    }

    /// Allocates memory for a backend's lifetime, and fills it with zeros in the stream's order. `bytes` is a multiple
    /// of 4.
    pub(in crate::backend::cuda) fn zeros(gpu: &Gpu, bytes: usize, stream: RawStream) -> Result<Self, CudaError> {
        let buffer = Self::lasting(gpu, bytes as u64)?;
        buffer.clear(bytes, stream)?;
        Ok(buffer)
    }

    /// Fills the first `bytes` bytes, a multiple of 4, with zeros in the stream's order. The context is bound.
    pub(in crate::backend::cuda) fn clear(&self, bytes: usize, stream: RawStream) -> Result<(), CudaError> {
        assert!(bytes as u64 <= self.bytes);
        // SAFETY: the range is inside this buffer.
        let result = unsafe { sys::cuMemsetD32Async(self.address, 0, bytes / 4, raw(stream)) };
        check("cuMemsetD32Async", result)
    }

    fn take(gpu: &Gpu, bytes: u64, pooled: bool) -> Result<Self, CudaError> {
        gpu.bind()?;
        let from = if pooled { from_pool } else { from_device };
        let from = |bytes| if bytes > 0 { from(bytes) } else { Ok(0) };
        let address = match from(bytes) {
            // Dropped memory may still wait for work. `reclaim` waits for that work and frees the memory.
            Err(CudaError::OutOfMemory { .. }) if work::reclaim(gpu.context()) == Ok(true) => from(bytes)?,
            taken => taken?,
        };
        Ok(Self { gpu: gpu.clone(), address, bytes, pooled })
    }

    /// Allocates memory for a copy of `items`, copies them, and waits for the copy. Other work of the device goes on
    /// meanwhile, also a capture by another thread.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`]; the driver's errors.
    pub fn of<T: bytemuck::Pod>(gpu: &Gpu, items: &[T]) -> Result<Self, CudaError> {
        let bytes = size_of_val(items);
        let buffer = Self::new(gpu, bytes as u64)?;
        let (target, source) = (buffer.address, items.as_ptr().cast());
        on_new_stream(|stream| {
            // SAFETY: the target is this buffer, the source is a slice of `bytes` bytes that lives until the copy is
            // done.
            let result = unsafe { sys::cuMemcpyHtoDAsync_v2(target, source, bytes, stream) };
            check("cuMemcpyHtoDAsync", result)
        })?;
        Ok(buffer)
    }

    /// Returns the device address of the first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the number of bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Overwrites the memory from byte `start` on, after all submitted work of the device, and waits for the copy.
    ///
    /// # Errors
    /// The error of a call of the CUDA driver.
    ///
    /// # Panics
    /// If the items do not fit.
    pub fn write<T: bytemuck::Pod>(&mut self, start: u64, items: &[T]) -> Result<(), CudaError> {
        let bytes = size_of_val(items);
        assert!(start.checked_add(bytes as u64).is_some_and(|end| end <= self.bytes));
        self.gpu.finish()?;
        let source = items.as_ptr().cast();
        // SAFETY: the target range is inside this buffer (asserted), the source is a live slice of `bytes` bytes.
        let result = unsafe { sys::cuMemcpyHtoD_v2(self.address + start, source, bytes) };
        check("cuMemcpyHtoD", result)?;
        // A copy from pageable memory returns when the bytes are staged, before they have arrived.
        self.gpu.finish()
    }

    /// Reads `len` items from byte `start` on, after all submitted work of the device.
    ///
    /// # Errors
    /// The driver's error; also reports failures of earlier work.
    ///
    /// # Panics
    /// If the buffer has fewer items.
    pub fn read<T: bytemuck::Pod>(&self, start: u64, len: usize) -> Result<Vec<T>, CudaError> {
        let mut items = vec![T::zeroed(); len];
        let bytes = size_of_val(items.as_slice());
        assert!(start.checked_add(bytes as u64).is_some_and(|end| end <= self.bytes));
        self.gpu.finish()?;
        let target = items.as_mut_ptr().cast();
        // SAFETY: the source range is inside this buffer (asserted), the target is a live vector of `bytes` bytes, and
        // any bit pattern is a `T`.
        let result = unsafe { sys::cuMemcpyDtoH_v2(target, self.address + start, bytes) };
        check("cuMemcpyDtoH", result)?;
        Ok(items)
    }

    /// Sets every byte to `byte`, after all submitted work of the device, and waits.
    pub fn fill(&mut self, byte: u8) -> Result<(), CudaError> {
        self.gpu.finish()?;
        // SAFETY: the range is this buffer.
        let result = unsafe { sys::cuMemsetD8_v2(self.address, byte, self.bytes as usize) };
        check("cuMemsetD8", result)?;
        self.gpu.finish()
    }

    /// Returns the memory from byte `start` on as rows to read. The rows begin `stride` elements apart; `None` means
    /// packed. The call that takes the rows determines their type.
    pub fn rows(&self, start: u64, stride: Option<usize>) -> DeviceRows<'_> {
        let device = Some(self.gpu.ordinal());
        DeviceRows { extent: self.extent(start, stride), device, owner: PhantomData }
    }

    /// Returns the memory from byte `start` on as rows to write. The rows begin `stride` elements apart; `None` means
    /// packed. The call that takes the rows determines their type.
    pub fn rows_mut(&mut self, start: u64, stride: Option<usize>) -> DeviceRowsMut<'_> {
        let device = Some(self.gpu.ordinal());
        DeviceRowsMut { extent: self.extent(start, stride), device, owner: PhantomData }
    }

    fn extent(&self, start: u64, stride: Option<usize>) -> Extent {
        let bytes = self.bytes.saturating_sub(start);
        Extent { address: self.address + start, stride, bytes, element: Element::Bytes }
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if self.bytes > 0 && self.gpu.bind().is_ok() {
            let memory = if self.pooled { Dropped::Pool } else { Dropped::Device };
            work::free(self.gpu.context(), memory(self.address));
        }
    }
}

/// Allocates from the bound context's memory pool, for use by every stream.
fn from_pool(bytes: u64) -> Result<u64, CudaError> {
    let mut address = 0;
    on_new_stream(|stream| {
        // SAFETY: `address` is valid memory for one device address; the stream lives.
        let result = unsafe { sys::cuMemAllocAsync(&mut address, bytes as usize, stream) };
        check_alloc("cuMemAllocAsync", bytes, result)
    })?;
    Ok(address)
}

/// Lets `submit` submit work to a new stream of the bound context, and waits for this work alone. A wait for the
/// context would disturb a capture by another thread, or not end.
fn on_new_stream(submit: impl FnOnce(sys::CUstream) -> Result<(), CudaError>) -> Result<(), CudaError> {
    let mut stream = ptr::null_mut();
    let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
    // SAFETY: `stream` is valid memory for one handle; a context is bound.
    check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut stream, flags) })?;
    let submitted = submit(stream);
    // SAFETY: the stream lives, and its work is that of `submit`; destroyed once.
    let (reached, _) = unsafe { (sys::cuStreamSynchronize(stream), sys::cuStreamDestroy_v2(stream)) };
    submitted.and(check("cuStreamSynchronize", reached))
}

/// Allocates memory of the bound context outside any memory pool.
fn from_device(bytes: u64) -> Result<u64, CudaError> {
    let mut address = 0;
    // SAFETY: `address` is valid memory for one device address; a context is bound.
    let result = unsafe { sys::cuMemAlloc_v2(&mut address, bytes as usize) };
    check_alloc("cuMemAlloc", bytes, result).map(|()| address)
}

/// Type of the elements at an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::backend::cuda) enum Element {
    /// Bytes of a buffer, whose type the call determines.
    Bytes,
    Number(Dtype),
    /// A position in a selection's lists, as u32.
    Position,
}

/// The place and size of rows in device memory, for checks.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend::cuda) struct Extent {
    pub address: u64,
    /// Number of elements from the start of one row to the start of the next; `None` if packed.
    pub stride: Option<usize>,
    pub bytes: u64,
    pub element: Element,
}

/// Rows to read in device memory, such as q, k, v, sinks or lists, from [`DeviceBuffer::rows`] or at a raw address.
#[derive(Clone, Copy, Debug)]
pub struct DeviceRows<'a> {
    pub(in crate::backend::cuda) extent: Extent,
    /// The buffer's device; `None` for a raw address.
    pub(in crate::backend::cuda) device: Option<u32>,
    owner: PhantomData<&'a [u8]>,
}

impl DeviceRows<'_> {
    /// Describes `len` elements of type `dtype` at a raw device address as rows. The rows begin `stride` elements
    /// apart; `None` means packed. A call that expects another type or more elements rejects them.
    ///
    /// # Safety
    /// Until the work that reads them is done, the device can read these elements, and no work outside the stream's
    /// order writes them.
    pub unsafe fn from_raw(address: u64, dtype: Dtype, len: usize, stride: Option<usize>) -> Self {
        Self { extent: Extent::of_numbers(address, dtype, len, stride), device: None, owner: PhantomData }
    }

    /// Describes `len` positions (u32) at a raw device address as the lists of a selection.
    ///
    /// # Safety
    /// As for [`from_raw`](DeviceRows::from_raw).
    pub unsafe fn positions_from_raw(address: u64, len: usize) -> Self {
        Self { extent: Extent::of_positions(address, len), device: None, owner: PhantomData }
    }
}

/// Rows to write in device memory: attention's output, its log-sum-exp (packed f32), lists to fill, or the qkv of
/// `rope_store`, which is also read.
#[derive(Debug)]
pub struct DeviceRowsMut<'a> {
    pub(in crate::backend::cuda) extent: Extent,
    /// The buffer's device; `None` for a raw address.
    pub(in crate::backend::cuda) device: Option<u32>,
    owner: PhantomData<&'a mut [u8]>,
}

impl<'a> DeviceRowsMut<'a> {
    /// Returns these rows without the first `start` bytes of each, for reads in the stream's order. The rows begin
    /// `stride` elements apart.
    pub(in crate::backend::cuda) fn part(&self, start: u64, stride: u64) -> DeviceRows<'a> {
        let Extent { address, bytes, element, .. } = self.extent;
        let (address, bytes) = (address.saturating_add(start), bytes.saturating_sub(start));
        let extent = Extent { address, bytes, element, stride: Some(stride as usize) };
        DeviceRows { extent, device: self.device, owner: PhantomData }
    }
}

impl DeviceRowsMut<'_> {
    /// Describes `len` elements of type `dtype` at a raw device address as rows. The rows begin `stride` elements
    /// apart; `None` means packed. A call that expects another type or more elements rejects them.
    ///
    /// # Safety
    /// Until the work that writes them is done, the device can write these elements, and no work outside the stream's
    /// order accesses them.
    pub unsafe fn from_raw(address: u64, dtype: Dtype, len: usize, stride: Option<usize>) -> Self {
        Self { extent: Extent::of_numbers(address, dtype, len, stride), device: None, owner: PhantomData }
    }

    /// Describes space for `len` positions (u32) at a raw device address as the lists of a selection.
    ///
    /// # Safety
    /// As for [`from_raw`](DeviceRowsMut::from_raw).
    pub unsafe fn positions_from_raw(address: u64, len: usize) -> Self {
        Self { extent: Extent::of_positions(address, len), device: None, owner: PhantomData }
    }
}

impl Extent {
    fn of_numbers(address: u64, dtype: Dtype, len: usize, stride: Option<usize>) -> Self {
        let bytes = (len as u64).saturating_mul(dtype.size().into());
        Self { address, stride, bytes, element: Element::Number(dtype) }
    }

    fn of_positions(address: u64, len: usize) -> Self {
        let bytes = (len as u64).saturating_mul(4);
        Self { address, stride: None, bytes, element: Element::Position }
    }
}

/// Pinned memory: the device copies from and to it without staging, and kernels access it. Dropping it waits for
/// the work that was submitted to this crate's streams of its device. To free the memory, the driver then waits for all
/// work of the context. While such a stream is captured, the drop does not wait; a later call of this crate frees the
/// memory. A host that uses the memory on other devices must wait for them before the drop.
#[derive(Debug)]
pub struct PinnedBuffer {
    gpu: Gpu,
    start: *mut u8,
    address: u64,
    bytes: usize,
}

// SAFETY: this value alone owns the memory, and the driver does not tie it to a thread.
unsafe impl Send for PinnedBuffer {}

impl PinnedBuffer {
    /// Allocates `bytes` bytes of pinned memory, at least 1, zeroed.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`]; the driver's errors.
    pub fn new(gpu: &Gpu, bytes: usize) -> Result<Self, CudaError> {
        gpu.bind()?;
        let bytes = bytes.max(1);
        let mut start = ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: `start` is valid memory for one pointer; a context is bound.
        let result = unsafe { sys::cuMemHostAlloc(&mut start, bytes, flags) };
        check_alloc("cuMemHostAlloc", bytes as u64, result)?;
        let mut buffer = Self { gpu: gpu.clone(), start: start.cast(), address: 0, bytes };
        // SAFETY: `start` was allocated above, device-mapped; `address` is valid memory for one address.
        let result = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut buffer.address, start, 0) };
        check("cuMemHostGetDevicePointer", result)?;
        // SAFETY: the range was allocated above and has no other user yet.
        unsafe { ptr::write_bytes(buffer.start, 0, bytes) };
        Ok(buffer)
    }

    /// Returns the bytes. If a copy writes them asynchronously, wait for its event first.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: allocated for `bytes` bytes, initialised in `new`, alive while borrowed.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }

    /// Returns the bytes to write. If a copy reads them asynchronously, wait for its event first.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: the same, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }

    /// Returns the host address, for the driver's copies.
    pub(in crate::backend::cuda) fn host_address(&self) -> *mut u8 {
        self.start
    }

    /// Returns the device address of the first byte, for kernels.
    pub fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            work::free(self.gpu.context(), Dropped::Host(self.start as u64));
        }
    }
}
