//! A graph is captured once for each key and replayed over many steps, while tables, lengths and the batch change.
//! Other steps run outside of the graph between replays.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use kvarena::backend::cuda::{
    Archive, Cuda, CudaError, CudaGraph, CudaOptions, CudaStream, DeviceBuffer, Gpu, GraphKey, Kernel, Launch, Prepare,
};
use kvarena::backend::{OpenBackend, PlanError};
use kvarena::config::StepBounds;
use kvarena::id::RowId;
use kvarena::layout::{Dtype, Layout, Scaling, TableShape};
use kvarena::plan::{BatchRow, PageCopy, PlanSize, SlotMapping, StepEnd};
use kvarena::testkit::contract::bytes;
use kvarena::testkit::padded::padded;
use kvarena::testkit::planner::Item;
use kvarena::{Attend, Backend, BatchPlan, Capacity, KvDtype, KvShape, LayerId, PageId, PoolConfig, StepScratch};
use ruzstd::encoding::{CompressionLevel, compress_to_vec};

use crate::drive::{Drive, LayerInputs, Shape};
use crate::gpu;
use crate::on_gpu::OnGpu;
use crate::plans::{first_token, plan_of};

/// Buffers of q, k, v, out and lse for each layer, at fixed addresses, for steps of up to `tokens` tokens.
pub struct Buffers {
    layers: Vec<[DeviceBuffer; 4]>,
    lse: Vec<DeviceBuffer>,
    heads: usize,
    width: usize,
}

impl Buffers {
    pub fn new(gpu: &Gpu, shape: &Shape, tokens: usize) -> Self {
        let heads = (shape.kv_heads * shape.group) as usize;
        let width = heads * shape.head_dim as usize;
        let bytes = (tokens * width * shape.dtype.size() as usize) as u64;
        let buffer = || DeviceBuffer::new(gpu, bytes).expect("memory");
        let layers = (0..shape.layers).map(|_| [buffer(), buffer(), buffer(), buffer()]).collect();
        let sums = |_| DeviceBuffer::new(gpu, (tokens * heads * 4) as u64).expect("memory");
        Self { layers, lse: (0..shape.layers).map(sums).collect(), heads, width }
    }

    /// Writes a step's inputs, and poison to its outputs.
    pub fn fill(&mut self, inputs: &[LayerInputs]) {
        for (([q, k, v, out], lse), layer) in self.layers.iter_mut().zip(&mut self.lse).zip(inputs) {
            for (buffer, rows) in [(q, &layer.q), (k, &layer.k), (v, &layer.v)] {
                buffer.write(0, &bytes(rows.dtype, &rows.values)).expect("a copy");
            }
            out.fill(0xff).expect("a fill");
            lse.fill(0xff).expect("a fill");
        }
    }

    /// Launches all layers of a step.
    pub fn launch(&mut self, gpu: &mut OnGpu, plan: &BatchPlan<'_>, attend: &Attend) -> Result<(), CudaError> {
        for (i, ([q, k, v, out], lse)) in self.layers.iter_mut().zip(&mut self.lse).enumerate() {
            let layer = LayerId::new(i as u32);
            gpu.cuda.store_cache(plan, layer, k.rows(0, None), v.rows(0, None))?;
            let (out, lse) = (out.rows_mut(0, None), lse.rows_mut(0, None));
            gpu.cuda.attend(plan, layer, attend, q.rows(0, None), out, Some(lse))?;
        }
        Ok(())
    }

    /// Returns a step's rows of out.
    fn numbers(&self, dtype: Dtype, out: &DeviceBuffer, tokens: usize) -> Vec<f32> {
        let out: Vec<u16> = out.read(0, tokens * self.width).expect("numbers");
        let number = |bits| match dtype {
            Dtype::F16 => half::f16::from_bits(bits).to_f32(),
            _ => half::bf16::from_bits(bits).to_f32(),
        };
        out.into_iter().map(number).collect()
    }

    pub fn check(
        &self,
        drive: &mut Drive,
        items: &[Item],
        plan: &BatchPlan<'_>,
        inputs: &[LayerInputs],
        attend: &Attend,
    ) {
        let tokens = plan.token_count();
        for (layer, ([_, _, _, out], lse)) in self.layers.iter().zip(&self.lse).enumerate() {
            let out = self.numbers(drive.shape.dtype, out, tokens);
            let lse: Vec<f32> = lse.read(0, tokens * self.heads).expect("numbers");
            drive.check(items, plan, (layer, &inputs[layer].q), attend, (&out, &lse), 40);
        }
    }
}

fn shape(layout: Layout, page_size: u32) -> Shape {
    let capacity = Capacity::Pages(12_000 / page_size);
    Shape { layers: 2, page_size, layout, capacity, sequences: 12, max_len: 900, ..Shape::SMALL }
}

