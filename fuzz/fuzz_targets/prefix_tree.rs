//! Compares the prefix tree with the model, with swap memory, groups and stores. There is no backend, so a run tries
//! many more programs than the target `engine`. Both audit all invariants after each operation.
#![no_main]

use kvarena::Null;
use kvarena::testkit::shrink::literal;
use kvarena::testkit::workload::Family;
use kvarena::testkit::{Workload, replay_on};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let families = [Family::Swap, Family::SwapGroups, Family::Stores, Family::Any];
    let (config, ops) = Workload::from_bytes_in(&families, bytes);
    if let Err(mismatch) = replay_on(&config, Null, &ops) {
        panic!("{mismatch}\n{config:?}\n{}", literal(&ops));
    }
});
