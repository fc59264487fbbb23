//! Cells of the model: each has the pages of one limited group for the tokens of one cached page. Searches look at all
//! cells.

use std::cmp::Reverse;
use std::ops::Range;

use super::Model;
use super::open_moves::{CellKey, Path};
use super::tree::{CellHeld, Tree};
use crate::id::{Namespace, PageId, Scope, SeqKey, TokenId};
use crate::layout::{PoolLayout, Reach};

impl Tree {
    /// Turns cells on, for the limited groups of a pool.
    pub(super) fn keep_groups(&mut self, layout: &PoolLayout) {
        let mut start = 0;
        let limited = |(group, reach)| {
            let tracks = start..start + layout.tracks_of(group) as usize;
            start = tracks.end;
            (reach, tracks)
        };
        self.limited = layout.groups().limited().map(limited).collect();
        self.has_state = layout.state().is_some();
        let groups = layout.groups();
        self.groups = groups.limited().map(|(group, _)| group).chain(groups.state_group()).collect();
        let sizes = self.limited.iter().map(|(_, tracks)| tracks.len());
        self.cell_sizes = sizes.chain(layout.state().map(|state| state.pages as usize)).collect();
    }

    /// Returns the first place that a sequence holds in a track of this reach when `published` of its pages are
    /// published. The place contains the first token that the token after these pages reads.
    pub(super) fn first_held(&self, reach: Reach, published: usize) -> usize {
        let next = published * self.page_size;
        let sees = |seen: &usize| match reach {
            Reach::Window(size) => next - seen < size as usize,
            Reach::Chunk(size) => next / size as usize == seen / size as usize,
            _ => true,
        };
        (0..=next).find(sees).expect("a token reads itself") / self.page_size
    }

    /// Returns the places of a group's tail at a mark: those before the mark that the next token reads.
    fn tail(&self, reach: Reach, mark: usize) -> Range<usize> {
        self.first_held(reach, mark)..mark
    }

    /// Returns the number of pages of the longest prefix of a text whose tails have all their cells.
    pub(super) fn hit(&self, scope: Scope, tokens: &[TokenId]) -> usize {
        self.longest(scope, tokens, |key| self.cells.contains_key(key))
    }

    /// Returns whether a cell was evicted from a page that is still cached, and if so, whether it was superseded.
    fn gone(&self, key: &CellKey) -> Option<bool> {
        let (version, superseded) = *self.gone.get(key).filter(|_| !self.cells.contains_key(key))?;
        self.pages.get(&key.1).filter(|page| page.version == version).map(|_| superseded)
    }

    /// Returns the numbers of pages between the hit of a text and the longest prefix whose tails have or had all their
    /// cells: those lost by superseded cells, and those lost by evicted ones.
    pub(super) fn gone_pages(&self, scope: Scope, tokens: &[TokenId]) -> [usize; 2] {
        let hit = self.hit(scope, tokens);
        let had = self.longest(scope, tokens, |key| self.cells.contains_key(key) || self.gone(key).is_some());
        let lacking = self.tail_cells(scope, tokens, had);
        let superseded = had > hit && lacking.iter().any(|key| self.gone(key) == Some(true));
        if superseded { [had - hit, 0] } else { [0, had - hit] }
    }

    /// Returns the number of pages of the longest prefix of a text whose tails have only cells that `are`.
    fn longest(&self, scope: Scope, tokens: &[TokenId], are: impl Fn(&CellKey) -> bool) -> usize {
        let has = |group, place| are(&self.key(group, scope, tokens, place));
        let complete = |pages: &usize| {
            let mut groups = self.limited.iter().enumerate();
            let has_state = !self.has_state || *pages == 0 || has(self.limited.len(), pages - 1);
            has_state && groups.all(|(group, (reach, _))| self.tail(*reach, *pages).all(|at| has(group, at)))
        };
        let full = self.matched_len(scope, tokens);
        (0..=full).rev().find(complete).expect("the empty prefix always matches")
    }

    /// Returns every cell of the kept generation: its group, and what [`Tree::present`] returns of its page and of the
    /// cell's media.
    pub(super) fn present_cells(&self) -> impl Iterator<Item = (u32, (Namespace, &[TokenId], [bool; 2]))> {
        let kept = |((_, path), _): &(&CellKey, &CellHeld)| self.kept_generation == Some(path.1);
        self.cells.iter().filter(kept).map(|((index, (namespace, _, tokens)), cell)| {
            let media = [!cell.pages.is_empty(), !cell.swap_pages.is_empty()];
            (self.groups[*index], (Namespace::new(*namespace), tokens.as_slice(), media))
        })
    }

    /// Returns the keys of all cells in the tails of a prefix; the state comes last.
    pub(super) fn tail_cells(&self, scope: Scope, tokens: &[TokenId], pages: usize) -> Vec<CellKey> {
        let state = (self.has_state && pages > 0).then(|| self.state_key(scope, tokens, pages));
        let mut keys = self.tail_cells_of_tracks(scope, tokens, pages);
        keys.extend(state);
        keys
    }

