//! The naive model of an engine: what every call must answer and leave behind.
//!
//! Written from the semantics (ARCHITECTURE.md and the documentation of `Engine`), not from the engine's code. It is
//! slow on purpose: it searches where the engine knows, and counts where the engine keeps counters.

mod pages;
mod step;
mod tree;

use std::collections::{BTreeMap, VecDeque};

pub use pages::{PageIs, Pages};
pub use step::{PlanWant, RowWant};
pub use tree::{Published, Tree};

use crate::config::{EngineShape, PrefixMode};
use crate::engine::{Keep, Stats};
use crate::error::Error;
use crate::id::{Namespace, PageId, Scope, SeqKey, StepId, TokenId};
use step::Step;

/// A match that the model made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MatchWant {
    pages: u32,
    changes: u64,
}

impl MatchWant {
    /// Whole pages matched.
    pub fn pages(&self) -> u32 {
        self.pages
    }
}

/// What a fork must answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ForkWant {
    /// Source and target of the tail's copy, and its step.
    pub copy: Option<(PageId, PageId, StepId)>,
}

#[derive(Clone, Debug)]
struct Sequence {
    scope: Scope,
    tokens: Vec<TokenId>,
    cached_len: usize,
    planned_len: usize,
    /// Pages at the head of `table` that are the tree's, locked by this sequence.
    published: usize,
    table: Vec<PageId>,
    preempted: bool,
    /// Counts preemptions: items planned in an earlier life are skipped.
    life: u32,
    /// The last step that planned it or copied for it in this life; 0: none.
    last_step: u64,
}

/// What a sequence gave up.
#[derive(Clone, Debug)]
enum Given {
    Pages(Vec<PageId>),
    Lock(Lock),
}

/// A locked path.
#[derive(Clone, Debug)]
struct Lock {
    scope: Scope,
    tokens: Vec<TokenId>,
    pages: usize,
}

/// An engine without the engineering.
#[derive(Clone, Debug)]
pub struct Model {
    shape: EngineShape,
    pages: Pages,
    tree: Tree,
    sequences: BTreeMap<SeqKey, Sequence>,
    /// Steps that are not complete.
    steps: BTreeMap<u64, Step>,
    /// What waits for steps, in the order it came: nothing returns before what came earlier.
    fence: VecDeque<(u64, Given)>,
    last_step: u64,
    completed: u64,
    /// The era of the next prompt; with prefix reuse off each takes one of its own.
    era: u64,
    hit_tokens: u64,
    computed_tokens: u64,
    evicted_pages: u64,
}

impl Model {
    /// The model of a new engine.
    pub fn new(shape: EngineShape) -> Self {
        let page_count = shape.layout.page_count();
        let kept_era = (shape.prefix == PrefixMode::Radix).then_some(0);
        Self {
            shape,
            pages: Pages::new(page_count),
            tree: Tree::new(shape.layout.page_size(), kept_era),
            sequences: BTreeMap::new(),
            steps: BTreeMap::new(),
            fence: VecDeque::new(),
            last_step: 0,
            completed: 0,
            era: 0,
            hit_tokens: 0,
            computed_tokens: 0,
            evicted_pages: 0,
        }
    }

    fn page_size(&self) -> usize {
        self.shape.layout.page_size() as usize
    }

    fn shares(&self) -> bool {
        self.shape.prefix == PrefixMode::Radix
    }

    // Reading.

    /// The live sequence of a key.
    fn sequence(&self, seq: SeqKey) -> Result<&Sequence, Error> {
        self.sequences.get(&seq).ok_or(Error::UnknownSequence { seq })
    }

    /// The live sequence of a key, if it is not preempted.
    fn running(&self, seq: SeqKey) -> Result<&Sequence, Error> {
        let sequence = self.sequence(seq)?;
        if sequence.preempted { Err(Error::Preempted { seq }) } else { Ok(sequence) }
    }

    /// `Engine::cached_len`
    pub fn cached_len(&self, seq: SeqKey) -> Result<u32, Error> {
        Ok(self.sequence(seq)?.cached_len as u32)
    }

