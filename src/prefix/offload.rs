//! Moves of idle pages to swap memory: evictions of the oldest device pages, and saves ahead of evictions.
//!
//! The tree collects a batch of saves. The engine passes it to the backend before another call uses the freed pages.
//!
//! Not here: the columns (`swap.rs`), the way back (`restore.rs`).

use crate::event::Medium;
use crate::id::{MoveId, NodeKey, PageId, SwapPageId};
use crate::plan::PageMove;

use super::PrefixTree;
use super::cell_moves::Oldest;
use super::residency::{NO_PAGE, Residency, Seek};

impl PrefixTree {
    /// Takes exactly `count` idle device pages of a tree with swap memory, oldest first. With groups, takes at least
    /// `count`, because cells move whole. Dirty pages are saved to free swap pages, then to those of the oldest
    /// swap-only entries and cells, which are dropped. Without such swap pages, the dirty entry or cell is dropped.
    /// Returns the number of taken pages that are not of cells. O(nodes and pages evicted).
    pub(crate) fn evict_to_swap(&mut self, count: u32, freed: &mut Vec<PageId>) -> u32 {
        assert!(count <= self.evictable, "the caller checked what is evictable");
        let (mut of_spans, end) = (0, freed.len() + count as usize);
        while freed.len() < end {
            match self.oldest(Seek::DevicePages).expect("T5: evictable pages are idle") {
                Oldest::Node(node) => of_spans += self.offload(node, end, freed),
                Oldest::Cell(cell) => self.offload_cell(cell, freed),
            }
        }
        of_spans
    }

    /// Frees device pages of an idle node until `freed` contains `end` pages or the node has none left. Returns their
    /// number.
    fn offload(&mut self, node: NodeKey, end: usize, freed: &mut Vec<PageId>) -> u32 {
        let Residency { device, swap_start } = self.swap_ref().residency[node];
        let count = device.min((end - freed.len()) as u32);
        let clean = count.min(device - swap_start);
        if clean > 0 {
            self.forget_device(node, clean, freed);
            self.swap_mut().clean -= clean;
        }
        let mut taken = clean;
        // The count may be reached early: an entry that is dropped for its swap page frees the pages of its cells.
        while taken < count && freed.len() < end {
            taken += 1;
            if !self.offload_one(node, freed) {
                break;
            }
        }
        taken
    }

    /// Frees the last `count` device pages of an idle node. The swap pages of these entries stay.
    fn forget_device(&mut self, node: NodeKey, count: u32, freed: &mut Vec<PageId>) {
        let device = self.swap_ref().residency[node].device;
        let places = device - count..device;
        self.emit_removed(node, Medium::Device, places.clone());
        let Self { swap: Some(swap), spans, link, .. } = self else { return };
        swap.residency[node].device -= count;
        spans.each_entry_back(&link[node].span, places, |_, page| {
            freed.push(std::mem::replace(page, NO_PAGE));
        });
        self.evictable -= count;
        self.epoch += 1;
        self.seek_from(Seek::SwapOnly, node);
    }

    /// Saves and frees the last device page of an idle node, which is dirty. If no swap page can be taken, the entry is
    /// dropped. Returns whether the node still exists.
    fn offload_one(&mut self, node: NodeKey, freed: &mut Vec<PageId>) -> bool {
        let Some(swap_page) = self.take_swap_page(freed) else {
            // No idle entry is swap-only, so this entry is the last one of its node, and the node is a leaf.
            return self.drop_last(node, freed);
        };
        self.save(node, swap_page);
        let counts = &mut self.swap_mut().counts;
        (counts.saved, counts.forced) = (counts.saved + 1, counts.forced + 1);
        self.forget_device(node, 1, freed);
        true
    }

    /// Gives a swap page to the last dirty entry of a node, and adds the save to the batch.
    fn save(&mut self, node: NodeKey, swap_page: SwapPageId) {
        let Self { swap: Some(swap), spans, link, .. } = self else { return };
        let id = swap.next_move();
        let swap_start = &mut swap.residency[node].swap_start;
        *swap_start -= 1;
        let place = *swap_start;
        let (_, start, len) = spans.run_of(&link[node].span, place + 1);
        let entry = start + len - 1;
        let device = spans.pages_of_run(entry, 1)[0];
        swap.of_entry[entry as usize] = swap_page;
        swap.pool.set_save(swap_page, id);
        swap.saves.push(PageMove { device, swap: swap_page });
        swap.saves.push_node(node);
        self.emit_copied(node, Medium::Swap, place..place + 1);
    }

    /// Takes a free swap page. If none is free, drops the oldest swap-only entries or cells until one is free. One drop
    /// may not suffice, because a page that a put reads stays in use. Device pages of a dropped entry's cells are
    /// appended to `freed`.
    pub(super) fn take_swap_page(&mut self, freed: &mut Vec<PageId>) -> Option<SwapPageId> {
        loop {
            let pool = &mut self.swap_mut().pool;
            if let Some(page) = pool.take() {
                return Some(page);
            }
            let before = pool.cached_count();
            match self.oldest(Seek::SwapOnly)? {
                Oldest::Node(node) => _ = self.drop_last(node, freed),
                Oldest::Cell(cell) => self.lose_idle_cell(cell, freed),
            }
            let swap = self.swap_mut();
            swap.counts.evicted += u64::from(before - swap.pool.cached_count());
        }
    }

    /// Drops the last entry of an idle node. Returns whether the node still exists.
    fn drop_last(&mut self, node: NodeKey, freed: &mut Vec<PageId>) -> bool {
        let stays = self.link[node].span.pages() > 1;
        self.lose_entries(node, 1, freed);
        stays
    }

