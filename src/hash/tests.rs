//! Test vectors from the engines' own code, and tests of names.
//!
//! Twelve tokens in pages of four, with up to four sets of names. Functions of the published packages computed the
//! vectors on 2026-11-22: vLLM 0.33.0 from PyPI (`generate_block_hash_extra_keys`, `hash_block_tokens`, `sha256_cbor`);
//! SGLang 0.5.23 from PyPI (`get_storage_hash_str`, `hash_str_to_int64`, its `hash_binding.cpp` compiled);
//! dynamo-kv-router 1.6.1 from crates.io (`compute_block_hash_for_seq`, `compute_seq_hash_for_block`); nano-vllm-fork
//! 20260210 from PyPI (`BlockManager.compute_hash`). MinivLLM is in no registry: its vectors come from xxhash and
//! numpy, called as its block manager calls them.

use super::*;
use crate::error::{ConfigError, Error};
use crate::id::Namespace;
use crate::memory::Memory;

const TOKENS: [u32; 12] = [100, 101, 102, 103, 7, 70_000, (1 << 31) + 5, u32::MAX - 1, 9, 10, 11, 12];

fn names(lora: &str, salt: &str) -> NamespaceNames {
    let name = |name: &str| (!name.is_empty()).then(|| name.to_owned());
    let lora_path = name(lora).map(|lora| format!("/loras/{lora}"));
    NamespaceNames { lora: name(lora), lora_path, salt: name(salt) }
}

fn chain(hashing: Hashing, lora: &str, salt: &str) -> Vec<PageHash> {
    hashing.chain(&names(lora, salt), TokenId::from_raw(&TOKENS), 4)
}

fn numbers(hashing: Hashing, lora: &str, salt: &str) -> Vec<u64> {
    let chain = chain(hashing, lora, salt);
    let numbers: Vec<u64> = chain.iter().map(PageHash::to_u64).collect();
    assert!(numbers.iter().zip(&chain).all(|(&number, &hash)| hashing.event_id(hash) == number));
    numbers
}

fn digests(hashing: Hashing, lora: &str, salt: &str) -> (Vec<String>, Vec<u64>) {
    let chain = chain(hashing, lora, salt);
    let ids = chain.iter().map(|&hash| hashing.event_id(hash)).collect();
    (chain.iter().map(|hash| format!("{hash:?}")).collect(), ids)
}

#[test]
fn dynamos_hashes_equal_those_of_its_crate() {
    let hashes = |lora, salt| numbers(Hashing::Dynamo, lora, salt);
    assert_eq!(hashes("", ""), [0x57b8_9ffc_89f0_7407, 0x8be6_d071_428c_cbd1, 0x9149_da6b_972b_b3be]);
    assert_eq!(hashes("adapter", ""), [0xabab_2910_23fa_6591, 0xea8e_7056_58f1_0deb, 0xb0a1_7844_d758_eafc]);
    assert_eq!(hashes("", "tenant"), [0x0334_0f8d_04cf_3de1, 0x7945_e8e5_953e_a14f, 0xf8a2_2ae4_eb84_b2ed]);
    assert_eq!(hashes("adapter", "tenant"), [0x7d01_3d54_824a_9ebe, 0xce5d_b089_1c59_7819, 0x78ea_f265_5c57_c5cb]);
}

#[test]
fn hashes_of_nano_vllm_and_minivllm_equal_theirs() {
    let nano = [0xfcb5_bd7f_125c_8ada, 0x0513_cd91_853b_78d7, 0x2c23_689d_138e_2b71];
    assert_eq!(numbers(Hashing::NanoVllm, "", ""), nano);
    let mini = [0x5f68_09d6_8b77_eb8e, 0x1a02_75e7_692e_26b0, 0x76ed_660e_6269_bdbc];
    assert_eq!(numbers(Hashing::MinivLlm, "", ""), mini);
}

