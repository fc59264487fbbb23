//! Measures attention and stores of the CPU backend in Qwen3-0.6B's shape: 16 query heads, 8 kv heads of 128, bf16.
//!
//! GB/s counts the K and V that a call reads (or stores) once. Items are floating-point operations: 4 for each query
//! head, visible position and element of a head.
//!
//! `cargo bench --bench attention -- table [CASE]` prints the table of `table.rs`: each path of the CPU, beside a plain
//! read.

mod table;

use divan::Bencher;
use divan::counter::{BytesCount, ItemsCount};
use kvarena::backend::{Backend, CpuRows, CpuRowsMut};
use kvarena::testkit::planner::{Item, Planner};
use kvarena::{
    Attend, Capacity, Cpu, CpuOptions, KvDtype, KvShape, LayerId, Layout, OpenBackend, OwnedPlan, PoolConfig,
    TableShape,
};
use table::numbers;

const Q_HEADS: usize = 16;
const KV_HEADS: usize = 8;
const HEAD_DIM: usize = 128;

fn main() {
    let mut args = std::env::args().skip_while(|arg| arg != "table").filter(|arg| arg != "--bench");
    match args.next() {
        Some(_) => table::print(&args.next().unwrap_or_default(), |_| None),
        None => divan::main(),
    }
}

/// A step that extends a batch of sequences with equal prefix lengths.
struct Setup {
    cpu: Cpu,
    plan: OwnedPlan,
    tokens: usize,
}

impl Setup {
    fn new(threads: usize, layout: Layout, page_size: u32, batch: u32, prefix: u32, len: u32) -> Self {
        let sequence = prefix + len;
        let config = PoolConfig {
            shape: KvShape::heads(KV_HEADS as u32, HEAD_DIM as u32),
            dtype: KvDtype::Bf16,
            page_size,
            capacity: Capacity::Pages(batch * sequence.div_ceil(page_size)),
            layout,
            ..Default::default()
        };
        let layout = config.layout().expect("a valid pool");
        let table = TableShape::new(page_size, batch, sequence, u64::from(batch * sequence));
        let table = table.expect("a valid table");
        let mut cpu = CpuOptions::with_threads(threads).open(&layout, &table, 2).expect("a small pool");
        let mut planner = Planner::new(&layout, &table, 1);
        let all: Vec<_> = (0..batch).map(|_| planner.admit().expect("a row")).collect();
        let items = |len| -> Vec<_> { all.iter().map(|&sequence| Item::Extend { sequence, len }).collect() };
        let parts = [prefix, len].into_iter().filter(|&part| part > 0);
        let mut last = None;
        for part in parts {
            let plan = planner.plan(&items(part));
            cpu.begin(&plan.plan()).expect("a valid plan");
            let rows = numbers(plan.plan().token_count() * KV_HEADS * HEAD_DIM);
            let (k, v) = (CpuRows::from(&rows[..]), CpuRows::from(&rows[..]));
            cpu.store_cache(&plan.plan(), LayerId::new(0), k, v).expect("a valid store");
            last = Some(plan);
        }
        let plan = last.expect("len is at least 1");
        Self { cpu, tokens: plan.plan().token_count(), plan }
    }

    fn attend(&mut self, bencher: Bencher<'_, '_>, bytes: usize, flops: usize) {
        let q = numbers(self.tokens * Q_HEADS * HEAD_DIM);
        let mut out = vec![0.0_f32; q.len()];
        let attend = Attend::new(Q_HEADS as u32, HEAD_DIM as u32);
        bencher.counter(BytesCount::new(bytes)).counter(ItemsCount::new(flops)).bench_local(|| {
            let (q, out) = (CpuRows::from(&q[..]), CpuRowsMut::from(&mut out[..]));
            self.cpu.attend(&self.plan.plan(), LayerId::new(0), &attend, q, out, None)
        });
    }
}

/// Bytes of K and V of one position in bf16.
const KV_BYTES: usize = 2 * 2 * KV_HEADS * HEAD_DIM;

/// Operations of one query token and one position.
const FLOPS: usize = 4 * Q_HEADS * HEAD_DIM;

/// `(threads, batch, kv_len, page_size)`
const DECODE: [(usize, u32, u32, u32); 5] =
    [(1, 1, 512, 16), (1, 1, 8192, 16), (2, 1, 8192, 16), (1, 16, 1024, 16), (1, 16, 1024, 1)];

#[divan::bench(args = DECODE)]
fn decode(bencher: Bencher<'_, '_>, (threads, batch, kv_len, page_size): (usize, u32, u32, u32)) {
    let positions = (batch * kv_len) as usize;
    let mut setup = Setup::new(threads, Layout::LayerFirst, page_size, batch, kv_len - 1, 1);
    setup.attend(bencher, positions * KV_BYTES, positions * FLOPS);
}

/// Lower bound of a decode: the same number of bytes, read once in order.
#[divan::bench(args = [512, 8192])]
fn read(bencher: Bencher<'_, '_>, positions: usize) {
    let words = vec![1_u64; positions * KV_BYTES / 8];
    bencher
        .counter(BytesCount::new(positions * KV_BYTES))
        .bench_local(|| divan::black_box(&words).iter().fold(0_u64, |sum, x| sum.wrapping_add(*x)));
}

/// `(threads, len, prefix)`
const EXTEND: [(usize, u32, u32); 4] = [(1, 64, 0), (1, 512, 0), (2, 512, 0), (1, 128, 2048)];

#[divan::bench(args = EXTEND)]
fn extend(bencher: Bencher<'_, '_>, (threads, len, prefix): (usize, u32, u32)) {
    let pairs = (0..len).map(|i| (prefix + i + 1) as usize).sum::<usize>();
    let mut setup = Setup::new(threads, Layout::LayerFirst, 16, 1, prefix, len);
    setup.attend(bencher, (prefix + len) as usize * KV_BYTES, pairs * FLOPS);
}

/// Stores `tokens` tokens in one layer of the pool.
#[divan::bench(args = [1, 512, 4096])]
fn store_cache(bencher: Bencher<'_, '_>, tokens: u32) {
    let mut setup = Setup::new(1, Layout::LayerFirst, 16, 1, 0, tokens);
    let rows = numbers(tokens as usize * KV_HEADS * HEAD_DIM);
    bencher.counter(BytesCount::new(tokens as usize * KV_BYTES)).bench_local(|| {
        let (k, v) = (CpuRows::from(&rows[..]), CpuRows::from(&rows[..]));
        setup.cpu.store_cache(&setup.plan.plan(), LayerId::new(0), k, v)
    });
}
