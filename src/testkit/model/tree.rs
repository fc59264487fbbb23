//! The prefix tree as a map with an entry for each page, and LRU eviction of single pages.
//!
//! The key of a page is its scope and all tokens up to its end. The engine's division into nodes affects no result.

use std::collections::BTreeMap;
use std::ops::Range;

use super::open_moves::{CellKey, Path, Stores};
use super::swap_pages::Swap;
use crate::id::{Namespace, PageId, Scope, SwapPageId, TokenId};
use crate::layout::Reach;

/// One page of the tree.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Held {
    /// Its page on the device, if any. At least one of `page` and `swap_page` is set.
    pub page: Option<PageId>,
    /// Its page in swap memory, if any.
    pub swap_page: Option<SwapPageId>,
    /// Locks on it or below it.
    pub users: u32,
    /// The time when it lost its last user; smaller is older. It has no meaning while the page has users.
    pub idle_since: u64,
    /// Whether a store has it.
    pub stored: bool,
    /// Distinguishes it from earlier pages of its path.
    pub version: u64,
}

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct CellHeld {
    /// Its pages on the device: one for each track of the group, or none.
    pub pages: Vec<PageId>,
    /// Its pages in swap memory: one for each track of the group, or none.
    pub swap_pages: Vec<SwapPageId>,
    pub users: u32,
    /// Unfinished steps of former users. The cell becomes idle when all of them are complete.
    pub waits: Vec<u64>,
    /// The time when it became idle. Until then, the time when it last lost a user.
    pub since: u64,
    /// Whether no later state supersedes it.
    pub junction: bool,
    /// Whether the last user that left it has a later state.
    pub superseded: bool,
    /// Whether a store has it.
    pub stored: bool,
}

impl CellHeld {
    pub fn is_idle(&self) -> bool {
        self.users == 0 && self.waits.is_empty()
    }

    /// Returns the number of pages that are in swap memory alone.
    pub fn swap_only(&self) -> usize {
        if self.pages.is_empty() { self.swap_pages.len() } else { 0 }
    }
}

/// The result of an insertion.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Published {
    /// The pages of the path after the locked ones: the tree's page if it already had one, else the caller's.
    pub table: Vec<PageId>,
    /// The caller's pages that now belong to the tree.
    pub taken: Vec<PageId>,
    /// The caller's pages for which the tree already had pages.
    pub duplicates: Vec<PageId>,
}

/// The first time. Superseded cells become idle at times before it.
const START: u64 = 1 << 63;

/// All cached pages.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Tree {
    pub(super) page_size: usize,
    /// The reach of each limited group, and its range among the further tracks.
    pub(super) limited: Vec<(Reach, Range<usize>)>,
    pub(super) pages: BTreeMap<Path, Held>,
    pub(super) swap: Swap,
    pub(super) stores: Stores,
    /// Maximum number of records that wait to be put.
    pub(super) put_queue_len: usize,
    /// Number of pages of a record of group 0.
    pub(super) record_pages: usize,
    /// The number of each limited group, and at last that of the group that keeps a state.
    pub(super) groups: Vec<u32>,
    /// The number of pages of a cell of each of these groups.
    pub(super) cell_sizes: Vec<usize>,
    /// Number of pages added so far.
    pub(super) versions: u64,
    pub(super) cells: BTreeMap<CellKey, CellHeld>,
    /// For cells that were evicted, the version of their page, and whether they were superseded.
    pub(super) gone: BTreeMap<CellKey, (u64, bool)>,
    /// Number of pages and number of cells evicted so far.
    pub(super) evicted: (u64, u64),
    /// The generation whose idle pages are kept. Pages of other generations are removed with their last user.
    pub(super) kept_generation: Option<u64>,
    pub(super) clock: u64,
    /// The last time before all others.
    pub(super) oldest: u64,
    /// Whether a group keeps a state.
    pub(super) has_state: bool,
}

impl Tree {
    /// Creates an empty tree. It keeps only the idle pages of `kept_generation`, or none if that is `None`.
    pub fn new(page_size: u32, kept_generation: Option<u64>) -> Self {
        let page_size = page_size as usize;
        let (pages, cells) = (BTreeMap::new(), BTreeMap::new());
        let swap = Swap::default();
        Self {
            page_size,
            limited: Vec::new(),
            pages,
            swap,
            stores: Stores::default(),
            put_queue_len: 0,
            record_pages: 1,
            groups: Vec::new(),
            cell_sizes: Vec::new(),
            versions: 0,
            cells,
            gone: BTreeMap::new(),
            evicted: (0, 0),
            kept_generation,
            clock: START,
            oldest: START,
            has_state: false,
        }
    }

