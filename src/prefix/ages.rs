//! The ages of idle nodes and cells, on one clock. Eviction takes the oldest node or cell first.
//!
//! The clock advances by one for each cell and each entry of a node. So each entry of a node has its own age, and the
//! deepest entry has the lowest. The number of a load is also a value of the clock, so that it differs from every age.
//!
//! Not here: the lists of idle nodes (`order.rs`) and cells (`cells.rs`), which are sorted by age.

use crate::id::NodeKey;
use crate::memory::{Memory, OutOfMemory};

use super::column::RareColumn;

/// The clock, and the age of each idle node's last entry.
pub(super) struct Ages {
    clock: u64,
    of_node: RareColumn<u64>,
}

impl Ages {
    pub fn new(node_count: u32, memory: &mut Memory) -> Result<Self, OutOfMemory> {
        Ok(Self { clock: 1, of_node: RareColumn::new(node_count, memory)? })
    }

    /// Returns the first of the next `count` ages.
    pub fn next(&mut self, count: u32) -> u64 {
        let first = self.clock;
        self.clock += u64::from(count);
        first
    }

    /// Stamps a node of `entries` entries that becomes idle.
    pub fn enter(&mut self, node: NodeKey, entries: u32) {
        self.of_node[node] = self.next(entries);
    }

    /// Stores the number of a load for a node in use, in place of the age, which only idle nodes have. Returns whether
    /// the column contained another value before.
    pub fn set_load(&mut self, node: NodeKey, load: u64) -> bool {
        std::mem::replace(&mut self.of_node[node], load) != load
    }

    /// Returns the age of an idle node's last entry: when it became idle.
    pub fn of(&self, node: NodeKey) -> u64 {
        self.of_node[node]
    }
}
