//! Hashes, names and events, which a tree and an engine have alike.

use kvarena::TokenId;
use kvarena::engine::Broken;
use kvarena::event::{Event, Medium, Stored};
pub use kvarena::hash::NamespaceNames as Names;
use kvarena::hash::{Hashing, PageHash, PageHashes};
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};

use crate::array::Array;

const RECIPES: [(&str, Hashing); 5] = [
    ("dynamo", Hashing::Dynamo),
    ("nano_vllm", Hashing::NanoVllm),
    ("minivllm", Hashing::MinivLlm),
    ("vllm_sha256_cbor", Hashing::VllmSha256Cbor),
    ("sglang_sha256", Hashing::SglangSha256),
];

/// Returns the recipe of a name.
pub fn recipe(name: &str) -> PyResult<Hashing> {
    let found = RECIPES.iter().find(|(known, _)| *known == name);
    found.map(|(_, recipe)| *recipe).ok_or_else(|| {
        let names = RECIPES.map(|(name, _)| name).join(", ");
        PyValueError::new_err(format!("hashing {name:?} is none of {names}"))
    })
}

pub fn broken(broken: Broken) -> PyErr {
    PyRuntimeError::new_err(broken.to_string())
}

/// Reads a chain of hashes: integers of 64 bits, or 32 bytes each.
pub fn chain(obj: &Bound<'_, PyAny>) -> PyResult<Vec<PageHash>> {
    let hash = |item: PyResult<Bound<'_, PyAny>>| {
        let item = item?;
        if let Ok(number) = item.extract::<u64>() {
            return Ok(PageHash::from(number));
        }
        let digest = item.extract::<[u8; 32]>();
        digest.map(PageHash::from).map_err(|_| PyTypeError::new_err(format!("{item} is no hash: an int or 32 bytes")))
    };
    obj.try_iter()?.map(hash).collect()
}

/// Returns the events that `drain` passes to its sink.
pub fn list<'py>(py: Python<'py>, drain: impl FnOnce(&mut dyn FnMut(Event<'_>))) -> PyResult<Bound<'py, PyList>> {
    let mut events: Vec<PyResult<Bound<'py, PyTuple>>> = Vec::new();
    drain(&mut |event| events.push(tuple(py, event)));
    PyList::new(py, events.into_iter().collect::<PyResult<Vec<_>>>()?)
}

fn medium(medium: Medium) -> &'static str {
    match medium {
        Medium::Device => "device",
        Medium::Swap => "swap",
    }
}

fn tuple<'py>(py: Python<'py>, event: Event<'_>) -> PyResult<Bound<'py, PyTuple>> {
    match event {
        Event::Stored(Stored { namespace, medium: of, parent, hashes, tokens, .. }) => {
            let tokens = Array::new(TokenId::as_raw(tokens).to_vec());
            let parent = parent.map(|parent| number(py, parent)).transpose()?;
            ("stored", medium(of), namespace.raw(), parent, numbers(py, hashes)?, tokens).into_pyobject(py)
        }
        Event::Removed { medium: of, hashes, .. } => ("removed", medium(of), numbers(py, hashes)?).into_pyobject(py),
        _ => ("cleared",).into_pyobject(py),
    }
}

/// Returns a hash as an int if it has 8 bytes, else as 32 bytes.
fn number(py: Python<'_>, hash: PageHash) -> PyResult<Py<PyAny>> {
    let digest = hash.to_digest();
    match digest[8..] == [0; 24] {
        true => Ok(hash.to_u64().into_pyobject(py)?.into_any().unbind()),
        false => Ok(PyBytes::new(py, &digest).into_any().unbind()),
    }
}

fn numbers<'py>(py: Python<'py>, hashes: PageHashes<'_>) -> PyResult<Bound<'py, PyList>> {
    PyList::new(py, hashes.iter().map(|hash| number(py, hash)).collect::<PyResult<Vec<_>>>()?)
}
