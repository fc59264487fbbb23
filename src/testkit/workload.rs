//! Random workloads: a config, and ops that are drawn with weights. A workload depends only on its stream of numbers:
//! tests take the stream of a seed, fuzzing that of its bytes.
//!
//! The weights are drawn too, so some workloads exhaust the pool, and some never match, abort, preempt, fork or roll
//! back.

use std::collections::BTreeMap;

use super::op::{KEEPING_STATES, Limit, Op, Prompt, SETTINGS, SmallConfig};
use super::rng::Rng;

/// A kind of workloads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Family {
    /// Any config.
    Any,
    /// Nearly all pages are promised, many steps are in flight and texts are similar. Commits therefore find
    /// duplicates, and pages in the fence back promises.
    Promises,
    /// Prompts end near the end of a page, and a leaf of the page tables has one page or two. Decoding rows then begin
    /// leaves, which other workloads rarely do.
    Leaves,
    /// Many drafts, of which some are invalid, and branches that may be invalid.
    Drafts,
    /// Swap memory. The pool is so small that most pages are evicted, and later prompts match the evicted pages.
    Swap,
    /// Swap memory and groups of layers.
    SwapGroups,
    /// Swap memory and many forks of sequences whose steps run ahead of their tokens; some have groups of layers.
    Forks,
    /// Swap memory of few pages, with the puts and fetches of a store; some have groups of layers.
    Stores,
    /// Layers that keep a state. Steps of few tokens are aborted often, so sequences lose their states, and resume.
    States,
}

impl Family {
    /// All families.
    pub const ALL: [Self; 9] = [
        Self::Any,
        Self::Promises,
        Self::Leaves,
        Self::Drafts,
        Self::Swap,
        Self::SwapGroups,
        Self::Forks,
        Self::Stores,
        Self::States,
    ];
}

/// A kind of ops.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Kind {
    Admit,
    AdmitBatch,
    Match,
    Plan,
    Append,
    Commit,
    Complete,
    Abort,
    Finish,
    Preempt,
    Resume,
    Mark,
    Load,
    SaveAhead,
    Puts,
    PutDone,
    Fetch,
    Fetched,
    RestatePuts,
    Promise,
    Fork,
    Rollback,
    Draft,
    Accept,
    Reset,
}
use Kind::*;

/// The calls of a running server, which every workload makes often.
const USUAL: [(Kind, u64); 7] =
    [(Admit, 20), (Plan, 40), (Append, 20), (Complete, 18), (Finish, 9), (Resume, 6), (AdmitBatch, 3)];

/// Calls that only some workloads make.
const SOMETIMES: [(Kind, u64); 5] = [(Match, 3), (Abort, 2), (Preempt, 2), (Fork, 3), (Rollback, 3)];

/// The calls of a workload with swap memory.
const WITH_SWAP: [(Kind, u64); 15] = [
    (Admit, 30),
    (AdmitBatch, 2),
    (Match, 2),
    (Plan, 40),
    (Append, 6),
    (Commit, 40),
    (Complete, 40),
    (Abort, 1),
    (Finish, 12),
    (Preempt, 3),
    (Resume, 6),
    (Fork, 1),
    (Rollback, 1),
    (Load, 6),
    (SaveAhead, 6),
];

/// The calls of a workload that loses states and computes them again.
const WITH_STATES: [(Kind, u64); 13] = [
    (Admit, 6),
    (AdmitBatch, 1),
    (Match, 1),
    (Plan, 60),
    (Append, 10),
    (Commit, 40),
    (Complete, 40),
    (Abort, 6),
    (Finish, 1),
    (Preempt, 10),
    (Resume, 20),
    (Fork, 1),
    (Rollback, 1),
];

/// The puts and fetches of a store.
const WITH_STORES: [(Kind, u64); 5] = [(Puts, 40), (PutDone, 80), (Fetch, 40), (Fetched, 40), (RestatePuts, 3)];

/// A stream of ops, and their config.
#[derive(Clone, Debug)]
pub struct Workload {
    config: SmallConfig,
    rng: Rng,
    weights: BTreeMap<Kind, u64>,
    /// Probability, in sixteenths, that a plan's item extends its sequence by the maximum.
    greedy: u64,
    /// Probability, in sixteenths, that an op promises pages.
    promising: u64,
    /// Probability, in sixteenths, that a completion completes one step at most.
    slow: u64,
    /// On average, one in this number of draws may be invalid.
    wrong: u64,
    /// Whether about three quarters of the prompts share all tokens of an earlier text; otherwise about half do.
    repeats: bool,
    /// Whether prompts end 0 to 3 tokens before the end of a page.
    ends_pages: bool,
}

