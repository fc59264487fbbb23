//! A scheduler: prompts join while others decode, long prompts are computed in chunks, and decoding
//! is greedy.

use std::collections::VecDeque;
use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use candle::D;
use kvarena::{Extend, Namespace, SeqKey, TokenId};
use kvarena_candle::KvArena;

use crate::{Model, Outcome};

/// Limits of a run.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of new tokens of a text.
    pub new_tokens: NonZeroUsize,
    /// Maximum number of tokens of a step; longer prompts take several steps.
    pub step_tokens: u32,
    /// Maximum number of prompts that join in one step.
    pub joins: usize,
}

/// The result of a run.
#[derive(Clone, Debug, Default)]
pub struct Served {
    /// The new tokens of each prompt.
    pub texts: Vec<Vec<u32>>,
    /// Number of tokens of all prompts.
    pub prompt_tokens: usize,
    /// Number of prompt tokens that were cached.
    pub hit_tokens: usize,
    /// Number of steps.
    pub steps: usize,
    /// Time of the whole run.
    pub time: Duration,
}

/// A running sequence.
struct Running {
    seq: SeqKey,
    prompt: usize,
}

/// Serves prompts. Calls `watch` with each prompt's index and each new token. During prefill it
/// calls `watch` with `None` and the number of uncomputed prompt tokens.
///
/// # Errors
/// Errors of the engine and of candle. A prompt that does not fit in an empty pool is also an error.
pub fn serve(
    model: &Model,
    arena: &mut KvArena,
    prompts: &[Vec<u32>],
    end: &[u32],
    limits: Limits,
    mut watch: impl FnMut(usize, Option<u32>, u32),
) -> Outcome<Served> {
    let mut served = Served { texts: vec![Vec::new(); prompts.len()], ..Served::default() };
    let mut waiting: VecDeque<usize> = (0..prompts.len()).collect();
    let mut running: Vec<Running> = Vec::new();
    let start = Instant::now();
    while !waiting.is_empty() || !running.is_empty() {
        admit(arena, prompts, limits, &mut waiting, &mut running, &mut served)?;
        let items = items(arena, &running, limits.step_tokens)?;
        let step = arena.step(&items)?;
        let logits = model.forward(&step)?;
        let tokens = logits.argmax(D::Minus1)?.to_vec1::<u32>()?;
        let step = step.launched();
        for (item, &token) in items.iter().zip(&tokens) {
            let prompt = running.iter().find(|one| one.seq == item.seq).expect("it runs").prompt;
            let left = left(arena, item.seq)?;
            if left > 0 {
                watch(prompt, None, left);
                continue;
            }
            served.texts[prompt].push(token);
            watch(prompt, Some(token), 0);
            arena.engine.append(item.seq, &[TokenId::new(token)])?;
        }
        arena.close(step)?;
        served.steps += 1;
        finish(arena, end, limits, &mut running, &served)?;
    }
    served.time = start.elapsed();
    Ok(served)
}

/// Admits at most `limits.joins` prompts, as long as each prompt fits with all its new tokens.
fn admit(
    arena: &mut KvArena,
    prompts: &[Vec<u32>],
    limits: Limits,
    waiting: &mut VecDeque<usize>,
    running: &mut Vec<Running>,
    served: &mut Served,
) -> Outcome {
    for _ in 0..limits.joins {
        let Some(&prompt) = waiting.front() else { break };
        let tokens: Vec<TokenId> = prompts[prompt].iter().copied().map(TokenId::new).collect();
        let promise = tokens.len().saturating_add(limits.new_tokens.get());
        let promise = u32::try_from(promise).unwrap_or(u32::MAX);
        let seq = match arena.engine.admit(Namespace::default(), &tokens, promise) {
            Ok(seq) => seq,
            Err(error) if error.is_shortage() && !running.is_empty() => break,
            Err(error) => return Err(error.into()),
        };
        waiting.pop_front();
        let left = left(arena, seq)?;
        served.prompt_tokens += tokens.len();
        served.hit_tokens += tokens.len() - left as usize;
        running.push(Running { seq, prompt });
    }
    Ok(())
}

/// Returns the tokens of each sequence for the next step, oldest sequence first, up to the step's
/// limit.
fn items(arena: &KvArena, running: &[Running], step_tokens: u32) -> Outcome<Vec<Extend>> {
    let (mut items, mut room) = (Vec::new(), step_tokens);
    for one in running {
        let len = left(arena, one.seq)?.min(room);
        if len > 0 {
            items.push(Extend { seq: one.seq, len });
            room -= len;
        }
    }
    Ok(items)
}

/// Returns the number of known tokens of a sequence that no step has planned.
fn left(arena: &KvArena, seq: SeqKey) -> Outcome<u32> {
    Ok(arena.engine.token_count(seq)? - arena.engine.planned_len(seq)?)
}

/// Finishes sequences whose text has all new tokens or an end token.
fn finish(arena: &mut KvArena, end: &[u32], limits: Limits, running: &mut Vec<Running>, served: &Served) -> Outcome {
    let is_done = |one: &Running| {
        let text = &served.texts[one.prompt];
        text.len() == limits.new_tokens.get() || text.last().is_some_and(|token| end.contains(token))
    };
    for one in running.iter().filter(|one| is_done(one)) {
        arena.engine.finish(one.seq)?;
    }
    running.retain(|one| !is_done(one));
    Ok(())
}
