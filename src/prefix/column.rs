//! Columns of nodes: [`RareColumn`], and addresses in the columns of a slotmap. The slots of such a column are
//! contiguous, in the order of their indices.
//!
//! Not here: the contents of columns.

use std::ops::{Index, IndexMut};

use bytemuck::Zeroable;
use slotmap::Key;

use crate::id::NodeKey;
use crate::memory::{Memory, OutOfMemory, advise_huge_pages, prefetch, slot_size};

/// A column of values, all zeros at first. A node without a value has zeros, or the value of an earlier node in its
/// slot.
///
/// A slotmap's secondary map is unsuitable: to store the first value of a node, it writes all slots up to the node's.
/// This stall grows with the tree.
pub(super) struct RareColumn<T> {
    slots: Vec<T>,
}

impl<T: Zeroable + Default> RareColumn<T> {
    /// Creates a column for at most `node_count` nodes. Zeroed memory is not touched before it is used.
    pub fn new(node_count: u32, memory: &mut Memory) -> Result<Self, OutOfMemory> {
        // No node uses the first slot of a slotmap.
        Ok(Self { slots: memory.zeroed(u64::from(node_count) + 1)? })
    }

    /// Returns all values, including those of vacant slots, for audits.
    pub fn values(&self) -> impl Iterator<Item = &T> {
        self.slots.iter()
    }
}

impl<T> Index<NodeKey> for RareColumn<T> {
    type Output = T;

    fn index(&self, node: NodeKey) -> &T {
        &self.slots[slot_index(node)]
    }
}

impl<T> IndexMut<NodeKey> for RareColumn<T> {
    fn index_mut(&mut self, node: NodeKey) -> &mut T {
        &mut self.slots[slot_index(node)]
    }
}

fn slot_index(node: NodeKey) -> usize {
    node.data().as_ffi() as u32 as usize
}

/// Requests huge pages for a column, given its first slot.
pub(super) fn advise_column<T>(first: &T, capacity: usize) {
    advise_huge_pages(std::ptr::from_ref(first).addr(), capacity * slot_size::<T>());
}

/// Prefetches the slot of node `wanted` in a column, given the slot of `node`. A look-up would wait for the slot.
pub(super) fn prefetch_slot<T>(slot: &T, node: NodeKey, wanted: NodeKey) {
    prefetch(slot_address(slot, node, wanted), size_of::<T>());
}

/// Returns the address of the slot of node `wanted` in a column, given the slot of `node`.
fn slot_address<T>(slot: &T, node: NodeKey, wanted: NodeKey) -> usize {
    let apart = slot_index(wanted).wrapping_sub(slot_index(node)).wrapping_mul(slot_size::<T>());
    std::ptr::from_ref(slot).addr().wrapping_add(apart)
}

#[cfg(test)]
mod tests {
    use super::slot_address;
    use crate::id::{NodeKey, PageId, Scope, TokenId};
    use crate::prefix::PrefixTree;
    use crate::prefix::nodes::Link;

    #[test]
    fn a_slot_has_the_address_that_is_computed_from_another_slot() {
        // A wrong address is a useless prefetch, which no other test would detect.
        let mut tree = PrefixTree::new(100, 1, 32, false).expect("memory");
        let nodes: Vec<NodeKey> = (0..100)
            .map(|i| {
                let list = tree.nodes.lists.create(&[TokenId::new(i)], &[PageId::new(i)]);
                tree.spawn(Link { parent: None, list }, Scope::default())
            })
            .collect();
        let address = |node| (&raw const tree.usage[node]).addr();
        for (&a, &b) in nodes.iter().zip(nodes.iter().rev()) {
            assert_eq!(slot_address(&tree.usage[a], a, b), address(b));
            assert_eq!(slot_address(&tree.nodes.link[a], a, b), (&raw const tree.nodes.link[b]).addr());
        }
    }
}
