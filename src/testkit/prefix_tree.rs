//! Compares the prefix tree with a map that has one entry for each page.

use std::collections::{HashMap, VecDeque};

use arbitrary::{Arbitrary, Result as Drawn, Unstructured};

use super::index::Index;
use super::model::Tree;
use super::op::{SETTINGS, groups};
use super::replay::agree;
use super::rng::{Rng, mix};
use crate::fence::Fence;
use crate::hash::{Hashing, NamespaceNames};
use crate::id::{Namespace, PageId, PrefixLock, Scope, StepId, TokenId};
use crate::layout::{Limits, PoolConfig, PoolLayout};
use crate::prefix::{PrefixMatch, PrefixTree, TreeShape};
use cells::Cells;

/// A text with two authors: the first author up to the token `cut`, the second author from there on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Arbitrary)]
pub struct Text {
    /// The namespace, modulo 2.
    pub namespace: u8,
    /// The first author, modulo 3.
    pub head: u8,
    /// The second author, modulo 3.
    pub tail: u8,
    /// Token at which the second author begins, modulo the length plus one.
    pub cut: u16,
    /// Number of tokens, modulo those of half the pages and a few more.
    pub len: u16,
}

/// One call on a prefix tree.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Arbitrary)]
pub enum PrefixOp {
    /// `match_prefix` and `lock`.
    Lock {
        /// The text to match.
        text: Text,
    },
    /// `match_prefix`, whose result is kept.
    Match {
        /// The text to match.
        text: Text,
    },
    /// `lock` of an earlier match, which may be stale.
    LockKept {
        /// The match, modulo the kept ones.
        pick: u8,
    },
    /// `lock_private`
    LockPrivate {
        /// The namespace, modulo 2.
        namespace: u8,
    },
    /// `lock_again`
    LockAgain {
        /// The lock, modulo the held ones.
        pick: u8,
    },
    /// `insert`
    Insert {
        /// The lock, modulo the held ones.
        pick: u8,
        /// The author of the next tokens, modulo 3.
        author: u8,
        /// Number of pages, modulo about a quarter of all pages and limited by the free ones.
        pages: u8,
    },
    /// `unlock`, or `defer_unlock` if a cell that the lock has released still waits for a step.
    Unlock {
        /// The lock, modulo the held ones.
        pick: u8,
    },
    /// `defer_unlock`
    DeferUnlock {
        /// The lock, modulo the held ones.
        pick: u8,
        /// The step that the lock waits for, modulo 2: the last announced step, or the next one.
        later: u8,
    },
    /// `unlock_deferred` of all locks that wait for the steps that become complete.
    Complete {
        /// Number of steps that become complete, modulo 3.
        steps: u8,
    },
    /// `evict`
    Evict {
        /// Number of pages, modulo the evictable ones plus one.
        count: u16,
    },
    /// `reset`
    Reset,
    /// Uses the cells of the tails at the end of a lock's pages, and creates missing cells.
    Keep {
        /// The lock, modulo the held ones.
        pick: u8,
    },
    /// `release_cell` of all cells that a lock uses.
    ReleaseCells {
        /// The lock, modulo the held ones.
        pick: u8,
        /// A multiple of 3 releases the cells at once. Other values release them once a step is complete; the replay
        /// chooses this step as in [`PrefixOp::DeferUnlock`].
        later: u8,
    },
}

/// Config of the tree.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PrefixConfig {
    /// Number of pages.
    pub pages: u32,
    /// Number of tokens of a page.
    pub page_size: u32,
    /// Bits of the child table's hashes; fewer than 32, so that a failure is reproducible.
    pub hash_bits: u32,
    /// 0: no hashes; else the [`Hashing`], modulo those that use names.
    pub hashing: u8,
    /// Capacity of the event buffer in pages, if pages are hashed; 0 for no events.
    pub event_pages: u8,
    /// 0: one group of layers; else a setting of `op::groups`.
    pub groups: u8,
}

