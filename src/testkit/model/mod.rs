//! The naive model of an engine: the result of every call, and the state after it.
//!
//! It is written from ARCHITECTURE.md and the documentation of `Engine`, not from the engine's code. It is slow on
//! purpose: it searches where the engine has an index, and counts where the engine keeps counters.

mod admission;
mod cells;
mod draft;
mod leader;
mod open_moves;
mod pages;
mod sequence;
mod states;
mod step;
mod stores;
mod swap;
mod swap_pages;
mod tree;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

pub use admission::AdmissionWant;
pub use open_moves::RecordWant;
pub use pages::{PageIs, Pages};
pub use step::{PlanWant, RowWant};
pub use stores::{FetchWant, LookupWant, PutWant};
use tree::Tree;

use crate::config::{EngineShape, PrefixMode};
use crate::error::Error;
use crate::id::{Namespace, PageId, Scope, SeqKey, StepId, TokenId};
use crate::layout::Reach;
use crate::stats::Stats;
use leader::Front;
use step::Step;

/// The expected result of a fork.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ForkWant {
    /// Source and target of each copy of a partly filled last page.
    pub copies: Vec<(PageId, PageId)>,
    /// The step of the copies.
    pub step: Option<StepId>,
}

#[derive(Clone, Debug)]
struct Sequence {
    scope: Scope,
    tokens: Vec<TokenId>,
    cached_len: usize,
    planned_len: usize,
    /// Number of pages at the head of `table` that the tree owns and this sequence locks.
    published: usize,
    /// Number of pages after the published ones that the sequence's lock covers and `table` lacks, until the load.
    pending: usize,
    /// Number of pending pages that were on the device when it began to wait.
    on_device: usize,
    /// Number of pages of its tails' cells that were in swap memory alone when it began to wait.
    cell_pages: usize,
    /// The pages of group 0.
    table: Vec<PageId>,
    /// The pages of each further track. Pages before the place `held` are released; their entries have no meaning.
    others: Vec<Vec<PageId>>,
    /// The first place that the sequence holds in each further track.
    held: Vec<usize>,
    /// For each limited group, the held places whose pages belong to a cell.
    cells: Vec<BTreeSet<usize>>,
    /// Numbers of published pages at which the sequence will keep its tails.
    marks: BTreeSet<usize>,
    /// The marks that the host has added.
    host_marks: BTreeSet<usize>,
    /// The last mark whose tails it has kept.
    kept: usize,
    states: states::States,
    /// Number of places for which pages are promised, including the places of `table`.
    promised: usize,
    preempted: bool,
    front: Option<Front>,
    /// For each removal of tokens, the number of tokens that were left.
    cuts: Vec<usize>,
    /// The admission to count at the commit of the sequence's next step; `None` if it is counted.
    admission_kind: Option<AdmissionKind>,
    /// Counts preemptions: commits and aborts skip items that were planned before the last preemption.
    preemption_epoch: u32,
    /// The last step that planned the sequence or copied its pages since the last preemption; 0: none.
    last_step: u64,
}

impl Sequence {
    /// Takes the pages past the first `keep` places off all tables.
    fn split_off(&mut self, keep: usize) -> Vec<PageId> {
        let keep = keep.min(self.table.len());
        assert!(self.held.iter().all(|&first| first <= keep), "the model gives up a page twice");
        let mut pages = self.table.split_off(keep);
        self.others.iter_mut().for_each(|own| pages.extend(own.split_off(keep)));
        pages
    }
}

/// The way in which a sequence began to run, and the number of tokens that were cached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum AdmissionKind {
    Admitted { prompt_len: usize, hit_len: usize },
    Resumed { hit_len: usize },
}