    /// `Engine::planned_len`
    pub fn planned_len(&self, seq: SeqKey) -> Result<u32, Error> {
        Ok(self.sequence(seq)?.planned_len as u32)
    }

    /// `Engine::tokens`
    pub fn tokens(&self, seq: SeqKey) -> Result<&[TokenId], Error> {
        Ok(&self.sequence(seq)?.tokens)
    }

    /// `Engine::page_table`
    pub fn page_table(&self, seq: SeqKey) -> Result<&[PageId], Error> {
        Ok(&self.sequence(seq)?.table)
    }

    /// The scope a sequence's pages belong to.
    pub fn scope(&self, seq: SeqKey) -> Result<Scope, Error> {
        Ok(self.sequence(seq)?.scope)
    }

    /// Whether a live sequence is preempted.
    pub fn is_preempted(&self, seq: SeqKey) -> bool {
        self.sequence(seq).is_ok_and(|sequence| sequence.preempted)
    }

    /// The shortest length that `rollback` takes.
    pub fn published_len(&self, seq: SeqKey) -> u32 {
        self.sequence(seq).map_or(0, |sequence| sequence.published * self.page_size()) as u32
    }

    /// The state of a page.
    pub fn page(&self, page: PageId) -> PageIs {
        self.pages.state(page)
    }

    /// `Engine::available`
    pub fn available(&self) -> u32 {
        self.pages.count(PageIs::Free) + self.tree.evictable()
    }

    /// `Engine::available_after`, found by doing it.
    pub fn available_after(&self, step: StepId) -> u32 {
        let mut after = self.clone();
        after.open_fence(step.raw());
        after.available()
    }

    /// `Engine::stats`
    pub fn stats(&self) -> Stats {
        Stats {
            hit_tokens: self.hit_tokens,
            computed_tokens: self.computed_tokens,
            evicted_pages: self.evicted_pages,
            free_pages: self.pages.count(PageIs::Free),
            private_pages: self.pages.count(PageIs::Private),
            cached_pages: self.pages.count(PageIs::Cached),
            fenced_pages: self.pages.count(PageIs::Fenced),
            evictable_pages: self.tree.evictable(),
            protected_pages: self.tree.protected(),
            sequences: self.sequences.len() as u32,
            steps: self.steps.len() as u32,
        }
    }

    // Pages that are taken and given up.

    fn check_pages(&self, wanted: usize, available: u32) -> Result<(), Error> {
        if wanted as u64 > u64::from(available) {
            let available = available.into();
            return Err(Error::OutOfPages { wanted: wanted as u64, available });
        }
        Ok(())
    }

    /// Evicts exactly the shortage, then takes the lowest free pages.
    fn take_pages(&mut self, count: usize) -> Vec<PageId> {
        let count = count as u32;
        let shortage = count.saturating_sub(self.pages.count(PageIs::Free));
        let evicted = self.tree.evict(shortage);
        self.pages.turn(&evicted, PageIs::Cached, PageIs::Free);
        self.evicted_pages += u64::from(shortage);
        self.pages.alloc(count)
    }

    /// What a sequence gives up returns at once if `last_step` is complete, else when it is.
    fn give_up(&mut self, last_step: u64, given: Given) {
        if last_step <= self.completed {
            return self.give_back(given);
        }
        let behind = self.fence.back().map_or(0, |waits| waits.0);
        self.fence.push_back((last_step.max(behind), given));
    }

    fn give_up_pages(&mut self, last_step: u64, pages: Vec<PageId>) {
        if !pages.is_empty() {
            self.pages.turn(&pages, PageIs::Private, PageIs::Fenced);
            self.give_up(last_step, Given::Pages(pages));
        }
    }

    fn give_back(&mut self, given: Given) {
        match given {
            Given::Pages(pages) => self.pages.turn(&pages, PageIs::Fenced, PageIs::Free),
            Given::Lock(Lock { scope, tokens, pages }) => {
                let gone = self.tree.unlock(scope, &tokens, pages);
                self.pages.turn(&gone, PageIs::Cached, PageIs::Free);
            }
        }
    }

