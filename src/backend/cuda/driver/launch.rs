//! Kernel launches: in order, or by programmatic dependent launch (PDL) if the kernel and the device support it.
//!
//! With PDL, the device sets up a kernel while its predecessor on the stream ends. The kernel waits until the
//! predecessor is done and its writes are visible. This saves 0.3 us a launch, measured in graphs. Before its wait, a
//! kernel reads at most the plan and the page tables, which only `load_plan` writes. After `load_plan`, the first
//! launch of a kernel that reads them early is therefore in order ([`Start`]). Later PDL launches start after that
//! launch.
//!
//! Drivers before CUDA 12.3 cannot capture PDL launches. With these drivers, the backend launches its kernels in order.
//! `kernels/marks.rs` has the instructions of the wait.

use std::ffi::c_void;
use std::ptr::{from_ref, null_mut};
use std::sync::OnceLock;

use bytemuck::{Pod, bytes_of, cast_slice_mut};

use super::gpu::Gpu;
use super::raw::{RawStream, is_capturing, raw};
use super::sys;
use crate::backend::cuda::error::{CudaError, check};
use crate::backend::cuda::kernels::params::{KernelParams, LayerRope, LayerScales, Lists, RowBoxes};
use crate::backend::cuda::kernels::{Extra, Function, Kernel};

/// `CUlaunchConfig` of CUDA 11.8 and later.
#[repr(C)]
struct LaunchConfig {
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: sys::CUstream,
    attributes: *mut LaunchAttribute,
    attribute_count: u32,
}

/// `CUlaunchAttribute`: a number and 64 bytes. The two attributes here use few of these bytes, and no pointers.
#[repr(C, align(8))]
struct LaunchAttribute {
    id: u32,
    padding: u32,
    value: [u32; 16],
}

const _: () = assert!(size_of::<LaunchConfig>() == 56 && size_of::<LaunchAttribute>() == 72);

/// `CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION`.
const CLUSTER: u32 = 4;
/// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`.
const PROGRAMMATIC: u32 = 6;

impl LaunchAttribute {
    fn new(id: u32, numbers: [u32; 3]) -> Self {
        let mut value = [0; 16];
        value[..3].copy_from_slice(&numbers);
        Self { id, padding: 0, value }
    }
}

/// The shape of a launch of a host's own kernel ([`Function::launch`]).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Launch {
    /// Number of CTAs, in x and y.
    pub grid: (u32, u32),
    /// Number of threads of a CTA.
    pub block: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
    /// Number of CTAs of a cluster, adjacent in x. 1 means no clusters. Clusters need compute capability 9.0 or later.
    pub cluster: u32,
}

impl Function {
    /// Launches a host's own kernel without waiting: by programmatic dependent launch if the kernel
    /// [waits](Function::waits) by itself. A context is bound ([`Gpu::bind`]).
    ///
    /// # Errors
    /// The error of a call of the CUDA driver.
    ///
    /// # Safety
    /// The kernel takes one `P` by value. Shape and parameters meet its requirements, and the addresses are valid for
    /// its accesses until it is done. The stream and the kernel's [`Gpu`] live.
    pub unsafe fn launch<P: Pod>(self, stream: RawStream, launch: Launch, params: &P) -> Result<(), CudaError> {
        let Launch { grid, block, shared, cluster } = launch;
        let mut attributes =
            [LaunchAttribute::new(PROGRAMMATIC, [1, 0, 0]), LaunchAttribute::new(CLUSTER, [cluster, 1, 1])];
        let own = &mut attributes[usize::from(!self.waits())..if cluster > 1 { 2 } else { 1 }];
        let params = from_ref(params).cast();
        // SAFETY: the caller guarantees the conditions.
        unsafe { submit(self, (grid, (block, 1), shared), stream, own, params) }
    }
}

/// Calls the driver with a grid, a block and dynamic shared memory.
///
/// # Safety
/// The function takes one struct by value. `params` points to that struct, whose addresses stay valid until the kernel
/// is done.
unsafe fn submit(
    function: Function,
    (grid, block, shared): ((u32, u32), (u32, u32), u32),
    stream: RawStream,
    attributes: &mut [LaunchAttribute],
    params: *const c_void,
) -> Result<(), CudaError> {
    let config = LaunchConfig {
        grid: [grid.0, grid.1, 1],
        block: [block.0, block.1, 1],
        shared,
        stream: raw(stream),
        attributes: attributes.as_mut_ptr(),
        attribute_count: attributes.len() as u32,
    };
    let mut arguments = [params.cast_mut()];
    let launch = launch_ex()?;
    // SAFETY: the config and its attributes outlive the call, and the driver copies the struct before it returns. The
    // caller guarantees the rest.
    let result = unsafe { launch(&config, function.handle(), arguments.as_mut_ptr(), null_mut()) };
    check("cuLaunchKernelEx", result)
}

