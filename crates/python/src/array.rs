//! [`Array`]: the results of calls and the pools, by the buffer protocol and DLPack.

use std::any::Any;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyMemoryView, PyTuple};

use crate::dlpack::{self, Memory};
use crate::element::{AXES, Dtype, Integer};

/// A typed array, which other libraries read and write without a copy: `memoryview(a)`, `numpy.asarray(a)`,
/// `torch.from_dlpack(a)`.
///
/// A result of a call owns its memory. A pool's array keeps its engine alive. The buffer protocol has no bfloat16 and
/// no float8: there, their elements are unsigned integers. Indexing is that of a memoryview.
#[pyclass(frozen, module = "kvarena")]
pub struct Array {
    pub data: *mut c_void,
    pub dtype: Dtype,
    /// Lengths of the axes.
    pub shape: [isize; AXES],
    /// Bytes from one item of an axis to the next.
    pub strides: [isize; AXES],
    pub axes: usize,
    /// Owns the memory.
    pub owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: `owner` keeps the memory at its address, and Rust accesses it by no reference while an array exists. Python's
// code orders its accesses itself, as with any shared buffer.
unsafe impl Send for Array {}
// SAFETY: as above; an array has no interior mutability of its own.
unsafe impl Sync for Array {}

impl Array {
    /// Returns an array of one axis, which owns its elements.
    pub fn new<T: Integer>(elements: Vec<T>) -> Self {
        let len = elements.len();
        Self::of_shape(elements, [len as isize, 1, 1, 1], 1)
    }

    /// Returns an array of rows, which owns its elements.
    pub fn rows<T: Integer>(elements: Vec<T>, rows: usize, width: usize) -> Self {
        debug_assert_eq!(elements.len(), rows * width);
        Self::of_shape(elements, [rows as isize, width as isize, 1, 1], 2)
    }

    fn of_shape<T: Integer>(mut elements: Vec<T>, shape: [isize; AXES], axes: usize) -> Self {
        let data = elements.as_mut_ptr().cast();
        let strides = contiguous(&shape[..axes], T::DTYPE.bytes);
        Self { data, dtype: T::DTYPE, shape, strides, axes, owner: Arc::new(elements) }
    }

    pub fn is_contiguous(&self) -> bool {
        self.strides[..self.axes] == contiguous(&self.shape[..self.axes], self.dtype.bytes)[..self.axes]
    }

    /// Returns the number of bytes of the elements.
    fn bytes(&self) -> isize {
        self.shape[..self.axes].iter().product::<isize>() * self.dtype.bytes as isize
    }
}

/// Returns the strides of a contiguous array, in bytes.
fn contiguous(shape: &[isize], bytes: usize) -> [isize; AXES] {
    let mut strides = [bytes as isize; AXES];
    for axis in (0..shape.len().saturating_sub(1)).rev() {
        strides[axis] = strides[axis + 1] * shape[axis + 1];
    }
    strides
}

#[pymethods]
impl Array {
    /// The lengths of the axes.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape[..self.axes])
    }

    /// The bytes from one item of each axis to the next.
    #[getter]
    fn strides<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.strides[..self.axes])
    }

    /// The name of the element type in numpy and torch.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.dtype.name
    }

    /// Returns the elements as a list, or as a list of rows.
    fn tolist<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        PyMemoryView::from(slf)?.call_method0("tolist")
    }

    fn __len__(&self) -> usize {
        self.shape[0] as usize
    }

    fn __getitem__<'py>(slf: &Bound<'py, Self>, key: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        PyMemoryView::from(slf)?.get_item(key)
    }

    fn __iter__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        Ok(PyMemoryView::from(slf)?.try_iter()?.into_any())
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("<kvarena.Array {} {}>", self.dtype.name, self.shape(py)?))
    }

    /// Returns a DLPack capsule, a versioned one if `max_version` is at least (1, 0).
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__(
        slf: &Bound<'_, Self>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Py<PyAny>> {
        if let Some(stream) = stream.filter(|&stream| stream != -1) {
            return Err(PyBufferError::new_err(format!("stream {stream}: the memory is on the CPU")));
        }
        if let Some(device) = dl_device.filter(|&device| device != dlpack::CPU) {
            return Err(PyBufferError::new_err(format!("device {device:?}: the memory is on the CPU")));
        }
        if copy == Some(true) {
            return Err(PyBufferError::new_err("copy=True: arrays are exported without a copy"));
        }
        let Self { data, dtype, shape, strides, axes, ref owner } = *slf.get();
        let memory = Memory { data, dtype, shape, strides, axes, owner: Arc::clone(owner) };
        dlpack::export(slf.py(), memory, max_version.is_some_and(|(major, _)| major >= 1))
    }

    /// Returns the device type and number in DLPack: (1, 0), the CPU.
    fn __dlpack_device__(&self) -> (i32, i32) {
        dlpack::CPU
    }

    /// # Safety
    /// Python calls it with a valid `view`.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let array = slf.get();
        if view.is_null() {
            return Err(PyBufferError::new_err("the view is null"));
        }
        let strided = flags & ffi::PyBUF_STRIDES == ffi::PyBUF_STRIDES;
        let wants_c = flags & ffi::PyBUF_C_CONTIGUOUS == ffi::PyBUF_C_CONTIGUOUS || !strided;
        let wants_any = flags & ffi::PyBUF_ANY_CONTIGUOUS == ffi::PyBUF_ANY_CONTIGUOUS;
        let wants_fortran = flags & ffi::PyBUF_F_CONTIGUOUS == ffi::PyBUF_F_CONTIGUOUS && array.axes > 1;
        if wants_fortran || (wants_c || wants_any) && !array.is_contiguous() {
            return Err(PyBufferError::new_err("the array is not contiguous in this order"));
        }
        let has = |flag: c_int| flags & flag == flag;
        let given = |axes: &[isize; AXES], flag| if has(flag) { axes.as_ptr().cast_mut() } else { ptr::null_mut() };
        let format = if has(ffi::PyBUF_FORMAT) { array.dtype.format.as_ptr().cast_mut() } else { ptr::null_mut() };
        // SAFETY: Python gives a valid view. Shape and strides are in the array, which the view keeps alive.
        unsafe {
            (*view).buf = array.data;
            (*view).len = array.bytes();
            (*view).readonly = 0;
            (*view).itemsize = array.dtype.bytes as isize;
            (*view).format = format;
            (*view).ndim = array.axes as c_int;
            (*view).shape = given(&array.shape, ffi::PyBUF_ND);
            (*view).strides = given(&array.strides, ffi::PyBUF_STRIDES);
            (*view).suboffsets = ptr::null_mut();
            (*view).internal = ptr::null_mut();
            (*view).obj = slf.clone().into_any().into_ptr();
        }
        Ok(())
    }
}