    fn open_fence(&mut self, step: u64) {
        while self.fence.front().is_some_and(|waits| waits.0 <= step) {
            let (_, given) = self.fence.pop_front().expect("the front was seen");
            self.give_back(given);
        }
    }

    // Matching and admission.

    fn next_scope(&self, namespace: Namespace) -> Scope {
        Scope { namespace, era: self.era }
    }

    /// `Engine::match_prefix`
    pub fn match_prefix(&self, namespace: Namespace, prompt: &[TokenId]) -> MatchWant {
        let scope = self.next_scope(namespace);
        let pages = self.tree.matched(scope, all_but_last(prompt)).len() as u32;
        MatchWant { pages, changes: self.tree.changes() }
    }

    /// `Engine::admit_match`, with `key` as in [`Model::admit`].
    pub fn admit_match(
        &mut self,
        key: SeqKey,
        found: &MatchWant,
        namespace: Namespace,
        prompt: &[TokenId],
    ) -> Result<(), Error> {
        if found.changes != self.tree.changes() {
            return Err(Error::Stale);
        }
        self.admit(key, namespace, prompt)
    }

    /// `Engine::admit`, where the engine has answered with `key`, if with a sequence at all.
    pub fn admit(
        &mut self,
        key: SeqKey,
        namespace: Namespace,
        prompt: &[TokenId],
    ) -> Result<(), Error> {
        if prompt.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        let (len, max) = (prompt.len() as u64, u64::from(self.shape.max_sequence_len));
        if len > max {
            return Err(Error::TooLong { len, max });
        }
        if self.sequences.len() as u32 == self.shape.table.rows {
            return Err(Error::OutOfSequences { max: self.shape.table.rows });
        }
        self.check_tokens(prompt.len().div_ceil(self.chunk_tokens()), prompt.len())?;
        let scope = self.next_scope(namespace);
        let pages = self.tree.matched(scope, all_but_last(prompt)).len();
        self.check_rest(scope, prompt, pages)?;
        let sequence = Sequence {
            scope,
            tokens: prompt.to_vec(),
            cached_len: 0,
            planned_len: 0,
            published: 0,
            table: Vec::new(),
            preempted: false,
            life: 0,
            last_step: 0,
        };
        self.sequences.insert(key, sequence);
        self.begin_with(key, scope, pages);
        Ok(())
    }

    /// Whether what `pages` matched pages leave to compute can fit, once they are locked.
    fn check_rest(&self, scope: Scope, tokens: &[TokenId], pages: usize) -> Result<(), Error> {
        let rest = tokens.len().div_ceil(self.page_size()) - pages;
        self.check_pages(rest, self.available() - self.tree.idle_on_path(scope, tokens, pages))
    }

    /// A sequence without pages begins with the first `pages` of its tokens' path.
    fn begin_with(&mut self, key: SeqKey, scope: Scope, pages: usize) {
        let len = pages * self.page_size();
        let sequence = self.sequences.get_mut(&key).expect("the row was just made or seen");
        self.tree.lock(scope, &sequence.tokens, pages);
        sequence.table = self.tree.matched(scope, &sequence.tokens[..len]);
        sequence.scope = scope;
        sequence.published = pages;
        sequence.cached_len = len;
        sequence.planned_len = len;
        sequence.preempted = false;
        self.hit_tokens += len as u64;
        if !self.shares() {
            self.era += 1;
        }
    }

    // The sequence's own calls.

    /// `Engine::append`
    pub fn append(&mut self, seq: SeqKey, tokens: &[TokenId]) -> Result<(), Error> {
        let sequence = self.sequence(seq)?;
        let len = (sequence.tokens.len() + tokens.len()) as u64;
        let max = u64::from(self.shape.max_sequence_len);
        if len > max {
            return Err(Error::TooLong { len, max });
        }
        self.check_tokens(self.chunks_lacking(sequence, len as usize), tokens.len())?;
        let sequence = self.sequences.get_mut(&seq).expect("seen above");
        sequence.tokens.extend_from_slice(tokens);
        Ok(())
    }

