//! Tests that attention computes the same bits in any order of its CTAs. Each family of kernels is launched repeatedly
//! while kernels on other streams occupy parts of the device.

use kvarena::backend::cuda::{DeviceBuffer, Gpu};
use kvarena::backend::{OpenBackend, Queries, Select, Selection, SparseBackend};
use kvarena::layout::{Dtype, LabelChannels, Scaling, TableShape};
use kvarena::plan::{OwnedPlan, StepEnd};
use kvarena::testkit::contract::{HostRows, SparseTestBackend, TestBackend, round};
use kvarena::testkit::planner::{Item, Planner};
use kvarena::testkit::rng::Rng;
use kvarena::{Attend, Backend, BatchPlan, Capacity, KvDtype, KvShape, LayerId, PoolConfig};

use crate::gpu;
use crate::on_gpu::{GpuRows, OnGpu, OnGpuOptions};

const LAYER: LayerId = LayerId::new(0);
const LATENT: KvShape = KvShape::Latent { rank: 512, rope: 64 };
/// Number of tokens in a list.
const TOP: u32 = 40;

/// Properties that select the kernels of a launch.
#[derive(Clone, Copy, Debug)]
struct Family {
    name: &'static str,
    rows: Dtype,
    dtype: KvDtype,
    scaling: Scaling,
    /// Elements of a head; 0 for latent rows.
    head_dim: u32,
    /// Query heads for each kv head.
    group: u32,
    /// Number of new tokens of each sequence.
    new: u32,
    trees: bool,
    /// Whether sequences share their first tokens, which are read once.
    spans: bool,
    lists: bool,
}

const PLAIN: Family = Family {
    name: "decode",
    rows: Dtype::Bf16,
    dtype: KvDtype::Bf16,
    scaling: Scaling::Static,
    head_dim: 128,
    group: 4,
    new: 1,
    trees: false,
    spans: false,
    lists: false,
};
const FP8: Family = Family { dtype: KvDtype::Fp8E4M3, ..PLAIN };
const BY_TOKEN: Family = Family { scaling: Scaling::ByToken, ..FP8 };
const LATENT_FP8: Family = Family { head_dim: 0, ..BY_TOKEN };

const FAMILIES: [Family; 27] = [
    PLAIN,
    Family { name: "decode, 64", head_dim: 64, group: 16, ..PLAIN },
    Family { name: "decode, 256", head_dim: 256, ..PLAIN },
    Family { name: "short queries, 32 rows", new: 8, ..PLAIN },
    Family { name: "short queries, 64 rows", new: 8, group: 8, ..PLAIN },
    Family { name: "short queries, f16", new: 3, group: 12, rows: Dtype::F16, dtype: KvDtype::F16, ..PLAIN },
    Family { name: "short queries, trees", new: 12, trees: true, ..PLAIN },
    Family { name: "extend", new: 70, ..PLAIN },
    Family { name: "extend, 64", new: 70, head_dim: 64, ..PLAIN },
    Family { name: "extend, 256", new: 70, head_dim: 256, ..PLAIN },
    Family { name: "trees, 64", new: 40, head_dim: 64, trees: true, ..PLAIN },
    Family { name: "decode over fp8", ..FP8 },
    Family { name: "decode over fp8, 256", head_dim: 256, group: 16, ..BY_TOKEN },
    Family { name: "extend over fp8", new: 70, ..FP8 },
    Family { name: "extend over fp8 by token", new: 70, ..BY_TOKEN },
    Family { name: "trees over fp8", new: 40, trees: true, ..BY_TOKEN },
    Family { name: "spans", spans: true, ..PLAIN },
    Family { name: "spans, 64", spans: true, head_dim: 64, ..PLAIN },
    Family { name: "spans over fp8", spans: true, ..BY_TOKEN },
    Family { name: "lists", lists: true, ..PLAIN },
    Family { name: "latent rows, few", head_dim: 0, group: 16, ..PLAIN },
    Family { name: "latent rows, wide", head_dim: 0, group: 64, ..PLAIN },
    Family { name: "latent rows, pairs", head_dim: 0, group: 128, ..PLAIN },
    Family { name: "latent rows of fp8, few", group: 32, ..LATENT_FP8 },
    Family { name: "latent rows of fp8, pairs", group: 128, ..LATENT_FP8 },
    Family { name: "rows of f32", rows: Dtype::F32, dtype: KvDtype::F32, ..PLAIN },
    Family { name: "latent rows of f32", head_dim: 0, rows: Dtype::F32, dtype: KvDtype::F32, ..PLAIN },
];

