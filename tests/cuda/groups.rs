//! Groups of layers: attention has the same bits with and without groups, and with and without graphs. The tests fill
//! free pages with NaN, which shows that no call reads released pages.

use std::collections::HashMap;

use kvarena::backend::cuda::{CudaGraph, DeviceBuffer, Gpu, GraphKey, Prepare};
use kvarena::layout::{Dtype, Groups, Layout, Reach, Scaling};
use kvarena::plan::PlanSize;
use kvarena::testkit::contract::{TestBackend, bytes};
use kvarena::testkit::padded::padded;
use kvarena::testkit::poison::poison;
use kvarena::testkit::rng::{Rng, mix};
use kvarena::{
    Attend, Backend, BatchPlan, Capacity, Engine, EngineConfig, Extend, KvDtype, KvShape, LayerId, Namespace,
    PoolConfig, SeqKey, StepScratch, TokenId,
};

use crate::gpu;
use crate::on_gpu::{OnGpu, OnGpuOptions};

const LAYERS: usize = 5;
const KV_HEADS: u32 = 2;
const Q_HEADS: u32 = 4;
const DIM: u32 = 64;
/// Maximum number of tokens of a step, and number of rows of a step in a graph.
const TOKENS: usize = 48;
const ROWS: usize = 4;

/// A model whose layers read all tokens or those of their group's reach.
#[derive(Clone, Copy)]
struct Model {
    reaches: &'static [Reach],
    layers: [u8; LAYERS],
    fp8: bool,
    /// The number of kv heads, the head_dim and the dtype of group 1, if they are not the pool's.
    own: Option<(u32, u32, KvDtype)>,
}

impl Model {
    /// Returns the number of a layer's kv heads, and of the elements of a head.
    fn heads(&self, layer: usize) -> (u32, u32) {
        let own = self.own.filter(|_| self.layers[layer] == 1);
        own.map_or((KV_HEADS, DIM), |(heads, dim, _)| (heads, dim))
    }

    fn attend(&self, layer: usize) -> Attend {
        let plain = Attend::new(Q_HEADS, self.heads(layer).1);
        match self.reaches[usize::from(self.layers[layer])] {
            Reach::Window(size) => Attend { window: Some(size), ..plain },
            Reach::Chunk(size) => Attend { chunk: Some(size), ..plain },
            _ => plain,
        }
    }

    fn config(&self, groups: Groups, page_size: u32) -> EngineConfig {
        let fp8 = self.fp8 || self.own.is_some_and(|(.., dtype)| dtype == KvDtype::Fp8E4M3);
        let pool = PoolConfig {
            layers: LAYERS as u32,
            groups,
            shape: KvShape::heads(KV_HEADS, DIM),
            dtype: if self.fp8 { KvDtype::Fp8E4M3 } else { KvDtype::Bf16 },
            scaling: if fp8 { Scaling::ByToken } else { Scaling::Static },
            page_size,
            capacity: Capacity::Pages(800),
            layout: Layout::PageFirst,
            ..PoolConfig::default()
        };
        EngineConfig { max_tokens: 4096, prefault: false, ..pool.into() }
    }
}

/// An engine, and its rows at fixed addresses.
struct Host {
    model: Model,
    engine: Engine<OnGpu>,
    /// q, k, v and out of each layer.
    rows: Vec<[DeviceBuffer; 4]>,
    uses_graphs: bool,
    graphs: HashMap<GraphKey, CudaGraph>,
    replays: u32,
}

impl Host {
    fn new(gpu: &Gpu, model: Model, (groups, uses_graphs): (Groups, bool), page_size: u32) -> Self {
        let config = model.config(groups, page_size);
        let mut engine = Engine::new(config, OnGpuOptions::of_rows(gpu, Dtype::Bf16)).expect("a small pool");
        let attend: Vec<_> = (0..LAYERS).map(|layer| model.attend(layer)).collect();
        let backend = engine.backend_mut();
        backend.cuda.prepare(&Prepare::new(&attend)).expect("a served model");
        backend.is_prepared = true;
        let buffer =
            |heads: u32, dim: u32| DeviceBuffer::new(gpu, TOKENS as u64 * u64::from(2 * heads * dim)).expect("memory");
        let of = |layer| {
            let (heads, dim) = model.heads(layer);
            [Q_HEADS, heads, heads, Q_HEADS].map(|heads| buffer(heads, dim))
        };
        let rows = (0..LAYERS).map(of).collect();
        Self { model, engine, rows, uses_graphs, graphs: HashMap::new(), replays: 0 }
    }

