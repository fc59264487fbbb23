//! The GPU: its stream and kernels, and device memory by address.

use cudarc::driver::sys;
use kvarena::backend::cuda::{CudaStream, DeviceBuffer, Gpu, PinnedBuffer};

use super::error::{GpuError, driver};
use super::kernels::Kernels;
use super::libs::open_cublaslt;

/// A GPU, the stream of all its work, and the kernels.
#[derive(Debug)]
pub struct Device {
    /// `kvarena`'s handle: the device's primary context.
    pub gpu: Gpu,
    /// The stream of all launches.
    pub stream: CudaStream,
    /// The host's own kernels.
    pub kernels: Kernels,
}

impl Device {
    /// Opens the first GPU.
    ///
    /// # Errors
    /// See [`Device::open_number`].
    pub fn open() -> Result<Self, GpuError> {
        Self::open_number(0)
    }

    /// Opens a GPU and makes its context current in this thread.
    ///
    /// # Errors
    /// No driver, no such device, a driver or device that is too old, no cublasLt, or kernels that the driver rejects.
    pub fn open_number(number: u32) -> Result<Self, GpuError> {
        let gpu = Gpu::new(number)?;
        gpu.bind()?;
        open_cublaslt()?;
        let stream = CudaStream::new(&gpu)?;
        let kernels = Kernels::open(&gpu)?;
        let device = Self { gpu, stream, kernels };
        device.check_context()?;
        Ok(device)
    }

    /// Checks that `kvarena` has made a context current, because the calls of `cudarc` use the current context.
    fn check_context(&self) -> Result<(), GpuError> {
        self.gpu.free_memory()?;
        let mut current = std::ptr::null_mut();
        // SAFETY: `current` is valid memory for one handle.
        driver("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&mut current) })?;
        assert!(!current.is_null(), "kvarena has made a context current");
        Ok(())
    }

    /// Returns the raw stream.
    pub fn raw(&self) -> u64 {
        self.stream.raw()
    }

    /// Allocates zeroed memory of at least `bytes` bytes.
    pub fn zeros(&self, bytes: usize) -> Result<DeviceBuffer, GpuError> {
        let mut buffer = DeviceBuffer::new(&self.gpu, bytes.next_multiple_of(256) as u64)?;
        buffer.fill(0)?;
        Ok(buffer)
    }

    /// Copies from the device to pinned memory in the stream's order, without waiting.
    ///
    /// # Panics
    /// If the target is too short.
    ///
    /// # Safety
    /// Until the copy is done the source stays readable, and nothing else accesses that part of the target.
    pub unsafe fn copy_to_host(
        &self,
        target: &mut PinnedBuffer,
        at: usize,
        source: u64,
        bytes: usize,
    ) -> Result<(), GpuError> {
        let target = target.as_mut_slice()[at..at + bytes].as_mut_ptr().cast();
        // SAFETY: the target is long enough (sliced above); the caller guarantees the rest.
        let result = unsafe {
            let stream = self.raw() as usize as sys::CUstream;
            sys::cuMemcpyDtoHAsync_v2(target, source, bytes, stream)
        };
        driver("cuMemcpyDtoHAsync", result)
    }
}
