//! Moves of pages between the device and swap memory, in the model. Searches look at all pages.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use super::open_moves::{CellKey, Path};
use super::tree::Tree;
use super::{Model, PageIs};
use crate::backend::Moved;
use crate::error::Error;
use crate::id::{PageId, Scope, SeqKey, SwapPageId, TokenId};

/// A page or a cell: an idle one, or one that a sequence waits for.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Idle {
    Page(Path),
    Cell(CellKey),
}

impl Tree {
    /// Takes a free swap page. If none is free, removes idle pages and cells that are in swap memory alone until a swap
    /// page is free. Removes the longest idle one first. Appends the device pages of removed cells to `gone`.
    pub(super) fn take_swap(&mut self, gone: &mut Vec<PageId>) -> Option<SwapPageId> {
        loop {
            if let Some(page) = self.swap.take() {
                return Some(page);
            }
            let before = self.swap.counts().0;
            match self.oldest(|is_device, _| !is_device)? {
                Idle::Page(path) => self.lose_page(&path, gone),
                Idle::Cell(key) => self.lose_idle_cell(&key, gone),
            }
            self.swap.evicted += u64::from(before - self.swap.counts().0);
        }
    }

    /// Takes a free swap page without unfinished moves. If there is none, removes the page or cell that has been in
    /// swap memory alone for the longest time, unless one of its swap pages is read or has unfinished moves.
    pub(super) fn take_idle_swap(&mut self, moved: Moved, gone: &mut Vec<PageId>) -> Option<SwapPageId> {
        if let Some(page) = self.swap.take_if(|swap, page| swap.is_idle(page, moved)) {
            return Some(page);
        }
        let oldest = self.oldest(|is_device, _| !is_device)?;
        let pages = match &oldest {
            Idle::Page(path) => self.pages[path].swap_page.into_iter().collect(),
            Idle::Cell(key) => self.cells[key].swap_pages.clone(),
        };
        if pages.iter().any(|&page| self.swap.reading.contains(&page) || !self.swap.is_idle(page, moved)) {
            return None;
        }
        let before = self.swap.counts().0;
        match oldest {
            Idle::Page(path) => self.lose_page(&path, gone),
            Idle::Cell(key) => self.lose_idle_cell(&key, gone),
        }
        self.swap.evicted += u64::from(before - self.swap.counts().0);
        self.swap.take_if(|_, free| free == pages[0])
    }

    /// Returns the page or cell that has been idle for the longest time, among those for which `is_one` is true. The
    /// arguments of `is_one` are whether it is on the device, and whether it is in swap memory.
    fn oldest(&self, is_one: impl Fn(bool, bool) -> bool) -> Option<Idle> {
        let pages = self
            .pages
            .iter()
            .filter(|(_, held)| held.users == 0 && is_one(held.page.is_some(), held.swap_page.is_some()));
        let cells = self
            .cells
            .iter()
            .filter(|(_, cell)| cell.is_idle() && is_one(!cell.pages.is_empty(), !cell.swap_pages.is_empty()));
        let pages = pages.map(|(path, held)| (held.idle_since, Idle::Page(path.clone())));
        let cells = cells.map(|(key, cell)| (cell.since, Idle::Cell(key.clone())));
        pages.chain(cells).min_by_key(|(since, _)| *since).map(|(_, idle)| idle)
    }

    /// Removes a page and its cells because memory is short.
    fn lose_page(&mut self, path: &Path, gone: &mut Vec<PageId>) {
        self.swap.lost += u64::from(!self.pages[path].stored);
        gone.extend(self.remove(path));
        let here: Vec<_> = self.cells.keys().filter(|key| key.1 == *path).cloned().collect();
        here.iter().for_each(|key| self.lose_idle_cell(key, gone));
    }

    /// Records that a cell is about to be evicted.
    pub(super) fn note_gone(&mut self, key: &CellKey) {
        let cell = &self.cells[key];
        if let Some(page) = self.pages.get(&key.1) {
            self.gone.insert(key.clone(), (page.version, cell.superseded && !cell.junction));
        }
    }

    /// Removes a cell because memory is short.
    fn lose_idle_cell(&mut self, key: &CellKey, gone: &mut Vec<PageId>) {
        let cell = &self.cells[key];
        self.swap.lost += if cell.stored { 0 } else { cell.pages.len().max(cell.swap_pages.len()) as u64 };
        self.evicted.1 += u64::from(!cell.pages.is_empty());
        self.note_gone(key);
        gone.extend(self.remove_cell(key));
    }

