//! Splits of nodes: where a match or an insertion ends inside one.

use crate::id::{NodeKey, Scope};

use super::nodes::{Link, Sides};
use super::{PrefixTree, Usage};

impl PrefixTree {
    /// Returns the node that ends after the first `pages` pages of `node`: `node` itself, or a new parent that takes
    /// these pages. The old key stays with the suffix, so that locks on it and children below it stay valid. The caller
    /// locks the prefix next, so the prefix of an idle node gets no age. O(1), and O(extents before the split) for a
    /// node of many extents.
    pub(super) fn split(&mut self, node: NodeKey, pages: u32) -> NodeKey {
        let Link { parent, mut list } = self.nodes.link[node];
        if pages == list.pages() {
            return node;
        }
        let rest = self.nodes.lists.split(&mut list, pages);
        // The prefix takes the node's place under its parent...
        let usage = self.usage[node];
        let mut prefix_usage = Usage::new(usage.hash);
        prefix_usage.child_count = 1;
        prefix_usage.lock_count = u32::from(usage.lock_count > 0);
        // Only nodes without a parent have a scope; the hash of a child does not include it.
        let scope = if parent.is_none() { self.nodes.scope[node] } else { Scope::default() };
        let prefix = self.insert_columns(Link { parent, list }, scope, prefix_usage);
        self.nodes.children.replace(usage.hash, node, prefix);
        if self.is_deferred(node) {
            self.add_deferred(prefix, self.deferred[node].step);
        }
        // ... and the node becomes its child. An idle prefix is the younger neighbour of its suffix.
        self.nodes.link[node] = Link { parent: Some(prefix), list: rest };
        let hash = self.nodes.children.hash(Some(prefix), scope, self.nodes.lists.first_page(&rest));
        self.usage[node].hash = hash;
        self.nodes.children.insert(hash, node);
        if usage.lock_count == 0 {
            self.order.split(&mut self.usage, node, prefix);
        }
        if let Some(column) = &mut self.nodes.sides {
            let Sides { device, swap_start } = column[node];
            let first = Sides { device: device.min(pages), swap_start: swap_start.min(pages) };
            column[prefix] = first;
            column[node] = Sides { device: device - first.device, swap_start: swap_start - first.swap_start };
        }
        self.epoch += 1;
        if let Some(chain) = &mut self.chain {
            chain.split(&self.nodes, node, prefix);
        }
        prefix
    }
}
