//! Finds cublasLt and NCCL in the folders of two environment variables, Python's wheels and toolkits. Opens them by
//! path, or else by name. When `cudarc` later opens cublasLt by name, the dynamic linker returns the open library.

use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use super::error::GpuError;

/// Environment variable with the folders to search first, separated by `:`.
const FOLDERS: &str = "KVARENA_CUDA_LIB";
const CUBLASLT: [&str; 2] = ["libcublasLt.so.13", "libcublasLt.so.12"];
const NCCL: [&str; 1] = ["libnccl.so.2"];

/// Opens cublasLt and never closes it.
pub(super) fn open_cublaslt() -> Result<(), GpuError> {
    open(&CUBLASLT).map(std::mem::forget).map_err(|why| GpuError::NoCublasLt { why })
}

/// Opens NCCL, or returns the reason of the failure.
pub(super) fn open_nccl() -> Result<Library, String> {
    open(&NCCL)
}

fn open(names: &[&str]) -> Result<Library, String> {
    let mut why = format!("cannot find {}; {FOLDERS} can list more folders", names.join(" or "));
    let folders = folders();
    for name in names {
        let found = folders.iter().map(|folder| folder.join(name)).filter(|path| path.exists());
        for path in found.chain([PathBuf::from(name)]) {
            // SAFETY: opening NVIDIA's library runs its initialisers, which is intended.
            match unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) } {
                Ok(library) => return Ok(library),
                Err(error) if path.is_absolute() => why = error.to_string(),
                Err(_) => {}
            }
        }
    }
    Err(why)
}

/// Returns the folders that may contain the libraries, in order of preference.
fn folders() -> Vec<PathBuf> {
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let listed = |name: &str| -> Vec<PathBuf> {
        variable(name).split(':').filter(|s| !s.is_empty()).map(PathBuf::from).collect()
    };
    let mut folders = [listed(FOLDERS), listed("LD_LIBRARY_PATH")].concat();
    let mut roots = [listed("VIRTUAL_ENV"), listed("CONDA_PREFIX")].concat();
    for path in listed("PATH") {
        if path.join("python3").exists() {
            roots.extend(path.parent().map(PathBuf::from));
        }
    }
    roots.extend(["/usr/local", "/usr"].map(PathBuf::from));
    for root in roots {
        folders.extend(wheels(&root.join("lib")));
    }
    for toolkit in ["/usr/local/cuda", "/usr/local/cuda-13", "/usr/local/cuda-12", "/opt/cuda"] {
        let toolkit = Path::new(toolkit);
        folders.extend([toolkit.join("lib64"), toolkit.join("targets/x86_64-linux/lib")]);
    }
    folders
}

/// Returns the folders `*/site-packages/nvidia/*/lib` and `*/dist-packages/nvidia/*/lib` below `lib`. Python's wheels
/// install libraries there.
fn wheels(lib: &Path) -> Vec<PathBuf> {
    let children = |folder: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect()
    };
    let mut found = Vec::new();
    for python in children(lib) {
        for site in ["site-packages", "dist-packages"] {
            let nvidia = children(&python.join(site).join("nvidia"));
            found.extend(nvidia.into_iter().map(|wheel| wheel.join("lib")).filter(|p| p.is_dir()));
        }
    }
    found.sort();
    found
}
