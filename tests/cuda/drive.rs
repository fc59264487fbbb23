//! Creates batches for tests that call the backend without an engine, and compares its attention with float64.

use kvarena::backend::OpenBackend;
use kvarena::backend::cuda::Gpu;
use kvarena::layout::{Dtype, Layout, PoolLayout, Scaling, TableShape};
use kvarena::testkit::contract::{HostRows, TestBackend, attention_to, round};
use kvarena::testkit::parallel;
use kvarena::testkit::planner::{Item, Planner};
use kvarena::testkit::quantised::{quantise, value};
use kvarena::testkit::rng::Rng;
use kvarena::{Attend, Backend, BatchPlan, Capacity, KvDtype, KvShape, LayerId, PoolConfig};

use crate::on_gpu::{OnGpu, OnGpuOptions};

/// Shape of a model, and layout of its pool.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub layers: u32,
    pub kv_heads: u32,
    pub group: u32,
    pub head_dim: u32,
    /// Element type of rows, and of the pool unless it is fp8.
    pub dtype: Dtype,
    pub fp8: Option<Scaling>,
    pub page_size: u32,
    pub layout: Layout,
    pub capacity: Capacity,
    pub sequences: u32,
    pub max_len: u32,
}

impl Shape {
    /// A pool of one layer.
    pub const SMALL: Self = Self {
        layers: 1,
        kv_heads: 2,
        group: 4,
        head_dim: 128,
        dtype: Dtype::Bf16,
        fp8: None,
        page_size: 16,
        layout: Layout::LayerFirst,
        capacity: Capacity::Pages(64),
        sequences: 2,
        max_len: 512,
    };

    /// Opens a backend on a new stream for up to `steps` open steps.
    pub fn open(&self, gpu: &Gpu, steps: u32) -> OnGpu {
        self.open_with(OnGpuOptions::of_rows(gpu, self.dtype), steps)
    }

    pub fn open_with(&self, options: OnGpuOptions, steps: u32) -> OnGpu {
        options.open(&self.pool(), &self.table(), steps).expect("a valid pool")
    }

    pub fn config(&self) -> PoolConfig {
        PoolConfig {
            layers: self.layers,
            shape: KvShape::heads(self.kv_heads, self.head_dim),
            dtype: self.fp8.map_or(self.dtype.into(), |_| KvDtype::Fp8E4M3),
            scaling: self.fp8.unwrap_or_default(),
            page_size: self.page_size,
            capacity: self.capacity,
            layout: self.layout,
            ..PoolConfig::default()
        }
    }

    pub fn pool(&self) -> PoolLayout {
        self.config().layout().expect("a valid pool")
    }

    pub fn table(&self) -> TableShape {
        let tokens = u64::from(self.sequences) * u64::from(self.max_len);
        TableShape::new(self.page_size, self.sequences, self.max_len, tokens).expect("a table")
    }

    /// Returns the stored values of rows of K or V; static scales are 1.
    fn stored(&self, rows: &[f32]) -> Vec<f64> {
        let Some(scaling) = self.fp8 else { return rows.iter().map(|&x| x.into()).collect() };
        let given = (scaling == Scaling::Static).then_some(1.0);
        let heads = rows.chunks_exact(self.head_dim as usize).map(|head| quantise(head, given));
        heads.flat_map(|(bytes, scale)| bytes.into_iter().map(move |byte| value(byte) * f64::from(scale))).collect()
    }

    pub fn attend(&self) -> Attend {
        Attend::new(self.kv_heads * self.group, self.head_dim)
    }
}

/// q, k and v of one layer.
#[derive(Clone, Debug)]
pub struct LayerInputs {
    pub q: HostRows,
    pub k: HostRows,
    pub v: HostRows,
}

impl LayerInputs {
    /// Stores k and v in a layer, without waiting.
    pub fn store(&self, backend: &mut OnGpu, plan: &BatchPlan<'_>, layer: usize) {
        let [k, v] = [&self.k, &self.v].map(|rows| backend.input(rows));
        let layer = LayerId::new(layer as u32);
        backend.store_cache(plan, layer, OnGpu::rows(&k), OnGpu::rows(&v)).expect("a store");
    }

