//! Measures decode and extend attention over random pages.

use kvarena::backend::OpenBackend;
use kvarena::backend::cuda::{Cuda, CudaOptions, DeviceBuffer, Gpu};
use kvarena::layout::{KvScales, Layout, PlaneName};
use kvarena::plan::{SharedSpans, StepEnd};
use kvarena::testkit::contract::attention;
use kvarena::testkit::rng::Rng;
use kvarena::{Attend, Backend, BatchPlan, KvDtype, KvShape, LayerId, PoolConfig, SlotId};

use crate::Outcome;
use crate::batch::{Batch, Forest, Noise, pool, table};
use crate::fp8_noise::{Fp8Noise, static_scales};
use crate::report::{Distance, Rate, Report};
use crate::timer::Timer;

const HEAD_DIM: u32 = 128;

/// Timing of calls: in a graph, or launched one by one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum How {
    Graph,
    Launch,
}

/// A filled pool, and rows for q and out. Calls use the layers in turn. All layers together have as many
/// slots as the baselines have in one layer; the baselines use another random set of pages in each turn.
pub struct Bench<'a> {
    noise: &'a Noise,
    /// Contents of a pool of fp8.
    fp8: Option<&'a Fp8Noise>,
    scales: Option<KvScales>,
    timer: Timer,
    pub cuda: Cuda,
    q: DeviceBuffer,
    out: DeviceBuffer,
    step: u64,
    rng: Rng,
}

impl<'a> Bench<'a> {
    /// Creates the bench over a pool of noise. Pools of fp8 need `fp8`.
    pub fn new(gpu: &Gpu, noise: &'a Noise, fp8: Option<&'a Fp8Noise>, config: &PoolConfig) -> Outcome<Self> {
        let (timer, pool, scales) = (Timer::new(gpu)?, config.layout()?, static_scales(config));
        let options = CudaOptions { scales: scales.clone(), ..timer.options(gpu) };
        let cuda = options.open(&pool, &table(pool.page_size()), 2)?;
        let fp8 = fp8.filter(|_| config.dtype == KvDtype::Fp8E4M3);
        match fp8 {
            Some(fp8) => fp8.fill(&cuda, noise)?,
            None => noise.fill(cuda.pool())?,
        }
        let bytes = 512 << 20;
        let (q, out) = (noise.buffer(gpu, bytes)?, DeviceBuffer::new(gpu, bytes)?);
        Ok(Self { noise, fp8, scales, timer, cuda, q, out, step: 0, rng: Rng::new(5) })
    }

    /// Times one batch; `lens` has the new tokens and all tokens of each row. Returns also whether a few of its rows
    /// are correct.
    pub fn run(&mut self, lens: &[(u32, u32)], q_heads: u32, how: How) -> Outcome<(f64, bool)> {
        let forest = Forest::alone(lens.iter().map(|len| len.1));
        let new_lens: Vec<u32> = lens.iter().map(|len| len.0).collect();
        self.run_forest(&forest, &new_lens, (q_heads, how), false)
    }

    /// Times a batch whose rows share spans, which the backend may read once if `once` is set. Returns also whether a
    /// few of its rows are correct.
    pub fn run_forest(
        &mut self,
        forest: &Forest,
        new_lens: &[u32],
        (q_heads, how): (u32, How),
        once: bool,
    ) -> Outcome<(f64, bool)> {
        self.step += 1;
        let layout = *self.cuda.layout();
        let sets = layout.layers() as usize;
        let table = table(layout.page_size());
        let batch = Batch::forest(self.step, &layout, &table, forest, new_lens, &mut self.rng);
        let attend = Attend::new(q_heads, layout.head_dim());
        let plan = batch.plan();
        let shared = if once { plan.shared } else { SharedSpans::default() };
        let plan = BatchPlan { shared, ..plan };
        self.cuda.begin(&plan)?;
        let set_bytes = batch.slots.len() as u64 * u64::from(q_heads * layout.head_dim()) * 2;
        let set_count = self.q.bytes() / set_bytes;
        let Self { timer, cuda, q, out, .. } = self;
        out.fill(0xff)?;
        let attend_set = |i| {
            let at = i as u64 % set_count * set_bytes;
            let (q, out) = (q.rows(at, None), out.rows_mut(at, None));
            cuda.attend(&plan, LayerId::new(i as u32), &attend, q, out, None)
        };
        let us = match how {
            How::Graph => timer.graph(sets, attend_set)?,
            How::Launch => timer.launches(sets, attend_set)?,
        };
        cuda.end(StepEnd::Complete(plan.step()));
        Ok((us, self.check(&batch, &attend, set_bytes)?))
    }

