//! Kernel launches: plain, or by programmatic dependent launch (PDL) where the kernel and the device know how.
//!
//! By PDL a kernel is set up while the one before it on the stream ends, and waits by itself until that one is done
//! and its writes are seen: 0.3 us less a launch, measured in graphs. Before it waits it reads nothing, or plan and
//! page tables only. No kernel writes those but `load_plan`, after which the first launch of such a kernel is in order
//! ([`Start`]); whatever follows it by PDL starts later than it.
//!
//! Drivers below CUDA 12.3, whose captures do not know such launches, get plain ones.
//!
//! Not here: which kernel (`kernels.rs`), with what (`params.rs`), the instructions that make it wait (`pdl.rs`).

use std::ffi::c_void;
use std::ptr::{from_mut, from_ref, null_mut};
use std::sync::OnceLock;

use super::error::{CudaError, check};
use super::gpu::Gpu;
use super::kernels::{Function, Kernel};
use super::raw::{RawStream, is_capturing, raw};
use super::sys;

/// `CUlaunchConfig`, of CUDA 11.8 and newer.
#[repr(C)]
struct LaunchConfig {
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: sys::CUstream,
    attributes: *mut LaunchAttribute,
    attribute_count: u32,
}

/// `CUlaunchAttribute`: a number, and 64 bytes of which this one uses four. The driver's union has pointers in it.
#[repr(C, align(8))]
struct LaunchAttribute {
    id: u32,
    padding: u32,
    value: [u32; 16],
}

const _: () = assert!(size_of::<LaunchConfig>() == 56 && size_of::<LaunchAttribute>() == 72);

/// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`.
const PROGRAMMATIC: u32 = 6;

type LaunchEx = unsafe extern "C" fn(
    *const LaunchConfig,
    sys::CUfunction,
    *mut *mut c_void,
    *mut *mut c_void,
) -> u32;

/// `cuLaunchKernelEx`, which `cust::sys` does not declare.
fn launch_ex() -> Result<LaunchEx, CudaError> {
    static FOUND: OnceLock<Option<LaunchEx>> = OnceLock::new();
    let find = || {
        let mut found: *mut c_void = null_mut();
        // SAFETY: the name ends with a zero, and `found` is a valid place for a pointer.
        let result = unsafe {
            sys::cuGetProcAddress(c"cuLaunchKernelEx".as_ptr(), from_mut(&mut found), 11_080, 0)
        };
        if result != 0 || found.is_null() {
            return None;
        }
        // SAFETY: the driver says that this is cuLaunchKernelEx as of CUDA 11.8, which has this signature.
        Some(unsafe { std::mem::transmute::<*mut c_void, LaunchEx>(found) })
    };
    // CUDA_ERROR_NOT_FOUND.
    FOUND.get_or_init(find).ok_or(CudaError::Driver { call: "cuLaunchKernelEx", code: 500 })
}

/// When a kernel may start.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Start {
    /// When all work before it on the stream is done.
    InOrder,
    /// Before that, by PDL, where kernel and device know how; else in order.
    Pdl,
}

impl Start {
    /// When a kernel may start that can be the first one after `load_plan`. A graph is launched in order as a whole, so
    /// in a capture it may be by PDL.
    pub fn first(self, capturing: bool) -> Self {
        if capturing { Self::Pdl } else { self }
    }

    /// Such a kernel was launched: those behind it start later, and so see the plan. A capture launches nothing.
    pub fn launched(&mut self, capturing: bool) {
        if !capturing {
            *self = Self::Pdl;
        }
    }
}

impl Gpu {
    /// The kernel's handle. The context is bound.
    pub(super) fn function<P>(&self, kernel: &Kernel<P>) -> Result<Function, CudaError> {
        self.loaded().function(kernel, self.capability())
    }

    /// Loads a kernel now rather than at its first launch.
    pub(super) fn load<P>(&self, kernel: &Kernel<P>) -> Result<(), CudaError> {
        self.bind()?;
        self.function(kernel).map(|_| ())
    }

    /// Blocks of `threads` threads that one multiprocessor holds at a time.
    pub(super) fn resident<P>(&self, kernel: &Kernel<P>, threads: u32) -> Result<u32, CudaError> {
        self.bind()?;
        let function = self.function(kernel)?.handle;
        let mut blocks = 0;
        // SAFETY: `blocks` is valid memory for one i32; the function is loaded.
        let result = unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &mut blocks,
                function,
                threads as i32,
                kernel.shared as usize,
            )
        };
        check("cuOccupancyMaxActiveBlocksPerMultiprocessor", result)?;
        Ok(blocks as u32)
    }

    /// Launches a kernel; nothing is waited for. The context is bound.
    ///
    /// # Errors
    /// [`CudaError::NotPrepared`] for a kernel that is not loaded while the stream is captured, or the driver's.
    ///
    /// # Safety
    /// The addresses in `params` are valid for what the kernel does with them, until it is done.
    pub(super) unsafe fn launch<P>(
        &self,
        kernel: &Kernel<P>,
        grid: (u32, u32),
        block: (u32, u32),
        stream: RawStream,
        params: &P,
        start: Start,
    ) -> Result<(), CudaError> {
        let loaded = self.loaded().find(kernel);
        let function = match loaded {
            Some(function) => function,
            // No capture loads a kernel.
            None if is_capturing(stream)? => return Err(CudaError::NotPrepared),
            None => self.function(kernel)?,
        };
        let pdl = function.pdl && start == Start::Pdl && self.supports_pdl();
        let mut attribute = LaunchAttribute { id: PROGRAMMATIC, padding: 0, value: [0; 16] };
        attribute.value[0] = 1;
        let config = LaunchConfig {
            grid: [grid.0, grid.1, 1],
            block: [block.0, block.1, 1],
            shared: kernel.shared,
            stream: raw(stream),
            attributes: &mut attribute,
            attribute_count: u32::from(pdl),
        };
        let mut arguments = [from_ref(params).cast_mut().cast::<c_void>()];
        let launch = launch_ex()?;
        // SAFETY: the config and its attribute outlive the call. The function takes one `P` by value (held by
        // `Kernel<P>` and the layout asserts), which the driver copies before it returns; the caller answers for the
        // addresses inside.
        let result =
            unsafe { launch(&config, function.handle, arguments.as_mut_ptr(), null_mut()) };
        check("cuLaunchKernelEx", result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_kernel_says_why() {
        let Ok(gpu) = Gpu::new(0) else { return println!("skipped: no device") };
        let kernel = Kernel::<()>::new("nonsense", ".version 8.0\n.target sm_80\nnonsense\n", 0);
        let error = gpu.load(&kernel).expect_err("that is no PTX");
        let CudaError::Ptx { kernel: "nonsense", code: 218, log } = &error else {
            panic!("{error:?}")
        };
        assert!(log.contains("nonsense") || log.contains("line 3"), "{log}");
        assert!(error.to_string().contains(&**log));
    }
}
