//! Difficult cases of sparse reads: rows of many chunks of scores, scores that are equal or NaN, graphs, and rejected
//! calls.

use half::bf16;
use kvarena::backend::cuda::{Cuda, CudaError, CudaOptions, CudaStream, DeviceBuffer, Gpu, Limit, Prepare};
use kvarena::backend::{PlanError, Queries, Select, Selection, SparseBackend};
use kvarena::config::PrefixMode;
use kvarena::layout::{LabelChannels, LabelError, Layout};
use kvarena::testkit::rng::Rng;
use kvarena::{
    Attend, Backend, BatchPlan, Capacity, Cpu, CpuOptions, Engine, EngineConfig, EngineError, Extend, KvDtype, KvShape,
    LayerId, Namespace, PoolConfig, SeqKey, StepScratch, TokenId,
};

use crate::gpu;

const KV_HEADS: u32 = 2;
const GROUP: u32 = 4;
const HEAD_DIM: u32 = 64;
const LAYER: LayerId = LayerId::new(1);

fn config(channels: u32, page_size: u32, tokens: u32) -> EngineConfig {
    let pool = PoolConfig {
        layers: 2,
        shape: KvShape::heads(KV_HEADS, HEAD_DIM),
        dtype: KvDtype::Bf16,
        page_size,
        capacity: Capacity::Pages(tokens.div_ceil(page_size) + 8),
        layout: Layout::PageFirst,
        label_channels: channels,
        ..PoolConfig::default()
    };
    EngineConfig {
        prefix: PrefixMode::None,
        max_sequence_len: tokens,
        max_step_tokens: tokens,
        ..EngineConfig::from(pool)
    }
}

fn labels(channels: u32) -> LabelChannels {
    let some = (0..2 * KV_HEADS).flat_map(|head| (0..channels).map(move |i| 2 * i + head % 2));
    LabelChannels::new(2, KV_HEADS, channels, some.collect()).expect("the channels ascend")
}

/// Kinds of K and queries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// Few distinct numbers, so that many scores are equal.
    Equal,
    /// The same, with NaN in K: the test compares lists, but not the attention over them.
    Nan,
    /// The sum of the queries over the heads uses all bits of an f32 and is the same in every channel. K has few
    /// distinct numbers. Scores of keys with the same numbers in another order therefore differ only by rounding.
    Fine,
}

fn numbers(rng: &mut Rng, count: usize, kind: Kind) -> Vec<bf16> {
    let number = |rng: &mut Rng| match kind {
        Kind::Nan if rng.one_in(2_000) => bf16::NAN,
        Kind::Fine => bf16::from_f32(rng.pick(&[1.0078125, -1.2890625, 1.5234375])),
        _ => bf16::from_f32(rng.pick(&[-1.0, -0.5, 0.0, 0.0, 0.5, 1.0])),
    };
    (0..count).map(|_| number(rng)).collect()
}

fn queries(rng: &mut Rng, count: usize, kind: Kind) -> Vec<bf16> {
    if kind != Kind::Fine {
        return numbers(rng, count, Kind::Equal);
    }
    let head = |head: usize| {
        let size = 2_f32.powi(-8 * (head % GROUP as usize) as i32);
        let number = bf16::from_f32(size * (1.0 + rng.below(128) as f32 / 128.0));
        std::iter::repeat_n(number, HEAD_DIM as usize)
    };
    (0..count / HEAD_DIM as usize).flat_map(head).collect()
}

fn open(gpu: &Gpu, options: CudaOptions, config: EngineConfig) -> Engine<Cuda> {
    let stream = Some(CudaStream::new(gpu).expect("a stream"));
    Engine::new(config, CudaOptions { stream, ..options }).expect("a small pool")
}

/// A CPU and a GPU that receive the same calls.
struct Both {
    cpu: Engine<Cpu>,
    gpu: Engine<Cuda>,
    device: Gpu,
    scratch: [StepScratch; 2],
    kind: Kind,
}

/// Length and window of the lists of a step.
#[derive(Clone, Copy)]
struct ListArgs {
    top: u32,
    window: Option<u32>,
}