    /// Returns one kv head of K or V at a slot of a layer.
    fn stored(&self, plane: PlaneName, layer: LayerId, slot: SlotId, head: u32) -> Vec<f64> {
        let pool = self.cuda.layout();
        match self.fp8 {
            Some(fp8) => fp8.stored(pool, self.scales.as_ref(), (plane, layer, slot, head)),
            None => self.noise.stored(pool, plane, layer, slot, head),
        }
    }

    /// Compares a few (token, head) pairs of a few sequences with float64.
    fn check(&mut self, batch: &Batch, attend: &Attend, set_bytes: u64) -> Outcome<bool> {
        let layout = *self.cuda.layout();
        let (set_count, head_dim) = (self.q.bytes() / set_bytes, layout.head_dim());
        let (group, count) = (attend.q_heads / layout.kv_heads(), batch.rows.len());
        let mut distance = Distance::default();
        for index in [0, count / 2, count - 1] {
            let row = batch.rows[index];
            for token in [0, row.extend_len - 1] {
                let layer = self.rng.below(layout.layers().into()) as u32;
                let head = self.rng.below(attend.q_heads.into()) as u32;
                let kv_head = head / group;
                let position = row.kv_len - row.extend_len + token;
                let read = |plane| -> Vec<f64> {
                    let at_position = |p: u32| {
                        let page = batch.pages[index][(p / layout.page_size()) as usize];
                        let slot = page * layout.page_size() + p % layout.page_size();
                        let (layer, slot) = (LayerId::new(layer), SlotId::new(slot.into()));
                        self.stored(plane, layer, slot, kv_head)
                    };
                    (0..=position).flat_map(at_position).collect()
                };
                let (k, v) = (read(PlaneName::K), read(PlaneName::V));
                let at = u64::from(layer) % set_count * set_bytes
                    + 2 * u64::from(head_dim) * u64::from((row.qo_start + token) * attend.q_heads + head);
                let q: Vec<f32> = (at / 2..at / 2 + u64::from(head_dim)).map(|i| self.noise.at(i)).collect();
                let none = f32::NEG_INFINITY;
                let exact = attention(attend, &q, &k, &v, (1, 0), position as usize, none);
                let got: Vec<half::bf16> = self.out.read(at, head_dim as usize)?;
                distance.add(&got, &exact.out);
            }
        }
        Ok(distance.is_small())
    }
}

/// Lengths of the Zipf batch: 128 to 32,768, sum 93,488.
pub fn zipf() -> Vec<u32> {
    let power = 256_f64.ln() / 64_f64.ln();
    let len = |i: u32| (32_768.0 / f64::from(i + 1).powf(power)).round().max(128.0) as u32;
    let mut lens: Vec<u32> = (0..64).map(len).collect();
    let mut rng = Rng::new(0);
    for i in (1..lens.len()).rev() {
        lens.swap(i, rng.below(i as u64 + 1) as usize);
    }
    lens
}

