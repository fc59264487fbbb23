//! Eviction: frees the device pages of idle nodes and cells, and swap pages, oldest first.
//!
//! [`PrefixTree::oldest`] chooses the next node or cell, for three loops: `evict` frees device pages, `take_swap_page`
//! swap pages, and `save_ahead` saves the pages that are evicted next. Without swap memory, an eviction drops entries
//! and cells. With it, their pages move: a dirty page is saved, and its entry stays. The engine passes the saves to the
//! backend before another call uses the freed pages (`saves.rs`).
//!
//! Not here: the lists (`order.rs`, `cells.rs`), and the way back (`loads.rs`).

use crate::event::Medium;
use crate::id::{CellId, NodeKey, PageId, SwapPageId};

use super::PrefixTree;
use super::column::prefetch_slot;
use super::cursors::Seek;
use super::nodes::{NO_PAGE, Sides};

/// The oldest idle node or cell that a cursor finds.
#[derive(Clone, Copy)]
pub(super) enum Oldest {
    Node(NodeKey),
    Cell(CellId),
}

impl PrefixTree {
    /// Frees exactly `count` idle device pages, oldest first and deepest first within a path. With groups, frees at
    /// least `count`, because the pages of a cell go together. Appends the pages to `freed`; returns how many of them
    /// are not of cells. O(nodes, cells and pages evicted).
    ///
    /// Dirty pages are saved to free swap pages, then to those of the oldest swap-only entries and cells, which are
    /// dropped. Without such swap pages, the dirty entry or cell is dropped.
    ///
    /// # Panics
    /// If fewer pages are evictable.
    pub fn evict(&mut self, count: u32, freed: &mut Vec<PageId>) -> u32 {
        assert!(count <= self.size_info().evictable, "the caller checked what is evictable");
        let (mut of_nodes, end) = (0, freed.len() + count as usize);
        while freed.len() < end {
            match self.oldest(Seek::DevicePages).expect("T5: evictable pages are idle") {
                Oldest::Node(node) if self.has_swap() => of_nodes += self.move_to_swap(node, end, freed),
                Oldest::Node(node) => {
                    let lacking = (end - freed.len()) as u32;
                    let count = match &self.cells {
                        Some(cells) => cells.victims(&self.nodes, node, lacking),
                        None => self.nodes.entries(node).min(lacking),
                    };
                    self.drop_entries(node, count, freed);
                    of_nodes += count;
                }
                Oldest::Cell(cell) => self.evict_cell(cell, freed),
            }
        }
        of_nodes
    }

    /// Returns the oldest idle node or cell that has what a cursor looks for.
    #[inline]
    pub(super) fn oldest(&mut self, seek: Seek) -> Option<Oldest> {
        if self.ages.is_some() { self.oldest_by_age(seek) } else { self.order.next().map(Oldest::Node) }
    }

    /// Does the work of [`PrefixTree::oldest`] with ages.
    #[cold]
    fn oldest_by_age(&mut self, seek: Seek) -> Option<Oldest> {
        let Self { nodes, usage, order, ages: Some(ages), cells, .. } = self else { return None };
        let has = |node| seek.finds(nodes.sides_of(node), nodes.entries(node));
        let node = ages.seek(seek, |node| order.after(usage, node), has);
        let cell = cells.as_mut().and_then(|cells| cells.seek(seek));
        let node = node.filter(|&node| cell.is_none_or(|(_, age)| ages.of(node) < age));
        node.map(Oldest::Node).or(cell.map(|(cell, _)| Oldest::Cell(cell)))
    }

