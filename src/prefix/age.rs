//! The order of eviction: a doubly linked list of the idle nodes, oldest first, inside their column.
//!
//! Not here: when a node becomes idle (`lock.rs`).

use slotmap::SecondaryMap;

use crate::id::NodeKey;

/// Read by locks and eviction. With its version a slot of 32 bytes: half a cache line.
#[derive(Clone, Copy)]
pub(super) struct Age {
    older: Option<NodeKey>,
    pub younger: Option<NodeKey>,
    /// Locks that end here and locked children. 0: idle.
    pub lock_count: u32,
    pub child_count: u32,
    /// Of parent (or scope) and first page, so that removal need not hash again.
    pub hash: u32,
}

impl Age {
    pub fn new(hash: u32) -> Self {
        Self { older: None, younger: None, lock_count: 0, child_count: 0, hash }
    }
}

type Ages = SecondaryMap<NodeKey, Age>;

/// The list's ends.
#[derive(Clone, Copy, Default)]
pub(super) struct AgeList {
    oldest: Option<NodeKey>,
    youngest: Option<NodeKey>,
}

impl AgeList {
    pub fn oldest(&self) -> Option<NodeKey> {
        self.oldest
    }

    /// From the oldest on.
    pub fn iter<'a>(&self, ages: &'a Ages) -> impl Iterator<Item = NodeKey> + 'a {
        std::iter::successors(self.oldest, |&node| ages[node].younger)
    }

    /// Appends a node to the young end.
    pub fn push(&mut self, ages: &mut Ages, node: NodeKey) {
        self.link(ages, node, self.youngest, None);
    }

    /// Puts a node on the young side of another.
    pub fn insert_after(&mut self, ages: &mut Ages, node: NodeKey, older: NodeKey) {
        let younger = ages[older].younger;
        self.link(ages, node, Some(older), younger);
    }

    /// Takes a node out.
    pub fn unlink(&mut self, ages: &mut Ages, node: NodeKey) {
        let Age { older, younger, .. } = ages[node];
        match older {
            Some(older) => ages[older].younger = younger,
            None => self.oldest = younger,
        }
        match younger {
            Some(younger) => ages[younger].older = older,
            None => self.youngest = older,
        }
    }

    fn link(
        &mut self,
        ages: &mut Ages,
        node: NodeKey,
        older: Option<NodeKey>,
        younger: Option<NodeKey>,
    ) {
        let age = &mut ages[node];
        (age.older, age.younger) = (older, younger);
        match older {
            Some(older) => ages[older].younger = Some(node),
            None => self.oldest = Some(node),
        }
        match younger {
            Some(younger) => ages[younger].older = Some(node),
            None => self.youngest = Some(node),
        }
    }
}
