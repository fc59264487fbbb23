//! Compares the tree alone with a naive map, and audits it after each call.
#![no_main]

use kvarena::testkit::rng::Rng;
use kvarena::testkit::tree::run;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    run(Rng::from_bytes(bytes), u64::MAX);
});
