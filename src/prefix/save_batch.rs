//! The batch of saves that one call makes. The engine passes it to the backend before an entry or a cell returns to the
//! device, so a failed save is undone at the entries and cells that it was made for.
//!
//! Not here: which pages are saved (`offload.rs`), the cells of the batch (`cells.rs`).

use crate::id::{NodeKey, SwapPageId};
use crate::memory::{Memory, OutOfMemory};
use crate::plan::PageMove;

use super::residency::NO_PAGE;

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

    pub fn nodes(&self) -> &[(NodeKey, u32)] {
        &self.nodes
    }

    pub fn clear(&mut self) {
        self.moves.clear();
        self.nodes.clear();
        (self.live, self.first, self.is_ahead) = (0, 0, false);
    }
}
