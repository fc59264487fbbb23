//! Checks of records: 16 bytes of XXH3-128, or of keyed BLAKE3 if the host has a secret.

use std::fmt;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use twox_hash::xxhash3_128::Hasher as Xxh3;

/// Bytes of a check.
pub const CHECK_BYTES: usize = 16;

/// A key of 32 bytes. Only hosts with the same secret can write records that this host accepts.
#[derive(Clone)]
pub struct Secret([u8; 32]);

impl Secret {
    /// Creates a secret from its bytes.
    pub fn new(key: [u8; 32]) -> Self {
        Self(key)
    }

    /// Reads a secret from the first 32 bytes of a file.
    ///
    /// # Errors
    /// If the file cannot be read, is shorter than 32 bytes, or if its group or others may read or write it.
    pub fn from_file(path: &Path) -> io::Result<Self> {
        let mut file = std::fs::File::open(path)?;
        let mode = file.metadata()?.mode();
        if mode & 0o077 != 0 {
            let text = format!("{}: mode {:o}, but only the owner may read it", path.display(), mode & 0o777);
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
        }
        let mut key = [0; 32];
        file.read_exact(&mut key)?;
        Ok(Self(key))
    }

    /// Returns a key for another purpose than checks.
    pub(crate) fn derive(&self, purpose: &str) -> [u8; 32] {
        blake3::derive_key(purpose, &self.0)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// The check of bytes that arrive in pieces.
pub(crate) enum Checker {
    Xxh3(Box<Xxh3>),
    Blake3(Box<blake3::Hasher>),
}

impl Checker {
    pub fn new(secret: Option<&Secret>) -> Self {
        match secret {
            None => Self::Xxh3(Box::default()),
            Some(secret) => Self::Blake3(Box::new(blake3::Hasher::new_keyed(&secret.0))),
        }
    }

    pub fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Xxh3(hasher) => hasher.write(bytes),
            Self::Blake3(hasher) => drop(hasher.update(bytes)),
        }
    }

    /// Returns the check. XXH3-128 is in its canonical form, highest byte first.
    pub fn finish(&self) -> [u8; CHECK_BYTES] {
        let mut check = [0; CHECK_BYTES];
        match self {
            Self::Xxh3(hasher) => check = hasher.finish_128().to_be_bytes(),
            Self::Blake3(hasher) => hasher.finalize_xof().fill(&mut check),
        }
        check
    }
}

/// Returns the check of these bytes, which follow one another.
pub(crate) fn check(parts: &[&[u8]], secret: Option<&Secret>) -> [u8; CHECK_BYTES] {
    let mut checker = Checker::new(secret);
    parts.iter().for_each(|part| checker.update(part));
    checker.finish()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn parts_have_the_check_of_the_whole() {
        let bytes: Vec<u8> = (0..5000u32).map(|i| (i * 7 % 251) as u8).collect();
        for secret in [None, Some(Secret::new([7; 32]))] {
            let whole = check(&[&bytes], secret.as_ref());
            for cut in [0, 1, 239, 240, 241, 1024, 5000] {
                let (a, b) = bytes.split_at(cut);
                assert_eq!(check(&[a, b], secret.as_ref()), whole);
            }
            assert_ne!(check(&[&bytes[1..]], secret.as_ref()), whole);
        }
    }

    #[test]
    fn a_secret_that_others_can_read_is_rejected() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("secret");
        std::fs::write(&path, [9; 40]).expect("a file");
        for (mode, accepted) in [(0o600, true), (0o400, true), (0o640, false), (0o604, false), (0o620, false)] {
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).expect("it is ours");
            assert_eq!(Secret::from_file(&path).is_ok(), accepted, "{mode:o}");
        }
        std::fs::write(folder.path().join("short"), [9; 31]).expect("a file");
        std::fs::set_permissions(folder.path().join("short"), PermissionsExt::from_mode(0o600)).expect("it is ours");
        assert!(Secret::from_file(&folder.path().join("short")).is_err());
        assert_eq!(format!("{:?}", Secret::new([9; 32])), "Secret(..)");
    }
}