impl PrefixConfig {
    fn layout(&self) -> PoolLayout {
        let (groups, page_size) = (groups(self.groups), self.page_size);
        let pool = PoolConfig { layers: groups.layers(), groups, page_size, ..PoolConfig::default() };
        pool.layout().expect("a small pool")
    }

    fn hashing(&self) -> Option<Hashing> {
        let with_names = || Hashing::ALL.iter().copied().filter(|hashing| hashing.uses_names());
        let index = usize::from(self.hashing).checked_sub(1)?;
        with_names().nth(index % with_names().count().max(1))
    }
}

fn names(namespace: Namespace) -> NamespaceNames {
    let salt = (namespace != Namespace::default()).then(|| namespace.raw().to_string());
    NamespaceNames { salt, ..NamespaceNames::default() }
}

impl<'a> Arbitrary<'a> for PrefixConfig {
    fn arbitrary(u: &mut Unstructured<'a>) -> Drawn<Self> {
        Ok(Self {
            pages: if u.ratio(1, 4)? { u.int_in_range(60..=300)? } else { u.int_in_range(1..=40)? },
            page_size: u.int_in_range(1..=3)?,
            hash_bits: *u.choose(&[2, 2, 1, 31])?,
            hashing: u.int_in_range(0..=3)?,
            event_pages: *u.choose(&[0, 1, 10, 200])?,
            groups: u.int_in_range(0..=SETTINGS)?,
        })
    }
}

/// Returns a seeded config and list of ops.
pub fn prefix_ops(seed: u64, count: usize) -> (PrefixConfig, Vec<PrefixOp>) {
    let mut rng = Rng::new(seed);
    let config = PrefixConfig {
        pages: if rng.one_in(4) { rng.within(60, 300) } else { rng.within(1, 40) } as u32,
        page_size: rng.within(1, 3) as u32,
        hash_bits: rng.pick(&[2, 2, 1, 31]),
        hashing: (seed % 4) as u8,
        event_pages: [200, 1, 10, 0][(seed / 4 % 4) as usize],
        groups: if seed.is_multiple_of(2) { 0 } else { (1 + seed / 2 % u64::from(SETTINGS)) as u8 },
    };
    let usual = [6, 2, 2, 1, 2, 10, 6, 4, 4, 2, 0, 0, 0];
    let mut weights = usual.map(|usual: u64| usual * rng.within(0, 3));
    weights[5] += 5;
    weights[10] = rng.pick(&[0, 0, 1]);
    if config.groups > 0 {
        (weights[11], weights[12]) = (10, 3);
    }
    let ops = (0..count).map(|_| prefix_op(&mut rng, &weights)).collect();
    (config, ops)
}

fn prefix_op(rng: &mut Rng, weights: &[u64]) -> PrefixOp {
    let (cut, len, count) = (rng.bits() as u16, rng.bits() as u16, rng.bits() as u16);
    let count = count >> rng.below(16);
    let mut byte = || rng.bits() as u8;
    let text = Text { namespace: byte() / 192, head: byte(), tail: byte(), cut, len };
    let pages = byte();
    let (pick, other) = (byte(), byte());
    match rng.weighted(weights) {
        0 => PrefixOp::Lock { text },
        1 => PrefixOp::Match { text },
        2 => PrefixOp::LockKept { pick },
        3 => PrefixOp::LockPrivate { namespace: pick },
        4 => PrefixOp::LockAgain { pick },
        5 => PrefixOp::Insert { pick, author: other, pages },
        6 => PrefixOp::Unlock { pick },
        7 => PrefixOp::DeferUnlock { pick, later: other },
        8 => PrefixOp::Complete { steps: other },
        9 => PrefixOp::Evict { count },
        11 => PrefixOp::Keep { pick },
        12 => PrefixOp::ReleaseCells { pick, later: other },
        _ => PrefixOp::Reset,
    }
}