/// Pages or a lock that a sequence has released.
#[derive(Clone, Debug)]
enum Released {
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

/// The model.
#[derive(Clone, Debug)]
pub struct Model {
    shape: EngineShape,
    pages: Pages,
    tree: Tree,
    sequences: BTreeMap<SeqKey, Sequence>,
    /// Steps that are not complete.
    steps: BTreeMap<u64, Step>,
    /// Released pages and locks, each with the step that it waits for. They return in the order of their release.
    fence: VecDeque<(u64, Released)>,
    last_step: u64,
    completed: u64,
    /// The generation of the next prompt. Without prefix reuse, each prompt has its own.
    generation: u64,
    /// The counters of the statistics that the calls update; `stats` computes the other fields.
    counters: Stats,
    /// Number of items that updated no state in place, because their sequence had lost one.
    pub careful_items: u64,
    /// Number of calls of `update_front`, which is the time stamp of a new front.
    clock: u64,
    /// For each of the next saves and loads, whether the backend fails. Later ones succeed.
    move_failures: VecDeque<bool>,
    /// Whether the last plan or fork failed because its load failed.
    load_failed: bool,
}

impl Model {
    /// Creates the model of a new engine.
    pub fn new(shape: EngineShape) -> Self {
        let page_count = shape.layout.page_count();
        let kept_generation = (shape.prefix == PrefixMode::Radix).then_some(0);
        let mut tree = Tree::new(shape.layout.page_size(), kept_generation);
        tree.keep_groups(&shape.layout);
        if shape.prefix == PrefixMode::Radix {
            let (swap_pages, pages) = (shape.layout.swap_pages(), page_count);
            let entries = (pages + swap_pages) + (pages + swap_pages) / 8;
            let cells: u32 = tree.cell_sizes.iter().map(|&size| (pages + swap_pages) / size as u32).sum();
            let puts = if shape.hashing.is_some() { entries + cells } else { 0 };
            tree.keep_swap(swap_pages, shape.layout.stage_pages(), shape.record_pages, puts as usize);
        }
        Self {
            shape,
            pages: Pages::new(page_count, shape.reserved_pages),
            tree,
            sequences: BTreeMap::new(),
            steps: BTreeMap::new(),
            fence: VecDeque::new(),
            last_step: 0,
            completed: 0,
            generation: 0,
            counters: Stats::default(),
            careful_items: 0,
            clock: 0,
            move_failures: VecDeque::new(),
            load_failed: false,
        }
    }

    fn page_size(&self) -> usize {
        self.shape.layout.page_size() as usize
    }

    fn shares(&self) -> bool {
        self.shape.prefix == PrefixMode::Radix
    }

    /// Returns the number of page tables of a sequence.
    fn tracks(&self) -> usize {
        self.shape.table.tracks as usize
    }

    /// Returns the reach of each further track, and the maximum number of places that a sequence holds in it. The
    /// maximum holds for plans within the config's `promise_ahead`.
    fn reaches(&self) -> Vec<(Reach, usize)> {
        let layout = &self.shape.layout;
        let ahead = self.shape.promise_ahead as usize;
        let of_group = |(group, reach): (u32, Reach)| {
            let back = match reach {
                Reach::Window(size) | Reach::Chunk(size) => size as usize - 1,
                _ => unreachable!("group 0 is not limited"),
            };
            let most = (back + ahead).div_ceil(self.page_size()) + 1;
            (0..layout.tracks_of(group)).map(move |_| (reach, most))
        };
        layout.groups().limited().flat_map(of_group).collect()
    }

    /// Returns the maximum number of pages that a sequence of `places` places holds.
    fn most_pages(&self, places: usize) -> usize {
        let states = if self.shares() { 2 } else { 1 } * self.state_size();
        let tails = self.reaches().iter().map(|&(_, most)| places.min(most)).sum::<usize>();
        places + tails + if places > 0 { states } else { 0 }
    }

    /// Returns the number of outstanding pages of a promise of `promised` places, for a sequence whose page tables have
    /// `len` places.
    ///
    /// Pages of cells count as outstanding: if the sequence gives a cell back, other sequences may still use it. The
    /// places below `kept` have cells.
    fn outstanding_of_promise(&self, promised: usize, len: usize, published: usize, kept: usize) -> usize {
        let others = self.reaches().into_iter().map(|(reach, most)| {
            let held = len - self.tree.first_held(reach, published).max(kept);
            promised.min(most).saturating_sub(held)
        });
        promised.saturating_sub(len) + others.sum::<usize>()
    }

    /// Returns whether there are groups besides group 0.
    fn has_groups(&self) -> bool {
        self.shape.layout.groups().count() > 1
    }

    /// Returns whether commits publish pages.
    fn publishes(&self) -> bool {
        self.shares() || self.tracks() > 1
    }

