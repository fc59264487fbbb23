//! Compares the prefix tree with a map of pages.
#![no_main]

use kvarena::testkit::prefix_tree::{PrefixConfig, PrefixOp, replay_prefix};
use kvarena::testkit::shrink::literal;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (PrefixConfig, Vec<PrefixOp>)| {
    let (config, ops) = input;
    if let Err(what) = replay_prefix(config, &ops) {
        panic!("{what}\n{config:?}\n{}", literal(&ops));
    }
});