    fn chunk_tokens(&self) -> usize {
        self.shape.table.chunk_pages as usize * self.page_size()
    }

    /// Chunks of the page tables that a sequence has.
    fn chunks(&self, sequence: &Sequence) -> usize {
        let tokens = sequence.tokens.len().max(sequence.table.len() * self.page_size());
        tokens.div_ceil(self.chunk_tokens())
    }

    /// Chunks that a sequence lacks to have `len` tokens.
    fn chunks_lacking(&self, sequence: &Sequence, len: usize) -> usize {
        len.div_ceil(self.chunk_tokens()).saturating_sub(self.chunks(sequence))
    }

    /// Whether `chunks` more fit. `wanted` is how many tokens the call stores.
    fn check_tokens(&self, chunks: usize, wanted: usize) -> Result<(), Error> {
        let used: usize = self.sequences.values().map(|sequence| self.chunks(sequence)).sum();
        let free = self.shape.table.chunk_count as usize - used;
        if chunks > free {
            let available = (free * self.chunk_tokens()) as u64;
            return Err(Error::OutOfTokens { wanted: wanted as u64, available });
        }
        Ok(())
    }

    /// Publishes the whole pages below what is known and computed.
    ///
    /// A chunk at a time, which shows only in what becomes stale: the second piece grows the leaf of the first.
    fn publish(&mut self, seq: SeqKey) {
        let page_size = self.page_size();
        let chunk_pages = self.shape.table.chunk_pages as usize;
        let sequence = self.sequences.get_mut(&seq).expect("the caller has checked");
        let end = sequence.cached_len.min(sequence.tokens.len()) / page_size;
        let mut duplicates = Vec::new();
        while sequence.published < end {
            let start = sequence.published;
            let stop = end.min((start / chunk_pages + 1) * chunk_pages);
            let own = &sequence.table[start..stop];
            let published = self.tree.insert(sequence.scope, &sequence.tokens, start, own);
            sequence.table[start..stop].copy_from_slice(&published.table);
            sequence.published = stop;
            self.pages.turn(&published.taken, PageIs::Private, PageIs::Cached);
            duplicates.extend(published.duplicates);
        }
        let last_step = sequence.last_step;
        self.give_up_pages(last_step, duplicates);
    }

    /// A sequence gives up its pages past the first `keep`, none of them published.
    fn trim(&mut self, seq: SeqKey, keep: usize) {
        let sequence = self.sequences.get_mut(&seq).expect("the caller has checked");
        assert!(keep >= sequence.published, "the model trims what is published");
        let pages = sequence.table.split_off(keep.min(sequence.table.len()));
        let last_step = sequence.last_step;
        self.give_up_pages(last_step, pages);
    }

    /// A sequence gives up all its pages and its lock.
    fn let_go(&mut self, seq: SeqKey) {
        let sequence = self.sequences.get_mut(&seq).expect("the caller has checked");
        let pages = sequence.table.split_off(sequence.published);
        sequence.table.clear();
        let lock = Lock {
            scope: sequence.scope,
            tokens: sequence.tokens.clone(),
            pages: std::mem::take(&mut sequence.published),
        };
        let last_step = sequence.last_step;
        self.give_up_pages(last_step, pages);
        self.give_up(last_step, Given::Lock(lock));
    }

    /// `Engine::finish_with`
    pub fn finish(&mut self, seq: SeqKey, keep: Keep) -> Result<(), Error> {
        if !self.sequence(seq)?.preempted {
            if keep == Keep::Publish && self.shares() {
                self.publish(seq);
            }
            self.let_go(seq);
        }
        self.sequences.remove(&seq);
        Ok(())
    }

