//! Times of attention and stores on each path, and of a plain read of the same bytes by all cores. The runs alternate.
//!
//! `min` and `median` are times of one call. `read` is the share of the plain read's speed that a call reaches, and
//! `peer` is the time of the peer in `benches/peers` divided by that of the call. Both are medians over turns. `GB/s`
//! and `Gflop/s` are rates of the fastest call.

use std::hint::black_box;
use std::thread;
use std::time::{Duration, Instant};

use half::bf16;
use kvarena::backend::{Backend, CpuPath, CpuRows, CpuRowsMut, OpenBackend};
use kvarena::layout::{PoolLayout, Scaling, TableShape};
use kvarena::plan::{OwnedPlan, StepEnd};
use kvarena::testkit::planner::{Item, Planner};
use kvarena::{Attend, Capacity, Cpu, CpuOptions, KvDtype, KvShape, LayerId, PoolConfig};

/// Maximum number of turns of a case.
const TURNS: usize = 60;
/// A case that has taken this long starts no further turn after its fifth.
const TIME: Duration = Duration::from_secs(3);

/// A call of attention, or of a store.
pub struct Case {
    pub name: &'static str,
    /// Whether the call stores the new tokens instead of attending to them.
    pub stores: bool,
    pub q_heads: u32,
    pub shape: KvShape,
    pub dtype: KvDtype,
    pub page_size: u32,
    /// Cached tokens of each row before the step.
    pub prefixes: Vec<u32>,
    /// New tokens of each row.
    pub len: u32,
}

fn cases() -> Vec<Case> {
    let bf16 = |name, prefixes: &[u32]| Case {
        name,
        stores: false,
        q_heads: 32,
        shape: KvShape::heads(8, 128),
        dtype: KvDtype::Bf16,
        page_size: 16,
        prefixes: prefixes.to_vec(),
        len: 1,
    };
    let batch = |name| bf16(name, &[4095; 16]);
    let latent = |name| Case { q_heads: 16, shape: KvShape::Latent { rank: 512, rope: 64 }, ..batch(name) };
    let zipf: Vec<u32> = (1..=16).map(|rank| 32768 / rank - 1).collect();
    let beside: Vec<u32> = [32767].into_iter().chain([127; 15]).collect();
    let fp8 = KvDtype::Fp8E4M3;
    vec![
        bf16("1 x 512", &[511]),
        batch("16 x 4096"),
        Case { dtype: fp8, ..batch("16 x 4096 fp8") },
        Case { dtype: KvDtype::F16, ..batch("16 x 4096 f16") },
        Case { dtype: KvDtype::F32, ..batch("16 x 4096 f32") },
        Case { page_size: 1, ..batch("16 x 4096 page 1") },
        Case { shape: KvShape::heads(8, 64), ..batch("16 x 4096 d 64") },
        Case { shape: KvShape::heads(8, 256), ..batch("16 x 4096 d 256") },
        Case { shape: KvShape::heads(32, 128), ..batch("16 x 4096 group 1") },
        bf16("1 x 32768", &[32767]),
        bf16("Zipf", &zipf),
        bf16("32768 beside 15 x 128", &beside),
        Case { len: 64, ..bf16("extend 64", &[0]) },
        Case { len: 512, ..bf16("extend 512 on 4096", &[4096]) },
        Case { len: 512, dtype: fp8, ..bf16("extend 512 on 4096 fp8", &[4096]) },
        latent("16 x 4096 latent"),
        Case { dtype: fp8, ..latent("16 x 4096 latent fp8") },
        Case { stores: true, ..bf16("store 1", &[0]) },
        Case { stores: true, len: 4096, ..bf16("store 4096", &[0]) },
    ]
}

/// Prints the cases whose names contain `only`. `peer` returns a run of another library, if it supports the case.
pub fn print(only: &str, peer: impl Fn(&Case) -> Option<Box<dyn FnMut()>>) {
    let threads = thread::available_parallelism().map_or(1, |cores| cores.get());
    println!("{threads} threads, {}", std::env::consts::ARCH);
    println!("case                        path    min ms median ms    GB/s Gflop/s    read    peer");
    for case in cases().into_iter().filter(|case| case.name.contains(only)) {
        for path in CpuPath::available() {
            let options = CpuOptions { path: Some(path), ..CpuOptions::with_threads(threads) };
            Opened::new(&case, options).measure(&case, path.name(), threads, peer(&case));
        }
    }
}

struct Opened {
    cpu: Cpu,
    plan: OwnedPlan,
    bytes: usize,
    flops: f64,
}