    /// Removes an idle cell from the device and from swap memory. Returns its device pages.
    pub(super) fn remove_cell(&mut self, key: &CellKey) -> Vec<PageId> {
        let cell = self.cells.remove(key).expect("just seen");
        assert!(cell.is_idle(), "the model removes a used cell");
        cell.swap_pages.into_iter().for_each(|swap_page| self.swap.free(swap_page));
        cell.pages
    }

    /// Saves an idle cell. Returns false if there are too few swap pages, or if taking a swap page has removed the
    /// cell.
    fn save_cell(&mut self, key: &CellKey, gone: &mut Vec<PageId>) -> bool {
        let mut taken = Vec::new();
        for _ in 0..self.cells[key].pages.len() {
            let swap_page = self.take_swap(gone);
            taken.extend(swap_page);
            if swap_page.is_none() || !self.cells.contains_key(key) {
                taken.into_iter().for_each(|swap_page| self.swap.free(swap_page));
                return false;
            }
        }
        let cell = self.cells.get_mut(key).expect("just seen");
        for (&page, &swap_page) in cell.pages.iter().zip(&taken) {
            self.swap.saves.push((page, swap_page));
            self.swap.saved_by[swap_page.index()] = self.swap.moves + 1;
        }
        self.swap.saved += taken.len() as u64;
        cell.swap_pages = taken;
        true
    }

    /// Frees the device pages of an idle cell. A cell without swap pages is saved first, or removed if the save fails.
    pub(super) fn evict_cell_to_swap(&mut self, key: &CellKey, gone: &mut Vec<PageId>) {
        if self.cells[key].swap_pages.is_empty() {
            if !self.save_cell(key, gone) {
                if self.cells.contains_key(key) {
                    self.lose_idle_cell(key, gone);
                }
                return;
            }
            self.swap.forced += self.cells[key].swap_pages.len() as u64;
        }
        self.evicted.1 += 1;
        gone.append(&mut self.cells.get_mut(key).expect("just seen").pages);
    }

    /// Saves an idle page. Returns false if no swap page can be taken.
    fn save(&mut self, path: &Path, gone: &mut Vec<PageId>) -> bool {
        let Some(swap_page) = self.take_swap(gone) else { return false };
        let held = self.pages.get_mut(path).expect("it is cached");
        held.swap_page = Some(swap_page);
        self.swap.saves.push((held.page.expect("it is on the device"), swap_page));
        self.swap.saved_by[swap_page.index()] = self.swap.moves + 1;
        self.swap.saved += 1;
        true
    }

    /// Frees the device page of an idle page. A page without a swap page is saved first, or removed if the save fails.
    pub(super) fn evict_to_swap(&mut self, path: &Path, gone: &mut Vec<PageId>) {
        if self.pages[path].swap_page.is_none() {
            if !self.save(path, gone) {
                return self.lose_page(path, gone);
            }
            self.swap.forced += 1;
        }
        gone.extend(self.pages.get_mut(path).and_then(|held| held.page.take()));
    }

    /// `Engine::save_ahead`
    pub(super) fn save_ahead(&mut self, ahead: u32) -> Vec<PageId> {
        let mut gone = Vec::new();
        while self.clean() < ahead
            && let Some(dirty) = self.oldest(|is_device, is_host| is_device && !is_host)
        {
            let saved = match dirty {
                Idle::Page(path) => self.save(&path, &mut gone),
                Idle::Cell(key) => self.save_cell(&key, &mut gone),
            };
            if !saved {
                break;
            }
        }
        gone
    }

    /// Removes a page from the device and from swap memory. Returns its device page.
    pub(super) fn remove(&mut self, path: &Path) -> Option<PageId> {
        let held = self.pages.remove(path).expect("it was found");
        held.swap_page.into_iter().for_each(|swap_page| self.swap.free(swap_page));
        held.page
    }

    /// Returns the number of idle pages that are on the device and in swap memory.
    pub(super) fn clean(&self) -> u32 {
        let clean = self.pages.values().filter(|held| held.page.is_some() && held.swap_page.is_some());
        let cells = self.cells.values().filter(|cell| !cell.swap_pages.is_empty());
        (clean.count() + cells.map(|cell| cell.pages.len()).sum::<usize>()) as u32
    }