/// A lock in the tree and in the model, and the cells that it uses.
struct Held {
    lock: PrefixLock,
    scope: Scope,
    tokens: Vec<TokenId>,
    cells: Cells,
    /// The last step that a cell released by this lock waits for.
    last_step: StepId,
}

impl Held {
    fn new(lock: PrefixLock, scope: Scope, tokens: Vec<TokenId>) -> Self {
        Self { lock, scope, tokens, cells: Cells::new(), last_step: StepId::default() }
    }
}

struct Kept {
    found: PrefixMatch,
    scope: Scope,
    tokens: Vec<TokenId>,
    changes: u64,
}

struct Both {
    config: PrefixConfig,
    tree: PrefixTree,
    model: Tree,
    free: Vec<PageId>,
    held: Vec<Held>,
    fence: Fence,
    /// Scopes and prefixes of the locks in the fence.
    deferred: VecDeque<(StepId, Scope, Vec<TokenId>)>,
    kept: VecDeque<Kept>,
    generation: u64,
    generations: u64,
    completed: u64,
    announced: u64,
    last: Option<Text>,
    index: Index,
}

/// Replays ops on a tree.
///
/// # Errors
/// The first op after which tree and model differ, and the difference.
pub fn replay_prefix(config: PrefixConfig, ops: &[PrefixOp]) -> Result<(), String> {
    let mut both = Both::new(config);
    // Comparing a large tree is expensive, so it happens less often.
    let compared = 1 + config.pages as usize / 512;
    for (index, op) in ops.iter().enumerate() {
        let turn = (index + 1).is_multiple_of(compared) || index + 1 == ops.len();
        let done = both.apply(*op).and_then(|()| both.listen());
        let done = done.and_then(|()| if turn { both.compare() } else { Ok(()) });
        done.map_err(|what| format!("op {index}, {op:?}: {what}"))?;
    }
    Ok(())
}

/// Maximum number of locks.
const LOCKS: usize = 12;
const MAX_STEPS: u64 = 4;

fn token(author: u8, position: usize) -> TokenId {
    TokenId::new((mix(u64::from(author % 3) << 32 | position as u64) % 2) as u32)
}

/// Returns the pages in ascending order, because a call may release them in any order.
fn sorted(pages: &[PageId]) -> Vec<PageId> {
    let mut pages = pages.to_vec();
    pages.sort();
    pages
}

impl Both {
    fn new(config: PrefixConfig) -> Self {
        let PrefixConfig { pages, page_size, hash_bits, .. } = config;
        let mut shape = TreeShape::new(pages, page_size, hash_bits);
        (shape.hashing, shape.event_pages) = (config.hashing(), config.event_pages.into());
        let mut model = Tree::new(page_size, Some(0));
        if config.groups > 0 {
            let layout = config.layout();
            (shape.limits, shape.max_steps) = (Limits::new(&layout, 0), MAX_STEPS as u32);
            model.keep_groups(&layout);
        }
        let mut tree = PrefixTree::of_shape(&shape).expect("memory");
        let other = Namespace::new(1);
        tree.names.name(other, names(other)).expect("no other namespace has names");
        Self {
            config,
            tree,
            model,
            free: (0..pages).rev().map(PageId::new).collect(),
            held: Vec::new(),
            fence: Fence::new(pages, MAX_STEPS as u32, LOCKS as u64).expect("memory"),
            deferred: VecDeque::new(),
            kept: VecDeque::new(),
            generation: 0,
            generations: 1,
            completed: 0,
            announced: 0,
            last: None,
            index: Index::new(page_size),
        }
    }