impl Opened {
    fn new(case: &Case, options: CpuOptions) -> Self {
        let lens: Vec<u32> = case.prefixes.iter().map(|prefix| prefix + case.len).collect();
        let pages = lens.iter().map(|len| len.div_ceil(case.page_size)).sum();
        let scaling = (case.dtype == KvDtype::Fp8E4M3).then_some(Scaling::ByToken);
        let config = PoolConfig {
            shape: case.shape,
            dtype: case.dtype,
            page_size: case.page_size,
            capacity: Capacity::Pages(pages),
            scaling: scaling.unwrap_or_default(),
            ..Default::default()
        };
        let layout = config.layout().expect("a valid pool");
        let longest = *lens.iter().max().expect("a row");
        let tokens = lens.iter().copied().map(u64::from).sum();
        let table = TableShape::new(case.page_size, lens.len() as u32, longest, tokens);
        let table = table.expect("a valid table");
        let mut cpu = options.open(&layout, &table, 2).expect("a small pool");
        let mut planner = Planner::new(&layout, &table, 1);
        let sequences: Vec<_> = lens.iter().map(|_| planner.admit().expect("a row")).collect();
        let mut last: Option<OwnedPlan> = None;
        for lens in [case.prefixes.clone(), vec![case.len; lens.len()]] {
            if lens[0] == 0 {
                continue;
            }
            if let Some(plan) = last {
                cpu.end(StepEnd::Complete(plan.plan().step()));
            }
            let items = sequences.iter().zip(lens).map(|(&sequence, len)| Item::Extend { sequence, len });
            let plan = planner.plan(&items.collect::<Vec<_>>());
            cpu.begin(&plan.plan()).expect("a valid plan");
            store(&mut cpu, &plan, &stored_rows(&layout, &plan));
            last = Some(plan);
        }
        let bytes = tokens as usize * (layout.page_bytes() / u64::from(case.page_size)) as usize;
        let pairs = |&prefix: &u32| (1..=case.len).map(|i| f64::from(prefix + i)).sum::<f64>();
        let dims = f64::from(case.q_heads * (layout.head_dim() + layout.value_dim()));
        let attends = if case.stores { 0.0 } else { 1.0 };
        let flops = attends * 2.0 * dims * case.prefixes.iter().map(pairs).sum::<f64>();
        Self { cpu, plan: last.expect("a step"), bytes, flops }
    }

    fn measure(&mut self, case: &Case, path: &str, threads: usize, mut peer: Option<Box<dyn FnMut()>>) {
        let layout = *self.cpu.layout();
        let tokens = self.plan.plan().token_count();
        let q = numbers(tokens * (case.q_heads * layout.head_dim()) as usize);
        let mut out = vec![0.0_f32; tokens * (case.q_heads * layout.value_dim()) as usize];
        let attend = Attend::latent(case.q_heads, 0.1);
        let words = vec![1_u64; self.bytes / 8];
        let rows = stored_rows(&layout, &self.plan);
        let mut calls = || {
            let (q, out) = (CpuRows::from(&q[..]), CpuRowsMut::from(&mut out[..]));
            let start = Instant::now();
            if case.stores {
                store(&mut self.cpu, &self.plan, &rows);
            } else {
                let done = self.cpu.attend(&self.plan.plan(), LayerId::new(0), &attend, q, out, None);
                done.expect("the batch fits");
            }
            start.elapsed().as_secs_f64()
        };
        let reads = || read(&words, threads);
        let mut peers = || {
            let start = Instant::now();
            peer.as_mut().map_or(f64::NAN, |run| {
                run();
                start.elapsed().as_secs_f64()
            })
        };
        let _ = [calls(), reads(), peers()];
        let start = Instant::now();
        let mut turns = Vec::new();
        while turns.len() < TURNS && (start.elapsed() < TIME || turns.len() < 5) {
            turns.push([calls(), reads(), peers()]);
        }
        let sorted = |f: fn(&[f64; 3]) -> f64| {
            let mut all: Vec<f64> = turns.iter().map(f).collect();
            all.sort_by(f64::total_cmp);
            (all[0], all[all.len() / 2])
        };
        let (min, median) = sorted(|turn| turn[0]);
        let (_, share) = sorted(|turn| turn[1] / turn[0]);
        let (_, times) = sorted(|turn| turn[2] / turn[0]);
        let peer = if times.is_nan() { "-".to_owned() } else { format!("{times:.2}x") };
        println!(
            "{:<24}{path:>8}{:>10.3}{:>10.3}{:>8.1}{:>8.0}{:>7.0}%{peer:>8}",
            case.name,
            min * 1e3,
            median * 1e3,
            self.bytes as f64 / min / 1e9,
            self.flops / min / 1e9,
            100.0 * share,
        );
    }
}

/// Returns K and V of the tokens of a plan. Latent rows contain V.
fn stored_rows(layout: &PoolLayout, plan: &OwnedPlan) -> [Vec<bf16>; 2] {
    let rows = numbers(plan.plan().token_count() * (layout.kv_heads() * layout.head_dim()) as usize);
    let is_latent = layout.value_dim() < layout.head_dim();
    [rows.clone(), if is_latent { Vec::new() } else { rows }]
}

fn store(cpu: &mut Cpu, plan: &OwnedPlan, [k, v]: &[Vec<bf16>; 2]) {
    let (k, v) = (CpuRows::from(&k[..]), CpuRows::from(&v[..]));
    cpu.store_cache(&plan.plan(), LayerId::new(0), k, v).expect("a valid store");
}

/// Returns the seconds of a plain read by all cores.
fn read(words: &[u64], threads: usize) -> f64 {
    let start = Instant::now();
    thread::scope(|scope| {
        for part in words.chunks(words.len().div_ceil(threads)) {
            scope.spawn(|| black_box(part.iter().fold(0_u64, |sum, x| sum.wrapping_add(*x))));
        }
    });
    start.elapsed().as_secs_f64()
}

/// Returns pseudo-random numbers.
pub fn numbers(len: usize) -> Vec<bf16> {
    (0..len).map(|i| bf16::from_f32((i * 2_654_435_761 % 1000) as f32 / 500.0 - 1.0)).collect()
}
