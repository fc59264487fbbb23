//! The mapped tensors of a model directory. The driver copies bf16 tensors from the mapping to the device; other types
//! are first rounded to bf16 in host memory.
//!
//! `checkpoint.rs` reads tensors into host memory.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use half::bf16;
use memmap2::Mmap;
use safetensors::Dtype;

use crate::checkpoint::{check_shape, missing_tensor, shards, tensors, unsupported_dtype};
use crate::error::{Error, Result};

/// A directory's mapped files, and the place of each tensor.
pub(super) struct Files {
    dir: PathBuf,
    maps: Vec<Mmap>,
    tensors: BTreeMap<String, Tensor>,
}

struct Tensor {
    map: usize,
    /// Offset in the map, in bytes.
    start: usize,
    len: usize,
    shape: Vec<usize>,
    dtype: Dtype,
}

impl Files {
    /// Maps all files.
    ///
    /// # Errors
    /// See [`Checkpoint::read`](crate::checkpoint::Checkpoint::read).
    pub(super) fn open(dir: &Path) -> Result<Self> {
        let mut files = Self { dir: dir.into(), maps: Vec::new(), tensors: BTreeMap::new() };
        for (file, assigned) in shards(dir)? {
            let map = map(&dir.join(&file))?;
            let base = map.as_ptr() as usize;
            for (name, view) in tensors(dir, &file, &map, &assigned)? {
                let (start, len) = (view.data().as_ptr() as usize - base, view.data().len());
                let (shape, dtype) = (view.shape().to_vec(), view.dtype());
                let tensor = Tensor { map: files.maps.len(), start, len, shape, dtype };
                files.tensors.insert(name, tensor);
            }
            files.maps.push(map);
        }
        Ok(files)
    }

    /// Returns the bytes of a tensor in bf16: the bytes of the file, or numbers rounded from f16 or f32.
    ///
    /// # Errors
    /// The tensor is missing, or its shape or type does not fit.
    pub(super) fn bf16(&self, name: &str, shape: &[usize]) -> Result<Cow<'_, [u8]>> {
        let tensor = self.tensors.get(name).ok_or_else(|| missing_tensor(&self.dir, name))?;
        check_shape(&self.dir, name, &tensor.shape, shape)?;
        let bytes = &self.maps[tensor.map][tensor.start..][..tensor.len];
        let two = |b: &[u8]| u16::from_le_bytes([b[0], b[1]]);
        let four = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        let rounded = |x: f32| bf16::from_f32(x).to_le_bytes();
        match tensor.dtype {
            Dtype::BF16 => Ok(Cow::Borrowed(bytes)),
            Dtype::F16 => {
                let wide = bytes.chunks_exact(2).map(|b| half::f16::from_bits(two(b)).to_f32());
                Ok(wide.flat_map(rounded).collect())
            }
            Dtype::F32 => Ok(bytes.chunks_exact(4).map(four).flat_map(rounded).collect()),
            other => Err(unsupported_dtype(&self.dir, name, other)),
        }
    }
}

fn map(path: &Path) -> Result<Mmap> {
    let cannot = |e| Error::model(format!("cannot read {}: {e}", path.display()));
    let file = File::open(path).map_err(cannot)?;
    // SAFETY: the file is only read. If another process truncates it, this program ends, as the docs of `Mmap` state.
    unsafe { Mmap::map(&file) }.map_err(cannot)
}
