//! Measures sparse reads and dense decode of the same pool: scoring of labels, selection, and attention over the
//! selection.

use kvarena::backend::cuda::{Cuda, CudaOptions, DeviceBuffer, Gpu};
use kvarena::backend::{OpenBackend, Queries, Select, Selection, SparseBackend};
use kvarena::layout::{LabelChannels, Layout, PlaneName};
use kvarena::plan::StepEnd;
use kvarena::testkit::contract::attention;
use kvarena::testkit::rng::Rng;
use kvarena::{Attend, Backend, LayerId, PoolConfig, SlotId};

use crate::Outcome;
use crate::batch::{Batch, Forest, Noise, pool, table};
use crate::report::{Distance, Rate, Report};
use crate::timer::Timer;

const HEAD_DIM: u32 = 128;
const KV_HEADS: u32 = 8;
const Q_HEADS: u32 = 32;
const PAGE_SIZE: u32 = 16;
/// Number of layers. Calls use them in turn, and each is far larger than the L2 cache, which thus serves no call.
const LAYERS: u32 = 4;
/// Number of positions in a list.
const TOP: u32 = 1024;

struct Bench<'a> {
    noise: &'a Noise,
    timer: Timer,
    cuda: Cuda,
    channels: LabelChannels,
    q: DeviceBuffer,
    out: DeviceBuffer,
    lists: DeviceBuffer,
    rng: Rng,
}

impl<'a> Bench<'a> {
    /// Creates the bench over a pool of noise, including labels, for `tokens` tokens.
    fn new(gpu: &Gpu, noise: &'a Noise, channels: u32, tokens: u32) -> Outcome<Self> {
        let timer = Timer::new(gpu)?;
        let config = pool(LAYERS, PAGE_SIZE, tokens, Layout::LayerFirst);
        let config = PoolConfig { label_channels: channels, ..config };
        let some: Vec<u32> = (0..channels).map(|i| i * (HEAD_DIM / channels)).collect();
        let channels = LabelChannels::new(LAYERS, KV_HEADS, channels, some.repeat((LAYERS * KV_HEADS) as usize))?;
        let options = CudaOptions { labels: Some(channels.clone()), ..timer.options(gpu) };
        let cuda = options.open(&config.layout()?, &table(PAGE_SIZE), 2)?;
        noise.fill(cuda.pool())?;
        let (q, out) = (noise.buffer(gpu, 1 << 20)?, DeviceBuffer::new(gpu, 1 << 20)?);
        let lists = DeviceBuffer::new(gpu, u64::from(4 * 32 * KV_HEADS * TOP))?;
        Ok(Self { noise, timer, cuda, channels, q, out, lists, rng: Rng::new(5) })
    }

    /// Times a batch of rows of one new token each.
    fn run(&mut self, rows: u32, len: u32, report: &mut Report) -> Outcome<()> {
        let layout = *self.cuda.layout();
        let forest = Forest::alone(vec![len; rows as usize]);
        let new_lens = vec![1; rows as usize];
        let batch = Batch::forest(1, &layout, &table(PAGE_SIZE), &forest, &new_lens, &mut self.rng);
        let plan = batch.plan();
        self.cuda.begin(&plan)?;
        let select = Select { q_heads: Q_HEADS, top: TOP, window: None };
        let attend = Attend::new(Q_HEADS, HEAD_DIM);
        let Self { timer, cuda, q, out, lists, .. } = self;
        let sets = LAYERS as usize;
        let layer = |i: usize| LayerId::new(i as u32);
        let dense = timer.graph(sets, |i| {
            let (q, out) = (q.rows(0, None), out.rows_mut(0, None));
            cuda.attend(&plan, layer(i), &attend, q, out, None)
        })?;
        let selecting =
            timer.graph(sets, |i| cuda.select(&plan, layer(i), &select, q.rows(0, None), lists.rows_mut(0, None)))?;
        let over_lists = timer.graph(sets, |i| {
            let selection = Selection { positions: lists.rows(0, None), top: TOP };
            let (q, out) = (Queries { rows: q.rows(0, None), sinks: None }, out.rows_mut(0, None));
            cuda.attend_selected(&plan, layer(i), &attend, selection, q, out, None)
        })?;
        out.fill(0xff)?;
        let both = timer.graph(sets, |i| {
            cuda.select(&plan, layer(i), &select, q.rows(0, None), lists.rows_mut(0, None))?;
            let selection = Selection { positions: lists.rows(0, None), top: TOP };
            let (q, out) = (Queries { rows: q.rows(0, None), sinks: None }, out.rows_mut(0, None));
            cuda.attend_selected(&plan, layer(i), &attend, selection, q, out, None)
        })?;
        cuda.end(StepEnd::Complete(plan.step()));
        let right = self.check(&batch, &attend)?;
        let channels = self.channels.channels();
        let case = format!("B{rows} L{len} K{TOP} {channels} channels");
        let tokens = f64::from(rows) * f64::from(len) * f64::from(KV_HEADS) * 2.0;
        let labels = tokens * f64::from(channels);
        let listed = f64::from(rows * TOP * KV_HEADS) * f64::from(2 * 2 * HEAD_DIM);
        let whole = tokens * f64::from(2 * HEAD_DIM);
        report.row("sparse", &case, "dense decode", dense, Rate::Bytes(whole), true);
        report.row("sparse", &case, "select", selecting, Rate::Bytes(labels), right[0]);
        report.row("sparse", &case, "attend_selected", over_lists, Rate::Bytes(listed), right[1]);
        let bytes = Rate::Bytes(labels + listed);
        report.row("sparse", &case, "both", both, bytes, right[0] && right[1]);
        println!("       both take {:.1} % of dense decode", 100.0 * both / dense);
        Ok(())
    }

