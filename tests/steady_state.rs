//! A warm engine allocates nothing: the cache is replaced many times with prefill, decode, forks, preemption, rollback
//! and eviction, without a call of the global allocator.

#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use kvarena::{
    Backend, Capacity, CpuOptions, DraftTree, Engine, EngineConfig, EngineError, Error, Extend,
    FetchId, Groups, Hashing, Keep, KvDtype, KvShape, LayerId, Namespace, Null, OpenBackend,
    PoolConfig, PrefixMode, Prompt, PutId, Reach, Scaling, SeqKey, StepId, StepScratch, TokenId,
};

thread_local! {
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

/// An allocator that counts the allocating calls of each thread.
struct Counting;

fn count() {
    // A thread that is ending has no counter.
    let _ = CALLS.try_with(|calls| calls.set(calls.get() + 1));
}

// SAFETY: every call is forwarded to the system's allocator unchanged; counting touches no allocated memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps `alloc`'s contract, which is the system's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: see `alloc`; `at` came from the system's allocator.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: see `alloc`; `at` came from the system's allocator.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn calls() -> u64 {
    CALLS.with(Cell::get)
}

const PAGES: u32 = 96;
const SEQUENCES: usize = 12;
/// Maximum number of open puts and fetches.
const PUTS: usize = 16;
const FETCHES: usize = 3;

fn config(page_size: u32, prefix: PrefixMode) -> EngineConfig {
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
fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    x ^ (x >> 29)
}

/// A host that allocates nothing after its creation.
struct Host<B> {
    engine: Engine<B>,
    scratch: [StepScratch; 3],
    live: Vec<SeqKey>,
    waiting: Vec<SeqKey>,
    prompt: Vec<TokenId>,
    items: Vec<Extend>,
    open: Vec<StepId>,
    puts: Vec<PutId>,
    fetches: Vec<(FetchId, u32)>,
    tree: DraftTree,
    done: Done,
}

/// Counts of each kind of event. `run` and `check` require all kinds to occur.
#[derive(Clone, Copy, Debug, Default)]
struct Done {
    prefills: u64,
    decodes: u64,
    forks: u64,
    preemptions: u64,
    resumes: u64,
    rollbacks: u64,
    drafts: u64,
    promises: u64,
    followers: u64,
    batches: u64,
    aborts: u64,
    finishes: u64,
    refusals: u64,
}

impl<B: Backend> Host<B> {
    fn new(config: EngineConfig, backend: impl OpenBackend<Backend = B>) -> Self {
        let engine = Engine::new(config, backend).expect("a valid config");
        let tokens = (PAGES * config.pool.page_size) as usize;
        Self {
            engine,
            scratch: [(); 3].map(|()| StepScratch::with_capacity(64 << 10)),
            live: Vec::with_capacity(SEQUENCES),
            waiting: Vec::with_capacity(SEQUENCES),
            prompt: Vec::with_capacity(tokens),
            items: Vec::with_capacity(SEQUENCES),
            open: Vec::with_capacity(3),
            puts: Vec::with_capacity(PUTS),
            fetches: Vec::with_capacity(FETCHES),
            tree: DraftTree::new(),
            done: Done::default(),
        }
    }

    fn page_size(&self) -> u64 {
        u64::from(self.engine.shape().layout.page_size())
    }

