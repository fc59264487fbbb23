//! A host that calls an engine at random and allocates nothing after its first drafts.

use kvarena::backend::OpenBackend;
use kvarena::config::PrefixMode;
use kvarena::moves::{FetchId, PutId};
use kvarena::plan::DraftTree;
use kvarena::{
    Backend, Capacity, Engine, EngineConfig, EngineError, Error, Extend, Keep, KvShape, Namespace, PoolConfig, Prompt,
    SeqKey, StepId, StepScratch, TokenId,
};

pub const PAGES: u32 = 96;
pub const SEQUENCES: usize = 12;
/// Maximum number of open puts and fetches.
const PUTS: usize = 16;
const FETCHES: usize = 3;

pub fn config(page_size: u32, prefix: PrefixMode) -> EngineConfig {
    let pool = PoolConfig {
        layers: 1,
        shape: KvShape::heads(1, 2),
        page_size,
        capacity: Capacity::Pages(PAGES),
        ..PoolConfig::default()
    };
    EngineConfig {
        prefix,
        max_sequences: SEQUENCES as u32,
        max_tokens: 4 * u64::from(PAGES * page_size),
        max_steps: 3,
        ..EngineConfig::from(pool)
    }
}

/// Returns a random number without state on the heap.
pub fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    x ^ (x >> 29)
}

/// A host that allocates nothing after its first drafts.
pub struct Host<B> {
    pub engine: Engine<B>,
    scratch: [StepScratch; 3],
    live: Vec<SeqKey>,
    waiting: Vec<SeqKey>,
    prompt: Vec<TokenId>,
    items: Vec<Extend>,
    /// The sequences of the last batch.
    planned: Vec<SeqKey>,
    open: Vec<StepId>,
    puts: Vec<PutId>,
    fetches: Vec<(FetchId, usize)>,
    /// A dense page table of the last batch.
    table: Vec<u32>,
    tree: DraftTree,
    pub done: Done,
}

/// Counts of each kind of event. `run` and `check` require all kinds to occur, but followers only with shared prefixes,
/// lost states only with states, and drafts only without.
#[derive(Clone, Copy, Debug, Default)]
pub struct Done {
    pub prefills: u64,
    pub decodes: u64,
    pub forks: u64,
    pub preemptions: u64,
    pub resumes: u64,
    pub rollbacks: u64,
    pub drafts: u64,
    pub promises: u64,
    pub followers: u64,
    pub batches: u64,
    pub aborts: u64,
    pub lost: u64,
    pub finishes: u64,
    pub refusals: u64,
}

impl<B: Backend> Host<B> {
    pub fn new(config: EngineConfig, backend: impl OpenBackend<Backend = B>) -> Self {
        let engine = Engine::new(config, backend).expect("a valid config");
        let tokens = (PAGES * config.pool.page_size) as usize;
        Self {
            engine,
            scratch: [(); 3].map(|()| StepScratch::with_capacity(64 << 10)),
            live: Vec::with_capacity(SEQUENCES),
            waiting: Vec::with_capacity(SEQUENCES),
            prompt: Vec::with_capacity(tokens),
            items: Vec::with_capacity(SEQUENCES),
            planned: Vec::with_capacity(SEQUENCES),
            open: Vec::with_capacity(3),
            puts: Vec::with_capacity(2 * PUTS),
            fetches: Vec::with_capacity(FETCHES),
            table: Vec::with_capacity(SEQUENCES * PAGES as usize),
            tree: DraftTree::new(),
            done: Done::default(),
        }
    }

    fn page_size(&self) -> u64 {
        u64::from(self.engine.shape().layout.page_size())
    }