#[test]
fn vllms_hashes_are_those_of_its_package() {
    for (lora, salt, hashes) in [
        (
            "",
            "",
            [
                "f6660814c0f5fab668e3a3e4cc9d7c843f32e254d6a433791cccfba573d0cf8a",
                "a1f92b1a57f28854e5623cb730ef09f951e029662a9baac52ff9712366d499da",
                "428460b969b64443cd6244085efdd03a086d37c89ffc807a34013134b82c7d1b",
            ],
        ),
        (
            "adapter",
            "",
            [
                "74bb2173608bf6c2a2ca257744435d766681c03fbb6f0282ad291f01e02dd9e8",
                "b0349b856dc80f55714c96cfdc2e9f08e55108a4b5cdd955d5142dc1c2e6d0d5",
                "ceedc6b513292710807e2fd6a4da50ef4ffa42cc17faefc671e8bc13391dc6a7",
            ],
        ),
        (
            "",
            "tenant",
            [
                "d0fd622942c20fd8426b61cb96daf3f3a45d5fb27045c479c5f230172a5e9d9a",
                "5fa208ad8398530b26def6d0e83ae7a2e9f994fe2a64375a89a59950d31955f1",
                "c5ec3dba38f28d8e488fa504de2195a3ee623c0f91331c92e75ce629431e0fe9",
            ],
        ),
        (
            "adapter",
            "tenant",
            [
                "25b1e14686bf5fb88469f6804ded1fdbaa9b53005b47dff5abeead3a327f4e95",
                "7ffef3f89615ab194d595a34fd7f2c36e5da4c44b3fdf475173563e5eefe396a",
                "fc55b91d495c4905a9606ed014c9c3b7a5ea5f7f030387e0da191b54054be5fc",
            ],
        ),
    ] {
        let (got, ids) = digests(Hashing::VllmSha256Cbor, lora, salt);
        assert_eq!(got, hashes, "{lora} {salt}");
        let last = |hash: &str| u64::from_str_radix(&hash[48..], 16).expect("hexadecimal");
        assert_eq!(ids, hashes.map(last));
    }
    let (_, ids) = digests(Hashing::VllmSha256Cbor, "", "");
    assert_eq!(ids, [0x1ccc_fba5_73d0_cf8a, 0x2ff9_7123_66d4_99da, 0x3401_3134_b82c_7d1b]);
}

/// The seed is the text of `PYTHONHASHSEED`, as in `resolve_none_hash_seed` of vLLM 0.33.0. This script prints the last
/// hash of each chain. vLLM's `hash_block_tokens` returned the same hashes:
///
/// ```python
/// import cbor2, hashlib
/// TOKENS = [100, 101, 102, 103, 7, 70_000, (1 << 31) + 5, (1 << 32) - 2, 9, 10, 11, 12]
/// sha256_cbor = lambda value: hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()
/// for seed in [None, "", "0", "00", "42", "4294967295", "random", "Random"]:
///     block = sha256_cbor("vllm-none-hash" if seed is None else seed)
///     for start in range(0, 12, 4):
///         block = sha256_cbor((block, tuple(TOKENS[start:start + 4]), None))
///     print(repr(seed), block.hex())
/// ```
#[test]
fn vllms_seed_is_a_text() {
    for (seed, last) in [
        (None, "428460b969b64443cd6244085efdd03a086d37c89ffc807a34013134b82c7d1b"),
        (Some(""), "9c712bc29944a01e0e36562a7033d56160c45ceec0672a36e8584607c46ef57a"),
        (Some("0"), "66f4f6fe392f7efddb5e280e25c33856daa775e3459b8dabb01830b8a1ebc5bf"),
        (Some("00"), "bb98a6259c8fc16980eaea3f6d81c711e44d2184dc171c601527c434416341f1"),
        (Some("42"), "85dd7b87c34da56ed42ce1f7f9238e551d5f60020ca371c10a03c1c59d063bc2"),
        (Some("4294967295"), "b505a58901f749e369c8f8bfa25311c5f25f84ea14789cb738d453a20307436a"),
        (Some("random"), "f7e332cb4bba454376db8f50fe0c26a5b40c58115ef17d19132abdb9a614a3ae"),
        (Some("Random"), "6ad2d11c527c9cb72eecd9e42bcbf2be6be6652aa4bd76e3b5f0efe4ce878d16"),
    ] {
        let hashing = match seed {
            None => Hashing::VllmSha256Cbor,
            Some(seed) => Hashing::VllmSha256CborSeeded(HashSeed::new(seed).expect("the text is short")),
        };
        let (got, ids) = digests(hashing, "", "");
        assert_eq!(got[2], last, "{seed:?}");
        assert_eq!(Ok(ids[2]), u64::from_str_radix(&last[48..], 16), "{seed:?}");
        // A salt changes the hash, with and without a seed.
        let salts = ["", "tenant"].map(|salt| digests(hashing, "", salt).0);
        assert_ne!(salts[0], salts[1]);
        assert_eq!((hashing.width(), hashing.uses_names()), (32, true));
    }
    // A tenant's salt and a seed: the same script with (("cache_salt", "tenant"),) in the first block.
    let seeded = Hashing::VllmSha256CborSeeded(HashSeed::new("0").expect("the text is short"));
    let last = "5084b2bcfd43e6578589c38b1986e0181a55e18ade709c79a2e79b52def5ffb9";
    assert_eq!(digests(seeded, "", "tenant").0[2], last);
}

#[test]
fn a_seed_is_short() {
    let long = "0".repeat(31);
    let seed = HashSeed::new(&long).expect("31 bytes");
    assert_eq!((seed.as_str(), format!("{seed:?}")), (&long[..], format!("HashSeed({long:?})")));
    let refused = |value| Err(ConfigError::Limit { name: "HashSeed bytes", value, max: 31 });
    assert_eq!(HashSeed::new(&"0".repeat(32)), refused(32));
    assert_eq!(HashSeed::new(&"\u{e9}".repeat(16)), refused(32), "bytes, not letters");
}

