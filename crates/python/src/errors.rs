//! Python's exceptions for the errors of the core. Their texts are the core's.

use kvarena::backend::{CpuError, EitherError, OutboxError};
use kvarena::tree::TreeError;
use kvarena::{ConfigError, EngineError, Error};
use pyo3::create_exception;
use pyo3::exceptions::{PyKeyError, PyMemoryError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

create_exception!(
    kvarena,
    Gone,
    PyKeyError,
    "The handle or the sequence names nothing: it was evicted, reset, replaced or finished, or never existed."
);
create_exception!(kvarena, NotLocked, PyValueError, "The handle has no lock to release or to extend.");
create_exception!(
    kvarena,
    Shortage,
    PyRuntimeError,
    "Pages, sequences, tokens or steps lack now. The state is unchanged, and a later call may succeed."
);
create_exception!(
    kvarena,
    OutOfPages,
    Shortage,
    "Too few pages. `wanted` and `available` are numbers of pages; `after` is the step whose completion makes enough \
     available, or None."
);

/// The error of either backend.
pub type BackendError = EitherError<OutboxError, CpuError>;

fn out_of_pages(text: String, wanted: u64, available: u64, after: Option<u64>) -> PyErr {
    let error = OutOfPages::new_err(text);
    Python::attach(|py| {
        let value = error.value(py);
        value.setattr("wanted", wanted)?;
        value.setattr("available", available)?;
        value.setattr("after", after)
    })
    .map_or_else(|failed| failed, |()| error)
}

pub fn of_tree(error: TreeError) -> PyErr {
    let text = error.to_string();
    match error {
        TreeError::Gone { .. } => Gone::new_err(text),
        TreeError::NotLocked { .. } => NotLocked::new_err(text),
        TreeError::NotEvictable { wanted, evictable } => out_of_pages(text, wanted.into(), evictable.into(), None),
        TreeError::Locks { .. } => PyRuntimeError::new_err(text),
        _ => PyValueError::new_err(text),
    }
}

pub fn of_config(error: ConfigError) -> PyErr {
    match error {
        ConfigError::OutOfMemory { .. } => PyMemoryError::new_err(error.to_string()),
        _ => PyValueError::new_err(error.to_string()),
    }
}

pub fn of_core(error: Error) -> PyErr {
    let text = error.to_string();
    match error {
        Error::OutOfPages { wanted, available, after } => {
            out_of_pages(text, wanted, available, after.map(|step| step.raw()))
        }
        Error::UnknownSequence { .. } => Gone::new_err(text),
        _ if error.is_shortage() => Shortage::new_err(text),
        _ => PyValueError::new_err(text),
    }
}

pub fn of_engine(error: EngineError<BackendError>) -> PyErr {
    match error {
        EngineError::Config(error) => of_config(error),
        EngineError::Core(error) => of_core(error),
        EngineError::Backend(EitherError::Right(CpuError::OutOfMemory { .. })) => {
            PyMemoryError::new_err(error.to_string())
        }
        _ => PyRuntimeError::new_err(error.to_string()),
    }
}
