//! The prefix tree: hit, miss, insert, the cycle of a request and evict, and the lower bounds of hit and insert.

mod cases;

use std::cell::RefCell;

use cases::evict::Evict;
use cases::hit::{Hit, HitFloor, Miss, full_cache};
use cases::insert::{Cycle, Insert, InsertFloor, ROUND};
use cases::work::SEQUENCES;
use divan::{AllocProfiler, Bencher};

#[global_allocator]
static ALLOC: AllocProfiler = AllocProfiler::system();

fn main() {
    divan::main();
}

/// Calls in a sample of insert and evict.
const SAMPLE: u32 = 100;

#[divan::bench(consts = [64, 2000], args = [1, 16])]
fn hit<const ROTATION: usize>(bencher: Bencher<'_, '_>, page_size: u32) {
    let mut hit = Hit::new(full_cache(page_size, SEQUENCES, 0), SEQUENCES, ROTATION);
    hit.check();
    bencher.bench_local(|| hit.call());
}

#[divan::bench(consts = [64, 2000], args = [1, 16])]
fn hit_floor<const ROTATION: usize>(bencher: Bencher<'_, '_>, page_size: u32) {
    let mut floor = HitFloor::new(SEQUENCES, ROTATION, page_size);
    bencher.bench_local(|| floor.call());
}

#[divan::bench(args = [1, 16])]
fn miss(bencher: Bencher<'_, '_>, page_size: u32) {
    let mut miss = Miss::new(full_cache(page_size, SEQUENCES, 0));
    miss.check();
    bencher.bench_local(|| miss.call());
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
fn insert_floor(bencher: Bencher<'_, '_>, page_size: u32) {
    const PLACES: usize = 20_000;
    let mut floor = InsertFloor::new(page_size, PLACES);
    (0..PLACES).for_each(|_| floor.call());
    bencher.bench_local(|| floor.call());
}

#[divan::bench(args = [1, 16])]
fn cycle(bencher: Bencher<'_, '_>, page_size: u32) {
    let mut cycle = Cycle::new(page_size, SEQUENCES);
    cycle.check();
    bencher.bench_local(|| cycle.call());
}

#[divan::bench(consts = [1, 16], args = [1000, 10_000, 100_000], sample_count = 20, sample_size = SAMPLE)]
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
