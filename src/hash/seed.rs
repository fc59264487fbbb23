//! [`HashSeed`]: the seed of vLLM's page hashes, which is the text of an environment variable.

use std::fmt;

use crate::error::ConfigError;

/// The seed of [`Hashing::VllmSha256CborSeeded`](super::Hashing): the text of `PYTHONHASHSEED` in a vLLM process.
///
/// vLLM hashes the variable's text. So `"0"` and `"00"` are different seeds, and `"random"` is a fixed seed. An empty
/// text differs from an unset variable.
///
/// ```
/// # use kvarena::TokenId;
/// # use kvarena::hash::{HashSeed, Hashing, NamespaceNames};
/// let chain = |hashing: Hashing| hashing.chain(&NamespaceNames::default(), &[TokenId::new(7); 16], 16);
/// let seeded = Hashing::VllmSha256CborSeeded(HashSeed::new("0")?);
/// assert_ne!(chain(seeded), chain(Hashing::VllmSha256Cbor));
/// # Ok::<(), kvarena::ConfigError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(try_from = "String", into = "String")
)]
pub struct HashSeed {
    len: u8,
    /// The text, followed by zeros.
    bytes: [u8; Self::MAX_LEN],
}

impl HashSeed {
    /// Maximum length of the text, in bytes. Python accepts numbers of at most 10 digits, after any number of leading
    /// zeros.
    pub const MAX_LEN: usize = 31;

    /// Creates a seed from a text.
    ///
    /// # Errors
    /// [`ConfigError::Limit`] for a text of more than [`HashSeed::MAX_LEN`] bytes.
    pub fn new(text: &str) -> Result<Self, ConfigError> {
        let mut bytes = [0; Self::MAX_LEN];
        let Some(target) = bytes.get_mut(..text.len()) else {
            let (value, max) = (text.len() as u64, Self::MAX_LEN as u64);
            return Err(ConfigError::Limit { name: "HashSeed bytes", value, max });
        };
        target.copy_from_slice(text.as_bytes());
        Ok(Self { len: text.len() as u8, bytes })
    }

    /// Returns the byte form: the length, the text, and zeros.
    pub(super) fn to_bytes(self) -> [u8; 1 + Self::MAX_LEN] {
        let mut bytes = [self.len; 1 + Self::MAX_LEN];
        bytes[1..].copy_from_slice(&self.bytes);
        bytes
    }

    /// Reads the byte form. Returns `None` for bytes that [`HashSeed::to_bytes`] does not produce.
    pub(super) fn from_bytes(bytes: [u8; 1 + Self::MAX_LEN]) -> Option<Self> {
        let (&len, text) = bytes.split_first()?;
        let text = std::str::from_utf8(text.get(..len.into())?).ok()?;
        Self::new(text).ok().filter(|seed| seed.to_bytes() == bytes)
    }

    /// Returns the text.
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.bytes[..self.len as usize]).expect("`new` copied a str")
    }
}

impl fmt::Debug for HashSeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HashSeed({:?})", self.as_str())
    }
}

impl TryFrom<String> for HashSeed {
    type Error = ConfigError;

    fn try_from(text: String) -> Result<Self, ConfigError> {
        Self::new(&text)
    }
}

impl From<HashSeed> for String {
    fn from(seed: HashSeed) -> Self {
        seed.as_str().to_owned()
    }
}
