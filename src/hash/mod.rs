//! Hashes of pages, chained: what a page is called by those who know prefixes by hashes (routers, stores, other
//! engines).
//!
//! ```text
//! names of the namespace --> [page 0] --> [page 1] --> [page 2]       a hash stands for its page's tokens
//!                                h0          h1           h2          and all that is before them
//! ```
//!
//! There are as many recipes as there are engines. Each is a `Recipe` in a file of its family, and [`Hashing`] is the
//! host's choice among those whose crates are compiled in (features `xxhash` and `sha256`). The vectors that they are
//! tested with were made by the code that they follow. vLLM's has a parameter (`seed`).
//!
//! Nothing inside this crate takes equal hashes for equal tokens. Not here: where hashes are kept (`prefix/chain.rs`).

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

/// A hash of a page and of all that is before it: 8 bytes of xxHash, or the 32 of a SHA-256 digest.
///
/// Shorter ones end in zeros. A number is kept with its lowest byte first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct PageHash([u8; LONGEST]);

impl PageHash {
    /// The number, of a recipe that makes numbers.
    pub fn to_u64(&self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = self.0;
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }

    /// The digest, of a recipe that makes digests.
    pub fn to_digest(&self) -> [u8; 32] {
        self.0
    }

    /// Of the bytes that a column keeps.
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

/// One way to hash pages.
#[cfg_attr(
    not(any(feature = "xxhash", feature = "sha256")),
    expect(dead_code, reason = "there are none")
)]
trait Recipe {
    /// Bytes of a hash.
    const WIDTH: usize;

    /// What enters of a namespace's names; the rest is `None`.
    fn entering(names: NamespaceNames) -> NamespaceNames;

    /// Hashes the parameter and these names once, as far as they are the same for every page.
    fn seed(hashing: Hashing, names: &NamespaceNames) -> PageHash;

    /// The hash of a page behind the one with the hash `before`, or of a first page. O(tokens).
    fn page(named: &Named, before: Option<PageHash>, tokens: &[TokenId]) -> PageHash;

    /// The number that stands for a hash where there is room for 64 bits only.
    fn event_id(hash: PageHash) -> u64;
}

macro_rules! recipes {
    ($($(#[$doc:meta])* $feature:literal $number:literal $name:ident $(($seed:ty))? = $recipe:path;)*) => {
        /// How pages are hashed: whose hashes this engine speaks.
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
            /// The recipe's number in byte forms.
            #[cfg(any(feature = "xxhash", feature = "sha256"))]
            fn number(self) -> u64 {
                match self {
                    $(#[cfg(feature = $feature)] Self::$name { .. } => $number,)*
                }
            }

            /// Bytes of a hash: 8 or 32.
            pub fn width(self) -> usize {
                match self {
                    $(#[cfg(feature = $feature)] Self::$name { .. } => <$recipe>::WIDTH,)*
                }
            }

            /// The number that stands for a hash in events, where there is room for 64 bits only.
            pub fn event_id(self, hash: PageHash) -> u64 {
                let _ = hash;
                match self {
                    $(#[cfg(feature = $feature)] Self::$name { .. } => <$recipe>::event_id(hash),)*
                }
            }

            /// What of names enters.
            fn entering(self, names: NamespaceNames) -> NamespaceNames {
                let _ = &names;
                match self {
                    $(#[cfg(feature = $feature)] Self::$name { .. } => <$recipe>::entering(names),)*
                }
            }

            fn seed(self, names: &NamespaceNames) -> PageHash {
                let _ = names;
                match self {
                    $(#[cfg(feature = $feature)] Self::$name { .. } => <$recipe>::seed(self, names),)*
                }
            }

            /// The hash of a page behind the one with the hash `before`, or of a first page. O(tokens).
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
    /// XXH3-64 as NVIDIA Dynamo's routers compute it: tokens as 32-bit numbers, seed 1337 and more for `lora` and
    /// `salt`; then the hash before and this one, seed 1337. 8 bytes. Feature `xxhash`.
    "xxhash" 1 Dynamo = xxhash::Dynamo;
    /// xxHash64 as nano-vllm: the hash before, then tokens as 64-bit numbers. 8 bytes. It knows no names, so only the
    /// default namespace can be served. Feature `xxhash`.
    "xxhash" 2 NanoVllm = xxhash::NanoVllm;
    /// xxHash64 as MinivLLM: the hash before, then tokens as 32-bit numbers. 8 bytes. It knows no names, so only the
    /// default namespace can be served. Feature `xxhash`.
    "xxhash" 3 MinivLlm = xxhash::MinivLlm;
    /// SHA-256 as vLLM's `sha256_cbor` without `PYTHONHASHSEED`: of the hash before, the tokens, and `lora` with
    /// `lora_path` in each page, `salt` in the first. 32 bytes; events have the last 8. Feature `sha256`.
    ///
    /// vLLM's default algorithm, `sha256`, makes other hashes: it serialises with Python's pickle in place of CBOR, and
    /// no recipe follows it. Start vLLM with `--prefix-caching-hash-algo sha256_cbor`.
    "sha256" 4 VllmSha256Cbor = sha256::VllmCbor;
    /// SHA-256 as SGLang's keys of stored pages: the hash before, then tokens as 32-bit numbers; `lora` (its
    /// `extra_key`) and `salt` stand before the first page. 32 bytes; events have the first 8. Feature `sha256`.
    "sha256" 6 SglangSha256 = sha256::Sglang;
    /// As [`Hashing::VllmSha256Cbor`], where vLLM runs with this `PYTHONHASHSEED`. Feature `sha256`.
    "sha256" 5 VllmSha256CborSeeded(HashSeed) = sha256::VllmCbor;
}

impl Hashing {
    /// The recipes that are compiled in and take no parameter.
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

    /// The byte form: the recipe's number, and the parameter that it may have.
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

    /// Whether names enter, so that namespaces other than the default one can be told apart.
    pub fn hears_names(self) -> bool {
        let some = || Some("some".to_owned());
        let names = NamespaceNames { lora: some(), lora_path: some(), salt: some() };
        self.entering(names) != NamespaceNames::default()
    }

    /// The chain of a text's whole pages: of each, what it is called with all before it. O(tokens).
    ///
    /// # Panics
    /// If `page_size` is 0.
    pub fn chain(
        self,
        names: &NamespaceNames,
        tokens: &[TokenId],
        page_size: u32,
    ) -> Vec<PageHash> {
        let named = Named::new(self, names.clone());
        let mut before = None;
        let pages = tokens.chunks_exact(page_size as usize);
        let hash = |page| {
            let hash = self.page(&named, before, page);
            before = Some(hash);
            hash
        };
        pages.map(hash).collect()
    }
}

/// Hashes of neighbouring pages, in order.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PageHashes<'a> {
    hashing: Hashing,
    bytes: &'a [u8],
}

impl<'a> PageHashes<'a> {
    pub(crate) fn new(hashing: Hashing, bytes: &'a [u8]) -> Self {
        Self { hashing, bytes }
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.hashing.width()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Bytes of each.
    pub(crate) fn width(&self) -> usize {
        self.hashing.width()
    }

    /// All of them, one behind the other.
    pub(crate) fn as_bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Each of them.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = PageHash> + DoubleEndedIterator + use<'a> {
        self.bytes.chunks_exact(self.hashing.width()).map(PageHash::from_bytes)
    }

    /// The numbers that stand for them in events: [`Hashing::event_id`].
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
