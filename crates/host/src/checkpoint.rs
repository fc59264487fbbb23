//! The tensors of a model directory: one `model.safetensors`, or the shards of an index.
//!
//! `model.rs` and the modules of its layers name the tensors of a model.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use bytemuck::pod_collect_to_vec;
use half::{bf16, f16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensorError, SafeTensors};

use crate::error::{Error, Result};
use crate::fields::{Fields, read_file, read_json};
use crate::matrix::{Matrix, Numbers};

/// The file name of a model without shards.
const WHOLE: &str = "model.safetensors";
/// The file name of the index of a model's shards.
const INDEX: &str = "model.safetensors.index.json";

/// Every tensor of a directory, by name.
pub struct Checkpoint {
    dir: PathBuf,
    tensors: BTreeMap<String, Tensor>,
}

struct Tensor {
    file: String,
    shape: Vec<usize>,
    /// The elements, or their type if it is unsupported. Reading such a tensor fails only if the model needs it.
    numbers: std::result::Result<Numbers, Dtype>,
}

impl Checkpoint {
    /// Reads all tensors.
    ///
    /// # Errors
    /// A file is missing, truncated or damaged; an index is invalid, or names a tensor that its shard lacks.
    pub fn read(dir: &Path) -> Result<Self> {
        let mut checkpoint = Self { dir: dir.into(), tensors: BTreeMap::new() };
        for (file, assigned) in shards(dir)? {
            let bytes = read_file(&dir.join(&file))?;
            for (name, view) in tensors(dir, &file, &bytes, &assigned)? {
                let data = view.data();
                let numbers = match view.dtype() {
                    Dtype::BF16 => Ok(Numbers::Bf16(pod_collect_to_vec::<u8, bf16>(data))),
                    Dtype::F16 => Ok(Numbers::F16(pod_collect_to_vec::<u8, f16>(data))),
                    Dtype::F32 => Ok(Numbers::F32(pod_collect_to_vec::<u8, f32>(data))),
                    other => Err(other),
                };
                let (file, shape) = (file.clone(), view.shape().to_vec());
                checkpoint.tensors.insert(name, Tensor { file, shape, numbers });
            }
        }
        Ok(checkpoint)
    }

    /// Removes and returns a matrix `[rows, cols]`.
    ///
    /// # Errors
    /// The tensor is missing, or has another shape or an unsupported element type.
    pub fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<Matrix> {
        Ok(Matrix::new(rows, cols, self.take(name, &[rows, cols])?))
    }

    /// Removes one tensor and returns it as `count` matrices `[rows, cols]`, one below the other.
    ///
    /// # Errors
    /// See [`Checkpoint::matrix`].
    pub fn stack(&mut self, name: &str, count: usize, rows: usize, cols: usize) -> Result<Matrix> {
        Ok(Matrix::new(count * rows, cols, self.take(name, &[count, rows, cols])?))
    }

    /// Removes and returns a vector `[len]`, in f32.
    ///
    /// # Errors
    /// See [`Checkpoint::matrix`].
    pub fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>> {
        Ok(self.take(name, &[len])?.to_f32())
    }

    fn take(&mut self, name: &str, shape: &[usize]) -> Result<Numbers> {
        let tensor = self.tensors.remove(name).ok_or_else(|| missing_tensor(&self.dir, name))?;
        let path = self.dir.join(&tensor.file);
        check_shape(&path, name, &tensor.shape, shape)?;
        tensor.numbers.map_err(|dtype| unsupported_dtype(&path, name, dtype))
    }
}

/// Returns the files of a model, each with the tensors that the index assigns to it. A whole model has no index.
///
/// # Errors
/// The directory has neither a whole model nor an index, or the index is unreadable or invalid.
pub fn shards(dir: &Path) -> Result<BTreeMap<String, BTreeSet<String>>> {
    if dir.join(WHOLE).exists() {
        return Ok(BTreeMap::from([(WHOLE.to_owned(), BTreeSet::new())]));
    }
    let index_path = dir.join(INDEX);
    if !index_path.exists() {
        let dir = dir.display();
        return Err(Error::model(format!("{dir} holds neither {WHOLE} nor {INDEX}")));
    }
    let value = read_json(&index_path)?;
    let index = Fields::new(&index_path, &value)?;
    let Some(map) = index.get("weight_map").and_then(|map| map.as_object()) else {
        return Err(index.wrong("weight_map is missing"));
    };
    let mut names: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (tensor, file) in map {
        let Some(file) = file.as_str().filter(|file| is_plain_name(file)) else {
            return Err(
                index.wrong(&format!("weight_map: the file of {tensor} has no plain file name"))
            );
        };
        names.entry(file.to_owned()).or_default().insert(tensor.clone());
    }
    Ok(names)
}

/// Returns the tensors of a shard that the index assigns to it, or all tensors of a whole model, which has no index.
/// `bytes` is the content of `file`.
///
/// # Errors
/// The file is truncated or damaged, or lacks a tensor that the index assigns to it.
pub fn tensors<'a>(
    dir: &Path,
    file: &str,
    bytes: &'a [u8],
    assigned: &BTreeSet<String>,
) -> Result<Vec<(String, TensorView<'a>)>> {
    let damaged = |e: SafeTensorError| {
        Error::model(format!("{}: damaged or truncated: {e}", dir.join(file).display()))
    };
    let shard = SafeTensors::deserialize(bytes).map_err(damaged)?;
    if let Some(lost) = assigned.iter().find(|name| shard.tensor(name).is_err()) {
        let index = dir.join(INDEX);
        return Err(Error::model(format!("{}: {file} holds no tensor {lost}", index.display())));
    }
    let mut tensors = shard.tensors();
    tensors.retain(|(name, _)| assigned.is_empty() || assigned.contains(name));
    Ok(tensors)
}

/// Returns the error for a tensor that no file of the directory contains.
pub fn missing_tensor(dir: &Path, tensor: &str) -> Error {
    Error::model(format!("{}: tensor {tensor} is missing", dir.display()))
}

/// Checks a tensor's shape; `path` is for the message.
///
/// # Errors
/// The shape differs from the one that the config implies.
pub fn check_shape(path: &Path, tensor: &str, actual: &[usize], expected: &[usize]) -> Result<()> {
    if actual == expected {
        return Ok(());
    }
    Err(Error::model(format!(
        "{}: tensor {tensor} has shape {actual:?}, but config.json implies {expected:?}",
        path.display()
    )))
}

/// Returns the error for a tensor of another element type than BF16, F16 and F32; `path` is for the message.
pub fn unsupported_dtype(path: &Path, tensor: &str, dtype: Dtype) -> Error {
    let path = path.display();
    Error::model(format!(
        "{path}: tensor {tensor} is {dtype:?}, only BF16, F16 and F32 are implemented"
    ))
}

/// Returns whether a shard's name is a file name without a folder, so that it stays inside the directory.
fn is_plain_name(file: &str) -> bool {
    let mut parts = Path::new(file).components();
    matches!(parts.next(), Some(std::path::Component::Normal(_))) && parts.next().is_none()
}
