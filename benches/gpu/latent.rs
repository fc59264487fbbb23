//! Measures attention over latent rows of 512 + 64, in bf16 and in fp8: decode with 16 and 128 heads, several new
//! tokens, chunks of a prompt.

use kvarena::backend::OpenBackend;
use kvarena::backend::cuda::{Cuda, CudaOptions, DeviceBuffer, Gpu};
use kvarena::layout::{Layout, PlaneName, Scaling};
use kvarena::plan::StepEnd;
use kvarena::testkit::contract::attention;
use kvarena::testkit::rng::Rng;
use kvarena::{Attend, Backend, KvDtype, KvShape, LayerId, PoolConfig, SlotId};

use crate::Outcome;
use crate::batch::{Batch, Forest, Noise, pool, table};
use crate::fp8_noise::Fp8Noise;
use crate::report::{Distance, Rate, Report};
use crate::timer::Timer;

const RANK: u32 = 512;
const ROW: u32 = 576;
/// Number of layers, which calls use in turn, and number of slots. Each layer is far larger than the L2 cache.
const LAYERS: u32 = 4;
const SLOTS: u32 = 1 << 19;

struct Bench<'a> {
    noise: &'a Noise,
    fp8_noise: &'a Fp8Noise,
    timer: Timer,
    cuda: Cuda,
    q: DeviceBuffer,
    out: DeviceBuffer,
    step: u64,
    rng: Rng,
}

impl<'a> Bench<'a> {
    fn new(
        gpu: &Gpu,
        (noise, fp8_noise): (&'a Noise, &'a Fp8Noise),
        fp8: bool,
        page_size: u32,
        selected_capability: Option<u32>,
    ) -> Outcome<Self> {
        let timer = Timer::new(gpu)?;
        let config = PoolConfig {
            shape: KvShape::Latent { rank: RANK, rope: ROW - RANK },
            dtype: if fp8 { KvDtype::Fp8E4M3 } else { KvDtype::Bf16 },
            scaling: if fp8 { Scaling::ByToken } else { Scaling::Static },
            ..pool(LAYERS, page_size, SLOTS, Layout::LayerFirst)
        };
        let options = CudaOptions { selected_capability, ..timer.options(gpu) };
        let cuda = options.open(&config.layout()?, &table(page_size), 2)?;
        if fp8 {
            fp8_noise.fill(&cuda, noise)?
        } else {
            noise.fill(cuda.pool())?
        }
        let (q, out) = (noise.buffer(gpu, 512 << 20)?, DeviceBuffer::new(gpu, 512 << 20)?);
        Ok(Self { noise, fp8_noise, timer, cuda, q, out, step: 0, rng: Rng::new(5) })
    }

    /// Times one batch of (new tokens, tokens). Returns also whether a few of its rows are correct.
    fn run(&mut self, lens: &[(u32, u32)], q_heads: u32) -> Outcome<(f64, bool)> {
        self.step += 1;
        let layout = *self.cuda.layout();
        let forest = Forest::alone(lens.iter().map(|len| len.1));
        let new_lens: Vec<u32> = lens.iter().map(|len| len.0).collect();
        let table = table(layout.page_size());
        let batch = Batch::forest(self.step, &layout, &table, &forest, &new_lens, &mut self.rng);
        let attend = Attend::latent(q_heads, 192_f32.sqrt().recip());
        self.cuda.begin(&batch.plan())?;
        let Self { timer, cuda, q, out, .. } = self;
        out.fill(0xff)?;
        let layer = |i| {
            let (q, out) = (q.rows(0, None), out.rows_mut(0, None));
            cuda.attend(&batch.plan(), LayerId::new(i as u32), &attend, q, out, None)
        };
        let us = timer.graph(LAYERS as usize, layer)?;
        cuda.end(StepEnd::Complete(batch.plan().step()));
        Ok((us, self.check(&batch, &attend)?))
    }

