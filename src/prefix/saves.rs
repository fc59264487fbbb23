//! The batch of saves that one call makes. The engine passes it to the backend before an entry or a cell returns to the
//! device, so a failed save is undone at the entries and cells that it was made for.
//!
//! Not here: which pages are saved (`evict.rs`), the cells of the batch (`cells.rs`).

use crate::event::Medium;
use crate::id::{MoveId, NodeKey, PageId, SwapPageId};
use crate::memory::{Memory, OutOfMemory};
use crate::plan::PageMove;

use super::PrefixTree;
use super::cursors::Seek;
use super::nodes::NO_PAGE;

/// The saves of one call, and the nodes of their entries.
pub(super) struct SaveBatch {
    /// A cancelled save has the device page [`NO_PAGE`].
    moves: Vec<PageMove>,
    /// Number of saves that are not cancelled.
    live: usize,
    /// All saves before this index are cancelled.
    first: usize,
    /// The nodes of saved entries, oldest first, each with the number of these entries.
    nodes: Vec<(NodeKey, u32)>,
    /// Whether the saves were made ahead of evictions, so that their entries keep their device pages.
    pub is_ahead: bool,
}

impl SaveBatch {
    pub fn new(page_count: u32, memory: &mut Memory) -> Result<Self, OutOfMemory> {
        Ok(Self {
            moves: memory.reserved(page_count.into())?,
            live: 0,
            first: 0,
            nodes: memory.reserved(page_count.into())?,
            is_ahead: false,
        })
    }

    pub fn is_empty(&self) -> bool {
        self.live == 0
    }

    pub fn push(&mut self, save: PageMove) {
        self.moves.push(save);
        self.live += 1;
    }

    /// Records that the last save is of an entry of this node.
    pub fn push_node(&mut self, node: NodeKey) {
        match self.nodes.last_mut() {
            Some((last, count)) if *last == node => *count += 1,
            _ => self.nodes.push((node, 1)),
        }
    }

    /// Cancels the save to a page, if the batch has one, because its entry or cell is dropped. Entries are dropped in
    /// the order in which they were saved, so this save is mostly the first one.
    pub fn cancel(&mut self, page: SwapPageId) {
        let is_live = |save: &PageMove| save.device != NO_PAGE;
        let mut live = self.moves[self.first..].iter_mut().filter(|save| is_live(save));
        let Some(save) = live.find(|save| save.swap == page) else { return };
        save.device = NO_PAGE;
        self.live -= 1;
        let cancelled = self.moves[self.first..].iter().take_while(|save| !is_live(save));
        self.first += cancelled.count();
    }

    /// Returns the saves for the backend.
    pub fn moves(&mut self) -> &[PageMove] {
        if self.live < self.moves.len() {
            self.moves.retain(|save| save.device != NO_PAGE);
            self.first = 0;
        }
        &self.moves
    }

    pub fn clear(&mut self) {
        self.moves.clear();
        self.nodes.clear();
        (self.live, self.first, self.is_ahead) = (0, 0, false);
    }
}

impl PrefixTree {
    /// Returns the saves that wait for the backend, and the number of their batch; `None` if there are none.
    pub(crate) fn saves(&mut self) -> Option<(MoveId, &[PageMove])> {
        if self.swap.as_ref()?.saves.is_empty() {
            self.end_saves(false, &mut Vec::new());
            return None;
        }
        let swap = self.swap_mut();
        Some((swap.begin_move(), swap.saves.moves()))
    }

    /// Ends the batch of saves. If it failed, entries that were saved ahead are dirty again. Entries that were saved by
    /// an eviction are dropped with all entries after them. Device pages of the cells of dropped entries are appended
    /// to `freed`. O(cells saved), after a failure O(idle nodes, times the nodes of the batch and below).
    pub(crate) fn end_saves(&mut self, failed: bool, freed: &mut Vec<PageId>) {
        if failed {
            let swap = self.swap_mut();
            swap.counts.failed += swap.saves.moves().len() as u64;
            if swap.saves.is_ahead {
                self.undo_saves();
            } else {
                self.drop_failed(freed);
            }
        }
        let Self { cells, swap: Some(swap), .. } = self else { return };
        if let Some(cells) = cells {
            self.epoch += cells.end_saves(failed, swap, freed);
        }
        swap.saves.clear();
    }

    /// Makes the entries of a batch dirty again.
    fn undo_saves(&mut self) {
        for index in 0..self.swap().saves.nodes.len() {
            let (node, count) = self.swap().saves.nodes[index];
            let start = self.nodes.sides_of(node).swap_start;
            let places = start..start + count;
            self.emit_removed(node, Medium::Swap, places.clone());
            let Self { nodes, ages: Some(ages), swap: Some(swap), .. } = self else { return };
            nodes.sides_mut(node).swap_start = places.end;
            swap.clean -= count;
            nodes.each_entry_back(node, places, |entry, _| swap.drop_page(entry));
            ages.move_back(Seek::Dirty, node);
        }
    }

    /// Drops the swap-only entries of the batch's nodes, and all nodes below.
    fn drop_failed(&mut self, freed: &mut Vec<PageId>) {
        let mut failed: Vec<NodeKey> = Vec::new();
        for &(node, _) in &self.swap().saves.nodes {
            // The node may have been dropped since the save, so that another entry could use its swap page.
            if self.nodes.link.contains_key(node) && !failed.contains(&node) {
                failed.push(node);
            }
        }
        // Children are older than their parents: from the young end on, a node's parent is seen first.
        let (mut below, mut at) = (Vec::new(), failed.last().copied());
        while let Some(node) = at {
            let parent = self.nodes.link[node].parent;
            if parent.is_some_and(|parent| failed.contains(&parent) || below.contains(&parent)) {
                below.push(node);
            }
            at = self.order.before(&self.usage, node);
        }
        below.into_iter().rev().for_each(|node| self.drop_idle(node, true, freed));
        for node in failed {
            if self.nodes.link.contains_key(node) {
                let entries = self.nodes.entries(node);
                let swap_only = entries - self.nodes.device_pages(node, entries);
                if swap_only > 0 {
                    self.drop_entries(node, swap_only, freed);
                }
            }
        }
    }
}
