//! Models in a GGUF file, as llama.cpp's converter writes them: weights, config, tokenizer and chat template.
//!
//! [`Gguf::open`] reads and checks the header. Tensors are read and dequantised on request, row by row. No maintained
//! crate has both a bounded reader and the K types, so the module implements both.
//!
//! ```text
//! header        metadata and places of tensors
//! quants        the types of elements; dequantisation
//! tensors       names and layouts of llama.cpp, converted to those of published checkpoints
//! config        metadata to the fields of config.json
//! tokenizer     metadata to a tokenizer and a chat template
//! ```

mod config;
mod header;
mod quants;
mod tensors;
mod tokenizer;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::{Error, Result};
use crate::fields::Fields;
use crate::files::check_content;
use header::Header;
pub use quants::Quant;

/// The first bytes of a file.
const MAGIC: [u8; 4] = *b"GGUF";

/// An open GGUF file.
pub struct Gguf {
    path: PathBuf,
    file: File,
    kind: Kind,
    /// The metadata: an object.
    metadata: Value,
    tensors: BTreeMap<String, Tensor>,
}

/// The kinds of models, by `general.architecture`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Llama,
    Gemma3,
}

/// The place and the type of a tensor.
struct Tensor {
    /// Row-major, as in published checkpoints; GGUF reverses the order.
    shape: Vec<usize>,
    quant: Quant,
    /// Offset in the file, in bytes.
    start: u64,
}

/// Returns whether a path names a GGUF file: by its extension, even if there is no file, or by the file's first bytes.
pub fn is_gguf(path: &Path) -> bool {
    let mut magic = [0; 4];
    let mut read = || File::open(path)?.read_exact(&mut magic);
    path.extension() == Some("gguf".as_ref()) || (path.is_file() && read().is_ok() && magic == MAGIC)
}

impl Gguf {
    /// Opens a file and reads its header.
    ///
    /// # Errors
    /// The file cannot be read, is not a GGUF file or is one part of several, is truncated or damaged, or contains a
    /// model or a type of tensors that is not implemented.
    pub fn open(path: &Path) -> Result<Self> {
        let wrong = |what: String| Error::model(format!("{}: {what}", path.display()));
        let mut file = File::open(path).map_err(|e| wrong(format!("cannot read the file: {e}")))?;
        let mut start = Vec::new();
        let read = (&mut file).take(64).read_to_end(&mut start).and_then(|_| file.rewind());
        read.map_err(|e| wrong(format!("cannot read the file: {e}")))?;
        check_content(path, &start)?;
        let Header { metadata, tensors } = header::read(&file).map_err(wrong)?;
        let metadata = Value::Object(metadata);
        let fields = Fields::new(path, &metadata)?;
        if fields.get("split.count").is_some_and(|count| count.as_u64() != Some(1)) {
            return Err(fields.wrong("the model is split into several files: merge them with llama-gguf-split --merge"));
        }
        let kind = match fields.text("general.architecture")? {
            Some("llama") => Kind::Llama,
            Some("gemma3") => Kind::Gemma3,
            Some(other) => {
                return Err(
                    fields.wrong(&format!("general.architecture {other:?} is not implemented, only llama and gemma3"))
                );
            }
            None => return Err(fields.wrong("general.architecture is missing")),
        };
        Ok(Self { path: path.into(), file, kind, metadata, tensors })
    }

    /// Returns the metadata.
    fn fields(&self) -> Result<Fields<'_>> {
        Fields::new(&self.path, &self.metadata)
    }

    fn wrong(&self, what: &str) -> Error {
        Error::model(format!("{}: {what}", self.path.display()))
    }
}

impl Kind {
    /// Returns the prefix of the kind's metadata.
    fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Gemma3 => "gemma3",
        }
    }
}
