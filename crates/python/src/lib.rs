//! kvarena for Python. The classes contain no logic of caches: each method is one call of the core.

mod arguments;
mod array;
mod dlpack;
mod element;
mod engine;
mod errors;
mod events;
mod long;
mod tree;

use pyo3::prelude::*;

/// The extension module of the package `kvarena`.
#[pymodule]
fn _kvarena(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<tree::Tree>()?;
    module.add_class::<engine::Engine>()?;
    module.add_class::<engine::Plan>()?;
    module.add_class::<engine::Admission>()?;
    module.add_class::<array::Array>()?;
    for (name, error) in [
        ("Gone", module.py().get_type::<errors::Gone>()),
        ("NotLocked", module.py().get_type::<errors::NotLocked>()),
        ("Shortage", module.py().get_type::<errors::Shortage>()),
        ("OutOfPages", module.py().get_type::<errors::OutOfPages>()),
    ] {
        module.add(name, error)?;
    }
    long::watch_forks(module)
}
