//! Arguments: integers, buffers of integers and lists. An error names the argument's value.

use kvarena::tree::Handle;
use kvarena::{Namespace, PageId, StepId, TokenId};
use pyo3::buffer::{ElementType, PyUntypedBuffer};
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyList, PyMemoryView, PySequence, PyTuple};

/// Replaces the error of an integer outside its type by a `ValueError` that names the value.
fn in_range<T>(extracted: PyResult<T>, obj: Borrowed<'_, '_, PyAny>, max: u128) -> PyResult<T> {
    extracted.map_err(|error| match error.is_instance_of::<PyOverflowError>(obj.py()) {
        true => PyValueError::new_err(format!("{} is not from 0 to {max}", *obj)),
        false => error,
    })
}

macro_rules! integer {
    ($(#[$doc:meta])* $name:ident($raw:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub struct $name(pub $raw);

        impl<'a, 'py> FromPyObject<'a, 'py> for $name {
            type Error = PyErr;

            fn extract(obj: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
                in_range(obj.extract().map(Self), obj, <$raw>::MAX.into())
            }
        }
    };
}

integer! {
    /// A number of pages, tokens, layers or other items.
    Count(u32)
}
integer! {
    /// A sequence, a step, a move or a namespace.
    Id(u64)
}

impl Id {
    pub fn step(self) -> StepId {
        StepId::new(self.0)
    }

    pub fn namespace(self) -> Namespace {
        Namespace::new(self.0)
    }
}

/// A handle of a tree: the serial number in the high 64 bits, the node in the low ones.
#[derive(Clone, Copy)]
pub struct HandleArg(pub Handle);

impl<'a, 'py> FromPyObject<'a, 'py> for HandleArg {
    type Error = PyErr;

    fn extract(obj: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        if !obj.is_instance_of::<PyInt>() {
            return Err(PyTypeError::new_err(format!("a handle is an int, not {}", obj.get_type())));
        }
        let raw = in_range(obj.extract::<u128>(), obj, u128::MAX)?;
        Ok(Self(Handle::from_raw([(raw >> 64) as u64, raw as u64])))
    }
}

/// Returns a handle as one integer.
pub fn handle_int(handle: Handle) -> u128 {
    let [serial, node] = handle.to_raw();
    u128::from(serial) << 64 | u128::from(node)
}

/// Integers of 32 bits from a buffer or a list.
pub struct Ints {
    /// Exports the integers, if they are used in place.
    buffer: Option<PyUntypedBuffer>,
    copied: Vec<u32>,
}

impl Ints {
    /// Reads an argument called `name`. A contiguous and aligned buffer of 4-byte integers is not copied.
    pub fn new(name: &str, obj: &Bound<'_, PyAny>) -> PyResult<Self> {
        if is_list(obj) {
            let copied = narrow(name, list(name, obj)?)?;
            return Ok(Self { buffer: None, copied });
        }
        let Some((buffer, element)) = buffer(name, obj)? else {
            return Ok(Self { buffer: None, copied: narrow(name, sequence(name, obj)?)? });
        };
        if element.bytes != 4 || !is_plain::<u32>(&buffer) {
            let copied = gather_narrow(name, &buffer, element)?;
            return Ok(Self { buffer: None, copied });
        }
        let ints = Self { buffer: Some(buffer), copied: Vec::new() };
        // A fold without an early end compares many integers at once.
        if element.signed && ints.as_slice().iter().fold(0, |all, x| all | x) >> 31 == 1 {
            let values = ints.as_slice().iter().map(|&x| i64::from(x as i32) as u64).collect();
            return Err(outside(name, &Wide { values, signed: true }, i32::MAX as u64));
        }
        Ok(ints)
    }

    pub fn as_slice(&self) -> &[u32] {
        match &self.buffer {
            None => &self.copied,
            // SAFETY: `new` has checked that the buffer is contiguous, aligned and not empty. The exporter keeps it
            // until `buffer` is dropped. No Python code runs while a method uses the slice: the caller holds the GIL,
            // or has called `owned`.
            Some(buffer) => unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast(), buffer.item_count()) },
        }
    }

    pub fn tokens(&self) -> &[TokenId] {
        TokenId::from_raw(self.as_slice())
    }

    pub fn pages(&self) -> &[PageId] {
        PageId::from_raw(self.as_slice())
    }

    /// Copies integers that are still in a buffer, so that they do not change while the GIL is released.
    pub fn owned(mut self) -> Self {
        if self.buffer.is_some() {
            self.copied = self.as_slice().to_vec();
            self.buffer = None;
        }
        self
    }
}