    /// Frees device pages of an idle node until `freed` contains `end` pages or the node has none left. The pages move
    /// to swap memory. Returns their number.
    #[cold]
    fn move_to_swap(&mut self, node: NodeKey, end: usize, freed: &mut Vec<PageId>) -> u32 {
        let Sides { device, swap_start } = self.nodes.sides_of(node);
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
            if let Some(swap_page) = self.take_swap_page(freed) {
                self.save(node, swap_page);
                self.swap_mut().counts.add_forced(1);
                self.forget_device(node, 1, freed);
            } else {
                // No idle entry is swap-only, so the dirty entry is the last one of its node, and the node is a leaf.
                self.drop_entries(node, 1, freed);
            }
        }
        taken
    }

    /// Frees the last `count` device pages of an idle node. The swap pages of these entries stay.
    fn forget_device(&mut self, node: NodeKey, count: u32, freed: &mut Vec<PageId>) {
        let device = self.nodes.sides_of(node).device;
        let places = device - count..device;
        self.emit_removed(node, Medium::Device, places.clone());
        self.nodes.sides_mut(node).device -= count;
        self.nodes.each_entry_back(node, places, |_, page| freed.push(std::mem::replace(page, NO_PAGE)));
        self.size.evictable -= count;
        self.epoch += 1;
        self.ages.iter_mut().for_each(|ages| ages.move_back(Seek::SwapOnly, node));
    }

    /// Gives a swap page to the last dirty entry of a node, and adds the save to the batch.
    fn save(&mut self, node: NodeKey, swap_page: SwapPageId) {
        let Self { nodes, swap: Some(swap), .. } = self else { return };
        let sides = nodes.sides_mut(node);
        sides.swap_start -= 1;
        let place = sides.swap_start;
        nodes.each_entry_back(node, place..place + 1, |entry, page| swap.save_entry(entry, *page, swap_page));
        swap.saves.push_node(node);
        self.emit_copied(node, Medium::Swap, place..place + 1);
    }

    /// Drops the last `count` entries of an idle node, and the node if no entry is left. Appends device pages to
    /// `freed`.
    #[inline(always)] // Saves 4 % of an eviction at page_size 16.
    pub(super) fn drop_entries(&mut self, node: NodeKey, count: u32, freed: &mut Vec<PageId>) {
        if count == self.nodes.entries(node) {
            self.drop_idle(node, true, freed);
        } else {
            self.detach(node, count, true, freed);
        }
    }

    /// Drops an idle node with all its entries. `is_evicted` as in [`PrefixTree::detach`].
    #[inline(always)] // Saves 3 % of an eviction at page_size 16.
    pub(super) fn drop_idle(&mut self, node: NodeKey, is_evicted: bool, freed: &mut Vec<PageId>) {
        self.detach(node, self.nodes.entries(node), is_evicted, freed);
        self.unlist(node);
        self.despawn(node);
        self.look_ahead();
    }

    /// Takes a node out of the list of idle nodes.
    #[inline(always)] // With `ChildTable::remove`: 3 % of an eviction at page_size 16.
    pub(super) fn unlist(&mut self, node: NodeKey) {
        if let Some(ages) = &mut self.ages {
            ages.leave(node, self.order.after(&self.usage, node));
        }
        self.order.leave(&mut self.usage, node);
    }

    /// Prefetches the data of the evictions after the next one. This data is not in the CPU's caches, and the addresses
    /// depend on each other. For the second node from now, prefetches its page ids and its entry of the child table.
    /// Their addresses follow from the node's columns, so for the third node it prefetches the columns.
    fn look_ahead(&self) {
        let Some(first) = self.order.next() else { return };
        let Some(second) = self.order.after(&self.usage, first) else { return };
        let third = self.order.after(&self.usage, second);
        let (usage, link) = (&self.usage[second], &self.nodes.link[second]);
        self.nodes.children.prefetch(usage.hash);
        self.nodes.lists.prefetch(&link.list);
        if let Some(third) = third {
            prefetch_slot(usage, second, third);
            prefetch_slot(link, second, third);
        }
    }

    /// Frees the device pages of an idle cell. A dirty cell is saved first; it is dropped if swap pages are lacking.
    #[cold]
    fn evict_cell(&mut self, cell: CellId, freed: &mut Vec<PageId>) {
        let (group, entry) = self.cells().entry_of(cell);
        let tracks = self.cells().tracks(cell);
        if self.cells().is_clean(cell) {
            self.swap_mut().clean -= tracks;
        } else if self.save_cell(cell, freed) {
            self.swap_mut().counts.add_forced(tracks);
        } else {
            if self.cells().at(group, entry) == cell {
                self.drop_cell(cell, freed);
            }
            return;
        }
        self.epoch += 1;
        self.cells_mut().forget_device(cell, freed);
    }

    /// Takes swap pages for an idle dirty cell, and adds the saves to the batch. Returns false without swap memory, or
    /// if too few swap pages can be freed. Also returns false if freeing a swap page drops this cell's entry, which
    /// removes the cell.
    fn save_cell(&mut self, cell: CellId, freed: &mut Vec<PageId>) -> bool {
        let ((group, entry), range) = (self.cells().entry_of(cell), self.cells().range(cell));
        for at in range.clone() {
            let page = self.take_swap_page(freed);
            let Self { cells: Some(cells), swap: Some(swap), .. } = self else { return false };
            let taken = range.start..at + cells.set_swap_page(at, page);
            if page.is_none() || cells.at(group, entry) != cell {
                cells.free_swap_pages(taken, swap);
                return false;
            }
        }
        let Self { cells: Some(cells), swap: Some(swap), .. } = self else { return false };
        cells.save(cell, swap);
        true
    }

    /// Drops an idle cell, and counts its pages as lost unless a store has them.
    pub(super) fn drop_cell(&mut self, cell: CellId, freed: &mut Vec<PageId>) {
        let Self { cells: Some(cells), swap, .. } = self else { return };
        cells.remove(cell, true, swap.as_deref_mut(), freed);
        self.epoch += 1;
    }

    /// Takes a free swap page. If none is free, drops the oldest swap-only entries or cells until one is free. One drop
    /// may not suffice, because a page that a put reads stays in use. Device pages of a dropped entry's cells are
    /// appended to `freed`.
    fn take_swap_page(&mut self, freed: &mut Vec<PageId>) -> Option<SwapPageId> {
        loop {
            if let Some(page) = self.swap.as_mut()?.pool.take() {
                return Some(page);
            }
            let oldest = self.oldest(Seek::SwapOnly)?;
            self.drop_oldest(oldest, freed);
        }
    }

    /// Drops the oldest entry or cell that is in swap memory alone, to free swap pages. Device pages of the cells of
    /// the entry are appended to `freed`.
    pub(super) fn drop_oldest(&mut self, oldest: Oldest, freed: &mut Vec<PageId>) {
        let before = self.swap().pool.cached_count();
        match oldest {
            Oldest::Node(node) => self.drop_entries(node, 1, freed),
            Oldest::Cell(cell) => self.drop_cell(cell, freed),
        }
        let swap = self.swap_mut();
        swap.counts.evicted += u64::from(before - swap.pool.cached_count());
    }

    /// Saves the oldest dirty device pages until the `ahead` oldest device pages are clean. Stops early if no swap page
    /// can be taken, or if taking one removes the cell to save. The device pages of the cells of an entry that is
    /// dropped for its swap page are appended to `freed`. O(pages saved).
    pub(crate) fn save_ahead(&mut self, ahead: u32, freed: &mut Vec<PageId>) {
        self.swap_mut().saves.is_ahead = true;
        while self.swap().clean < ahead
            && let Some(oldest) = self.oldest(Seek::Dirty)
        {
            let saved = match oldest {
                Oldest::Node(node) => {
                    let Some(swap_page) = self.take_swap_page(freed) else { return };
                    self.save(node, swap_page);
                    1
                }
                Oldest::Cell(cell) => {
                    if !self.save_cell(cell, freed) {
                        return;
                    }
                    self.cells().tracks(cell)
                }
            };
            let swap = self.swap_mut();
            swap.clean += saved;
            swap.counts.saved += u64::from(saved);
        }
    }
}
