//! The audit of hashes and names: T9 over every node, and T11. O(capacity of the tree).

use std::collections::HashMap;

use super::EntryLists;
use crate::id::{Namespace, NodeKey, Scope};
use crate::prefix::PrefixTree;

impl PrefixTree {
    /// Returns whether T11 holds, given the namespace of each sequence and fetch.
    pub(crate) fn names_are_counted(&self, sequences: impl Iterator<Item = Namespace>) -> bool {
        let first_nodes = self.nodes.link.iter().filter(|(_, link)| link.parent.is_none());
        let namespaces = first_nodes.map(|(node, _)| self.nodes.scope[node].namespace);
        self.names.check(sequences.chain(namespaces))
    }

    /// Checks T9, given the scope of each node. The error is a node that breaks it, or any node if the table has wrong
    /// entries.
    pub(in crate::prefix) fn check_hashes(&self, scopes: &HashMap<NodeKey, Scope>) -> Result<(), NodeKey> {
        let Some(chain) = &self.chain else { return Ok(()) };
        let mut listed = 0;
        for (node, link) in &self.nodes.link {
            listed += usize::from(chain.listed[node] > 0);
            let scope = scopes[&node];
            if scope.generation != self.generation {
                continue;
            }
            let named = self.names.get(scope.namespace).ok_or(node)?;
            let parent = link.parent.map(|parent| self.nodes.last_entry(parent));
            let mut before = parent.map(|entry| chain.of(entry));
            for entry in self.nodes.lists.entries(&link.list) {
                let hash = chain.hashes.hashing.page(named, before, self.nodes.lists.tokens_of(entry));
                if hash != chain.of(entry) {
                    return Err(node);
                }
                before = Some(hash);
            }
            let first = chain.of(EntryLists::first_entry(&link.list));
            if chain.listed[node] == 0 || chain.find(first, |found| found == node).is_none() {
                return Err(node);
            }
        }
        // The table has no other entries.
        let all = chain.listed.values().filter(|&&hash| hash > 0).count();
        if (all, chain.firsts.len()) == (listed, listed) {
            return Ok(());
        }
        Err(self.nodes.link.keys().next().unwrap_or_default())
    }
}
