//! Compares the whole engine on the CPU backend with the model, and reads bytes back through the page tables.
#![no_main]

use kvarena::testkit::shrink::literal;
use kvarena::testkit::{Workload, replay};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let (config, ops) = Workload::from_bytes(bytes);
    if let Err(mismatch) = replay(&config, &ops) {
        panic!("{mismatch}\n{config:?}\n{}", literal(&ops));
    }
});