impl Workload {
    /// Creates the endless workload of a seed.
    pub fn new(family: Family, seed: u64) -> Self {
        Self::draw(family, Rng::new(seed))
    }

    /// Returns the config and the ops of a fuzzer's bytes.
    pub fn from_bytes(bytes: &[u8]) -> (SmallConfig, Vec<Op>) {
        Self::from_bytes_in(&Family::ALL, bytes)
    }

    /// Returns [`Workload::from_bytes`] of one of these families.
    pub fn from_bytes_in(families: &[Family], bytes: &[u8]) -> (SmallConfig, Vec<Op>) {
        let mut rng = Rng::from_bytes(bytes);
        let mut workload = Self::draw(rng.pick(families), rng);
        let mut ops = Vec::new();
        while !workload.rng.is_empty() {
            ops.push(workload.op());
        }
        (workload.config, ops)
    }

    fn draw(family: Family, mut rng: Rng) -> Self {
        let config = draw_config(&mut rng);
        let mut workload = Self {
            config,
            weights: BTreeMap::new(),
            greedy: rng.below(17),
            promising: rng.pick(&[0, 4, 12, 16]),
            slow: rng.pick(&[0, 0, 6, 11]),
            wrong: rng.pick(&[8, 32, 256]),
            repeats: rng.one_in(3),
            ends_pages: false,
            rng,
        };
        workload.weigh();
        match family {
            Family::Any => {}
            Family::Promises => workload.make_promises(),
            Family::Leaves => workload.begin_leaves(),
            Family::Drafts => workload.draft(),
            Family::Swap => workload.use_swap(),
            Family::SwapGroups => workload.use_groups(),
            Family::Forks => workload.use_forks(),
            Family::Stores => workload.use_stores(),
            Family::States => workload.use_states(),
        }
        workload
    }

    /// Draws a weight for each kind of ops. A kind without a weight never occurs.
    fn weigh(&mut self) {
        let Self { config, weights, rng, .. } = self;
        for (kind, usual) in USUAL {
            weights.insert(kind, usual * rng.pick(&[1, 1, 2, 3]));
        }
        for (kind, usual) in SOMETIMES {
            weights.insert(kind, usual * rng.pick(&[0, 1, 2, 3, 8]));
        }
        // With few commits, many steps are open when sequences are preempted or steps aborted.
        weights.extend([(Commit, rng.pick(&[6, 22, 44, 66])), (Reset, rng.pick(&[0, 0, 1, 2]))]);
        weights.insert(Promise, rng.pick(&[0, 3, 10]) * u64::from(self.promising > 0));
        let drafting = rng.pick(&[0, 0, 1, 3]);
        weights.extend([(Draft, 12 * drafting), (Accept, 30 * drafting)]);
        weights.insert(Mark, rng.pick(&[0, 0, 6]));
        if config.swap_pages > 0 {
            weights.extend([(Load, rng.pick(&[0, 3, 8])), (SaveAhead, rng.pick(&[0, 6, 20]))]);
        }
    }

    fn make_promises(&mut self) {
        let Self { config, rng, .. } = self;
        (config.pages, config.page_size) = (rng.within(6, 23) as u32, rng.within(1, 3) as u32);
        (config.sequences, config.sequence_len, config.tokens) = (6, 1 << 20, 1 << 12);
        (config.steps, config.share_prefixes) = (6, true);
        (self.promising, self.slow) = (16, 11);
    }

    fn begin_leaves(&mut self) {
        let Self { config, rng, .. } = self;
        (config.pages, config.page_size) = (24, rng.pick(&[341, 512, 1024]));
        (config.sequences, config.sequence_len, config.steps) = (6, 1 << 20, 4);
        config.tokens = 24 * u64::from(config.page_size);
        self.ends_pages = true;
    }

    fn draft(&mut self) {
        self.weights.extend([(Draft, 60), (Accept, 60), (Plan, 20)]);
        (self.config.steps, self.config.sequences) = (3, 6);
        self.wrong = 8;
    }

    fn use_swap(&mut self) {
        let Self { config, weights, rng, .. } = self;
        (config.pages, config.page_size) = (rng.within(4, 9) as u32, rng.within(1, 3) as u32);
        config.swap_pages = rng.pick(&[1, 3, 8, 20, 40]);
        (config.share_prefixes, config.groups) = (true, 0);
        (config.tokens, config.sequence_len) = (400, 1 << 20);
        config.sequences = rng.within(1, 3) as u32;
        for (kind, usual) in WITH_SWAP {
            weights.insert(kind, usual * rng.pick(&[1, 1, 2]));
        }
        weights.extend([(SaveAhead, rng.pick(&[0, 6, 20])), (Reset, rng.pick(&[0, 0, 0, 1]))]);
        (self.greedy, self.promising, self.wrong) = (14, rng.pick(&[0, 1, 8]), 256);
    }

