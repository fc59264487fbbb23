//! A host of an engine without bytes. It serves prompts one after another, and publishes the engine's events.
//!
//! Not here: the source of the prompts.

use std::convert::Infallible;

use kvarena::{
    Capacity, Engine, EngineConfig, EngineError, Error, Extend, Hashing, Namespace, Null,
    PoolConfig, StepScratch, TokenId,
};

use crate::encode::Batch;

/// The config of an engine.
#[derive(Clone, Copy, Debug)]
pub struct HostConfig {
    /// Tokens of a page.
    pub page_size: u32,
    /// Pages.
    pub pages: u32,
    /// How pages are hashed, if they are.
    pub hashing: Option<Hashing>,
    /// Most pages whose events wait in the buffer.
    pub event_pages: u32,
}

impl Default for HostConfig {
    fn default() -> Self {
        Self { page_size: 16, pages: 1024, hashing: Some(Hashing::Dynamo), event_pages: 4096 }
    }
}

/// An engine and what serves it.
pub struct Host {
    /// The engine.
    pub engine: Engine<Null>,
    scratch: StepScratch,
    batch: Option<Batch>,
}

impl Host {
    /// A new engine.
    ///
    /// # Errors
    /// As [`Engine::new`].
    pub fn new(config: HostConfig) -> Result<Self, EngineError<Infallible>> {
        let HostConfig { page_size, pages, hashing, event_pages } = config;
        let pool = PoolConfig { page_size, capacity: Capacity::Pages(pages), ..Default::default() };
        let tokens = u64::from(page_size) * u64::from(pages);
        let engine = EngineConfig {
            hashing,
            event_pages: if hashing.is_some() { event_pages } else { 0 },
            max_sequences: 16,
            max_sequence_len: u32::MAX,
            max_tokens: 4 * tokens.max(1 << 16),
            ..EngineConfig::from(pool)
        };
        let engine = Engine::new(engine, Null)?;
        let batch = hashing.map(|hashing| Batch::new(hashing, page_size));
        Ok(Self { engine, scratch: StepScratch::new(), batch })
    }

    /// Serves a prompt and its answer to the end. Returns the tokens that were cached; none if it cannot fit.
    pub fn serve(
        &mut self,
        namespace: Namespace,
        prompt: &[TokenId],
        answer: &[TokenId],
    ) -> Option<u32> {
        let len = (prompt.len() + answer.len()) as u32;
        let seq = match self.engine.admit(namespace, prompt, len) {
            Ok(seq) => seq,
            Err(Error::TooLong { .. } | Error::OutOfPages { .. }) => return None,
            Err(error) => panic!("a prompt is refused: {error}"),
        };
        let hit = self.engine.cached_len(seq).expect("alive");
        self.step(seq);
        if !answer.is_empty() {
            self.engine.append(seq, answer).expect("room is promised");
            self.step(seq);
        }
        self.engine.finish(seq).expect("alive");
        Some(hit)
    }

    /// Computes all that is known.
    fn step(&mut self, seq: kvarena::SeqKey) {
        let len = self.engine.extend_max(seq).expect("alive");
        let plan = self.engine.plan_batch(&mut self.scratch, &[Extend { seq, len }]);
        let step = plan.expect("room is promised").step();
        self.engine.commit(step).expect("planned");
        self.engine.complete(step).expect("committed");
    }

    /// Returns the events since the last call, as a payload and their number; `None` without events.
    pub fn say(&mut self, seconds: f64) -> Option<(Vec<u8>, u32)> {
        let batch = self.batch.as_mut()?;
        self.engine.drain_events(|event| batch.push(event));
        let count = batch.len();
        (count > 0).then(|| (batch.take(seconds, 0), count))
    }
}