/// Replays steps of `rows` rows and `tokens` tokens, each row extending by up to `len`.
fn replay(gpu: &Gpu, shape: Shape, rows: usize, tokens: usize, len: u64) {
    replay_trees(gpu, shape, (rows, tokens, len), false);
}

/// Like [`replay`], but with `trees`, about every other step has rows that are trees or have random masks.
fn replay_trees(gpu: &Gpu, shape: Shape, (rows, tokens, len): (usize, usize, u64), trees: bool) {
    let mut drive = Drive::new(shape, 11);
    let mut backend = shape.open(gpu, 4);
    let attend = shape.attend();
    let mut buffers = Buffers::new(gpu, &shape, tokens.max(700));
    let mut scratch = StepScratch::new();
    let mut graphs: HashMap<GraphKey, CudaGraph> = HashMap::new();
    for step in 0..40 {
        // A step outside the graph computes the prompt of a new sequence. If `rows` sequences are live, one ends first.
        if step % 5 == 0 {
            if drive.planner.live().len() >= rows {
                drive.planner.finish(drive.planner.live()[0]);
            }
            let sequence = drive.admit();
            let items = [Item::Extend { sequence, len: drive.rng.within(1, 600) as u32 }];
            let plan = drive.planner.plan(&items);
            let inputs = drive.inputs(&items, &plan.plan());
            buffers.fill(&inputs);
            backend.begin(&plan.plan()).expect("a valid plan");
            buffers.launch(&mut backend, &plan.plan(), &attend).expect("a valid step");
            backend.synchronize().expect("nothing failed");
            buffers.check(&mut drive, &items, &plan.plan(), &inputs, &attend);
            backend.end(StepEnd::Complete(plan.plan().step()));
        }
        let mut left = tokens as u64 - rows as u64;
        let mut items = Vec::new();
        for sequence in drive.planner.live().into_iter().take(rows - 1) {
            let room = shape.max_len - drive.planner.sequence(sequence).expect("it is live").len;
            let more = drive.rng.below(len.min(left + 1).min(u64::from(room.max(1))));
            left -= more;
            if room > 0 {
                items.push(Item::Extend { sequence, len: 1 + more as u32 });
            }
        }
        let mut is_tree = Vec::new();
        if trees && drive.rng.one_in(2) {
            is_tree = items.iter().map(|_| drive.rng.one_in(2)).collect();
        }
        let plan = drive.planner.plan_trees(&items, &is_tree);
        backend.begin(&plan.plan()).expect("a valid plan");
        let plan = padded(&plan.plan(), &mut scratch, PlanSize { rows, tokens });
        let inputs = drive.inputs(&items, &plan);
        buffers.fill(&inputs);
        // A step ran outside of graphs, so the variant of attention exists.
        let staged = backend.cuda.stage(&plan).expect("a valid plan");
        let graph = graphs.entry(staged.graph).or_insert_with(|| {
            let stream = backend.stream.clone();
            let captured = stream.capture(|| buffers.launch(&mut backend, &plan, &attend));
            captured.expect("a capture")
        });
        // SAFETY: backend and buffers live until the end, and a padded plan was just staged.
        unsafe { graph.launch(&backend.stream) }.expect("a replay");
        // The replay has launched all layers, so the step may end.
        backend.end(StepEnd::Complete(plan.step()));
        let ended = backend.cuda.stage(&plan);
        assert_eq!(ended, Err(CudaError::Plan(PlanError::Ended { step: plan.step() })));
        backend.synchronize().expect("nothing failed");
        buffers.check(&mut drive, &items, &plan, &inputs, &attend);
    }
    // The decode kernel has work or none. The extend kernel has none, or has work in a step with or without trees.
    // These are 6 keys. In decode steps, only the decode kernel has work.
    let most = if tokens == rows { 1 } else { 6 };
    assert!(graphs.len() <= most, "{} graphs", graphs.len());
}

#[test]
fn decode_graphs_replay() {
    let Some(gpu) = gpu() else { return };
    for layout in [Layout::PageFirst, Layout::LayerFirst] {
        for page_size in [1, 16] {
            replay(&gpu, shape(layout, page_size), 8, 8, 1);
        }
    }
}

#[test]
fn mixed_graphs_replay() {
    let Some(gpu) = gpu() else { return };
    replay(&gpu, shape(Layout::PageFirst, 16), 6, 200, 120);
}

/// Rows have a few new tokens, as in the verification of drafts. In the second replay, some rows have more tokens than
/// a decode kernel takes.
#[test]
fn graphs_of_short_queries_replay() {
    let Some(gpu) = gpu() else { return };
    replay(&gpu, shape(Layout::PageFirst, 16), 8, 48, 6);
    replay(&gpu, shape(Layout::LayerFirst, 1), 8, 100, 40);
}

