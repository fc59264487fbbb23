//! The digest of a model's files, which is part of its [`Identity`](crate::identity::Identity).

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::name::read_hex;

/// Returns a digest of the names and contents of a model's files: a folder's files with these extensions, or one
/// file.
///
/// The digests of single files are kept in the file `known`, if any, by device, inode, size and time, so that a restart
/// does not read the weights again. Other users must not have the right to write it. In a cache of the Hugging Face
/// Hub, a file is a link to a file whose name is its digest.
///
/// # Errors
/// If a file cannot be read.
pub fn digest(model: &Path, extensions: &[&str], known: Option<&Path>) -> io::Result<[u8; 32]> {
    let mut files: Vec<PathBuf> = vec![model.to_owned()];
    if model.is_dir() {
        let entries = fs::read_dir(model)?.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
        let has_extension = |path: &PathBuf| path.extension().is_some_and(|is| extensions.iter().any(|&one| is == one));
        files = entries.into_iter().filter(has_extension).collect();
        files.sort();
    }
    let text = known.and_then(|known| fs::read_to_string(known).ok()).unwrap_or_default();
    let mut digests: HashMap<String, [u8; 32]> = text
        .lines()
        .filter_map(|line| line.split_once(' ').and_then(|(hex, key)| Some((key.to_owned(), read_hex(hex).ok()?))))
        .collect();
    let (mut all, before) = (Sha256::new(), digests.len());
    for file in &files {
        let name = if model.is_dir() { file.file_name() } else { None }.unwrap_or_default();
        all.update((name.len() as u64).to_le_bytes());
        all.update(name.as_encoded_bytes());
        all.update(of_file(file, &mut digests)?);
    }
    if let Some(known) = known.filter(|_| digests.len() > before) {
        let hex = |digest: &[u8; 32]| digest.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let lines: String = digests.iter().map(|(key, digest)| format!("{} {key}\n", hex(digest))).collect();
        let other = known.with_extension(std::process::id().to_string());
        fs::write(&other, lines)?;
        fs::rename(&other, known)?;
    }
    Ok(all.finalize().into())
}

fn of_file(path: &Path, digests: &mut HashMap<String, [u8; 32]>) -> io::Result<[u8; 32]> {
    let target = fs::canonicalize(path)?;
    let is_blob = target.parent().and_then(Path::file_name).is_some_and(|name| name == "blobs");
    if let Some(Ok(digest)) = target.file_name().and_then(|name| name.to_str()).map(read_hex).filter(|_| is_blob) {
        return Ok(digest);
    }
    let is = fs::metadata(&target)?;
    let key = format!("{} {} {} {}.{:09}", is.dev(), is.ino(), is.size(), is.mtime(), is.mtime_nsec());
    if let Some(digest) = digests.get(&key) {
        return Ok(*digest);
    }
    let (mut file, mut hasher, mut buffer) = (File::open(&target)?, Sha256::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            count => hasher.update(&buffer[..count]),
        }
    }
    let digest: [u8; 32] = hasher.finalize().into();
    digests.insert(key, digest);
    Ok(digest)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn names_and_contents_count_and_blobs_are_not_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let (model, known) = (folder.path().join("model"), folder.path().join("digests"));
        let of = || digest(&model, &["json", "safetensors"], Some(&known)).expect("they can be read");
        fs::create_dir(&model).expect("a folder");
        fs::write(model.join("config.json"), "{}").expect("a file");
        fs::write(model.join("a.safetensors"), "weights").expect("a file");
        let first = of();
        fs::write(model.join("README.md"), "other").expect("a file");
        assert_eq!(of(), first);
        assert_eq!(fs::read_to_string(&known).expect("it was written").lines().count(), 2);
        // A digest in the file is used as it is.
        let text = fs::read_to_string(&known).expect("it was written");
        fs::write(&known, text.replace(&text[..64], &"0".repeat(64))).expect("it is ours");
        assert_ne!(of(), first);
        fs::remove_file(&known).expect("it is there");
        assert_eq!(of(), first);
        fs::rename(model.join("a.safetensors"), model.join("b.safetensors")).expect("it is ours");
        let renamed = of();
        assert_ne!(renamed, first);
        fs::write(model.join("b.safetensors"), "Weights, other ones").expect("a file");
        assert_ne!(of(), renamed);
        // A blob's name is its digest.
        let blobs = folder.path().join("blobs");
        fs::create_dir(&blobs).expect("a folder");
        let blob = |digit: &str| {
            let path = blobs.join(digit.repeat(64));
            fs::write(&path, "the same").expect("a file");
            _ = fs::remove_file(model.join("b.safetensors"));
            symlink(path, model.join("b.safetensors")).expect("a link");
            of()
        };
        assert_ne!(blob("1"), blob("2"));
    }
}
