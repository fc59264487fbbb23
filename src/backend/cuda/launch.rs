//! Kernel launches: plain, or chained where the kernel and the device know how (programmatic dependent launch).
//!
//! A chained kernel is set up while the one before it on the stream ends, and waits by itself until that one is done
//! and its writes are seen: 0.3 us less a launch, measured in graphs. Before it waits it reads nothing, or plan and
//! page tables only. No kernel writes those but `load_plan`, after which the first launch of such a kernel is in order
//! ([`Start`]); whatever is chained to it starts later than it.
//!
//! Drivers below CUDA 12.3, whose captures do not know such launches, get plain ones.
//!
//! It takes two instructions of compute capability 9.0. The PTX is for 8.0 and newer, so they stand in it as comments
//! (`ptx/chain.cuh`), which become instructions here where the device has them.
//!
//! Not here: which kernel (`kernels.rs`), with what (`params.rs`).

use std::borrow::Cow;
use std::ffi::c_void;
use std::ptr::{from_mut, from_ref, null_mut};
use std::sync::OnceLock;

use super::error::{CudaError, check};
use super::gpu::Gpu;
use super::kernels::Kernel;
use super::stream::{RawStream, raw};
use super::sys;

/// Comments in the PTX and the instructions they stand for.
const MARKS: [(&str, &str); 2] = [
    ("// chain: wait", "griddepcontrol.wait;"),
    ("// chain: next", "griddepcontrol.launch_dependents;"),
];

/// PTX for a device: with the instructions in place of the marks, where it has them.
pub(super) fn chained(ptx: &str, capability: u32) -> Cow<'_, str> {
    if capability < 90 || !ptx.contains(MARKS[0].0) {
        return Cow::Borrowed(ptx);
    }
    let ptx = ptx.replace(".target sm_80", ".target sm_90");
    Cow::Owned(MARKS.iter().fold(ptx, |ptx, (mark, instruction)| ptx.replace(mark, instruction)))
}

/// Whether the kernels of a PTX file wait by themselves.
pub(super) fn is_chained(ptx: &str) -> bool {
    ptx.contains(MARKS[0].1)
}

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
    /// A chained kernel: before; any other: in order.
    Early,
}

impl Gpu {
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
        start: Start,
    ) -> Result<(), CudaError> {
        let function = self.function(kernel)?;
        let early = function.chained && start == Start::Early && self.chains();
        let mut attribute = LaunchAttribute { id: PROGRAMMATIC, padding: 0, value: [0; 16] };
        attribute.value[0] = 1;
        let config = LaunchConfig {
            grid: [grid.0, grid.1, 1],
            block: [block.0, block.1, 1],
            shared: kernel.shared,
            stream: raw(stream),
            attributes: &mut attribute,
            attribute_count: u32::from(early),
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
    use super::{MARKS, is_chained};

    #[test]
    fn every_kernel_of_a_chained_file_waits() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/ptx");
        let files = std::fs::read_dir(folder)
            .expect("the kernels")
            .map(|file| file.expect("a file").path());
        let mut chained_files = 0;
        for file in files.filter(|file| file.extension().is_some_and(|end| end == "ptx")) {
            let ptx = std::fs::read_to_string(&file).expect("PTX is text");
            let count = |what: &str| ptx.matches(what).count();
            let (marks, waits) = (count(MARKS[0].0), count(MARKS[0].1));
            assert_eq!(is_chained(&ptx), waits > 0);
            assert!(
                marks == 0 || ptx.contains(".target sm_80"),
                "{file:?}: marks are for PTX of 8.0"
            );
            if marks + waits == 0 {
                continue;
            }
            chained_files += 1;
            for kernel in ptx.split(".entry").skip(1) {
                let wait = if kernel.contains(MARKS[0].0) { MARKS[0].0 } else { MARKS[0].1 };
                // The last one: CTAs without work wait, too, and those waits may stand in front.
                let (before, _) = kernel.rsplit_once(wait).expect("a chained kernel waits");
                // Plan and tables may be read before; a prefetch reads nothing.
                for line in before.lines().filter(|line| line.contains(".global")) {
                    let known = ["ld.global.nc.", "cp.async.ca.shared.global", "prefetch.global."];
                    assert!(known.iter().any(|start| line.contains(start)), "{file:?}: {line}");
                }
            }
        }
        assert!(chained_files > 0);
    }

    #[test]
    fn the_scripts_know_the_same_marks() {
        let script = include_str!("../../../ptx/chain.py");
        for (mark, instruction) in MARKS {
            assert!(script.contains(&format!("\"{mark}\": \"{instruction}\"")), "{mark}");
        }
    }
}
