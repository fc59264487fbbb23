//! Declares the driver's functions that this backend calls by name, with the types of `cust::sys` except the result
//! type. [`find_function`] finds the others.
//!
//! Only the types of `cust` are used here. Its functions return an enum of the result codes of CUDA 11 drivers, and a
//! code outside an enum is undefined behaviour. Here the result is an integer, because later drivers may add codes. The
//! modules of `cust` cannot return the log of a rejected PTX. Its contexts, streams and memory have one owner, but this
//! backend shares them with other users of the device.
//!
//! `forward.rs` finds the addresses of the functions; `error.rs` interprets the codes.
#![allow(missing_docs, reason = "NVIDIA's documentation of the driver has them")]

use std::ffi::{CStr, c_char, c_void};
use std::ptr::null_mut;

pub use cust::sys::{
    CU_MEMHOSTALLOC_DEVICEMAP, CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_PORTABLE,
    CUcontext, CUdevice, CUdevice_attribute, CUevent, CUevent_flags_enum, CUfunction, CUfunction_attribute, CUgraph,
    CUgraphExec, CUjit_option, CUmodule, CUstream, CUstream_flags_enum, CUstreamCaptureMode,
};

// SAFETY: the signatures are those of NVIDIA's cuda.h; enums are C integers.
unsafe extern "C" {
    pub fn cuInit(flags: u32) -> u32;
    pub fn cuDriverGetVersion(version: *mut i32) -> u32;
    pub fn cuDeviceGet(device: *mut CUdevice, ordinal: i32) -> u32;
    pub fn cuDeviceGetAttribute(value: *mut i32, attribute: CUdevice_attribute, device: CUdevice) -> u32;
    pub fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice) -> u32;
    pub fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) -> u32;
    pub fn cuCtxSetCurrent(context: CUcontext) -> u32;
    pub fn cuCtxSynchronize() -> u32;
    pub fn cuGetProcAddress(symbol: *const c_char, found: *mut *mut c_void, version: i32, flags: u64) -> u32;

    pub fn cuPointerGetAttribute(value: *mut c_void, attribute: u32, address: u64) -> u32;
    pub fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> u32;
    pub fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> u32;
    pub fn cuMemAllocAsync(address: *mut u64, bytes: usize, stream: CUstream) -> u32;
    pub fn cuMemFree_v2(address: u64) -> u32;
    pub fn cuMemHostAlloc(memory: *mut *mut c_void, bytes: usize, flags: u32) -> u32;
    pub fn cuMemHostGetDevicePointer_v2(address: *mut u64, memory: *mut c_void, flags: u32) -> u32;
    pub fn cuMemHostRegister_v2(memory: *mut c_void, bytes: usize, flags: u32) -> u32;
    pub fn cuMemHostUnregister(memory: *mut c_void) -> u32;
    pub fn cuMemFreeHost(memory: *mut c_void) -> u32;
    pub fn cuMemcpyHtoD_v2(target: u64, source: *const c_void, bytes: usize) -> u32;
    pub fn cuMemcpyDtoH_v2(target: *mut c_void, source: u64, bytes: usize) -> u32;
    pub fn cuMemcpyHtoDAsync_v2(target: u64, source: *const c_void, bytes: usize, stream: CUstream) -> u32;
    pub fn cuMemcpyDtoHAsync_v2(target: *mut c_void, source: u64, bytes: usize, stream: CUstream) -> u32;
    pub fn cuMemsetD8_v2(target: u64, byte: u8, count: usize) -> u32;
    pub fn cuMemsetD32Async(target: u64, word: u32, count: usize, stream: CUstream) -> u32;

    pub fn cuModuleLoadDataEx(
        module: *mut CUmodule,
        image: *const c_void,
        count: u32,
        options: *mut CUjit_option,
        values: *mut *mut c_void,
    ) -> u32;
    pub fn cuModuleUnload(module: CUmodule) -> u32;
    pub fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char) -> u32;
    pub fn cuFuncSetAttribute(function: CUfunction, attribute: CUfunction_attribute, value: i32) -> u32;
    pub fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: *mut i32,
        function: CUfunction,
        threads: i32,
        shared: usize,
    ) -> u32;

    pub fn cuStreamCreate(stream: *mut CUstream, flags: u32) -> u32;
    pub fn cuStreamDestroy_v2(stream: CUstream) -> u32;
    pub fn cuStreamSynchronize(stream: CUstream) -> u32;
    pub fn cuStreamQuery(stream: CUstream) -> u32;
    pub fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: u32) -> u32;
    pub fn cuStreamIsCapturing(stream: CUstream, status: *mut u32) -> u32;
    pub fn cuStreamBeginCapture_v2(stream: CUstream, mode: CUstreamCaptureMode) -> u32;
    pub fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph) -> u32;

    pub fn cuEventCreate(event: *mut CUevent, flags: u32) -> u32;
    pub fn cuEventDestroy_v2(event: CUevent) -> u32;
    pub fn cuEventRecord(event: CUevent, stream: CUstream) -> u32;
    pub fn cuEventQuery(event: CUevent) -> u32;
    pub fn cuEventSynchronize(event: CUevent) -> u32;
    pub fn cuEventElapsedTime(ms: *mut f32, start: CUevent, end: CUevent) -> u32;

    pub fn cuGraphInstantiateWithFlags(exec: *mut CUgraphExec, graph: CUgraph, flags: u64) -> u32;
    pub fn cuGraphDestroy(graph: CUgraph) -> u32;
    pub fn cuGraphExecDestroy(exec: CUgraphExec) -> u32;
    pub fn cuGraphLaunch(exec: CUgraphExec, stream: CUstream) -> u32;
}

/// Looks up a driver function that is not declared above, with its signature in CUDA `version` (12,080 is 12.8).
/// Returns `None` if the driver does not have it.
pub fn find_function(name: &CStr, version: i32) -> Option<*mut c_void> {
    let mut found = null_mut();
    // SAFETY: the name ends with a zero, and `found` is a valid place for a pointer.
    let result = unsafe { cuGetProcAddress(name.as_ptr(), &mut found, version, 0) };
    (result == 0 && !found.is_null()).then_some(found)
}
