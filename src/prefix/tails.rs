//! Tails: the cells at the end of a match that the next token reads, found along the path of the match.
//!
//! Not here: the cells themselves (`cells.rs`).

use crate::fence::Fence;
use crate::id::{CellId, PageId, PrefixLock, Scope, StepId};

use super::cells::Gone;
use super::nodes::Cursor;
use super::{PrefixMatch, PrefixTree};

impl PrefixTree {
    /// Returns the longest prefix of a walk whose tails have all their cells. The walk matches `pages` pages in group
    /// 0. O(places from the start of the hit's tails to the end of the walk, for each group).
    #[cold]
    pub(super) fn hit(&self, scope: Scope, full: Cursor, pages: u32) -> PrefixMatch {
        let (nodes, cells) = (&self.nodes, self.cells());
        let hit = self.longest(full, pages, |group, entry| cells.at(group, entry).is_some());
        let cursor = nodes.cursor_at(full, pages, hit);
        let goes_on = |node| full.pages_in_node < nodes.entries(node) || self.usage[node].child_count > 0;
        let branches = full.node.is_some_and(goes_on);
        let mut found = PrefixMatch { full_pages: pages, branches, ..self.match_at(scope, cursor, hit) };
        if hit < pages {
            let had = |group, entry| cells.at(group, entry).is_some() || cells.gone(group, entry) != Gone::Never;
            found.had_pages = self.longest(full, pages, had);
            let mut lacking =
                nodes.tails(cells.limits(), nodes.cursor_at(full, pages, found.had_pages), found.had_pages);
            found.was_superseded = lacking.any(|tail| cells.gone(tail.held.group, tail.entry) == Gone::Superseded);
        }
        if self.has_swap() {
            found.swap_pages = nodes.swap_only_before(cursor);
            let swap_only = self.tails(cursor, hit).filter(|&cell| !cells.is_on_device(cell));
            found.swap_cell_pages = swap_only.map(|cell| cells.tracks(cell)).sum();
        }
        found
    }

    /// Returns the longest prefix of a walk that matches `pages` pages in group 0, so that `are` returns true for all
    /// cells of its tails, by group and entry. O(places from the start of the prefix's tails to the end of the walk,
    /// for each group).
    fn longest(&self, full: Cursor, pages: u32, are: impl Fn(u32, u32) -> bool) -> u32 {
        let (nodes, cells) = (&self.nodes, self.cells());
        let path = nodes.path_from(full, pages);
        // For each group, a walk and a place: all places from this one up to the hit have cells.
        let mut groups = [(path, pages); 3];
        let mut hit = pages;
        'shorter: loop {
            for held in cells.limits().tails(hit) {
                let (path, low) = &mut groups[held.group as usize];
                *low = hit.min(*low);
                while *low > held.first {
                    let entry = nodes.entry_at(path, *low - 1);
                    if !are(held.group, entry) {
                        hit = *low - 1;
                        continue 'shorter;
                    }
                    *low -= 1;
                }
            }
            return hit;
        }
    }

    /// Returns the cells of the tails of a path that ends at a position, with `pages` pages before it. The groups are
    /// in order; in each group, the last place comes first. O(tails).
    pub(crate) fn tails(&self, end: Cursor, pages: u32) -> impl Iterator<Item = CellId> {
        self.cells.iter().flat_map(move |cells| {
            let tails = self.nodes.tails(cells.limits(), end, pages);
            tails.map(|tail| cells.at(tail.held.group, tail.entry))
        })
    }

    /// Counts one more user of a cell.
    pub(crate) fn acquire_cell(&mut self, cell: CellId, fence: &mut Fence) {
        let Self { cells: Some(cells), swap, .. } = self else { return };
        cells.acquire(cell, swap.as_deref_mut(), fence);
    }

    /// Removes a user of a cell now, or when `last_step` is complete.
    pub(crate) fn release_cell(&mut self, cell: CellId, last_step: StepId, fence: &mut Fence) {
        let Self { cells: Some(cells), ages: Some(ages), .. } = self else { return };
        cells.release(cell, last_step, false, fence, ages);
    }

    /// Removes a user of a cell with a state, as [`PrefixTree::release_cell`] does. If the user was the last one and
    /// `superseded`, the cell becomes the oldest one, and the result is true.
    pub(crate) fn release_state(
        &mut self,
        cell: CellId,
        last_step: StepId,
        superseded: bool,
        fence: &mut Fence,
    ) -> bool {
        let Self { cells: Some(cells), ages: Some(ages), .. } = self else { return false };
        cells.release(cell, last_step, superseded, fence, ages);
        cells.is_superseded(cell)
    }

    /// Makes cells idle if all their users waited for `step` or an earlier step.
    pub(crate) fn complete_cells(&mut self, step: StepId, fence: &mut Fence) {
        let Self { cells: Some(cells), ages: Some(ages), .. } = self else { return };
        cells.complete(step, fence, ages);
    }

    /// Attaches device pages to a cell that is in swap memory alone. A sequence has computed these pages.
    pub(crate) fn restore_cell(&mut self, cell: CellId, pages: impl Iterator<Item = PageId>) {
        let Self { cells: Some(cells), swap: Some(swap), .. } = self else { return };
        cells.set_computed(cell, pages, swap);
        self.epoch += 1;
    }

    /// Adds a user to the cells of a lock's tails: a sequence that waits for its prefix.
    pub(crate) fn acquire_tails(&mut self, lock: &PrefixLock, pages: u32, fence: &mut Fence) {
        let Self { nodes, cells: Some(cells), swap, .. } = self else { return };
        let limits = *cells.limits();
        for tail in nodes.lock_tails(&limits, lock, pages) {
            cells.acquire(cells.at(tail.held.group, tail.entry), swap.as_deref_mut(), fence);
        }
    }

    /// Undoes [`PrefixTree::acquire_tails`].
    pub(crate) fn release_tails(&mut self, lock: &PrefixLock, pages: u32, fence: &mut Fence) {
        let Self { nodes, cells: Some(cells), ages: Some(ages), .. } = self else { return };
        let limits = *cells.limits();
        for tail in nodes.lock_tails(&limits, lock, pages) {
            cells.release(cells.at(tail.held.group, tail.entry), StepId::default(), false, fence, ages);
        }
    }
}