    /// `Engine::preempt`
    pub fn preempt(&mut self, seq: SeqKey, keep: Keep) -> Result<(), Error> {
        self.running(seq)?;
        if keep == Keep::Publish && self.shares() {
            self.publish(seq);
        }
        self.let_go(seq);
        let sequence = self.sequences.get_mut(&seq).expect("seen above");
        sequence.preempted = true;
        sequence.life += 1;
        sequence.last_step = 0;
        sequence.cached_len = 0;
        sequence.planned_len = 0;
        Ok(())
    }

    /// `Engine::resume`
    pub fn resume(&mut self, seq: SeqKey) -> Result<(), Error> {
        let sequence = self.sequence(seq)?;
        if !sequence.preempted {
            return Err(Error::NotPreempted { seq });
        }
        // It begins anew: in the present era, or with prefix reuse off in one of its own.
        let scope = self.next_scope(sequence.scope.namespace);
        let pages = self.tree.matched(scope, all_but_last(&sequence.tokens)).len();
        self.check_rest(scope, &sequence.tokens, pages)?;
        self.begin_with(seq, scope, pages);
        Ok(())
    }

    /// `Engine::rollback`
    pub fn rollback(&mut self, seq: SeqKey, len: u32) -> Result<(), Error> {
        let sequence = self.sequence(seq)?;
        let min = (self.published_len(seq)).max(1);
        let max = sequence.tokens.len() as u32;
        if !(min..=max).contains(&len) {
            return Err(Error::RollbackLen { len, min, max });
        }
        let sequence = self.sequences.get_mut(&seq).expect("seen above");
        let (life, len) = (sequence.life, len as usize);
        sequence.tokens.truncate(len);
        sequence.cached_len = sequence.cached_len.min(len);
        sequence.planned_len = sequence.planned_len.min(len);
        let keep = sequence.planned_len.div_ceil(self.page_size());
        for step in self.steps.values_mut() {
            step.cap(seq, life, len);
        }
        self.trim(seq, keep);
        Ok(())
    }

    /// `Engine::fork`, with `key` as in [`Model::admit`].
    pub fn fork(&mut self, key: SeqKey, seq: SeqKey) -> Result<ForkWant, Error> {
        let parent = self.running(seq)?;
        let page_size = self.page_size();
        let len = parent.cached_len.min(parent.tokens.len());
        let (pages, tail) = (len / page_size, len % page_size);
        if self.sequences.len() as u32 == self.shape.table.rows {
            return Err(Error::OutOfSequences { max: self.shape.table.rows });
        }
        self.check_tokens(parent.tokens.len().div_ceil(self.chunk_tokens()), parent.tokens.len())?;
        if tail > 0 {
            self.check_steps()?;
            self.check_pages(1, self.available())?;
        }
        // The tail's page is taken first: publishing may put idle pages to use.
        let target = self.take_pages(usize::from(tail > 0)).pop();
        self.publish(seq);
        let step = target.map(|_| self.new_step(Step::copy()));
        let parent = self.sequences.get_mut(&seq).expect("seen above");
        parent.last_step = step.unwrap_or(parent.last_step);
        let mut child = parent.clone();
        child.cached_len = len;
        child.planned_len = len;
        child.table.truncate(pages);
        child.table.extend(target);
        child.life = 0;
        child.last_step = step.unwrap_or(0);
        let source = parent.table.get(pages).copied();
        self.tree.lock(child.scope, &child.tokens, pages);
        self.sequences.insert(key, child);
        let copy = target.zip(source).zip(step);
        Ok(ForkWant {
            copy: copy.map(|((target, source), step)| (source, target, StepId::new(step))),
        })
    }

    /// `Engine::reset`
    pub fn reset(&mut self) {
        if self.shares() {
            self.era += 1;
        }
        let gone = self.tree.reset(self.shares().then_some(self.era));
        self.pages.turn(&gone, PageIs::Cached, PageIs::Free);
    }
}

/// What a prompt may find in the tree: one token must be computed.
fn all_but_last(tokens: &[TokenId]) -> &[TokenId] {
    tokens.split_last().map_or(&[], |(_, before)| before)
}