/// Steps with and without trees replay one graph if their keys are equal.
#[test]
fn graphs_with_trees_replay() {
    let Some(gpu) = gpu() else { return };
    // Rows of up to 8 tokens, like drafts. Then rows of up to 70 tokens; only those of at most 64 may be trees.
    replay_trees(&gpu, shape(Layout::PageFirst, 16), (8, 40, 8), true);
    replay_trees(&gpu, shape(Layout::LayerFirst, 1), (5, 200, 70), true);
    let fp8 = Shape { fp8: Some(Scaling::ByToken), ..shape(Layout::PageFirst, 16) };
    replay_trees(&gpu, fp8, (8, 40, 8), true);
}

#[test]
fn graphs_over_fp8_replay() {
    let Some(gpu) = gpu() else { return };
    for (scaling, layout) in [(Scaling::Static, Layout::LayerFirst), (Scaling::ByToken, Layout::PageFirst)] {
        let fp8 = |page_size| Shape { fp8: Some(scaling), ..shape(layout, page_size) };
        replay(&gpu, fp8(1), 8, 8, 1);
        replay(&gpu, fp8(16), 8, 8, 1);
        replay(&gpu, fp8(16), 6, 200, 120);
    }
}

#[test]
fn a_capture_refuses_an_unstaged_plan() {
    let Some(gpu) = gpu() else { return };
    let shape = shape(Layout::PageFirst, 16);
    let mut drive = Drive::new(shape, 3);
    let mut backend = shape.open(&gpu, 4);
    let mut buffers = Buffers::new(&gpu, &shape, 4);
    let items = [Item::Extend { sequence: drive.admit(), len: 1 }];
    let first = drive.planner.plan(&items);
    let second = drive.planner.plan(&items);
    backend.begin(&first.plan()).expect("a valid plan");
    backend.begin(&second.plan()).expect("a valid plan");
    let attend = shape.attend();
    let stream = backend.stream.clone();
    let unprepared = stream.capture(|| buffers.launch(&mut backend, &second.plan(), &attend));
    assert_eq!(unprepared.err(), Some(CudaError::NotPrepared));
    backend.cuda.prepare(&Prepare::new(&[attend])).expect("a served shape");
    backend.cuda.stage(&second.plan()).expect("a valid plan");
    let unstaged = stream.capture(|| buffers.launch(&mut backend, &first.plan(), &attend));
    assert_eq!(unstaged.err(), Some(CudaError::NotStaged { step: first.plan().step }));
    let third = drive.planner.plan(&items);
    let begun = stream.capture(|| backend.begin(&third.plan()));
    assert_eq!(begun.err(), Some(CudaError::NotStaged { step: third.plan().step }));
    backend.begin(&third.plan()).expect("a valid plan");
}

/// For rows of every type, in pools of every dtype, with heads or latent rows, `prepare` compiles all kernels of a
/// step's launches. Without `prepare`, a capture fails with a named error.
#[test]
fn a_capture_compiles_nothing_after_prepare() {
    let latent = KvShape::Latent { rank: 512, rope: 64 };
    let kinds = [
        (KvDtype::F32, None),
        (KvDtype::F16, None),
        (KvDtype::Bf16, None),
        (KvDtype::Fp8E4M3, Some(Dtype::F32)),
        (KvDtype::Fp8E4M3, Some(Dtype::F16)),
        (KvDtype::Fp8E4M3, Some(Dtype::Bf16)),
    ];
    let shapes = [KvShape::heads(2, 64), latent];
    for (shape, (dtype, rows)) in shapes.iter().flat_map(|&shape| kinds.map(|kind| (shape, kind))) {
        // A new handle of the device has no compiled kernels, so each case begins without them.
        let Some(gpu) = gpu() else { return };
        let config = PoolConfig {
            layers: 1,
            shape,
            dtype,
            scaling: if rows.is_some() { Scaling::ByToken } else { Scaling::Static },
            capacity: Capacity::Pages(4),
            ..PoolConfig::default()
        };
        let layout = config.layout().expect("a small pool");
        let table = TableShape::new(4, 2, 4, 4).expect("a small table");
        let stream = CudaStream::new(&gpu).expect("a stream");
        let options = CudaOptions { stream: Some(stream.clone()), rows, ..CudaOptions::new(&gpu) };
        let mut cuda = options.open(&layout, &table, StepBounds { steps: 2, tokens: 8 }).expect("a small pool");
        let width = if shape == latent { 576 } else { 64 };
        let attend = Attend { scale: 0.1, ..Attend::new(2, width) };
        let input = DeviceBuffer::of(&gpu, &[0_u8; 4096 * 4]).expect("memory");
        let mut out = DeviceBuffer::new(&gpu, input.bytes()).expect("memory");
        let plan = first_token(1);
        let pages = [PageCopy { source: PageId::new(0), target: PageId::new(1) }];
        let mut capture = |cuda: &mut Cuda, stored: bool| {
            let layer = LayerId::new(0);
            stream.capture(|| {
                if stored {
                    cuda.store_cache(&plan, layer, input.rows(0, None), input.rows(0, None))?;
                    cuda.copy_pages(&pages)?;
                }
                let out = out.rows_mut(0, None);
                cuda.attend(&plan, layer, &attend, input.rows(0, None), out, None)
            })
        };
        cuda.begin(&plan).expect("a valid plan");
        for stored in [true, false] {
            let captured = capture(&mut cuda, stored);
            let error = Some(CudaError::NotPrepared);
            assert_eq!(captured.err(), error, "{dtype:?}, {rows:?}, {shape:?}, {stored}");
        }
        cuda.prepare(&Prepare::new(&[attend])).expect("a served shape");
        cuda.stage(&plan).expect("a valid plan");
        let captured = capture(&mut cuda, true);
        assert_eq!(captured.err(), None, "{dtype:?}, {rows:?}, {shape:?}");
    }
}

