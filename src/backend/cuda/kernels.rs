//! The kernels: generated PTX compiled into the crate, loaded when first launched, one by one.
//!
//! A [`Kernel`] ties an entry to the struct it takes, so a launch with the wrong parameters does not compile.
//! Not here: what they compute (`ptx/*.cu`), what they are given (`params.rs`).

use std::ffi::c_void;
use std::marker::PhantomData;

use cust::module::Module;
use cust::sys;

use super::error::{CudaError, check};
use super::gpu::Gpu;
use super::params::{CopyPagesParams, LoadPlanParams, StoreCacheParams};
use super::stream::{RawStream, raw};

/// One entry of one PTX file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kernel<P> {
    name: &'static str,
    ptx: &'static str,
    /// Bytes of dynamic shared memory.
    shared: u32,
    params: PhantomData<fn(P)>,
}

impl<P> Kernel<P> {
    /// Entry `name` of `ptx`, which takes `P` by value and `shared` bytes of dynamic shared memory.
    pub(super) const fn new(name: &'static str, ptx: &'static str, shared: u32) -> Self {
        Self { name, ptx, shared, params: PhantomData }
    }
}

pub(super) const STORE_CACHE: Kernel<StoreCacheParams> =
    Kernel::new("store_cache", include_str!("../../../ptx/store_cache.ptx"), 0);
pub(super) const STORE_CACHE_STREAMING: Kernel<StoreCacheParams> =
    Kernel::new("store_cache_streaming", include_str!("../../../ptx/store_cache.ptx"), 0);
pub(super) const STORE_CACHE_ANY: Kernel<StoreCacheParams> =
    Kernel::new("store_cache_any", include_str!("../../../ptx/store_cache.ptx"), 0);
pub(super) const COPY_PAGES: Kernel<CopyPagesParams> =
    Kernel::new("copy_pages", include_str!("../../../ptx/copy_pages.ptx"), 0);
pub(super) const LOAD_PLAN: Kernel<LoadPlanParams> =
    Kernel::new("load_plan", include_str!("../../../ptx/load_plan.ptx"), 0);

/// What is loaded into one context. Modules stay until the context is given up, so graphs may keep using them.
#[derive(Debug, Default)]
pub(super) struct Loaded {
    kernels: Vec<LoadedKernel>,
}

#[derive(Debug)]
struct LoadedKernel {
    name: &'static str,
    function: u64,
    _module: Module,
}

impl Loaded {
    /// The entry's handle, loading its module when first asked. The context is bound.
    fn function(&mut self, name: &'static str, ptx: &str, shared: u32) -> Result<u64, CudaError> {
        if let Some(kernel) = self.kernels.iter().find(|kernel| kernel.name == name) {
            return Ok(kernel.function);
        }
        let refused = |error| CudaError::Ptx { kernel: name, code: error as u32 };
        let module = Module::from_ptx(ptx, &[]).map_err(refused)?;
        let function = module.get_function(name).map_err(refused)?.to_raw();
        // With the static part, less than 48 KiB of dynamic memory may be too much without being asked for.
        if shared > 0 {
            let attribute =
                sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function was just found in a loaded module.
            let result = unsafe { sys::cuFuncSetAttribute(function, attribute, shared as i32) };
            check("cuFuncSetAttribute", result)?;
        }
        let function = function as usize as u64;
        self.kernels.push(LoadedKernel { name, function, _module: module });
        Ok(function)
    }
}

impl Gpu {
    fn function<P>(&self, kernel: &Kernel<P>) -> Result<sys::CUfunction, CudaError> {
        let function = self.loaded().function(kernel.name, kernel.ptx, kernel.shared)?;
        Ok(function as usize as sys::CUfunction)
    }

    /// Loads a kernel now rather than at its first launch.
    pub(super) fn load<P>(&self, kernel: &Kernel<P>) -> Result<(), CudaError> {
        self.bind()?;
        self.function(kernel).map(|_| ())
    }

    /// Blocks of `threads` threads that one multiprocessor holds at a time.
    pub(super) fn resident<P>(&self, kernel: &Kernel<P>, threads: u32) -> Result<u32, CudaError> {
        self.bind()?;
        let function = self.function(kernel)?;
        let mut blocks = 0;
        // SAFETY: `blocks` is a valid place for one i32; the function is loaded.
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
    /// # Safety
    /// The addresses in `params` are valid for what the kernel does with them, until it is done.
    pub(super) unsafe fn launch<P>(
        &self,
        kernel: &Kernel<P>,
        grid: (u32, u32),
        block: (u32, u32),
        stream: RawStream,
        params: &P,
    ) -> Result<(), CudaError> {
        let function = self.function(kernel)?;
        let mut arguments = [std::ptr::from_ref(params).cast_mut().cast::<c_void>()];
        // SAFETY: the function takes one `P` by value (held by `Kernel<P>` and the layout asserts), which the driver
        // copies before it returns; the caller answers for the addresses inside.
        let result = unsafe {
            sys::cuLaunchKernel(
                function,
                grid.0,
                grid.1,
                1,
                block.0,
                block.1,
                1,
                kernel.shared,
                raw(stream),
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        check("cuLaunchKernel", result)
    }
}