    /// Stores k and v in a layer, and attends. Returns the output and its log-sum-exp.
    pub fn run(&self, backend: &mut OnGpu, plan: &BatchPlan<'_>, layer: usize, attend: &Attend) -> Results {
        self.store(backend, plan, layer);
        attend_layer(backend, plan, layer, attend, &self.q)
    }
}

/// Output and log-sum-exp of a layer.
pub type Results = (Vec<f32>, Vec<f32>);

/// Attends in a layer, and waits for the results.
pub fn attend_layer(backend: &mut OnGpu, plan: &BatchPlan<'_>, layer: usize, attend: &Attend, q: &HostRows) -> Results {
    let (rows, mut out) = (backend.input(q), backend.output(q));
    let mut lse = backend.sums(plan.token_count() * attend.q_heads as usize);
    let (to, sums) = (OnGpu::rows_mut(&mut out), OnGpu::lse(&mut lse));
    backend.attend(plan, LayerId::new(layer as u32), attend, OnGpu::rows(&rows), to, Some(sums)).expect("attention");
    backend.synchronize().expect("nothing failed");
    (backend.read_output(&out), backend.read_sums(&lse))
}

/// K and V of one sequence in one layer, `[positions, kv_heads, head_dim]`.
#[derive(Clone, Debug, Default)]
struct History {
    k: Vec<f64>,
    v: Vec<f64>,
}

/// Sequences with all their K and V on the host.
pub struct Drive {
    pub shape: Shape,
    pub planner: Planner,
    pub rng: Rng,
    /// K and V by `[sequence][layer]`.
    history: Vec<Vec<History>>,
}

impl Drive {
    pub fn new(shape: Shape, seed: u64) -> Self {
        let planner = Planner::new(&shape.pool(), &shape.table(), seed);
        Self { shape, planner, rng: Rng::new(seed), history: Vec::new() }
    }

    pub fn admit(&mut self) -> usize {
        self.history.push(vec![History::default(); self.shape.layers as usize]);
        self.planner.admit().expect("a free row")
    }

    /// Forks a sequence whose pages are full. The child has all tokens of the sequence.
    pub fn fork(&mut self, sequence: usize) -> usize {
        let (child, copies) = self.planner.fork(sequence).expect("a free row");
        assert!(copies.is_empty(), "pages are full");
        let history = self.history[sequence].clone();
        self.history.push(history);
        child
    }

    /// Returns `rows` rows of random numbers that the shape's row type represents exactly.
    pub fn rows(&mut self, rows: usize, width: usize) -> HostRows {
        let dtype = self.shape.dtype;
        let mut number = || {
            let bits = (self.rng.bits() >> 40) as f32 / (1 << 23) as f32;
            round(dtype, bits - 1.0)
        };
        let values = (0..rows * width).map(|_| number()).collect();
        HostRows { dtype, width, stride: width, values }
    }

    /// Replaces the recorded K and V of a sequence in a layer.
    pub fn remember(&mut self, sequence: usize, layer: usize, k: &HostRows, v: &HostRows) {
        let (k, v) = (self.shape.stored(&k.values), self.shape.stored(&v.values));
        self.history[sequence][layer] = History { k, v };
    }

    /// Returns random q, k and v of each layer for the tokens of a plan, and records k and v. The plan contains `items`
    /// and may be padded.
    pub fn inputs(&mut self, items: &[Item], plan: &BatchPlan<'_>) -> Vec<LayerInputs> {
        let tokens = plan.token_count();
        let width = (self.shape.kv_heads * self.shape.head_dim) as usize;
        self.inputs_of(items, plan, |drive| drive.rows(tokens, width))
    }

    /// Like [`Drive::inputs`], but `rows` returns the rows of k and of v.
    pub fn inputs_of(
        &mut self,
        items: &[Item],
        plan: &BatchPlan<'_>,
        mut rows: impl FnMut(&mut Self) -> HostRows,
    ) -> Vec<LayerInputs> {
        let tokens = plan.token_count();
        let width = (self.shape.kv_heads * self.shape.head_dim) as usize;
        let mut layers = Vec::new();
        for layer in 0..self.shape.layers as usize {
            let (k, v) = (rows(self), rows(self));
            for (item, row) in items.iter().zip(plan.rows) {
                let Item::Extend { sequence, .. } = *item else { continue };
                let start = row.qo_start as usize * width;
                let end = start + row.extend_len as usize * width;
                let history = &mut self.history[sequence][layer];
                history.k.extend(self.shape.stored(&k.values[start..end]));
                history.v.extend(self.shape.stored(&v.values[start..end]));
            }
            let q = self.rows(tokens, width * self.shape.group as usize);
            layers.push(LayerInputs { q, k, v });
        }
        layers
    }

