//! What one context has loaded: modules, kernels, and the texts of archives while several of their kernels are loaded.
//!
//! Not here: how kernels are launched (`driver/launch.rs`).

use std::ffi::{CString, c_void};
use std::ptr::null_mut;

use super::archive::{Archive, find};
use super::kernel::Kernel;
use super::marks::with_marks;
use crate::backend::cuda::driver::sys;
use crate::backend::cuda::error::{CudaError, check};

/// Most bytes of a compiler's log that are kept.
const LOG_BYTES: usize = 4096;

/// The modules and kernels of one context. They stay until it is released, so graphs may keep using them.
#[derive(Debug, Default)]
pub(in super::super) struct Loaded {
    modules: Vec<LoadedModule>,
    kernels: Vec<(&'static Kernel, Function)>,
    /// Decompressed archives, kept while `keepers` is above 0.
    texts: Vec<(&'static Archive, String)>,
    keepers: usize,
}

/// A PTX text, with all of its entries.
#[derive(Debug)]
struct LoadedModule {
    text: &'static str,
    archive: &'static Archive,
    module: u64,
}

impl LoadedModule {
    /// Has the driver compile the PTX of a kernel; returns its code and its compiler's log if it refuses. The context
    /// is bound.
    fn new(kernel: &'static Kernel, ptx: &str, capability: u32) -> Result<Self, (u32, Box<str>)> {
        let ptx = with_marks(ptx, capability);
        let ptx = CString::new(ptx.into_owned()).map_err(|_| (0, "a zero in the PTX".into()))?;
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
            let (image, options) = (ptx.as_ptr().cast(), options.as_mut_ptr());
            sys::cuModuleLoadDataEx(&mut module, image, count, options, values.as_mut_ptr())
        };
        if result == 0 {
            let (text, archive) = (kernel.text(), kernel.archive());
            return Ok(Self { text, archive, module: module as usize as u64 });
        }
        let end = log.iter().position(|&byte| byte == 0).unwrap_or(log.len());
        Err((result, String::from_utf8_lossy(&log[..end]).trim().into()))
    }

    fn is_of(&self, kernel: &Kernel) -> bool {
        self.text == kernel.text() && std::ptr::eq(self.archive, kernel.archive())
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

/// A loaded kernel's handle, which is valid while its [`Gpu`](crate::backend::cuda::Gpu) lives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Function {
    handle: u64,
    pdl: bool,
}

impl Function {
    /// The `CUfunction` as an integer.
    pub fn raw(self) -> u64 {
        self.handle
    }

    /// Whether it waits by itself for the work before it (programmatic dependent launch).
    pub fn waits(self) -> bool {
        self.pdl
    }

    pub(in super::super) fn handle(self) -> sys::CUfunction {
        self.handle as usize as sys::CUfunction
    }
}

impl Loaded {
    /// The kernel's handle, if it is loaded.
    pub(in super::super) fn find(&self, kernel: &'static Kernel) -> Option<Function> {
        self.kernels.iter().find(|(k, _)| std::ptr::eq(*k, kernel)).map(|(_, function)| *function)
    }

    /// The kernel's handle, its module loaded when first asked for. The context is bound.
    pub(in super::super) fn function(
        &mut self,
        kernel: &'static Kernel,
        capability: u32,
    ) -> Result<Function, CudaError> {
        if let Some(function) = self.find(kernel) {
            return Ok(function);
        }
        let name = kernel.name();
        let refused = |(code, log)| CudaError::Ptx { kernel: name, capability, code, log };
        let index = match self.modules.iter().position(|module| module.is_of(kernel)) {
            Some(index) => index,
            None => {
                let ptx = self.ptx(kernel, capability);
                let module = ptx.map(|ptx| LoadedModule::new(kernel, ptx, capability));
                self.forget();
                self.modules.push(module?.map_err(refused)?);
                self.modules.len() - 1
            }
        };
        let handle = self.modules[index].entry(name).map_err(|code| refused((code, "".into())))?;
        // With the static part, less than 48 KiB of dynamic memory may be too much without being asked for.
        if kernel.shared() > 0 {
            let attribute =
                sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function was just found in a loaded module.
            let result =
                unsafe { sys::cuFuncSetAttribute(handle, attribute, kernel.shared() as i32) };
            check("cuFuncSetAttribute", result)?;
        }
        let function = Function { handle: handle as usize as u64, pdl: kernel.waits(capability) };
        self.kernels.push((kernel, function));
        Ok(function)
    }

    /// A kernel's PTX, its archive decompressed unless it is at hand.
    fn ptx(&mut self, kernel: &'static Kernel, capability: u32) -> Result<&str, CudaError> {
        let (name, archive) = (kernel.name(), kernel.archive());
        if !kernel.runs_on(capability) {
            return Err(CudaError::Capability { kernel: name, capability });
        }
        let corrupt = CudaError::Archive { kernel: name, capability };
        let index = match self.texts.iter().position(|(of, _)| std::ptr::eq(*of, archive)) {
            Some(index) => index,
            None => {
                self.texts.push((archive, archive.decompress().ok_or_else(|| corrupt.clone())?));
                self.texts.len() - 1
            }
        };
        find(&self.texts[index].1, kernel.text()).ok_or(corrupt)
    }

    /// Keeps texts from now on, until as many calls of [`Loaded::release`].
    pub(in super::super) fn keep(&mut self) {
        self.keepers += 1;
    }

    pub(in super::super) fn release(&mut self) {
        self.keepers -= 1;
        self.forget();
    }

    fn forget(&mut self) {
        if self.keepers == 0 {
            self.texts = Vec::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::table::KERNELS;
    use super::*;

    fn kernel(bytes: &'static [u8]) -> &'static Kernel {
        let archive = Box::leak(Box::new(Archive::new("broken", bytes)));
        Box::leak(Box::new(Kernel::new("nonsense", archive, 32, 0)))
    }

    /// Errors before the driver is called.
    #[test]
    fn what_cannot_be_loaded_names_kernel_and_capability() {
        let mut loaded = Loaded::default();
        for capability in [75, 130] {
            let error = loaded.function(&KERNELS[0], capability).expect_err("it does not run");
            assert_eq!(error, CudaError::Capability { kernel: KERNELS[0].name(), capability });
        }
        let hopper = KERNELS.iter().find(|kernel| kernel.is_sm90a()).expect("there are some");
        for capability in [80, 89, 100, 120] {
            let error = loaded.function(hopper, capability).expect_err("it does not run");
            assert_eq!(error, CudaError::Capability { kernel: hopper.name(), capability });
        }
        let corrupt = CudaError::Archive { kernel: "nonsense", capability: 80 };
        assert_eq!(loaded.function(kernel(b"no frame"), 80), Err(corrupt.clone()));
        assert_eq!(loaded.function(kernel(b""), 80), Err(corrupt));
        assert!(corrupt_text(&mut loaded).to_string().contains("compute capability 8.9"));
    }

    /// A kernel that its archive does not contain.
    fn corrupt_text(loaded: &mut Loaded) -> CudaError {
        let missing = Box::leak(Box::new(Kernel::new("nonsense", KERNELS[0].archive(), 32, 0)));
        let error = loaded.function(missing, 89).expect_err("there is no such text");
        assert_eq!(error, CudaError::Archive { kernel: "nonsense", capability: 89 });
        error
    }

    /// A text is decompressed once while it is kept, and gone afterwards.
    #[test]
    fn texts_stay_while_they_are_kept() {
        let (mut loaded, first, second) = (Loaded::default(), &KERNELS[0], &KERNELS[1]);
        assert!(std::ptr::eq(first.archive(), second.archive()), "one archive");
        loaded.keep();
        loaded.keep();
        let at = loaded.ptx(first, 80).expect("it is there").as_ptr();
        loaded.release();
        assert!(loaded.ptx(second, 80).is_ok() && loaded.texts.len() == 1);
        assert_eq!(loaded.ptx(first, 80).map(str::as_ptr), Ok(at));
        loaded.release();
        assert!(loaded.texts.is_empty());
    }
}
