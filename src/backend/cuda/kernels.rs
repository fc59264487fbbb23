//! The kernels: generated PTX that is part of the crate. The driver compiles a file when one of its entries is first
//! needed; attention has a file for each entry, so that a pool waits for no kernels but its own.
//!
//! A [`Kernel`] ties an entry to the struct it takes, so a launch with the wrong parameters does not compile.
//! Not here: what they compute (`ptx/*.cu`), what they are given (`params.rs`), how they are launched (`launch.rs`).

use std::ffi::{CString, c_void};
use std::marker::PhantomData;
use std::ptr::null_mut;

use super::error::{CudaError, check};
use super::params::{
    AttendParams, CompactSlotsParams, CopyPagesParams, LoadPlanParams, SelectParams,
    StoreCacheParams, StoreFp8Params, StoreLabelsParams, StoreLatentFp8Params,
};
use super::pdl::{uses_pdl, with_pdl};
use super::sys;

/// One entry of one PTX file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kernel<P> {
    pub(super) name: &'static str,
    pub(super) ptx: &'static str,
    /// Bytes of dynamic shared memory.
    pub(super) shared: u32,
    params: PhantomData<fn(P)>,
}

impl<P> Kernel<P> {
    /// Entry `name` of `ptx`, which takes `P` by value and `shared` bytes of dynamic shared memory.
    pub(super) const fn new(name: &'static str, ptx: &'static str, shared: u32) -> Self {
        Self { name, ptx, shared, params: PhantomData }
    }
}

/// An attention kernel and the threads of its block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attention<P = AttendParams> {
    pub(super) kernel: Kernel<P>,
    pub(super) threads: u32,
}

pub(super) const STORE_CACHE: Kernel<StoreCacheParams> =
    Kernel::new("store_cache", include_str!("../../../ptx/store_cache.ptx"), 0);
pub(super) const STORE_CACHE_STREAMING: Kernel<StoreCacheParams> =
    Kernel::new("store_cache_streaming", include_str!("../../../ptx/store_cache.ptx"), 0);
pub(super) const STORE_CACHE_ANY: Kernel<StoreCacheParams> =
    Kernel::new("store_cache_any", include_str!("../../../ptx/store_cache.ptx"), 0);
pub(super) const STORE_FP8: Kernel<StoreFp8Params> =
    Kernel::new("store_cache_fp8", include_str!("../../../ptx/store_cache_fp8.ptx"), 0);
pub(super) const STORE_FP8_ANY: Kernel<StoreFp8Params> =
    Kernel::new("store_cache_fp8_any", include_str!("../../../ptx/store_cache_fp8.ptx"), 0);
pub(super) const STORE_LATENT_FP8: Kernel<StoreLatentFp8Params> =
    Kernel::new("store_latent_fp8", include_str!("../../../ptx/store_latent_fp8.ptx"), 0);
pub(super) const STORE_LABELS: Kernel<StoreLabelsParams> =
    Kernel::new("store_labels", include_str!("../../../ptx/store_labels.ptx"), 0);
pub(super) const SCORE_LABELS_BF16: Kernel<SelectParams> =
    Kernel::new("score_labels_bf16", include_str!("../../../ptx/score_labels_bf16.ptx"), 70_656);
pub(super) const SCORE_LABELS_F16: Kernel<SelectParams> =
    Kernel::new("score_labels_f16", include_str!("../../../ptx/score_labels_f16.ptx"), 70_656);
pub(super) const SELECT_TOP: Kernel<SelectParams> =
    Kernel::new("select_top", include_str!("../../../ptx/select_top.ptx"), 66_816);
pub(super) const RESOLVE_SELECTION: Kernel<SelectParams> =
    Kernel::new("resolve_selection", include_str!("../../../ptx/resolve_selection.ptx"), 0);
pub(super) const COPY_PAGES: Kernel<CopyPagesParams> =
    Kernel::new("copy_pages", include_str!("../../../ptx/copy_pages.ptx"), 0);
pub(super) const COMPACT_SLOTS: Kernel<CompactSlotsParams> =
    Kernel::new("compact_slots", include_str!("../../../ptx/compact_slots.ptx"), 0);
pub(super) const LOAD_PLAN: Kernel<LoadPlanParams> =
    Kernel::new("load_plan", include_str!("../../../ptx/load_plan.ptx"), 0);

/// Most bytes of a compiler's log that are kept.
const LOG_BYTES: usize = 4096;

/// The modules and kernels of one context. They stay until it is released, so graphs may keep using them.
#[derive(Debug, Default)]
pub(super) struct Loaded {
    modules: Vec<LoadedModule>,
    kernels: Vec<LoadedKernel>,
}

/// A PTX file, with all of its entries.
#[derive(Debug)]
struct LoadedModule {
    ptx: &'static str,
    module: u64,
    pdl: bool,
}