type LaunchEx = unsafe extern "C" fn(*const LaunchConfig, sys::CUfunction, *mut *mut c_void, *mut *mut c_void) -> u32;

/// Returns `cuLaunchKernelEx`, which `cust::sys` does not declare.
fn launch_ex() -> Result<LaunchEx, CudaError> {
    static FOUND: OnceLock<Option<LaunchEx>> = OnceLock::new();
    let find = || {
        let found = sys::find_function(c"cuLaunchKernelEx", 11_080)?;
        // SAFETY: the driver documents this signature of cuLaunchKernelEx since CUDA 11.8.
        Some(unsafe { std::mem::transmute::<*mut c_void, LaunchEx>(found) })
    };

    FOUND.get_or_init(find).ok_or(CudaError::Driver { call: "cuLaunchKernelEx", code: 500 })
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Start {
    /// Start after all earlier work of the stream.
    InOrder,
    /// May start before the end of earlier work, by PDL, if kernel and device support it.
    Pdl,
}

impl Start {
    /// Returns the start of a kernel that may be the first after `load_plan`. A captured launch may use PDL, because a
    /// graph as a whole starts in order.
    pub fn first(self, capturing: bool) -> Self {
        if capturing { Self::Pdl } else { self }
    }

    /// Records the launch of a kernel that may be the first after `load_plan`. Later kernels start after it, so they
    /// see the plan. A captured launch does not count, because it does not run.
    pub fn launched(&mut self, capturing: bool) {
        if !capturing {
            *self = Self::Pdl;
        }
    }
}

/// Further parameters of kernels, which follow the struct. The `extra` list of a kernel names the parameters that the
/// kernel takes.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExtraParams {
    pub scales: LayerScales,
    pub lists: Lists,
    pub rope: LayerRope,
    pub boxes: RowBoxes,
}

/// Maximum number of bytes of a kernel's struct and further parameters.
const PARAMS_MAX: usize = 512;

impl ExtraParams {
    fn bytes(&self, extra: Extra) -> &[u8] {
        match extra {
            Extra::LayerScales => bytes_of(&self.scales),
            Extra::Lists => bytes_of(&self.lists),
            Extra::LayerRope => bytes_of(&self.rope),
            Extra::RowBoxes => bytes_of(&self.boxes),
        }
    }

    /// Returns a kernel's struct, followed by its further parameters in the order of its `extra` list.
    fn behind<P: Pod>(&self, params: &P, kernel: &Kernel) -> [u64; PARAMS_MAX / 8] {
        let mut all = [0; PARAMS_MAX / 8];
        let (bytes, mut end): (&mut [u8], _) = (cast_slice_mut(&mut all), 0);
        let extra = kernel.extra().iter().map(|&extra| self.bytes(extra));
        for part in std::iter::once(bytes_of(params)).chain(extra) {
            bytes[end..end + part.len()].copy_from_slice(part);
            end += part.len();
        }
        all
    }
}

impl Gpu {
    /// Compiles a kernel now instead of at its first launch, and returns its handle. This takes up to a second, unless
    /// the result is in the driver's cache.
    ///
    /// # Errors
    /// [`CudaError::Capability`] if the device cannot run it, [`CudaError::Archive`] if its PTX archive is corrupt
    /// or lacks it, [`CudaError::Ptx`] if the driver rejects it, or another error of the driver.
    pub fn compile(&self, kernel: &'static Kernel) -> Result<Function, CudaError> {
        self.bind()?;
        self.function(kernel)
    }

    /// Compiles several kernels on up to 8 threads. If the driver rejects one, the others stay compiled.
    ///
    /// # Errors
    /// As [`Gpu::compile`], for the first rejected kernel.
    pub fn compile_all(&self, kernels: &[&'static Kernel]) -> Result<(), CudaError> {
        self.bind()?;
        self.compiled().compile(kernels, self.capability(), || self.bind())
    }

    /// Returns the names of the kernels that this handle and its clones have compiled, in order.
    pub fn kernels(&self) -> Vec<&'static str> {
        self.compiled().kernels().map(Kernel::name).collect()
    }

    /// Returns the number of modules that this handle and its clones have compiled, including the host's own.
    pub fn module_count(&self) -> usize {
        self.compiled().module_count()
    }

    /// Returns the kernel's handle. The context is bound.
    fn function(&self, kernel: &'static Kernel) -> Result<Function, CudaError> {
        self.compiled().function(kernel, self.capability())
    }