    /// Returns a row of the last layer.
    fn row(&self, slot: SlotId) -> impl Iterator<Item = f64> + use<'a> {
        let (layout, layer) = (self.cuda.layout(), LayerId::new(LAYERS - 1));
        let (noise, fp8_noise) = (self.noise, self.fp8_noise);
        let at = |plane| layout.row(plane, layer, slot).expect("the pool has the plane").start;
        let latent = at(PlaneName::Latent);
        let scales = layout.strides(PlaneName::KScales).map(|scales| {
            let (page, offset) = layout.page_of(slot);
            let scale = fp8_noise.scale(scales.row(layer.raw(), page, offset) - scales.origin);
            let rope = layout.strides(PlaneName::Rope).expect("a pool with scales has a rotary plane");
            (f64::from(scale), at(PlaneName::Rope) - rope.origin)
        });
        (0..u64::from(ROW)).map(move |i| match scales {
            None => noise.at(latent / 2 + i).into(),
            Some((scale, _)) if i < u64::from(RANK) => fp8_noise.number(latent + i) * scale,
            Some((_, rope)) => noise.at(rope / 2 + i - u64::from(RANK)).into(),
        })
    }

    /// Compares a (token, head) pair of the first, the middle and the last sequence with float64, in the last layer.
    fn check(&mut self, batch: &Batch, attend: &Attend) -> Outcome<bool> {
        let layout = *self.cuda.layout();
        let mut distance = Distance::default();
        for index in [0, batch.rows.len() / 2, batch.rows.len() - 1] {
            let row = batch.rows[index];
            let token = self.rng.below(row.extend_len.into()) as u32;
            let head = self.rng.below(attend.q_heads.into()) as u32;
            let position = row.kv_len - row.extend_len + token;
            let mut k = Vec::new();
            for p in 0..=position {
                let page = batch.pages[index][(p / layout.page_size()) as usize];
                let slot = (page * layout.page_size() + p % layout.page_size()).into();
                k.extend(self.row(SlotId::new(slot)));
            }
            let v: Vec<f64> = k.chunks(ROW as usize).flat_map(|row| row[..RANK as usize].to_vec()).collect();
            let at = u64::from((row.qo_start + token) * attend.q_heads + head);
            let q: Vec<f32> = (0..u64::from(ROW)).map(|i| self.noise.at(at * u64::from(ROW) + i)).collect();
            let no_sink = f32::NEG_INFINITY;
            let exact = attention(attend, &q, &k, &v, (1, 0), position as usize, no_sink);
            let got: Vec<half::bf16> = self.out.read(2 * at * u64::from(RANK), RANK as usize)?;
            distance.add(&got, &exact.out);
        }
        Ok(distance.is_small())
    }
}

/// Batches as (sequences, new tokens, tokens).
const SHAPES: [(usize, u32, u32); 7] =
    [(1, 1, 8_192), (16, 1, 4_096), (64, 1, 4_096), (128, 1, 2_048), (64, 2, 4_096), (64, 4, 4_096), (1, 512, 8_192)];

/// Measures the kernels of this device. The rate counts the bytes of the rows once, so it is comparable with memory
/// bandwidth only for cases that are memory-bound.
pub fn mla(gpu: &Gpu, report: &mut Report) -> Outcome<()> {
    run_cases(gpu, &[64, 1], None, report)
}

/// Measures the kernels that devices of compute capability 8.0 select, with pages of 64 tokens.
pub fn mla_general(gpu: &Gpu, report: &mut Report) -> Outcome<()> {
    run_cases(gpu, &[64], Some(80), report)
}

fn run_cases(gpu: &Gpu, pages: &[u32], capability: Option<u32>, report: &mut Report) -> Outcome<()> {
    let noise = (Noise::new(gpu)?, Fp8Noise::new(gpu)?);
    let noise = (&noise.0, &noise.1);
    let section = if capability.is_some() { "mla-general" } else { "mla" };
    for (fp8, page_size) in [false, true].iter().flat_map(|&fp8| pages.iter().map(move |&p| (fp8, p))) {
        let mut bench = Bench::new(gpu, noise, fp8, page_size, capability)?;
        let (kind, row_bytes) = if fp8 { ("fp8", 644) } else { ("bf16", 2 * ROW) };
        for (batch, new, len) in SHAPES {
            for heads in [16, 128] {
                let (us, ok) = bench.run(&vec![(new, len); batch], heads)?;
                let case = format!("B{batch} q{new} L{len} {heads}q page{page_size}");
                let bytes = batch as f64 * f64::from(len) * f64::from(row_bytes);
                report.row(section, &case, kind, us, Rate::Bytes(bytes), ok);
            }
        }
    }
    Ok(())
}
