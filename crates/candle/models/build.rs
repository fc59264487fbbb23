//! Patches candle's model files, which cargo has downloaded. The build does not compile
//! candle-transformers itself.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use serde_json::Value;

const MODELS: [&str; 3] = ["gemma3", "llama", "qwen3"];

fn main() {
    let source = candle_transformers().join("src");
    let of_model = |name: &str| read(source.join("models").join(name).with_extension("rs"));
    write("utils", read(source.join("utils.rs")));
    write("with_tracing", patched("with_tracing", &of_model("with_tracing")));
    for name in MODELS {
        let file = of_model(name);
        write(&format!("paged_{name}"), patched(name, &file));
        write(name, file);
    }
}

fn patched(name: &str, file: &str) -> String {
    let path = format!("patches/{name}.patch");
    println!("cargo::rerun-if-changed={path}");
    let text = read(&path);
    let patch = diffy::Patch::from_str(&text).expect("a unified diff");
    diffy::apply(file, &patch).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Writes a file for `include!`. Turns inner doc comments (`//!`), which `include!` rejects, into plain comments.
fn write(name: &str, text: String) {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let text = text.replace("//!", "//");
    fs::write(out.join(name).with_extension("rs"), text).expect("OUT_DIR is writable");
}

fn read(path: impl AsRef<Path>) -> String {
    let path = path.as_ref();
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns the folder into which cargo has unpacked candle-transformers.
fn candle_transformers() -> PathBuf {
    let cargo = env::var_os("CARGO").expect("cargo sets it");
    let arguments = ["metadata", "--format-version", "1", "--locked", "--all-features"];
    let output = Command::new(cargo).args(arguments).output().expect("cargo runs");
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo prints JSON");
    let packages = metadata["packages"].as_array().expect("a list of packages");
    let package = packages.iter().find(|package| package["name"] == "candle-transformers");
    let manifest = package.expect("a dependency")["manifest_path"].as_str().expect("a path");
    Path::new(manifest).parent().expect("it is in a folder").to_path_buf()
}