    fn text(&self, text: Text) -> (Scope, Vec<TokenId>) {
        let namespace = Namespace::new(u64::from(text.namespace % 2));
        let PrefixConfig { pages, page_size, .. } = self.config;
        let len = usize::from(text.len) % ((pages / 2 + 2) * page_size + 2) as usize;
        let cut = usize::from(text.cut) % (len + 1);
        let author = |i| if i < cut { text.head } else { text.tail };
        let tokens = (0..len).map(|i| token(author(i), i)).collect();
        (Scope { namespace, generation: self.generation }, tokens)
    }

    fn pick(&self, pick: u8) -> Option<usize> {
        (!self.held.is_empty()).then(|| usize::from(pick) % self.held.len())
    }

    fn find(&self, text: Text) -> Result<Kept, String> {
        let (scope, mut tokens) = self.text(text);
        let mut pages = Vec::new();
        let found = self.tree.match_pages(scope.namespace, &tokens, |piece| pages.extend_from_slice(piece));
        let want = self.model.matched(scope, &tokens);
        let hit = self.model.hit(scope, &tokens);
        agree("match_pages", &pages, &want)?;
        agree("full_pages", &(found.full_pages() as usize), &want.len())?;
        agree("pages", &(found.pages() as usize), &hit)?;
        let idle = self.model.idle_on_path(scope, &tokens, hit) + self.model.idle_in_tails(scope, &tokens, hit);
        agree("idle_pages", &self.tree.idle_pages(&found, None), &idle)?;
        if let Some(hashing) = self.config.hashing() {
            let chain = hashing.chain(&names(scope.namespace), &tokens, self.config.page_size);
            let mut hashed = Vec::new();
            let by_hashes = self.tree.match_hashes(&chain, |piece| hashed.extend_from_slice(piece));
            agree("match_hashes", &hashed, &want)?;
            if !want.is_empty() {
                let full = self.tree.match_full(scope.namespace, &tokens);
                agree("the match of match_hashes", &by_hashes, &full)?;
            }
        }
        tokens.truncate(hit * self.config.page_size as usize);
        Ok(Kept { found, scope, tokens, changes: self.model.changes() })
    }

    fn lock(&mut self, kept: Kept) -> Result<(), String> {
        if self.held.len() == LOCKS {
            return Ok(());
        }
        let is_stale = kept.changes != self.model.changes();
        let cells = if is_stale { Cells::new() } else { self.tail_cells(&kept)? };
        let Kept { found, scope, tokens, .. } = kept;
        let got = self.tree.lock(&found, &mut self.fence);
        agree("stale", &got.is_err(), &is_stale)?;
        if let Ok(lock) = got {
            self.model.lock(scope, &tokens, tokens.len() / self.config.page_size as usize);
            cells.iter().for_each(|(key, &cell)| self.acquire_cell(key, cell));
            self.held.push(Held { cells, ..Held::new(lock, scope, tokens) });
        }
        Ok(())
    }

