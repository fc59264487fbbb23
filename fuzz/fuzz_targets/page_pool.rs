//! The page pool against a list of states.
#![no_main]

use kvarena::testkit::page_pool::{PageOp, replay_pages};
use kvarena::testkit::shrink::literal;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u8, Vec<PageOp>)| {
    let (pages, ops) = input;
    let pages = 1 + u32::from(pages);
    if let Err(what) = replay_pages(pages, &ops) {
        panic!("{what}\n{pages} pages\n{}", literal(&ops));
    }
});