    /// Runs one round of a server: admits prompts, disturbs a sequence, plans a step and drafts, and may complete the
    /// oldest open step. Then it may finish a sequence, moves pages between tiers, and sometimes drains events.
    pub fn round(&mut self, seed: u64, store: &mut impl FnMut(&mut B, &kvarena::BatchPlan<'_>)) {
        self.admit(seed);
        self.disturb(mix(seed ^ 1));
        self.plan(mix(seed ^ 2), store);
        self.draft(mix(seed ^ 9), store);
        // At most two steps stay in flight.
        if self.open.len() > 1 + (mix(seed ^ 3) % 2) as usize {
            let step = self.open.remove(0);
            self.engine.commit(step).expect("steps commit in order");
            self.engine.complete(step).expect("it is committed");
        }
        self.finish_some(mix(seed ^ 4));
        self.use_tiers(mix(seed ^ 10));
        if seed.is_multiple_of(4) {
            self.engine.drain_events(|event| _ = std::hint::black_box(event));
        }
    }

    fn admit(&mut self, seed: u64) {
        if let Some(&seq) = self.waiting.first()
            && self.engine.resume(seq, self.promise(seed)).is_ok()
        {
            self.waiting.remove(0);
            self.live.push(seq);
            self.done.resumes += 1;
        }
        // The prompt has one of eight shared prefixes, and a distinct rest.
        let page = self.page_size();
        let shared = (mix(seed ^ 5) % 8, page * (1 + mix(seed ^ 6) % 6));
        let len = shared.1 + 1 + mix(seed ^ 7) % (4 * page);
        let token = |i| if i < shared.1 { mix(shared.0 << 32 | i) } else { mix(seed ^ i << 8) };
        self.prompt.clear();
        self.prompt.extend((0..len).map(|i| TokenId::new(token(i) as u32 % 1000)));
        self.engine.match_prefix(Namespace::default(), &self.prompt);
        let promise = self.promise(mix(seed ^ 8));
        let cost = self.engine.admission(Namespace::default(), &self.prompt, promise);
        assert!(cost.is_err() || cost.is_ok_and(|cost| cost.cached_len < len as u32));
        if cost.is_ok_and(|cost| cost.leader.is_some()) {
            self.done.followers += 1;
        }
        if seed.is_multiple_of(5) {
            // Two prompts that share a prefix.
            let half = &self.prompt[..self.prompt.len().div_ceil(2)];
            let prompt = |tokens| Prompt { namespace: Namespace::default(), tokens, admit: promise.into() };
            match self.engine.admit_batch(&[prompt(&self.prompt[..]), prompt(half)]) {
                Ok(admitted) => {
                    self.live.extend(admitted.iter().map(|one| one.seq));
                    self.done.batches += 1;
                }
                Err(_) => self.done.refusals += 1,
            }
            return;
        }
        match self.engine.admit(Namespace::default(), &self.prompt, promise) {
            Ok(seq) => self.live.push(seq),
            Err(_) => self.done.refusals += 1,
        }
    }

    /// Returns the tokens promised to a sequence: often none, else a few pages.
    fn promise(&self, seed: u64) -> u32 {
        if seed & 3 < 2 { 0 } else { (self.page_size() * (mix(seed) % 10)) as u32 }
    }

    /// Sometimes forks, rolls back, preempts, aborts or changes a promise.
    fn disturb(&mut self, seed: u64) {
        let Some(&seq) = self.live.get(mix(seed) as usize % self.live.len().max(1)) else { return };
        match seed % 8 {
            0 | 1 => match self.engine.fork(seq, 1 + (seed >> 8) as u32 % 2, self.promise(seed)) {
                Ok(forked) => {
                    self.live.extend_from_slice(forked.children);
                    self.done.forks += 1;
                }
                Err(EngineError::Core(_)) => self.done.refusals += 1,
                Err(error) => panic!("{error}"),
            },
            2 => {
                let len = self.engine.token_count(seq).expect("it is live");
                match self.engine.rollback(seq, len.saturating_sub(2)) {
                    Ok(()) => self.done.rollbacks += 1,
                    Err(_) => self.done.refusals += 1,
                }
            }
            3 => {
                let keep = if seed & 64 == 0 { Keep::Publish } else { Keep::Drop };
                self.preempt(seq, keep);
            }
            4 if self.open.len() > 1 => {
                // The last planned step is aborted; its number must still be completed.
                let step = *self.open.last().expect("there are two");
                self.engine.abort(step).expect("it is open");
                self.open.pop();
                self.done.aborts += 1;
            }
            5 => match self.engine.promise(seq, self.promise(mix(seed))) {
                Ok(()) => self.done.promises += 1,
                Err(_) => self.done.refusals += 1,
            },
            _ => {}
        }
    }

    fn preempt(&mut self, seq: SeqKey, keep: Keep) {
        self.engine.preempt(seq, keep).expect("it runs");
        self.live.retain(|&live| live != seq);
        self.waiting.push(seq);
        self.done.preemptions += 1;
    }

    /// Preempts the sequences that have lost their state. They compute again from their last cached state.
    fn preempt_lost(&mut self) {
        while let Some(&seq) = self.live.iter().find(|&&seq| self.engine.is_state_lost(seq).expect("it is live")) {
            self.preempt(seq, Keep::Publish);
            self.done.lost += 1;
        }
    }

    fn plan(&mut self, seed: u64, store: &mut impl FnMut(&mut B, &kvarena::BatchPlan<'_>)) {
        self.preempt_lost();
        self.items.clear();
        for (i, &seq) in self.live.iter().enumerate() {
            let known = self.engine.token_count(seq).expect("it is live");
            let planned = self.engine.planned_len(seq).expect("it is live");
            if planned >= known {
                let token = TokenId::new(mix(seed ^ i as u64) as u32 % 1000);
                if self.engine.append(seq, &[token]).is_err() {
                    continue;
                }
                self.done.decodes += 1;
            } else {
                self.done.prefills += 1;
            }
            let known = self.engine.token_count(seq).expect("it is live");
            let chunk = 1 + mix(seed ^ 77 ^ i as u64) as u32 % 64;
            if known > planned {
                // With states, an item ends at a mark.
                let len = self.engine.next_len(seq, (known - planned).min(chunk)).expect("it has tokens");
                self.items.push(Extend { seq, len });
            }
        }
        if self.items.is_empty() {
            return self.settle(); // The pages that all sequences wait for may be in the fence.
        }
        while !self.items.is_empty() {
            match self.engine.plan_batch(&mut self.scratch[seed as usize % 3], &self.items) {
                Ok(plan) => {
                    store(self.engine.backend_mut(), &plan);
                    self.open.push(plan.step());
                    let page_size = self.engine.shape().layout.page_size();
                    let width =
                        plan.rows.iter().map(|row| row.kv_len.div_ceil(page_size)).max().expect("a row") as usize;
                    self.table.resize(self.items.len() * width, 0);
                    self.planned.clear();
                    self.planned.extend(self.items.iter().map(|item| item.seq));
                    self.engine.write_tables(&self.planned, 0, width, 0, &mut self.table).expect("rows fit");
                    return;
                }
                Err(EngineError::Core(Error::OutOfPages { .. })) => {
                    let last = self.items.pop().expect("it is not empty");
                    self.preempt(last.seq, Keep::Publish);
                }
                Err(EngineError::Core(Error::OutOfSteps { .. })) => {
                    self.done.refusals += 1;
                    return self.settle();
                }
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Plans drafts for one sequence whose tokens are all planned, and accepts a branch of them.
    fn draft(&mut self, seed: u64, store: &mut impl FnMut(&mut B, &kvarena::BatchPlan<'_>)) {
        if self.engine.shape().layout.state().is_some() {
            return; // States do not support drafts.
        }
        let Some(&seq) = self.live.get(mix(seed) as usize % self.live.len().max(1)) else { return };
        let start = self.engine.planned_len(seq).expect("it is live");
        let known = self.engine.token_count(seq).expect("it is live");
        let drafts = [1, 2, 3].map(TokenId::new);
        if known != start || self.engine.append(seq, &drafts).is_err() {
            return;
        }
        self.tree.set(start, &[0, 0, 0]).expect("parents precede children");
        let (items, drafts) = ([Extend { seq, len: 3 }], [self.tree.draft(seq)]);
        match self.engine.plan_drafts(&mut self.scratch[seed as usize % 3], &items, &drafts) {
            Ok(plan) => {
                store(self.engine.backend_mut(), &plan);
                let step = plan.step();
                self.open.push(step);
                let moved = self.engine.accept(step, seq, &[0, 2]).expect("it is a branch");
                assert_eq!(moved.len(), 1);
                self.done.drafts += 1;
            }
            Err(EngineError::Core(error)) if error.is_shortage() => {
                self.engine.rollback(seq, start).expect("they are not computed");
                self.done.refusals += 1;
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// Saves ahead and loads pages, puts some into a store, and fetches some pages of the last prompt.
    fn use_tiers(&mut self, seed: u64) {
        self.engine.save_ahead(seed as u32 % 8).expect("it cannot fail");
        if seed.is_multiple_of(3) {
            self.engine.load(&self.live).map_or_else(|_| self.done.refusals += 1, |()| ());
        }
        let puts = &mut self.puts;
        // Copies that ended since pass their pages in addition.
        let room = PUTS.saturating_sub(puts.len());
        self.engine.puts(room, |put| puts.push(put.id)).expect("it cannot fail");
        for id in puts.drain(..mix(seed) as usize % (puts.len() + 1)) {
            assert!(self.engine.put_done(id, seed & 1 == 0), "it is open");
        }
        let hit = self.engine.match_prefix(Namespace::default(), &self.prompt).pages();
        let to = hit + 1 + mix(seed ^ 1) as u32 % 6;
        if self.fetches.len() < FETCHES
            && let Ok(Some(fetch)) = self.engine.fetch(Namespace::default(), &self.prompt, to)
        {
            self.fetches.push((fetch.id, fetch.len()));
        }
        if self.fetches.len() > seed as usize % FETCHES {
            let (id, records) = self.fetches.swap_remove(mix(seed ^ 2) as usize % self.fetches.len());
            let all = seed.is_multiple_of(2);
            let count = if all { records } else { mix(seed ^ 3) as usize % (records + 1) };
            assert!(self.engine.fetched(id, count), "it is open");
        }
    }

    /// Commits and completes all steps.
    fn settle(&mut self) {
        for step in self.open.drain(..) {
            self.engine.commit(step).expect("steps commit in order");
        }
        let newest = self.engine.newest_step();
        self.engine.complete(newest).expect("all are closed");
    }

    fn finish_some(&mut self, seed: u64) {
        let crowded = self.live.len() + self.waiting.len() + 2 > SEQUENCES;
        if seed.is_multiple_of(6) || crowded {
            let from = if self.live.is_empty() { &mut self.waiting } else { &mut self.live };
            if !from.is_empty() {
                let seq = from.remove(mix(seed) as usize % from.len());
                self.engine.finish(seq).expect("it is live");
                self.done.finishes += 1;
            }
        }
        if seed.is_multiple_of(97) {
            self.engine.reset();
        }
    }
}
