//! Recipes of xxHash, whose hashes have 64 bits. A client that chooses tokens can construct two texts with one hash, so
//! these hashes serve only as hints for routers.
//!
//! Sources: Dynamo 1.6.1 (crates `dynamo-kv-router`, `dynamo-tokens`, `dynamo-kv-hashing`); nano-vllm and MinivLLM
//! (`compute_hash` of their block managers).

use xxhash_rust::xxh3::xxh3_64_with_seed;
use xxhash_rust::xxh64::Xxh64;

use super::names::Named;
use super::{Hashing, NamespaceNames, PageHash, Recipe};
use crate::id::TokenId;

/// Seed of Dynamo's hash of two hashes: the previous page's hash, and the hash of the page's tokens. Without names,
/// Dynamo hashes the page's tokens with the same seed.
const DYNAMO_SEED: u64 = 1337;

/// Dynamo's recipe. The first page's hash is XXH3-64 of its tokens. The hash of each later page is XXH3-64 of two
/// hashes: the previous page's hash, then XXH3-64 of the page's tokens.
pub(super) struct Dynamo;

impl Recipe for Dynamo {
    const WIDTH: usize = 8;

    fn hashed_names(names: NamespaceNames) -> NamespaceNames {
        // An empty name counts as none.
        let filled = |name: Option<String>| name.filter(|name| !name.is_empty());
        NamespaceNames { lora: filled(names.lora), salt: filled(names.salt), lora_path: None }
    }

    fn seed(_: Hashing, names: &NamespaceNames) -> PageHash {
        let part =
            |name: &Option<String>, seed| name.as_ref().map_or(0, |name| xxh3_64_with_seed(name.as_bytes(), seed));
        let (lora, salt) = (part(&names.lora, 0), part(&names.salt, 1));
        DYNAMO_SEED.wrapping_add(lora).wrapping_add(salt).into()
    }

    fn page(named: &Named, before: Option<PageHash>, tokens: &[TokenId]) -> PageHash {
        let own = xxh3_64_with_seed(little_endian(tokens), named.seed.to_u64());
        let Some(before) = before else { return own.into() };
        let mut both = [0; 16];
        both[..8].copy_from_slice(before.bytes(8));
        both[8..].copy_from_slice(&own.to_le_bytes());
        xxh3_64_with_seed(&both, DYNAMO_SEED).into()
    }

    fn event_id(hash: PageHash) -> u64 {
        hash.to_u64()
    }
}

/// xxHash64 of the previous hash and tokens of 64 bits.
pub(super) type NanoVllm = XxHash64<true>;

/// xxHash64 of the previous hash and tokens of 32 bits.
pub(super) type MinivLlm = XxHash64<false>;

/// xxHash64 of the previous hash and tokens, of 64 bits each if `WIDE`, else of 32.
pub(super) struct XxHash64<const WIDE: bool>;

impl<const WIDE: bool> Recipe for XxHash64<WIDE> {
    const WIDTH: usize = 8;

    fn hashed_names(_: NamespaceNames) -> NamespaceNames {
        NamespaceNames::default()
    }

    fn seed(_: Hashing, _: &NamespaceNames) -> PageHash {
        PageHash::default()
    }

    fn page(_: &Named, before: Option<PageHash>, tokens: &[TokenId]) -> PageHash {
        let mut hasher = hasher_after(before);
        if WIDE {
            update_wide(&mut hasher, tokens);
        } else {
            hasher.update(little_endian(tokens));
        }
        hasher.digest().into()
    }

    fn event_id(hash: PageHash) -> u64 {
        hash.to_u64()
    }
}

/// Returns an xxHash64 with seed 0 that has hashed the previous hash, if any.
fn hasher_after(before: Option<PageHash>) -> Xxh64 {
    let mut hasher = Xxh64::new(0);
    if let Some(before) = before {
        hasher.update(before.bytes(8));
    }
    hasher
}

/// Hashes tokens as numbers of 64 bits.
fn update_wide(hasher: &mut Xxh64, tokens: &[TokenId]) {
    const CHUNK: usize = 64;
    let mut wide = [0_i64; CHUNK];
    for tokens in tokens.chunks(CHUNK) {
        let wide = &mut wide[..tokens.len()];
        wide.iter_mut().zip(tokens).for_each(|(wide, token)| *wide = token.raw().into());
        hasher.update(bytemuck::cast_slice(wide));
    }
}

/// Returns the tokens as little-endian bytes, their form in memory on every supported machine.
fn little_endian(tokens: &[TokenId]) -> &[u8] {
    const { assert!(cfg!(target_endian = "little"), "hashes cover little-endian numbers") };
    bytemuck::cast_slice(tokens)
}
