//! Puts and fetches of the model: records that a store reads and writes.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use super::Model;
use super::open_moves::{CellKey, Fetch, PageVersion, Path, Put, Record, RecordWant};
use super::swap_pages::Swap;
use super::tree::{CellHeld, Held, Tree};
use crate::backend::Moved;
use crate::error::Error;
use crate::id::{Namespace, PageId, Scope, SwapPageId, TokenId};

/// Maximum number of open puts.
const PUTS_MAX: usize = 1024;
/// Maximum number of open fetches.
const FETCHES_MAX: usize = 256;

/// The expected record of a put.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PutWant {
    /// Number of the put, counted from 1.
    pub number: u64,
    /// Namespace, generation and all tokens up to the record's end.
    pub path: Path,
    /// The group of layers.
    pub group: u32,
    /// Index of the record's first page in the prompt.
    pub first: u32,
    /// The swap pages; `None` for a page of the stage.
    pub pages: Vec<Option<SwapPageId>>,
}

/// The expected result of a fetch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FetchWant {
    /// Number of pages of the target that group 0 has.
    pub cached: u32,
    /// The records.
    pub records: Vec<RecordWant>,
}

/// The expected result of a lookup.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LookupWant {
    /// Number of pages that the prompt hits, and that group 0 has.
    pub pages: [u32; 2],
    /// Group and place of the wanted records.
    pub wanted: BTreeSet<(u32, u32)>,
    /// Number of pages of the longest prefix that the engine and the store have together.
    pub target: u32,
}

impl Tree {
    /// Returns the record of an open put, if a prompt could still match its last page.
    fn record_of(&self, put: &Put) -> Option<Record> {
        put.record.clone().filter(|record| self.is_present(&record.page))
    }

    fn is_present(&self, page: &PageVersion) -> bool {
        self.pages.get(&page.path).is_some_and(|held| held.version == page.version)
    }

    /// Returns the paths of the pages of a record of group 0.
    fn paths(&self, path: &Path) -> Vec<Path> {
        let len = path.2.len();
        let ends = (0..self.record_pages).rev().map(|back| len - back * self.page_size);
        ends.map(|end| (path.0, path.1, path.2[..end].to_vec())).collect()
    }

    /// Queues the record of group 0 that ends with a page, or of a cell at it, to be put.
    pub(super) fn queue_put(&mut self, cell: usize, path: &Path) {
        if self.put_queue_len == 0 || self.kept_generation != Some(path.1) {
            return;
        }
        let page = PageVersion { path: path.clone(), version: self.pages[path].version };
        let record = Record { cell, page };
        let stores = &mut self.stores;
        let open = stores.puts.iter().filter_map(|put| put.record.as_ref());
        if stores.queue.iter().chain(&stores.refused).chain(open).any(|waits| *waits == record) {
            return; // A cell was made again.
        }
        let queue = if stores.refused.is_empty() { &mut stores.queue } else { &mut stores.refused };
        queue.push_back(record);
        self.limit_puts();
    }

    /// Drops the first record if the queue is too long.
    fn limit_puts(&mut self) {
        if self.stores.queue.len() + self.stores.refused.len() > self.put_queue_len
            && self.stores.queue.pop_front().is_none()
        {
            self.stores.refused.pop_front();
        }
    }

    /// Returns the swap pages of a record, `None` for pages on the device alone. Returns `None` if a store has the
    /// record or it is gone.
    fn pages_to_put(&self, record: &Record) -> Option<Vec<Option<SwapPageId>>> {
        let path = &record.page.path;
        if !self.is_present(&record.page) {
            return None;
        }
        let Some(index) = record.cell.checked_sub(1) else {
            let pages = self.paths(path).iter().map(|path| self.pages[path].swap_page).collect();
            return Some(pages).filter(|_| !self.pages[path].stored);
        };
        let cell = self.cells.get(&(index, path.clone())).filter(|cell| !cell.stored)?;
        if cell.swap_pages.is_empty() {
            return Some(vec![None; cell.pages.len()]);
        }
        Some(cell.swap_pages.iter().copied().map(Some).collect())
    }

