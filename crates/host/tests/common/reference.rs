//! Computes logits of a stream with sparse reads and given tokens, for checks.

use kvarena::layout::LabelChannels;
use kvarena::{
    Capacity, CpuOptions, Engine, EngineConfig, Extend, KvDtype, Namespace, PoolConfig, StepScratch, TokenId,
};

use kvarena_host::clock::Clock;
use kvarena_host::cpu::CpuRunner;
use kvarena_host::error::{Error, Result};
use kvarena_host::model::Model;
use kvarena_host::runner::{Draw, Runner, Work};
use kvarena_host::sample::Sampling;
use kvarena_host::shaping::Edits;
use kvarena_host::sparse::reader::Reader;

/// Returns the logits after each token of a stream from index `from` on, `[len - from, vocab]`. Runs on the CPU over a
/// pool of bf16. The first step computes the tokens up to `from` and reads all positions. Each later token reads `top`
/// positions.
///
/// # Errors
/// Channels of another model, or an invalid stream.
pub fn logits(model: &Model, stream: &[u32], from: usize, (top, labels): (u32, &LabelChannels)) -> Result<Vec<f32>> {
    let pool = PoolConfig {
        layers: model.config.layers as u32,
        shape: model.config.kv_shape(),
        dtype: KvDtype::Bf16,
        label_channels: labels.channels(),
        capacity: Capacity::Pages(stream.len().div_ceil(16) as u32 + 1),
        ..PoolConfig::default()
    };
    let labels = Some(labels.clone());
    let mut engine = Engine::new(
        EngineConfig { max_sequences: 1, ..EngineConfig::from(pool) },
        CpuOptions { labels, ..CpuOptions::default() },
    )
    .map_err(|error| Error::run(error.to_string()))?;
    let mut runner = CpuRunner::new(model).read_sparsely(Reader::new(top, None));
    let tokens: Vec<TokenId> = stream.iter().copied().map(TokenId::new).collect();
    let seq = engine.admit(Namespace::default(), &tokens, 0).map_err(failed)?;
    let (mut scratch, mut work) = (StepScratch::new(), Work::default());
    let (mut logits, mut tokens) = (Vec::new(), Vec::new());
    let steps = [(0, from + 1)].into_iter().chain((from + 1..stream.len()).map(|at| (at, 1)));
    for (start, len) in steps {
        let items = [Extend { seq, len: len as u32 }];
        let plan = engine.plan_batch(&mut scratch, &items).map_err(failed)?;
        let step = plan.step();
        work.plan.copy_from(&plan);
        work.inputs = stream[start..start + len].iter().map(|&token| token as i32).collect();
        work.draws =
            vec![Draw { row: len - 1, sampling: Sampling::default(), sample: 0, index: 0, edits: Edits::default() }];
        let backend = engine.backend_mut();
        runner.collect(backend, &work, false, &mut tokens, &mut Clock::default())?;
        logits.extend_from_slice(runner.logits(0));
        engine.commit(step).map_err(failed)?;
        engine.complete(step).map_err(failed)?;
    }
    Ok(logits)
}

fn failed(error: impl std::error::Error) -> Error {
    Error::run(error.to_string())
}
