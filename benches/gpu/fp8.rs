//! Measures pools of fp8, with static scales and scales by token, and of bf16: decode, extend, store, shared prefixes.
//! The layout is LayerFirst.

use kvarena::backend::OpenBackend;
use kvarena::backend::cuda::{CudaOptions, Gpu};
use kvarena::config::StepBounds;
use kvarena::layout::{Layout, Scaling};
use kvarena::plan::StepEnd;
use kvarena::testkit::rng::Rng;
use kvarena::{Backend, KvDtype, LayerId, PoolConfig};

use crate::Outcome;
use crate::attention::{Bench, How, forests, zipf};
use crate::batch::{Batch, Forest, Noise, distinct, pool, table};
use crate::fp8_noise::{Fp8Noise, HEAD_DIM, KV_HEADS, static_scales};
use crate::report::{Rate, Report};
use crate::timer::Timer;

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