    /// Opens at most `max` puts of the next records in the queue. Returns the number of pages to copy to the stage.
    fn begin_puts(&mut self, max: usize) -> usize {
        let next_move = self.swap.moves + 1;
        let (mut staged, end) = (0, PUTS_MAX.min(self.stores.puts.len() + max));
        let before = self.stores.puts.len();
        while self.stores.puts.len() < end {
            let Some(record) = self.stores.queue.pop_front() else { break };
            let Some(pages) = self.pages_to_put(&record) else { continue };
            let lacking = pages.iter().filter(|page| page.is_none()).count();
            if self.stores.stage_free < lacking {
                self.stores.queue.push_front(record);
                return staged;
            }
            (self.stores.stage_free, staged) = (self.stores.stage_free - lacking, staged + lacking);
            self.swap.reading.extend(pages.iter().flatten());
            let saves = pages.iter().map(|page| page.map_or(next_move, |page| self.swap.saved_by[page.index()]));
            let save = saves.max().expect("a record has pages");
            self.stores.last_put += 1;
            let number = self.stores.last_put;
            self.stores.puts.push(Put { number, record: Some(record), pages, save, is_given: false });
        }
        if self.stores.puts.len() == before && self.stores.queue.is_empty() {
            self.stores.queue = std::mem::take(&mut self.stores.refused);
        }
        staged
    }

    /// Cancels the puts whose copies to the stage have failed, and queues their records again.
    fn fail_staged(&mut self) {
        let last = self.swap.moves;
        let failed = |put: &Put| put.is_staged() && put.save == last;
        for put in self.stores.puts.clone().iter().rev().filter(|put| failed(put)) {
            self.end_reads(put);
            put.record.iter().for_each(|record| self.stores.queue.push_front(record.clone()));
        }
        self.stores.puts.retain(|put| !failed(put));
    }

    /// Gives up the pages of a put.
    fn end_reads(&mut self, put: &Put) {
        self.stores.stage_free += put.staged();
        put.pages.iter().flatten().for_each(|&page| self.swap.end_read(page));
    }

    /// Returns the puts whose pages the store can read from now on. Ends the other puts of pages that are no longer
    /// cached.
    fn give_puts(&mut self, saved: u64) -> Vec<PutWant> {
        let mut given = Vec::new();
        for at in 0..self.stores.puts.len() {
            let put = &self.stores.puts[at];
            if let Some(record) = self.record_of(put).filter(|_| !put.is_given && put.save <= saved) {
                let (number, pages) = (put.number, put.pages.clone());
                let path = record.page.path;
                let end = path.2.len() / self.page_size;
                let (group, len) = match record.cell {
                    0 => (0, self.record_pages),
                    cell => (self.groups[cell - 1], 1),
                };
                given.push(PutWant { number, path, group, first: (end - len) as u32, pages });
                self.stores.puts[at].is_given = true;
            }
        }
        let gone = |put: &&Put| !put.is_given && self.record_of(put).is_none();
        let gone = self.stores.puts.iter().filter(gone);
        for number in gone.map(|put| put.number).collect::<Vec<_>>() {
            self.end_put(number, false);
        }
        given
    }

    fn end_put(&mut self, number: u64, ok: bool) -> bool {
        let Some(at) = self.stores.puts.iter().position(|put| put.number == number) else {
            return false;
        };
        let put = self.stores.puts.remove(at);
        let record = self.record_of(&put);
        self.end_reads(&put);
        match record {
            Some(record) if ok => self.set_stored(record.cell, &record.page.path, true),
            Some(record) => {
                self.stores.refused.push_back(record);
                self.limit_puts();
            }
            None => {}
        }
        self.stores.done += if ok { put.pages.len() as u64 } else { 0 };
        true
    }

    fn set_stored(&mut self, cell: usize, path: &Path, stored: bool) {
        if let Some(index) = cell.checked_sub(1) {
            let cell = self.cells.get_mut(&(index, path.clone()));
            cell.into_iter().for_each(|cell| cell.stored = stored);
            return;
        }
        for path in self.paths(path) {
            self.pages.get_mut(&path).expect("the page is before a cached one").stored = stored;
        }
    }

    /// Inserts fetched pages after the first `locked` pages of a path, and locks them. Returns the number of fetched
    /// pages that the tree already had.
    fn insert_fetched(&mut self, scope: Scope, tokens: &[TokenId], locked: usize, pages: &[SwapPageId]) -> usize {
        let end = locked + pages.len();
        let old = self.matched_len(scope, &tokens[..end * self.page_size]);
        for at in old..end {
            self.versions += 1;
            let (swap_page, version) = (pages[at - locked], self.versions);
            self.swap.end_fill(swap_page, true);
            let held = Held { page: None, swap_page: Some(swap_page), users: 0, idle_since: 0, stored: true, version };
            self.pages.insert(self.path(scope, tokens, at + 1), held);
        }
        self.count_up(scope, tokens, locked, end);
        old - locked
    }

