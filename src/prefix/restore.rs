//! The way back from swap memory: entries in use get device pages, by a load or from a sequence that computed them.
//!
//! A sequence whose lock's path has swap-only entries waits: its page table lacks their pages until they are loaded.
//!
//! Not here: which pages the entries get (`system/load.rs`), moves to swap memory (`offload.rs`).

use crate::event::Medium;
use crate::id::{MoveId, NodeKey, PageId, PrefixLock};
use crate::plan::PageMove;

use super::PrefixTree;
use super::load_batch::{LoadBatch, Part};
use super::residency::{NO_PAGE, Residency};

impl PrefixTree {
    /// Begins a load. O(1).
    pub(crate) fn begin_load(&mut self, load: &mut LoadBatch) {
        load.restart(self.ages.as_mut().expect("there is swap memory").next(1));
    }

    /// Adds the swap-only entries of a lock's path of `pages` pages to a load, then the swap-only cells in its tails,
    /// unless the load has them. Returns the number of pages added. O(nodes with swap-only entries, and tails).
    pub(crate) fn claim(&mut self, lock: &PrefixLock, pages: u32, load: &mut LoadBatch) -> u32 {
        let (mut at, mut count) = (lock.node(), 0);
        while let Some((node, lacking)) = self.lacking(at)
            && self.ages.as_mut().expect("there is swap memory").set_load(node, load.number)
        {
            load.push_part(Part::Entries(node, lacking));
            count += lacking;
            at = self.link[node].parent;
        }
        self.for_tails(lock, pages, |tree, cell| {
            if tree.claim_cell(cell, load.number) {
                load.push_part(Part::Cell(cell));
                count += tree.cells_ref().tracks(cell);
            }
        });
        count
    }

    /// Returns a node and the number of its swap-only entries, unless it has none.
    fn lacking(&self, node: Option<NodeKey>) -> Option<(NodeKey, u32)> {
        let node = node?;
        let entries = self.link[node].span.pages();
        let lacking = entries - self.device_pages(node, entries);
        (lacking > 0).then_some((node, lacking))
    }

    /// Assigns device pages to the parts of a load, the deepest entry of a node first, and writes the moves. O(pages).
    pub(crate) fn assign(&mut self, load: &mut LoadBatch, mut pages: &[PageId]) {
        let LoadBatch { parts, moves, .. } = load;
        for part in parts {
            match *part {
                Part::Entries(node, count) => {
                    let Self { swap: Some(swap), spans, link, .. } = self else { return };
                    let span = &link[node].span;
                    let entries = span.pages();
                    spans.each_entry_back(span, entries - count..entries, |entry, page| {
                        *page = *pages.split_off_first().expect("they were counted");
                        moves.push(PageMove { device: *page, swap: swap.of_entry[entry as usize] });
                    });
                }
                Part::Cell(cell) => self.assign_cell(cell, &mut pages, moves),
            }
        }
    }

    /// Ends the load of some parts, which lie on the path of a lock and in its tails: frees their swap pages. If the
    /// load failed, detaches the assigned device pages instead. O(pages).
    pub(crate) fn end_load(&mut self, lock: &PrefixLock, parts: &[Part], failed: bool) {
        for part in parts {
            match *part {
                Part::Entries(node, count) if failed => {
                    let span = &self.link[node].span;
                    let entries = span.pages();
                    self.spans.each_entry_back(span, entries - count..entries, |_, page| *page = NO_PAGE);
                }
                Part::Entries(node, count) => {
                    self.swap_mut().counts.loaded += u64::from(count);
                    self.restored(node, count);
                }
                Part::Cell(cell) if failed => self.cells_mut().pages_mut(cell).fill(NO_PAGE),
                Part::Cell(cell) => {
                    self.swap_mut().counts.loaded += u64::from(self.cells_ref().tracks(cell));
                    self.cell_restored(cell);
                }
            }
        }
        self.emit_loaded(lock);
    }

    /// Emits that the entries of the restored nodes have moved to the device, and clears the list of these nodes. The
    /// list begins with the deepest node.
    fn emit_loaded(&mut self, lock: &PrefixLock) {
        let mut nodes = std::mem::take(&mut self.swap_mut().restored);
        if lock.scope().generation == self.generation && self.events.is_some() {
            let places = |tree: &Self, (node, count): (NodeKey, u32)| {
                let end = tree.link[node].span.pages();
                (node, end - count..end)
            };
            for &one in nodes.iter().rev() {
                let (node, places) = places(self, one);
                self.emit_copied(node, Medium::Device, places);
            }
            for &one in &nodes {
                let (node, places) = places(self, one);
                self.emit_removed(node, Medium::Swap, places);
            }
        }
        nodes.clear();
        self.swap_mut().restored = nodes;
    }

    /// Records that the last `count` entries of a node in use, which were swap-only, are on the device. Their device
    /// pages are already attached.
    fn restored(&mut self, node: NodeKey, count: u32) {
        let Self { swap: Some(swap), spans, link, protected, .. } = self else { return };
        assert!(swap.saves.is_empty(), "the backend has received the saves");
        let span = &link[node].span;
        let entries = span.pages();
        swap.residency[node] = Residency { device: entries, swap_start: entries };
        spans.each_entry_back(span, entries - count..entries, |entry, _| swap.drop_swap_page(entry));
        swap.restored.push((node, count));
        *protected += count;
        self.epoch += 1;
    }

    /// Numbers the moves of a load, and records that they read their swap pages.
    pub(crate) fn begin_move(&mut self, load: &LoadBatch) -> MoveId {
        let swap = self.swap_mut();
        swap.last_move = swap.next_move();
        let id = swap.last_move;
        load.moves.iter().for_each(|load| swap.pool.set_load(load.swap, id));
        id
    }

    /// Attaches a sequence's pages to the swap-only entries of a lock's path. The last of `pages` is for the last entry
    /// of the path. Returns the number of these entries. O(entries).
    pub(super) fn restore_from(&mut self, lock: &PrefixLock, pages: &[PageId]) -> u32 {
        let (mut at, mut rest, mut count) = (lock.node(), pages, 0);
        while let Some((node, lacking)) = self.lacking(at) {
            at = self.link[node].parent;
            let span = &self.link[node].span;
            let entries = span.pages();
            self.spans.each_entry_back(span, entries - lacking..entries, |_, page| {
                *page = *rest.split_off_last().expect("the path was walked");
            });
            self.restored(node, lacking);
            count += lacking;
        }
        self.emit_loaded(lock);
        count
    }

    /// Appends the pages of the last `count` entries of a lock's path to `pages`, in order. They are on the device.
    /// O(entries).
    pub(crate) fn last_pages(&mut self, lock: &PrefixLock, count: u32, pages: &mut Vec<PageId>) {
        let (start, mut at, mut rest) = (pages.len(), lock.node(), count);
        while let Some(node) = at
            && rest > 0
        {
            let span = &self.link[node].span;
            let here = span.pages().min(rest);
            let entries = span.pages();
            self.spans.each_entry_back(span, entries - here..entries, |_, page| pages.push(*page));
            rest -= here;
            at = self.link[node].parent;
        }
        pages[start..].reverse();
    }
}
