//! The modules and kernels that one [`Gpu`](crate::backend::cuda::Gpu) has compiled.

use std::ffi::{CString, c_void};
use std::panic::resume_unwind;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::archive::{Archive, find};
use super::kernel::Kernel;
use super::marks::with_marks;
use crate::backend::cuda::driver::sys;
use crate::backend::cuda::error::{CudaError, check};

/// Maximum number of threads that compile modules.
const THREADS_MAX: usize = 8;
/// Maximum length of a compiler's log in bytes.
const LOG_BYTES: usize = 4096;

/// The modules and kernels of a [`Gpu`](crate::backend::cuda::Gpu) and its clones. They stay compiled until the last
/// clone is dropped, because graphs may use them.
#[derive(Debug, Default)]
pub(in super::super) struct Compiled {
    modules: Vec<Module>,
    kernels: Vec<(&'static Kernel, Function)>,
    /// Whether the driver supports programmatic dependent launches, also in captures.
    pdl: bool,
}

/// A module: a PTX text with all its entry points.
#[derive(Debug)]
struct Module {
    text: &'static str,
    archive: &'static Archive,
    module: u64,
}

impl Module {
    /// Compiles a kernel's PTX. If the driver rejects it, returns the driver's code and the compiler's log. The context
    /// is bound.
    fn new(kernel: &'static Kernel, ptx: &str, capability: u32) -> Result<Self, (u32, Box<str>)> {
        let ptx = with_marks(ptx, capability);
        let ptx = CString::new(ptx.into_owned()).map_err(|_| (0, "a zero in the PTX".into()))?;
        let (mut module, mut log) = (null_mut(), vec![0_u8; LOG_BYTES]);
        let mut options =
            [sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER, sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
        // The driver takes numeric options by value, in the place of a pointer.
        let mut values = [log.as_mut_ptr().cast::<c_void>(), LOG_BYTES as *mut c_void];
        let count = options.len() as u32;
        // SAFETY: `module` is valid memory for one handle, and the text ends with a zero. Each option has a value: the
        // log's memory, which outlives the call, and its size.
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

    /// Returns an entry point's handle, or the driver's code.
    fn entry(&self, name: &str) -> Result<sys::CUfunction, u32> {
        let name = CString::new(name).expect("no zero in the name");
        let mut function = null_mut();
        // SAFETY: `function` is valid memory for one handle, the module is compiled, the name ends with a zero.
        let result = unsafe {
            let module = self.module as usize as sys::CUmodule;
            sys::cuModuleGetFunction(&mut function, module, name.as_ptr())
        };
        if result == 0 { Ok(function) } else { Err(result) }
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: compiled by this crate, unloaded once; `Gpu` first binds the context and waits for the device.
        unsafe { sys::cuModuleUnload(self.module as usize as sys::CUmodule) };
    }
}

/// The handle of a compiled kernel, valid while its [`Gpu`](crate::backend::cuda::Gpu) lives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Function {
    handle: u64,
    pdl: bool,
}

impl Function {
    /// Returns the `CUfunction` as an integer.
    pub fn raw(self) -> u64 {
        self.handle
    }

    /// Returns whether the kernel itself waits for earlier work (programmatic dependent launch), and the driver
    /// supports such launches.
    pub fn waits(self) -> bool {
        self.pdl
    }

    pub(in super::super) fn handle(self) -> sys::CUfunction {
        self.handle as usize as sys::CUfunction
    }
}

impl Compiled {
    pub(in super::super) fn new(pdl: bool) -> Self {
        Self { pdl, ..Self::default() }
    }

    /// Returns the kernel's handle, if the kernel is compiled.
    pub(in super::super) fn find(&self, kernel: &'static Kernel) -> Option<Function> {
        self.kernels.iter().find(|(k, _)| std::ptr::eq(*k, kernel)).map(|(_, function)| *function)
    }

    pub(in super::super) fn kernels(&self) -> impl Iterator<Item = &'static Kernel> {
        self.kernels.iter().map(|&(kernel, _)| kernel)
    }

    pub(in super::super) fn module_count(&self) -> usize {
        self.modules.len()
    }

