//! The files of a model: a folder in the Hugging Face format, or a GGUF file, whose header is read once.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;

use crate::checkpoint::Checkpoint;
use crate::config::ModelConfig;
use crate::error::Result;
use crate::gguf::Gguf;
use crate::source::Source;
use crate::template::{Template, tokens_of};
use crate::text::Text;

/// The files of a model. Clones share the header of a GGUF file.
#[derive(Clone)]
pub enum ModelFiles {
    /// A folder in the Hugging Face format.
    Folder(PathBuf),
    /// A GGUF file.
    Gguf(Arc<Gguf>),
}

impl ModelFiles {
    /// Opens a GGUF file and reads its header, or names a folder.
    ///
    /// # Errors
    /// As [`Gguf::open`].
    pub fn open(path: &Path) -> Result<Self> {
        if path.is_file() { Ok(Self::Gguf(Arc::new(Gguf::open(path)?))) } else { Ok(Self::Folder(path.into())) }
    }

    /// Reads the config of the model.
    ///
    /// # Errors
    /// As [`ModelConfig::read`] and [`Gguf::config`].
    pub fn config(&self) -> Result<ModelConfig> {
        match self {
            Self::Folder(dir) => ModelConfig::read(dir),
            Self::Gguf(gguf) => gguf.config(),
        }
    }

    /// Reads the tokenizer, and the chat template unless one is given.
    ///
    /// # Errors
    /// As [`Text::read`] and [`Gguf::text`].
    pub fn text(&self, vocab: usize, template: Option<Template>) -> Result<Text> {
        match self {
            Self::Folder(dir) => Text::read(dir, vocab, template),
            Self::Gguf(gguf) => gguf.text(vocab, template),
        }
    }

    /// Returns the contents of the files that name the special tokens, as [`Template::from_file`] takes them.
    ///
    /// # Errors
    /// A file cannot be read or is damaged.
    pub fn special_tokens(&self) -> Result<[Value; 2]> {
        match self {
            Self::Folder(dir) => tokens_of(dir),
            Self::Gguf(gguf) => Ok([gguf.tokenizer_config()?, Value::Null]),
        }
    }

    /// Opens the weights.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub fn weights(&self) -> Result<Box<dyn Source + '_>> {
        match self {
            Self::Folder(dir) => Ok(Box::new(Checkpoint::open(dir)?)),
            Self::Gguf(gguf) => Ok(Box::new(&**gguf)),
        }
    }
}