impl Family {
    fn is_latent(&self) -> bool {
        self.head_dim == 0
    }

    fn config(&self, sequences: u32, len: u32) -> PoolConfig {
        PoolConfig {
            layers: 1,
            shape: if self.is_latent() { LATENT } else { KvShape::heads(2, self.head_dim) },
            dtype: self.dtype,
            scaling: self.scaling,
            label_channels: if self.lists { 8 } else { 0 },
            page_size: 16,
            capacity: Capacity::Pages(sequences * len.div_ceil(16) + 4),
            ..PoolConfig::default()
        }
    }

    fn labels(&self) -> Option<LabelChannels> {
        let channels = (0..2).flat_map(|_| 0..8).collect();
        self.lists.then(|| LabelChannels::new(1, 2, 8, channels).expect("the channels ascend"))
    }

    fn attend(&self) -> Attend {
        match self.is_latent() {
            true => Attend::latent(self.group, 192_f32.sqrt().recip()),
            false => Attend::new(2 * self.group, self.head_dim),
        }
    }
}

/// A backend in which one step of a family is open and its K and V are stored. Attention can be launched any number of
/// times.
struct Launched {
    family: Family,
    backend: OnGpu,
    plan: OwnedPlan,
    q: GpuRows,
    out: GpuRows,
    lse: DeviceBuffer,
    lists: DeviceBuffer,
}

impl Launched {
    /// Creates the case for `sequences` sequences, which have `len` tokens before the step.
    fn new(gpu: &Gpu, family: Family, sequences: u32, len: u32) -> Self {
        let most = len + family.new + 1;
        let layout = family.config(sequences, most).layout().expect("a valid pool");
        let table = TableShape::new(16, sequences, most, u64::from(sequences * most));
        let table = table.expect("a small table");
        let options =
            if family.spans { OnGpuOptions::with_all_spans(gpu) } else { OnGpuOptions::of_rows(gpu, family.rows) };
        let options = options.with_rows(family.rows, family.labels());
        let mut backend = options.open(&layout, &table, 2).expect("a small pool");
        let (mut planner, mut rng) = (Planner::new(&layout, &table, 17), Rng::new(18));
        let first = planner.admit().expect("a row");
        let mut all = vec![first];
        if !family.spans {
            all.extend((1..sequences).map(|_| planner.admit().expect("a row")));
        }
        let width = 2 * family.head_dim as usize;
        let widths = if family.is_latent() { [576, 0] } else { [width; 2] };
        let extend = |len| move |&sequence: &usize| Item::Extend { sequence, len };
        // Each sequence has a step of its own, because one step for all may have more tokens than the backend allows.
        for sequence in &all {
            let plan = planner.plan(&[extend(len)(sequence)]);
            backend.begin(&plan.plan()).expect("a valid plan");
            store(&mut backend, &plan.plan(), family.rows, widths, &mut rng);
            backend.end(StepEnd::Complete(plan.plan().step()));
        }
        if family.spans {
            all.extend((1..sequences).map(|_| planner.fork(first).expect("a row").0));
        }
        let items: Vec<_> = all.iter().map(extend(family.new)).collect();
        let plan = planner.plan_trees(&items, &vec![family.trees; items.len()]);
        backend.begin(&plan.plan()).expect("a valid plan");
        store(&mut backend, &plan.plan(), family.rows, widths, &mut rng);
        let tokens = plan.plan().token_count();
        let heads = family.attend().q_heads as usize;
        let q_width = heads * layout.head_dim() as usize;
        let q = rows(family.rows, tokens, q_width, &mut rng);
        let out = rows(family.rows, tokens, heads * layout.value_dim() as usize, &mut rng);
        let (q, out, lse) = (backend.input(&q), backend.output(&out), backend.sums(tokens * heads));
        let lists = backend.lists(&vec![0; tokens * 2 * TOP as usize]);
        Self { family, backend, plan, q, out, lse, lists }
    }

