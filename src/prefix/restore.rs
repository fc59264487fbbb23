//! The way back from swap memory: entries in use get device pages, by a load or from a sequence that computed them.
//!
//! A sequence whose lock's path has swap-only entries waits: its page table lacks their pages until they are loaded.
//!
//! Not here: which pages the entries get (`system/load.rs`), moves to swap memory (`offload.rs`).

use crate::event::Medium;
use crate::id::{MoveId, NodeKey, PageId, PrefixLock};
use crate::plan::PageMove;

use super::PrefixTree;
use super::residency::{NO_PAGE, Residency};

impl PrefixTree {
    /// Begins a load. Returns the number by which [`PrefixTree::claim`] identifies it.
    pub(crate) fn begin_load(&mut self) -> u64 {
        self.ages.as_mut().expect("there is swap memory").next(1)
    }

    /// Claims the swap-only entries of a lock's path of `pages` pages, and the swap-only cells in its tails, for a
    /// load. Returns the number of their pages, without those that another lock has claimed for this load. O(nodes
    /// with swap-only entries, and tails).
    pub(crate) fn claim(&mut self, lock: &PrefixLock, pages: u32, load: u64) -> u32 {
        let (mut at, mut count) = (lock.node(), 0);
        while let Some((node, lacking)) = self.lacking(at) {
            if self.ages.as_mut().expect("there is swap memory").set_load(node, load) {
                count += lacking;
            }
            at = self.link[node].parent;
        }
        count + self.claim_cells(lock, pages, load)
    }

    /// Returns a node and the number of its swap-only entries, unless it has none.
    fn lacking(&self, node: Option<NodeKey>) -> Option<(NodeKey, u32)> {
        let node = node?;
        let entries = self.link[node].span.pages();
        let lacking = entries - self.device_pages(node, entries);
        (lacking > 0).then_some((node, lacking))
    }

    /// Assigns device pages to the swap-only entries of a lock's path of `count` pages, the deepest first, then to the
    /// cells in its tails. Appends the loads to `moves`. Skips entries and cells with assigned pages. O(entries, and
    /// tails).
    pub(crate) fn assign(&mut self, lock: &PrefixLock, count: u32, pages: &mut &[PageId], moves: &mut Vec<PageMove>) {
        let mut at = lock.node();
        while let Some((node, lacking)) = self.lacking(at) {
            at = self.link[node].parent;
            let Self { swap: Some(swap), spans, link, .. } = self else { return };
            let span = &link[node].span;
            let entries = span.pages();
            spans.each_entry_back(span, entries - lacking..entries, |entry, page| {
                if *page == NO_PAGE {
                    *page = *pages.split_off_first().expect("they were counted");
                    moves.push(PageMove { device: *page, swap: swap.of_entry[entry as usize] });
                }
            });
        }
        self.assign_cells(lock, count, pages, moves);
    }

    /// Ends the load of a lock's path of `pages` pages, and of the cells in its tails. Frees their swap pages. If the
    /// load failed, detaches the assigned device pages instead. O(entries and tails).
    pub(crate) fn end_load(&mut self, lock: &PrefixLock, pages: u32, failed: bool) {
        self.end_cell_load(lock, pages, failed);
        let mut at = lock.node();
        while let Some((node, lacking)) = self.lacking(at) {
            at = self.link[node].parent;
            let entries = self.link[node].span.pages();
            if failed {
                let span = &self.link[node].span;
                self.spans.each_entry_back(span, entries - lacking..entries, |_, page| {
                    *page = NO_PAGE;
                });
                continue;
            }
            self.swap_mut().counts.loaded += u64::from(lacking);
            self.restored(node, lacking);
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

    /// Numbers a batch of loads, and records that the batch reads the swap pages of these loads.
    pub(crate) fn begin_move(&mut self, moves: &[PageMove]) -> MoveId {
        let swap = self.swap_mut();
        swap.last_move = swap.next_move();
        let id = swap.last_move;
        moves.iter().for_each(|load| swap.pool.set_load(load.swap, id));
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
