//! The page pool: 128 pages allocated and freed, in a fragmented pool that is half full.

mod cases;

use cases::pages::{AllocFree, COUNT};
use divan::counter::ItemsCount;
use divan::{AllocProfiler, Bencher};

#[global_allocator]
static ALLOC: AllocProfiler = AllocProfiler::system();

fn main() {
    divan::main();
}

#[divan::bench(args = [1 << 16, 1 << 20, 1 << 24])]
fn alloc_free(bencher: Bencher<'_, '_>, page_count: u32) {
    let mut pages = AllocFree::new(page_count, 50);
    pages.check();
    bencher.counter(ItemsCount::new(COUNT)).bench_local(|| pages.call());
}
