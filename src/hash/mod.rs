//! Chained hashes of pages, by which routers, stores and other engines identify prefixes.
//!
//! ```text
//! names of the namespace --> [page 0] --> [page 1] --> [page 2]       a hash covers the page's tokens
//!                                h0          h1           h2          and all tokens before them
//! ```
//!
//! Each serving engine has its own recipe. The host selects one of the compiled-in recipes (features `xxhash` and
//! `sha256`) by [`Hashing`]. vLLM's recipe has a parameter (`seed`).
//!
//! Only [`Engine::match_hashes`](crate::Engine::match_hashes) and `match_hashed_pages` treat equal hashes as equal
//! tokens.

// `xxhash.rs` and `sha256.rs` contain the recipes, and `prefix/chain.rs` stores the hashes. `tests.rs` names the source
// of each recipe's test vectors.

mod names;
#[cfg(feature = "sha256")]
mod seed;
#[cfg(feature = "sha256")]
mod sha256;
#[cfg(all(test, feature = "sha256", feature = "xxhash"))]
mod tests;
#[cfg(feature = "xxhash")]
mod xxhash;

pub use names::NamespaceNames;
pub(crate) use names::{Named, Names};
#[cfg(feature = "sha256")]
pub use seed::HashSeed;

use std::fmt;

use crate::id::TokenId;

/// Bytes of the longest hash.
const LONGEST: usize = 32;

/// A hash of a page and of all tokens before it: 8 bytes of xxHash, or the 32 bytes of a SHA-256 digest.
///
/// A shorter hash ends in zeros. A number is stored with its lowest byte first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct PageHash([u8; LONGEST]);

impl PageHash {
    /// Returns the first 8 bytes as a number: the hash, if the recipe has hashes of 8 bytes.
    pub fn to_u64(&self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = self.0;
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }

    /// Returns all 32 bytes: the digest, if the recipe has hashes of 32 bytes.
    pub fn to_digest(&self) -> [u8; 32] {
        self.0
    }

    /// Creates a hash from the bytes that a column stores, which are 8 or 32.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Self {
        let mut hash = [0; LONGEST];
        hash[..bytes.len()].copy_from_slice(bytes);
        Self(hash)
    }

    pub(crate) fn bytes(&self, width: usize) -> &[u8] {
        &self.0[..width]
    }
}

impl From<u64> for PageHash {
    fn from(number: u64) -> Self {
        Self::from_bytes(&number.to_le_bytes())
    }
}

impl From<[u8; 32]> for PageHash {
    fn from(digest: [u8; 32]) -> Self {
        Self(digest)
    }
}

impl fmt::Debug for PageHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0[8..] == [0; LONGEST - 8] {
            return write!(f, "{:016x}", self.to_u64());
        }
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// A recipe of hashes.
#[cfg_attr(not(any(feature = "xxhash", feature = "sha256")), expect(dead_code, reason = "no recipe is compiled in"))]
trait Recipe {
    /// Bytes of a hash.
    const WIDTH: usize;

    /// Returns the names that the recipe hashes; the others are `None`.
    fn hashed_names(names: NamespaceNames) -> NamespaceNames;

    /// Returns the value that the recipe derives from its parameter and the names, once for all pages of a namespace.
    fn seed(hashing: Hashing, names: &NamespaceNames) -> PageHash;

    /// Returns the hash of a page after the page with hash `before`, or of a first page. O(tokens).
    fn page(named: &Named, before: Option<PageHash>, tokens: &[TokenId]) -> PageHash;

    /// Returns the 64-bit number of a hash in events.
    fn event_id(hash: PageHash) -> u64;
}