    /// Drops the last `count` entries of an idle node. Counts the pages that no store has, and those of cells, as lost.
    pub(super) fn lose_entries(&mut self, node: NodeKey, count: u32, freed: &mut Vec<PageId>) {
        let entries = self.link[node].span.pages();
        let Self { swap: Some(swap), spans, link, .. } = self else { return };
        let (lost, puts) = (&mut swap.counts.lost, &swap.puts);
        spans.each_entry_back(&link[node].span, entries - count..entries, |entry, _| {
            *lost += u64::from(!puts.is_stored(entry));
        });
        let removed = |tree: &Self| tree.cells.as_ref().map_or([0; 2], |cells| cells.removed);
        let before = removed(self);
        match count == entries {
            true => self.drop_entries(node, true, freed),
            false => self.detach_entries(node, count, true, freed),
        }
        let [pages, on_device] = removed(self);
        self.swap_mut().counts.lost += pages - before[0];
        if let Some(cells) = &mut self.cells {
            cells.evicted += on_device - before[1];
        }
    }

    /// Saves the oldest dirty device pages until the `ahead` oldest device pages are clean. Stops early if no swap page
    /// can be taken, or if taking one removes the cell to save. The device pages of the cells of an entry that is
    /// dropped for its swap page are appended to `freed`. O(pages saved).
    pub(crate) fn save_ahead(&mut self, ahead: u32, freed: &mut Vec<PageId>) {
        self.swap_mut().saves.is_ahead = true;
        while self.swap_ref().clean < ahead
            && let Some(oldest) = self.oldest(Seek::Dirty)
            && let Some(saved) = self.save_oldest(oldest, freed)
        {
            let swap = self.swap_mut();
            swap.clean += saved;
            swap.counts.saved += u64::from(saved);
        }
    }

    /// Saves a cell, or the last dirty page of a node. Returns the number of pages; `None` if swap pages are lacking,
    /// or if freeing one has removed the cell.
    fn save_oldest(&mut self, oldest: Oldest, freed: &mut Vec<PageId>) -> Option<u32> {
        match oldest {
            Oldest::Node(node) => {
                let swap_page = self.take_swap_page(freed)?;
                self.save(node, swap_page);
                Some(1)
            }
            Oldest::Cell(cell) => self.save_cell(cell, freed).then(|| self.cells_ref().tracks(cell)),
        }
    }

    /// Returns the saves that wait for the backend, and the number of their batch; `None` if there are none.
    pub(crate) fn saves(&mut self) -> Option<(MoveId, &[PageMove])> {
        if self.swap.as_ref()?.saves.is_empty() {
            self.end_saves(false, &mut Vec::new());
            return None;
        }
        let swap = self.swap_mut();
        swap.last_move = swap.next_move();
        Some((swap.last_move, swap.saves.moves()))
    }

    /// Ends the batch of saves. If it failed, entries that were saved ahead are dirty again. Entries that were saved by
    /// an eviction are dropped with all entries after them. Device pages of the cells of dropped entries are appended
    /// to `freed`. O(cells saved), after a failure O(idle nodes, times the nodes of the batch and below).
    pub(crate) fn end_saves(&mut self, failed: bool, freed: &mut Vec<PageId>) {
        if failed {
            let swap = self.swap_mut();
            swap.counts.failed += swap.saves.moves().len() as u64;
            match swap.saves.is_ahead {
                true => self.undo_saves(),
                false => self.drop_failed(freed),
            }
            self.fail_cell_saves(freed);
        }
        self.end_cell_saves();
        self.swap_mut().saves.clear();
    }

    /// Makes the entries of a batch dirty again.
    fn undo_saves(&mut self) {
        for index in 0..self.swap_ref().saves.nodes().len() {
            let (node, count) = self.swap_ref().saves.nodes()[index];
            let swap_start = self.swap_ref().residency[node].swap_start;
            self.emit_removed(node, Medium::Swap, swap_start..swap_start + count);
            let Self { swap: Some(swap), spans, link, .. } = self else { return };
            swap.residency[node].swap_start = swap_start + count;
            swap.clean -= count;
            let span = &link[node].span;
            spans.each_entry_back(span, swap_start..swap_start + count, |entry, _| swap.drop_swap_page(entry));
            self.seek_from(Seek::Dirty, node);
        }
    }

    /// Drops the swap-only entries of the batch's nodes, and all nodes below.
    fn drop_failed(&mut self, freed: &mut Vec<PageId>) {
        let mut failed: Vec<NodeKey> = Vec::new();
        let mut youngest = None;
        for &(node, _) in self.swap_ref().saves.nodes() {
            // The node may have been dropped since the save, so that another entry could use its swap page.
            if self.link.contains_key(node) && !failed.contains(&node) {
                failed.push(node);
                youngest = Some(node);
            }
        }
        // Children are older than their parents: from the young end on, a node's parent is seen first.
        let (mut below, mut at) = (Vec::new(), youngest);
        while let Some(node) = at {
            let parent = self.link[node].parent;
            if parent.is_some_and(|parent| failed.contains(&parent) || below.contains(&parent)) {
                below.push(node);
            }
            at = self.order.before(&self.usage, node);
        }
        for node in below.into_iter().rev() {
            let entries = self.link[node].span.pages();
            self.lose_entries(node, entries, freed);
        }
        for node in failed {
            let Some(link) = self.link.get(node) else { continue };
            let entries = link.span.pages();
            let device = self.device_pages(node, entries);
            if device < entries {
                self.lose_entries(node, entries - device, freed);
            }
        }
    }
}
