//! A random scheduler over a manager: arrivals that share prefixes, chunks, drafts and trims, forks, preemptions,
//! aborts and resets. A memory records the prefix whose K and V each slot has; steps check all slots that they read.

use std::collections::{HashMap, HashSet};

use kvarena::testkit::rng::{Rng, mix};

use super::manager::{BlockManager, NULL_BLOCK, RequestId, Scheduled, StepInputs};
use super::{MAX_REQUESTS, engine_blocks, hash_blocks};
use crate::{is_range, seeds};

const WIDTH: usize = 96;

#[derive(Clone)]
struct Request {
    id: RequestId,
    tokens: Vec<u32>,
    /// Number of tokens with K and V.
    computed: usize,
    /// Number of tokens at which it is finished.
    len: usize,
    /// Whether the last token was sampled and not scheduled yet.
    is_sampled: bool,
}

#[derive(Clone, Copy, Default, Debug)]
struct Counts {
    calls: u64,
    hits: u64,
    prompts: u64,
    reads: u64,
    refused: u64,
    preempted: u64,
    forked: u64,
    copied: u64,
    rejected: u64,
    aborted: u64,
    resets: u64,
}

impl Counts {
    fn add(&mut self, other: &Self) {
        let Self { calls, hits, prompts, reads, refused, preempted, forked, copied, rejected, aborted, resets } = self;
        *calls += other.calls;
        *hits += other.hits;
        *prompts += other.prompts;
        *reads += other.reads;
        *refused += other.refused;
        *preempted += other.preempted;
        *forked += other.forked;
        *copied += other.copied;
        *rejected += other.rejected;
        *aborted += other.aborted;
        *resets += other.resets;
    }
}

struct Host<M> {
    manager: M,
    block_size: usize,
    rng: Rng,
    /// The hash of the prefix that ends at the token of each slot.
    memory: Vec<u64>,
    /// Prompts that requests share parts of.
    prompts: Vec<Vec<u32>>,
    running: Vec<Request>,
    waiting: Vec<Request>,
    /// The whole blocks of every prefix that was ever cached, if no block is ever evicted.
    cached: Option<HashSet<u64>>,
    next: RequestId,
    inputs: StepInputs,
    counts: Counts,
}

/// Returns the hash of each prefix.
fn prefixes(tokens: &[u32]) -> Vec<u64> {
    let next = |hash: &mut u64, &token: &u32| {
        *hash = mix(*hash ^ u64::from(token + 1));
        Some(*hash)
    };
    tokens.iter().scan(0, next).collect()
}

impl<M: BlockManager> Host<M> {
    fn new(manager: M, block_size: usize, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let prompt = |rng: &mut Rng| (0..rng.within(1, 40)).map(|_| rng.below(1000) as u32).collect();
        Self {
            block_size,
            memory: vec![0; (manager.num_usable_blocks() + 1) * block_size],
            manager,
            prompts: (0..5).map(|_| prompt(&mut rng)).collect(),
            rng,
            running: Vec::new(),
            waiting: Vec::new(),
            cached: None,
            next: 1,
            inputs: StepInputs::default(),
            counts: Counts::default(),
        }
    }

    fn new_id(&mut self) -> RequestId {
        self.next += 1;
        self.next
    }

    fn arrive(&mut self) {
        let mut tokens = self.prompts[self.rng.below(5) as usize].clone();
        if self.rng.one_in(4) {
            tokens.truncate(self.rng.within(1, tokens.len() as u64) as usize);
        }
        let tail = self.rng.within(1, 12);
        tokens.extend((0..tail).map(|_| self.rng.below(3) as u32));
        let (id, len) = (self.new_id(), tokens.len() + self.rng.within(1, 24) as usize);
        self.waiting.push(Request { id, tokens, computed: 0, len, is_sampled: false });
    }

    /// Admits waiting requests while they fit.
    fn admit(&mut self) {
        while self.running.len() < 6
            && let Some(request) = self.waiting.last_mut()
        {
            let (id, len) = (request.id, request.tokens.len());
            let hit = self.manager.get_computed_blocks(id, &request.tokens);
            if let Some(cached) = &self.cached {
                let ends = prefixes(&request.tokens[..len - 1]).into_iter().skip(self.block_size - 1);
                let whole = ends.step_by(self.block_size).take_while(|end| cached.contains(end)).count();
                assert_eq!(hit, whole * self.block_size, "the longest cached prefix");
            }
            let fits = self.manager.allocate_slots(id, &request.tokens, len);
            self.counts.calls += 2;
            if !fits {
                self.counts.refused += 1;
                assert!(!self.running.is_empty(), "the pool holds each request");
                return;
            }
            request.computed = hit;
            self.counts.hits += hit as u64;
            self.counts.prompts += len as u64;
            self.running.extend(self.waiting.pop());
        }
    }

