//! The plan of a decode step: one token for each sequence of a batch. Its cost grows with the batch, not with the
//! context.

mod cases;

use std::cell::{Cell, RefCell};

use cases::decode::Decode;
use divan::{AllocProfiler, Bencher};

#[global_allocator]
static ALLOC: AllocProfiler = AllocProfiler::system();

fn main() {
    divan::main();
}

/// Page size and cached tokens of each sequence.
const CASES: [(u32, u32); 3] = [(1, 4096), (16, 4096), (16, 65_536)];

#[divan::bench(args = CASES, sample_size = 1)]
fn plan_256(bencher: Bencher<'_, '_>, (page_size, kv_len): (u32, u32)) {
    let decode = RefCell::new(Decode::new(page_size, 256, kv_len));
    decode.borrow_mut().check();
    let open = Cell::new(None);
    let finish_last = || {
        let mut decode = decode.borrow_mut();
        if let Some(step) = open.take() {
            decode.rest(step);
        }
        decode.prepare();
    };
    bencher.with_inputs(finish_last).bench_local_values(|()| open.set(Some(decode.borrow_mut().plan())));
}
