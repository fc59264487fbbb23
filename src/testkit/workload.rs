//! Seeded workloads. A workload draws a weight for each kind of op, and then ops with these weights.
//!
//! Weights differ by seed, so some seeds exhaust the pool, and some never match, abort, preempt, fork or roll back.

use super::op::{Op, Prompt, SETTINGS, SmallConfig};
use super::rng::{Rng, mix};

// The kinds of ops, in the order of their weights.
const ADMIT: usize = 0;
const MATCH: usize = 1;
const PLAN: usize = 2;
const APPEND: usize = 3;
const COMMIT: usize = 4;
const COMPLETE: usize = 5;
const ABORT: usize = 6;
const FINISH: usize = 7;
const PREEMPT: usize = 8;
const RESUME: usize = 9;
const FORK: usize = 10;
const ROLLBACK: usize = 11;
const RESET: usize = 12;
const PROMISE: usize = 13;
const ADMIT_BATCH: usize = 14;
const DRAFT: usize = 15;
const ACCEPT: usize = 16;
const MARK: usize = 17;
const LOAD: usize = 18;
const SAVE_AHEAD: usize = 19;
const PUTS: usize = 20;
const PUT_DONE: usize = 21;
const FETCH: usize = 22;
const FETCHED: usize = 23;
const KINDS: usize = FETCHED + 1;

/// An endless stream of ops, and their config. Both depend only on the seed.
#[derive(Clone, Debug)]
pub struct Workload {
    config: SmallConfig,
    rng: Rng,
    weights: [u64; KINDS],
    /// Probability, in sixteenths, that a plan's item extends its sequence by the maximum.
    greedy: u64,
    /// Probability, in sixteenths, that an op promises pages.
    promising: u64,
    /// On average, one in this number of draws may be invalid.
    wrong: u64,
    /// Whether about three quarters of the prompts share all tokens of an earlier text; otherwise about half do.
    repeats: bool,
}

