//! Export by DLPack, after its public specification: https://dmlc.github.io/dlpack/latest/c_api.html.

use std::ffi::c_void;
use std::sync::Arc;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::element::{AXES, Dtype};

/// The device type and number of the CPU.
pub const CPU: (i32, i32) = (1, 0);

const NAME: &std::ffi::CStr = c"dltensor";
const VERSIONED_NAME: &std::ffi::CStr = c"dltensor_versioned";

/// Memory to export, and what keeps it.
pub struct Memory {
    pub data: *mut c_void,
    pub dtype: Dtype,
    /// Lengths of the axes.
    pub shape: [isize; AXES],
    /// Bytes from one item of an axis to the next.
    pub strides: [isize; AXES],
    pub axes: usize,
    pub owner: Arc<dyn std::any::Any + Send + Sync>,
}

#[repr(C)]
struct Device {
    kind: i32,
    number: i32,
}

#[repr(C)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: Device,
    axes: i32,
    dtype: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
struct Managed {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

/// `DLManagedTensorVersioned` of version 1.1, the first that has float8.
#[repr(C)]
struct ManagedVersioned {
    version: [u32; 2],
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedVersioned)>,
    flags: u64,
    tensor: Tensor,
}

/// A managed tensor, its axes and the owner of its memory, in one allocation.
#[repr(C)]
struct Export<T> {
    managed: T,
    shape: [i64; AXES],
    strides: [i64; AXES],
    _owner: Arc<dyn std::any::Any + Send + Sync>,
}

impl Tensor {
    fn new(memory: &Memory) -> Self {
        let bits = memory.dtype.bytes as u8 * 8;
        Self {
            data: memory.data,
            device: Device { kind: CPU.0, number: CPU.1 },
            axes: memory.axes as i32,
            dtype: DataType { code: memory.dtype.code, bits, lanes: 1 },
            shape: std::ptr::null_mut(),
            strides: std::ptr::null_mut(),
            byte_offset: 0,
        }
    }
}

/// A managed tensor of either version.
trait Manage: Sized {
    const NAME: &std::ffi::CStr;
    fn new(tensor: Tensor) -> Self;
    fn tensor(&mut self) -> &mut Tensor;
}

/// Frees the allocation in which `managed` is. The consumer calls it, on any thread, also without the GIL.
///
/// # Safety
/// `managed` comes from [`capsule`] and is not used again.
unsafe extern "C" fn delete<T: Manage>(managed: *mut T) {
    // SAFETY: `managed` is the first field of an `Export`, which `capsule` has leaked.
    drop(unsafe { Box::from_raw(managed.cast::<Export<T>>()) });
}

impl Manage for Managed {
    const NAME: &std::ffi::CStr = NAME;

    fn new(tensor: Tensor) -> Self {
        Self { tensor, context: std::ptr::null_mut(), deleter: Some(delete) }
    }

    fn tensor(&mut self) -> &mut Tensor {
        &mut self.tensor
    }
}

impl Manage for ManagedVersioned {
    const NAME: &std::ffi::CStr = VERSIONED_NAME;

    fn new(tensor: Tensor) -> Self {
        Self { version: [1, 1], context: std::ptr::null_mut(), deleter: Some(delete), flags: 0, tensor }
    }

    fn tensor(&mut self) -> &mut Tensor {
        &mut self.tensor
    }
}

/// Frees a tensor that no consumer has taken. A consumer that takes it renames the capsule.
///
/// # Safety
/// Python calls it once, when it destroys a capsule that [`capsule`] has made.
unsafe extern "C" fn destroy<T: Manage>(capsule: *mut ffi::PyObject) {
    // SAFETY: the capsule is valid until this function returns. Its pointer is that of an `Export` of this type.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, T::NAME.as_ptr()) == 1 {
            delete::<T>(ffi::PyCapsule_GetPointer(capsule, T::NAME.as_ptr()).cast());
        }
    }
}

fn capsule<T: Manage>(py: Python<'_>, memory: Memory) -> PyResult<Py<PyAny>> {
    let managed = T::new(Tensor::new(&memory));
    let axis = |bytes: isize| bytes as i64 / memory.dtype.bytes as i64;
    let export = Export {
        managed,
        shape: memory.shape.map(|len| len as i64),
        strides: memory.strides.map(axis),
        _owner: memory.owner,
    };
    let export = Box::into_raw(Box::new(export));
    // SAFETY: the allocation is valid until `delete`. Nothing else refers to it yet.
    unsafe {
        let (shape, strides) = (&raw mut (*export).shape, &raw mut (*export).strides);
        let managed = &mut (*export).managed;
        managed.tensor().shape = shape.cast();
        managed.tensor().strides = strides.cast();
        let made = ffi::PyCapsule_New(export.cast(), T::NAME.as_ptr(), Some(destroy::<T>));
        if made.is_null() {
            delete::<T>(export.cast());
        }
        Bound::from_owned_ptr_or_err(py, made).map(Bound::unbind)
    }
}

/// Returns a capsule that keeps the memory.
pub fn export(py: Python<'_>, memory: Memory, versioned: bool) -> PyResult<Py<PyAny>> {
    match versioned {
        true => capsule::<ManagedVersioned>(py, memory),
        false if memory.dtype == Dtype::FP8 => Err(PyBufferError::new_err("float8 needs DLPack 1.1: pass max_version")),
        false => capsule::<Managed>(py, memory),
    }
}
