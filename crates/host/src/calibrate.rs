//! Static scales of an fp8 pool: measured over served requests, written to a file, and read from it.
//!
//! A scale is the largest absolute value of K or V of a head in a layer, divided by 448, the largest value of e4m3.

use std::fs;
use std::path::Path;

use kvarena::{BatchPlan, Cpu, Extend, KvScales, LayerId, PlanSize, PlaneName};
use serde_json::{Value, json};

use crate::clock::Clock;
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::fields::read_json;
use crate::runner::{Runner, Work};

/// Forwards steps to another runner, and measures all K and V that they store.
pub struct Calibrating<R> {
    inner: R,
    /// `[layers, kv_heads, K and V]`: the largest absolute values so far.
    largest: Vec<f32>,
}

impl<R: Runner<Backend = Cpu>> Calibrating<R> {
    /// Starts an empty measurement of a model whose layers have one shape.
    pub fn new(inner: R) -> Self {
        let config = inner.config();
        let largest = vec![0.0; 2 * config.layers * config.kv_heads];
        Self { inner, largest }
    }

    /// Returns the measured scales. A scale is 1 if all its values were 0.
    ///
    /// # Errors
    /// A measured value is infinite or NaN.
    pub fn scales(&self) -> Result<KvScales> {
        let config = self.inner.config();
        let scale = |&largest: &f32| match largest {
            0.0 => 1.0,
            // Unlike `max`, `clamp` keeps NaN.
            largest => (largest / 448.0).clamp(f32::MIN_POSITIVE, f32::INFINITY),
        };
        let values = self.largest.iter().map(scale).collect();
        KvScales::new(config.layers as u32, config.kv_heads as u32, values)
            .map_err(|error| Error::run(error.to_string()))
    }

    fn measure(&mut self, backend: &Cpu, plan: &BatchPlan<'_>) -> Result<()> {
        let (layers, head_dim) = (self.inner.config().layers, self.inner.config().head_dim);
        let kv_heads = self.inner.config().kv_heads;
        for layer in 0..layers {
            let track = backend.layout().place(LayerId::new(layer as u32)).track;
            let slots = plan.slots_of(track);
            for slot in (0..plan.token_count()).filter_map(|i| slots.get(i)) {
                for (side, plane) in [PlaneName::K, PlaneName::V].into_iter().enumerate() {
                    let row = backend
                        .read_slot(plane, LayerId::new(layer as u32), slot)
                        .map_err(|error| Error::run(error.to_string()))?;
                    for (head, numbers) in row.chunks_exact(head_dim).enumerate() {
                        let seen = &mut self.largest[2 * (layer * kv_heads + head) + side];
                        *seen = numbers.iter().fold(*seen, |most, x| larger(most, x.abs()));
                    }
                }
            }
        }
        Ok(())
    }
}

impl<R: Runner<Backend = Cpu>> Runner for Calibrating<R> {
    type Backend = Cpu;

    fn config(&self) -> &ModelConfig {
        self.inner.config()
    }

    fn step_size(&self, items: &[Extend]) -> Option<PlanSize> {
        self.inner.step_size(items)
    }

    fn before_plan(&mut self) -> Result<()> {
        self.inner.before_plan()
    }

    fn launch(&mut self, backend: &mut Cpu, work: &Work, clock: &mut Clock) -> Result<()> {
        self.inner.launch(backend, work, clock)
    }

    fn collect(
        &mut self,
        backend: &mut Cpu,
        work: &Work,
        fail: bool,
        tokens: &mut Vec<u32>,
        clock: &mut Clock,
    ) -> Result<()> {
        self.inner.collect(backend, work, fail, tokens, clock)?;
        self.measure(backend, &work.plan.plan())
    }

    fn settle(&mut self, backend: &mut Cpu) -> Result<()> {
        self.inner.settle(backend)
    }

    fn draws_max(&self) -> usize {
        self.inner.draws_max()
    }

    fn edits_max(&self) -> usize {
        self.inner.edits_max()
    }

    fn keeps_logits(&self) -> bool {
        self.inner.keeps_logits()
    }

    fn logits(&self, draw: usize) -> &[f32] {
        self.inner.logits(draw)
    }
}

/// Returns the larger number, or NaN if one of them is NaN.
fn larger(a: f32, b: f32) -> f32 {
    if a.is_nan() || a > b { a } else { b }
}

/// Writes scales as JSON: `{"layers": .., "kv_heads": .., "values": [..]}`.
///
/// # Errors
/// The file cannot be written.
pub fn write(path: &Path, scales: &KvScales) -> Result<()> {
    let (layers, kv_heads) = (scales.layers(), scales.kv_heads());
    let table = json!({"layers": layers, "kv_heads": kv_heads, "values": scales.values()});
    write_table(path, &table)
}

/// Reads scales from a file of [`write()`].
///
/// # Errors
/// The file cannot be read or contains no valid scales.
pub fn read(path: &Path) -> Result<KvScales> {
    let table = Table::read(path)?;
    // A value that is not a number becomes NaN, which is rejected as a scale.
    let values = table.values(|value| Some(value.as_f64().unwrap_or(f64::NAN) as f32))?;
    KvScales::new(table.number("layers")?, table.number("kv_heads")?, values)
        .map_err(|error| table.invalid(error.to_string()))
}

/// Writes a measurement.
pub(crate) fn write_table(path: &Path, table: &Value) -> Result<()> {
    fs::write(path, format!("{table}\n"))
        .map_err(|error| Error::run(format!("cannot write {}: {error}", path.display())))
}

/// A file that [`write_table`] has written.
pub(crate) struct Table<'a> {
    path: &'a Path,
    file: Value,
}

impl<'a> Table<'a> {
    pub(crate) fn read(path: &'a Path) -> Result<Self> {
        let file = read_json(path).map_err(|error| Error::request(error.message))?;
        Ok(Self { path, file })
    }

    /// Returns the error for an invalid file.
    pub(crate) fn invalid(&self, why: String) -> Error {
        Error::request(format!("{}: {why}", self.path.display()))
    }

    /// Returns the whole number in the field `name`.
    pub(crate) fn number(&self, name: &str) -> Result<u32> {
        let number = self.file[name].as_u64().and_then(|number| u32::try_from(number).ok());
        number.ok_or_else(|| self.invalid(format!("{name} is missing or not a whole number")))
    }

    /// Returns the list `values`, each element converted by `convert`.
    pub(crate) fn values<T>(&self, convert: impl Fn(&Value) -> Option<T>) -> Result<Vec<T>> {
        let values = self.file["values"].as_array().map_or(&[][..], Vec::as_slice);
        let convert = |value| convert(value).ok_or_else(|| self.invalid(format!("{value} is not a valid value")));
        values.iter().map(convert).collect()
    }
}