    /// Returns the keys of the cells in the tails of a prefix, group by group, the last place first.
    fn tails_back(&self, scope: Scope, tokens: &[TokenId], pages: usize) -> Vec<CellKey> {
        let mut keys = self.tail_cells(scope, tokens, pages);
        keys.sort_by_key(|(group, path)| (*group, Reverse(path.2.len())));
        keys
    }

    /// Returns the place of the last page of the record of group 0 that has a place.
    fn record_place(&self, place: usize) -> usize {
        (place / self.record_pages + 1) * self.record_pages - 1
    }

    /// Returns the records that a target lacks, and the number of pages of each.
    fn lacking(&self, scope: Scope, tokens: &[TokenId], cached: usize, to: usize) -> Vec<(RecordWant, usize)> {
        let mut records: Vec<(RecordWant, usize)> = Vec::new();
        for at in cached..to {
            let (place, first) = (self.record_place(at) as u32, at as u32);
            match records.last_mut() {
                Some((last, count)) if last.place == place => *count += 1,
                _ => records.push((RecordWant { group: 0, place, first, pages: Vec::new() }, 1)),
            }
        }
        for key in self.tails_back(scope, tokens, to).iter().filter(|key| !self.cells.contains_key(key)) {
            let place = (key.1.2.len() / self.page_size) as u32 - 1;
            let record = RecordWant { group: self.groups[key.0], place, first: place, pages: Vec::new() };
            records.push((record, self.cell_sizes[key.0]));
        }
        records
    }
}

impl Model {
    /// `Engine::puts`; `None` if the backend failed. `saved` is the last save that the backend reports as done; `None`
    /// if the report failed.
    pub fn puts(&mut self, max: usize, saved: Option<u64>) -> Option<Vec<PutWant>> {
        if !self.tree.swap.exists() {
            return Some(Vec::new());
        }
        let staged = if self.shape.hashing.is_some() { self.tree.begin_puts(max) } else { 0 };
        if staged > 0 {
            self.tree.swap.moves += 1;
            if self.next_move_fails() {
                self.tree.fail_staged();
                return None;
            }
        }
        Some(self.tree.give_puts(saved?))
    }

    /// `Engine::put_done`
    pub fn put_done(&mut self, number: u64, ok: bool) -> bool {
        self.tree.end_put(number, ok)
    }

    /// Checks the namespace of a prompt. Returns whether stores can have pages of the prompt.
    fn check_findable(&self, namespace: Namespace, prompt: &[TokenId]) -> Result<bool, Error> {
        let ignores_names = self.shape.hashing.is_some_and(|hashing| !hashing.uses_names());
        if ignores_names && namespace != Namespace::default() {
            return Err(Error::UnnamedNamespace { namespace });
        }
        Ok(self.tree.swap.exists() && !prompt.is_empty() && !prompt.contains(&TokenId::PENDING))
    }

    /// `Engine::lookup`, `Lookup::wanted` and `Lookup::target`
    pub fn lookup(
        &self,
        namespace: Namespace,
        prompt: &[TokenId],
        stored: impl Fn(u32, u32) -> bool,
    ) -> Result<Option<LookupWant>, Error> {
        if !self.check_findable(namespace, prompt)? || self.shape.hashing.is_none() {
            return Ok(None);
        }
        let (tree, scope, tokens) = (&self.tree, self.next_scope(namespace), &prompt[..prompt.len() - 1]);
        let (hit, full) = (tree.hit(scope, tokens), tree.matched_len(scope, tokens));
        let limit = tokens.len() / self.page_size();
        let record = |key: &CellKey| (tree.groups[key.0], (key.1.2.len() / self.page_size()) as u32 - 1);
        let pages = (full..limit).map(|at| tree.record_place(at)).filter(|&place| place < limit);
        let mut wanted: BTreeSet<_> = pages.map(|place| (0, place as u32)).collect();
        for pages in hit + 1..=limit {
            let keys = tree.tail_cells(scope, tokens, pages);
            wanted.extend(keys.iter().filter(|key| !tree.cells.contains_key(key)).map(record));
        }
        let is_here = |pages: &usize| {
            let stores = |at| tree.record_place(at) < limit && stored(0, tree.record_place(at) as u32);
            let has = |key: &CellKey| {
                let (group, place) = record(key);
                tree.cells.contains_key(key) || stored(group, place)
            };
            (full..*pages).all(stores) && tree.tail_cells(scope, tokens, *pages).iter().all(has)
        };
        let target = (0..=limit).rev().find(is_here).expect("the empty prefix is here");
        Ok(Some(LookupWant { pages: [hit as u32, full as u32], wanted, target: target as u32 }))
    }

