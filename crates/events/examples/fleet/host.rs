//! A host of an engine that stores no K and V. It serves one prompt at a time and encodes the engine's events.

use std::convert::Infallible;

use kvarena::hash::Hashing;
use kvarena::{
    Capacity, Engine, EngineConfig, EngineError, Error, Extend, Namespace, Null, PoolConfig, SeqKey, StepScratch,
    TokenId,
};
use kvarena_events::encode::Batch;

/// Config of an engine.
#[derive(Clone, Copy, Debug)]
pub struct HostConfig {
    pub page_size: u32,
    pub pages: u32,
    /// Recipe of page hashes; none disables hashes and events.
    pub hashing: Option<Hashing>,
    /// Maximum number of pages that wait in the event buffer.
    pub event_pages: u32,
}

impl Default for HostConfig {
    fn default() -> Self {
        Self { page_size: 16, pages: 1024, hashing: Some(Hashing::Dynamo), event_pages: 4096 }
    }
}

/// An engine with its scratch memory and its event batch.
pub struct Host {
    pub engine: Engine<Null>,
    scratch: StepScratch,
    batch: Option<Batch>,
}

impl Host {
    pub fn new(config: HostConfig) -> Result<Self, EngineError<Infallible>> {
        let HostConfig { page_size, pages, hashing, event_pages } = config;
        let pool = PoolConfig { page_size, capacity: Capacity::Pages(pages), ..Default::default() };
        let tokens = u64::from(page_size) * u64::from(pages);
        let engine = EngineConfig {
            hashing,
            event_pages: if hashing.is_some() { event_pages } else { 0 },
            max_sequences: 16,
            max_sequence_len: u32::MAX,
            max_tokens: tokens.max(1 << 16).saturating_mul(4),
            max_step_tokens: u32::MAX, // `step` computes any prompt at once.
            ..EngineConfig::from(pool)
        };
        let engine = Engine::new(engine, Null)?;
        let batch = hashing.map(|hashing| Batch::new(hashing, page_size));
        Ok(Self { engine, scratch: StepScratch::new(), batch })
    }

    /// Serves a prompt and its answer to the end. Returns the number of cached tokens, or none if prompt and answer do
    /// not fit together.
    ///
    /// # Panics
    /// If the engine rejects the prompt for another reason, such as an empty prompt.
    pub fn serve(&mut self, namespace: Namespace, prompt: &[TokenId], answer: &[TokenId]) -> Option<u32> {
        let len = (prompt.len() + answer.len()) as u32;
        let seq = match self.engine.admit(namespace, prompt, len) {
            Ok(seq) => seq,
            Err(Error::TooLong { .. } | Error::OutOfPages { .. }) => return None,
            Err(error) => panic!("the engine rejects a prompt: {error}"),
        };
        let hit = self.engine.cached_len(seq).expect("alive");
        self.step(seq);
        if !answer.is_empty() {
            self.engine.append(seq, answer).expect("the pages are reserved");
            self.step(seq);
        }
        self.engine.finish(seq).expect("alive");
        Some(hit)
    }

    /// Runs a step over all new tokens of a sequence.
    fn step(&mut self, seq: SeqKey) {
        let len = self.engine.extend_max(seq).expect("alive");
        let plan = self.engine.plan_batch(&mut self.scratch, &[Extend { seq, len }]);
        let step = plan.expect("the pages are reserved").step();
        self.engine.commit(step).expect("planned");
        self.engine.complete(step).expect("committed");
    }

    /// Returns the payload of the events since the last call, and the number of events; none if there are no events.
    pub fn take_payload(&mut self, seconds: f64) -> Option<(Vec<u8>, u32)> {
        let batch = self.batch.as_mut()?;
        self.engine.drain_events(|event| batch.push(event));
        let count = batch.len();
        (count > 0).then(|| (batch.take(seconds, 0), count))
    }
}