    /// Compares some lists of the last layer with a sort, and attention over these lists with float64.
    fn check(&mut self, batch: &Batch, attend: &Attend) -> Outcome<[bool; 2]> {
        let (mut right, mut distance) = (true, Distance::default());
        for index in [0, batch.rows.len() / 2, batch.rows.len() - 1] {
            let head = self.rng.below(Q_HEADS.into()) as u32;
            let kv_head = head / (Q_HEADS / KV_HEADS);
            let start = 4 * u64::from((index as u32 * KV_HEADS + kv_head) * TOP);
            let list: Vec<u32> = self.lists.read(start, TOP as usize)?;
            right &= list == self.best(batch, index, kv_head);
            let rows = |plane| -> Vec<f32> {
                let row = |&position| self.row(batch, index, plane, (position, kv_head));
                list.iter().flat_map(row).collect()
            };
            let (k, v) = (rows(PlaneName::K), rows(PlaneName::V));
            let at = u64::from(batch.rows[index].qo_start * Q_HEADS + head) * u64::from(HEAD_DIM);
            let q: Vec<f32> = (0..u64::from(HEAD_DIM)).map(|i| self.noise.at(at + i)).collect();
            let none = f32::NEG_INFINITY;
            let exact = attention(attend, &q, &k, &v, (1, 0), list.len() - 1, none);
            let got: Vec<half::bf16> = self.out.read(2 * at, HEAD_DIM as usize)?;
            distance.add(&got, &exact.out);
        }
        Ok([right, distance.is_small()])
    }

    /// Returns one head of a position in a plane of the last layer.
    fn row(&self, batch: &Batch, index: usize, plane: PlaneName, (position, kv_head): (u32, u32)) -> Vec<f32> {
        let layout = self.cuda.layout();
        let page = batch.pages[index][(position / PAGE_SIZE) as usize];
        let slot = SlotId::new((page * PAGE_SIZE + position % PAGE_SIZE).into());
        let row = layout.row(plane, LayerId::new(LAYERS - 1), slot).expect("the pool has it");
        let elements = (row.end - row.start) / 2 / u64::from(KV_HEADS);
        let at = row.start / 2 + u64::from(kv_head) * elements;
        (at..at + elements).map(|i| self.noise.at(i)).collect()
    }

    /// Returns the expected list of a row and kv head.
    fn best(&self, batch: &Batch, index: usize, kv_head: u32) -> Vec<u32> {
        let row = batch.rows[index];
        let group = Q_HEADS / KV_HEADS;
        let query = |&channel: &u32| {
            let heads = (kv_head * group..(kv_head + 1) * group).map(|head| {
                let head = row.qo_start * Q_HEADS + head;
                self.noise.at(u64::from(head * HEAD_DIM + channel))
            });
            heads.fold(0.0_f32, |sum, x| sum + x)
        };
        let channels = self.channels.get(LayerId::new(LAYERS - 1), kv_head);
        let query: Vec<f32> = channels.iter().map(query).collect();
        let score = |position: u32| {
            let labels = self.row(batch, index, PlaneName::Labels, (position, kv_head));
            query.iter().zip(labels).fold(0.0_f32, |score, (&q, label)| q.mul_add(label, score))
        };
        let own = row.kv_len - 1;
        let mut scored: Vec<(f32, u32)> = (0..own).map(|p| (score(p), p)).collect();
        scored.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.cmp(&a.1)));
        let mut list: Vec<u32> = scored[..TOP as usize - 1].iter().map(|x| x.1).collect();
        list.push(own);
        list.sort_unstable();
        list
    }
}

/// Measures contexts of 32,768 and 131,072 tokens.
pub fn run(gpu: &Gpu, report: &mut Report) -> Outcome<()> {
    let noise = Noise::new(gpu)?;
    for channels in [16, 32] {
        let mut bench = Bench::new(gpu, &noise, channels, 1 << 20)?;
        bench.run(32, 32_768, report)?;
        drop(bench);
        let mut bench = Bench::new(gpu, &noise, channels, 1 << 20)?;
        bench.run(4, 131_072, report)?;
    }
    Ok(())
}