    fn use_groups(&mut self) {
        self.use_swap();
        let Self { config, weights, rng, .. } = self;
        config.groups = rng.within(1, SETTINGS.into()) as u8;
        let tracks = config.engine().pool.layout().expect("it is small").tracks();
        config.pages = tracks * rng.within(3, 7) as u32 + 3;
        config.swap_pages = rng.pick(&[1, 8, 20, 60, 60]);
        weights.insert(Mark, rng.pick(&[0, 6, 20, 50]));
        weights.extend([(Puts, rng.pick(&[0, 0, 2])), (Fetch, rng.pick(&[0, 0, 2]))]);
        self.repeats = true;
    }

    fn use_forks(&mut self) {
        if self.rng.one_in(2) {
            self.use_groups()
        } else {
            self.use_swap()
        }
        let Self { config, weights, rng, .. } = self;
        (config.page_size, config.sequences, config.vocabulary) = (2, 6, rng.within(1, 2) as u8);
        weights.extend([(Fork, 30), (Append, 40), (Finish, 20)]);
        self.repeats = true;
    }

    fn use_stores(&mut self) {
        let has_groups = self.rng.one_in(2);
        if has_groups {
            self.use_groups()
        } else {
            self.use_swap()
        }
        let Self { config, weights, rng, .. } = self;
        config.record_pages = rng.pick(&[0, 0, 1, 2, 3]);
        config.swap_pages = if has_groups { rng.pick(&[6, 19, 41, 63]) } else { rng.pick(&[2, 3, 7, 23]) };
        config.hashing = config.hashing.max(1);
        weights.extend(WITH_STORES);
        weights.insert(Reset, rng.pick(&[0, 0, 0, 3]));
        self.repeats = true;
    }

    fn use_states(&mut self) {
        let Self { config, weights, rng, .. } = self;
        config.groups = rng.pick(&KEEPING_STATES);
        let layout = config.engine().pool.layout().expect("it is small");
        (config.page_size, config.steps, config.share_prefixes) =
            (rng.within(1, 3) as u32, rng.within(1, 3) as u32, true);
        config.sequences = rng.within(1, 3) as u32;
        config.pages = (layout.tracks() * 40 + layout.state_pages() * rng.within(4, 16) as u32).min(200);
        (config.tokens, config.sequence_len) = (400, 1 << 20);
        for (kind, usual) in WITH_STATES {
            weights.insert(kind, usual * rng.pick(&[1, 1, 2]));
        }
        weights.extend([(Draft, 0), (Accept, 0), (Reset, 0), (Mark, rng.pick(&[0, 0, 6]))]);
        (self.greedy, self.promising, self.wrong) = (rng.below(4), rng.pick(&[0, 0, 8]), 256);
    }

    /// Returns the config of the engine.
    pub fn config(&self) -> SmallConfig {
        self.config
    }

    /// Returns the next `count` ops.
    pub fn take_ops(&mut self, count: usize) -> Vec<Op> {
        (0..count).map(|_| self.op()).collect()
    }

    fn op(&mut self) -> Op {
        let weights: Vec<u64> = self.weights.values().copied().collect();
        let kind = self.rng.weighted(&weights);
        let kind = *self.weights.keys().nth(kind).expect("a kind for each weight");
        match kind {
            Admit => Op::Admit(self.prompt()),
            AdmitBatch => {
                let count = self.rng.within(1, 4) as u8 - u8::from(self.is_wrong());
                Op::AdmitBatch { prompt: self.prompt(), count }
            }
            Match => Op::Match(self.prompt()),
            Plan => self.plan(),
            Append => Op::Append { pick: self.seq(), count: self.append_count(), seed: self.byte() },
            Commit => Op::Commit { pick: self.commit_pick() },
            Complete => Op::Complete { pick: if self.in_sixteen(self.slow) { 200 } else { self.step(208) } },
            Abort => Op::Abort { pick: self.step(224) },
            Finish => Op::Finish { pick: self.seq(), publish: !self.rng.one_in(8) },
            Preempt => Op::Preempt { pick: self.seq(), publish: self.rng.one_in(2) },
            Resume => Op::Resume { pick: self.step(200), promise: self.promise(), limit: self.limit() },
            Mark => Op::Mark { pick: self.seq(), more: self.byte() },
            Load => Op::Load { first: self.seq(), count: self.rng.below(4) as u8 },
            SaveAhead => Op::SaveAhead { pages: self.rng.below(32) as u8 },
            Puts => Op::Puts { most: self.byte() },
            PutDone => Op::PutDone { pick: self.byte(), ok: !self.rng.one_in(4) },
            Fetch => {
                // An odd number shares an earlier text, of which the store may have pages.
                let prompt = self.prompt();
                let prompt = Prompt { shared: prompt.shared | 1, ..prompt };
                Op::Fetch { prompt, most: self.mostly_even() }
            }
            Fetched => Op::Fetched { pick: self.byte(), count: self.mostly_even() },
            RestatePuts => {
                let prompt = self.prompt();
                let prompt = Prompt { shared: prompt.shared | 1, ..prompt };
                Op::RestatePuts { prompt, lost: self.byte() }
            }
            Promise => Op::Promise { pick: self.seq(), promise: self.promise() },
            Fork => {
                let count = self.rng.pick(&[1, 1, 2, 3]) - u8::from(self.is_wrong());
                Op::Fork { pick: self.seq(), count, promise: self.promise() }
            }
            Rollback => Op::Rollback { pick: self.seq(), fewer: self.byte() },
            Draft => {
                let twist = if self.is_wrong() { self.rng.below(10) as u8 } else { 255 };
                Op::Draft { first: self.byte(), count: self.byte(), seed: self.byte(), twist }
            }
            Accept => {
                let seed = if self.is_wrong() { self.rng.below(8) } else { self.rng.within(8, 255) };
                Op::Accept { pick: self.step(224), seed: seed as u8 }
            }
            Reset => Op::Reset,
        }
    }