    /// Launches attention without waiting.
    fn launch(&mut self) {
        let Self { family, backend, plan, q, out, lse, lists } = self;
        let (plan, attend) = (plan.plan(), family.attend());
        let queries = Queries { rows: OnGpu::rows(q), sinks: None };
        let (to, sums) = (OnGpu::rows_mut(out), Some(OnGpu::lse(lse)));
        if !family.lists {
            return backend.attend_queries(&plan, LAYER, &attend, queries, to, sums).expect("attention");
        }
        let select = Select { q_heads: attend.q_heads, top: TOP, window: None };
        let positions = OnGpu::positions_mut(lists);
        backend.select(&plan, LAYER, &select, OnGpu::rows(q), positions).expect("lists");
        let selection = Selection { positions: OnGpu::positions(lists), top: TOP };
        backend.attend_selected(&plan, LAYER, &attend, selection, queries, to, sums).expect("attention");
    }

    /// Launches attention, waits for it, and returns the bytes of its results.
    fn results(&mut self) -> [Vec<u8>; 2] {
        self.launch();
        self.backend.synchronize().expect("nothing failed");
        [self.out.bytes(), self.lse.read(0, self.lse.bytes() as usize).expect("bytes")]
    }
}

fn rows(dtype: Dtype, count: usize, width: usize, rng: &mut Rng) -> HostRows {
    let number = || round(dtype, (rng.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0);
    let values = std::iter::repeat_with(number).take(count * width).collect();
    HostRows { dtype, width, stride: width, values }
}

fn store(backend: &mut OnGpu, plan: &BatchPlan<'_>, dtype: Dtype, widths: [usize; 2], rng: &mut Rng) {
    let [k, v] = widths.map(|width| backend.input(&rows(dtype, plan.token_count(), width, rng)));
    backend.store_cache(plan, LAYER, OnGpu::rows(&k), OnGpu::rows(&v)).expect("a valid store");
    backend.synchronize().expect("nothing failed");
}

/// Returns `KVARENA_REPEATS`, or 200.
fn repeats() -> u64 {
    std::env::var("KVARENA_REPEATS").map_or(200, |count| count.parse().expect("a number"))
}

#[test]
fn every_family_gives_the_same_bits_again() {
    let Some(gpu) = gpu() else { return };
    let multiprocessors = gpu.multiprocessors();
    // The rivals occupy different numbers of multiprocessors for different times.
    let busy = Family { rows: Dtype::F32, dtype: KvDtype::F32, new: 4, ..PLAIN };
    let mut rivals =
        [2, 6, 30].map(|divisor| Launched::new(&gpu, busy, (multiprocessors / divisor).max(1), 100 + 10 * divisor));
    let mut differing = Vec::new();
    for family in FAMILIES {
        let mut different = 0;
        // With fewer sequences, each is divided among more CTAs: two to four for the first count, more for the others.
        for sequences in [multiprocessors / 2, multiprocessors / 3, multiprocessors / 9] {
            let mut launched = Launched::new(&gpu, family, sequences.max(1), 240);
            let (wanted, mut rng) = (launched.results(), Rng::new(19));
            for _ in 0..repeats() {
                for _ in 0..rng.below(4) {
                    rivals[rng.below(3) as usize].launch();
                }
                different += u32::from(launched.results() != wanted);
            }
            for rival in &mut rivals {
                rival.backend.synchronize().expect("nothing failed");
            }
        }
        println!("{}: {different} launches differ", family.name);
        if different > 0 {
            differing.push(family.name);
        }
    }
    assert!(differing.is_empty(), "results depend on the order of CTAs: {differing:?}");
}
