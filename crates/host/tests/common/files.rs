//! Model directories for tests: damaged or modified copies of golden models.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::Value;

/// Temporary directory, removed on drop.
pub struct Dir(PathBuf);

impl Dir {
    /// Creates an empty directory.
    pub fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("kvarena-test-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        // A run that was killed may have left a directory with files.
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).expect("a temporary directory");
        Self(path)
    }

    /// Copies a golden model.
    pub fn copy_of(model: &str) -> Self {
        let dir = Self::new();
        for file in ["config.json", "model.safetensors"] {
            fs::copy(super::dir(model).join(file), dir.0.join(file)).expect("a copy");
        }
        dir
    }

    /// Copies a golden model and changes its config.
    pub fn with_config(model: &str, change: impl FnOnce(&mut Value)) -> Self {
        let dir = Self::copy_of(model);
        let config = fs::read(dir.0.join("config.json")).expect("a config");
        let mut config = serde_json::from_slice(&config).expect("JSON");
        change(&mut config);
        dir.write("config.json", config.to_string());
        dir
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, content).expect("a file");
        path
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