pub fn decode(gpu: &Gpu, report: &mut Report) -> Outcome<()> {
    let shapes = [
        ("b1 L8192", vec![8_192]),
        ("b1 L131072", vec![131_072]),
        ("b16 L4096", vec![4_096; 16]),
        ("b64 L4096", vec![4_096; 64]),
        ("b128 L2048", vec![2_048; 128]),
        ("b256 L1024", vec![1_024; 256]),
        ("b64 zipf128-32768", zipf()),
    ];
    let noise = Noise::new(gpu)?;
    for (kv_heads, q_heads, slots) in [(8, &[32, 64][..], 1 << 20), (32, &[32][..], 1 << 19)] {
        let bytes = |lens: &[u32]| f64::from(lens.iter().sum::<u32>()) * f64::from(kv_heads * 512);
        let sets = |lens: &[u32]| ((400e6 / bytes(lens)).ceil() as u32).clamp(2, 12);
        let mut layers: Vec<u32> = shapes.iter().map(|(_, lens)| sets(lens)).collect();
        layers.sort_unstable();
        layers.dedup();
        for (page_size, layout) in LAYOUTS {
            for &layers in &layers {
                let shape = KvShape::heads(kv_heads, HEAD_DIM);
                let config = PoolConfig { shape, ..pool(layers, page_size, slots / layers, layout) };
                let mut bench = Bench::new(gpu, &noise, None, &config)?;
                let of_set = || shapes.iter().filter(|(_, lens)| sets(lens) == layers);
                for (&q_heads, (name, lens)) in
                    q_heads.iter().flat_map(|q_heads| of_set().map(move |shape| (q_heads, shape)))
                {
                    let rows: Vec<_> = lens.iter().map(|&len| (1, len)).collect();
                    let (us, ok) = bench.run(&rows, q_heads, How::Graph)?;
                    let case = format!("{name} {q_heads}q/{kv_heads}kv {}", suffix(page_size, layout));
                    report.row("decode", &case, "kvarena", us, Rate::Bytes(bytes(lens)), ok);
                }
            }
        }
    }
    Ok(())
}

/// Returns rows that all share `len` tokens, each with `own` further tokens.
fn alike(rows: usize, len: u32, own: u32) -> Forest {
    Forest { spans: vec![(0..rows, len)], own: vec![own; rows] }
}

