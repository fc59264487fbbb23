//! Memory that is owned: device memory, and pinned host memory that kernels can reach too.
//!
//! Not here: what lies in it.

use std::marker::PhantomData;
use std::ptr;

use super::gpu::Gpu;
use super::sys;
use super::work::{self, Dropped};
use crate::backend::cuda::error::{CudaError, check, check_alloc};

/// Device memory. Dropped, it is freed after what was asked of this crate's streams of its device. A host whose other
/// streams, or other devices, use its address waits for those before it drops the buffer.
///
/// The host's come from the device's memory pool, where there is one. Their drop waits for nothing: a kernel may wait
/// for one that this thread launches next. Freeing other memory makes the driver wait for all work of the context
/// (300 ms of another stream's work, measured; 0.1 ms from the pool).
#[derive(Debug)]
pub struct DeviceBuffer {
    gpu: Gpu,
    address: u64,
    bytes: u64,
    pooled: bool,
}

impl DeviceBuffer {
    /// Takes `bytes` of device memory, not initialised; 0 bytes take nothing.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`].
    pub fn new(gpu: &Gpu, bytes: u64) -> Result<Self, CudaError> {
        Self::take(gpu, bytes, gpu.has_pools())
    }

    /// The same for memory that a backend has until its end, which is not from the pool: attention over a K and V pool
    /// that is takes up to 1 % longer (32 kv heads, H200).
    pub(in crate::backend::cuda) fn lasting(gpu: &Gpu, bytes: u64) -> Result<Self, CudaError> {
        Self::take(gpu, bytes, false)
    }

    fn take(gpu: &Gpu, bytes: u64, pooled: bool) -> Result<Self, CudaError> {
        gpu.bind()?;
        let from = if pooled { from_pool } else { from_device };
        let from = |bytes| if bytes > 0 { from(bytes) } else { Ok(0) };
        let address = match from(bytes) {
            // Memory that was dropped may still be in use.
            Err(CudaError::OutOfMemory { .. }) if work::reclaim(gpu.context()) == Ok(true) => {
                from(bytes)?
            }
            taken => taken?,
        };
        Ok(Self { gpu: gpu.clone(), address, bytes, pooled })
    }

    /// Takes memory for a copy of `items`, and copies them, waiting for it.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`], or the driver's.
    pub fn of<T: bytemuck::Pod>(gpu: &Gpu, items: &[T]) -> Result<Self, CudaError> {
        let mut buffer = Self::new(gpu, size_of_val(items) as u64)?;
        buffer.write(0, items)?;
        Ok(buffer)
    }

    /// Device address of the first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Overwrites from byte `start` on, after everything asked of the device is done, and waits for the copy.
    ///
    /// # Errors
    /// The driver's.
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
        // From pageable memory the call returns when the bytes are staged, not when they have arrived.
        self.gpu.finish()
    }

    /// Reads `len` items from byte `start` on, after everything asked of the device is done.
    ///
    /// # Errors
    /// The driver's; a failure of earlier work shows here.
    ///
    /// # Panics
    /// If there are not so many.
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

    /// Sets every byte.
    ///
    /// # Errors
    /// The driver's.
    pub fn fill(&mut self, byte: u8) -> Result<(), CudaError> {
        self.gpu.finish()?;
        // SAFETY: the range is this buffer.
        let result = unsafe { sys::cuMemsetD8_v2(self.address, byte, self.bytes as usize) };
        check("cuMemsetD8", result)?;
        self.gpu.finish()
    }

    /// Everything from byte `start` on as rows to read, `stride` elements apart (`None`: packed).
    pub fn rows(&self, start: u64, stride: Option<usize>) -> DeviceRows<'_> {
        let bytes = self.bytes.saturating_sub(start);
        let device = Some(self.gpu.ordinal());
        DeviceRows { address: self.address + start, stride, bytes, device, owner: PhantomData }
    }

    /// Everything from byte `start` on as rows to write, `stride` elements apart (`None`: packed).
    pub fn rows_mut(&mut self, start: u64, stride: Option<usize>) -> DeviceRowsMut<'_> {
        let bytes = self.bytes.saturating_sub(start);
        let device = Some(self.gpu.ordinal());
        DeviceRowsMut { address: self.address + start, stride, bytes, device, owner: PhantomData }
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

