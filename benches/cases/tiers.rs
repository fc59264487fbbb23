//! Moves pages between the device, swap memory and a store over a backend without bytes, so that only the engine's time
//! is measured.

use kvarena::hash::Hashing;
use kvarena::moves::PutId;
use kvarena::{Capacity, Engine, EngineConfig, Extend, Null, PoolConfig, SeqKey, StepScratch, TokenId};

use super::NAMESPACE;

const PAGE_SIZE: u32 = 16;
/// Number of pages that a call moves in each direction.
pub const MOVED: u32 = 1024;
/// Pages that a store takes at a time.
const PUTS: usize = 16;

/// Returns prompt number `own`, of `pages` whole pages and one token. Prompts have no token in common.
fn prompt(own: u32, pages: u32) -> Vec<TokenId> {
    let len = pages * PAGE_SIZE + 1;
    (0..len).map(|i| TokenId::new(own * len + i)).collect()
}

/// Two sets of prompts. The device has memory for one set, so loading a set evicts the other.
pub struct Tiers {
    engine: Engine<Null>,
    sets: [Vec<Vec<TokenId>>; 2],
    loading: Vec<SeqKey>,
    turn: usize,
    puts: Vec<PutId>,
    /// Number of prompts that `new_prompts` has returned.
    fetched: u32,
}

impl Tiers {
    /// Creates the case for prompts of `pages` whole pages. Each prompt is one node of the tree.
    pub fn new(pages: u32) -> Self {
        Self::with_hashing(pages, None)
    }

    /// Creates the case with page hashes, which stores need, and with all pages in swap memory.
    pub fn with_store(pages: u32) -> Self {
        let mut tiers = Self::with_hashing(pages, Some(Hashing::Dynamo));
        tiers.save_ahead();
        tiers
    }

    fn with_hashing(pages: u32, hashing: Option<Hashing>) -> Self {
        let prompts = MOVED / pages;
        let pool = PoolConfig {
            page_size: PAGE_SIZE,
            capacity: Capacity::Pages(MOVED),
            swap_pages: 3 * MOVED,
            ..PoolConfig::default()
        };
        let tokens = u64::from(2 * (MOVED + prompts) * PAGE_SIZE);
        let config = EngineConfig { max_sequences: prompts, max_tokens: tokens, hashing, ..EngineConfig::from(pool) };
        let engine = Engine::new(config, Null).expect("a valid config");
        let sets = [0, 1].map(|set| (0..prompts).map(|i| prompt(set * prompts + i, pages)).collect());
        let mut tiers = Self {
            engine,
            sets,
            loading: Vec::with_capacity(prompts as usize),
            turn: 0,
            puts: Vec::with_capacity(PUTS),
            fetched: 0,
        };
        for _ in 0..2 {
            tiers.admit();
            tiers.compute();
            tiers.finish();
        }
        tiers
    }

    /// Admits the prompts of the next set. Except during construction, their pages are in swap memory.
    pub fn admit(&mut self) {
        for prompt in &self.sets[self.turn] {
            self.loading.push(self.engine.admit(NAMESPACE, prompt, 0).expect("there is room"));
        }
        self.turn = 1 - self.turn;
    }

    fn compute(&mut self) {
        let mut scratch = StepScratch::new();
        for &seq in &self.loading {
            // The last token would take one more page.
            let len = self.engine.extend_max(seq).expect("it is live") - 1;
            let plan = self.engine.plan_batch(&mut scratch, &[Extend { seq, len }]);
            let step = plan.expect("there is room").step();
            self.engine.commit(step).expect("it is open");
            self.engine.complete(step).expect("it is committed");
        }
    }

    /// Loads the admitted prompts. This evicts the other set. Its pages that swap memory lacks are saved.
    pub fn load(&mut self) {
        self.engine.load(&self.loading).expect("there is room");
    }

    /// Ends the admitted prompts.
    pub fn finish(&mut self) {
        self.loading.drain(..).for_each(|seq| self.engine.finish(seq).expect("it is live"));
    }

    /// Saves all pages of the device ahead of their eviction.
    pub fn save_ahead(&mut self) {
        assert_eq!(self.engine.save_ahead(MOVED), Ok(MOVED));
    }

    /// Gives [`MOVED`] pages to a store, which rejects them. A call that selects no page queues rejected pages again.
    pub fn put(&mut self) {
        let mut given = 0;
        while given < MOVED as usize {
            given += self.engine.puts(PUTS, |put| self.puts.push(put.id)).expect("the backend moves nothing");
            self.puts.drain(..).for_each(|id| assert!(self.engine.put_done(id, false)));
        }
    }

    /// Returns prompts of `pages` whole pages that no call has returned before.
    pub fn new_prompts(&mut self, pages: u32) -> Vec<Vec<TokenId>> {
        let prompts = MOVED / pages;
        let first = 2 * prompts + self.fetched;
        self.fetched += prompts;
        (first..first + prompts).map(|own| prompt(own, pages)).collect()
    }

    /// Fetches prompts from a store that has all of their pages. If swap memory is full, other swap pages are dropped.
    pub fn fetch(&mut self, prompts: &[Vec<TokenId>]) {
        for prompt in prompts {
            let fetch = self.engine.fetch(NAMESPACE, prompt, MOVED).expect("the backend moves nothing");
            let fetch = fetch.expect("the prompt is new");
            let (id, count) = (fetch.id, fetch.len());
            assert!(self.engine.fetched(id, count));
        }
    }

    pub fn check(&mut self) {
        let before = self.engine.stats();
        self.admit();
        self.load();
        self.finish();
        let after = self.engine.stats();
        assert_eq!(after.loaded_pages - before.loaded_pages, u64::from(MOVED));
        assert_eq!(after.forced_pages - before.forced_pages, u64::from(MOVED));
        self.engine.verify().expect("all invariants hold");
    }
}
