//! Compares the page pool with a list of states.
#![no_main]

use kvarena::testkit::page_pool::{PageOp, replay_pages};
use kvarena::testkit::shrink::literal;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u8, Vec<PageOp>)| {
    let (pages, ops) = input;
    // Small pools cross ends of bitmap words (64 pages); large ones cross the end of a summary word (4,096 pages).
    let pages = match pages {
        0..240 => 1 + u32::from(pages),
        _ => 4090 + u32::from(pages) - 240,
    };
    if let Err(what) = replay_pages(pages, &ops) {
        panic!("{what}\n{pages} pages\n{}", literal(&ops));
    }
});
