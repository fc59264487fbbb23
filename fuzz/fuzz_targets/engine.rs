//! Compares the whole engine on the CPU backend with the model, and reads bytes back through the page tables.
#![no_main]

use kvarena::testkit::shrink::literal;
use kvarena::testkit::{Op, SmallConfig, replay};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (SmallConfig, Vec<Op>)| {
    let (config, ops) = input;
    if let Err(mismatch) = replay(&config, &ops) {
        panic!("{mismatch}\n{config:?}\n{}", literal(&ops));
    }
});