    /// Undoes the waiting saves, which have failed. Pages that are still on the device are dirty again. Removes the
    /// other pages with all pages after them, and the other cells.
    pub(super) fn fail_saves(&mut self) -> Vec<PageId> {
        let mut gone = Vec::new();
        let swap: BTreeSet<_> = self.swap.saves.iter().map(|save| save.1).collect();
        self.swap.failed += self.swap.saves.len() as u64;
        let failed = self.pages.iter().filter(|(_, held)| held.swap_page.is_some_and(|h| swap.contains(&h)));
        for path in failed.map(|(path, _)| path.clone()).collect::<Vec<_>>() {
            let Some(held) = self.pages.get_mut(&path) else { continue };
            if held.page.is_some() {
                let swap_page = held.swap_page.take().expect("it was just saved");
                self.swap.free(swap_page);
                continue;
            }
            let below = self
                .pages
                .keys()
                .filter(|below| (below.0, below.1) == (path.0, path.1) && below.2.starts_with(&path.2));
            for below in below.cloned().collect::<Vec<_>>() {
                assert_eq!(self.pages[&below].page, None, "pages below are in swap memory alone");
                self.lose_page(&below, &mut gone);
            }
        }
        let failed = self.cells.iter().filter(|(_, c)| c.swap_pages.iter().any(|h| swap.contains(h)));
        for key in failed.map(|(key, _)| key.clone()).collect::<Vec<_>>() {
            let cell = self.cells.get_mut(&key).expect("just seen");
            if cell.pages.is_empty() {
                self.lose_idle_cell(&key, &mut gone)
            } else {
                cell.swap_pages.drain(..).for_each(|swap_page| self.swap.free(swap_page))
            }
        }
        gone
    }
}

impl Model {
    /// Returns the number of pages at the start of a path that are on the device, at most `pages`.
    pub(super) fn on_device(&self, scope: Scope, tokens: &[TokenId], pages: usize) -> usize {
        self.tree.matched(scope, &tokens[..pages * self.page_size()]).len()
    }

    /// Sets which of the next saves and loads fail.
    pub fn expect_moves(&mut self, failures: Vec<bool>) {
        self.move_failures = failures.into();
    }

    /// Returns whether the last plan or fork failed because its load failed.
    pub fn take_load_failed(&mut self) -> bool {
        std::mem::take(&mut self.load_failed)
    }

    pub(super) fn next_move_fails(&mut self) -> bool {
        self.move_failures.pop_front().unwrap_or(false)
    }

    /// Passes the waiting saves to the backend. Returns whether the backend fails.
    pub(super) fn flush_saves(&mut self) -> bool {
        let moves = !self.tree.swap.saves.is_empty();
        self.tree.swap.moves += u64::from(moves);
        let failed = moves && self.next_move_fails();
        if failed {
            let gone = self.tree.fail_saves();
            self.pages.turn(&gone, PageIs::Cached, PageIs::Free);
        }
        self.tree.swap.saves.clear();
        failed
    }

    /// Returns whether a sequence waits for pages in swap memory.
    pub fn is_pending(&self, seq: SeqKey) -> bool {
        self.running(seq).is_ok_and(|sequence| sequence.pending > 0)
    }

    /// `Engine::save_ahead`. Returns the number of saved pages; `None` if the backend fails.
    pub fn save_ahead(&mut self, ahead: u32) -> Option<u32> {
        if self.tree.swap.exists() {
            let gone = self.tree.save_ahead(ahead);
            self.pages.turn(&gone, PageIs::Cached, PageIs::Free);
        }
        let saved = self.tree.swap.saves.len() as u32;
        (!self.flush_saves()).then_some(saved)
    }

    /// `Engine::load`. Returns false if the backend failed.
    pub fn load(&mut self, seqs: &[SeqKey]) -> Result<bool, Error> {
        let loads = self.begin_load(seqs)?;
        self.flush_saves();
        let moves = !loads.is_empty();
        self.tree.swap.moves += u64::from(moves);
        for (_, swap_page) in &loads {
            self.tree.swap.loaded_by[swap_page.index()] = self.tree.swap.moves;
        }
        let failed = moves && self.next_move_fails();
        self.end_load(seqs, &loads, failed);
        Ok(!failed)
    }

    fn begin_load(&mut self, seqs: &[SeqKey]) -> Result<Vec<(PageId, SwapPageId)>, Error> {
        let (mut lacking, mut drawn) = (Vec::new(), 0);
        for &seq in seqs {
            let new: Vec<_> = self.lacking(seq)?.into_iter().filter(|page| !lacking.contains(page)).collect();
            drawn += new.len().min(self.promised_to_load(seq));
            lacking.extend(new);
        }
        self.check_pages(lacking.len(), drawn)?;
        let pages = self.take_pages(lacking.len());
        let loads = lacking.iter().zip(pages).map(|(lacking, page)| match lacking {
            (Idle::Page(path), _) => {
                let held = self.tree.pages.get_mut(path).expect("it is locked");
                held.page = Some(page);
                (page, held.swap_page.expect("it is in swap memory"))
            }
            (Idle::Cell(key), track) => {
                let cell = self.tree.cells.get_mut(key).expect("it is used");
                cell.pages.push(page);
                (page, cell.swap_pages[*track])
            }
        });
        Ok(loads.collect())
    }