    /// Runs one round of a server: admits some sequences, plans and stores a step, commits and completes an earlier
    /// step, and finishes some sequences.
    fn round(&mut self, seed: u64, store: &mut impl FnMut(&mut B, &kvarena::BatchPlan<'_>)) {
        self.admit(seed);
        self.disturb(mix(seed ^ 1));
        self.plan(mix(seed ^ 2), store);
        self.draft(mix(seed ^ 9), store);
        // One to two steps stay in flight.
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
            let prompt = |tokens| Prompt { namespace: Namespace::default(), tokens, promise };
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

    fn plan(&mut self, seed: u64, store: &mut impl FnMut(&mut B, &kvarena::BatchPlan<'_>)) {
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
                self.items.push(Extend { seq, len: (known - planned).min(chunk) });
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

    /// Saves ahead, puts some pages into a store, and fetches some pages of the last prompt.
    fn use_tiers(&mut self, seed: u64) {
        self.engine.save_ahead(seed as u32 % 8).expect("it cannot fail");
        if seed.is_multiple_of(3) {
            self.engine.load(&self.live).map_or_else(|_| self.done.refusals += 1, |()| ());
        }
        if self.engine.shape().layout.groups().count() > 1 {
            return; // Stores do not support groups.
        }
        let puts = &mut self.puts;
        let room = PUTS - puts.len();
        self.engine.puts(room, |put| puts.push(put.id)).expect("it cannot fail");
        for id in puts.drain(..mix(seed) as usize % (puts.len() + 1)) {
            assert!(self.engine.put_done(id, seed & 1 == 0), "it is open");
        }
        let most = 1 + mix(seed ^ 1) as u32 % 6;
        if self.fetches.len() < FETCHES
            && let Ok(Some(fetch)) = self.engine.fetch(Namespace::default(), &self.prompt, most)
        {
            self.fetches.push((fetch.id, fetch.pages.len() as u32));
        }
        if self.fetches.len() > seed as usize % FETCHES {
            let (id, pages) = self.fetches.swap_remove(mix(seed ^ 2) as usize % self.fetches.len());
            assert!(self.engine.fetched(id, mix(seed ^ 3) as u32 % (pages + 1)), "it is open");
        }
    }

    /// Commits and completes all steps.
    fn settle(&mut self) {
        for step in self.open.drain(..) {
            self.engine.commit(step).expect("steps commit in order");
        }
        let newest = self.engine.world().steps.newest();
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

/// Runs until warm. Then checks that the allocator is not called while the cache is replaced `turns` times.
fn run<B: Backend>(
    config: EngineConfig,
    backend: impl OpenBackend<Backend = B>,
    turns: u64,
    mut store: impl FnMut(&mut B, &kvarena::BatchPlan<'_>),
) -> Done {
    let mut host = Host::new(config, backend);
    let turned = |host: &Host<B>| {
        let stats = host.engine.stats();
        // Without reuse nothing is evicted; the computed tokens then measure the turnover of the pool.
        let computed = stats.computed_tokens / u64::from(config.pool.page_size);
        let pages = match config.prefix {
            PrefixMode::Radix => stats.evicted_pages,
            _ => computed,
        };
        pages / u64::from(PAGES)
    };
    let mut seed = 0;
    let mut until = |host: &mut Host<B>, turns: u64| {
        while turned(host) < turns {
            seed += 1;
            assert!(seed < 1_000_000, "the host is stuck: {:?}", host.engine.stats());
            host.round(mix(seed), &mut store);
        }
    };
    until(&mut host, 10);
    host.engine.verify().expect("it is sound when warm");
    host.done = Done::default();
    let before = calls();
    until(&mut host, 10 + turns);
    let after = calls();
    assert_eq!(after - before, 0, "a warm engine has called the allocator");
    let stats = host.engine.stats();
    let tiers = [
        stats.saved_pages - stats.forced_pages,
        stats.forced_pages,
        stats.loaded_pages,
        stats.host_evicted_pages,
        stats.put_pages,
        stats.fetched_pages,
    ];
    let has_hosts = config.pool.host_pages > 0;
    let has_stores = has_hosts && config.pool.groups.count() == 1;
    let (hosts, stores) = tiers.split_at(4);
    assert!(hosts.iter().all(|&pages| (pages > 100) == has_hosts), "{tiers:?}");
    assert!(stores.iter().all(|&pages| (pages > 100) == has_stores), "{tiers:?}");
    let has_followers = config.prefix == PrefixMode::Radix;
    assert_eq!(host.done.followers > 3, has_followers, "{:?}", host.done);
    host.engine.verify().expect("it is sound at the end");
    host.done
}

fn check(done: Done) {
    println!("{done:?}");
    let Done {
        prefills,
        decodes,
        forks,
        preemptions,
        resumes,
        rollbacks,
        drafts,
        promises,
        followers: _, // None without reuse: see `run`.
        batches,
        aborts,
        finishes,
        refusals,
    } = done;
    let sequences = [prefills, decodes, forks, preemptions, resumes, rollbacks, finishes];
    let calls = [drafts, promises, batches, aborts, refusals];
    let mut all = sequences.iter().chain(&calls);
    assert!(all.all(|&count| count > 3), "too little happened: {done:?}");
}

#[test]
fn planning_allocates_nothing() {
    for page_size in [1, 4, 16] {
        for prefix in [PrefixMode::Radix, PrefixMode::None] {
            check(run(config(page_size, prefix), Null, 100, |_, _| ()));
        }
    }
}

#[test]
fn groups_of_layers_allocate_nothing() {
    let reaches = [Reach::All, Reach::Window(8), Reach::Chunk(4)];
    let groups = Groups::new(&reaches, &[0, 1, 2]).expect("each has a layer");
    for page_size in [1, 4] {
        for prefix in [PrefixMode::Radix, PrefixMode::None] {
            let plain = config(page_size, prefix);
            let pool = PoolConfig { layers: 3, groups, ..plain.pool };
            check(run(EngineConfig { pool, ..plain }, Null, 50, |_, _| ()));
        }
    }
}

#[test]
fn hashes_and_events_allocate_nothing() {
    for &hashing in Hashing::ALL {
        // The event buffer has space for few pages, so that some drains emit the whole tree, or for all pages.
        for event_pages in [8, 1000] {
            let plain = config(4, PrefixMode::Radix);
            let config = EngineConfig { hashing: Some(hashing), event_pages, ..plain };
            check(run(config, Null, 20, |_, _| ()));
        }
    }
}

#[test]
fn host_memory_and_stores_allocate_nothing() {
    for page_size in [1, 4] {
        let plain = config(page_size, PrefixMode::Radix);
        let pool = PoolConfig { host_pages: 64, stage_pages: 4, ..plain.pool };
        let config = EngineConfig { hashing: Hashing::ALL.first().copied(), pool, ..plain };
        check(run(config, Null, 50, |_, _| ()));
    }
}

#[test]
fn host_memory_with_groups_allocates_nothing() {
    let reaches = [Reach::All, Reach::Window(8), Reach::Chunk(4)];
    let groups = Groups::new(&reaches, &[0, 1, 2, 2]).expect("each has a layer");
    for page_size in [1, 4] {
        let plain = config(page_size, PrefixMode::Radix);
        let pool = PoolConfig { layers: 4, groups, host_pages: 64, ..plain.pool };
        check(run(EngineConfig { pool, ..plain }, Null, 50, |_, _| ()));
    }
}

#[test]
fn storing_on_the_cpu_allocates_nothing() {
    let rows = [0.5_f32; 2 * 64 * SEQUENCES];
    let plain = config(4, PrefixMode::Radix);
    let fp8 = |scaling| {
        let pool = PoolConfig { dtype: KvDtype::Fp8E4M3, scaling, ..plain.pool };
        EngineConfig { pool, ..plain }
    };
    for config in [plain, fp8(Scaling::Static), fp8(Scaling::ByToken)] {
        check(run(config, CpuOptions::with_threads(1), 50, |cpu, plan| {
            let rows = &rows[..2 * plan.token_count()];
            cpu.store_cache(plan, LayerId::new(0), rows.into(), rows.into())
                .expect("the plan is sound");
        }));
    }
}

/// The buffer of a commit's pages has the size of one sequence.
#[test]
fn a_commit_of_more_pages_than_a_sequence_has_allocates_nothing() {
    let config = EngineConfig { max_sequence_len: 4 * 8, ..config(4, PrefixMode::Radix) };
    let mut engine = Engine::new(config, Null).expect("a valid config");
    let mut scratch = StepScratch::new();
    let items: Vec<Extend> = (0..SEQUENCES as u64)
        .map(|own| {
            let prompt: Vec<_> = (0..4 * 8).map(|i| TokenId::new((own + i) as u32)).collect();
            let admitted = engine.admit(Namespace::new(own), &prompt, 0);
            Extend { seq: admitted.expect("there is room"), len: 4 * 8 }
        })
        .collect();
    let step = engine.plan_batch(&mut scratch, &items).expect("there is room").step();
    let before = calls();
    engine.commit(step).expect("it is open");
    assert_eq!(calls() - before, 0, "a commit has called the allocator");
    assert_eq!(engine.stats().cached_pages, PAGES);
    engine.verify().expect("it is sound");
}

#[test]
fn the_allocator_is_counted() {
    let before = calls();
    let boxed = std::hint::black_box(Box::new(1));
    assert_eq!(calls() - before, 1);
    drop(boxed);
}
