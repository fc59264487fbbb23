//! Measures a whole decode step: plan, commit, complete, and appending the next token of each sequence. Also measures
//! the engine's work for moves to swap memory and back, and to a store and back; in these an item is a moved page.

mod cases;

use std::cell::RefCell;

use cases::decode::Decode;
use cases::tiers::{MOVED, Tiers};
use divan::counter::ItemsCount;
use divan::{AllocProfiler, Bencher};

#[global_allocator]
static ALLOC: AllocProfiler = AllocProfiler::system();

fn main() {
    divan::main();
}

#[divan::bench(consts = [1, 16], args = [1, 16, 256, 1024], sample_size = 1)]
fn step<const PAGE_SIZE: u32>(bencher: Bencher<'_, '_>, batch: u32) {
    let decode = RefCell::new(Decode::new(PAGE_SIZE, batch, 4096));
    decode.borrow_mut().check();
    let prepare = || decode.borrow_mut().prepare();
    bencher.with_inputs(prepare).bench_local_values(|()| decode.borrow_mut().step());
}

/// Loads pages. To make room, other pages are evicted and saved.
#[divan::bench(args = [1, 16, 64], sample_count = 50, sample_size = 1)]
fn load_and_save(bencher: Bencher<'_, '_>, node_pages: u32) {
    let tiers = RefCell::new(Tiers::new(node_pages));
    tiers.borrow_mut().check();
    let prepare = || {
        tiers.borrow_mut().finish();
        tiers.borrow_mut().admit();
    };
    let bencher = bencher.counter(ItemsCount::new(2 * MOVED)).with_inputs(prepare);
    bencher.bench_local_values(|()| tiers.borrow_mut().load());
}

/// Saves pages ahead of their eviction.
#[divan::bench(args = [1, 16, 64], sample_count = 50, sample_size = 1)]
fn save_ahead(bencher: Bencher<'_, '_>, node_pages: u32) {
    let tiers = RefCell::new(Tiers::new(node_pages));
    let prepare = || {
        tiers.borrow_mut().admit();
        tiers.borrow_mut().load();
        tiers.borrow_mut().finish();
    };
    let bencher = bencher.counter(ItemsCount::new(MOVED)).with_inputs(prepare);
    bencher.bench_local_values(|()| tiers.borrow_mut().save_ahead());
}

/// Gives pages to a store: [`kvarena::Engine::puts`] and `put_done`.
#[divan::bench(args = [1, 16, 64], sample_count = 50, sample_size = 1)]
fn put(bencher: Bencher<'_, '_>, node_pages: u32) {
    let mut tiers = Tiers::with_store(node_pages);
    tiers.put();
    bencher.counter(ItemsCount::new(MOVED)).bench_local(|| tiers.put());
}

/// Takes pages from a store: [`kvarena::Engine::fetch`] and `fetched`.
#[divan::bench(args = [1, 16, 64], sample_count = 50, sample_size = 1)]
fn fetch(bencher: Bencher<'_, '_>, node_pages: u32) {
    let tiers = RefCell::new(Tiers::with_store(node_pages));
    let prompts = || tiers.borrow_mut().new_prompts(node_pages);
    let bencher = bencher.counter(ItemsCount::new(MOVED)).with_inputs(prompts);
    bencher.bench_local_refs(|prompts| tiers.borrow_mut().fetch(prompts));
}