    /// Returns the tokens of a prompt that may match: at most `at_most`. At least one token must be computed.
    fn findable<'a>(&self, tokens: &'a [TokenId], at_most: u32) -> &'a [TokenId] {
        match tokens.split_last() {
            Some((_, before)) if self.shares() => &before[..before.len().min(at_most as usize)],
            _ => &[],
        }
    }

    // Reading.

    /// Returns the live sequence of a key.
    fn sequence(&self, seq: SeqKey) -> Result<&Sequence, Error> {
        self.sequences.get(&seq).ok_or(Error::UnknownSequence { seq })
    }

    /// Returns the live sequence of a key, if the sequence is not preempted.
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

    /// `Engine::page_runs`, as one list
    pub fn track_table(&self, seq: SeqKey, track: u32) -> Result<&[PageId], Error> {
        let sequence = self.sequence(seq)?;
        Ok(match track {
            0 => &sequence.table,
            track => {
                let track = track as usize - 1;
                &sequence.others[track][sequence.held[track]..]
            }
        })
    }

    /// Returns the scope of a sequence's pages.
    pub fn scope(&self, seq: SeqKey) -> Result<Scope, Error> {
        Ok(self.sequence(seq)?.scope)
    }

    /// Returns whether a sequence is live and preempted.
    pub fn is_preempted(&self, seq: SeqKey) -> bool {
        self.sequence(seq).is_ok_and(|sequence| sequence.preempted)
    }

    /// Returns the number of tokens in a sequence's published and pending pages. `rollback` accepts no smaller length.
    pub fn published_len(&self, seq: SeqKey) -> u32 {
        let pages = self.sequence(seq).map_or(0, |sequence| sequence.published + sequence.pending);
        (pages * self.page_size()) as u32
    }

    /// Returns the state of a page.
    pub fn page(&self, page: PageId) -> PageIs {
        self.pages.state(page)
    }

    /// Returns every page that can match. An item has the page's namespace, all tokens up to its end, whether the
    /// device has the page, and whether swap memory has it.
    pub fn present(&self) -> impl Iterator<Item = (Namespace, &[TokenId], [bool; 2])> {
        self.tree.present()
    }

    /// Returns the cells of all pages that can match, if they have events. An item has the group of a cell, the
    /// namespace of its page, all tokens up to the page's end, and whether the device and swap memory have the cell.
    pub fn present_cells(&self) -> impl Iterator<Item = (u32, (Namespace, &[TokenId], [bool; 2]))> {
        self.tree.present_cells().filter(|_| self.shape.event_cells)
    }

    /// `Engine::outstanding`
    pub fn outstanding(&self, seq: SeqKey) -> Result<u32, Error> {
        let sequence = self.sequence(seq)?;
        let outstanding = self.outstanding_of(sequence, sequence.promised, sequence.published, sequence.kept)
            + self.outstanding_state(sequence, sequence.promised);
        // Locked pages on the device are not outstanding. Pages of cells to load are outstanding.
        let waits = match sequence.promised {
            0 => 0,
            promised => sequence.cell_pages as i64 - sequence.on_device.min(promised) as i64,
        };
        Ok((outstanding as i64 + waits) as u32)
    }

    /// Returns the number of outstanding pages that a sequence would have with a promise of `promised` places. It would
    /// have `published` published pages, and its last kept mark at `kept`.
    fn outstanding_of(&self, sequence: &Sequence, promised: usize, published: usize, kept: usize) -> usize {
        self.outstanding_of_promise(promised, sequence.table.len(), published, kept)
    }

    /// Returns the number of outstanding pages of all sequences.
    fn outstanding_pages(&self) -> u32 {
        self.sequences.keys().filter_map(|&seq| self.outstanding(seq).ok()).sum()
    }

    /// Returns the number of free and evictable pages, promised or not.
    fn reclaimable(&self) -> u32 {
        self.pages.count(PageIs::Free) + self.tree.evictable()
    }

    /// `Engine::available`
    pub fn available(&self) -> u32 {
        self.reclaimable().saturating_sub(self.outstanding_pages())
    }

    /// Returns the maximum number of pages that a call may take if `drawn` of them are promised to it. It may take
    /// promised pages from all free and evictable pages. If it takes more, enough pages must remain for the promises.
    fn takes_at_most(&self, drawn: u32) -> u32 {
        let kept = |taken: u32| self.outstanding_pages() - drawn.min(taken);
        let may = |&taken: &u32| taken <= drawn || self.reclaimable() - taken >= kept(taken);
        (0..=self.reclaimable()).rev().find(may).expect("nothing may always be taken")
    }

    /// `Engine::available_after`: completes the step in a copy of the model.
    pub fn available_after(&self, step: StepId) -> u32 {
        let mut after = self.clone();
        after.open_fence(step.raw());
        after.available()
    }

    /// `Engine::stats`
    pub fn stats(&self) -> Stats {
        let swap = &self.tree.swap;
        let (swap_cached_pages, swap_free_pages) = swap.counts();
        Stats {
            cells: self.tree.cells.len() as u32,
            cell_pages: self.tree.cell_pages_of(|group| group < self.tree.limited.len()),
            state_pages: self.tree.cell_pages_of(|group| group == self.tree.limited.len()),
            evicted_pages: self.tree.evicted.0,
            evicted_cells: self.tree.evicted.1,
            saved_pages: swap.saved,
            forced_pages: swap.forced,
            loaded_pages: swap.loaded,
            swap_evicted_pages: swap.evicted,
            lost_pages: swap.lost,
            failed_saves: swap.failed,
            put_pages: self.tree.stores.done,
            fetched_pages: self.tree.stores.fetched,
            clean_pages: self.tree.clean(),
            swap_cached_pages,
            swap_free_pages,
            free_pages: self.pages.count(PageIs::Free),
            private_pages: self.pages.count(PageIs::Private),
            cached_pages: self.pages.count(PageIs::Cached),
            fenced_pages: self.pages.count(PageIs::Fenced),
            outstanding_pages: self.outstanding_pages(),
            evictable_pages: self.tree.evictable(),
            protected_pages: self.tree.protected(),
            sequences: self.sequences.len() as u32,
            steps: self.steps.len() as u32,
            ..self.counters
        }
    }

    /// Counts a call that fails because a resource is used up. Returns the result of the call.
    pub fn counted<T>(&mut self, result: Result<T, Error>) -> Result<T, Error> {
        use Error::{OutOfPages, OutOfSequences, OutOfSteps, OutOfTokens};
        if let Err(OutOfPages { .. } | OutOfSequences { .. } | OutOfTokens { .. } | OutOfSteps { .. }) = result {
            self.counters.refusals += 1;
        }
        result
    }

    /// Uncounts the last `count` children of a fork, because the backend failed.
    pub fn forget_forks(&mut self, count: usize) {
        self.counters.forks -= count as u64;
    }

    // Pages that are taken and given up.

    /// Checks that a call may take `wanted` pages, of which `drawn` are promised to it.
    fn check_pages(&self, wanted: usize, drawn: usize) -> Result<(), Error> {
        let fits = |model: &Self| wanted <= model.takes_at_most(drawn as u32) as usize;
        if fits(self) {
            return Ok(());
        }
        let after = self.first_after(fits);
        assert!(drawn < wanted || after.is_some(), "a promise is kept when its step is complete");
        let available = self.takes_at_most(drawn as u32).into();
        Err(Error::OutOfPages { wanted: wanted as u64, available, after })
    }

    /// Returns the first step whose completion returns pages or locks and makes `is_well` true. It completes the steps
    /// in a copy of the model.
    fn first_after(&self, is_well: impl Fn(&Self) -> bool) -> Option<StepId> {
        let mut after = self.clone();
        let steps = self.fence.iter().map(|waits| waits.0);
        let steps: BTreeSet<u64> = steps.chain(self.tree.cell_steps()).collect();
        let step = steps.into_iter().find(|&step| {
            after.open_fence(step);
            is_well(&after)
        });
        step.map(StepId::new)
    }

    /// Evicts the shortage, or more because cells move whole. Then takes the lowest free pages.
    fn take_pages(&mut self, count: usize) -> Vec<PageId> {
        let count = count as u32;
        let shortage = count.saturating_sub(self.pages.count(PageIs::Free));
        let evicted = self.tree.evict(shortage);
        self.pages.turn(&evicted, PageIs::Cached, PageIs::Free);
        self.pages.alloc(count)
    }

    /// Releases pages or a lock at once if `last_step` is complete; otherwise adds them to the fence.
    fn release_after(&mut self, last_step: u64, released: Released) {
        if last_step <= self.completed {
            return self.release(released);
        }
        let behind = self.fence.back().map_or(0, |waits| waits.0);
        self.fence.push_back((last_step.max(behind), released));
    }

    fn release_pages_after(&mut self, last_step: u64, pages: Vec<PageId>) {
        if !pages.is_empty() {
            self.pages.turn(&pages, PageIs::Private, PageIs::Fenced);
            self.release_after(last_step, Released::Pages(pages));
        }
    }

    fn release(&mut self, released: Released) {
        match released {
            Released::Pages(pages) => self.pages.turn(&pages, PageIs::Fenced, PageIs::Free),
            Released::Lock(Lock { scope, tokens, pages }) => {
                let gone = self.tree.unlock(scope, &tokens, pages);
                self.pages.turn(&gone, PageIs::Cached, PageIs::Free);
            }
        }
    }

    fn open_fence(&mut self, step: u64) {
        self.tree.complete_cells(step);
        while self.fence.front().is_some_and(|waits| waits.0 <= step) {
            let (_, released) = self.fence.pop_front().expect("the front was seen");
            self.release(released);
        }
    }
}