    /// `Engine::fetch`. `moved` contains the moves that the backend reports as done; `None` if the report failed, and
    /// then the result is also `None`.
    pub fn fetch(
        &mut self,
        namespace: Namespace,
        prompt: &[TokenId],
        to: u32,
        moved: Option<Moved>,
    ) -> Result<Option<FetchWant>, Error> {
        let is_known = self.check_findable(namespace, prompt)?;
        let Some(moved) = moved.filter(|_| is_known) else { return Ok(None) };
        if self.tree.stores.fetches.len() == FETCHES_MAX || self.shape.hashing.is_none() {
            return Ok(None);
        }
        let (scope, tokens) = (self.next_scope(namespace), &prompt[..prompt.len() - 1]);
        let (hit, full) = (self.tree.hit(scope, tokens), self.tree.matched_len(scope, tokens));
        let to = (to as usize).min(tokens.len() / self.page_size());
        let cached = full.min(to);
        let tails = self.tree.tails_back(scope, tokens, to).into_iter();
        let tails: Vec<_> = tails.map(|key| (key.clone(), self.tree.cells.contains_key(&key))).collect();
        // Locked pages and cells in use back no promise.
        let cells = tails.iter().filter_map(|(key, _)| self.tree.cells.get(key));
        let cells: u32 = cells.filter(|cell| cell.is_idle()).map(|cell| cell.pages.len() as u32).sum();
        if to <= hit || self.tree.idle_on_path(scope, tokens, cached) + cells > self.available() {
            return Ok(None);
        }
        let before = self.tree.clone();
        let mut lacking = self.tree.lacking(scope, tokens, cached, to);
        self.tree.lock(scope, tokens, cached);
        tails.iter().filter(|tail| tail.1).for_each(|(key, _)| self.tree.acquire_cell(key));
        let (mut gone, mut is_whole) = (Vec::new(), true);
        for (record, count) in &mut lacking {
            while is_whole && record.pages.len() < *count {
                let page = self.tree.take_idle_swap(moved, &mut gone);
                page.into_iter().for_each(|page| self.tree.swap.begin_fill(page));
                record.pages.extend(page);
                is_whole = page.is_some();
            }
        }
        self.free_cached(&gone);
        let records = lacking.into_iter().map(|(record, _)| record).filter(|record| !record.pages.is_empty());
        let records: Vec<_> = records.collect();
        let number = self.tree.stores.last_fetch + 1;
        let fetch = Fetch { number, scope, tokens: tokens.to_vec(), cached, records: records.clone(), tails };
        if !is_whole && !self.tree.groups.is_empty() {
            self.end_fetch(fetch, 0);
            return Ok(None);
        }
        if records.is_empty() {
            self.tree = before;
            return Ok(None);
        }
        self.tree.stores.last_fetch = number;
        self.tree.stores.fetches.push(fetch);
        Ok(Some(FetchWant { cached: cached as u32, records }))
    }

    fn free_cached(&mut self, pages: &[PageId]) {
        self.pages.turn(pages, super::PageIs::Cached, super::PageIs::Free);
    }

    /// `Engine::fetched`
    pub fn fetched(&mut self, number: u64, count: usize) -> bool {
        let stores = &mut self.tree.stores;
        let Some(at) = stores.fetches.iter().position(|fetch| fetch.number == number) else {
            return false;
        };
        let fetch = stores.fetches.remove(at);
        self.end_fetch(fetch, count);
        true
    }