/// Reads slots of whole pages, and returns the pages.
pub fn pages(obj: &Bound<'_, PyAny>, page_size: u32) -> PyResult<Ints> {
    let name = "slots";
    if page_size == 1 {
        return Ints::new(name, obj);
    }
    let wide = match is_list(obj) {
        true => list(name, obj)?,
        false => match buffer(name, obj)? {
            Some((buffer, element)) if element.bytes == 8 && is_plain::<u64>(&buffer) => {
                // SAFETY: the buffer is contiguous, aligned and not empty, and no Python code runs until it is dropped.
                let slots = unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast(), buffer.item_count()) };
                return pages_of(name, slots, page_size, element.signed);
            }
            Some((buffer, element)) => widened(&buffer, element),
            None => sequence(name, obj)?,
        },
    };
    pages_of(name, &wide.values, page_size, wide.signed)
}

/// Returns the pages of slots.
fn pages_of(name: &str, slots: &[u64], page_size: u32, signed: bool) -> PyResult<Ints> {
    let size = u64::from(page_size);
    if !slots.len().is_multiple_of(page_size as usize) {
        let text = format!("{} slots do not fill whole pages of {page_size}", slots.len());
        return Err(PyValueError::new_err(text));
    }
    let mut copied = Vec::with_capacity(slots.len() / page_size as usize);
    for (i, page) in slots.chunks_exact(page_size as usize).enumerate() {
        let first = page[0];
        let max = (u64::from(u32::MAX) + 1) * size - 1;
        if first > max {
            return Err(outside(name, &Wide { values: slots.to_vec(), signed }, max));
        }
        // A fold without an early end compares many slots at once.
        let broken = page.iter().zip(first..).fold(false, |any, (&slot, wanted)| any | (slot != wanted));
        if broken || !first.is_multiple_of(size) {
            let (from, to) = (i as u64 * size, (i as u64 + 1) * size - 1);
            let text = format!("slots {from} to {to} are not those of one page, in order");
            return Err(PyValueError::new_err(text));
        }
        copied.push((first / size) as u32);
    }
    Ok(Ints { buffer: None, copied })
}

/// Returns whether a buffer is a slice of `T`, and not empty.
fn is_plain<T>(buffer: &PyUntypedBuffer) -> bool {
    buffer.buf_ptr().cast::<T>().is_aligned() && buffer.is_c_contiguous() && buffer.item_count() > 0
}

/// The element type of a buffer.
#[derive(Clone, Copy)]
struct Element {
    bytes: usize,
    signed: bool,
}

fn is_list(obj: &Bound<'_, PyAny>) -> bool {
    obj.is_instance_of::<PyList>() || obj.is_instance_of::<PyTuple>()
}

/// Returns the buffer of integers of an object; `None` if it exports none.
fn buffer(name: &str, obj: &Bound<'_, PyAny>) -> PyResult<Option<(PyUntypedBuffer, Element)>> {
    // A memoryview adds the strides that some exporters leave out, such as arrays of ctypes.
    let viewed = || PyMemoryView::from(obj).and_then(|view| PyUntypedBuffer::get(&view));
    let Ok(buffer) = PyUntypedBuffer::get(obj).or_else(|_| viewed()) else { return Ok(None) };
    let foreign = [b">".as_slice(), b"!"].iter().any(|order| buffer.format().to_bytes().starts_with(order));
    let element = match ElementType::from_format(buffer.format()) {
        _ if foreign => None,
        ElementType::SignedInteger { bytes: bytes @ (4 | 8) } => Some(Element { bytes, signed: true }),
        ElementType::UnsignedInteger { bytes: bytes @ (4 | 8) } => Some(Element { bytes, signed: false }),
        _ => None,
    };
    let Some(element) = element else {
        let format = buffer.format().to_string_lossy();
        let text = format!("{name}: a buffer of format {format:?}, not of integers of 4 or 8 bytes");
        return Err(PyTypeError::new_err(text));
    };
    if buffer.dimensions() != 1 || buffer.suboffsets().is_some() {
        let text = format!("{name}: a buffer of {} dimensions, not of one", buffer.dimensions());
        return Err(PyValueError::new_err(text));
    }
    Ok(Some((buffer, element)))
}

/// Integers of any width. A negative one is above every limit of its unsigned form.
struct Wide {
    values: Vec<u64>,
    signed: bool,
}