    fn apply(&mut self, op: PrefixOp) -> Result<(), String> {
        match op {
            PrefixOp::Lock { text } => {
                self.last = Some(text);
                let kept = self.find(text)?;
                return self.lock(kept);
            }
            PrefixOp::Match { text } => {
                let kept = self.find(text)?;
                self.kept.truncate(3);
                self.kept.push_front(kept);
            }
            PrefixOp::LockKept { pick } => {
                let index = usize::from(pick) % self.kept.len().max(1);
                return self.kept.remove(index).map_or(Ok(()), |kept| self.lock(kept));
            }
            PrefixOp::LockPrivate { namespace } if self.held.len() < LOCKS => {
                let namespace = Namespace::new(u64::from(namespace % 2));
                let lock = self.tree.lock_private(namespace);
                let scope = Scope { namespace, generation: self.generations };
                self.generations += 1;
                self.held.push(Held::new(lock, scope, Vec::new()));
            }
            PrefixOp::LockAgain { pick } if self.held.len() < LOCKS => {
                let Some(index) = self.pick(pick) else { return Ok(()) };
                let Held { lock, scope, tokens, cells, .. } = &self.held[index];
                let (scope, tokens, cells) = (*scope, tokens.clone(), cells.clone());
                let lock = self.tree.lock_again(lock, &mut self.fence);
                self.model.lock(scope, &tokens, tokens.len() / self.config.page_size as usize);
                cells.iter().for_each(|(key, &cell)| self.acquire_cell(key, cell));
                self.held.push(Held { cells, ..Held::new(lock, scope, tokens) });
            }
            PrefixOp::Insert { pick, author, pages } => return self.insert(pick, author, pages),
            PrefixOp::Unlock { pick } => {
                let Some(index) = self.pick(pick) else { return Ok(()) };
                if self.held[index].last_step.raw() > self.completed {
                    return self.defer_unlock(index, 0);
                }
                self.release_cells(index, StepId::default());
                let Held { lock, scope, tokens, .. } = self.held.remove(index);
                return self.unlock(lock, PrefixTree::unlock, scope, &tokens);
            }
            PrefixOp::DeferUnlock { pick, later } => {
                let Some(index) = self.pick(pick) else { return Ok(()) };
                return self.defer_unlock(index, later);
            }
            PrefixOp::Keep { pick } => return self.pick(pick).map_or(Ok(()), |at| self.keep(at)),
            PrefixOp::ReleaseCells { pick, later } => {
                let Some(index) = self.pick(pick) else { return Ok(()) };
                let step = if later % 3 == 0 { StepId::default() } else { self.announce(later) };
                self.release_cells(index, step);
            }
            PrefixOp::Complete { steps } => {
                self.completed += u64::from(steps % 3);
                let completed = StepId::new(self.completed);
                self.tree.complete_cells(completed, &mut self.fence);
                self.model.complete_cells(self.completed);
                while let Some(lock) = self.fence.take_lock(completed) {
                    let (step, scope, tokens) = self.deferred.pop_front().ok_or("a lock that was not deferred")?;
                    agree("a lock's step is complete", &(step <= completed), &true)?;
                    self.unlock(lock, PrefixTree::unlock_deferred, scope, &tokens)?;
                }
                self.fence.complete(completed);
            }
            PrefixOp::Evict { count } => {
                let count = u32::from(count) % (self.model.evictable() + 1);
                let mut got = Vec::new();
                self.tree.evict(count, &mut got);
                agree("evict", &sorted(&got), &sorted(&self.model.evict(count)))?;
                self.free.extend(got);
            }
            PrefixOp::Reset => {
                self.generation = self.generations;
                self.generations += 1;
                let mut got = Vec::new();
                self.tree.reset(&mut got);
                agree("reset", &sorted(&got), &sorted(&self.model.reset(Some(self.generation))))?;
                self.free.extend(got);
            }
            PrefixOp::LockPrivate { .. } | PrefixOp::LockAgain { .. } => {}
        }
        Ok(())
    }

    /// Returns the step for which a release waits: the last announced step or the next one. It is an unfinished step,
    /// at most [`MAX_STEPS`] after the last complete one.
    fn announce(&mut self, later: u8) -> StepId {
        let step = (self.announced + u64::from(later % 2)).max(self.completed + 1);
        self.announced = step.min(self.completed + MAX_STEPS);
        StepId::new(self.announced)
    }

    fn defer_unlock(&mut self, index: usize, later: u8) -> Result<(), String> {
        let step = self.announce(later);
        self.release_cells(index, step);
        let Held { lock, scope, tokens, .. } = self.held.remove(index);
        let node = lock.node();
        self.fence.push_lock(lock, step);
        self.tree.defer_unlock(node, step, &mut self.fence);
        self.deferred.push_back((step, scope, tokens));
        Ok(())
    }