impl Workload {
    /// Creates the workload of a seed.
    pub fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let mut config = draw_config(&mut rng);
        draw_separately(&mut Rng::new(mix(seed)), &mut config);
        // Every workload often makes the calls that a running server makes. Only some workloads make the other calls.
        let usual = [20, 3, 40, 20, 22, 18, 2, 9, 2, 6, 3, 3, 0, 0, 3, 0, 0, 0, 0, 0];
        let drawn = usual.map(|usual| usual * rng.pick(&[1, 1, 2, 3]));
        let mut weights = [0; KINDS];
        weights[..drawn.len()].copy_from_slice(&drawn);
        for kind in [MATCH, ABORT, PREEMPT, FORK, ROLLBACK] {
            weights[kind] *= rng.pick(&[0, 1, 1, 4]);
        }
        weights[RESET] = rng.pick(&[0, 0, 1, 2]);
        let promising = rng.pick(&[0, 4, 12, 16]);
        weights[ADMIT_BATCH] *= rng.pick(&[0, 1, 4]);
        weights[PROMISE] = rng.pick(&[0, 3, 10]) * u64::from(promising > 0);
        let drafting = rng.pick(&[0, 0, 1, 3]);
        (weights[DRAFT], weights[ACCEPT]) = (12 * drafting, 30 * drafting);
        weights[MARK] = if config.groups > 0 { [0, 0, 6][(seed % 3) as usize] } else { 0 };
        if config.swap_pages > 0 {
            weights[LOAD] = [0, 3, 8][(seed % 3) as usize];
            weights[SAVE_AHEAD] = [0, 6, 20][(seed / 3 % 3) as usize];
        }
        let greedy = rng.below(17);
        let wrong = rng.pick(&[8, 32, 256]);
        Self { config, rng, weights, greedy, promising, wrong, repeats: false }
    }

    /// Creates the workload of a seed with swap memory. The pool is so small that most pages are evicted, and later
    /// prompts match the evicted pages.
    pub fn with_swap(seed: u64) -> Self {
        let mut workload = Self::new(seed);
        let mut rng = Rng::new(mix(!seed));
        let Self { config, weights, .. } = &mut workload;
        config.page_size = rng.within(1, 3) as u32;
        config.pages = rng.within(4, 9) as u32;
        config.swap_pages = rng.pick(&[1, 3, 8, 20, 40]);
        (config.share_prefixes, config.groups) = (true, 0);
        (config.tokens, config.sequence_len) = (400, 1 << 20);
        config.sequences = rng.within(1, 3) as u32;
        let usual = [30, 2, 40, 6, 40, 40, 1, 12, 3, 6, 1, 1, 0, 0, 2, 0, 0, 0, 6, 6];
        let drawn = usual.map(|usual| usual * rng.pick(&[1, 1, 2]));
        weights[..drawn.len()].copy_from_slice(&drawn);
        weights[SAVE_AHEAD] *= rng.pick(&[0, 1, 2]);
        weights[RESET] = rng.pick(&[0, 0, 0, 1]);
        (workload.greedy, workload.promising, workload.wrong) = (14, rng.pick(&[0, 1, 8]), 256);
        workload
    }

    /// Creates a workload with swap memory, with many forks of sequences whose steps run ahead of their tokens. Odd
    /// seeds have groups of layers.
    pub fn with_forks(seed: u64) -> Self {
        let groups = seed % 2 == 1;
        let mut workload = if groups { Self::with_swap_groups(seed) } else { Self::with_swap(seed) };
        let Self { config, weights, .. } = &mut workload;
        config.vocabulary = 1 + (seed / 2 % 2) as u8;
        (config.page_size, config.sequences) = (2, 6);
        (weights[FORK], weights[APPEND], weights[FINISH]) = (30, 40, 20);
        workload.repeats = true;
        workload
    }

    /// Creates a workload with swap memory and groups of layers. Consecutive seeds take all settings in turn.
    pub fn with_swap_groups(seed: u64) -> Self {
        let mut workload = Self::with_swap(seed);
        let mut rng = Rng::new(mix(seed ^ 7));
        let Self { config, weights, .. } = &mut workload;
        config.groups = (seed % u64::from(SETTINGS)) as u8 + 1;
        let tracks = config.engine().pool.layout().expect("it is small").tracks();
        config.pages = tracks * rng.within(3, 7) as u32 + 3;
        config.swap_pages = rng.pick(&[1, 8, 20, 60, 60]);
        weights[MARK] = rng.pick(&[0, 6, 20]);
        weights[PUTS..].copy_from_slice(&[rng.pick(&[0, 0, 2]), 0, rng.pick(&[0, 0, 2]), 0]);
        workload.repeats = true;
        workload
    }

    /// Creates a workload with swap memory for 2 to 23 pages, and with puts and fetches of a store.
    pub fn with_stores(seed: u64) -> Self {
        let mut workload = Self::with_swap(seed);
        let Self { config, weights, .. } = &mut workload;
        config.swap_pages = [2, 3, 7, 23][(seed % 4) as usize];
        config.hashing = config.hashing.max(1);
        weights[PUTS..].copy_from_slice(&[16, 32, 16, 16]);
        workload
    }

    /// Returns the config of the engine.
    pub fn config(&self) -> SmallConfig {
        self.config
    }

    /// Returns the next `count` ops.
    pub fn take_ops(&mut self, count: usize) -> Vec<Op> {
        (0..count).map(|_| self.op()).collect()
    }

    /// Returns the next op.
    pub fn op(&mut self) -> Op {
        match self.rng.weighted(&self.weights) {
            ADMIT => Op::Admit(self.prompt()),
            MATCH => Op::Match(self.prompt()),
            PLAN => self.plan(),
            APPEND => Op::Append { pick: self.seq(), count: self.append_count(), seed: self.byte() },
            COMMIT => Op::Commit { pick: self.commit_pick() },
            COMPLETE => Op::Complete { pick: self.step(208) },
            ABORT => Op::Abort { pick: self.step(224) },
            FINISH => Op::Finish { pick: self.seq(), publish: !self.rng.one_in(8) },
            PREEMPT => Op::Preempt { pick: self.seq(), publish: self.rng.one_in(2) },
            RESUME => Op::Resume { pick: self.step(200), promise: self.promise() },
            FORK => {
                let count = self.rng.pick(&[1, 1, 2, 3]) - u8::from(self.is_wrong());
                Op::Fork { pick: self.seq(), count, promise: self.promise() }
            }
            ROLLBACK => Op::Rollback { pick: self.seq(), fewer: self.byte() },
            RESET => Op::Reset,
            ADMIT_BATCH => {
                let count = self.rng.within(1, 4) as u8 - u8::from(self.is_wrong());
                Op::AdmitBatch { prompt: self.prompt(), count }
            }
            DRAFT => {
                let twist = if self.is_wrong() { self.byte() % 32 } else { 255 };
                Op::Draft { first: self.byte(), count: self.byte(), seed: self.byte(), twist }
            }
            ACCEPT => {
                let wrong = if self.is_wrong() { 0 } else { 8 };
                Op::Accept { pick: self.step(224), seed: wrong + self.byte() % 248 }
            }
            LOAD => Op::Load { first: self.seq(), count: self.byte() % 4 },
            SAVE_AHEAD => Op::SaveAhead { pages: self.byte() % 32 },
            PUTS => Op::Puts { most: self.byte() },
            PUT_DONE => Op::PutDone { pick: self.byte(), ok: !self.rng.one_in(4) },
            FETCH => {
                // An odd number shares an earlier text, of which the store may have pages.
                let prompt = self.prompt();
                let prompt = Prompt { shared: prompt.shared | 1, ..prompt };
                Op::Fetch { prompt, most: self.byte() }
            }
            FETCHED => Op::Fetched { pick: self.byte(), count: self.byte() },
            MARK => Op::Mark { pick: self.seq(), more: self.byte() },
            _ => Op::Promise { pick: self.seq(), promise: self.promise() },
        }
    }

    fn byte(&mut self) -> u8 {
        self.rng.bits() as u8
    }

    fn is_wrong(&mut self) -> bool {
        self.rng.one_in(self.wrong)
    }

    /// Returns a pick below `sane`, or rarely any byte.
    fn step(&mut self, sane: u64) -> u8 {
        if self.is_wrong() { self.byte() } else { self.rng.below(sane) as u8 }
    }

    /// Returns the pick of the first open step, or rarely of any step.
    fn commit_pick(&mut self) -> u8 {
        if self.is_wrong() { self.rng.within(224, 255) as u8 } else { 0 }
    }

    fn seq(&mut self) -> u8 {
        self.step(251)
    }

    /// Returns a promise: none, some pages, or rarely too many.
    fn promise(&mut self) -> u8 {
        if self.rng.below(16) >= self.promising {
            0
        } else if self.is_wrong() {
            255
        } else {
            self.rng.within(1, 254) as u8
        }
    }

    fn append_count(&mut self) -> u8 {
        match self.rng.below(8) {
            0 if self.is_wrong() => self.rng.pick(&[254, 255]),
            0 => self.rng.below(254) as u8,
            _ => self.rng.within(1, 2) as u8,
        }
    }

    fn prompt(&mut self) -> Prompt {
        let mut prompt = Prompt {
            namespace: self.rng.one_in(4).into(),
            like: self.byte(),
            shared: self.rng.bits() as u16,
            len: self.rng.within(1, 65_500) as u16,
            seed: self.byte() % 4,
            promise: self.promise(),
        };
        if self.repeats && self.rng.one_in(2) {
            prompt.shared |= 1;
        }
        if self.is_wrong() {
            prompt.len = self.rng.pick(&[0, 65_535, 65_500]);
        }
        prompt
    }

    fn plan(&mut self) -> Op {
        let mut lens = [0; 4];
        for len in &mut lens {
            let any = self.rng.within(2, 255) as u8;
            let all = self.rng.below(16) < self.greedy;
            *len = if self.is_wrong() {
                self.byte() % 2
            } else if all {
                any & !1
            } else {
                any | 1
            };
        }
        let twist = if self.is_wrong() { self.byte() % 4 } else { 255 };
        Op::Plan { first: self.byte(), count: self.byte(), lens, twist }
    }
}

