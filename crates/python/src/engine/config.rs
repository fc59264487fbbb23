//! Construction and pools.

use std::sync::{Arc, Mutex};

use kvarena::backend::{Either, OutboxOptions};
use kvarena::config::PrefixMode;
use kvarena::layout::{Layout, PlaneName};
use kvarena::{Capacity, CpuOptions, Engine as Core, EngineConfig, KvDtype, KvShape, LayerId, PoolConfig, StepScratch};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::Engine;
use crate::arguments::{Count, Id};
use crate::array::Array;
use crate::element::Dtype;
use crate::errors::of_engine;
use crate::events::{broken, recipe};
use crate::long::process;

const DTYPES: [(Dtype, KvDtype); 4] = [
    (Dtype::F32, KvDtype::F32),
    (Dtype::F16, KvDtype::F16),
    (Dtype::BF16, KvDtype::Bf16),
    (Dtype::FP8, KvDtype::Fp8E4M3),
];

fn dtype(name: &str) -> PyResult<KvDtype> {
    let found = DTYPES.iter().find(|(known, _)| known.name == name);
    found.map(|(_, dtype)| *dtype).ok_or_else(|| {
        let names = DTYPES.map(|(known, _)| known.name).join(", ");
        PyValueError::new_err(format!("dtype {name:?} is none of {names}"))
    })
}

fn layout(name: &str) -> PyResult<Layout> {
    match name {
        "layer_first" => Ok(Layout::LayerFirst),
        "page_first" => Ok(Layout::PageFirst),
        _ => Err(PyValueError::new_err(format!("layout {name:?} is neither layer_first nor page_first"))),
    }
}

