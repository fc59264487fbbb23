//! Graphs of attention over latent rows have the same results, bit for bit, as launches of the same steps.

use std::collections::HashMap;

use kvarena::backend::OpenBackend;
use kvarena::backend::cuda::{CudaError, CudaGraph, DeviceBuffer, Gpu, GraphKey, Prepare};
use kvarena::layout::{Dtype, Scaling, TableShape};
use kvarena::plan::{PlanSize, StepEnd};
use kvarena::testkit::contract::bytes;
use kvarena::testkit::padded::padded;
use kvarena::testkit::planner::{Item, Planner};
use kvarena::testkit::rng::Rng;
use kvarena::{Attend, Backend, BatchPlan, Capacity, KvDtype, KvShape, LayerId, PoolConfig, StepScratch};

use crate::gpu;
use crate::on_gpu::{OnGpu, OnGpuOptions};

const SHAPE: KvShape = KvShape::Latent { rank: 512, rope: 64 };
const ROWS: usize = 4;
const LONGEST: u32 = 120;

/// Rows at fixed addresses.
struct Buffers {
    dtype: Dtype,
    heads: usize,
    q: DeviceBuffer,
    k: DeviceBuffer,
    out: DeviceBuffer,
    lse: DeviceBuffer,
    tokens: usize,
}

impl Buffers {
    fn new(gpu: &Gpu, dtype: Dtype, heads: usize, tokens: usize) -> Self {
        let buffer = |bytes| DeviceBuffer::new(gpu, (tokens * bytes) as u64).expect("memory");
        let (q, k, out) = (buffer(2 * heads * 576), buffer(2 * 576), buffer(2 * heads * 512));
        Self { dtype, heads, q, k, out, lse: buffer(4 * heads), tokens }
    }

    /// Writes random rows, and poison to the outputs.
    fn fill(&mut self, seed: u64) {
        let mut rng = Rng::new(seed);
        for (buffer, width) in [(&mut self.q, self.heads * 576), (&mut self.k, 576)] {
            let number = || (rng.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0;
            let values: Vec<f32> = std::iter::repeat_with(number).take(self.tokens * width).collect();
            buffer.write(0, &bytes(self.dtype, &values)).expect("a copy");
        }
        self.out.fill(0xff).expect("a fill");
        self.lse.fill(0xff).expect("a fill");
    }

    /// Launches all calls of a step.
    fn launch(&mut self, gpu: &mut OnGpu, plan: &BatchPlan<'_>) -> Result<(), CudaError> {
        let (id, rows) = (LayerId::new(0), self.k.rows(0, None));
        gpu.cuda.store_cache(plan, id, rows, self.k.rows(0, None))?;
        let (out, lse) = (self.out.rows_mut(0, None), self.lse.rows_mut(0, None));
        gpu.cuda.attend(plan, id, &attend(self.heads), self.q.rows(0, None), out, Some(lse))
    }

    fn results(&self) -> (Vec<u16>, Vec<u32>) {
        let out = self.out.read(0, self.tokens * self.heads * 512).expect("numbers");
        (out, self.lse.read(0, self.tokens * self.heads).expect("numbers"))
    }
}

fn attend(heads: usize) -> Attend {
    Attend::latent(heads as u32, 192_f32.sqrt().recip())
}

/// Compares replayed with launched steps. Each step has `tokens` tokens in [`ROWS`] rows; at least the last row is
/// padding.
fn replay(gpu: &Gpu, (dtype, rows): (KvDtype, Dtype), heads: usize, tokens: usize) {
    let scaling = if dtype.is_quantised() { Scaling::ByToken } else { Scaling::Static };
    let (page_size, capacity) = (7, Capacity::Pages(80));
    let config = PoolConfig { shape: SHAPE, dtype, scaling, page_size, capacity, ..PoolConfig::default() };
    let layout = config.layout().expect("a valid pool");
    let table = TableShape::new(page_size, 4, LONGEST, 480).expect("a table");
    let open = || {
        let options = OnGpuOptions::of_rows(gpu, rows);
        options.open(&layout, &table, 2).expect("a small pool")
    };
    let (mut launched, mut replayed) = (open(), open());
    replayed.cuda.prepare(&Prepare::new(&[attend(heads)])).expect("a served shape");
    let new = || Buffers::new(gpu, rows, heads, tokens);
    let (mut buffers, mut others) = (new(), new());
    let (mut planner, mut scratch) = (Planner::new(&layout, &table, 5), StepScratch::new());
    let mut rng = Rng::new(6);
    let mut graphs: HashMap<GraphKey, CudaGraph> = HashMap::new();
    for step in 0..12 {
        if step % 4 == 3 {
            planner.finish(planner.live()[0]);
        }
        while planner.live().len() < ROWS - 1 {
            planner.admit().expect("a row");
        }
        let mut left = (tokens - ROWS) as u64;
        let mut items = Vec::new();
        for sequence in planner.live() {
            let room = LONGEST - planner.sequence(sequence).expect("it is live").len;
            let more = rng.below((left + 1).min(u64::from(room.max(1))));
            left -= more;
            if room > 0 {
                items.push(Item::Extend { sequence, len: 1 + more as u32 });
            }
        }
        let plan = planner.plan(&items);
        for backend in [&mut launched, &mut replayed] {
            backend.begin(&plan.plan()).expect("a valid plan");
        }
        let plan = padded(&plan.plan(), &mut scratch, PlanSize { rows: ROWS, tokens });
        buffers.fill(step);
        others.fill(step);
        others.launch(&mut launched, &plan).expect("a valid step");
        let staged = replayed.cuda.stage(&plan).expect("a valid plan");
        let stream = replayed.stream.clone();
        let graph = graphs
            .entry(staged.graph)
            .or_insert_with(|| stream.capture(|| buffers.launch(&mut replayed, &plan)).expect("a capture"));
        // SAFETY: backend and buffers live until the end, and a padded plan was just staged.
        unsafe { graph.launch(&stream) }.expect("a replay");
        for backend in [&mut launched, &mut replayed] {
            backend.end(StepEnd::Complete(plan.step()));
            backend.synchronize().expect("nothing failed");
        }
        let (results, wanted) = (buffers.results(), others.results());
        let case = format!("{dtype:?}, {rows:?}, {heads} heads, {tokens} tokens, step {step}");
        assert!(results == wanted, "{case}");
        assert!(!results.1.contains(&u32::MAX), "{case}: a number that no kernel wrote");
    }
}

#[test]
fn graphs_over_latent_rows_replay() {
    let Some(gpu) = gpu() else { return };
    // Decode kernels for few query rows, for 64, and for 128 by clusters.
    let few = [5, 64, 128].map(|heads| (heads, ROWS));
    for (heads, tokens) in few.into_iter().chain([(5, 40)]) {
        replay(&gpu, (KvDtype::Bf16, Dtype::Bf16), heads, tokens);
        for rows in [Dtype::Bf16, Dtype::F16] {
            replay(&gpu, (KvDtype::Fp8E4M3, rows), heads, tokens);
        }
    }
}
