//! A device and its primary context, which other CUDA users of the process share (libtorch, cudarc).
//!
//! The current context is a property of a thread, so each call binds the context first.

use std::ptr::null_mut;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::raw::RawContext;
use super::sys::{self, CUdevice_attribute as Attribute};
use super::work;
use crate::backend::cuda::error::{CudaError, check};
use crate::backend::cuda::kernels::Compiled;

/// CUDA version of the kernels' PTX (ISA 8.0), for drivers from 525 on. Tested with driver 580.
const CUDA_WANTED: i32 = 12_000;
/// The first CUDA version whose captures support programmatic dependent launches.
const PDL_WANTED: i32 = 12_030;

/// A cheap handle to a device and its retained primary context. Any thread may use it.
///
/// Every call of the driver leaves this context current in the calling thread. A host that uses another device in the
/// same thread must select that device again (`cudaSetDevice`). Dropping the last handle waits for the device.
#[derive(Clone, Debug)]
pub struct Gpu {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    // This field precedes the context, because modules must be unloaded before the context is released.
    compiled: Mutex<Compiled>,
    context: Context,
    ordinal: u32,
    capability: u32,
    multiprocessors: u32,
    pools: bool,
}

#[derive(Debug)]
struct Context {
    device: sys::CUdevice,
    handle: u64,
}

impl Context {
    fn retain(device: sys::CUdevice) -> Result<Self, CudaError> {
        let mut handle = null_mut();
        // SAFETY: `handle` is valid memory for one handle; the device was found.
        let result = unsafe { sys::cuDevicePrimaryCtxRetain(&mut handle, device) };
        check("cuDevicePrimaryCtxRetain", result)?;
        Ok(Self { device, handle: handle as usize as u64 })
    }

    fn raw(&self) -> sys::CUcontext {
        self.handle as usize as sys::CUcontext
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once, released once.
        unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

impl Gpu {
    /// Opens device `ordinal`.
    ///
    /// # Errors
    /// [`CudaError::NoDriver`], [`CudaError::NoDevice`], [`CudaError::DriverTooOld`] or [`CudaError::DeviceTooOld`].
    /// After each of these errors, the program can use the CPU backend instead. Also other errors of the driver.
    pub fn new(ordinal: u32) -> Result<Self, CudaError> {
        // cuInit returns 100 if the driver finds no device.
        let no_device = |error| match error {
            CudaError::Driver { code: 100 | 101, .. } => CudaError::NoDevice { ordinal },
            error => error,
        };
        // SAFETY: cuInit takes no pointers and may be called more than once.
        check("cuInit", unsafe { sys::cuInit(0) }).map_err(no_device)?;
        let mut version = 0;
        // SAFETY: `version` is valid memory for one i32.
        check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&mut version) })?;
        if version < CUDA_WANTED {
            return Err(CudaError::DriverTooOld { version, wanted: CUDA_WANTED });
        }
        let missing = |_| CudaError::NoDevice { ordinal };
        let number = i32::try_from(ordinal).map_err(|_| CudaError::NoDevice { ordinal })?;
        let mut device = 0;
        // SAFETY: `device` is valid memory for one device.
        check("cuDeviceGet", unsafe { sys::cuDeviceGet(&mut device, number) }).map_err(missing)?;
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: `value` is valid memory for one i32; the device was just found.
            let result = unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) };
            check("cuDeviceGetAttribute", result).map_err(missing).map(|()| value as u32)
        };
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let capability = 10 * major + minor;
        if capability < 80 {
            return Err(CudaError::DeviceTooOld { capability });
        }
        let context = Context::retain(device)?;
        let compiled = Mutex::new(Compiled::new(version >= PDL_WANTED));
        let pools = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)? != 0;
        let shared = Shared { compiled, context, ordinal, capability, multiprocessors, pools };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Returns the device's ordinal.
    pub fn ordinal(&self) -> u32 {
        self.shared.ordinal
    }

    /// Returns the compute capability, as 10 * major + minor.
    pub fn capability(&self) -> u32 {
        self.shared.capability
    }

    /// Returns the number of multiprocessors.
    pub fn multiprocessors(&self) -> u32 {
        self.shared.multiprocessors
    }

    /// Returns the free bytes of device memory.
    ///
    /// `Capacity::Bytes(gpu.free_memory()?.saturating_sub(reserve))` sizes a pool; page tables, plans and partial sums
    /// use the reserve. Unless a stream is being captured, the call first frees dropped memory. To do so, it waits for
    /// the work that may use that memory.
    pub fn free_memory(&self) -> Result<u64, CudaError> {
        self.bind()?;
        let _ = work::reclaim(self.context());
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are valid memory for one usize each; a context is bound.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok(free as u64)
    }

    /// Rejects objects of another device. For `None`, the host guarantees the device.
    pub(in crate::backend::cuda) fn check_same(&self, ordinal: Option<u32>) -> Result<(), CudaError> {
        match ordinal {
            Some(ordinal) if ordinal != self.ordinal() => Err(CudaError::OtherDevice { ordinal }),
            _ => Ok(()),
        }
    }

    /// Returns whether the device supports memory pools. Their memory is freed without a wait.
    pub(in crate::backend::cuda) fn has_pools(&self) -> bool {
        self.shared.pools
    }

    pub(in crate::backend::cuda) fn context(&self) -> RawContext {
        self.shared.context.handle
    }

    /// Makes the device's primary context current in this thread, for the host's own calls of the driver.
    pub fn bind(&self) -> Result<(), CudaError> {
        // SAFETY: the context is retained while `self` lives.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.shared.context.raw()) })
    }

    /// Waits for all submitted work of the context, on every stream, including destroyed ones.
    pub(in crate::backend::cuda) fn finish(&self) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: takes no pointers; a context is bound.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
    }

    /// Returns the kernels compiled so far.
    pub(in crate::backend::cuda) fn compiled(&self) -> MutexGuard<'_, Compiled> {
        // A panic leaves no partial change of the list.
        self.shared.compiled.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // The context is released later, when the fields are dropped. Unloading modules requires a bound context and
        // finished kernels.
        work::end(self.context.handle);
    }
}
