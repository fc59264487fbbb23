//! The ages of idle nodes and cells, on one clock. Eviction takes the oldest node or cell first.
//!
//! The clock advances by one for each cell and each entry of a node. So each entry of a node has its own age, and the
//! deepest entry has the lowest. The number of a load is also a value of the clock, so that it differs from every age.
//!
//! Not here: the lists of idle nodes (`order.rs`) and cells (`cells.rs`), which are sorted by age.

use crate::id::NodeKey;
use crate::memory::{Memory, OutOfMemory};

use super::column::RareColumn;
use super::cursors::{Cursors, Seek};

/// The first age. Cells that are superseded take ages before it.
const START: u64 = 1 << 63;

/// The clock, the age of each idle node's last entry, and the cursors in the list of idle nodes.
pub(super) struct Ages {
    clock: u64,
    /// The last age before all others.
    oldest: u64,
    of_node: RareColumn<u64>,
    cursors: Cursors<NodeKey>,
}

impl Ages {
    pub fn new(node_count: u32, memory: &mut Memory) -> Result<Self, OutOfMemory> {
        Ok(Self { clock: START, oldest: START, of_node: RareColumn::new(node_count, memory)?, cursors: Cursors::START })
    }

    /// Returns the first of the next `count` ages.
    pub fn next(&mut self, count: u32) -> u64 {
        let first = self.clock;
        self.clock += u64::from(count);
        first
    }

    /// Returns an age before all others.
    pub fn before_all(&mut self) -> u64 {
        self.oldest -= 1;
        self.oldest
    }

    /// Stamps a node of `entries` entries that becomes idle and `has` what some cursors look for.
    pub fn enter(&mut self, node: NodeKey, entries: u32, has: impl Fn(Seek) -> bool) {
        self.of_node[node] = self.next(entries);
        self.cursors.push(node, has);
    }

    /// Prepares a node, whose younger neighbour is `younger`, to leave the list.
    pub fn leave(&mut self, node: NodeKey, younger: Option<NodeKey>) {
        self.cursors.remove(node, younger);
    }

    /// Returns the oldest node that `has` what a cursor looks for, and moves the cursor there.
    pub fn seek(
        &mut self,
        seek: Seek,
        younger: impl Fn(NodeKey) -> Option<NodeKey>,
        has: impl Fn(NodeKey) -> bool,
    ) -> Option<NodeKey> {
        let Self { of_node, cursors, .. } = self;
        cursors.seek(seek, |node| of_node[node], younger, has)
    }

    /// Moves a cursor back to an idle node that has what the cursor looks for, if it is at a younger node or at none.
    pub fn move_back(&mut self, seek: Seek, node: NodeKey) {
        let Self { of_node, cursors, .. } = self;
        cursors.move_back(seek, node, |node| of_node[node]);
    }

    /// Marks a node in use as a part of a load, whose number takes the place of the age, which only idle nodes have.
    /// Returns whether the node was not marked yet.
    pub fn claim(&mut self, node: NodeKey, load: u64) -> bool {
        std::mem::replace(&mut self.of_node[node], load) != load
    }

    /// Returns the age of an idle node's last entry: when it became idle.
    pub fn of(&self, node: NodeKey) -> u64 {
        self.of_node[node]
    }

    /// Returns the cursors, for audits.
    pub fn cursors(&self) -> &Cursors<NodeKey> {
        &self.cursors
    }

    #[cfg(test)]
    pub fn cursors_mut(&mut self) -> &mut Cursors<NodeKey> {
        &mut self.cursors
    }
}
