//! Measures pools of fp8, with static scales and scales by token, and of bf16: decode, extend, store, shared prefixes.
//! The layout is LayerFirst.

use cust::sys;
use kvarena::backend::cuda::{Cuda, CudaOptions, DeviceBuffer, Gpu};
use kvarena::testkit::quantised::{scales, value};
use kvarena::testkit::rng::Rng;
use kvarena::{
    Backend, KvDtype, KvScales, LayerId, Layout, OpenBackend, PlaneName, PoolConfig, PoolLayout, Scaling, SlotId,
    StepBounds, StepEnd,
};

use crate::Outcome;
use crate::attention::{Bench, How, forests, zipf};
use crate::batch::{Batch, Forest, Noise, distinct, pool, table};
use crate::report::{Rate, Report};
use crate::timer::Timer;

const HEAD_DIM: u32 = 128;
const KV_HEADS: u32 = 8;
const Q_HEADS: u32 = 32;

/// Elements of a pool.
type Kind = (KvDtype, Scaling, &'static str);

const KINDS: [Kind; 3] = [
    (KvDtype::Bf16, Scaling::Static, "bf16"),
    (KvDtype::Fp8E4M3, Scaling::Static, "fp8 static"),
    (KvDtype::Fp8E4M3, Scaling::ByToken, "fp8 by token"),
];

fn config((dtype, scaling, _): Kind, layers: u32, page_size: u32, slots: u32) -> PoolConfig {
    PoolConfig { dtype, scaling, ..pool(layers, page_size, slots, Layout::LayerFirst) }
}

/// Returns the static scales of a pool of fp8 that has them.
pub fn static_scales(config: &PoolConfig) -> Option<KvScales> {
    let has_scales = config.dtype == KvDtype::Fp8E4M3 && config.scaling == Scaling::Static;
    has_scales.then(|| scales(config.layers, KV_HEADS, 1))
}

/// Random bytes of fp8, and scales of tokens, repeated through device memory like [`Noise`].
pub struct Fp8Noise {
    bytes: (Vec<u8>, DeviceBuffer),
    scales: (Vec<f32>, DeviceBuffer),
}

impl Fp8Noise {
    pub fn new(gpu: &Gpu) -> Outcome<Self> {
        let mut rng = Rng::new(43);
        // Magnitudes up to 11, with both signs.
        let bytes: Vec<u8> = (0..24_000_008).map(|_| rng.below(0x54) as u8 | (rng.below(2) as u8) << 7).collect();
        let scales: Vec<f32> = (0..1_000_003).map(|_| (1 + rng.below(100)) as f32 / 256.0).collect();
        let on_gpu = (DeviceBuffer::of(gpu, &bytes)?, DeviceBuffer::of(gpu, &scales)?);
        Ok(Self { bytes: (bytes, on_gpu.0), scales: (scales, on_gpu.1) })
    }

    /// Returns the value of byte `at` of the pool.
    pub fn number(&self, at: u64) -> f64 {
        let all = &self.bytes.0;
        value(all[(at % all.len() as u64) as usize])
    }

    /// Returns the scale that is `at` bytes after the start of the first plane of scales.
    pub fn scale(&self, at: u64) -> f32 {
        let all = &self.scales.0;
        all[(at / 4 % all.len() as u64) as usize]
    }

    /// Returns one kv head of K or V at a slot of a filled pool.
    pub fn stored(
        &self,
        pool: &PoolLayout,
        scales: Option<&KvScales>,
        (plane, layer, slot, head): (PlaneName, LayerId, SlotId, u32),
    ) -> Vec<f64> {
        let side = usize::from(plane == PlaneName::V);
        let scale = if let Some(strides) = pool.strides([PlaneName::KScales, PlaneName::VScales][side]) {
            let (page, offset) = pool.page_of(slot);
            let first = pool.strides(PlaneName::KScales).expect("by token").origin;
            let at = strides.row(layer.raw(), page, offset) + strides.head * u64::from(head);
            self.scale(at - first)
        } else {
            scales.expect("static scales are given").get(layer, head)[side]
        };
        let row = pool.row(plane, layer, slot).expect("the pool has the plane");
        let first = row.start + u64::from(head * HEAD_DIM);
        let number = |i| self.number(i) * f64::from(scale);
        (first..first + u64::from(HEAD_DIM)).map(number).collect()
    }

    /// Fills a pool: scales in their planes, if any, `rope` noise in the unquantised part of latent rows, and bytes
    /// elsewhere.
    pub fn fill(&self, cuda: &Cuda, rope: &Noise) -> Outcome<()> {
        let (layout, pool) = (cuda.layout(), cuda.pool());
        repeat(&self.bytes.1, pool.address(), pool.bytes());
        if let Some(strides) = layout.strides(PlaneName::Rope) {
            rope.fill_from(pool, strides.origin)?;
        }
        if let Some(scales) = layout.strides(PlaneName::KScales) {
            repeat(&self.scales.1, pool.address() + scales.origin, pool.bytes() - scales.origin);
        }
        Ok(())
    }
}

/// Fills memory with copies of `source`.
fn repeat(source: &DeviceBuffer, target: u64, bytes: u64) {
    for at in (0..bytes).step_by(source.bytes() as usize) {
        let count = (bytes - at).min(source.bytes());
        // SAFETY: both ranges are inside their buffers.
        let result = unsafe { sys::cuMemcpyDtoD_v2(target + at, source.address(), count as usize) };
        assert_eq!(result as u32, 0, "cuMemcpyDtoD");
    }
    // SAFETY: takes no pointers.
    assert_eq!(unsafe { sys::cuCtxSynchronize() } as u32, 0, "cuCtxSynchronize");
}

pub fn decode(gpu: &Gpu, report: &mut Report) -> Outcome<()> {
    let noise = (&Noise::new(gpu)?, &Fp8Noise::new(gpu)?);
    let decode = [
        ("b64 L4096", vec![4_096; 64]),
        ("b256 L1024", vec![1_024; 256]),
        ("b16 L4096", vec![4_096; 16]),
        ("b64 zipf", zipf()),
        ("b1 L8192", vec![8_192]),
    ];
    for (page_size, kind) in [1, 16].into_iter().flat_map(|p| KINDS.map(|kind| (p, kind))) {
        let mut bench = Bench::new(gpu, noise.0, Some(noise.1), &config(kind, 4, page_size, 1 << 18))?;
        for (case, lens) in &decode {
            let rows: Vec<_> = lens.iter().map(|&len| (1, len)).collect();
            let (us, ok) = bench.run(&rows, Q_HEADS, How::Graph)?;
            let tokens = f64::from(lens.iter().sum::<u32>());
            let token_bytes = bench.cuda.layout().page_bytes() / u64::from(4 * page_size);
            let case = format!("decode {case} page{page_size}");
            report.row("fp8", &case, kind.2, us, Rate::Bytes(tokens * token_bytes as f64), ok);
        }
    }
    Ok(())
}

pub fn extend(gpu: &Gpu, report: &mut Report) -> Outcome<()> {
    let noise = (&Noise::new(gpu)?, &Fp8Noise::new(gpu)?);
    for kind in KINDS {
        let mut bench = Bench::new(gpu, noise.0, Some(noise.1), &config(kind, 1, 16, 1 << 20))?;
        for (b, new, cached) in [(8, 2_048, 30_720), (1, 2_048, 0)] {
            let (us, ok) = bench.run(&vec![(new, new + cached); b as usize], Q_HEADS, How::Launch)?;
            let case = format!("extend B{b} q{new} prefix{cached} page16");
            report.row("fp8", &case, kind.2, us, Rate::extend(b, new, cached), ok);
        }
    }
    Ok(())
}

/// Measures decode over shared prefixes, and over rows that share no tokens. Each case runs twice: with each row read
/// separately, then with spans that the backend may read once.
pub fn shared(gpu: &Gpu, report: &mut Report) -> Outcome<()> {
    let noise = (&Noise::new(gpu)?, &Fp8Noise::new(gpu)?);
    let plain = [("b64 4096", vec![4_096; 64]), ("b64 zipf", zipf())];
    let plain = plain.map(|(name, own)| (name, Forest::alone(own)));
    let forests = forests();
    for kind in KINDS {
        let mut bench = Bench::new(gpu, noise.0, Some(noise.1), &config(kind, 4, 16, 1 << 18))?;
        for (case, forest) in forests.iter().chain(&plain) {
            let token_bytes = bench.cuda.layout().page_bytes() / u64::from(4 * 16_u32);
            let bytes = Rate::Bytes((forest.tokens() * token_bytes) as f64);
            for (how, once) in [("flat", false), ("spans once", true)] {
                let new_lens = vec![1; forest.own.len()];
                let (us, ok) = bench.run_forest(forest, &new_lens, (Q_HEADS, How::Graph), once)?;
                report.row("fp8", &format!("shared {case}"), &format!("{} {how}", kind.2), us, bytes, ok);
            }
        }
    }
    Ok(())
}

/// Stores rows of bf16 into each kind of pool.
pub fn store(gpu: &Gpu, report: &mut Report) -> Outcome<()> {
    let noise = Noise::new(gpu)?;
    let (tokens, slots, sets) = (65_536_u32, 349_520, 3);
    for (page_size, kind) in [1, 16].into_iter().flat_map(|p| KINDS.map(|kind| (p, kind))) {
        let mut timer = Timer::new(gpu)?;
        let mut rng = Rng::new(3);
        let config = config(kind, sets, page_size, slots);
        let options = CudaOptions { scales: static_scales(&config), ..timer.options(gpu) };
        let pool = config.layout()?;
        let bounds = StepBounds { steps: 2, tokens };
        let mut cuda = options.open(&pool, &table(page_size), bounds)?;
        let batch = Batch::stores(1, &distinct(&mut rng, tokens as usize, pool.slot_count() as u32));
        cuda.begin(&batch.plan())?;
        let set_bytes = u64::from(tokens * KV_HEADS * HEAD_DIM) * 2;
        let k = noise.buffer(gpu, set_bytes * u64::from(sets))?;
        let v = noise.buffer(gpu, set_bytes * u64::from(sets))?;
        let us = timer.graph(sets as usize, |i| {
            let (layer, at) = (LayerId::new(i as u32), i as u64 * set_bytes);
            cuda.store_cache(&batch.plan(), layer, k.rows(at, None), v.rows(at, None))
        })?;
        cuda.end(StepEnd::Complete(batch.plan().step()));
        // Tests compare the stored bytes, so the row is always ok here. The rate counts the bytes read and written.
        let written = pool.page_bytes() as f64 / f64::from(sets * page_size);
        let bytes = f64::from(tokens) * (4_100.0 + written);
        let case = format!("store T{tokens} page{page_size}");
        report.row("fp8", &case, kind.2, us, Rate::Bytes(bytes), true);
    }
    Ok(())
}
