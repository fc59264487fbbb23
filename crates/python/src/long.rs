//! Long calls release the GIL, and a fork is counted.

use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::marker::Ungil;
use pyo3::prelude::*;

/// A call with more tokens takes more than 10 us.
pub const LONG_TOKENS: usize = 1 << 16;
/// A call with more pages takes more than 10 us.
pub const LONG_PAGES: usize = 1 << 11;

/// Runs `call`, without the GIL if it is a long one. Its arguments are copied then.
pub fn run<R: Ungil>(py: Python<'_>, long: bool, call: impl FnOnce() -> R + Ungil) -> R {
    if long { py.detach(call) } else { call() }
}

/// Number of forks between the first process and this one.
static FORKS: AtomicU64 = AtomicU64::new(0);

/// Returns a number that differs in the child of a fork.
pub fn process() -> u64 {
    FORKS.load(Ordering::Relaxed)
}

/// Python calls it in the child of a fork.
#[pyfunction]
fn _forked() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// Registers `_forked`.
pub fn watch_forks(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    let forked = wrap_pyfunction!(_forked, module)?;
    let options = [("after_in_child", forked)];
    py.import("os")?.call_method("register_at_fork", (), Some(&pyo3::types::IntoPyDict::into_py_dict(options, py)?))?;
    Ok(())
}
