//! Compares the tiny models' tokens on the GPU with those of the reference framework in f32.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use candle::{DType, Device, Tensor};
use kvarena::{Capacity, Extend, Namespace, PoolConfig, TokenId};
use kvarena_candle::{Graphs, KvArena};
use kvarena_candle_models::serve::{Limits, serve};
use kvarena_candle_models::{Loaded, load};
use serde_json::Value;

use crate::device;
use crate::shape::Outcome;

const NEW: NonZeroUsize = NonZeroUsize::new(24).unwrap();

type Texts = Vec<Vec<u32>>;

/// Generates texts of the prompts in several ways, each with a name.
type Generate = fn(&Loaded, &mut KvArena, &[Vec<u32>]) -> Outcome<Vec<(String, Texts)>>;

/// Compares generated texts of some models with the reference's.
pub fn run(generate: Generate) -> Outcome {
    let device = device()?;
    for (name, dtype) in [
        ("qwen3-tiny", DType::BF16),
        ("qwen3-tiny", DType::F32),
        ("gemma3-tiny", DType::BF16),
        ("gemma3-tiny", DType::F32),
        ("llama-tiny", DType::F32),
    ] {
        let loaded = load(&folder(name), dtype, &device)?;
        let [prompts, wanted] = golden(name)?;
        let pool = PoolConfig { page_size: 16, capacity: Capacity::Pages(256), ..loaded.pool };
        let mut arena = KvArena::new(pool, &device)?;
        for (way, texts) in generate(&loaded, &mut arena, &prompts)? {
            arena.engine.verify().map_err(|broken| format!("{broken:?}"))?;
            let mut equal = 0;
            for ((prompt, wanted), text) in prompts.iter().zip(&wanted).zip(&texts) {
                equal += usize::from(is_equal(name, prompt, wanted, text)?);
            }
            println!("{name} {dtype:?}, {way}: {equal} of {} texts", texts.len());
        }
    }
    Ok(())
}

/// Returns whether a text begins with the reference's. If a token differs, computes the logits at the first difference
/// with the same model in f32 on the CPU. Prints how much larger the logit of the reference's token
/// is there than the logit of the text's token.
fn is_equal(name: &str, prompt: &[u32], expected: &[u32], text: &[u32]) -> Outcome<bool> {
    let at = text.iter().zip(expected).take_while(|(actual, expected)| actual == expected).count();
    let (Some(&actual), Some(&token)) = (text.get(at), expected.get(at)) else {
        return Ok(at == expected.len());
    };
    let reference = load(&folder(name), DType::F32, &Device::Cpu)?;
    let logits = logits(&reference, &[prompt, &expected[..at]].concat())?;
    let [own, other] = [token, actual].map(|token| logits[token as usize]);
    println!(
        "  token {at}: {actual} instead of {token}; on the CPU the logit of {token} is {own:.3}, larger by {:.4}",
        own - other
    );
    Ok(false)
}

/// Serves the prompts twice, with joins and chunks. The second run hits the cache.
pub fn by_steps(loaded: &Loaded, arena: &mut KvArena, prompts: &[Vec<u32>]) -> Outcome<Vec<(String, Texts)>> {
    let limits = Limits { new_tokens: NEW, step_tokens: 48, joins: 2 };
    let mut all = Vec::new();
    for _ in 0..2 {
        let served = serve(&loaded.model, arena, prompts, &[], limits, |_, _, _| {})?;
        let way = format!("{} of {} tokens hit", served.hit_tokens, served.prompt_tokens);
        all.push((way, served.texts));
    }
    Ok(all)
}

/// Returns a tiny model's folder, in `KVARENA_MODELS`. The default is the host's test data, seen from `crates/candle`.
fn folder(name: &str) -> PathBuf {
    let data = std::env::var_os("KVARENA_MODELS").map(PathBuf::from);
    data.unwrap_or_else(|| "../host/tests/data".into()).join(name)
}

/// Returns the prompts and their new tokens.
fn golden(name: &str) -> Outcome<[Texts; 2]> {
    let all: Value = serde_json::from_str(&std::fs::read_to_string(folder(name).join("golden.json"))?)?;
    let cases = all["cases"].as_array().ok_or("cases")?;
    let tokens = |value: &Value| serde_json::from_value::<Vec<u32>>(value.clone());
    let mut pairs = [Texts::new(), Texts::new()];
    for case in cases {
        pairs[0].push(tokens(&case["prompt"])?);
        pairs[1].push(tokens(&case["tokens"])?);
    }
    Ok(pairs)
}

/// Returns a model's logits after these tokens, computed on the CPU.
fn logits(model: &Loaded, tokens: &[u32]) -> Outcome<Vec<f32>> {
    let pool = PoolConfig { capacity: Capacity::Pages(256), ..model.pool };
    let mut arena = KvArena::new(pool, &Device::Cpu)?;
    let tokens: Vec<TokenId> = tokens.iter().copied().map(TokenId::new).collect();
    let seq = arena.engine.admit(Namespace::default(), &tokens, 0)?;
    let step = arena.step(&[Extend { seq, len: tokens.len() as u32 }])?;
    Ok(model.model.forward(&step)?.flatten_all()?.to_vec1()?)
}

/// Decodes all prompts together, with graphs.
pub fn by_graphs(loaded: &Loaded, arena: &mut KvArena, prompts: &[Vec<u32>]) -> Outcome<Vec<(String, Texts)>> {
    let mut graphs = Graphs::new(arena, &loaded.model, |model, step| model.forward(step))?;
    let mut items = Vec::new();
    for prompt in prompts {
        let tokens: Vec<TokenId> = prompt.iter().copied().map(TokenId::new).collect();
        let seq = arena.engine.admit(Namespace::default(), &tokens, 0)?;
        items.push(Extend { seq, len: tokens.len() as u32 - arena.engine.planned_len(seq)? });
    }
    let mut texts = vec![Vec::new(); prompts.len()];
    for at in 0..NEW.get() {
        let (logits, step) = if at == 0 {
            let step = arena.step(&items)?;
            (loaded.model.forward(&step)?, step)
        } else {
            let mut step = arena.step_padded(&items, 16)?;
            (graphs.forward(&mut step)?, step)
        };
        let tokens: Vec<u32> = Tensor::argmax(&logits, candle::D::Minus1)?.to_vec1()?;
        let id = step.launched();
        for ((item, text), &token) in items.iter_mut().zip(&mut texts).zip(&tokens) {
            arena.engine.append(item.seq, &[TokenId::new(token)])?;
            text.push(token);
            item.len = 1;
        }
        arena.close(id)?;
    }
    for item in items {
        arena.engine.finish(item.seq)?;
    }
    Ok(vec![("by graphs of 16 rows".into(), texts)])
}