impl Both {
    fn new(gpu: &Gpu, (channels, page_size, tokens): (u32, u32, u32), kind: Kind) -> Self {
        let config = config(channels, page_size, tokens);
        let given = Some(labels(channels));
        let options = CpuOptions { labels: given.clone(), ..CpuOptions::with_threads(2) };
        Self {
            cpu: Engine::new(config, options).expect("a small pool"),
            gpu: open(gpu, CudaOptions { labels: given, ..CudaOptions::new(gpu) }, config),
            device: gpu.clone(),
            scratch: [StepScratch::new(), StepScratch::new()],
            kind,
        }
    }

    /// Adds sequences of these numbers of tokens with K and V; returns their keys, which are equal on both sides.
    fn fill(&mut self, lens: &[u32], rng: &mut Rng) -> Vec<SeqKey> {
        lens.iter().map(|&len| self.fill_one(len, rng)).collect()
    }

    fn fill_one(&mut self, len: u32, rng: &mut Rng) -> SeqKey {
        let prompt: Vec<TokenId> = (0..=len).map(TokenId::new).collect();
        let seq = self.cpu.admit(Namespace::default(), &prompt, 0).expect("room");
        let same = self.gpu.admit(Namespace::default(), &prompt, 0).expect("room");
        assert_eq!(seq, same);
        let width = (KV_HEADS * HEAD_DIM) as usize;
        let k = numbers(rng, len as usize * width, self.kind);
        let v = numbers(rng, len as usize * width, Kind::Equal);
        let [cpu, gpu] = &mut self.scratch;
        let plan = self.cpu.plan_batch(cpu, &[Extend { seq, len }]).expect("room");
        let step = plan.step();
        self.cpu.backend_mut().store_cache(&plan, LAYER, k[..].into(), v[..].into()).expect("K");
        self.cpu.commit(step).expect("it is open");
        let plan = self.gpu.plan_batch(gpu, &[Extend { seq, len }]).expect("room");
        let [k, v] = [k, v].map(|rows| DeviceBuffer::of(&self.device, &rows).expect("memory"));
        let backend = self.gpu.backend_mut();
        backend.store_cache(&plan, LAYER, k.rows(0, None), v.rows(0, None)).expect("K and V");
        backend.synchronize().expect("nothing failed");
        self.gpu.commit(step).expect("it is open");
        for result in [self.cpu.complete(step), self.gpu.complete(step)] {
            result.expect("done");
        }
        seq
    }

