//! A complete host in one file, to copy: admission, chunked prefill, decode, preemption, attention on the CPU.
//!
//! Twelve chats share a system prompt and a pool that is too small for all of them. The model has no weights: a token's
//! vector is a hash, and two layers of attention mix the vectors. The tokens depend on every earlier K and V, so one
//! wrong page changes the output. At the end, a host without a cache serves each chat alone, and the program compares
//! the tokens.

use std::collections::VecDeque;

use kvarena::backend::CpuRows;
use kvarena::config::PrefixMode;
use kvarena::plan::BatchRow;
use kvarena::stats::Stats;
use kvarena::*;

const LAYERS: u32 = 2;
const HEAD_DIM: usize = 8;
const HIDDEN: usize = 2 * HEAD_DIM; // two query heads share one kv head
const VOCABULARY: u32 = 500;
const OUTPUT: u32 = 40; // tokens to generate for each prompt
const STEP_TOKENS: u32 = 48; // maximum tokens of a step; longer prompts are prefilled in chunks

type Fallible<T> = Result<T, Box<dyn std::error::Error>>;

/// An admitted prompt.
#[derive(Clone, Copy)]
struct Chat {
    id: usize,
    seq: SeqKey,
    /// Number of tokens, including the prompt, at which the sequence finishes.
    end: u32,
}

struct Host {
    engine: Engine<Cpu>,
    scratch: StepScratch,
    /// Id and prompt of each request, in the order of arrival.
    waiting: VecDeque<(usize, Vec<TokenId>)>,
    /// Admitted requests, oldest first. The first `running` ones run; the others are preempted.
    admitted: Vec<Chat>,
    running: usize,
    /// All tokens of each finished request, by id.
    finished: Vec<Vec<TokenId>>,
}

impl Host {
    fn new(prefix: PrefixMode, prompts: Vec<Vec<TokenId>>) -> Fallible<Self> {
        let mut pool = PoolConfig { layers: LAYERS, page_size: 4, ..Default::default() };
        pool.shape = KvShape::heads(1, HEAD_DIM as u32);
        pool.capacity = Capacity::Pages(200);
        let config = EngineConfig { prefix, max_tokens: 10_000, ..pool.into() };
        Ok(Self {
            engine: Engine::new(config, CpuOptions::default())?,
            scratch: StepScratch::new(),
            finished: vec![Vec::new(); prompts.len()],
            waiting: prompts.into_iter().enumerate().collect(),
            admitted: Vec::new(),
            running: 0,
        })
    }

    /// Serves all requests. Returns the tokens of each, and the engine's counters.
    fn serve(mut self) -> Fallible<(Vec<Vec<TokenId>>, Stats)> {
        while !(self.waiting.is_empty() && self.admitted.is_empty()) {
            self.admit()?;
            self.step()?;
            self.finish()?;
        }
        self.engine.verify()?; // audits every table: for tests, not for a server
        Ok((self.finished, self.engine.stats()))
    }

    /// Resumes preempted sequences while they fit, the oldest first, and then admits new requests.
    fn admit(&mut self) -> Fallible<()> {
        loop {
            let result = if let Some(preempted) = self.admitted.get(self.running) {
                // Pages are reserved for the known tokens, not for the output: a lack of pages preempts a sequence.
                self.engine.resume(preempted.seq, self.engine.token_count(preempted.seq)?)
            } else {
                let Some((id, prompt)) = self.waiting.front() else { return Ok(()) };
                let promise = prompt.len() as u32;
                if self.engine.admission(Namespace::default(), prompt, promise)?.leader.is_some() {
                    return Ok(()); // a running sequence computes this prefix: wait, then share it
                }
                let (id, end) = (*id, prompt.len() as u32 + OUTPUT);
                let seq = self.engine.admit(Namespace::default(), prompt, promise);
                seq.map(|seq| {
                    self.admitted.push(Chat { id, seq, end });
                    self.waiting.pop_front();
                })
            };
            match result {
                Ok(()) => self.running += 1,
                Err(Error::OutOfPages { .. }) if self.running > 0 => return Ok(()),
                Err(error) => return Err(error.into()), // for example a prompt larger than the pool
            }
        }
    }