    /// Runs one step, from a graph if the host uses graphs and each sequence has one new token. Returns the bits of
    /// attention.
    fn step(&mut self, items: &[Extend]) -> Vec<u16> {
        let (mut scratch, mut padding) = (StepScratch::new(), StepScratch::new());
        let plan = self.engine.plan_batch(&mut scratch, items).expect("there is room");
        let is_decode = plan.token_count() == items.len();
        let (rows, tokens) = if is_decode { (ROWS, ROWS) } else { (items.len() + 1, plan.token_count() + 2) };
        let plan = padded(&plan, &mut padding, PlanSize { rows, tokens });
        for (layer, [q, k, v, out]) in self.rows.iter_mut().enumerate() {
            let (kv_heads, dim) = self.model.heads(layer);
            for (kind, heads, to) in [(0, Q_HEADS, q), (1, kv_heads, k), (2, kv_heads, v)] {
                to.write(0, &numbers(&plan, layer * 3 + kind, heads * dim)).expect("a copy");
            }
            out.fill(0xff).expect("a fill");
        }
        self.engine.backend().cuda.stream().synchronize().expect("nothing failed");
        if is_decode && self.uses_graphs {
            self.replay(&plan);
        } else {
            launch(self.engine.backend_mut(), &self.model, &mut self.rows, &plan);
        }
        self.engine.backend_mut().synchronize().expect("nothing failed");
        let out = |(layer, [.., out]): (usize, &[DeviceBuffer; 4])| {
            let width = (Q_HEADS * self.model.heads(layer).1) as usize;
            out.read::<u16>(0, plan.token_count() * width).expect("numbers")
        };
        let bits = self.rows.iter().enumerate().flat_map(out).collect();
        self.engine.commit(plan.step()).expect("it is open");
        self.engine.complete(plan.step()).expect("it is committed");
        self.engine.verify().expect("all invariants hold");
        poison(&mut self.engine, |gpu, id, page| gpu.write_pages(&[id], page));
        bits
    }

    fn replay(&mut self, plan: &BatchPlan<'_>) {
        let (backend, model, rows) = (self.engine.backend_mut(), &self.model, &mut self.rows);
        let staged = backend.cuda.stage(plan).expect("a valid plan");
        let (stream, graphs) = (backend.stream.clone(), &mut self.graphs);
        let graph = graphs.entry(staged.graph).or_insert_with(|| {
            let body = || -> Result<(), kvarena::backend::cuda::CudaError> {
                launch(backend, model, rows, plan);
                Ok(())
            };
            stream.capture(body).expect("a capture")
        });
        // SAFETY: backend and buffers live until the end, and the plan was just staged.
        unsafe { graph.launch(&stream) }.expect("a replay");
        self.replays += 1;
    }
}

/// Launches the store and attention of every layer.
fn launch(backend: &mut OnGpu, model: &Model, rows: &mut [[DeviceBuffer; 4]], plan: &BatchPlan<'_>) {
    for (layer, [q, k, v, out]) in rows.iter_mut().enumerate() {
        let (id, attend) = (LayerId::new(layer as u32), model.attend(layer));
        backend.store_cache(plan, id, k.rows(0, None), v.rows(0, None)).expect("rows fit");
        let (q, out) = (q.rows(0, None), out.rows_mut(0, None));
        backend.attend(plan, id, &attend, q, out, None).expect("rows fit");
    }
}

