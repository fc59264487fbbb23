//! Puts and fetches of the model: pages that a store reads and writes.

use super::Model;
use super::open_moves::{Fetch, PageVersion, Path, Put};
use super::swap_pages::Swap;
use super::tree::{Held, Tree};
use crate::backend::Moved;
use crate::error::Error;
use crate::id::{Namespace, Scope, SwapPageId, TokenId};

/// Maximum number of open puts.
const PUTS_MAX: usize = 1024;
/// Maximum number of open fetches.
const FETCHES_MAX: usize = 256;

/// The expected record of a put.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PutWant {
    /// Number of the put, counted from 1.
    pub number: u64,
    /// Namespace, generation and all tokens up to the page's end.
    pub path: Path,
    /// The swap page; `None` for a page of the stage.
    pub swap_page: Option<SwapPageId>,
}

impl Tree {
    /// Returns the page of an open put, if a prompt could still match it.
    fn page_of(&self, put: &Put) -> Option<PageVersion> {
        put.page.clone().filter(|page| self.is_present(page))
    }

    fn is_present(&self, page: &PageVersion) -> bool {
        self.pages.get(&page.path).is_some_and(|held| held.version == page.version)
    }

    /// Queues a published page to be put.
    pub(super) fn queue_put(&mut self, path: Path) {
        let version = self.pages[&path].version;
        let page = PageVersion { path, version };
        if self.stores.refused.is_empty() {
            self.stores.queue.push_back(page)
        } else {
            self.stores.refused.push_back(page)
        }
        self.limit_puts();
    }

    /// Drops the first page if the queue has more pages than entries.
    fn limit_puts(&mut self) {
        if self.stores.queue.len() + self.stores.refused.len() > self.put_queue_len
            && self.stores.queue.pop_front().is_none()
        {
            self.stores.refused.pop_front();
        }
    }

    /// Opens at most `max` puts of the next pages in the queue. Returns the number of pages to copy to the stage.
    fn begin_puts(&mut self, max: usize) -> usize {
        let next_move = self.swap.moves + 1;
        let (mut staged, end) = (0, PUTS_MAX.min(self.stores.puts.len() + max));
        let before = self.stores.puts.len();
        while self.stores.puts.len() < end {
            let Some(page) = self.stores.queue.pop_front() else { break };
            if !self.is_present(&page) || self.pages[&page.path].stored {
                continue;
            }
            let swap_page = self.pages[&page.path].swap_page;
            let save = match swap_page {
                Some(swap_page) => {
                    self.swap.begin_read(swap_page);
                    self.swap.saved_by[swap_page.index()]
                }
                None if self.stores.stage_free == 0 => {
                    self.stores.queue.push_front(page);
                    break;
                }
                None => {
                    (self.stores.stage_free, staged) = (self.stores.stage_free - 1, staged + 1);
                    next_move
                }
            };
            self.stores.last_put += 1;
            let number = self.stores.last_put;
            self.stores.puts.push(Put { number, page: Some(page), swap_page, save, is_given: false });
        }
        if self.stores.puts.len() == before && self.stores.queue.is_empty() {
            self.stores.queue = std::mem::take(&mut self.stores.refused);
        }
        staged
    }

    /// Cancels the puts whose copies to the stage have failed, and queues their pages again.
    fn fail_staged(&mut self) {
        let last = self.swap.moves;
        let failed = |put: &Put| put.swap_page.is_none() && put.save == last;
        for put in self.stores.puts.clone().iter().rev().filter(|put| failed(put)) {
            put.page.iter().for_each(|page| self.stores.queue.push_front(page.clone()));
            self.stores.stage_free += 1;
        }
        self.stores.puts.retain(|put| !failed(put));
    }

