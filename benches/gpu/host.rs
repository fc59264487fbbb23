//! Measures the host's time of a step, and the time to the first step.

use std::time::Instant;

use kvarena::backend::cuda::{Cuda, CudaOptions, CudaStream, DeviceBuffer, Gpu, Prepare};
use kvarena::layout::Layout;
use kvarena::{Attend, Backend, Engine, EngineConfig, Extend, LayerId, Namespace, Null, StepScratch, TokenId};

use crate::Outcome;
use crate::batch::pool;
use crate::report::{Rate, Report};

fn config(page_size: u32, layers: u32, tokens: u32) -> EngineConfig {
    EngineConfig::from(pool(layers, page_size, tokens, Layout::PageFirst))
}

/// Measures the time from the start to the first step's output: driver, context, pool, kernels, step.
pub fn first_step(gpu: &Gpu, start: Instant, report: &mut Report) -> Outcome<()> {
    let mut row = |what: &str, since: Instant| {
        let us = since.elapsed().as_secs_f64() * 1e6;
        report.row("first", what, "kvarena", us, Rate::None, true);
        Instant::now()
    };
    let now = row("driver and context", start);
    let stream = CudaStream::new(gpu)?;
    let options = CudaOptions { stream: Some(stream.clone()), ..CudaOptions::new(gpu) };
    let mut engine = Engine::new(config(16, 36, 98_304), options)?;
    let now = row("engine and pool of 14.5 GB", now);
    let attend = Attend::new(32, 128);
    engine.backend_mut().prepare(&Prepare::new(&[attend]))?;
    let now = row("kernels loaded, memory for attention", now);
    let mut scratch = StepScratch::new();
    let prompt: Vec<_> = (0..512).map(TokenId::new).collect();
    let seq = engine.admit(Namespace::default(), &prompt, 0)?;
    let plan = engine.plan_batch(&mut scratch, &[Extend { seq, len: 512 }])?;
    let rows = DeviceBuffer::of(gpu, &vec![0_u16; 512 * 4096])?;
    let mut out = DeviceBuffer::new(gpu, rows.bytes())?;
    let cuda = engine.backend_mut();
    cuda.store_cache(&plan, LayerId::new(0), rows.rows(0, None), rows.rows(0, None))?;
    let to = out.rows_mut(0, None);
    cuda.attend(&plan, LayerId::new(0), &attend, rows.rows(0, None), to, None)?;
    cuda.synchronize()?;
    row("first step of 512 tokens, one layer", now);
    row("all of it", start);
    Ok(())
}

/// Measures the host time of `plan_batch` for 256 decoding sequences of 4,096 tokens that share 0 or 2,048 tokens. The
/// time covers the core's plan, the checks, the split, the upload and the table writes. Also measures the core's plan
/// without a backend.
pub fn plan_cost(gpu: &Gpu, report: &mut Report) -> Outcome<()> {
    for (page_size, shared) in [(1, 0), (16, 0), (1, 2_048), (16, 2_048)] {
        let stream = CudaStream::new(gpu)?;
        let options = CudaOptions { stream: Some(stream.clone()), ..CudaOptions::new(gpu) };
        let mut engine = Engine::new(config(page_size, 1, 1 << 21), options)?;
        engine.backend_mut().prepare(&Prepare::new(&[Attend::new(32, 128)]))?;
        let sent = |engine: &Engine<Cuda>| engine.backend().uploaded_bytes();
        let before = sent(&engine);
        let us = plan_times(&mut engine, shared)?;
        let bytes = (sent(&engine) - before) / u64::from(256 + ROUNDS);
        let case = format!("256 x 4,096, {shared} shared, page{page_size}");
        report.row("plan", &case, "plan_batch with begin", us, Rate::None, true);
        println!("       {bytes} bytes up a step, prefills included");
        let mut engine = Engine::new(config(page_size, 1, 1 << 21), Null)?;
        let us = plan_times(&mut engine, shared)?;
        report.row("plan", &case, "plan_batch alone", us, Rate::None, true);
    }
    Ok(())
}

const ROUNDS: u32 = 300;

/// Returns the median microseconds of `plan_batch` over [`ROUNDS`] decode steps. Finishes the sequences and resets the
/// cache at the end.
fn plan_times<B: Backend>(engine: &mut Engine<B>, shared: u32) -> Outcome<f64>
where
    B::Error: Send + Sync,
{
    let mut scratch = StepScratch::new();
    let mut items = Vec::new();
    for i in 0..256 {
        let token = |t: u32| TokenId::new(if t < shared { t } else { i * 5_000 + t });
        let prompt: Vec<_> = (0..4_096).map(token).collect();
        let seq = engine.admit(Namespace::default(), &prompt, 0)?;
        let len = engine.extend_max(seq)?;
        let step = engine.plan_batch(&mut scratch, &[Extend { seq, len }])?.step();
        engine.commit(step)?;
        engine.backend_mut().synchronize()?;
        engine.complete(step)?;
        items.push(Extend { seq, len: 1 });
    }
    let mut times = Vec::new();
    for round in 0..ROUNDS {
        for item in &items {
            engine.append(item.seq, &[TokenId::new(round)])?;
        }
        let start = Instant::now();
        let step = engine.plan_batch(&mut scratch, &items)?.step();
        times.push(start.elapsed().as_secs_f64() * 1e6);
        engine.commit(step)?;
        engine.backend_mut().synchronize()?;
        engine.complete(step)?;
    }
    for item in &items {
        engine.finish(item.seq)?;
    }
    engine.reset();
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}