    /// Allocates for `len` tokens of the running request `at`, and preempts the youngest ones for it. Returns false if
    /// it preempted itself.
    fn grow(&mut self, at: usize, len: usize) -> bool {
        while at < self.running.len() {
            self.counts.calls += 1;
            if self.manager.allocate_slots(self.running[at].id, &[], len) {
                return true;
            }
            let mut last = self.running.pop().expect("a request runs");
            self.manager.free(last.id);
            last.computed = 0;
            self.waiting.push(last);
            self.counts.calls += 1;
            self.counts.preempted += 1;
        }
        false
    }

    /// Chooses the new tokens of each running request: a chunk, or a sampled token and drafts.
    fn choose(&mut self) -> (Vec<usize>, HashMap<RequestId, usize>) {
        let (mut ends, mut kept) = (Vec::new(), HashMap::new());
        while ends.len() < self.running.len() {
            let at = ends.len();
            let Request { id, computed, ref tokens, .. } = self.running[at];
            let len = tokens.len();
            if len - computed > 1 {
                ends.push(len.min(computed + self.rng.within(1, 16) as usize));
                continue;
            }
            let drafts = if self.rng.one_in(5) { self.rng.within(1, 6) as usize } else { 0 };
            if !self.grow(at, len + drafts) {
                break;
            }
            let rng = &mut self.rng;
            self.running[at].tokens.extend((0..drafts).map(|_| rng.below(3) as u32));
            if drafts > 0 {
                kept.insert(id, len + rng.below(drafts as u64 + 1) as usize);
            }
            ends.push(len + drafts);
        }
        ends.truncate(self.running.len());
        (ends, kept)
    }

    fn step(&mut self) {
        // Without arrivals for a while, the host gets idle.
        let arrivals = self.running.is_empty() || self.counts.calls % 1000 < 600;
        if arrivals && self.waiting.len() < 4 && !self.rng.one_in(3) {
            self.arrive();
        }
        self.admit();
        if self.running.is_empty() {
            assert!(self.manager.reset_prefix_cache());
            self.cached.iter_mut().for_each(HashSet::clear);
            self.counts.calls += 1;
            self.counts.resets += 1;
            return;
        }
        let (mut ends, kept) = self.choose();
        if ends.is_empty() {
            return;
        }
        let scheduled = self.running.clone();
        let items = batch(&scheduled, &ends);
        self.manager.schedule(&items, &mut self.inputs);
        self.compute(&items);
        for (request, end) in self.running.iter_mut().zip(&mut ends) {
            if let Some(&keep) = kept.get(&request.id) {
                self.manager.trim(request.id, keep);
                self.counts.calls += 1;
                self.counts.rejected += (*end - keep) as u64;
                request.tokens.truncate(keep);
                *end = keep;
            }
        }
        let items = batch(&self.running, &ends);
        self.manager.cache_blocks(&items);
        self.counts.calls += 3;
        for (request, end) in self.running.iter_mut().zip(ends) {
            request.computed = end;
            if let Some(cached) = &mut self.cached {
                let ends = prefixes(&request.tokens[..end]).into_iter().skip(self.block_size - 1);
                cached.extend(ends.step_by(self.block_size));
            }
            request.is_sampled = end == request.tokens.len();
            if request.is_sampled {
                request.tokens.push(self.rng.below(3) as u32);
            }
        }
        self.fork();
        self.finish();
    }