/// Copies the integers of a buffer of one dimension to another type, whatever their stride and alignment.
fn gather<T>(buffer: &PyUntypedBuffer, element: Element, mut to: impl FnMut(u64) -> T) -> Vec<T> {
    let (count, stride) = (buffer.item_count(), buffer.strides()[0]);
    let start = buffer.buf_ptr().cast::<u8>();
    // SAFETY: the exporter guarantees `count` items of this size, `stride` bytes apart.
    let item = |i: usize| unsafe { start.offset(i as isize * stride) };
    match (element.bytes, element.signed) {
        // SAFETY: as above; the items have 8 bytes.
        (8, _) => (0..count).map(|i| to(unsafe { item(i).cast::<u64>().read_unaligned() })).collect(),
        (_, signed) => (0..count)
            .map(|i| {
                // SAFETY: as above; the items have 4 bytes.
                let value = unsafe { item(i).cast::<u32>().read_unaligned() };
                to(if signed { i64::from(value as i32) as u64 } else { value.into() })
            })
            .collect(),
    }
}

fn widened(buffer: &PyUntypedBuffer, element: Element) -> Wide {
    Wide { values: gather(buffer, element, |value| value), signed: element.signed }
}

/// Copies the integers of a buffer that have at most 32 bits.
fn gather_narrow(name: &str, buffer: &PyUntypedBuffer, element: Element) -> PyResult<Vec<u32>> {
    let mut all = 0;
    let mut copied = Vec::new();
    if element.bytes == 8 && is_plain::<u64>(buffer) {
        // SAFETY: the buffer is contiguous, aligned and not empty, and no Python code runs until it is dropped.
        let wide: &[u64] = unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast(), buffer.item_count()) };
        copied.resize(wide.len(), 0);
        for (narrow, &value) in copied.iter_mut().zip(wide) {
            all |= value;
            *narrow = value as u32;
        }
    } else {
        copied = gather(buffer, element, |value| {
            all |= value;
            value as u32
        });
    }
    if all >> 32 == 0 { Ok(copied) } else { Err(outside(name, &widened(buffer, element), u32::MAX.into())) }
}

/// Returns an int of Python that has at most 63 bits. Others, also -1, take the way of errors.
fn small(item: &Bound<'_, PyAny>) -> Option<u64> {
    if !item.is_exact_instance_of::<PyInt>() {
        return None;
    }
    let mut overflow = 0;
    // SAFETY: `item` is an int, so the call neither fails nor runs other code.
    let value = unsafe { ffi::PyLong_AsLongLongAndOverflow(item.as_ptr(), &mut overflow) };
    u64::try_from(value).ok()
}

/// Copies the integers of a list or a tuple.
fn list(name: &str, obj: &Bound<'_, PyAny>) -> PyResult<Wide> {
    let int = |item: Bound<'_, PyAny>| match item.extract::<i64>() {
        Ok(int) => Ok(int as u64),
        Err(error) if error.is_instance_of::<PyOverflowError>(item.py()) => {
            Err(PyValueError::new_err(format!("{name}: {item} is not an integer of 64 bits")))
        }
        Err(error) => Err(error),
    };
    let values = match obj.cast::<PyList>() {
        Ok(list) => list.iter().map(|item| small(&item).map_or_else(|| int(item), Ok)).collect::<PyResult<_>>()?,
        Err(_) => obj.cast::<PyTuple>()?.iter().map(int).collect::<PyResult<_>>()?,
    };
    Ok(Wide { values, signed: true })
}

/// Copies the integers of any other sequence, such as a range.
fn sequence(name: &str, obj: &Bound<'_, PyAny>) -> PyResult<Wide> {
    let Ok(sequence) = obj.cast::<PySequence>() else {
        let text = format!("{name}: expected a buffer or a list of integers, not {}", obj.get_type());
        return Err(PyTypeError::new_err(text));
    };
    list(name, sequence.to_list()?.as_any())
}

fn narrow(name: &str, wide: Wide) -> PyResult<Vec<u32>> {
    if wide.values.iter().fold(0, |all, x| all | x) >> 32 != 0 {
        return Err(outside(name, &wide, u32::MAX.into()));
    }
    Ok(wide.values.into_iter().map(|x| x as u32).collect())
}

/// Returns the error that names the first integer above `max`.
fn outside(name: &str, wide: &Wide, max: u64) -> PyErr {
    let i = wide.values.iter().position(|&x| x > max).expect("one is outside");
    let value = if wide.signed { (wide.values[i] as i64).to_string() } else { wide.values[i].to_string() };
    PyValueError::new_err(format!("{name}: {value} at index {i} is not from 0 to {max}"))
}
