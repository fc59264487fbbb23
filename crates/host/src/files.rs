//! Reads the files of a model directory.

use std::path::Path;

use serde_json::Value;

use crate::error::{Error, Result};

/// Reads a JSON file.
///
/// # Errors
/// The file cannot be read or is not JSON.
pub fn read_json(path: &Path) -> Result<Value> {
    parse_json(path, &read_file(path)?)
}

/// Reads the content of a JSON file; `path` is for messages.
///
/// # Errors
/// The content is not JSON.
pub fn parse_json(path: &Path, content: &[u8]) -> Result<Value> {
    serde_json::from_slice(content).map_err(|e| Error::model(format!("{}: not valid JSON: {e}", path.display())))
}

/// Reads a file of a model.
///
/// # Errors
/// The file cannot be read, or see [`check_content`].
pub fn read_file(path: &Path) -> Result<Vec<u8>> {
    let cannot = |e| Error::model(format!("cannot read {}: {e}", path.display()));
    let content = std::fs::read(path).map_err(cannot)?;
    check_content(path, &content)?;
    Ok(content)
}

/// Rejects a Git LFS pointer. A clone without Git LFS has such a pointer in place of each large file.
///
/// # Errors
/// The content is a pointer.
pub fn check_content(path: &Path, content: &[u8]) -> Result<()> {
    if !content.starts_with(b"version https://git-lfs.github.com/spec/") {
        return Ok(());
    }
    let dir = path.parent().unwrap_or(Path::new("."));
    Err(Error::model(format!(
        "{} is a Git LFS pointer instead of the file: install Git LFS, then run `git lfs pull` in {}",
        path.display(),
        dir.display()
    )))
}