macro_rules! recipes {
    ($($(#[$doc:meta])* $feature:literal $number:literal $name:ident $(($seed:ty))? = $recipe:path;)*) => {
        /// The recipe by which pages are hashed.
        ///
        /// `lora`, `lora_path` and `salt` are the [`NamespaceNames`] that the host gave by
        /// [`Engine::name_namespace`](crate::Engine::name_namespace); the default namespace has none.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[cfg_attr(
            feature = "serde",
            derive(serde::Serialize, serde::Deserialize),
            serde(rename_all = "snake_case")
        )]
        #[non_exhaustive]
        pub enum Hashing {
            $($(#[$doc])* #[cfg(feature = $feature)] $name $(($seed))?,)*
        }

        impl Hashing {
            /// Returns the number of the recipe in byte forms.
            #[cfg(any(feature = "xxhash", feature = "sha256"))]
            fn number(self) -> u64 {
                match self {
                    $(#[cfg(feature = $feature)] Self::$name { .. } => $number,)*
                }
            }

            /// Returns the number of bytes of a hash: 8 or 32.
            pub fn width(self) -> usize {
                match self {
                    $(#[cfg(feature = $feature)] Self::$name { .. } => <$recipe>::WIDTH,)*
                }
            }

            /// Returns the 64-bit number of a hash in events.
            pub fn event_id(self, hash: PageHash) -> u64 {
                let _ = hash;
                match self {
                    $(#[cfg(feature = $feature)] Self::$name { .. } => <$recipe>::event_id(hash),)*
                }
            }

            /// Returns the names that the recipe hashes; the others are `None`.
            fn hashed_names(self, names: NamespaceNames) -> NamespaceNames {
                let _ = &names;
                match self {
                    $(#[cfg(feature = $feature)] Self::$name { .. } => <$recipe>::hashed_names(names),)*
                }
            }

            fn seed(self, names: &NamespaceNames) -> PageHash {
                let _ = names;
                match self {
                    $(#[cfg(feature = $feature)] Self::$name { .. } => <$recipe>::seed(self, names),)*
                }
            }

            /// Returns the hash of a page after the page with hash `before`, or of a first page. O(tokens).
            pub(crate) fn page(
                self,
                named: &Named,
                before: Option<PageHash>,
                tokens: &[TokenId],
            ) -> PageHash {
                let _ = (named, before, tokens);
                match self {
                    $(#[cfg(feature = $feature)] Self::$name { .. } => <$recipe>::page(named, before, tokens),)*
                }
            }
        }
    };
}

recipes! {
    /// XXH3-64 as NVIDIA Dynamo's routers compute it. A page's tokens are hashed as 32-bit numbers; the seed depends on
    /// `lora` and `salt`, and is 1337 without them. For each page after the first, the previous page's hash and this
    /// hash are then hashed together, with seed 1337. A hash has 8 bytes. Feature `xxhash`.
    "xxhash" 1 Dynamo = xxhash::Dynamo;
    /// xxHash64 as nano-vllm computes it: of the previous page's hash, then the tokens as 64-bit numbers. A hash has 8
    /// bytes. The recipe hashes no names, so only the default namespace can be served. Feature `xxhash`.
    "xxhash" 2 NanoVllm = xxhash::NanoVllm;
    /// xxHash64 as MinivLLM computes it: of the previous page's hash, then the tokens as 32-bit numbers. A hash has 8
    /// bytes. The recipe hashes no names, so only the default namespace can be served. Feature `xxhash`.
    "xxhash" 3 MinivLlm = xxhash::MinivLlm;
    /// SHA-256 as vLLM's `sha256_cbor` computes it without `PYTHONHASHSEED`. A page's hash covers the previous page's
    /// hash, the tokens, and `lora` with `lora_path`. The first page's hash also covers `salt`. A hash has 32 bytes;
    /// events contain the last 8. Feature `sha256`.
    ///
    /// vLLM's default algorithm, `sha256`, computes other hashes, because it serialises by Python's pickle instead of
    /// CBOR. No recipe follows it. Start vLLM with `--prefix-caching-hash-algo sha256_cbor`.
    "sha256" 4 VllmSha256Cbor = sha256::VllmCbor;
    /// SHA-256 as SGLang computes the keys of stored pages: of the previous page's hash, then the tokens as 32-bit
    /// numbers. `lora` (SGLang's `extra_key`) and `salt` precede the first page. A hash has 32 bytes; events contain
    /// the first 8. Feature `sha256`.
    "sha256" 6 SglangSha256 = sha256::Sglang;
    /// The same as [`Hashing::VllmSha256Cbor`] for a vLLM that runs with this `PYTHONHASHSEED`. Feature `sha256`.
    "sha256" 5 VllmSha256CborSeeded(HashSeed) = sha256::VllmCbor;
}

impl Hashing {
    /// All compiled-in recipes without a parameter.
    pub const ALL: &[Hashing] = &[
        #[cfg(feature = "xxhash")]
        Hashing::Dynamo,
        #[cfg(feature = "xxhash")]
        Hashing::NanoVllm,
        #[cfg(feature = "xxhash")]
        Hashing::MinivLlm,
        #[cfg(feature = "sha256")]
        Hashing::VllmSha256Cbor,
        #[cfg(feature = "sha256")]
        Hashing::SglangSha256,
    ];

    /// Returns the byte form: the number of the recipe, and its parameter, if it has one.
    pub(crate) fn to_words(self) -> [u64; 5] {
        match self {
            #[cfg(feature = "sha256")]
            Self::VllmSha256CborSeeded(seed) => {
                let [a, b, c, d] = bytemuck::cast(seed.to_bytes());
                [self.number(), a, b, c, d]
            }
            #[cfg(any(feature = "xxhash", feature = "sha256"))]
            _ => [self.number(), 0, 0, 0, 0],
        }
    }

    /// Reads the byte form of a recipe that is compiled in.
    pub(crate) fn from_words(words: [u64; 5]) -> Option<Self> {
        let found = Self::ALL.iter().copied().find(|hashing| hashing.to_words() == words);
        #[cfg(feature = "sha256")]
        let found = found.or_else(|| {
            let [number, a, b, c, d] = words;
            let seed = HashSeed::from_bytes(bytemuck::cast([a, b, c, d]))?;
            Some(Self::VllmSha256CborSeeded(seed)).filter(|hashing| hashing.number() == number)
        });
        found
    }

    /// Returns whether the recipe hashes some name of a namespace. Only then do hashes distinguish namespaces.
    pub fn uses_names(self) -> bool {
        let some = || Some("some".to_owned());
        let names = NamespaceNames { lora: some(), lora_path: some(), salt: some() };
        self.hashed_names(names) != NamespaceNames::default()
    }

    /// Returns the hashes of the whole pages of `tokens`, in order. O(tokens).
    ///
    /// # Panics
    /// If `page_size` is 0.
    pub fn chain(self, names: &NamespaceNames, tokens: &[TokenId], page_size: u32) -> Vec<PageHash> {
        self.chain_of(&Named::new(self, names.clone()), tokens, page_size)
    }

    /// Returns [`Hashing::chain`] in a namespace with known names.
    pub(crate) fn chain_of(self, named: &Named, tokens: &[TokenId], page_size: u32) -> Vec<PageHash> {
        let mut before = None;
        let pages = tokens.chunks_exact(page_size as usize);
        let hash = |page| {
            let hash = self.page(named, before, page);
            before = Some(hash);
            hash
        };
        pages.map(hash).collect()
    }
}

/// Hashes of consecutive pages, in order.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PageHashes<'a> {
    hashing: Hashing,
    bytes: &'a [u8],
}

impl<'a> PageHashes<'a> {
    pub(crate) fn new(hashing: Hashing, bytes: &'a [u8]) -> Self {
        Self { hashing, bytes }
    }

    /// Returns the number of hashes.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.hashing.width()
    }

    /// Returns whether there are no hashes.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Returns the number of bytes of one hash.
    pub(crate) fn width(&self) -> usize {
        self.hashing.width()
    }

    /// Returns all hashes, concatenated.
    pub(crate) fn as_bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Returns the hashes, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = PageHash> + DoubleEndedIterator + use<'a> {
        self.bytes.chunks_exact(self.hashing.width()).map(PageHash::from_bytes)
    }

    /// Returns the 64-bit number of each hash in events, which [`Hashing::event_id`] defines.
    pub fn event_ids(&self) -> impl ExactSizeIterator<Item = u64> + use<'a> {
        let hashing = self.hashing;
        self.iter().map(move |hash| hashing.event_id(hash))
    }
}

impl fmt::Debug for PageHashes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}