    /// Returns the number of the kernel's CTAs that one multiprocessor runs at a time.
    pub(in crate::backend::cuda) fn resident(&self, kernel: &'static Kernel) -> Result<u32, CudaError> {
        let function = self.compile(kernel)?.handle();
        let mut blocks = 0;
        // SAFETY: `blocks` is valid memory for one i32; the function is compiled.
        let result = unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &mut blocks,
                function,
                kernel.threads() as i32,
                kernel.shared() as usize,
            )
        };
        check("cuOccupancyMaxActiveBlocksPerMultiprocessor", result)?;
        Ok(blocks as u32)
    }

    /// Launches a kernel without waiting. The context is bound.
    ///
    /// # Errors
    /// As [`Gpu::compile`] if the kernel is not compiled, or [`CudaError::NotPrepared`] if the stream is also captured.
    /// The driver's errors.
    ///
    /// # Safety
    /// The addresses in `params` stay valid for the kernel's accesses until it is done.
    pub(in crate::backend::cuda) unsafe fn launch<P: KernelParams>(
        &self,
        kernel: &'static Kernel,
        grid: (u32, u32),
        block: (u32, u32),
        stream: RawStream,
        params: &P,
        start: Start,
    ) -> Result<(), CudaError> {
        assert!(kernel.params() == P::NAME && kernel.extra().is_empty(), "the kernel takes another struct");
        // SAFETY: the caller guarantees the addresses; the kernel takes one `P`.
        unsafe { self.launch_with(kernel, grid, block, stream, from_ref(params).cast(), start) }
    }

    /// Launches a kernel of attention on `ctas` CTAs, with the kernel's threads.
    ///
    /// # Safety
    /// As [`Gpu::launch`], also for the addresses in `extra`.
    pub(in crate::backend::cuda) unsafe fn launch_attention<P: KernelParams + Pod>(
        &self,
        kernel: &'static Kernel,
        ctas: u32,
        params: &P,
        extra: &ExtraParams,
        start: Start,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        assert_eq!(kernel.params(), P::NAME, "the kernel takes another struct");
        let params = extra.behind(params, kernel);
        let (grid, block) = ((ctas, 1), (kernel.threads(), 1));
        // SAFETY: the caller guarantees the addresses; the kernel takes one `P`, followed by the parts of its `extra`.
        unsafe { self.launch_with(kernel, grid, block, stream, params.as_ptr().cast(), start) }
    }

    /// # Safety
    /// As [`Gpu::launch`]; `params` points to as many bytes as the kernel takes.
    unsafe fn launch_with(
        &self,
        kernel: &'static Kernel,
        grid: (u32, u32),
        block: (u32, u32),
        stream: RawStream,
        params: *const c_void,
        start: Start,
    ) -> Result<(), CudaError> {
        let compiled = self.compiled().find(kernel);
        let function = match compiled {
            Some(function) => function,
            None if is_capturing(stream)? => return Err(CudaError::NotPrepared),
            None => self.function(kernel)?,
        };
        let pdl = function.waits() && start == Start::Pdl;
        let mut attributes = [LaunchAttribute::new(PROGRAMMATIC, [1, 0, 0])];
        let own = &mut attributes[..usize::from(pdl)];
        // SAFETY: the function takes one struct by value. `ptx/build.py` compares its size in the kernel table with the
        // PTX. The caller guarantees the addresses in it.
        unsafe { submit(function, (grid, block, kernel.shared()), stream, own, params) }
    }
}

#[cfg(test)]
mod tests {
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};

    use super::*;
    use crate::backend::cuda::kernels::Archive;

    #[test]
    fn a_refused_kernel_is_an_error_with_its_cause() {
        let Ok(gpu) = Gpu::new(0) else { return println!("skipped: no device") };
        const TEXT: &[u8] = b"// nonsense: generated by hand\n.version 8.0\n.target sm_80\nnonsense\n";
        let frame = compress_to_vec(TEXT, CompressionLevel::Uncompressed);
        let archive = Box::leak(Box::new(Archive::new("nonsense", frame.leak())));
        let kernel = Box::leak(Box::new(Kernel::new("nonsense", archive, 32, 0)));
        let error = gpu.compile(kernel).expect_err("that is no PTX");
        let CudaError::Ptx { kernel: "nonsense", capability, code: 218, log } = &error else { panic!("{error:?}") };
        assert_eq!(*capability, gpu.capability());
        assert!(log.contains("nonsense") || log.contains("line 4"), "{log}");
        assert!(error.to_string().contains(&**log));
    }
}
