//! Admission of a partly cached prompt, which many running sequences also compute.

use kvarena::{Capacity, Engine, EngineConfig, Extend, Null, PoolConfig, SeqKey, StepScratch, TokenId};

use super::NAMESPACE;

/// Pages of the prompt that are cached.
const PAGES: u32 = 6000;
/// Number of sequences that compute the prompt. All have the same front.
const FRONTS: u32 = 64;

pub struct Lead {
    engine: Engine<Null>,
    prompt: Vec<TokenId>,
    first: SeqKey,
    page_size: u32,
}

impl Lead {
    /// Creates the case. With `behind`, the sequences arrive before the prompt is cached, so their front is the
    /// prompt's first page. Otherwise their front is the first uncached page.
    pub fn new(page_size: u32, behind: bool) -> Self {
        let len = (PAGES + 2) * page_size + 1;
        let pool = PoolConfig { page_size, capacity: Capacity::Pages(2 * PAGES), ..PoolConfig::default() };
        let config = EngineConfig {
            max_sequences: FRONTS + 1,
            max_tokens: u64::from((len + 1).next_multiple_of(1 << 14)) * u64::from(FRONTS + 2),
            max_step_tokens: PAGES * page_size,
            ..EngineConfig::from(pool)
        };
        let mut engine = Engine::new(config, Null).expect("a valid config");
        let prompt: Vec<TokenId> = (0..len).map(TokenId::new).collect();
        let admit_all = |engine: &mut Engine<Null>| {
            let seqs = (0..FRONTS).map(|_| engine.admit(NAMESPACE, &prompt, 0).expect("room"));
            seqs.collect::<Vec<_>>()
        };
        let mut seqs = if behind { admit_all(&mut engine) } else { Vec::new() };
        let seq = engine.admit(NAMESPACE, &prompt, 0).expect("there is room");
        let mut scratch = StepScratch::new();
        let items = [Extend { seq, len: PAGES * page_size }];
        let step = engine.plan_batch(&mut scratch, &items).expect("there is room").step();
        engine.commit(step).expect("it is open");
        engine.complete(step).expect("it is committed");
        engine.finish(seq).expect("it is live");
        if !behind {
            seqs = admit_all(&mut engine);
        }
        Self { engine, prompt, first: seqs[0], page_size }
    }

    /// Computes the cost of admitting the prompt, and checks its leader.
    pub fn admission(&self) {
        let admission = self.engine.admission(NAMESPACE, &self.prompt, 0).expect("the prompt is valid");
        let leader = admission.leader.expect("all sequences have more of its tokens");
        assert_eq!((leader.seq, leader.cached_len), (self.first, (PAGES + 2) * self.page_size));
    }

    /// Matches the cached part of the prompt.
    pub fn hit(&self) {
        let found = self.engine.match_prefix(NAMESPACE, &self.prompt);
        assert_eq!(found.pages(), PAGES);
    }
}
