//! The admission of a prompt that is cached in part, and that many sequences compute next.

use kvarena::{
    Capacity, Engine, EngineConfig, Extend, Null, PoolConfig, SeqKey, StepScratch, TokenId,
};

use super::NAMESPACE;

/// Pages of the prompt that are cached.
const PAGES: u32 = 6000;
/// Sequences of the same prompt, whose fronts are one page.
const FRONTS: u32 = 64;

pub struct Lead {
    engine: Engine<Null>,
    prompt: Vec<TokenId>,
    first: SeqKey,
    page_size: u32,
}

impl Lead {
    /// `behind`: the sequences came before the prompt was cached, so that their front is its first page; else it is the
    /// first page that is not cached.
    pub fn new(page_size: u32, behind: bool) -> Self {
        let len = (PAGES + 2) * page_size + 1;
        let pool =
            PoolConfig { page_size, capacity: Capacity::Pages(2 * PAGES), ..PoolConfig::default() };
        let config = EngineConfig {
            max_sequences: FRONTS + 1,
            max_tokens: u64::from((len + 1).next_multiple_of(1 << 14)) * u64::from(FRONTS + 2),
            ..EngineConfig::from(pool)
        };
        let mut engine = Engine::new(config, Null).expect("the config is good");
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
        engine.commit(step).expect("it was planned");
        engine.complete(step).expect("it was committed");
        engine.finish(seq).expect("it runs");
        if !behind {
            seqs = admit_all(&mut engine);
        }
        Self { engine, prompt, first: seqs[0], page_size }
    }

    /// What admitting it would take, and who leads it.
    pub fn admission(&self) {
        let admission = self.engine.admission(NAMESPACE, &self.prompt, 0).expect("it is right");
        let leader = admission.leader.expect("all of them know more of it");
        assert_eq!((leader.seq, leader.cached_len), (self.first, (PAGES + 2) * self.page_size));
    }

    /// What is cached of it.
    pub fn hit(&self) {
        let found = self.engine.match_prefix(NAMESPACE, &self.prompt);
        assert_eq!(found.pages(), PAGES);
    }
}