/// Returns rows that depend on `kind`, the token and its position.
fn numbers(plan: &BatchPlan<'_>, kind: usize, width: u32) -> Vec<u8> {
    let row = |(token, position): (&TokenId, &u32)| {
        let key = (kind as u64) << 48 ^ u64::from(token.raw()) << 24 ^ u64::from(*position);
        let mut rng = Rng::new(mix(key));
        let number = move |_| (rng.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0;
        (0..width).map(number)
    };
    let rows: Vec<f32> = plan.tokens.iter().zip(plan.positions).flat_map(row).collect();
    bytes(Dtype::Bf16, &rows)
}

/// Computes two prompts in parts and decodes them together. After some steps it forks one of them. At the end it serves
/// the first prompt again. Returns the bits of attention.
fn serve(host: &mut Host) -> Vec<u16> {
    let token = |seed: u32, i: u32| TokenId::new(1 + (seed * 31 + i * 7) % 97);
    let prompt = |seed: u32| (0..60 + seed).map(|i| token(seed, i)).collect::<Vec<_>>();
    let mut bits = Vec::new();
    let mut seqs: Vec<SeqKey> = Vec::new();
    let admit =
        |host: &mut Host, seed| host.engine.admit(Namespace::default(), &prompt(seed), 0).expect("there is room");
    for seed in [1, 2] {
        let seq = admit(host, seed);
        for len in [19, 1, 3, 37 + seed] {
            bits.extend(host.step(&[Extend { seq, len }]));
        }
        seqs.push(seq);
    }
    for i in 0..24 {
        if i == 10 {
            let forked = host.engine.fork(seqs[0], 2, 0).expect("there is room");
            seqs.extend(forked.children);
            host.engine.complete(host.engine.newest_step()).expect("all is committed");
        }
        for (at, &seq) in (0..).zip(&seqs) {
            host.engine.append(seq, &[token(at, 100 + i)]).expect("there is room");
        }
        let items: Vec<_> = seqs.iter().map(|&seq| Extend { seq, len: 1 }).collect();
        bits.extend(host.step(&items));
    }
    for seq in seqs {
        host.engine.finish(seq).expect("it is live");
    }
    let seq = admit(host, 1);
    let len = host.engine.extend_max(seq).expect("it is live");
    let again = host.step(&[Extend { seq, len }]);
    // The cache serves all pages of the prompt except the last one, which contains the last token.
    assert!(len <= 16, "a prompt that was cached computes {len} tokens");
    bits.extend(again);
    bits
}

/// Serves a model twice and compares the bits of attention.
fn compare(gpu: &Gpu, model: Model, ways: [(Groups, bool); 2]) {
    for page_size in [1, 16] {
        let [one, other] = ways.map(|way| {
            let mut host = Host::new(gpu, model, way, page_size);
            let bits = serve(&mut host);
            assert!(!way.1 || host.replays >= 24, "{} replays", host.replays);
            assert!(host.graphs.len() <= 2, "{} graphs", host.graphs.len());
            bits
        });
        assert_eq!(one.len(), other.len());
        assert!(one == other, "attention differs: {:?}, pages of {page_size}", model.reaches);
        let nan = one.iter().any(|&bits| half::bf16::from_bits(bits).is_nan());
        assert!(!nan, "a number that no kernel wrote");
    }
}

#[test]
fn attention_over_the_gpu_does_not_depend_on_groups() {
    let Some(gpu) = gpu() else { return };
    let reaches: [(&[Reach], _); 2] = [
        (&[Reach::All, Reach::Window(5)], [0, 1, 0, 1, 1]),
        (&[Reach::All, Reach::Window(33), Reach::Window(1)], [1, 1, 0, 2, 1]),
    ];
    for ((reaches, layers), fp8) in reaches.into_iter().flat_map(|of| [(of, false), (of, true)]) {
        let groups = Groups::new(reaches, &layers).expect("every group has layers");
        let model = Model { reaches, layers, fp8, own: None };
        compare(&gpu, model, [(Groups::ONE, true), (groups, true)]);
    }
}

/// Rows are cut at the ends of chunks. The number of parts does not depend on the rows, so two graphs at most serve all
/// decode steps.
#[test]
fn graphs_of_layers_that_read_chunks_replay() {
    let Some(gpu) = gpu() else { return };
    let (reaches, layers) = (&[Reach::All, Reach::Chunk(16), Reach::Window(33)], [1, 1, 0, 2, 1]);
    let groups = Groups::new(reaches, &layers).expect("every group has layers");
    for fp8 in [false, true] {
        let model = Model { reaches, layers, fp8, own: None };
        compare(&gpu, model, [(groups, false), (groups, true)]);
    }
}

/// Layers of a window have other heads, another dtype or both. Graphs contain the kernels of both shapes of layers.
#[test]
fn graphs_of_layers_of_unlike_shapes_replay() {
    let Some(gpu) = gpu() else { return };
    let (reaches, layers) = (&[Reach::All, Reach::Window(33)], [1, 1, 0, 0, 1]);
    let (bf16, fp8) = (KvDtype::Bf16, KvDtype::Fp8E4M3);
    for (pool, own) in [(false, (1, 128, bf16)), (false, (4, 256, fp8)), (true, (2, 64, bf16))] {
        let (heads, dim, dtype) = own;
        let groups = Groups::new(reaches, &layers).expect("every group has layers");
        let groups = groups.with_shape(1, KvShape::heads(heads, dim), dtype).expect("group 1");
        let model = Model { reaches, layers, fp8: pool, own: Some(own) };
        compare(&gpu, model, [(groups, false), (groups, true)]);
    }
}
