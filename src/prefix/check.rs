//! The audit of the tree: T1 to T9 over every node. `cells` and `swap` check the invariants of cells and swap memory.
//! Each audit is O(capacity of the tree), so no step calls it.

use std::collections::{HashMap, HashSet};

use crate::fence::Fence;
use crate::id::{NodeKey, PageId, Scope, StepId};

use super::deferred::Deferred;
use super::nodes::NO_PAGE;
use super::{PrefixTree, SizeInfo};

/// A broken invariant, and a page that shows it.
pub(super) type Broken = (&'static str, Option<PageId>);

impl PrefixTree {
    /// Checks T1 to T9. `locks`: how many locks end at each node; `fenced`: how many of those wait in the fence.
    pub(crate) fn check(
        &self,
        locks: &HashMap<NodeKey, u32>,
        fenced: &HashMap<NodeKey, u32>,
        fence: &Fence,
    ) -> Result<(), Broken> {
        self.check_columns()?;
        self.check_children()?;
        self.check_locks(locks)?;
        self.check_deferred(fenced, fence)?;
        let scopes = self.scopes();
        self.check_list(&scopes)?;
        self.check_lists()?;
        let broken = "T9: each matchable page has its hash; the hash of a node's first page finds the node";
        self.check_hashes(&scopes).map_err(|node| (broken, self.page(node)))
    }

    /// Returns the scope of each node's prefix. The walk up from a node stops at the first ancestor whose scope is
    /// known, so the cost is O(nodes) at any depth.
    fn scopes(&self) -> HashMap<NodeKey, Scope> {
        let mut scopes = HashMap::with_capacity(self.nodes.link.len());
        let mut path = Vec::new();
        for node in self.nodes.link.keys() {
            let mut at = node;
            let scope = loop {
                if let Some(&scope) = scopes.get(&at) {
                    break scope;
                }
                path.push(at);
                match self.nodes.link[at].parent {
                    Some(parent) => at = parent,
                    None => break self.nodes.scope[at],
                }
            };
            scopes.extend(path.drain(..).map(|node| (node, scope)));
        }
        scopes
    }

    /// Returns a page of the node, for the error.
    fn page(&self, node: NodeKey) -> Option<PageId> {
        self.nodes.pages(node).find_map(|(_, pages)| pages.first().copied())
    }

    pub(super) fn ensure(&self, holds: bool, what: &'static str, node: NodeKey) -> Result<(), Broken> {
        if holds { Ok(()) } else { Err((what, self.page(node))) }
    }

    fn check_columns(&self) -> Result<(), Broken> {
        if self.nodes.link.len() != self.usage.len() || self.nodes.link.len() != self.nodes.children.len() {
            return Err(("T1: all columns hold the same nodes", None));
        }
        for (node, link) in &self.nodes.link {
            self.ensure(self.usage.contains_key(node), "T1: every node has its usage", node)?;
            self.ensure(link.list.pages() > 0, "T1: no node is empty", node)?;
        }
        Ok(())
    }

    fn check_children(&self) -> Result<(), Broken> {
        let mut child_counts = HashMap::<NodeKey, u32>::new();
        for (node, link) in &self.nodes.link {
            let first = self.nodes.lists.first_page(&link.list);
            let scope = if link.parent.is_none() { self.nodes.scope[node] } else { Scope::default() };
            let found = self.nodes.descend(link.parent, scope, first, &mut |_| ());
            let found = found.and_then(|found| found.cursor.node);
            self.ensure(found == Some(node), "T2: the child table finds each node", node)?;
            if let Some(parent) = link.parent {
                *child_counts.entry(parent).or_default() += 1;
                self.ensure(self.nodes.link.contains_key(parent), "T2: a parent is a node", node)?;
            }
        }
        for (node, usage) in &self.usage {
            let counted = child_counts.get(&node).copied().unwrap_or(0);
            self.ensure(usage.child_count == counted, "T2: child_count counts the children", node)?;
        }
        Ok(())
    }

    fn check_locks(&self, locks: &HashMap<NodeKey, u32>) -> Result<(), Broken> {
        let mut users = locks.clone();
        for (node, usage) in &self.usage {
            if usage.lock_count > 0
                && let Some(parent) = self.nodes.link[node].parent
            {
                *users.entry(parent).or_default() += 1;
            }
        }
        for (node, usage) in &self.usage {
            let counted = users.remove(&node).unwrap_or(0);
            let what = "T3: lock_count counts locks that end here and locked children";
            self.ensure(usage.lock_count == counted, what, node)?;
        }
        match users.len() {
            0 => Ok(()),
            _ => Err(("T3: the node of each lock exists", None)),
        }
    }

    fn check_deferred(&self, fenced: &HashMap<NodeKey, u32>, fence: &Fence) -> Result<(), Broken> {
        let mut deferred = fenced.clone();
        let mut pages = HashMap::<StepId, u32>::new();
        for node in self.nodes.link.keys() {
            if self.is_deferred(node) {
                *pages.entry(self.deferred[node].step).or_default() += self.nodes.entries(node);
                if let Some(parent) = self.nodes.link[node].parent {
                    *deferred.entry(parent).or_default() += 1;
                }
            }
        }
        for node in self.nodes.link.keys() {
            let counted = deferred.get(&node).copied().unwrap_or(0);
            let what = "T7: a node counts fenced locks that end here and deferred children";
            self.ensure(self.deferred[node].count == counted, what, node)?;
        }
        // Includes vacant slots, because a new node must start with no deferred users.
        let held = self.deferred.values().filter(|held| **held != Deferred::default()).count();
        let wanted = deferred.values().filter(|count| **count > 0).count();
        if held != wanted || held != self.deferred_nodes as usize {
            return Err(("T7: nodes that have fenced locks or deferred children are counted", None));
        }
        self.cells.iter().for_each(|cells| cells.add_deferred(&mut pages));
        let counted: HashMap<StepId, u32> = fence.idle_pages().collect();
        if counted != pages {
            return Err(("T7: the fence counts the pages of deferred nodes by step", None));
        }
        Ok(())
    }

    fn check_list(&self, scopes: &HashMap<NodeKey, Scope>) -> Result<(), Broken> {
        let mut seen = HashSet::new();
        let mut youngest = 0;
        for node in self.order.iter(&self.usage) {
            self.ensure(seen.insert(node), "T4: the eviction list has no loop", node)?;
            self.ensure(self.usage[node].lock_count == 0, "T4: listed nodes are idle", node)?;
            let young = self.nodes.link[node].parent.is_none_or(|parent| !seen.contains(&parent));
            self.ensure(young, "T4: a parent is younger than its children", node)?;
            let present = scopes[&node].generation == self.generation;
            self.ensure(present, "T8: idle nodes are of the present generation", node)?;
            if let Some(ages) = &self.ages {
                let age = ages.of(node);
                self.ensure(age > youngest, "T4: ages rise along the eviction list", node)?;
                youngest = age + u64::from(self.nodes.entries(node)) - 1;
            }
        }
        let cells = self.cells.as_ref().map(|cells| cells.count_sizes());
        let SizeInfo { mut evictable, mut protected } = cells.unwrap_or_default();
        for (node, usage) in &self.usage {
            let pages = self.nodes.device_pages(node, self.nodes.entries(node));
            if usage.lock_count == 0 {
                self.ensure(seen.contains(&node), "T4: idle nodes are listed", node)?;
                evictable += pages;
            } else {
                protected += pages;
            }
        }
        if self.size_info() != (SizeInfo { evictable, protected }) {
            return Err(("T5: evictable and protected count the pages of idle and locked nodes", None));
        }
        Ok(())
    }

    fn check_lists(&self) -> Result<(), Broken> {
        let mut entries = HashSet::new();
        let mut extents = 0;
        for (node, link) in &self.nodes.link {
            extents += self.nodes.lists.extents_of(&link.list);
            for entry in self.nodes.lists.entries(&link.list) {
                self.ensure(entries.insert(entry), "T6: an entry belongs to one list", node)?;
                self.ensure(!self.nodes.lists.is_free(entry), "T6: the entries of a list are taken", node)?;
            }
            let pages: usize = self.nodes.pages(node).map(|(_, pages)| pages.len()).sum();
            let full = self.nodes.pages(node).all(|(_, pages)| !pages.is_empty());
            self.ensure(full, "T6: no run of a list is empty", node)?;
            let counted = pages == link.list.pages() as usize;
            self.ensure(counted, "T6: a list has an entry for each page", node)?;
        }
        for list in self.swap.iter().flat_map(|swap| swap.fetches.lists()) {
            extents += self.nodes.lists.extents_of(list);
            if !self.nodes.lists.entries(list).all(|entry| entries.insert(entry)) {
                return Err(("T6: an entry belongs to one list", None));
            }
        }
        if entries.len() as u32 != self.nodes.lists.taken_count() {
            return Err(("T6: an entry is taken by a list or free", None));
        }
        if extents != self.nodes.lists.extent_count() {
            return Err(("T6: every extent belongs to a list", None));
        }
        Ok(())
    }

    /// Returns every device page of the tree with its node, for the audit of all tables.
    pub(crate) fn pages(&self) -> impl Iterator<Item = (NodeKey, PageId)> + '_ {
        let of_spans = self.nodes.link.keys().flat_map(move |node| {
            self.nodes.pages(node).flat_map(move |(_, pages)| pages.iter().map(move |&p| (node, p)))
        });
        let of_spans = of_spans.filter(|(_, page)| *page != NO_PAGE);
        of_spans.chain(self.cell_owners())
    }
}

#[cfg(test)]
mod tests;
