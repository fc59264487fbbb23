//! Static scales of an fp8 pool: measured over served requests, written to a file, and read from it.
//!
//! A scale is the largest absolute value of K or V of a head in a layer, divided by 448, the largest value of e4m3.

use std::fs;
use std::path::Path;

use kvarena::layout::KvScales;
use serde_json::{Value, json};

use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::files::read_json;

/// The largest absolute values of K and V, for a model whose layers have one shape.
#[derive(Debug)]
pub struct Largest {
    layers: usize,
    kv_heads: usize,
    head_dim: usize,
    /// `[layers, kv_heads, K and V]`
    values: Vec<f32>,
}

impl Largest {
    /// Starts an empty measurement.
    pub fn new(config: &ModelConfig) -> Self {
        let ModelConfig { layers, kv_heads, head_dim, .. } = *config;
        Self { layers, kv_heads, head_dim, values: vec![0.0; 2 * layers * kv_heads] }
    }

    /// Measures rows of a layer's K and V, `[tokens, kv_heads, head_dim]`.
    pub fn measure(&mut self, layer: usize, k: &[f32], v: &[f32]) {
        let values = &mut self.values[2 * layer * self.kv_heads..];
        for (side, rows) in [k, v].into_iter().enumerate() {
            for (at, head) in rows.chunks_exact(self.head_dim).enumerate() {
                let seen = &mut values[2 * (at % self.kv_heads) + side];
                *seen = head.iter().fold(*seen, |most, x| larger(most, x.abs()));
            }
        }
    }

    /// Returns the scales of the measured values. A scale is 1 if all its values were 0.
    ///
    /// # Errors
    /// A measured value is infinite or NaN.
    pub fn scales(&self) -> Result<KvScales> {
        let scale = |&largest: &f32| match largest {
            0.0 => 1.0,
            // Unlike `max`, `clamp` keeps NaN.
            largest => (largest / 448.0).clamp(f32::MIN_POSITIVE, f32::INFINITY),
        };
        let values = self.values.iter().map(scale).collect();
        KvScales::new(self.layers as u32, self.kv_heads as u32, values).map_err(|error| Error::run(error.to_string()))
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

#[cfg(test)]
mod tests {
    use super::Largest;

    #[test]
    fn scales_are_those_of_the_largest_values() {
        let mut largest = Largest { layers: 2, kv_heads: 2, head_dim: 2, values: vec![0.0; 8] };
        let k = [1.0, -448.0, 3.0, 4.0, 896.0, 0.0, 0.0, -5.0];
        largest.measure(1, &k, &[0.0; 8]);
        let scales = largest.scales().expect("finite");
        assert_eq!(scales.values(), [1.0, 1.0, 1.0, 1.0, 2.0, 1.0, 5.0 / 448.0, 1.0]);
        for wrong in [f32::NAN, f32::INFINITY] {
            largest.measure(0, &[wrong; 4], &[0.0; 4]);
            largest.measure(0, &[1.0; 4], &[0.0; 4]);
            assert!(largest.scales().is_err(), "{wrong}");
        }
    }
}
