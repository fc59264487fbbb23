//! The tensors of a model directory: one `model.safetensors`, or the shards of an index. Opening reads the headers; a
//! tensor is read when the model requests it, so no file is ever in memory as a whole.
//!
//! `model.rs` and the modules of its layers name the tensors of a model.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Cursor, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use bytemuck::Pod;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use crate::error::{Error, Result};
use crate::fields::Fields;
use crate::files::{check_content, read_json};
use crate::matrix::Numbers;
use crate::quantised::{self, FP8_BLOCK, MXFP4_BLOCK};
use crate::source::Source;

/// The file name of a model without shards.
const WHOLE: &str = "model.safetensors";
/// The file name of the index of a model's shards.
const INDEX: &str = "model.safetensors.index.json";
/// Maximum bytes of a header, as in the safetensors crate.
const HEADER_MAX: u64 = 100_000_000;

/// The files of a directory, and the place of each tensor.
pub struct Checkpoint {
    dir: PathBuf,
    files: Vec<(PathBuf, Box<dyn Content>)>,
    tensors: BTreeMap<String, Tensor>,
}

/// A file, or a file's bytes in memory.
trait Content: Read + Seek {}

impl<T: Read + Seek> Content for T {}

#[derive(Clone)]
struct Tensor {
    /// Index of the file.
    file: usize,
    /// Offset of the elements in the file, in bytes.
    start: u64,
    info: TensorInfo,
}

impl Checkpoint {
    /// Opens all files and reads their headers.
    ///
    /// # Errors
    /// A file is missing, truncated or damaged; an index is invalid, or names a tensor that its shard lacks.
    pub fn open(dir: &Path) -> Result<Self> {
        let mut checkpoint = Self { dir: dir.into(), files: Vec::new(), tensors: BTreeMap::new() };
        for (file, assigned) in shards(dir)? {
            let path = dir.join(&file);
            let opened = File::open(&path).map_err(|e| unreadable(&path, &e))?;
            checkpoint.add(&file, Box::new(opened), &assigned)?;
        }
        Ok(checkpoint)
    }

    /// Reads the header of a `model.safetensors` in memory; `dir` is for messages.
    ///
    /// # Errors
    /// The content is damaged.
    pub fn in_memory(dir: &Path, content: &'static [u8]) -> Result<Self> {
        let mut checkpoint = Self { dir: dir.into(), files: Vec::new(), tensors: BTreeMap::new() };
        checkpoint.add(WHOLE, Box::new(Cursor::new(content)), &BTreeSet::new())?;
        Ok(checkpoint)
    }

    /// Adds the tensors of a shard that the index assigns to it, or all tensors of a whole model, which has no index.
    fn add(&mut self, file: &str, mut content: Box<dyn Content>, assigned: &BTreeSet<String>) -> Result<()> {
        let path = self.dir.join(file);
        let (data, metadata) = header(&path, &mut *content)?;
        let tensors = metadata.tensors();
        if let Some(lost) = assigned.iter().find(|&name| !tensors.contains_key(name)) {
            let index = self.dir.join(INDEX);
            return Err(Error::model(format!("{}: {file} holds no tensor {lost}", index.display())));
        }
        for (name, info) in tensors {
            if assigned.is_empty() || assigned.contains(&name) {
                let start = data + info.data_offsets.0 as u64;
                let tensor = Tensor { file: self.files.len(), start, info: info.clone() };
                self.tensors.insert(name, tensor);
            }
        }
        self.files.push((path, content));
        Ok(())
    }

    /// Returns a tensor by its name in a model of text. A model of text and images has a prefix before it, or after
    /// `model.`.
    fn find(&self, name: &str) -> Option<Tensor> {
        let prefixed = [format!("language_model.{name}"), name.replacen("model.", "model.language_model.", 1)];
        let found = self.tensors.get(name);
        found.or_else(|| prefixed.iter().find_map(|name| self.tensors.get(name))).cloned()
    }

    /// Reads a tensor that is not MXFP4.
    fn read(&mut self, name: &str, tensor: &Tensor, shape: &[usize]) -> Result<Numbers> {
        self.check_shape(name, tensor, shape)?;
        match (tensor.info.dtype, shape) {
            (Dtype::BF16, _) => self.elements(tensor).map(Numbers::Bf16),
            (Dtype::F16, _) => self.elements(tensor).map(Numbers::F16),
            (Dtype::F32, _) => self.elements(tensor).map(Numbers::F32),
            (Dtype::F8_E4M3, &[rows, cols]) => self.fp8(name, tensor, rows, cols),
            _ => Err(self.unsupported_dtype(name, tensor)),
        }
    }

    /// Reads a matrix of fp8 and its factors, `NAME_scale_inv`.
    fn fp8(&mut self, name: &str, tensor: &Tensor, rows: usize, cols: usize) -> Result<Numbers> {
        let name = format!("{name}_scale_inv");
        let factors = self.find(&name).ok_or_else(|| self.missing(&name))?;
        let blocks = [rows.div_ceil(FP8_BLOCK), cols.div_ceil(FP8_BLOCK)];
        let factors = self.read(&name, &factors, &blocks)?.to_f32();
        let codes: Vec<u8> = self.elements(tensor)?;
        Ok(Numbers::Bf16(quantised::fp8(&codes, &factors, cols)))
    }