    /// Turns on swap memory of `count` pages, and puts. At most `puts` records wait to be put; 0 turns puts off.
    pub(super) fn keep_swap(&mut self, count: u32, stage_pages: u32, record_pages: u32, puts: usize) {
        (self.swap, self.stores) = (Swap::new(count), Stores::new(stage_pages));
        (self.record_pages, self.put_queue_len) = (record_pages as usize, puts);
    }

    pub(super) fn path(&self, scope: Scope, tokens: &[TokenId], pages: usize) -> Path {
        (scope.namespace.raw(), scope.generation, tokens[..pages * self.page_size].to_vec())
    }

    /// Returns the paths of the pages directly below a path.
    pub(super) fn children(&self, path: &Path) -> Vec<Path> {
        let len = path.2.len() + self.page_size;
        let below = self.pages.range(path.clone()..).map(|(below, _)| below);
        let below = below.take_while(|below| (below.0, below.1) == (path.0, path.1) && below.2.starts_with(&path.2));
        below.filter(|below| below.2.len() == len).cloned().collect()
    }

    /// Returns the device pages at the start of the longest cached prefix of `tokens`. The later pages of the prefix
    /// are in swap memory alone.
    pub fn matched(&self, scope: Scope, tokens: &[TokenId]) -> Vec<PageId> {
        let pages =
            (1..=tokens.len() / self.page_size).map_while(|pages| self.pages.get(&self.path(scope, tokens, pages)));
        pages.map_while(|held| held.page).collect()
    }

    /// Returns the number of pages of the longest cached prefix of `tokens`, on the device or in swap memory.
    pub fn matched_len(&self, scope: Scope, tokens: &[TokenId]) -> usize {
        let is_cached = |&pages: &usize| self.pages.contains_key(&self.path(scope, tokens, pages));
        (1..=tokens.len() / self.page_size).take_while(is_cached).count()
    }

    /// Returns every page of the kept generation. An item has the page's namespace, all tokens up to its end, whether
    /// the device has the page, and whether swap memory has it.
    pub fn present(&self) -> impl Iterator<Item = (Namespace, &[TokenId], [bool; 2])> {
        let kept = |(path, _): &(&Path, &Held)| self.kept_generation == Some(path.1);
        self.pages.iter().filter(kept).map(|((namespace, _, tokens), held)| {
            let media = [held.page.is_some(), held.swap_page.is_some()];
            (Namespace::new(*namespace), tokens.as_slice(), media)
        })
    }

    /// Returns the number of idle device pages among the first `pages` pages of a path.
    pub fn idle_on_path(&self, scope: Scope, tokens: &[TokenId], pages: usize) -> u32 {
        let path = (1..=pages).map(|pages| &self.pages[&self.path(scope, tokens, pages)]);
        path.filter(|held| held.users == 0 && held.page.is_some()).count() as u32
    }

    /// Counts one more user of the pages `from..to` of a path.
    pub(super) fn count_up(&mut self, scope: Scope, tokens: &[TokenId], from: usize, to: usize) {
        for pages in from + 1..=to {
            let path = self.path(scope, tokens, pages);
            let held = self.pages.get_mut(&path).expect("a locked page is cached");
            held.users += 1;
            // A device page in use has no copy in swap memory.
            if held.users == 1
                && held.page.is_some()
                && let Some(swap_page) = held.swap_page.take()
            {
                self.swap.free(swap_page);
            }
        }
    }

    /// Locks the first `pages` pages of a path.
    pub fn lock(&mut self, scope: Scope, tokens: &[TokenId], pages: usize) {
        self.count_up(scope, tokens, 0, pages);
    }

    /// Releases a lock on the first `pages` pages of a path. Returns the pages that are removed because their
    /// generation is not kept.
    pub fn unlock(&mut self, scope: Scope, tokens: &[TokenId], pages: usize) -> Vec<PageId> {
        let mut gone = Vec::new();
        for pages in (1..=pages).rev() {
            let path = self.path(scope, tokens, pages);
            let held = self.pages.get_mut(&path).expect("a locked page is cached");
            held.users -= 1;
            if held.users > 0 {
                continue;
            }
            self.clock += 1;
            held.idle_since = self.clock;
            if self.kept_generation != Some(scope.generation) {
                // No valid match contains it: the reset has made earlier matches stale.
                gone.extend(self.remove(&path));
                gone.extend(self.drop_cells(&path));
            }
        }
        gone
    }