    /// Runs one step of one token for each sequence, and compares lists bit by bit and attention over them.
    fn decode(&mut self, seqs: &[SeqKey], args: ListArgs, rng: &mut Rng) {
        let items: Vec<Extend> = seqs.iter().map(|&seq| Extend { seq, len: 1 }).collect();
        let (rows, q_heads) = (seqs.len(), KV_HEADS * GROUP);
        let width = (KV_HEADS * HEAD_DIM) as usize;
        let q = queries(rng, rows * width * GROUP as usize, self.kind);
        let [k, v] = [0, 1].map(|_| numbers(rng, rows * width, Kind::Equal));
        let select = Select { q_heads, top: args.top, window: args.window };
        let attend = Attend { window: args.window, ..Attend::new(q_heads, HEAD_DIM) };
        let mut wanted = vec![7; rows * (KV_HEADS * args.top) as usize];
        let mut exact = vec![0.0_f32; q.len()];
        let [cpu, gpu] = &mut self.scratch;
        let plan = self.cpu.plan_batch(cpu, &items).expect("room");
        let step = plan.step();
        let backend = self.cpu.backend_mut();
        backend.store_cache(&plan, LAYER, k[..].into(), v[..].into()).expect("K and V");
        backend.select(&plan, LAYER, &select, q[..].into(), &mut wanted).expect("lists");
        let selection = Selection { positions: &wanted[..], top: args.top };
        let queries = Queries { rows: q[..].into(), sinks: None };
        let out = exact[..].as_mut().into();
        backend.attend_selected(&plan, LAYER, &attend, selection, queries, out, None).expect("attention");

        let plan = self.gpu.plan_batch(gpu, &items).expect("room");
        let of = |rows: &[bf16]| DeviceBuffer::of(&self.device, rows).expect("memory");
        let (q, k, v) = (of(&q), of(&k), of(&v));
        let mut out = of(&vec![bf16::NAN; exact.len()]);
        let mut lists = DeviceBuffer::of(&self.device, &vec![7_u32; wanted.len()]).expect("memory");
        let backend = self.gpu.backend_mut();
        backend.store_cache(&plan, LAYER, k.rows(0, None), v.rows(0, None)).expect("K and V");
        let to = lists.rows_mut(0, None);
        backend.select(&plan, LAYER, &select, q.rows(0, None), to).expect("lists");
        let selection = Selection { positions: lists.rows(0, None), top: args.top };
        let queries = Queries { rows: q.rows(0, None), sinks: None };
        let to = out.rows_mut(0, None);
        backend.attend_selected(&plan, LAYER, &attend, selection, queries, to, None).expect("attention");
        backend.synchronize().expect("nothing failed");
        let got: Vec<u32> = lists.read(0, wanted.len()).expect("numbers");
        let top = args.top as usize;
        for (i, (got, wanted)) in got.chunks(top).zip(wanted.chunks(top)).enumerate() {
            assert_eq!(got, wanted, "list {i}, top {top}, window {:?}", args.window);
        }
        let got: Vec<bf16> = out.read(0, exact.len()).expect("numbers");
        for (i, (got, exact)) in got.iter().zip(&exact).enumerate() {
            let got = got.to_f32();
            assert!(self.kind == Kind::Nan || (got - exact).abs() < 0.02, "{i}: {got} is not {exact}");
        }
        for result in [self.cpu.abort(step), self.gpu.abort(step)] {
            result.expect("planned");
        }
        for result in [self.cpu.complete(step), self.gpu.complete(step)] {
            result.expect("done");
        }
    }
}

/// Kernels compute scores in chunks of 256. Rows end inside a chunk, at its end and after it. Many scores are equal
/// or nearly equal, so that last bits and the order of positions decide.
#[test]
fn long_rows_are_selected_as_on_the_cpu() {
    let Some(gpu) = gpu() else { return };
    for (shape, kind) in [
        ((16, 16, 8192), Kind::Equal),
        ((32, 1, 8192), Kind::Nan),
        ((5, 12, 8192), Kind::Equal),
        ((16, 16, 8192), Kind::Fine),
        ((32, 16, 8192), Kind::Fine),
        ((7, 16, 8192), Kind::Fine),
    ] {
        let mut both = Both::new(&gpu, shape, kind);
        let mut rng = Rng::new(shape.0.into());
        let seqs = both.fill(&[255, 2600, 1, 256, 257, 1023], &mut rng);
        for (top, window) in [
            (1, None),
            (2, Some(300)),
            (64, None),
            (64, Some(300)),
            (255, None),
            (1000, None),
            (2601, Some(2000)),
            (3000, None),
        ] {
            both.decode(&seqs, ListArgs { top, window }, &mut rng);
        }
        both.decode(&seqs[1..2], ListArgs { top: 64, window: None }, &mut rng);
    }
}

/// Rows have more than 4096 keys, so the kernel samples keys to find candidates for short lists. If many scores are
/// equal, there are too many candidates, and all keys are compared. Several CTAs gather long lists if there are few
/// lists.
#[test]
fn rows_of_many_keys_are_selected_as_on_the_cpu() {
    let Some(gpu) = gpu() else { return };
    for (channels, kind) in [(16, Kind::Equal), (16, Kind::Nan), (16, Kind::Fine), (32, Kind::Fine)] {
        let mut both = Both::new(&gpu, (channels, 16, 40_000), kind);
        let mut rng = Rng::new(channels.into());
        let seqs = both.fill(&[6000, 4100, 20_000], &mut rng);
        for (top, window) in [(64, None), (1500, None), (2500, None), (64, Some(5000))] {
            both.decode(&seqs[..2], ListArgs { top, window }, &mut rng);
        }
        for (top, window) in [(64, None), (1500, None), (2500, None), (64, Some(8194))] {
            both.decode(&seqs[2..], ListArgs { top, window }, &mut rng);
        }
    }
    // A row of more positions than `select_top` lists at a time (131,072).
    let mut both = Both::new(&gpu, (16, 16, 140_032), Kind::Fine);
    let mut rng = Rng::new(1);
    let seqs = both.fill(&[140_000], &mut rng);
    both.decode(&seqs, ListArgs { top: 64, window: None }, &mut rng);
    both.decode(&seqs, ListArgs { top: 3000, window: None }, &mut rng);
}