    /// Returns the pages that a sequence waits for. The pages of group 0 come first, the deepest one first. The pages
    /// of cells follow, group by group, beginning with the last place of each group.
    fn lacking(&self, seq: SeqKey) -> Result<Vec<(Idle, usize)>, Error> {
        let sequence = self.running(seq)?;
        if sequence.pending == 0 {
            return Ok(Vec::new());
        }
        let (scope, tokens) = (sequence.scope, &sequence.tokens);
        let end = sequence.published + sequence.pending;
        let paths = (0..end).rev().map(|at| self.tree.path(scope, tokens, at + 1));
        let paths = paths.filter(|path| self.tree.pages[path].page.is_none());
        let mut keys = self.tree.tail_cells(scope, tokens, end);
        keys.sort_by_key(|(group, path)| (*group, Reverse(path.2.len())));
        let cells = keys.into_iter().flat_map(|key| {
            let tracks = 0..self.tree.cells[&key].swap_only();
            tracks.map(move |track| (Idle::Cell(key.clone()), track))
        });
        Ok(paths.map(|path| (Idle::Page(path), 0)).chain(cells).collect())
    }

    /// Returns the number of promised pages that the load of a sequence consumes: the outstanding pages before the load
    /// minus those after it.
    fn promised_to_load(&self, seq: SeqKey) -> usize {
        let sequence = &self.sequences[&seq];
        if sequence.pending == 0 {
            return 0;
        }
        let pages = sequence.published + sequence.pending;
        let after = self.outstanding_of_promise(sequence.promised, pages, pages, pages);
        let state = self.outstanding_state(sequence, sequence.promised);
        self.outstanding(seq).map_or(0, |pages| pages as usize) - after - state
    }

    /// Begins a plan or a fork: loads the pages that its sequences wait for. If the load fails, sets `load_failed` and
    /// returns an error.
    pub(super) fn load_first(&mut self, seqs: impl Iterator<Item = SeqKey>) -> Result<(), Error> {
        let waiting: Vec<_> = seqs.filter(|&seq| self.is_pending(seq)).collect();
        if !waiting.is_empty() {
            self.load_failed = !self.load(&waiting)?;
        }
        // The replay reads `load_failed`, so the kind of error does not matter.
        if self.load_failed { Err(Error::EmptyBatch) } else { Ok(()) }
    }

    /// Ends loads: their pages are on the device, or still in swap memory if `failed` is set.
    fn end_load(&mut self, seqs: &[SeqKey], loads: &[(PageId, SwapPageId)], failed: bool) {
        let pages: Vec<_> = loads.iter().map(|load| load.0).collect();
        self.pages.turn(&pages, PageIs::Private, if failed { PageIs::Free } else { PageIs::Cached });
        for held in self.tree.pages.values_mut() {
            if held.page.is_some_and(|page| pages.contains(&page)) {
                if failed {
                    held.page = None
                } else {
                    self.tree.swap.free(held.swap_page.take().expect("it was loaded from there"))
                }
            }
        }
        for cell in self.tree.cells.values_mut() {
            if cell.pages.iter().any(|page| pages.contains(page)) {
                if failed {
                    cell.pages.clear()
                } else {
                    cell.swap_pages.drain(..).for_each(|swap_page| self.tree.swap.free(swap_page))
                }
            }
        }
        if failed {
            return;
        }
        self.tree.swap.loaded += loads.len() as u64;
        let page_size = self.page_size();
        for &seq in seqs {
            let sequence = self.sequences.get_mut(&seq).expect("it runs");
            let pending = std::mem::take(&mut sequence.pending);
            if pending == 0 {
                continue;
            }
            let on_device = std::mem::take(&mut sequence.on_device);
            sequence.cell_pages = 0;
            self.counters.swap_hit_tokens += ((pending - on_device) * page_size) as u64;
            sequence.published += pending;
            sequence.kept = sequence.published;
            let tokens = &sequence.tokens[..sequence.published * page_size];
            sequence.table = self.tree.matched(sequence.scope, tokens);
            let published = sequence.published;
            self.take_tails(seq, published);
            self.update_front(seq, true);
        }
    }
}