    fn byte(&mut self) -> u8 {
        self.rng.below(256) as u8
    }

    fn mostly_even(&mut self) -> u8 {
        let byte = self.byte();
        if self.rng.one_in(4) { byte } else { byte & !1 }
    }

    fn is_wrong(&mut self) -> bool {
        self.rng.one_in(self.wrong)
    }

    /// Returns true with a probability in sixteenths.
    fn in_sixteen(&mut self, probability: u64) -> bool {
        self.rng.below(16) < probability
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
        if !self.in_sixteen(self.promising) {
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
            shared: self.rng.below(1 << 16) as u16,
            len: self.rng.within(1, 65_499) as u16,
            seed: self.rng.below(4) as u8,
            promise: self.promise(),
            limit: self.limit(),
        };
        if self.repeats && self.rng.one_in(2) {
            prompt.shared |= 1;
        }
        if self.ends_pages {
            // The replay adds 1 to `len`.
            prompt.len = (1 + prompt.len % 4) * self.config.page_size as u16 - 1 - prompt.len / 4 % 4;
        }
        if self.is_wrong() {
            prompt.len = self.rng.pick(&[0, 65_535, 65_500]);
        }
        prompt
    }

    /// Draws a limit of a hit, mostly none.
    fn limit(&mut self) -> Limit {
        if self.rng.one_in(8) { self.rng.within(224, 255) as u8 } else { 0 }
    }

    fn plan(&mut self) -> Op {
        let lens = [(); 4].map(|()| {
            let (any, all) = (self.rng.within(2, 255) as u8, self.in_sixteen(self.greedy));
            match (self.is_wrong(), all) {
                (true, _) => self.rng.below(2) as u8,
                (_, true) => any & !1,
                (_, false) => any | 1,
            }
        });
        let twist = if self.is_wrong() { self.rng.below(4) as u8 } else { 255 };
        Op::Plan { first: self.byte(), count: self.byte(), lens, twist }
    }
}

fn draw_config(rng: &mut Rng) -> SmallConfig {
    // The pool has few pages, sometimes many. Rarely, its pages are so large that a row needs several leaves of the
    // page table.
    let large = rng.one_in(12);
    let page_size = if large { rng.pick(&[341, 600, 1024]) } else { rng.within(1, 5) as u32 };
    let most = if large { 12 } else { rng.pick(&[40, 40, 40, 40, 200]) };
    let pages = rng.within(1, most) as u32;
    SmallConfig {
        pages,
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
        kv_heads: rng.below(3) as u32,
        reserved: rng.pick(&[0, 0, 0, 0, 0, 0, 1, 3]),
        wide: rng.one_in(4),
        groups: if rng.one_in(2) { rng.within(1, SETTINGS.into()) as u8 } else { 0 },
        swap_pages: rng.pick(&[0, 0, 0, 3, 40, 40]).min(rng.within(1, 40)) as u32,
        record_pages: 0,
        hashing: rng.below(6) as u8,
        event_pages: rng.pick(&[0, 1, 4, 12, 200]),
        event_cells: pages.is_multiple_of(2),
        drain_every: rng.pick(&[1, 1, 2, 8]),
        vocabulary: rng.pick(&[3, 3, 3, 1, 2, 4]),
    }
}