#[pymethods]
impl Engine {
    /// Creates an engine and allocates all its memory.
    ///
    /// `pool` is "outbox" or "cpu". `layers`, `kv_heads`, `head_dim`, `dtype` (float32, float16, bfloat16 or
    /// float8_e4m3fn) and `layout` ("layer_first" or "page_first") are the shape of a pool on the CPU. The first
    /// `reserved_pages` pages are never handed out. `prefix=False` turns off prefix reuse. `swap_pages` is a number of
    /// pages of swap memory. The `max_*` values are limits of the tables. `hashing`, `event_pages`, `wide_slots` and
    /// `prefault` are as in Tree.
    #[new]
    #[pyo3(
        signature = (pages, page_size=Count(16), *, pool="outbox", layers=Count(1), kv_heads=Count(1),
            head_dim=Count(64), dtype="float32", layout="layer_first", swap_pages=Count(0), reserved_pages=Count(0),
            max_sequences=Count(256), max_sequence_len=Count(131_072), max_tokens=Id(4_194_304), max_steps=Count(8),
            max_step_tokens=Count(16_384), prefix=true, hashing=None, event_pages=Count(0), wide_slots=false,
            prefault=true),
        text_signature = "(pages, page_size=16, *, pool='outbox', layers=1, kv_heads=1, head_dim=64, \
            dtype='float32', layout='layer_first', swap_pages=0, reserved_pages=0, max_sequences=256, \
            max_sequence_len=131072, max_tokens=4194304, max_steps=8, max_step_tokens=16384, prefix=True, \
            hashing=None, event_pages=0, wide_slots=False, prefault=True)"
    )]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn new(
        py: Python<'_>,
        pages: Count,
        page_size: Count,
        pool: &str,
        layers: Count,
        kv_heads: Count,
        head_dim: Count,
        dtype: &str,
        layout: &str,
        swap_pages: Count,
        reserved_pages: Count,
        max_sequences: Count,
        max_sequence_len: Count,
        max_tokens: Id,
        max_steps: Count,
        max_step_tokens: Count,
        prefix: bool,
        hashing: Option<&str>,
        event_pages: Count,
        wide_slots: bool,
        prefault: bool,
    ) -> PyResult<Self> {
        let options = match pool {
            "outbox" => Either::Left(OutboxOptions),
            "cpu" => Either::Right(CpuOptions::with_threads(1)),
            _ => return Err(PyValueError::new_err(format!("pool {pool:?} is neither outbox nor cpu"))),
        };
        let pool = PoolConfig {
            layers: layers.0,
            shape: KvShape::heads(kv_heads.0, head_dim.0),
            dtype: self::dtype(dtype)?,
            layout: self::layout(layout)?,
            page_size: page_size.0,
            capacity: Capacity::Pages(pages.0),
            swap_pages: swap_pages.0,
            ..PoolConfig::default()
        };
        let config = EngineConfig {
            prefix: if prefix { PrefixMode::Radix } else { PrefixMode::None },
            hashing: hashing.map(recipe).transpose()?,
            event_pages: event_pages.0,
            max_sequences: max_sequences.0,
            max_sequence_len: max_sequence_len.0,
            max_tokens: max_tokens.0,
            max_steps: max_steps.0,
            max_step_tokens: max_step_tokens.0,
            reserved_pages: reserved_pages.0,
            wide_slots,
            prefault,
            ..pool.into()
        };
        let core = py.detach(|| Core::new(config, options)).map_err(of_engine)?;
        Ok(Self { core, scratch: Mutex::new(StepScratch::new()), process: process() })
    }

    /// Returns K of a layer, [pages, page_size, kv_heads, head_dim], of a pool on the CPU. Without a copy: writes reach
    /// the pool, and the array keeps the engine alive.
    fn k_cache(slf: Bound<'_, Self>, layer: Count) -> PyResult<Array> {
        plane(slf, layer, PlaneName::K)
    }

    /// Returns V of a layer, as `k_cache`.
    fn v_cache(slf: Bound<'_, Self>, layer: Count) -> PyResult<Array> {
        plane(slf, layer, PlaneName::V)
    }

    /// The number of tokens of a page.
    #[getter]
    pub(super) fn page_size(&self) -> u32 {
        self.core.shape().layout.page_size()
    }

    /// The number of pages of the pool.
    #[getter]
    fn pages(&self) -> u32 {
        self.core.shape().layout.page_count()
    }

    /// The counters and levels of the engine, by name.
    #[getter]
    fn stats(&self) -> std::collections::BTreeMap<String, u64> {
        // The monitor's format has a line for each number: its name, with a prefix and the suffix of a counter.
        let text = self.core.stats().prometheus().to_string();
        let numbers = text.lines().filter_map(|line| line.strip_prefix("kvarena_")?.split_once(' '));
        let named = numbers.map(|(name, value)| (name.strip_suffix("_total").unwrap_or(name), value));
        named.filter_map(|(name, value)| Some((name.into(), value.parse().ok()?))).collect()
    }

    /// Checks all tables, for tests. Raises RuntimeError with the broken invariant. O(capacity).
    fn verify(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.core.verify()).map_err(broken)
    }
}

/// Returns a plane of a layer.
fn plane(engine: Bound<'_, Engine>, layer: Count, name: PlaneName) -> PyResult<Array> {
    let mut borrowed = engine.try_borrow_mut()?;
    let core = borrowed.get_mut()?;
    let layout = core.shape().layout;
    if layer.0 >= layout.layers() {
        return Err(PyValueError::new_err(format!("layer {} is not below {}", layer.0, layout.layers())));
    }
    let Either::Right(cpu) = core.backend_mut() else {
        return Err(PyValueError::new_err("the engine has no pool: pass pool=\"cpu\""));
    };
    let strides = layout.strides(name).expect("the pool has K and V");
    let start = strides.row(layout.place(LayerId::new(layer.0)).lane, kvarena::PageId::new(0), 0);
    // The range is checked, and its address is that of memory which stays in place as long as the engine.
    let data = cpu.pool_mut()[start as usize..].as_mut_ptr().cast();
    let dtype = DTYPES.iter().find(|(_, dtype)| *dtype == layout.dtype()).expect("the engine has been made").0;
    drop(borrowed);
    let shape = [layout.page_count(), layout.page_size(), layout.kv_heads(), layout.head_dim()].map(|len| len as isize);
    let strides = [strides.page, strides.slot, strides.head, dtype.bytes as u64].map(|bytes| bytes as isize);
    Ok(Array { data, dtype, shape, strides, axes: 4, owner: Arc::new(engine.unbind()) })
}