/// Memory of one layer of a step of decode rows, at fixed addresses.
struct Buffers {
    q: DeviceBuffer,
    k: DeviceBuffer,
    lists: DeviceBuffer,
    out: DeviceBuffer,
}

const TOP: u32 = 40;

impl Buffers {
    fn new(gpu: &Gpu, rows: usize, rng: &mut Rng) -> Self {
        let width = rows * (KV_HEADS * HEAD_DIM) as usize;
        let of = |rows: &[bf16]| DeviceBuffer::of(gpu, rows).expect("memory");
        let (q, k) = (numbers(rng, width * GROUP as usize, Kind::Equal), numbers(rng, width, Kind::Equal));
        let lists = vec![7_u32; rows * (KV_HEADS * TOP) as usize];
        Self {
            out: of(&vec![bf16::NAN; q.len()]),
            q: of(&q),
            k: of(&k),
            lists: DeviceBuffer::of(gpu, &lists).expect("memory"),
        }
    }

    fn launch(&mut self, cuda: &mut Cuda, plan: &BatchPlan<'_>) -> Result<(), CudaError> {
        cuda.store_cache(plan, LAYER, self.k.rows(0, None), self.k.rows(0, None))?;
        let select = Select { q_heads: KV_HEADS * GROUP, top: TOP, window: None };
        let (q, lists) = (self.q.rows(0, None), self.lists.rows_mut(0, None));
        cuda.select(plan, LAYER, &select, q, lists)?;
        let attend = Attend::new(KV_HEADS * GROUP, HEAD_DIM);
        let selection = Selection { positions: self.lists.rows(0, None), top: TOP };
        let queries = Queries { rows: q, sinks: None };
        let out = self.out.rows_mut(0, None);
        cuda.attend_selected(plan, LAYER, &attend, selection, queries, out, None)
    }

    /// Returns the lists and outputs, and poisons their buffers.
    fn take(&mut self) -> (Vec<u32>, Vec<u16>) {
        let lists = self.lists.read(0, self.lists.bytes() as usize / 4).expect("numbers");
        let out = self.out.read(0, self.out.bytes() as usize / 2).expect("numbers");
        self.lists.fill(7).expect("a fill");
        self.out.fill(0xff).expect("a fill");
        (lists, out)
    }
}