/// Memory of the bound context's pool, there for every stream.
fn from_pool(bytes: u64) -> Result<u64, CudaError> {
    let (mut address, mut stream) = (0, ptr::null_mut());
    let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
    // SAFETY: `stream` is valid memory for one handle; a context is bound.
    check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut stream, flags) })?;
    // SAFETY: `address` is valid memory for one device address; the stream lives.
    let result = unsafe { sys::cuMemAllocAsync(&mut address, bytes as usize, stream) };
    let taken = check_alloc("cuMemAllocAsync", bytes, result);
    // SAFETY: the stream lives, and nothing but the allocation was asked of it; destroyed once.
    let (reached, _) =
        unsafe { (sys::cuStreamSynchronize(stream), sys::cuStreamDestroy_v2(stream)) };
    taken.and(check("cuStreamSynchronize", reached)).map(|()| address)
}

/// Memory of the bound context that is in no pool.
fn from_device(bytes: u64) -> Result<u64, CudaError> {
    let mut address = 0;
    // SAFETY: `address` is valid memory for one device address; a context is bound.
    let result = unsafe { sys::cuMemAlloc_v2(&mut address, bytes as usize) };
    check_alloc("cuMemAlloc", bytes, result).map(|()| address)
}

/// Rows of q, k or v in device memory: an address, and the distance from row to row.
///
/// Elements are of the pool's dtype. Made by [`DeviceBuffer::rows`], or from the host's own address.
#[derive(Clone, Copy, Debug)]
pub struct DeviceRows<'a> {
    pub(in crate::backend::cuda) address: u64,
    pub(in crate::backend::cuda) stride: Option<usize>,
    pub(in crate::backend::cuda) bytes: u64,
    /// The buffer's device; for its own addresses the host answers.
    pub(in crate::backend::cuda) device: Option<u32>,
    owner: PhantomData<&'a [u8]>,
}

impl DeviceRows<'_> {
    /// Rows at the host's own device address, `stride` elements apart (`None`: packed).
    ///
    /// # Safety
    /// Until the work that reads them is done, as many rows as the step has tokens are readable there by the device,
    /// and nobody writes them out of the stream's order.
    pub unsafe fn from_raw(address: u64, stride: Option<usize>) -> Self {
        Self { address, stride, bytes: u64::MAX, device: None, owner: PhantomData }
    }
}

/// Rows of attention's output, or of its log-sum-exp (packed f32), in device memory.
#[derive(Debug)]
pub struct DeviceRowsMut<'a> {
    pub(in crate::backend::cuda) address: u64,
    pub(in crate::backend::cuda) stride: Option<usize>,
    pub(in crate::backend::cuda) bytes: u64,
    /// The buffer's device; for its own addresses the host answers.
    pub(in crate::backend::cuda) device: Option<u32>,
    owner: PhantomData<&'a mut [u8]>,
}

impl DeviceRowsMut<'_> {
    /// Rows at the host's own device address, `stride` elements apart (`None`: packed).
    ///
    /// # Safety
    /// Until the work that writes them is done, as many rows as the step has tokens are writable there by the device,
    /// and nobody else touches them out of the stream's order.
    pub unsafe fn from_raw(address: u64, stride: Option<usize>) -> Self {
        Self { address, stride, bytes: u64::MAX, device: None, owner: PhantomData }
    }
}

/// Pinned host memory: the device copies to and from it without the driver's help, and kernels reach it too. Dropped,
/// it is freed after what was asked of this crate's streams of its device, which the drop waits for; the driver itself
/// waits for all work of the context. A host whose other devices use it waits for those before it drops the buffer.
#[derive(Debug)]
pub struct PinnedBuffer {
    gpu: Gpu,
    start: *mut u8,
    address: u64,
    bytes: usize,
}

// SAFETY: the memory belongs to this value alone; the driver does not tie it to a thread.
unsafe impl Send for PinnedBuffer {}

impl PinnedBuffer {
    /// Takes `bytes` of pinned host memory, zeroed.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`].
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
        // SAFETY: the range was allocated above and nobody else knows it.
        unsafe { ptr::write_bytes(buffer.start, 0, bytes) };
        Ok(buffer)
    }

    /// The bytes. Whoever copies asynchronously to them waits for the copy's event before reading.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: allocated for `bytes` bytes, initialised in `new`, alive while borrowed.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }

    /// The bytes. Whoever copies asynchronously from them waits for the copy's event before writing.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }

    /// Host address, for the driver's copies.
    pub(in crate::backend::cuda) fn host(&self) -> *mut u8 {
        self.start
    }

    /// Device address of the first byte, for kernels. As with a copy, whoever has one write there waits for it before
    /// reading.
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
