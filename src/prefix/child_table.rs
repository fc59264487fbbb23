//! Finds a node from its parent and its first page's tokens: one hash table for the whole tree.
//!
//! The table uses open addressing with linear probing. A removal shifts the following entries back, so there are no
//! tombstones. There are at least twice as many entries as nodes, so the table never grows. Several nodes may have
//! the same hash, so the caller confirms every candidate.
//!
//! Not here: the comparison of tokens, which the tree makes.

use std::hash::{BuildHasher, Hasher};

use ahash::RandomState;
use bytemuck::{Pod, Zeroable};
use slotmap::{Key, KeyData};

use crate::id::{NodeKey, Scope, TokenId};
use crate::memory::{Memory, OutOfMemory, prefetch_items};

/// A node and its hash, 12 bytes. All zero: vacant (no key is 0).
#[derive(Clone, Copy, Default, Pod, Zeroable)]
#[repr(C)]
struct Entry {
    hash: u32,
    node: [u32; 2],
}

impl Entry {
    fn new(hash: u32, node: NodeKey) -> Self {
        let raw = node.data().as_ffi();
        Self { hash, node: [raw as u32, (raw >> 32) as u32] }
    }

    fn node(&self) -> Option<NodeKey> {
        let raw = u64::from(self.node[0]) | u64::from(self.node[1]) << 32;
        (raw != 0).then(|| KeyData::from_ffi(raw).into())
    }
}

/// The table.
pub(super) struct ChildTable {
    entries: Vec<Entry>,
    hasher: RandomState,
    hash_mask: u32,
}

impl ChildTable {
    /// Bytes of the entries for each node, without those that rounding up to a power of two adds.
    #[cfg(any(test, feature = "testkit"))]
    pub const BYTES_PER_NODE: u64 = 2 * size_of::<Entry>() as u64;

    /// Creates a table for at most `node_count` nodes. Tests use a `hash_bits` below 32 to force collisions,
    /// the same ones in every process.
    pub fn new(node_count: u32, hash_bits: u32, memory: &mut Memory) -> Result<Self, OutOfMemory> {
        let entries = memory.zeroed((2 * u64::from(node_count)).next_power_of_two())?;
        if hash_bits < u32::BITS {
            // Fixed seeds make a failure reproducible.
            let hasher = RandomState::with_seeds(1, 2, 3, 4);
            return Ok(Self { entries, hasher, hash_mask: (1 << hash_bits) - 1 });
        }
        // Random keys: clients cannot construct prompts that collide.
        Ok(Self { entries, hasher: RandomState::new(), hash_mask: u32::MAX })
    }

    /// Returns the hash of a node's place in the tree.
    pub fn hash(&self, parent: Option<NodeKey>, scope: Scope, first_page: &[TokenId]) -> u32 {
        let mut hasher = self.hasher.build_hasher();
        match parent {
            Some(parent) => hasher.write_u64(parent.data().as_ffi()),
            None => {
                hasher.write_u64(scope.namespace.raw());
                hasher.write_u64(scope.generation);
            }
        }
        match first_page {
            [token] => hasher.write_u32(token.raw()),
            tokens => hasher.write(bytemuck::cast_slice(tokens)),
        }
        hasher.finish() as u32 & self.hash_mask
    }

    /// Returns the hash of a number. `chain.rs` finds nodes by the hash of their first page.
    pub fn hash_number(&self, number: u64) -> u32 {
        let mut hasher = self.hasher.build_hasher();
        hasher.write_u64(number);
        hasher.finish() as u32 & self.hash_mask
    }

    fn home(&self, hash: u32) -> usize {
        hash as usize & (self.entries.len() - 1)
    }

    fn next(&self, index: usize) -> usize {
        (index + 1) & (self.entries.len() - 1)
    }

    /// Returns the node of this hash that `confirm` accepts. O(1) unless hashes collide.
    #[inline]
    pub fn find(&self, hash: u32, mut confirm: impl FnMut(NodeKey) -> bool) -> Option<NodeKey> {
        let mut index = self.home(hash);
        while let Some(node) = self.entries[index].node() {
            if self.entries[index].hash == hash && confirm(node) {
                return Some(node);
            }
            index = self.next(index);
        }
        None
    }

    /// Prefetches the first entry of the search for a node that will be removed soon.
    pub fn prefetch(&self, hash: u32) {
        let home = self.home(hash);
        prefetch_items(&self.entries[home..=home]);
    }