    /// Publishes `own` as the pages of a path after its first `locked` pages, which the caller has locked. Also locks
    /// the published pages.
    pub fn insert(&mut self, scope: Scope, tokens: &[TokenId], locked: usize, own: &[PageId]) -> Published {
        let end = locked + own.len();
        let text = &tokens[..end * self.page_size];
        let (old, on_device) = (self.matched_len(scope, text), self.matched(scope, text).len());
        // Entries in swap memory alone take the caller's device pages.
        for pages in on_device + 1..=old {
            let path = self.path(scope, tokens, pages);
            let held = self.pages.get_mut(&path).expect("it was matched");
            held.page = Some(own[pages - 1 - locked]);
            let swap_page = held.swap_page.take().expect("the entry has a swap page");
            self.swap.free(swap_page);
        }
        for pages in old + 1..=end {
            let page = Some(own[pages - 1 - locked]);
            self.versions += 1;
            let held = Held { page, swap_page: None, users: 0, idle_since: 0, stored: false, version: self.versions };
            let path = self.path(scope, tokens, pages);
            self.pages.insert(path.clone(), held);
            if pages.is_multiple_of(self.record_pages) {
                self.queue_put(0, &path);
            }
        }
        self.count_up(scope, tokens, locked, end);
        let (duplicates, taken) = own.split_at(on_device - locked);
        Published {
            table: self.matched(scope, &tokens[..end * self.page_size])[locked..].to_vec(),
            taken: taken.to_vec(),
            duplicates: duplicates.to_vec(),
        }
    }

    /// Evicts cells and pages, the longest idle one first, until at least `count` device pages are free. Returns them.
    pub fn evict(&mut self, count: u32) -> Vec<PageId> {
        let mut gone = Vec::new();
        while gone.len() < count as usize {
            self.evict_one(&mut gone);
        }
        gone
    }

    fn evict_one(&mut self, gone: &mut Vec<PageId>) {
        let idle = self.pages.iter().filter(|(_, held)| held.users == 0 && held.page.is_some());
        let oldest = idle.min_by_key(|(_, held)| held.idle_since);
        let oldest = oldest.map(|(path, held)| (held.idle_since, path.clone()));
        match (self.oldest_cell(), oldest) {
            (Some((cell, key)), page) if page.as_ref().is_none_or(|page| cell < page.0) => {
                if self.swap.exists() {
                    return self.evict_cell_to_swap(&key, gone);
                }
                self.evicted.1 += 1;
                self.note_gone(&key);
                gone.extend(self.cells.remove(&key).expect("it was found").pages);
            }
            (_, page) => {
                let (_, path) = page.expect("the model evicts without having checked");
                self.evicted.0 += 1;
                let below = self.children(&path);
                let below = below.iter().all(|below| self.pages[below].page.is_none());
                assert!(below, "the oldest idle page has no page below it on the device");
                if self.swap.exists() {
                    return self.evict_to_swap(&path, gone);
                }
                let before = self.cells.len();
                gone.extend(self.remove(&path));
                gone.extend(self.drop_cells(&path));
                self.evicted.1 += (before - self.cells.len()) as u64;
            }
        }
    }

    /// Drops every idle page and returns the device pages. From now on, the tree keeps only idle pages of
    /// `kept_generation`.
    pub fn reset(&mut self, kept_generation: Option<u64>) -> Vec<PageId> {
        self.kept_generation = kept_generation;
        self.stores.end_generation();
        let idle = self.pages.iter().filter(|(_, held)| held.users == 0);
        let idle: Vec<_> = idle.map(|(path, _)| path.clone()).collect();
        let mut gone = Vec::new();
        for path in idle {
            gone.extend(self.remove(&path));
            gone.extend(self.drop_cells(&path));
        }
        gone
    }

    /// Returns the number of idle device pages.
    pub fn evictable(&self) -> u32 {
        let idle = |held: &&Held| held.users == 0 && held.page.is_some();
        let pages = self.pages.values().filter(idle).count() as u32;
        pages + self.cell_pages(CellHeld::is_idle)
    }

    /// Returns the number of device pages in use.
    pub fn protected(&self) -> u32 {
        let used = |held: &&Held| held.users > 0 && held.page.is_some();
        let pages = self.pages.values().filter(used).count() as u32;
        pages + self.cell_pages(|cell| !cell.is_idle())
    }
}
