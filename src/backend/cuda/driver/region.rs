//! Device memory that the host allocated.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use super::gpu::Gpu;
use super::sys;
use super::work::{self, Dropped};
use crate::backend::cuda::error::{CudaError, GivenError, check};

/// The driver's `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`.
const DEVICE_ORDINAL: u32 = 9;
/// The driver's `CUDA_ERROR_INVALID_VALUE`, its result for an address that it did not allocate.
const UNKNOWN_ADDRESS: u32 = 1;

/// Device memory that the host allocated, and an owner that keeps it allocated. Clones share the owner.
///
/// The drop of the last clone waits for all work that was submitted to this crate's streams of the device, and then
/// drops the owner. While such a stream is captured, the drop does not wait; a later call of this crate drops the
/// owner.
#[derive(Clone, Debug)]
pub struct DeviceRegion {
    shared: Arc<Shared>,
}

struct Shared {
    gpu: Gpu,
    address: u64,
    bytes: u64,
    owner: Arc<dyn Any + Send + Sync>,
}

impl DeviceRegion {
    /// Describes `bytes` bytes of device memory at `address`.
    ///
    /// # Errors
    /// [`GivenError::Empty`] for the address 0 or no bytes; [`GivenError::Wraps`] if the end exceeds 64 bits;
    /// [`GivenError::NotAllocated`] if the driver does not know the first or the last byte.
    /// [`CudaError::OtherDevice`]. The driver's errors.
    ///
    /// # Safety
    /// Until `owner` is dropped, the memory stays allocated and kernels of the device can read and write it.
    ///
    /// While a backend uses the region as its pool, the host writes a page only if no sequence and no cached prefix
    /// uses it, and it reads only K and V of slots that no unfinished step stores. The host orders both after the work
    /// of the backend's stream, and that stream after both. The backend saves and loads pages on streams of its own, so
    /// the host writes no page with an unfinished save or load ([`Backend::moved`](crate::Backend::moved)).
    pub unsafe fn from_raw(
        gpu: &Gpu,
        address: u64,
        bytes: u64,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self, CudaError> {
        if address == 0 || bytes == 0 {
            return Err(GivenError::Empty { address, bytes }.into());
        }
        if address.checked_add(bytes).is_none() {
            return Err(GivenError::Wraps { address, bytes }.into());
        }
        check_allocated(gpu, address, bytes)?;
        Ok(Self { shared: Arc::new(Shared { gpu: gpu.clone(), address, bytes, owner }) })
    }

    /// Checks again that the memory belongs to this device and is allocated.
    pub(in crate::backend::cuda) fn check(&self, gpu: &Gpu) -> Result<(), CudaError> {
        gpu.check_same(Some(self.shared.gpu.ordinal()))?;
        check_allocated(gpu, self.address(), self.bytes())
    }

    /// Returns the address of the first byte.
    pub fn address(&self) -> u64 {
        self.shared.address
    }

    /// Returns the number of bytes.
    pub fn bytes(&self) -> u64 {
        self.shared.bytes
    }
}

/// Checks that the first and the last byte are memory of this device. The driver cannot detect memory that was freed
/// and allocated again.
fn check_allocated(gpu: &Gpu, address: u64, bytes: u64) -> Result<(), CudaError> {
    gpu.bind()?;
    for address in [address, address + (bytes - 1)] {
        let mut ordinal = 0_i32;
        // SAFETY: `ordinal` is valid memory for the attribute, an i32.
        let result = unsafe { sys::cuPointerGetAttribute((&raw mut ordinal).cast(), DEVICE_ORDINAL, address) };
        if result == UNKNOWN_ADDRESS {
            return Err(GivenError::NotAllocated { address }.into());
        }
        check("cuPointerGetAttribute", result)?;
        gpu.check_same(Some(ordinal as u32))?;
    }
    Ok(())
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { gpu, address, bytes, .. } = self;
        write!(f, "{bytes} bytes at {address:#x} of device {}", gpu.ordinal())
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            work::free(self.gpu.context(), Dropped::Given(self.owner.clone()));
        }
    }
}