impl LoadedModule {
    /// Has the driver compile the PTX; gives its code and its compiler's words where it refuses. The context is bound.
    fn new(ptx: &'static str, capability: u32) -> Result<Self, (u32, Box<str>)> {
        let text = with_pdl(ptx, capability);
        let pdl = uses_pdl(&text);
        let text = CString::new(text.into_owned()).expect("PTX is text");
        let (mut module, mut log) = (null_mut(), vec![0_u8; LOG_BYTES]);
        let mut options = [
            sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
            sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        ];
        // Of numbers the driver takes the value for the pointer.
        let mut values = [log.as_mut_ptr().cast::<c_void>(), LOG_BYTES as *mut c_void];
        let count = options.len() as u32;
        // SAFETY: `module` is valid memory for one handle, the text ends with a zero, and there are as many options as
        // values: the log's memory, which lives, and its size.
        let result = unsafe {
            let (image, options) = (text.as_ptr().cast(), options.as_mut_ptr());
            sys::cuModuleLoadDataEx(&mut module, image, count, options, values.as_mut_ptr())
        };
        if result == 0 {
            return Ok(Self { ptx, module: module as usize as u64, pdl });
        }
        let end = log.iter().position(|&byte| byte == 0).unwrap_or(log.len());
        Err((result, String::from_utf8_lossy(&log[..end]).trim().into()))
    }

    /// An entry's handle, or the driver's code.
    fn entry(&self, name: &str) -> Result<sys::CUfunction, u32> {
        let name = CString::new(name).expect("a name is text");
        let mut function = null_mut();
        // SAFETY: `function` is valid memory for one handle, the module is loaded, the name ends with a zero.
        let result = unsafe {
            let module = self.module as usize as sys::CUmodule;
            sys::cuModuleGetFunction(&mut function, module, name.as_ptr())
        };
        if result == 0 { Ok(function) } else { Err(result) }
    }
}

impl Drop for LoadedModule {
    fn drop(&mut self) {
        // SAFETY: loaded by us, unloaded once; `Gpu` binds the context and waits for the device before.
        unsafe { sys::cuModuleUnload(self.module as usize as sys::CUmodule) };
    }
}

#[derive(Debug)]
struct LoadedKernel {
    name: &'static str,
    function: u64,
    pdl: bool,
}

/// A loaded kernel's handle.
#[derive(Clone, Copy, Debug)]
pub(super) struct Function {
    pub handle: sys::CUfunction,
    /// Whether it waits for the work before it by itself (`launch.rs`).
    pub pdl: bool,
}

impl Loaded {
    /// The entry, if it is loaded.
    pub(super) fn find<P>(&self, kernel: &Kernel<P>) -> Option<Function> {
        let loaded = self.kernels.iter().find(|loaded| loaded.name == kernel.name)?;
        Some(Function { handle: loaded.function as usize as sys::CUfunction, pdl: loaded.pdl })
    }

    /// The entry, its module loaded when first asked for. The context is bound.
    pub(super) fn function<P>(
        &mut self,
        kernel: &Kernel<P>,
        capability: u32,
    ) -> Result<Function, CudaError> {
        if let Some(function) = self.find(kernel) {
            return Ok(function);
        }
        let Kernel { name, ptx, shared, .. } = *kernel;
        let refused = |(code, log)| CudaError::Ptx { kernel: name, code, log };
        let index = match self.modules.iter().position(|module| module.ptx == ptx) {
            Some(index) => index,
            None => {
                self.modules.push(LoadedModule::new(ptx, capability).map_err(refused)?);
                self.modules.len() - 1
            }
        };
        let module = &self.modules[index];
        let handle = module.entry(name).map_err(|code| refused((code, "".into())))?;
        let pdl = module.pdl;
        // With the static part, less than 48 KiB of dynamic memory may be too much without being asked for.
        if shared > 0 {
            let attribute =
                sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function was just found in a loaded module.
            let result = unsafe { sys::cuFuncSetAttribute(handle, attribute, shared as i32) };
            check("cuFuncSetAttribute", result)?;
        }
        self.kernels.push(LoadedKernel { name, function: handle as usize as u64, pdl });
        Ok(Function { handle, pdl })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const fn parts<P>(kernel: &Kernel<P>) -> (&'static str, &'static str, u32) {
        (kernel.name, kernel.ptx, kernel.shared)
    }

    /// The kernels that are no attention.
    pub(in super::super) const MOVES: [(&str, &str, u32); 14] = [
        parts(&STORE_CACHE),
        parts(&STORE_CACHE_STREAMING),
        parts(&STORE_CACHE_ANY),
        parts(&STORE_FP8),
        parts(&STORE_FP8_ANY),
        parts(&STORE_LATENT_FP8),
        parts(&STORE_LABELS),
        parts(&SCORE_LABELS_BF16),
        parts(&SCORE_LABELS_F16),
        parts(&SELECT_TOP),
        parts(&RESOLVE_SELECTION),
        parts(&COPY_PAGES),
        parts(&COMPACT_SLOTS),
        parts(&LOAD_PLAN),
    ];
}
