//! Tails: the cells at the end of a match that the next token reads, found along the path of the match.
//!
//! Not here: the cells themselves (`cells.rs`).

use crate::fence::Fence;
use crate::id::{CellId, NodeKey, PageId, PrefixLock, Scope, StepId};
use crate::layout::Limits;
use crate::memory::{Memory, OutOfMemory};

use super::ages::Ages;
use super::cell_moves::drop_swap_copy;
use super::cells::Cells;
use super::span::SpanStore;
use super::walk::Cursor;
use super::{PrefixMatch, PrefixTree};

/// A walk up a path, from its deepest page to its first one.
#[derive(Clone, Copy)]
pub(crate) struct PathCursor {
    node: Option<NodeKey>,
    extent: u32,
    /// Entry of the run's first page.
    entry: u32,
    /// Place of that page in the prefix.
    place: u32,
}

impl PrefixTree {
    /// Turns cells on. The tree must be empty; `pages` are its numbers of device pages and swap pages.
    pub(crate) fn keep_cells(
        &mut self,
        limits: Limits,
        pages: [u32; 2],
        max_steps: u32,
        memory: &mut Memory,
    ) -> Result<(), OutOfMemory> {
        let nodes = pages[0] + pages[1];
        let entries = SpanStore::entry_count(nodes);
        self.cells = Some(Box::new(Cells::new(limits, pages, entries, max_steps, memory)?));
        self.keep_ages(nodes, memory)
    }

    /// Turns on the record of when nodes become idle. The tree must be empty.
    pub(super) fn keep_ages(&mut self, nodes: u32, memory: &mut Memory) -> Result<(), OutOfMemory> {
        if self.ages.is_none() {
            self.ages = Some(Box::new(Ages::new(nodes, memory)?));
        }
        Ok(())
    }

    /// Returns whether there are groups whose cached pages are in cells.
    #[inline]
    pub(crate) fn has_cells(&self) -> bool {
        self.cells.is_some()
    }

    /// Returns the number of cells in the tree, and of cells evicted so far.
    pub(crate) fn cell_counts(&self) -> (u32, u64) {
        self.cells.as_ref().map_or((0, 0), |cells| (cells.count, cells.evicted))
    }

    pub(super) fn cells_ref(&self) -> &Cells {
        self.cells.as_ref().expect("there are groups")
    }

    pub(super) fn ages_ref(&self) -> &Ages {
        self.ages.as_ref().expect("there are cells")
    }

    pub(super) fn cells_mut(&mut self) -> &mut Cells {
        self.cells.as_mut().expect("there are groups")
    }

    fn cursor(&self, node: Option<NodeKey>, pages_in_node: u32, pages: u32) -> PathCursor {
        let Some(at) = node else {
            return PathCursor { node, extent: 0, entry: 0, place: 0 };
        };
        let (extent, entry, len) = self.spans.run_of(&self.link[at].span, pages_in_node);
        PathCursor { node, extent, entry, place: pages - len }
    }

    /// Returns a walk up the path of a lock on `pages` pages.
    pub(crate) fn path_of(&self, lock: &PrefixLock, pages: u32) -> PathCursor {
        let in_node = lock.node().map_or(0, |node| self.link[node].span.pages());
        self.cursor(lock.node(), in_node, pages)
    }

    /// Returns the entry of a place on a path, and moves the walk there. A call's place must not be deeper than the
    /// place of the previous call. O(runs on the way).
    pub(crate) fn entry_at(&self, at: &mut PathCursor, place: u32) -> u32 {
        while place < at.place {
            let mut node = at.node.expect("the path has the place");
            let before = self.spans.run_before(&self.link[node].span, at.extent);
            let (extent, entry, len) = before.unwrap_or_else(|| {
                node = self.link[node].parent.expect("the path has the place");
                let span = &self.link[node].span;
                self.spans.run_of(span, span.pages())
            });
            *at = PathCursor { node: Some(node), extent, entry, place: at.place - len };
        }
        at.entry + (place - at.place)
    }