/// Draws hashes, events, groups of layers and swap memory with a separate generator. The other draws of
/// [`Workload::new`] do not depend on them.
fn draw_separately(rng: &mut Rng, config: &mut SmallConfig) {
    config.hashing = rng.below(6) as u8;
    config.event_pages = rng.pick(&[0, 1, 4, 12, 200]);
    config.drain_every = rng.pick(&[1, 1, 2, 8]);
    config.groups = if rng.one_in(2) { rng.within(1, SETTINGS.into()) as u8 } else { 0 };
    config.swap_pages = if rng.one_in(2) { rng.within(1, 40) as u32 } else { 0 };
}

fn draw_config(rng: &mut Rng) -> SmallConfig {
    // The pool has few pages, sometimes many. Rarely, its pages are so large that a row needs several chunks of the
    // page table.
    let large = rng.one_in(12);
    let page_size = if large { rng.pick(&[341, 600, 1024]) } else { rng.within(1, 5) as u32 };
    let most = if large { 12 } else { rng.pick(&[40, 40, 40, 40, 200]) };
    SmallConfig {
        pages: rng.within(1, most) as u32,
        page_size,
        sequences: rng.within(1, 8) as u32,
        sequence_len: if rng.one_in(4) { rng.within(1, 8) as u32 * page_size + 1 } else { 1 << 20 },
        tokens: rng.within(1, 40) * u64::from(page_size),
        steps: rng.within(1, 4) as u32,
        share_prefixes: !rng.one_in(5),
        hash_bits: rng.pick(&[2, 2, 1, 3, 31]),
        page_first: rng.one_in(2),
        dtype: rng.below(5) as u8,
        layers: rng.within(1, 2) as u32,
        kv_heads: rng.within(0, 2) as u32,
        groups: 0,
        swap_pages: 0,
        hashing: 0,
        event_pages: 0,
        drain_every: 1,
        vocabulary: 3,
    }
}
