//! Microbenchmarks: one call of the page pool, the prefix tree, a plan and a decode step, with its allocations.
//! `cargo bench --bench targets` measures the same calls beside their lower bounds and goals.
//!
//! ```text
//! cargo bench --bench micro [CASE]
//! ```

mod cases;

use std::cell::{Cell, RefCell};

use cases::decode::Decode;
use cases::evict::Evict;
use cases::hit::{Hit, Miss, full_cache};
use cases::insert::{Cycle, Insert, ROUND};
use cases::pages::{AllocFree, COUNT};
use cases::tree::TreeCase;
use cases::work::SEQUENCES;
use divan::counter::ItemsCount;
use divan::{AllocProfiler, Bencher};
use kvarena::StepId;

#[global_allocator]
static ALLOC: AllocProfiler = AllocProfiler::system();

fn main() {
    divan::main();
}

/// Calls in a sample of insert and evict.
const SAMPLE: u32 = 100;

#[divan::bench(args = [1 << 16, 1 << 20, 1 << 24])]
fn alloc_free(bencher: Bencher<'_, '_>, page_count: u32) {
    let mut pages = AllocFree::new(page_count, 50);
    pages.check();
    bencher.counter(ItemsCount::new(COUNT)).bench_local(|| pages.call());
}

#[divan::bench(args = [1, 16])]
fn hit(bencher: Bencher<'_, '_>, page_size: u32) {
    let mut hit = Hit::new(full_cache(page_size, SEQUENCES, 0), SEQUENCES, 2000);
    hit.check();
    bencher.bench_local(|| hit.call());
}

/// One row of 100 pages, read through `Engine::page_runs`.
#[divan::bench]
fn page_runs(bencher: Bencher<'_, '_>) {
    let decode = Decode::new(16, 4, 1600);
    bencher.bench_local(|| divan::black_box(&decode).page_sum());
}

#[divan::bench(args = [1, 16])]
fn miss(bencher: Bencher<'_, '_>, page_size: u32) {
    let mut miss = Miss::new(full_cache(page_size, SEQUENCES, 0));
    miss.check();
    bencher.bench_local(|| miss.call());
}

#[divan::bench(args = [1, 16])]
fn tree_match(bencher: Bencher<'_, '_>, page_size: u32) {
    let mut tree = TreeCase::new(page_size, SEQUENCES, 2000);
    tree.check();
    bencher.bench_local(|| tree.find());
}

#[divan::bench(args = [1, 16])]
fn tree_lock(bencher: Bencher<'_, '_>, page_size: u32) {
    let mut tree = TreeCase::new(page_size, SEQUENCES, 2000);
    tree.check();
    bencher.bench_local(|| tree.lock());
}

#[divan::bench(args = [1, 16], sample_count = 10, sample_size = SAMPLE)]
fn insert(bencher: Bencher<'_, '_>, page_size: u32) {
    let insert = RefCell::new(Insert::new(page_size, SEQUENCES));
    // The first round touches new memory.
    (0..ROUND).for_each(|_| insert.borrow_mut().call());
    let room = || {
        if insert.borrow().room() < SAMPLE as usize {
            insert.borrow_mut().restore();
        }
    };
    bencher.with_inputs(room).bench_local_values(|()| insert.borrow_mut().call());
}

#[divan::bench(args = [1, 16])]
fn cycle(bencher: Bencher<'_, '_>, page_size: u32) {
    let mut cycle = Cycle::new(page_size, SEQUENCES);
    cycle.check();
    bencher.bench_local(|| cycle.call());
}

#[divan::bench(consts = [1, 16], args = [1000, 100_000], sample_count = 20, sample_size = SAMPLE)]
fn evict<const PAGE_SIZE: u32>(bencher: Bencher<'_, '_>, leaves: usize) {
    let evict = RefCell::new(Evict::new(PAGE_SIZE, leaves));
    let room = || {
        evict.borrow_mut().empty_list();
        if evict.borrow().calls() < SAMPLE as usize {
            evict.borrow_mut().restore();
        }
    };
    bencher.with_inputs(room).bench_local_values(|()| evict.borrow_mut().call());
}

/// Plans one token for each of 256 sequences. The case is the page size and the cached tokens of each sequence.
#[divan::bench(args = [(1, 4096), (16, 4096), (16, 65_536)], sample_size = 1)]
fn plan_256(bencher: Bencher<'_, '_>, (page_size, kv_len): (u32, u32)) {
    let mut decode = Decode::new(page_size, 256, kv_len);
    decode.check();
    plans(bencher, decode, Decode::plan);
}

/// Measures a call that plans a step. Steps end between the calls.
fn plans(bencher: Bencher<'_, '_>, decode: Decode, plan: impl Fn(&mut Decode) -> StepId) {
    let (decode, open) = (RefCell::new(decode), Cell::new(None));
    let finish_last = || {
        let mut decode = decode.borrow_mut();
        if let Some(step) = open.take() {
            decode.rest(step);
        }
        decode.prepare();
    };
    bencher.with_inputs(finish_last).bench_local_values(|()| open.set(Some(plan(&mut decode.borrow_mut()))));
}

/// [`plan_256`] for states of 69 pages (Kimi K3), without marks or with one behind each token. A mark sends 138 words:
/// the pages that the next plan writes, and those that it reads.
#[divan::bench(args = [false, true], sample_count = 20, sample_size = 1)]
fn plan_256_states(bencher: Bencher<'_, '_>, is_marked: bool) {
    plans(bencher, Decode::with_states(1, 256, 256, 69), |decode| {
        if is_marked {
            decode.mark();
        }
        decode.plan()
    });
}

/// Plans, commits and completes a step of `batch` sequences, and appends the next token of each.
#[divan::bench(consts = [1, 16], args = [1, 256], sample_size = 1)]
fn step<const PAGE_SIZE: u32>(bencher: Bencher<'_, '_>, batch: u32) {
    let decode = RefCell::new(Decode::new(PAGE_SIZE, batch, 4096));
    decode.borrow_mut().check();
    let prepare = || decode.borrow_mut().prepare();
    bencher.with_inputs(prepare).bench_local_values(|()| decode.borrow_mut().step());
}