/// A graph selects and reads as launches of the same step do, while rows grow over chunks of scores.
#[test]
fn a_graph_selects_for_the_step_that_is_staged() {
    let Some(gpu) = gpu() else { return };
    let mut both = Both::new(&gpu, (16, 16, 4096), Kind::Equal);
    let mut rng = Rng::new(3);
    let seqs = both.fill(&[30, 250, 700], &mut rng);
    let Both { gpu: engine, scratch: [_, scratch], .. } = &mut both;
    let items: Vec<Extend> = seqs.iter().map(|&seq| Extend { seq, len: 1 }).collect();
    let mut buffers = Buffers::new(&gpu, seqs.len(), &mut rng);
    let (mut graph, mut key) = (None, None);
    for round in 0..12 {
        let plan = engine.plan_batch(scratch, &items).expect("room");
        let stream = engine.backend().stream().clone();
        let cuda = engine.backend_mut();
        if graph.is_none() {
            let unprepared = stream.capture(|| buffers.launch(cuda, &plan));
            assert_eq!(unprepared.err(), Some(CudaError::NotPrepared));
            let lists = [(Attend::new(KV_HEADS * GROUP, HEAD_DIM), TOP)];
            cuda.prepare(&Prepare { lists: &lists, ..Prepare::new(&[]) }).expect("memory");
            cuda.stage(&plan).expect("a valid plan");
            graph = Some(stream.capture(|| buffers.launch(cuda, &plan)).expect("a graph"));
        }
        let staged = cuda.stage(&plan).expect("a valid plan");
        assert_eq!(*key.get_or_insert(staged.graph), staged.graph);
        buffers.take();
        // SAFETY: the plan is staged, with the key of the captured one, and the buffers live.
        unsafe { graph.as_ref().expect("made above").launch(&stream) }.expect("a launch");
        stream.synchronize().expect("nothing failed");
        let replayed = buffers.take();
        buffers.launch(cuda, &plan).expect("a valid step");
        stream.synchronize().expect("nothing failed");
        assert!(replayed == buffers.take(), "round {round}");
        let step = plan.step();
        let new: Vec<TokenId> = (0..1).map(TokenId::new).collect();
        engine.commit(step).expect("it is open");
        engine.complete(step).expect("done");
        for &seq in &seqs {
            engine.append(seq, &new).expect("a sequence");
        }
    }
}

#[test]
fn sparse_attention_without_a_kernel_is_refused() {
    let Some(gpu) = gpu() else { return };
    let with = |pool: PoolConfig, labels| {
        let options = CudaOptions { labels, ..CudaOptions::new(&gpu) };
        match Engine::new(EngineConfig::from(pool), options) {
            Err(EngineError::Backend(error)) => error,
            other => panic!("{:?}", other.err()),
        }
    };
    let plain = config(4, 16, 512).pool;
    assert_eq!(with(plain, None), CudaError::Labels(LabelError::Missing { channels: 4 }));
    let none = PoolConfig { label_channels: 0, ..plain };
    assert_eq!(with(none, Some(labels(4))), CudaError::Labels(LabelError::NoLabels));
    for dtype in [KvDtype::F32, KvDtype::Fp8E4M3] {
        let pool = PoolConfig { dtype, ..plain };
        assert_eq!(with(pool, Some(labels(4))), CudaError::Lists { dtype });
    }

    // Memory for 2 chunks of 256 scores, and for one more chunk for each of 2 rows.
    let given = Some(labels(4));
    let options = CudaOptions { labels: given, select_tokens: 500, max_step_rows: 2, ..CudaOptions::new(&gpu) };
    let mut engine = open(&gpu, options, config(4, 16, 2048));
    let prompt: Vec<TokenId> = (0..1200).map(TokenId::new).collect();
    let seq = engine.admit(Namespace::default(), &prompt, 0).expect("room");
    let mut scratch = StepScratch::new();
    let step = engine.plan_batch(&mut scratch, &[Extend { seq, len: 1199 }]).expect("room").step();
    engine.commit(step).expect("it is open");
    engine.complete(step).expect("done");
    let plan = engine.plan_batch(&mut scratch, &[Extend { seq, len: 1 }]).expect("room");
    let mut buffers = Buffers::new(&gpu, 1, &mut Rng::new(1));
    let refused = buffers.launch(engine.backend_mut(), &plan);
    assert_eq!(refused, Err(CudaError::Limit { what: Limit::SelectTokens, value: 1280, max: 1024 }));

    let cuda = engine.backend_mut();
    let mut prepare = |q_heads, top| {
        let lists = [(Attend::new(q_heads, HEAD_DIM), top)];
        cuda.prepare(&Prepare { lists: &lists, ..Prepare::new(&[]) })
    };
    assert_eq!(prepare(8, 16), Ok(()));
    assert_eq!(prepare(32, 16), Ok(()), "groups of 16");
    let heads = CudaError::Heads { q_heads: 34, kv_heads: 2 };
    assert_eq!(prepare(34, 16), Err(heads));
    let top = |top| Err(CudaError::Plan(PlanError::Top { top, max: 2048 }));
    for wrong in [0, 2049] {
        assert_eq!(prepare(8, wrong), top(wrong));
    }
}