    /// Ends a fetch whose first `count` records have arrived.
    fn end_fetch(&mut self, fetch: Fetch, count: usize) {
        let Fetch { scope, tokens, cached, records, tails, .. } = fetch;
        let all = records.len();
        let is_present = scope.generation == self.generation && (self.tree.groups.is_empty() || count == all);
        let (arrived, others) = records.split_at(if is_present { all.min(count) } else { 0 });
        let (entries, cells): (Vec<_>, Vec<_>) = arrived.iter().partition(|record| record.group == 0);
        let pages: Vec<_> = entries.iter().flat_map(|record| &record.pages).copied().collect();
        let known = self.tree.insert_fetched(scope, &tokens, cached, &pages);
        let mut unused = pages[..known].to_vec();
        unused.extend(others.iter().flat_map(|record| &record.pages));
        let mut fetched = pages.len() - known;
        let mut used = tails.iter().filter(|tail| tail.1).map(|tail| tail.0.clone()).collect::<BTreeSet<_>>();
        for record in cells {
            let group = self.tree.groups.iter().position(|group| *group == record.group).expect("it has a group");
            let key = (group, self.tree.path(scope, &tokens, record.place as usize + 1));
            if self.tree.cells.contains_key(&key) {
                unused.extend(&record.pages);
                continue;
            }
            record.pages.iter().for_each(|page| self.tree.swap.end_fill(*page, true));
            let swap_pages = record.pages.clone();
            let cell = CellHeld { swap_pages, users: 1, stored: true, ..CellHeld::default() };
            self.tree.cells.insert(key.clone(), cell);
            fetched += record.pages.len();
            used.insert(key);
        }
        unused.iter().for_each(|&page| self.tree.swap.end_fill(page, false));
        self.tree.stores.fetched += fetched as u64;
        for (key, _) in tails.iter().filter(|(key, _)| used.contains(key)) {
            self.tree.release_cell(key, 0, self.completed, false);
        }
        let gone = self.tree.unlock(scope, &tokens, cached + pages.len());
        self.free_cached(&gone);
    }

    /// `Engine::restate_puts`
    pub fn restate_puts(
        &mut self,
        namespace: Namespace,
        prompt: &[TokenId],
        stored: impl Fn(u32, u32) -> bool,
    ) -> Result<u32, Error> {
        if !self.check_findable(namespace, prompt)? || self.shape.hashing.is_none() {
            return Ok(0);
        }
        let (scope, tokens) = (self.next_scope(namespace), &prompt[..prompt.len() - 1]);
        let mut lacking = 0;
        for cell in 0..=self.tree.groups.len() {
            for pages in 1..=self.tree.matched_len(scope, tokens) {
                let path = self.tree.path(scope, tokens, pages);
                let (group, has) = match cell.checked_sub(1) {
                    None => (0, pages.is_multiple_of(self.tree.record_pages).then(|| self.tree.pages[&path].stored)),
                    Some(index) => {
                        let held = self.tree.cells.get(&(index, path.clone()));
                        (self.tree.groups[index], held.map(|held| held.stored))
                    }
                };
                let Some(is_stored) = has else { continue };
                if is_stored && !stored(group, pages as u32 - 1) {
                    self.tree.set_stored(cell, &path, false);
                    self.tree.queue_put(cell, &path);
                    lacking += 1;
                }
                lacking += u32::from(!is_stored);
            }
        }
        Ok(lacking)
    }
}

impl Swap {
    /// Records the end of a put. Its page becomes free if it no longer belongs to an entry and no other put reads it.
    fn end_read(&mut self, page: SwapPageId) {
        let at = self.reading.iter().position(|reading| *reading == page).expect("the put reads it");
        self.reading.remove(at);
        if !self.reading.contains(&page) && self.leaving.remove(&page) {
            self.taken[page.index()] = false;
        }
    }

    /// Records that a fetch writes a taken page.
    fn begin_fill(&mut self, page: SwapPageId) {
        self.filling.insert(page);
    }

    /// Records the end of a fetch into a page. The page becomes free if `arrived` is false.
    fn end_fill(&mut self, page: SwapPageId, arrived: bool) {
        self.filling.remove(&page);
        self.taken[page.index()] = arrived;
    }

    /// Returns whether the backend has done all moves of a page.
    pub(super) fn is_idle(&self, page: SwapPageId, moved: Moved) -> bool {
        self.saved_by[page.index()] <= moved.saved.raw() && self.loaded_by[page.index()] <= moved.loaded.raw()
    }
}