    /// Copies blocks, writes the new tokens and reads all tokens, by the slots, the tables and the lists of blocks.
    fn compute(&mut self, batch: &[Scheduled<'_>]) {
        for &[source, target] in &self.inputs.copies {
            let [source, target] = [source, target].map(|block| block as usize * self.block_size);
            self.memory.copy_within(source..source + self.block_size, target);
            self.counts.copied += 1;
        }
        let mut slots = self.inputs.slots.iter();
        for item in batch {
            let prefixes = prefixes(item.tokens);
            for (at, &slot) in (item.start..item.end).zip(slots.by_ref()) {
                self.memory[slot as usize] = prefixes[at];
            }
        }
        assert_eq!(slots.next(), None, "a slot for each new token");
        let mut tables = vec![u32::MAX; batch.len() * WIDTH];
        self.manager.write_block_tables(WIDTH, &mut tables);
        for (item, table) in batch.iter().zip(tables.chunks(WIDTH)) {
            let mut ids = Vec::new();
            self.manager.get_block_ids(item.id, &mut ids);
            assert!(ids.len() >= item.end.div_ceil(self.block_size) && !ids.contains(&NULL_BLOCK));
            assert_eq!(table[..ids.len()], ids);
            assert!(table[ids.len()..].iter().all(|&block| block == NULL_BLOCK));
            for (at, &prefix) in prefixes(&item.tokens[..item.end]).iter().enumerate() {
                let slot = table[at / self.block_size] as usize * self.block_size + at % self.block_size;
                assert_eq!(self.memory[slot], prefix, "token {at} of request {}", item.id);
            }
            self.counts.reads += item.end as u64;
            self.counts.calls += 1;
        }
    }

    /// Forks a running request now and then. The child has another sampled token.
    fn fork(&mut self) {
        if self.running.len() >= MAX_REQUESTS as usize || !self.rng.one_in(6) {
            return;
        }
        let id = self.new_id();
        let parent = self.rng.below(self.running.len() as u64) as usize;
        let mut child = Request { id, ..self.running[parent].clone() };
        self.counts.calls += 1;
        if !self.manager.fork(self.running[parent].id, id) {
            self.counts.refused += 1;
            return;
        }
        if child.is_sampled {
            *child.tokens.last_mut().expect("it has tokens") = 7;
        }
        self.running.push(child);
        self.counts.forked += 1;
    }

    /// Frees the finished requests, and now and then another one.
    fn finish(&mut self) {
        let aborted = self.rng.below(40 * self.running.len() as u64) as usize;
        for at in (0..self.running.len()).rev() {
            if at == aborted || self.running[at].tokens.len() >= self.running[at].len {
                self.counts.aborted += u64::from(at == aborted);
                self.manager.free(self.running.swap_remove(at).id);
                self.counts.calls += 1;
            }
        }
    }

    /// Returns the number of blocks that running requests have.
    fn used(&self) -> usize {
        let mut ids = Vec::new();
        self.running.iter().for_each(|request| self.manager.get_block_ids(request.id, &mut ids));
        ids.into_iter().collect::<HashSet<_>>().len()
    }
}

/// Returns a step of the first running requests.
fn batch<'a>(running: &'a [Request], ends: &[usize]) -> Vec<Scheduled<'a>> {
    let of = |(request, &end): (&'a Request, &usize)| Scheduled {
        id: request.id,
        tokens: &request.tokens,
        start: request.computed,
        end,
    };
    running.iter().zip(ends).map(of).collect()
}

/// Runs schedules with `calls` calls of the manager for all seeds together.
fn run<M: BlockManager>(calls: u64, new: impl Fn(usize, usize) -> M, check: impl Fn(&Host<M>)) -> Counts {
    let (mut total, seeds) = (Counts::default(), seeds(8, 8));
    for seed in seeds {
        let block_size = [1, 4, 16][seed as usize % 3];
        let mut host = Host::new(new(192 / block_size, block_size), block_size, seed);
        while host.counts.calls < calls / 8 {
            host.step();
            check(&host);
        }
        total.add(&host.counts);
    }
    println!("{total:?}");
    let Counts { hits, refused, preempted, forked, copied, rejected, aborted, resets, .. } = total;
    let rare = [hits, refused, preempted, forked, copied, rejected, aborted, resets].into_iter().min();
    assert!(is_range() || rare > Some(20), "too little happened: {total:?}");
    total
}

#[test]
fn random_schedules_read_the_right_blocks() {
    let plain = run(100_000, hash_blocks, |host| {
        assert_eq!(host.used() + host.manager.num_free_blocks(), host.manager.num_usable_blocks());
    });
    let engine = run(100_000, engine_blocks, |host| {
        let stats = host.manager.engine().stats();
        let taken = host.used() + stats.outstanding_pages as usize;
        assert_eq!(taken + host.manager.num_free_blocks(), host.manager.num_usable_blocks());
        assert_eq!(stats.fenced_pages, 0);
        host.manager.engine().verify().expect("all invariants hold");
    });
    // The schedules differ after the first refusal, so shares are compared, not counts.
    assert!(engine.hits * plain.prompts >= plain.hits * engine.prompts, "{engine:?} {plain:?}");
}

#[test]
fn without_evictions_both_find_the_longest_prefix() {
    fn go(manager: impl BlockManager, block_size: usize) -> Counts {
        let mut host = Host::new(manager, block_size, 7);
        host.cached = Some(HashSet::new());
        while host.counts.calls < 10_000 {
            host.step();
        }
        host.counts
    }
    let [plain, engine] = [go(hash_blocks(30_000, 2), 2), go(engine_blocks(30_000, 2), 2)];
    assert!(plain.hits > 1000 && plain.preempted == 0);
    assert_eq!((plain.hits, plain.prompts, plain.calls), (engine.hits, engine.prompts, engine.calls));
}