#[test]
fn sglangs_hashes_are_those_of_its_package() {
    for (lora, salt, hashes, ids) in [
        (
            "",
            "",
            [
                "9d373db168e3e6a03e12ea791ce33b00590b4652dd4618889639c8095ac017f7",
                "3390753b5cad1f757a12d98b367e8ff8b848ed8bb581baba16904115a05fec04",
                "abd4c97f83dfaf36f240838fc622c02574198fd7866f24a840b2e11a501941c0",
            ],
            [-7_118_152_853_857_507_680, 3_715_598_590_399_029_109, -6_065_001_248_650_711_242],
        ),
        (
            "adapter",
            "",
            [
                "85d650cff502e8f5a33cc8cc0d965251ff027698e0526663c72ecbeffbdd0bad",
                "6cec6d45db7f94ee80bd99f8adbadda3c3486d483075b4f44a5992d4d02760af",
                "966ba4a1eebb97c61863c17b9453697bcc59d4ef939cf703e45eb79a1e057d20",
            ],
            [-8_802_759_567_549_994_763, 7_848_768_397_402_674_414, -7_607_806_130_110_359_610],
        ),
        (
            "",
            "tenant",
            [
                "defa9ec805bbc80b360d45a965983816290ffe413ed5386764e66fbea148651c",
                "0f03c5d94ff5a2fd2f22b123bd09a34021c07757acd78bd5d8a22d28a9e0e28f",
                "6ff44620c402546801317e579499a27f764195b1d9fb11f2ef7f423b4c49826f",
            ],
            [-2_379_414_871_185_045_493, 1_081_925_872_639_124_221, 8_067_149_939_068_785_768],
        ),
        (
            "adapter",
            "tenant",
            [
                "48a79f7ca4ac138052278fdca56188cd288fdeb064bdb9af0954782b7e576df3",
                "c3ac2d280741375e3909ac468aac9e7f4d09a9c91210cf4daff51ea7d5ed8f74",
                "c7b752cb52d61745f6a019e306cddd32be4d8988e40fa155f4575008a1d3506e",
            ],
            [5_235_328_449_528_992_640, -4_347_049_890_375_714_978, -4_055_681_906_202_241_211],
        ),
    ] {
        let (got, got_ids) = digests(Hashing::SglangSha256, lora, salt);
        assert_eq!(got, hashes, "{lora} {salt}");
        assert_eq!(got_ids.into_iter().map(u64::cast_signed).collect::<Vec<_>>(), ids);
    }
}

#[test]
fn long_pages_are_hashed_in_blocks() {
    // The page is longer than the blocks in which tokens are widened and CBOR is written. The engines' functions
    // computed the hashes. The last salt is longer than a block of CBOR; `cbor2` and `hashlib` computed its hash.
    let tokens: Vec<TokenId> = (0..200).map(|i| TokenId::new(i * 7919 % 151_936)).collect();
    let first = |hashing: Hashing, salt: &str| hashing.chain(&names("", salt), &tokens, 200)[0];
    assert_eq!(first(Hashing::NanoVllm, "").to_u64(), 0x30de_1cf7_4d5c_2e74);
    for (salt, hash) in [
        ("", "169dfb71fa1baf81b54c70e1c4adbe857faa5c1a3483d63ef819a71f5e4bdc4a"),
        (&"0123456789".repeat(60), "16eadfcbf642c10e80b16a3923720ff29c3b2bde8fd3d1993382a74328751cc9"),
    ] {
        assert_eq!(format!("{:?}", first(Hashing::VllmSha256Cbor, salt)), hash);
    }
}

#[test]
fn names_are_given_once_and_to_one_namespace() {
    let [red, blue] = [1, 2].map(Namespace::new);
    for &hashing in Hashing::ALL {
        let mut table = Names::new(Some(hashing), &Memory::new(false)).expect("the table is small");
        let nameless = matches!(hashing, Hashing::NanoVllm | Hashing::MinivLlm);
        let default = Namespace::default();
        let taken = |by| Err(Error::NamesTaken { namespace: red, by });
        assert_eq!(table.name(red, NamespaceNames::default()), taken(default));
        let given = table.name(red, names("", "red"));
        if nameless {
            assert_eq!(given, taken(default), "{hashing:?} uses no names");
            continue;
        }
        assert_eq!(given, Ok(()));
        assert_eq!(table.name(red, names("", "red")), Ok(()), "the same again");
        assert_eq!(table.name(red, names("", "other")), Err(Error::NamespaceNamed { namespace: red }));
        assert_eq!(table.name(blue, names("", "red")), Err(Error::NamesTaken { namespace: blue, by: red }));
        assert_eq!(table.name(default, names("", "any")), Err(Error::NamespaceNamed { namespace: default }));
        assert_eq!(table.name(blue, names("red", "")), Ok(()), "an adapter is not a salt");
        assert!(table.get(Namespace::new(3)).is_none());
    }
}
