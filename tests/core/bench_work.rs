//! The inputs of the benches equal those of the generator that made the inputs for other caches.

#[allow(dead_code, missing_docs)]
#[path = "../../benches/cases/work.rs"]
mod work;

use kvarena::TokenId;
use work::*;

/// Returns the sum of each word times its index, counted from 1.
fn check(words: impl IntoIterator<Item = u32>) -> u64 {
    let weigh = |sum: u64, (i, word): (u64, u32)| sum.wrapping_add(i.wrapping_mul(word.into()));
    (1..).zip(words).fold(0, weigh)
}

fn check_tokens(tokens: &[TokenId]) -> u64 {
    check(TokenId::as_raw(tokens).iter().copied())
}

// The numbers were computed from the files of that generator.

#[test]
fn sequences_are_the_originals() {
    let prompts: Vec<TokenId> = (0..PROMPTS).flat_map(prompt).collect();
    assert_eq!(check_tokens(&prompts), 8_629_138_706_691);
    let checks = |make: fn(usize) -> Vec<TokenId>, which: &[usize]| -> Vec<u64> {
        which.iter().map(|&s| check_tokens(&make(s))).collect()
    };
    let cached = [133_273_000_718, 132_998_781_591, 133_785_006_294];
    assert_eq!(checks(sequence, &[0, 33, 9999]), cached);
    assert_eq!(checks(new_sequence, &[0, 1999]), [130_687_131_091, 134_423_442_989]);
    assert_eq!(checks(miss, &[0, 255]), [132_078_869_081, 133_218_192_535]);
    let leaf = |i| leaf_sequence(i).split_off(PROMPT_LEN);
    let leaves = [2_118_962_656, 2_012_620_486, 2_137_477_537];
    assert_eq!(checks(leaf, &[0, 33, 99_999]), leaves);
    assert_eq!(leaf_sequence(33)[..PROMPT_LEN], prompt(1));
}

#[test]
fn orders_are_the_originals() {
    let touch = touch_order(100_000);
    assert_eq!(touch[..3], [97_504, 90_216, 71_579]);
    assert_eq!(check(touch), 250_055_604_577_999);
    assert_eq!(touch_order(1000).len(), 1000);
    let free = free_order(1 << 20);
    assert_eq!(free[..3], [664_994, 748_281, 272_767]);
    assert_eq!(check(free), 288_207_187_300_234_073);
}