    fn unlock(
        &mut self,
        lock: PrefixLock,
        unlock: fn(&mut PrefixTree, PrefixLock, &mut Fence, &mut Vec<PageId>),
        scope: Scope,
        tokens: &[TokenId],
    ) -> Result<(), String> {
        let pages = tokens.len() / self.config.page_size as usize;
        let mut got = Vec::new();
        unlock(&mut self.tree, lock, &mut self.fence, &mut got);
        agree("unlock", &sorted(&got), &sorted(&self.model.unlock(scope, tokens, pages)))?;
        self.free.extend(got);
        Ok(())
    }

    fn insert(&mut self, pick: u8, author: u8, pages: u8) -> Result<(), String> {
        let Some(index) = self.pick(pick) else { return Ok(()) };
        let count = usize::from(pages) % (self.config.pages as usize / 4 + 3);
        let count = count.min(self.free.len());
        let own = self.free.split_off(self.free.len() - count);
        let page_size = self.config.page_size as usize;
        let Held { lock, scope, tokens, .. } = &mut self.held[index];
        let old = tokens.len();
        tokens.extend((old..old + count * page_size).map(|i| token(author, i)));
        let (mut table, mut duplicates) = (own.clone(), Vec::new());
        let got = self.tree.insert(lock, &tokens[old..], &mut table, &mut duplicates, &mut self.fence);
        let want = self.model.insert(*scope, tokens, old / page_size, &own);
        agree("insert", &table, &want.table)?;
        agree("duplicates", &duplicates, &want.duplicates)?;
        agree("count of duplicates", &(got.duplicates as usize), &want.duplicates.len())?;
        self.free.extend(duplicates);
        Ok(())
    }

    /// Checks that an index built from events alone contains the cached pages.
    fn listen(&mut self) -> Result<(), String> {
        let Some(hashing) = self.config.hashing().filter(|_| self.config.event_pages > 0) else {
            return Ok(());
        };
        self.tree.drain_events(|event| self.index.apply(event));
        self.index.agrees(hashing, names, self.model.present())
    }

    fn compare(&self) -> Result<(), String> {
        let sizes = self.tree.size_info();
        let (evictable, protected) = (self.model.evictable(), self.model.protected());
        agree("size_info", &(sizes.evictable, sizes.protected), &(evictable, protected))?;
        let (mut locks, mut deferred) = (HashMap::new(), HashMap::new());
        let held = self.held.iter().map(|held| (&held.lock, held.scope, &held.tokens, false));
        let fenced = self.fence.locks().zip(&self.deferred);
        let fenced = fenced.map(|((_, lock), (_, scope, tokens))| (lock, *scope, tokens, true));
        for (lock, scope, tokens, waits) in held.chain(fenced) {
            agree("path", &self.tree.nodes().path(lock), &self.model.matched(scope, tokens))?;
            if let Some(node) = lock.node() {
                *locks.entry(node).or_default() += 1;
                *deferred.entry(node).or_default() += u32::from(waits);
            }
        }
        self.compare_deferred()?;
        if let Some(text) = self.last {
            self.find(text)?;
        }
        self.fence.check(StepId::new(self.completed + MAX_STEPS), 0)?;
        self.compare_cells()?;
        let broken = self.tree.check(&locks, &deferred, &self.fence);
        broken.map_err(|broken| format!("{broken:?}"))
    }

    /// Compares, for each step, the number of pages that its completion makes idle or drops: by the fence and by the
    /// model.
    fn compare_deferred(&self) -> Result<(), String> {
        for step in (0..=MAX_STEPS).map(|more| StepId::new(self.completed + more)) {
            let mut after = self.model.clone();
            after.complete_cells(step.raw());
            for (_, scope, tokens) in self.deferred.iter().take_while(|waits| waits.0 <= step) {
                let pages = tokens.len() / self.config.page_size as usize;
                after.unlock(*scope, tokens, pages);
            }
            let want = self.model.protected() - after.protected();
            agree("pages_until", &(step, self.fence.pages_until(step)), &(step, want))?;
        }
        Ok(())
    }
}

mod cells;
#[cfg(test)]
mod tests;