#[test]
fn a_capture_ends_where_its_body_panics() {
    let Some(gpu) = gpu() else { return };
    let shape = shape(Layout::PageFirst, 16);
    let mut drive = Drive::new(shape, 3);
    let mut backend = shape.open(&gpu, 4);
    let stream = backend.stream.clone();
    let panics = || -> Result<(), CudaError> { panic!("on purpose") };
    assert!(catch_unwind(AssertUnwindSafe(|| stream.capture(panics))).is_err());
    let items = [Item::Extend { sequence: drive.admit(), len: 1 }];
    backend.begin(&drive.planner.plan(&items).plan()).expect("the stream is not captured");
    stream.synchronize().expect("nothing failed");
    stream.capture(|| Ok::<_, CudaError>(())).expect("another capture");
}

/// Drivers before CUDA 12.3 cannot capture PDL launches. With these drivers, `Function::launch` launches the kernel in
/// order.
#[test]
fn a_hosts_kernel_that_waits_is_captured_by_every_driver() {
    let Some(gpu) = gpu() else { return };
    const TEXT: &str = "// waits: generated by hand
.version 8.0
.target sm_80
.address_size 64
.visible .entry waits(.param .u32 waits_param_0)
{
\t// pdl: wait
\tret;
}
";
    let frame = compress_to_vec(TEXT.as_bytes(), CompressionLevel::Uncompressed);
    let archive = Box::leak(Box::new(Archive::new("waits", frame.leak())));
    let kernel = Box::leak(Box::new(Kernel::new("waits", archive, 32, 0).pdl()));
    let kernel = gpu.compile(kernel).expect("valid PTX");
    let stream = CudaStream::new(&gpu).expect("a stream");
    let launch = Launch { grid: (1, 1), block: 32, shared: 0, cluster: 1 };
    // SAFETY: the kernel takes one u32 and accesses no memory.
    let captured = stream.capture(|| unsafe { kernel.launch(stream.raw(), launch, &0_u32) });
    captured.expect("a capture");
}

/// Steps with equal numbers of tokens and rows: one that only decodes, and one with a row for the extend kernel.
#[test]
fn steps_of_other_kernels_have_other_keys() {
    let Some(gpu) = gpu() else { return };
    let shape = shape(Layout::PageFirst, 16);
    let mut backend = shape.open(&gpu, 4);
    backend.cuda.prepare(&Prepare::new(&[shape.attend()])).expect("a served shape");
    let mut keys = Vec::new();
    for (step, lens) in [[1, 1, 1, 1], [4, 0, 0, 0], [1, 1, 1, 1]].into_iter().enumerate() {
        let mut qo_start = 0;
        let rows = [0, 1, 2, 3].map(|i| {
            let extend_len = lens[i as usize];
            qo_start += extend_len;
            let (row, qo_start) = (RowId::new(i), qo_start - extend_len);
            BatchRow { row, qo_start, extend_len, kv_len: extend_len }
        });
        let (positions, slots) = match lens[0] {
            1 => (&[0; 4], &[0, 16, 32, 48]),
            _ => (&[0, 1, 2, 3], &[0, 1, 2, 3]),
        };
        let plan = plan_of(1 + step as u64, &rows, positions, SlotMapping::I32(slots));
        backend.begin(&plan).expect("a valid plan");
        keys.push(backend.cuda.stage(&plan).expect("a valid plan").graph);
        backend.end(StepEnd::Complete(plan.step()));
    }
    assert!(keys[0] == keys[2] && keys[0] != keys[1]);
}
