//! A whole decode step: plan, commit, complete, and the next token of each sequence.

mod cases;

use std::cell::RefCell;

use cases::decode::Decode;
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
