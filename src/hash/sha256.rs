//! Recipes of SHA-256: collision-resistant digests.
//!
//! Sources: vLLM 0.33.0 (`v1/core/kv_cache_utils.py`, `utils/hashing.py`); SGLang 0.5.23 (`mem_cache/utils.py`,
//! `mem_cache/cpp_utils/hash_binding.cpp`).

use sha2::{Digest, Sha256};

use super::names::Named;
use super::{Hashing, NamespaceNames, PageHash, Recipe};
use crate::id::TokenId;

/// vLLM's `sha256_cbor`: the hash of `[previous hash, [tokens], [[name, ..], ..] or null]` in canonical CBOR.
pub(super) struct VllmCbor;

/// The seed if `PYTHONHASHSEED` is unset.
const VLLM_SEED: &str = "vllm-none-hash";

impl Recipe for VllmCbor {
    const WIDTH: usize = 32;

    fn hashed_names(names: NamespaceNames) -> NamespaceNames {
        // An empty salt and a path without an adapter count as none. An adapter without a path has an empty path.
        let lora_path = names.lora.is_some().then(|| names.lora_path.unwrap_or_default());
        let salt = names.salt.filter(|salt| !salt.is_empty());
        NamespaceNames { lora: names.lora, lora_path, salt }
    }

    fn seed(hashing: Hashing, _: &NamespaceNames) -> PageHash {
        let mut cbor = Cbor::default();
        match hashing {
            Hashing::VllmSha256CborSeeded(seed) => cbor.text(seed.as_str()),
            _ => cbor.text(VLLM_SEED),
        }
        cbor.digest()
    }

    fn page(named: &Named, before: Option<PageHash>, tokens: &[TokenId]) -> PageHash {
        let NamespaceNames { lora, lora_path, salt } = &named.hashed_names;
        let salt = salt.as_ref().filter(|_| before.is_none());
        let mut cbor = Cbor::default();
        cbor.head(ARRAY, 3);
        cbor.bytes(before.unwrap_or(named.seed).bytes(32));
        cbor.head(ARRAY, tokens.len() as u64);
        tokens.iter().for_each(|token| cbor.head(UNSIGNED, token.raw().into()));
        match u64::from(lora.is_some()) + u64::from(salt.is_some()) {
            0 => cbor.push(&[NULL]),
            keys => cbor.head(ARRAY, keys),
        }
        if let (Some(lora), Some(path)) = (lora, lora_path) {
            cbor.head(ARRAY, 3);
            ["lora", lora, path].into_iter().for_each(|text| cbor.text(text));
        }
        if let Some(salt) = salt {
            cbor.head(ARRAY, 2);
            ["cache_salt", salt].into_iter().for_each(|text| cbor.text(text));
        }
        cbor.digest()
    }

    fn event_id(hash: PageHash) -> u64 {
        let [.., a, b, c, d, e, f, g, h] = hash.to_digest();
        u64::from_be_bytes([a, b, c, d, e, f, g, h])
    }
}

/// SGLang's keys of stored pages: the previous hash, then the tokens as 32-bit numbers.
pub(super) struct Sglang;

impl Recipe for Sglang {
    const WIDTH: usize = 32;

    fn hashed_names(names: NamespaceNames) -> NamespaceNames {
        NamespaceNames { lora_path: None, ..names }
    }

    fn seed(_: Hashing, names: &NamespaceNames) -> PageHash {
        let mut hasher = Sha256::new_with_prefix(b"sglang-cache-namespace-v1");
        for name in [&names.lora, &names.salt] {
            // The presence flag and the length separate concatenated names.
            hasher.update([u8::from(name.is_some())]);
            if let Some(name) = name {
                hasher.update((name.len() as u64).to_le_bytes());
                hasher.update(name);
            }
        }
        PageHash::from(<[u8; 32]>::from(hasher.finalize()))
    }

    fn page(named: &Named, before: Option<PageHash>, tokens: &[TokenId]) -> PageHash {
        const { assert!(cfg!(target_endian = "little"), "hashes cover little-endian numbers") };
        let mut hasher = Sha256::new();
        let seed = (named.hashed_names != NamespaceNames::default()).then_some(named.seed);
        if let Some(before) = before.or(seed) {
            hasher.update(before.bytes(32));
        }
        hasher.update(bytemuck::cast_slice::<TokenId, u8>(tokens));
        PageHash::from(<[u8; 32]>::from(hasher.finalize()))
    }

    fn event_id(hash: PageHash) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = hash.to_digest();
        u64::from_be_bytes([a, b, c, d, e, f, g, h])
    }
}

// Types of CBOR (RFC 8949), in the upper three bits of an item's first byte.
const UNSIGNED: u8 = 0;
const BYTES: u8 = 2;
const TEXT: u8 = 3;
const ARRAY: u8 = 4;
/// The one byte of the item `null`.
const NULL: u8 = 0xf6;

/// Hashes the written CBOR in blocks.
#[derive(Default)]
struct Cbor {
    hasher: Sha256,
    /// Bytes that are written and not yet hashed.
    waits: Waiting,
}

struct Waiting {
    bytes: [u8; 512],
    len: usize,
}

impl Default for Waiting {
    fn default() -> Self {
        Self { bytes: [0; 512], len: 0 }
    }
}

impl Cbor {
    /// Writes an item's type and number in the fewest bytes.
    fn head(&mut self, kind: u8, number: u64) {
        let kind = kind << 5;
        let bytes = number.to_be_bytes();
        match number {
            0..24 => self.push(&[kind | number as u8]),
            24..0x100 => self.push(&[kind | 24, bytes[7]]),
            0x100..0x1_0000 => self.push(&[kind | 25, bytes[6], bytes[7]]),
            0x1_0000..0x1_0000_0000 => {
                self.push(&[kind | 26, bytes[4], bytes[5], bytes[6], bytes[7]]);
            }
            _ => {
                self.push(&[kind | 27]);
                self.push(&bytes);
            }
        }
    }

    fn text(&mut self, text: &str) {
        self.head(TEXT, text.len() as u64);
        self.push(text.as_bytes());
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.head(BYTES, bytes.len() as u64);
        self.push(bytes);
    }

    fn push(&mut self, bytes: &[u8]) {
        let Waiting { bytes: waiting, len } = &mut self.waits;
        if *len + bytes.len() > waiting.len() {
            self.hasher.update(&waiting[..*len]);
            *len = 0;
        }
        match waiting.get_mut(*len..*len + bytes.len()) {
            Some(room) => {
                room.copy_from_slice(bytes);
                *len += bytes.len();
            }
            None => self.hasher.update(bytes),
        }
    }

    fn digest(mut self) -> PageHash {
        self.hasher.update(&self.waits.bytes[..self.waits.len]);
        PageHash::from(<[u8; 32]>::from(self.hasher.finalize()))
    }
}