    /// Returns the keys of the cells in the tails of a prefix, without that of its state.
    pub(super) fn tail_cells_of_tracks(&self, scope: Scope, tokens: &[TokenId], pages: usize) -> Vec<CellKey> {
        let keys = self.limited.iter().enumerate().flat_map(|(group, (reach, _))| {
            let places = self.tail(*reach, pages);
            places.map(move |at| self.key(group, scope, tokens, at))
        });
        keys.collect()
    }

    /// Returns the number of idle pages in the cells of the tails of a prefix.
    pub(super) fn idle_in_tails(&self, scope: Scope, tokens: &[TokenId], pages: usize) -> u32 {
        let keys = self.tail_cells(scope, tokens, pages);
        let cells = keys.iter().map(|key| &self.cells[key]);
        cells.filter(|cell| cell.is_idle()).map(|cell| cell.pages.len() as u32).sum()
    }

    /// Returns the key of a group's cell at page `place` of a path.
    fn key(&self, group: usize, scope: Scope, tokens: &[TokenId], place: usize) -> CellKey {
        (group, self.path(scope, tokens, place + 1))
    }

    pub(super) fn release_cell(&mut self, key: &CellKey, last_step: u64, completed: u64, superseded: bool) {
        self.clock += 1;
        let cell = self.cells.get_mut(key).expect("a used cell is cached");
        cell.superseded = superseded;
        cell.users -= 1;
        if last_step > completed {
            cell.waits.push(last_step);
        }
        cell.since = self.clock;
        if cell.is_idle() {
            self.date_idle(key);
        }
    }

    /// Completes the steps up to this one. Cells that waited for them become idle, in the order of their steps. Cells
    /// of one step become idle in the order in which they began to wait.
    pub(super) fn complete_cells(&mut self, step: u64) {
        let mut idle = Vec::new();
        for (key, cell) in &mut self.cells {
            let until = cell.waits.iter().max().copied();
            cell.waits.retain(|&waits| waits > step);
            if cell.users == 0 && cell.waits.is_empty() {
                idle.extend(until.map(|until| (until, cell.since, key.clone())));
            }
        }
        idle.sort();
        for (_, _, key) in idle {
            self.date_idle(&key);
        }
    }

    /// Sets the time when a cell becomes idle: now, or before all others if it is superseded.
    fn date_idle(&mut self, key: &CellKey) {
        self.clock += 1;
        let cell = self.cells.get_mut(key).expect("it is cached");
        cell.since = self.clock;
        if cell.superseded && !cell.junction {
            self.oldest -= 1;
            cell.since = self.oldest;
        }
    }

    /// Returns the last step of each cell that has no users but waits for steps.
    pub(super) fn cell_steps(&self) -> impl Iterator<Item = u64> + '_ {
        let deferred = self.cells.values().filter(|cell| cell.users == 0);
        deferred.filter_map(|cell| cell.waits.iter().max().copied())
    }

    /// Returns the oldest idle cell on the device, and the time when it became idle.
    pub(super) fn oldest_cell(&self) -> Option<(u64, CellKey)> {
        let idle = self.cells.iter().filter(|(_, cell)| cell.is_idle() && !cell.pages.is_empty());
        idle.map(|(key, cell)| (cell.since, key.clone())).min()
    }

    /// Drops the cells at a page that is removed. Returns their device pages.
    pub(super) fn drop_cells(&mut self, path: &Path) -> Vec<PageId> {
        let here: Vec<_> = self.cells.keys().filter(|key| key.1 == *path).cloned().collect();
        here.iter().flat_map(|key| self.remove_cell(key)).collect()
    }

    /// Counts one more user of a cell. A used cell on the device has no swap pages.
    pub(super) fn acquire_cell(&mut self, key: &CellKey) {
        let cell = self.cells.get_mut(key).expect("it is cached");
        cell.users += 1;
        if !cell.pages.is_empty() {
            cell.swap_pages.drain(..).for_each(|swap_page| self.swap.free(swap_page));
        }
    }

    /// Returns the number of pages of those cells in a prefix's tails that are in swap memory alone.
    pub(super) fn swap_tail_pages(&self, scope: Scope, tokens: &[TokenId], pages: usize) -> usize {
        let keys = self.tail_cells(scope, tokens, pages);
        keys.iter().map(|key| self.cells[key].swap_only()).sum()
    }

    /// Returns the number of device pages in the cells of some groups, by index in `groups`.
    pub(super) fn cell_pages_of(&self, is: impl Fn(usize) -> bool) -> u32 {
        self.cells.iter().filter(|(key, _)| is(key.0)).map(|(_, cell)| cell.pages.len() as u32).sum()
    }

    pub(super) fn cell_pages(&self, is: impl Fn(&CellHeld) -> bool) -> u32 {
        self.cells.values().filter(|cell| is(cell)).map(|cell| cell.pages.len() as u32).sum()
    }
}