    /// Returns the longest prefix of a walk whose tails have all their cells. The walk matches `pages` pages in group
    /// 0. O(places from the start of the hit's tails to the end of the walk, for each group).
    ///
    /// Outlined, so that a match pays one comparison where there is one group.
    #[cold]
    #[inline(never)]
    pub(super) fn hit(&self, scope: Scope, full: Cursor, pages: u32) -> PrefixMatch {
        let cells = self.cells_ref();
        let path = self.cursor(full.node, full.pages_in_node, pages);
        // For each group, a walk and a place: all places from this one up to the hit have cells.
        let mut groups = [(path, pages); 3];
        let mut hit = pages;
        'shorter: loop {
            for held in cells.limits.held_groups(hit) {
                let (path, low) = &mut groups[held.group as usize];
                *low = hit.min(*low);
                while *low > held.first {
                    let entry = self.entry_at(path, *low - 1);
                    if !cells.at(held.group, entry).is_some() {
                        hit = *low - 1;
                        continue 'shorter;
                    }
                    *low -= 1;
                }
            }
            break;
        }
        let (mut node, mut pages_in_node, mut end) = (full.node, full.pages_in_node, pages);
        while let Some(at) = node
            && end - pages_in_node >= hit
        {
            end -= pages_in_node;
            node = self.link[at].parent;
            pages_in_node = node.map_or(0, |parent| self.link[parent].span.pages());
        }
        let pages_in_node = pages_in_node - (end - hit);
        let cursor = Cursor { node, pages_in_node };
        let mut found = PrefixMatch { full_pages: pages, ..self.match_at(scope, cursor, hit) };
        if self.has_swap() {
            found.swap_pages = self.swap_only_before(cursor);
            let mut swap_cell_pages = 0;
            self.each_tail_cell(&found, |cell| {
                swap_cell_pages += cells.tracks(cell) - cells.device_tracks(cell);
            });
            found.swap_cell_pages = swap_cell_pages;
        }
        found
    }

    /// Calls `each` with the cells of the tails of a match.
    pub(crate) fn each_tail_cell(&self, found: &PrefixMatch, mut each: impl FnMut(CellId)) {
        let Some(cells) = &self.cells else { return };
        for held in cells.limits.held_groups(found.pages) {
            let mut path = self.cursor(found.node, found.pages_in_node, found.pages);
            for place in (held.first..found.pages).rev() {
                each(cells.at(held.group, self.entry_at(&mut path, place)));
            }
        }
    }

    /// Returns the number of idle pages in the tails of a match, now or as of the completion of `step`.
    #[inline]
    pub(super) fn idle_tail_pages(&self, found: &PrefixMatch, step: Option<StepId>) -> u32 {
        if self.has_cells() { self.idle_cell_pages(found, step) } else { 0 }
    }

    /// Returns [`PrefixTree::idle_tail_pages`] of a tree with groups.
    #[cold]
    #[inline(never)]
    fn idle_cell_pages(&self, found: &PrefixMatch, step: Option<StepId>) -> u32 {
        let mut pages = 0;
        self.each_tail_cell(found, |cell| {
            let cells = self.cells_ref();
            let idle = match step {
                Some(step) => cells.is_idle_after(cell, step),
                None => cells.is_idle(cell),
            };
            pages += if idle { cells.device_tracks(cell) } else { 0 };
        });
        pages
    }

    /// Returns whether a cell is on the device and has no users.
    pub(crate) fn is_idle_cell(&self, cell: CellId) -> bool {
        self.cells_ref().is_on_device(cell) && self.cells_ref().is_idle(cell)
    }

    /// Returns whether a cell has pages on the device.
    pub(crate) fn is_device_cell(&self, cell: CellId) -> bool {
        self.cells_ref().is_on_device(cell)
    }

    /// Returns [`PrefixTree::is_idle_cell`] as of the completion of `step`.
    pub(crate) fn is_idle_cell_after(&self, cell: CellId, step: StepId) -> bool {
        self.cells_ref().is_on_device(cell) && self.cells_ref().is_idle_after(cell, step)
    }

    /// Returns the cell of a group at an entry.
    pub(crate) fn cell_at(&self, group: u32, entry: u32) -> CellId {
        self.cells_ref().at(group, entry)
    }

    /// Returns the pages of a cell that is on the device, one for each track of its group.
    pub(crate) fn cell_pages(&self, cell: CellId) -> &[PageId] {
        self.cells_ref().pages(cell)
    }

    /// Creates a cell of these pages, with one user.
    pub(crate) fn create_cell(&mut self, group: u32, entry: u32, pages: impl Iterator<Item = PageId>) -> CellId {
        let cells = self.cells_mut();
        let cell = cells.create(group, entry, pages);
        self.protected += self.cells_ref().tracks(cell);
        cell
    }

    /// Counts one more user of a cell.
    pub(crate) fn acquire_cell(&mut self, cell: CellId, fence: &mut Fence) {
        let was_idle = self.cells_mut().acquire(cell, fence);
        if was_idle && self.is_device_cell(cell) {
            self.drop_cell_copy(cell);
        }
        let pages = if was_idle { self.cells_ref().device_tracks(cell) } else { 0 };
        self.evictable -= pages;
        self.protected += pages;
    }

    /// Removes a user of a cell now, or when `last_step` is complete.
    pub(crate) fn release_cell(&mut self, cell: CellId, last_step: StepId, fence: &mut Fence) {
        let Self { cells: Some(cells), ages: Some(ages), .. } = self else { return };
        let is_idle = cells.release(cell, last_step, fence, ages);
        let pages = if is_idle { self.cells_ref().device_tracks(cell) } else { 0 };
        self.evictable += pages;
        self.protected -= pages;
    }

    /// Makes cells idle if all their users waited for `step` or an earlier step.
    pub(crate) fn complete_cells(&mut self, step: StepId, fence: &mut Fence) {
        let Self { cells: Some(cells), ages: Some(ages), .. } = self else { return };
        let pages = cells.complete(step, fence, ages);
        self.evictable += pages;
        self.protected -= pages;
    }

    /// Calls `each` for the cells of the tails at the end of the first `pages` pages of a lock's path. The groups are
    /// in order; in each group, the last place comes first. O(tails).
    pub(super) fn for_tails(&mut self, lock: &PrefixLock, pages: u32, mut each: impl FnMut(&mut Self, CellId)) {
        let Some(limits) = self.cells.as_ref().map(|cells| cells.limits) else { return };
        for held in limits.held_groups(pages) {
            let mut path = self.path_of(lock, pages);
            for place in (held.first..pages).rev() {
                let cell = self.cell_at(held.group, self.entry_at(&mut path, place));
                each(self, cell);
            }
        }
    }

    /// Adds a user to the cells of a lock's tails: a sequence that waits for its prefix.
    pub(crate) fn acquire_tails(&mut self, lock: &PrefixLock, pages: u32, fence: &mut Fence) {
        self.for_tails(lock, pages, |tree, cell| tree.acquire_cell(cell, fence));
    }

    /// Undoes [`PrefixTree::acquire_tails`].
    pub(crate) fn release_tails(&mut self, lock: &PrefixLock, pages: u32, fence: &mut Fence) {
        self.for_tails(lock, pages, |tree, cell| tree.release_cell(cell, StepId::default(), fence));
    }

    /// Drops the cells at the last `count` entries of a node, which are about to be removed.
    pub(super) fn drop_cells(&mut self, node: NodeKey, count: u32, freed: &mut Vec<PageId>) {
        let Self { cells, spans, link, evictable, swap, .. } = self;
        let cells = cells.as_mut().expect("there are groups");
        for (start, len) in spans.last_runs_back(&link[node].span, count) {
            for entry in start..start + len {
                for group in 0..cells.limits.count() {
                    let cell = cells.at(group, entry);
                    if cell.is_some() {
                        if let Some(swap) = swap {
                            drop_swap_copy(cells, swap, cell);
                        }
                        *evictable -= cells.device_tracks(cell);
                        cells.remove(cell, freed);
                    }
                }
            }
        }
    }

    /// Takes at least `count` pages of idle nodes and idle cells, in the order in which these became idle. The tree has
    /// groups and no swap memory. Returns the number of taken pages that are not of cells.
    pub(crate) fn evict_groups(&mut self, count: u32, freed: &mut Vec<PageId>) -> u32 {
        let (mut of_spans, end) = (0, freed.len() + count as usize);
        while freed.len() < end {
            let cells = self.cells_ref();
            let (cell, node) = (cells.idle.oldest, self.order.next());
            let stamp = node.map_or(u64::MAX, |node| self.ages_ref().of(node));
            let before = cells.count;
            if cell.is_some() && cells.cells[cell.index()].stamp < stamp {
                self.evictable -= self.cells_ref().tracks(cell);
                self.epoch += 1;
                self.cells_mut().remove(cell, freed);
            } else {
                let node = node.expect("T5: evictable pages are in idle nodes and cells");
                let lacking = (end - freed.len()) as u32;
                let pages = self.victims(node, lacking);
                of_spans += pages;
                match pages == self.link[node].span.pages() {
                    true => self.drop_idle(node, true, freed),
                    false => self.detach_pages(node, pages, true, freed),
                }
            }
            let evicted = u64::from(before - self.cells_ref().count);
            self.cells_mut().evicted += evicted;
        }
        of_spans
    }

    /// Returns the number of pages to take from the end of an idle node, so that these pages and their cells free at
    /// least `lacking` pages. If the whole node does not suffice, returns the number of its pages.
    fn victims(&self, node: NodeKey, lacking: u32) -> u32 {
        let (cells, span) = (self.cells_ref(), &self.link[node].span);
        let (mut pages, mut yielded) = (0, 0);
        for (start, len) in self.spans.last_runs_back(span, span.pages()) {
            for entry in (start..start + len).rev() {
                let own = (0..cells.limits.count()).map(|group| cells.at(group, entry));
                let own = own.filter(|cell| cell.is_some()).map(|cell| cells.tracks(cell));
                yielded += 1 + own.sum::<u32>();
                pages += 1;
                if yielded >= lacking {
                    return pages;
                }
            }
        }
        pages
    }
}