/// Returns the cases of shared prefixes that the FlashInfer baselines also measure.
pub fn forests() -> [(&'static str, Forest); 4] {
    let mut tree = alike(64, 4_096, 256);
    tree.spans.extend((0..8).map(|group| (8 * group..8 * group + 8, 4_096)));
    [
        ("b64 8192+256", alike(64, 8_192, 256)),
        ("b128 2048+512", alike(128, 2_048, 512)),
        ("b256 16384+128", alike(256, 16_384, 128)),
        ("b64 4096+8x4096+256", tree),
    ]
}

/// Measures a few new tokens a row, as in the verification of drafts, over shared prefixes: see [`shared`].
pub fn shared_short(gpu: &Gpu, report: &mut Report) -> Outcome<()> {
    let noise = Noise::new(gpu)?;
    let mut bench = Bench::new(gpu, &noise, None, &pool(4, 16, 1 << 18, Layout::LayerFirst))?;
    let forests = [
        ("b64 8192+256", alike(64, 8_192, 256)),
        ("b16 4096+1024", alike(16, 4_096, 1_024)),
        ("b64 4096", Forest::alone(vec![4_096; 64])),
        ("b16 4096", Forest::alone(vec![4_096; 16])),
    ];
    for (name, forest) in &forests {
        for new in [1, 2, 4, 8, 16] {
            let new_lens = vec![new; forest.own.len()];
            let bytes = Rate::Bytes(forest.tokens() as f64 * 4096.0);
            for (kind, once) in [("flat", false), ("spans once", true)] {
                let (us, ok) = bench.run_forest(forest, &new_lens, (32, How::Graph), once)?;
                report.row("sharedq", &format!("{name} q{new}"), kind, us, bytes, ok);
            }
        }
    }
    Ok(())
}

/// Measures decode over shared prefixes, in turn: each row read separately, and with spans that the split may read
/// once.
pub fn shared(gpu: &Gpu, report: &mut Report) -> Outcome<()> {
    let plain = [("b64 4096", vec![4_096; 64]), ("b64 zipf", zipf()), ("b16 4096", vec![4_096; 16])];
    let more = [
        ("b128 512+512", alike(128, 512, 512)),
        ("b2 8192+256", alike(2, 8_192, 256)),
        ("b8 1024+1024", alike(8, 1_024, 1_024)),
    ];
    let plain = plain.map(|(name, own)| (name, Forest::alone(own)));
    let forests: Vec<_> = forests().into_iter().chain(more).chain(plain).collect();
    let noise = Noise::new(gpu)?;
    for head_dim in [128, 64, 256] {
        let shape = KvShape::heads(8, head_dim);
        let config = PoolConfig { shape, ..pool(4, 16, 1 << 18, Layout::LayerFirst) };
        let mut bench = Bench::new(gpu, &noise, None, &config)?;
        // Cases of head_dim 128 have no suffix, as in the other sections.
        let suffix = if head_dim == 128 { String::new() } else { format!(" d{head_dim}") };
        for (name, forest) in &forests {
            let new_lens = vec![1; forest.own.len()];
            let bytes = Rate::Bytes(forest.tokens() as f64 * f64::from(8 * head_dim * 4));
            for (kind, once) in [("flat", false), ("spans once", true)] {
                let (us, ok) = bench.run_forest(forest, &new_lens, (32, How::Graph), once)?;
                report.row("shared", &format!("{name}{suffix}"), kind, us, bytes, ok);
            }
        }
    }
    Ok(())
}

/// Measures a few new tokens a row, as in the verification of drafts.
pub fn short_queries(gpu: &Gpu, report: &mut Report) -> Outcome<()> {
    let noise = Noise::new(gpu)?;
    for (page_size, layout) in &LAYOUTS[..2] {
        for batch in [16_u32, 64] {
            let bytes = f64::from(batch) * 4_096.0 * 4_096.0;
            let sets = ((400e6 / bytes).ceil() as u32).clamp(2, 12);
            let config = pool(sets, *page_size, (1 << 20) / sets, *layout);
            let mut bench = Bench::new(gpu, &noise, None, &config)?;
            for new in [1_u32, 2, 4, 8, 16] {
                let case = format!("b{batch} L4096 q{new} {}", suffix(*page_size, *layout));
                for (kind, how) in [("kvarena", How::Launch), ("kvarena in a graph", How::Graph)] {
                    let lens = vec![(new, 4_096); batch as usize];
                    let (us, ok) = bench.run(&lens, 32, how)?;
                    report.row("shortq", &case, kind, us, Rate::Bytes(bytes), ok);
                }
            }
        }
    }
    Ok(())
}

pub fn extend(gpu: &Gpu, report: &mut Report) -> Outcome<()> {
    let noise = Noise::new(gpu)?;
    for (page_size, layout) in LAYOUTS {
        for b in [1_u32, 8] {
            for (new, cached) in [(512_u32, 0_u32), (2_048, 0), (8_192, 0), (512, 7_680), (2_048, 30_720)] {
                if b * new > 16_384 {
                    continue;
                }
                let (q, p) = (f64::from(new), f64::from(cached));
                let bytes = f64::from(b) * ((q + p) * 4096.0 + q * 16_384.0);
                let sets = ((256e6 / bytes).ceil() as u32).clamp(1, 8);
                let config = pool(sets, page_size, (1 << 20) / sets, layout);
                let mut bench = Bench::new(gpu, &noise, None, &config)?;
                let lens = vec![(new, new + cached); b as usize];
                let (us, ok) = bench.run(&lens, 32, How::Launch)?;
                let case = format!("B{b} q{new} prefix{cached} {}", suffix(page_size, layout));
                report.row("extend", &case, "kvarena", us, Rate::extend(b, new, cached), ok);
            }
        }
    }
    Ok(())
}

/// Layouts of the pool, with their page size.
const LAYOUTS: [(u32, Layout); 3] = [(16, Layout::LayerFirst), (1, Layout::LayerFirst), (16, Layout::PageFirst)];

/// Returns the suffix of a case for its layout.
fn suffix(page_size: u32, layout: Layout) -> String {
    let layout = if layout == Layout::PageFirst { " PageFirst" } else { "" };
    format!("page{page_size}{layout}")
}