impl Model {
    /// Makes a sequence a user of the cells in the tails of its first `pages` pages. The cells may still be in swap
    /// memory alone.
    pub(super) fn use_tails(&mut self, seq: SeqKey, pages: usize) {
        let sequence = &self.sequences[&seq];
        for key in self.tree.tail_cells(sequence.scope, &sequence.tokens, pages) {
            self.tree.acquire_cell(&key);
        }
    }

    /// Undoes [`Model::use_tails`], group by group, beginning with the last place of each.
    pub(super) fn leave_tails(&mut self, seq: SeqKey, pages: usize) {
        let sequence = &self.sequences[&seq];
        let mut keys = self.tree.tail_cells(sequence.scope, &sequence.tokens, pages);
        keys.sort_by_key(|(group, path)| (*group, Reverse(path.2.len())));
        keys.iter().for_each(|key| self.tree.release_cell(key, 0, self.completed, false));
    }

    /// Writes the pages of the cells in the tails of a sequence's first `pages` pages into its empty tables. The
    /// sequence already is a user of these cells.
    pub(super) fn take_tails(&mut self, seq: SeqKey, pages: usize) {
        let limited = self.tree.limited.clone();
        let firsts: Vec<_> = limited.iter().map(|(reach, _)| self.tree.first_held(*reach, pages)).collect();
        let sequence = self.sequences.get_mut(&seq).expect("the caller has checked");
        sequence.cells = vec![Default::default(); limited.len()];
        sequence.others.iter_mut().for_each(|own| *own = vec![PageId::default(); pages]);
        for (group, (_, tracks)) in limited.into_iter().enumerate() {
            sequence.held[tracks.clone()].fill(firsts[group]);
            for place in firsts[group]..pages {
                let key = self.tree.key(group, sequence.scope, &sequence.tokens, place);
                let cell = &self.tree.cells[&key];
                for (track, page) in tracks.clone().zip(&cell.pages) {
                    sequence.others[track][place] = *page;
                }
                sequence.cells[group].insert(place);
            }
        }
        self.take_state(seq, pages);
    }

    /// Makes cells of the private pages in a sequence's tails at a mark. If the tree already has a cell with device
    /// pages, the sequence switches to the cell's pages. A cell in swap memory alone takes the sequence's pages.
    /// Returns the sequence's duplicate pages.
    pub(super) fn keep_tails(&mut self, seq: SeqKey, mark: usize) -> Vec<PageId> {
        let mut duplicates = Vec::new();
        let sequence = self.sequences.get_mut(&seq).expect("the caller has checked");
        sequence.kept = sequence.kept.max(mark);
        for (group, (reach, tracks)) in self.tree.limited.clone().into_iter().enumerate() {
            for place in self.tree.tail(reach, mark).rev() {
                let sequence = self.sequences.get_mut(&seq).expect("the caller has checked");
                if !sequence.cells[group].insert(place) {
                    continue;
                }
                let key = self.tree.key(group, sequence.scope, &sequence.tokens, place);
                let pages: Vec<_> = sequence.others[tracks.clone()].iter().map(|own| own[place]).collect();
                if let Some(cell) = self.tree.cells.get_mut(&key) {
                    if cell.pages.is_empty() {
                        self.pages.turn(&pages, super::PageIs::Private, super::PageIs::Cached);
                        cell.pages = pages;
                        self.tree.acquire_cell(&key);
                        continue;
                    }
                    self.tree.acquire_cell(&key);
                    let cell = &self.tree.cells[&key];
                    for (track, page) in tracks.clone().zip(&cell.pages) {
                        sequence.others[track][place] = *page;
                    }
                    duplicates.extend(pages);
                } else {
                    self.pages.turn(&pages, super::PageIs::Private, super::PageIs::Cached);
                    let cell = CellHeld { pages, users: 1, ..CellHeld::default() };
                    self.tree.cells.insert(key.clone(), cell);
                    self.tree.queue_put(key.0 + 1, &key.1);
                }
            }
        }
        duplicates
    }

    /// Takes from a sequence its held pages of each limited group up to the place that `end` returns for the group's
    /// reach. Their cells lose a user. Returns the private pages.
    pub(super) fn take_held(&mut self, seq: SeqKey, end: impl Fn(&Self, Reach) -> usize) -> Vec<PageId> {
        let mut pages = Vec::new();
        for (group, (reach, tracks)) in self.tree.limited.clone().into_iter().enumerate() {
            let end = end(self, reach);
            let sequence = self.sequences.get_mut(&seq).expect("the caller has checked");
            let (scope, last_step) = (sequence.scope, sequence.last_step);
            for place in sequence.held[tracks.start]..end {
                if sequence.cells[group].remove(&place) {
                    let key = self.tree.key(group, scope, &sequence.tokens, place);
                    self.tree.release_cell(&key, last_step, self.completed, false);
                } else {
                    pages.extend(sequence.others[tracks.clone()].iter().map(|own| own[place]));
                }
            }
            sequence.held[tracks].fill(end);
        }
        pages
    }
}