    /// Runs one step. Preempts the youngest sequence while the step's new tokens lack pages.
    fn step(&mut self) -> Fallible<()> {
        loop {
            let items = self.schedule()?;
            match self.engine.plan_batch(&mut self.scratch, &items) {
                Ok(plan) => {
                    let sampled = forward(self.engine.backend_mut(), &plan)?;
                    let step = plan.step();
                    // `append` precedes `commit`, so that `abort` can still undo the step if `append` fails.
                    for (&Extend { seq, .. }, token) in items.iter().zip(sampled) {
                        // A chunk that does not end its prompt produces no sample.
                        if self.engine.has_sample(seq)? {
                            self.engine.append(seq, &[token])?;
                        }
                    }
                    self.engine.commit(step)?; // whole pages may be shared from now on
                    self.engine.complete(step)?; // the backend is done: freed pages return
                    return Ok(());
                }
                Err(EngineError::Core(Error::OutOfPages { .. })) if self.running > 1 => {
                    self.running -= 1;
                    self.engine.preempt(self.admitted[self.running].seq, Keep::Publish)?;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Divides a step's tokens between the running sequences, oldest first.
    fn schedule(&self) -> Fallible<Vec<Extend>> {
        let mut room = STEP_TOKENS;
        let mut items = Vec::new();
        for &Chat { seq, .. } in &self.admitted[..self.running] {
            let len = self.engine.extend_max(seq)?.min(room);
            items.push(Extend { seq, len });
            room -= len;
        }
        items.retain(|item| item.len > 0);
        Ok(items)
    }

    /// Finishes the sequences that have all their tokens. Their prefixes stay cached for later requests.
    fn finish(&mut self) -> Fallible<()> {
        for i in (0..self.running).rev() {
            let Chat { id, seq, end } = self.admitted[i];
            if self.engine.token_count(seq)? == end {
                self.finished[id] = self.engine.tokens(seq)?.collect();
                self.engine.finish(seq)?;
                self.admitted.remove(i);
                self.running -= 1;
            }
        }
        Ok(())
    }
}

/// Runs the model. Returns the token that follows each sequence of the plan.
fn forward(backend: &mut Cpu, plan: &BatchPlan<'_>) -> Fallible<Vec<TokenId>> {
    let inputs = plan.tokens.iter().zip(plan.positions);
    let mut hidden: Vec<f32> = inputs.flat_map(|(t, &p)| embedding(t.raw(), p)).collect();
    let mut mixed = vec![0.0; hidden.len()];
    for layer in (0..LAYERS).map(LayerId::new) {
        // The hidden rows serve as queries, their first half as keys and their second half as values.
        let half = |at| CpuRows::from(&hidden[at..]).strided(HIDDEN);
        backend.store_cache(plan, layer, half(0), half(HEAD_DIM))?;
        let attend = Attend::new(2, HEAD_DIM as u32);
        let (q, out) = (hidden.as_slice().into(), mixed.as_mut_slice().into());
        backend.attend(plan, layer, &attend, q, out, None)?;
        hidden.iter_mut().zip(&mixed).for_each(|(h, m)| *h += m);
    }
    let last = |row: &BatchRow| (row.qo_start + row.extend_len - 1) as usize * HIDDEN;
    Ok(plan.rows.iter().map(|row| sample(&hidden[last(row)..][..HIDDEN])).collect())
}

/// Returns a token's vector: numbers from -1 to 1, a hash of the token and its position.
fn embedding(token: u32, position: u32) -> [f32; HIDDEN] {
    let mut state = u64::from(token) << 32 | u64::from(position);
    std::array::from_fn(|_| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    })
}

/// Returns the token whose vector has the largest product with `hidden`.
fn sample(hidden: &[f32]) -> TokenId {
    let logit = |t| -> f32 { embedding(t, 0).iter().zip(hidden).map(|(e, h)| e * h).sum() };
    let best = (0..VOCABULARY).max_by(|&a, &b| logit(a).total_cmp(&logit(b)));
    TokenId::new(best.expect("the vocabulary has tokens"))
}

/// Returns prompts of unequal length that begin with one system prompt of 40 tokens.
fn prompts() -> Vec<Vec<TokenId>> {
    let own = |chat: u32| (0..30 + 5 * chat).map(move |i| 40 + (7 * i + 31 * chat) % 460);
    let prompt = |chat| (0..40).chain(own(chat)).map(TokenId::new).collect();
    (0..12).map(prompt).collect()
}

fn main() -> Fallible<()> {
    let (tokens, stats) = Host::new(PrefixMode::Radix, prompts())?.serve()?;
    for (prompt, tokens) in prompts().into_iter().zip(&tokens) {
        let (alone, _) = Host::new(PrefixMode::None, vec![prompt])?.serve()?;
        assert_eq!(*tokens, alone[0], "neither the cache nor the batch changes a token");
    }
    println!("{stats}");
    println!("All {} chats have the tokens of a host without a cache.", tokens.len());
    Ok(())
}