    /// Reads matrices of MXFP4, `NAME_blocks` and `NAME_scales`. The shape is that of the transposed matrices.
    fn mxfp4(&mut self, name: &str, shape: &[usize]) -> Result<Numbers> {
        let names = [format!("{name}_blocks"), format!("{name}_scales")];
        let ([Some(blocks), Some(exponents)], &[count, cols, rows]) =
            (names.each_ref().map(|name| self.find(name)), shape)
        else {
            return Err(self.missing(name));
        };
        if !cols.is_multiple_of(MXFP4_BLOCK) {
            let what = format!("{name}: {cols} columns are not blocks of {MXFP4_BLOCK}");
            return Err(Error::model(format!("{}: {what}", self.dir.display())));
        }
        let per_row = cols / MXFP4_BLOCK;
        let shape = [count, rows, per_row, MXFP4_BLOCK / 2];
        let blocks = self.bytes(&names[0], &blocks, &shape)?;
        let exponents = self.bytes(&names[1], &exponents, &shape[..3])?;
        Ok(Numbers::Bf16(quantised::mxfp4(&blocks, &exponents, rows, cols)))
    }

    /// Reads a tensor of bytes.
    fn bytes(&mut self, name: &str, tensor: &Tensor, shape: &[usize]) -> Result<Vec<u8>> {
        self.check_shape(name, tensor, shape)?;
        match tensor.info.dtype {
            Dtype::U8 => self.elements(tensor),
            _ => Err(self.unsupported_dtype(name, tensor)),
        }
    }

    /// Reads the elements of a tensor whose type has the size of `T`.
    fn elements<T: Pod>(&mut self, tensor: &Tensor) -> Result<Vec<T>> {
        let (path, content) = &mut self.files[tensor.file];
        let mut elements = bytemuck::zeroed_vec(tensor.info.shape.iter().product());
        content
            .seek(SeekFrom::Start(tensor.start))
            .and_then(|_| content.read_exact(bytemuck::cast_slice_mut(&mut elements)))
            .map_err(|e| unreadable(path, &e))?;
        Ok(elements)
    }

    fn missing(&self, name: &str) -> Error {
        Error::model(format!("{}: tensor {name} is missing", self.dir.display()))
    }

    fn check_shape(&self, name: &str, tensor: &Tensor, expected: &[usize]) -> Result<()> {
        let (actual, path) = (&tensor.info.shape[..], self.files[tensor.file].0.display());
        if actual == expected {
            return Ok(());
        }
        let what = format!("tensor {name} has shape {actual:?}, but config.json implies {expected:?}");
        Err(Error::model(format!("{path}: {what}")))
    }

    fn unsupported_dtype(&self, name: &str, tensor: &Tensor) -> Error {
        let (path, dtype) = (self.files[tensor.file].0.display(), tensor.info.dtype);
        Error::model(format!(
            "{path}: tensor {name} is {dtype:?}, only BF16, F16, F32, matrices of F8_E4M3 and U8 of MXFP4 are implemented"
        ))
    }
}

impl Source for Checkpoint {
    fn numbers(&mut self, name: &str, shape: &[usize]) -> Result<Numbers> {
        match self.find(name) {
            Some(tensor) => self.read(name, &tensor, shape),
            None => self.mxfp4(name, shape),
        }
    }
}

/// Reads the header of a file. Returns the offset of the tensors' data, and their shapes and places in the data.
///
/// # Errors
/// The file is a Git LFS pointer, or the header is damaged or does not describe a file of this length.
fn header(path: &Path, file: &mut dyn Content) -> Result<(u64, Metadata)> {
    let damaged = |e: &str| Error::model(format!("{}: damaged or truncated: {e}", path.display()));
    let cannot = |e| unreadable(path, &e);
    let mut start = Vec::new();
    Read::take(&mut *file, 64).read_to_end(&mut start).map_err(cannot)?;
    check_content(path, &start)?;
    let bytes = file.seek(SeekFrom::End(0)).map_err(cannot)?;
    file.rewind().map_err(cannot)?;
    let mut len = [0; 8];
    if bytes < len.len() as u64 {
        return Err(damaged(&format!("{bytes} bytes contain no header")));
    }
    file.read_exact(&mut len).map_err(cannot)?;
    let len = u64::from_le_bytes(len);
    if len > HEADER_MAX.min(bytes - 8) {
        return Err(damaged(&format!("a header of {len} bytes in a file of {bytes}")));
    }
    let mut header = vec![0; len as usize];
    file.read_exact(&mut header).map_err(cannot)?;
    let metadata: Metadata = serde_json::from_slice(&header).map_err(|e| damaged(&format!("its header: {e}")))?;
    let (start, data) = (8 + len, metadata.data_len() as u64);
    if start.checked_add(data) != Some(bytes) {
        return Err(damaged(&format!("{data} bytes of tensors after {start} of header, in a file of {bytes}")));
    }
    Ok((start, metadata))
}

/// Returns the files of a model, each with the tensors that the index assigns to it. A whole model has no index.
///
/// # Errors
/// The directory has neither a whole model nor an index, or the index is unreadable or invalid.
fn shards(dir: &Path) -> Result<BTreeMap<String, BTreeSet<String>>> {
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
            return Err(index.wrong(&format!("weight_map: the file of {tensor} has no plain file name")));
        };
        names.entry(file.to_owned()).or_default().insert(tensor.clone());
    }
    Ok(names)
}

/// Returns whether a shard's name is a file name without a folder, so that it stays inside the directory.
fn is_plain_name(file: &str) -> bool {
    let mut parts = Path::new(file).components();
    matches!(parts.next(), Some(std::path::Component::Normal(_))) && parts.next().is_none()
}

fn unreadable(path: &Path, cause: &std::io::Error) -> Error {
    Error::model(format!("cannot read {}: {cause}", path.display()))
}