    /// Compiles the missing kernels, with several threads: each archive is decompressed once, and each text compiled
    /// once. `bind` makes the context current in the calling thread. If the driver rejects some kernels, the others
    /// stay compiled. The texts are freed.
    pub(in super::super) fn compile(
        &mut self,
        kernels: &[&'static Kernel],
        capability: u32,
        bind: impl Fn() -> Result<(), CudaError> + Sync,
    ) -> Result<(), CudaError> {
        if let Some(kernel) = kernels.iter().find(|kernel| !kernel.runs_on(capability)) {
            return Err(CudaError::Capability { kernel: kernel.name(), capability });
        }
        let (mut missing, mut archives): (Vec<&Kernel>, Vec<&Kernel>) = (Vec::new(), Vec::new());
        let same_archive = |a: &Kernel, b: &Kernel| std::ptr::eq(a.archive(), b.archive());
        for &kernel in kernels {
            let same_text = |other: &&Kernel| same_archive(other, kernel) && other.text() == kernel.text();
            if self.modules.iter().any(|module| module.is_of(kernel)) || missing.iter().any(same_text) {
                continue;
            }
            missing.push(kernel);
            if !archives.iter().any(|other| same_archive(other, kernel)) {
                archives.push(kernel);
            }
        }
        let corrupt = |kernel: &Kernel| CudaError::Archive { kernel: kernel.name(), capability };
        let texts = in_parallel(&archives, |kernel| kernel.archive().decompress());
        let modules = in_parallel(&missing, |&kernel| {
            bind()?;
            let index = archives.iter().position(|other| same_archive(other, kernel));
            let text = index.and_then(|index| texts[index].as_deref());
            let ptx = text.and_then(|text| find(text, kernel.text())).ok_or(corrupt(kernel))?;
            let refused = |(code, log)| refused(kernel, capability, code, log);
            Module::new(kernel, ptx, capability).map_err(refused)
        });
        let mut error = None;
        for module in modules {
            match module {
                Ok(module) => self.modules.push(module),
                Err(refused) => error = error.or(Some(refused)),
            }
        }
        let is_compiled = |kernel: &&Kernel| self.modules.iter().any(|module| module.is_of(kernel));
        let compiled: Vec<_> = kernels.iter().copied().filter(|kernel| is_compiled(kernel)).collect();
        compiled.iter().try_for_each(|kernel| self.take_entry(kernel, capability))?;
        match error {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Returns the kernel's handle; compiles its module at the first use. The context is bound.
    pub(in super::super) fn function(
        &mut self,
        kernel: &'static Kernel,
        capability: u32,
    ) -> Result<Function, CudaError> {
        if self.find(kernel).is_none() {
            self.compile(&[kernel], capability, || Ok(()))?;
        }
        Ok(self.find(kernel).expect("the kernel is compiled"))
    }

    /// Finds a kernel in its compiled module.
    fn take_entry(&mut self, kernel: &'static Kernel, capability: u32) -> Result<(), CudaError> {
        if self.find(kernel).is_some() {
            return Ok(());
        }
        let module = self.modules.iter().find(|module| module.is_of(kernel));
        let handle = module
            .expect("the module is compiled")
            .entry(kernel.name())
            .map_err(|code| refused(kernel, capability, code, "".into()))?;
        // With the static part, even less than 48 KiB of dynamic memory may exceed the default limit.
        if kernel.shared() > 0 {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function was just found in a compiled module.
            let result = unsafe { sys::cuFuncSetAttribute(handle, attribute, kernel.shared() as i32) };
            check("cuFuncSetAttribute", result)?;
        }
        let pdl = self.pdl && kernel.waits(capability);
        self.kernels.push((kernel, Function { handle: handle as usize as u64, pdl }));
        Ok(())
    }
}

fn refused(kernel: &Kernel, capability: u32, code: u32, log: Box<str>) -> CudaError {
    CudaError::Ptx { kernel: kernel.name(), capability, code, log }
}

/// Returns the results of `run` for all items, on several threads if there are several items.
fn in_parallel<T: Sync, R: Send>(items: &[T], run: impl Fn(&T) -> R + Sync) -> Vec<R> {
    if items.len() < 2 {
        return items.iter().map(run).collect();
    }
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(index) else { return done };
            done.push((index, run(item)));
        }
    };
    let mut all: Vec<(usize, R)> = thread::scope(|scope| {
        let count = items.len().min(THREADS_MAX);
        let threads: Vec<_> = (0..count).map(|_| scope.spawn(work)).collect();
        let done = threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
        done.flatten().collect()
    });
    all.sort_by_key(|(index, _)| *index);
    all.into_iter().map(|(_, made)| made).collect()
}

#[cfg(test)]
mod tests {
    use super::super::table::KERNELS;
    use super::*;

    fn kernel(bytes: &'static [u8]) -> &'static Kernel {
        let archive = Box::leak(Box::new(Archive::new("broken", bytes)));
        Box::leak(Box::new(Kernel::new("nonsense", archive, 32, 0)))
    }

    #[test]
    fn a_compile_error_names_kernel_and_capability() {
        let mut compiled = Compiled::default();
        for capability in [75, 130] {
            let error = compiled.function(&KERNELS[0], capability).expect_err("it does not run");
            assert_eq!(error, CudaError::Capability { kernel: KERNELS[0].name(), capability });
        }
        let hopper = KERNELS.iter().find(|kernel| kernel.is_sm90a()).expect("some need sm_90a");
        for capability in [80, 89, 100, 120] {
            let error = compiled.function(hopper, capability).expect_err("it does not run");
            assert_eq!(error, CudaError::Capability { kernel: hopper.name(), capability });
        }
        let corrupt = CudaError::Archive { kernel: "nonsense", capability: 80 };
        assert_eq!(compiled.function(kernel(b"no frame"), 80), Err(corrupt.clone()));
        assert_eq!(compiled.function(kernel(b""), 80), Err(corrupt));
        assert!(corrupt_text(&mut compiled).to_string().contains("compute capability 8.9"));
    }

    /// Compiles a kernel that is missing from its archive.
    fn corrupt_text(compiled: &mut Compiled) -> CudaError {
        let missing = Box::leak(Box::new(Kernel::new("nonsense", KERNELS[0].archive(), 32, 0)));
        let error = compiled.function(missing, 89).expect_err("the archive lacks the text");
        assert_eq!(error, CudaError::Archive { kernel: "nonsense", capability: 89 });
        error
    }

    /// Two items run at the same time, and results keep the order of the items.
    #[test]
    fn kernels_are_compiled_in_parallel() {
        let both = std::sync::Barrier::new(2);
        let made = in_parallel(&[1, 2, 3, 4], |&n| {
            both.wait();
            10 * n
        });
        assert_eq!(made, [10, 20, 30, 40]);
        assert_eq!(in_parallel(&[7], |&n| n + 1), [8]);
        assert_eq!(in_parallel(&[0; 0], |&n: &i32| n), [0; 0]);
    }
}