    /// Compares one layer's output and log-sum-exp with float64. For each item, it compares at most `rows` random pairs
    /// of a token and a head.
    pub fn check(
        &mut self,
        items: &[Item],
        plan: &BatchPlan<'_>,
        (layer, q): (usize, &HostRows),
        attend: &Attend,
        (out, lse): (&[f32], &[f32]),
        rows: u64,
    ) {
        let (heads, head_dim) = (attend.q_heads as usize, self.shape.head_dim as usize);
        assert_eq!(out.len(), plan.token_count() * heads * head_dim);
        assert!(out.iter().chain(lse).all(|x| !x.is_nan()), "kernels left numbers unwritten");
        for (i, row) in plan.rows.iter().enumerate() {
            if row.kv_len == 0 {
                let tokens = row.qo_start as usize..(row.qo_start + row.extend_len) as usize;
                let zeros = &out[tokens.start * heads * head_dim..tokens.end * heads * head_dim];
                assert!(zeros.iter().all(|&x| x == 0.0), "padding row {i} is not 0");
                let sums = &lse[tokens.start * heads..tokens.end * heads];
                assert!(sums.iter().all(|&x| x == f32::NEG_INFINITY), "padding row {i}: {sums:?}");
                continue;
            }
            let (Item::Extend { sequence, .. } | Item::Requery { sequence, .. }) = items[i] else {
                panic!("padding has kv_len 0");
            };
            let pairs = u64::from(row.extend_len) * heads as u64;
            let some: Vec<_> =
                (0..pairs.min(rows)).map(|n| if pairs <= rows { n } else { self.rng.below(pairs) } as usize).collect();
            let (shape, history) = (&self.shape, &self.history[sequence][layer]);
            let at = |pair: usize| row.qo_start as usize * heads + pair;
            let exacts = parallel::map(&some, |&pair| {
                let (token, head) = (pair / heads, pair % heads);
                let position = (row.kv_len - row.extend_len) as usize + token;
                let mask = plan.tree(row).map(|masks| masks[token]);
                let is_seen = |&place: &usize| match mask {
                    // Bit i of the mask is the row's last slot minus i. Slots before the last 64 are visible.
                    Some(mask) => {
                        let bit = mask.checked_shr(row.kv_len - 1 - place as u32);
                        bit.is_none_or(|bits| bits & 1 == 1)
                    }
                    None => attend.window.is_none_or(|window| place + window as usize > position),
                };
                let q = &q.values[at(pair) * head_dim..(at(pair) + 1) * head_dim];
                let kv_head = (shape.kv_heads as usize, head / shape.group as usize);
                let (k, v, seen) = (&history.k, &history.v, (0..=position).filter(is_seen));
                attention_to(attend, q, k, v, kv_head, seen, f32::NEG_INFINITY)
            });
            for (&pair, exact) in some.iter().zip(&exacts) {
                let (at, token, head) = (at(pair), pair / heads, pair % heads);
                let got = &out[at * head_dim..(at + 1) * head_dim];
                let error: f64 = got.iter().zip(&exact.out).map(|(&a, b)| (f64::from(a) - b).powi(2)).sum();
                let norm: f64 = exact.out.iter().map(|b| b * b).sum();
                let mass: f64 = exact.mass.iter().map(|b| b * b).sum();
                let part = (error / (norm + 1e-4 * mass)).sqrt();
                assert!(part < 2e-2, "row {i} token {token} head {head} layer {layer}: {part}");
                let sum = f64::from(lse[at]);
                assert!(
                    (sum - exact.lse).abs() < 1e-3 * (1.0 + exact.lse.abs()),
                    "row {i}: {sum} is not {}",
                    exact.lse
                );
            }
        }
    }
}