    /// Returns the puts whose pages the store can read from now on. Ends the other puts of pages that are no longer
    /// cached.
    fn give_puts(&mut self, saved: u64) -> Vec<PutWant> {
        let mut given = Vec::new();
        for at in 0..self.stores.puts.len() {
            let put = &self.stores.puts[at];
            if let Some(page) = self.page_of(put).filter(|_| !put.is_given && put.save <= saved) {
                let Put { number, swap_page, .. } = *put;
                given.push(PutWant { number, path: page.path, swap_page });
                self.stores.puts[at].is_given = true;
            }
        }
        let gone = |put: &&Put| !put.is_given && self.page_of(put).is_none();
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
        let page = self.page_of(&put);
        match put.swap_page {
            Some(swap_page) => self.swap.end_read(swap_page),
            None => self.stores.stage_free += 1,
        }
        if let Some(page) = page {
            match ok {
                true => self.pages.get_mut(&page.path).expect("it is cached").stored = true,
                false => {
                    self.stores.refused.push_back(page);
                    self.limit_puts();
                }
            }
        }
        self.stores.done += u64::from(ok);
        true
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

    /// Checks that there is one group, because stores have no pages of cells.
    pub fn check_groups(&self) -> Result<(), Error> {
        match self.shape.layout.groups().count() {
            1 => Ok(()),
            groups => Err(Error::StoreGroups { groups }),
        }
    }

    /// `Engine::put_done`
    pub fn put_done(&mut self, number: u64, ok: bool) -> bool {
        self.tree.end_put(number, ok)
    }

    /// `Engine::fetch`: returns the number of cached pages, and the swap pages to write. `moved` contains the moves
    /// that the backend reports as done; `None` if the report failed, and then the result is also `None`.
    pub fn fetch(
        &mut self,
        namespace: Namespace,
        prompt: &[TokenId],
        most: u32,
        moved: Option<Moved>,
    ) -> Result<Option<(u32, Vec<SwapPageId>)>, Error> {
        self.check_groups()?;
        let ignores_names = self.shape.hashing.is_some_and(|hashing| !hashing.uses_names());
        if ignores_names && namespace != Namespace::default() {
            return Err(Error::UnnamedNamespace { namespace });
        }
        if !self.tree.swap.exists() || prompt.is_empty() || prompt.contains(&TokenId::PENDING) {
            return Ok(None);
        }
        let Some(moved) = moved else { return Ok(None) };
        let full = self.tree.stores.fetches.len() == FETCHES_MAX;
        if full || self.shape.hashing.is_none() {
            return Ok(None);
        }
        let (scope, tokens) = (self.next_scope(namespace), &prompt[..prompt.len() - 1]);
        let cached = self.tree.hit(scope, tokens);
        let wanted = (most as usize).min(tokens.len() / self.page_size() - cached);
        // A locked page backs no promise.
        let idle = self.tree.idle_on_path(scope, tokens, cached);
        if wanted == 0 || idle > self.available() {
            return Ok(None);
        }
        let before = self.tree.clone();
        self.tree.lock(scope, tokens, cached);
        let mut pages = Vec::new();
        while pages.len() < wanted
            && let Some(page) = self.tree.take_idle_swap(moved)
        {
            self.tree.swap.begin_fill(page);
            pages.push(page);
        }
        if pages.is_empty() {
            self.tree = before;
            return Ok(None);
        }
        let tokens = tokens[..(cached + pages.len()) * self.page_size()].to_vec();
        let stores = &mut self.tree.stores;
        stores.last_fetch += 1;
        let number = stores.last_fetch;
        stores.fetches.push(Fetch { number, scope, tokens, cached, pages: pages.clone() });
        Ok(Some((cached as u32, pages)))
    }

    /// `Engine::fetched`
    pub fn fetched(&mut self, number: u64, count: u32) -> bool {
        let stores = &mut self.tree.stores;
        let Some(at) = stores.fetches.iter().position(|fetch| fetch.number == number) else {
            return false;
        };
        let Fetch { scope, tokens, cached, pages, .. } = stores.fetches.remove(at);
        let is_present = scope.generation == self.generation;
        let count = if is_present { pages.len().min(count as usize) } else { 0 };
        let known = self.tree.insert_fetched(scope, &tokens, cached, &pages[..count]);
        let unused = pages[..known].iter().chain(&pages[count..]);
        unused.for_each(|&page| self.tree.swap.end_fill(page, false));
        self.tree.stores.fetched += (count - known) as u64;
        let gone = self.tree.unlock(scope, &tokens, cached + count);
        self.pages.turn(&gone, super::PageIs::Cached, super::PageIs::Free);
        true
    }
}

impl Swap {
    /// Records that a put reads a page.
    fn begin_read(&mut self, page: SwapPageId) {
        assert!(self.reading.insert(page), "a page is put once at a time");
    }

    /// Records the end of a put. Its page becomes free if it no longer belongs to an entry.
    fn end_read(&mut self, page: SwapPageId) {
        self.reading.remove(&page);
        if self.leaving.remove(&page) {
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
