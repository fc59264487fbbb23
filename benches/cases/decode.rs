//! Plan and step: a batch of sequences that each compute one more token.

use kvarena::layout::{Groups, Reach, StatePart};
use kvarena::{Capacity, Engine, EngineConfig, Extend, Null, PoolConfig, SeqKey, StepId, StepScratch, TokenId};

use super::NAMESPACE;

/// Tokens by which a sequence may grow before the batch is restarted.
const GROWTH: u32 = 512;

pub struct Decode {
    engine: Engine<Null>,
    scratch: StepScratch,
    items: Vec<Extend>,
    kv_len: u32,
    grown: u32,
    /// The last appended token. It rises, so that no round repeats the cached tokens of an earlier round.
    appended: u32,
}

impl Decode {
    pub fn new(page_size: u32, batch: u32, kv_len: u32) -> Self {
        Self::with_tracks(page_size, batch, kv_len, 1)
    }

    /// Creates the case for a model with `tracks` layers, each with a page table. The first layer reads all tokens, the
    /// others a window of 128 tokens.
    pub fn with_tracks(page_size: u32, batch: u32, kv_len: u32, tracks: u32) -> Self {
        let layers: Vec<u8> = (0..tracks).map(|layer| u8::from(layer > 0)).collect();
        let groups = match tracks {
            1 => Groups::ONE,
            _ => Groups::new(&[Reach::All, Reach::Window(128)], &layers).expect("two groups"),
        };
        Self::with_groups(page_size, batch, kv_len, (groups, tracks))
    }

    /// Creates the case for a model with a layer that reads all tokens, and layers that keep states of `pages` pages.
    pub fn with_states(page_size: u32, batch: u32, kv_len: u32, pages: u32) -> Self {
        let layers: Vec<u8> = (0..=pages).map(|layer| u8::from(layer > 0)).collect();
        let pool = PoolConfig { page_size, ..PoolConfig::default() };
        let head_bytes = pool.layout().expect("a valid pool").page_bytes() as u32;
        let groups = Groups::new(&[Reach::All, Reach::State], &layers);
        let groups = groups.and_then(|groups| groups.with_state(1, &[StatePart { heads: 1, head_bytes }]));
        Self::with_groups(page_size, batch, kv_len, (groups.expect("two groups"), pages + 1))
    }

    /// Marks the end of each sequence's tokens with K and V, so that the next plan keeps the states behind them.
    pub fn mark(&mut self) {
        for &Extend { seq, .. } in &self.items {
            let len = self.engine.cached_len(seq).expect("it is live");
            self.engine.mark(seq, len).expect("it is the end of the planned tokens");
        }
    }

    fn with_groups(page_size: u32, batch: u32, kv_len: u32, (groups, layers): (Groups, u32)) -> Self {
        let len = kv_len + GROWTH + 2;
        let capacity = Capacity::Pages(batch * (len.div_ceil(page_size) + 1) * layers);
        let pool = PoolConfig { layers, groups, page_size, capacity, ..PoolConfig::default() };
        let config = EngineConfig {
            max_sequences: batch,
            max_sequence_len: len,
            max_tokens: u64::from(len) * u64::from(batch),
            ..EngineConfig::from(pool)
        };
        let engine = Engine::new(config, Null).expect("a valid config");
        let scratch = StepScratch::new();
        let mut decode = Self { engine, scratch, items: Vec::new(), kv_len, grown: 0, appended: 0 };
        decode.admit_all(batch);
        decode
    }

    /// Admits sequences with distinct prompts, computes the prompts and appends one token to each sequence.
    fn admit_all(&mut self, batch: u32) {
        for s in 0..batch {
            let prompt: Vec<TokenId> = (0..self.kv_len).map(|i| TokenId::new(s * self.kv_len + i)).collect();
            let seq = self.engine.admit(NAMESPACE, &prompt, 0).expect("there is room");
            let most = self.engine.shape().max_step_tokens;
            // With a state, items end at marks.
            while self.engine.planned_len(seq).expect("the sequence is admitted") < self.kv_len {
                let len = self.engine.next_len(seq, most).expect("it has tokens");
                let plan = self.engine.plan_batch(&mut self.scratch, &[Extend { seq, len }]);
                let step = plan.expect("there is room").step();
                self.finish_step(step);
            }
            self.engine.append(seq, &[TokenId::new(0)]).expect("there is room");
            self.items.push(Extend { seq, len: 1 });
        }
        self.grown = 1;
    }

    fn finish_step(&mut self, step: StepId) {
        self.engine.commit(step).expect("it is open");
        self.engine.complete(step).expect("it is committed");
    }

    /// Restarts the batch if the sequences have grown to their limit.
    pub fn prepare(&mut self) {
        if self.grown < GROWTH {
            return;
        }
        let seqs: Vec<SeqKey> = self.items.drain(..).map(|item| item.seq).collect();
        for &seq in &seqs {
            self.engine.finish(seq).expect("it is live");
        }
        self.admit_all(seqs.len() as u32);
    }

    /// Plans a step.
    pub fn plan(&mut self) -> StepId {
        let plan = self.engine.plan_batch(&mut self.scratch, &self.items);
        plan.expect("there is room").step()
    }

    /// Commits and completes a planned step, and appends the next token of each sequence.
    pub fn rest(&mut self, step: StepId) {
        self.finish_step(step);
        self.appended += 1;
        let token = [TokenId::new(self.appended)];
        for item in &self.items {
            self.engine.append(item.seq, &token).expect("there is room");
        }
        self.grown += 1;
    }

    /// Runs a whole decode step.
    pub fn step(&mut self) {
        let step = self.plan();
        self.rest(step);
    }

    /// Sums the numbers of the first sequence's pages, read in slices.
    pub fn page_sum(&self) -> u32 {
        let runs = self.engine.page_runs(self.items[0].seq, 0).expect("the sequence is live");
        runs.flatten().fold(0, |sum, page| sum.wrapping_add(page.raw()))
    }

    pub fn check(&mut self) {
        self.prepare();
        let before = self.engine.stats().computed_tokens;
        let seq = self.items[0].seq;
        let len = self.engine.cached_len(seq).expect("it is live");
        self.step();
        assert_eq!(self.engine.stats().computed_tokens - before, self.items.len() as u64);
        assert_eq!(self.engine.cached_len(seq), Ok(len + 1));
        self.engine.verify().expect("all invariants hold");
    }
}