    /// Adds a node.
    pub fn insert(&mut self, hash: u32, node: NodeKey) {
        let mut index = self.home(hash);
        while self.entries[index].node().is_some() {
            index = self.next(index);
        }
        self.entries[index] = Entry::new(hash, node);
    }

    /// Replaces `old` by `new`.
    pub fn replace(&mut self, hash: u32, old: NodeKey, new: NodeKey) {
        let index = self.index_of(hash, old);
        self.entries[index] = Entry::new(hash, new);
    }

    /// Removes a node.
    #[inline(always)] // With `PrefixTree::unlist`: 3 % of an eviction at page_size 16.
    pub fn remove(&mut self, hash: u32, node: NodeKey) {
        let mut hole = self.index_of(hash, node);
        let mut index = self.next(hole);
        while self.entries[index].node().is_some() {
            // An entry may move back to the hole unless its home is after the hole.
            let home = self.home(self.entries[index].hash);
            let mask = self.entries.len() - 1;
            if index.wrapping_sub(home) & mask >= index.wrapping_sub(hole) & mask {
                self.entries[hole] = self.entries[index];
                hole = index;
            }
            index = self.next(index);
        }
        self.entries[hole] = Entry::zeroed();
    }

    fn index_of(&self, hash: u32, node: NodeKey) -> usize {
        let mut index = self.home(hash);
        loop {
            match self.entries[index].node() {
                Some(found) if found == node => return index,
                Some(_) => index = self.next(index),
                None => panic!("T2: every node is in the child table"),
            }
        }
    }

    /// Returns the number of nodes in the table, for audits. O(entries).
    pub fn len(&self) -> usize {
        self.entries.iter().filter(|entry| entry.node().is_some()).count()
    }
}

#[cfg(test)]
mod tests {
    use super::ChildTable;
    use crate::id::{NodeKey, Scope, TokenId};
    use crate::memory::Memory;

    fn small(nodes: u32, hash_bits: u32) -> ChildTable {
        ChildTable::new(nodes, hash_bits, &mut Memory::new(false)).expect("a small table")
    }

    fn hash(table: &ChildTable) -> u32 {
        table.hash(None, Scope::default(), &[1, 2, 3].map(TokenId::new))
    }

    #[test]
    fn keys_are_random_except_in_tests() {
        // Two of eight tables agree by chance once in 150 million runs.
        let mut hashes: Vec<u32> = (0..8).map(|_| hash(&small(1, 32))).collect();
        hashes.sort_unstable();
        hashes.dedup();
        assert_eq!(hashes.len(), 8);
        for bits in [1, 2, 3, 31] {
            let [one, other] = [(); 2].map(|()| hash(&small(1, bits)));
            assert_eq!(one, other);
            assert!(one >> bits == 0, "{bits} bits");
        }
    }

    #[test]
    fn numbers_have_hashes_of_their_own() {
        // The keys are fixed, so the hashes are the same in every run.
        let table = small(1, 31);
        let mut hashes: Vec<u32> = (0..100).map(|number| table.hash_number(number)).collect();
        hashes.sort_unstable();
        hashes.dedup();
        assert_eq!(hashes.len(), 100);
    }

    #[test]
    fn removal_leaves_every_other_node_where_it_is_found() {
        // The table does not read the nodes, so keys of any slotmap do.
        let mut keys = slotmap::SlotMap::<NodeKey, ()>::with_key();
        let nodes: Vec<NodeKey> = (0..6).map(|_| keys.insert(())).collect();
        // Every way to give six nodes homes among three neighbours, across the end of the table's 16 entries.
        for case in 0..3_u32.pow(6) {
            let home = |i: u32| [15, 0, 1][(case / 3_u32.pow(i) % 3) as usize];
            for gone in 0..6 {
                let mut table = small(8, 31);
                for (i, &node) in (0..).zip(&nodes) {
                    table.insert(home(i), node);
                }
                table.remove(home(gone), nodes[gone as usize]);
                assert_eq!(table.len(), 5);
                for (i, &node) in (0..).zip(&nodes).filter(|(i, _)| *i != gone) {
                    assert_eq!(table.find(home(i), |found| found == node), Some(node));
                }
                assert_eq!(table.find(home(gone), |found| found == nodes[gone as usize]), None);
            }
        }
    }
}
