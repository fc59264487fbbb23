//! Where the prefixes of a batch meet: the nodes that its rows' locks pass, and from them the spans of pages that
//! several rows read ([`SharedSpans`]).
//!
//! A row's walk goes up from its lock to the first node that a row before it has passed. A node remembers where it
//! stands in the list of nodes passed; whether it does so still the list says itself, so nothing is ever cleared.
//!
//! What was found stays until a lock or a branch of the tree changes or another batch asks: a sequence that decodes and
//! grows its own leaf changes neither.
//!
//! Not here: who holds which lock.

use crate::id::{NodeKey, PrefixLock, SeqKey};
use crate::memory::{OutOfMemory, reserved, touch_reserved};
use crate::plan::{SharedSpan, SharedSpans};

use super::PrefixTree;

/// Nodes that the walks of a batch pass, for each of its rows: where they are used up, a row is read by itself.
const NODES_PER_ROW: u32 = 8;
/// No such node, place or span.
const NONE: u32 = u32::MAX;

/// A node that a row's lock passes.
#[derive(Clone, Copy)]
struct Passed {
    node: NodeKey,
    /// Stands before it in the list.
    parent: u32,
    /// Its pages, counted from the begin of the prefix.
    begin: u32,
    end: u32,
    /// Rows whose locks pass it.
    rows: u32,
    /// Where the next of these goes among the members; `NONE` where no two rows meet.
    place: u32,
    /// The last span that it is in.
    span: u32,
}

const _: () = assert!(size_of::<Passed>() == 32);

/// The spans of the batch that asked last, and what they were found with.
#[derive(Default)]
pub struct Meeting {
    most_rows: u32,
    nodes: Vec<Passed>,
    /// Of each row, the node of its lock.
    leaves: Vec<u32>,
    spans: Vec<SharedSpan>,
    members: Vec<u32>,
    /// The batch, and the tree's branches then; no batch: nothing is kept.
    batch: Vec<SeqKey>,
    branches: u64,
}

impl Meeting {
    /// Room for batches of so many rows. Larger ones share nothing.
    pub(crate) fn try_new(rows: u32) -> Result<Self, OutOfMemory> {
        let of = u64::from(rows);
        Ok(Self {
            most_rows: rows,
            nodes: reserved(of * u64::from(NODES_PER_ROW))?,
            leaves: reserved(of)?,
            spans: reserved(of)?,
            members: reserved(of)?,
            batch: reserved(of)?,
            branches: 0,
        })
    }

    /// Touches its memory.
    pub(crate) fn prefault(&mut self) {
        let nobody = Passed {
            node: NodeKey::default(),
            parent: NONE,
            begin: 0,
            end: 0,
            rows: 0,
            place: NONE,
            span: NONE,
        };
        touch_reserved(&mut self.nodes, nobody);
        touch_reserved(&mut self.leaves, NONE);
        touch_reserved(&mut self.spans, bytemuck::Zeroable::zeroed());
        touch_reserved(&mut self.members, NONE);
        touch_reserved(&mut self.batch, SeqKey::default());
    }

    /// Bytes that it reserves.
    pub(crate) fn bytes(rows: u32) -> u64 {
        let nodes = NODES_PER_ROW as usize * size_of::<Passed>();
        let row = nodes + 2 * size_of::<u32>() + size_of::<SharedSpan>() + size_of::<SeqKey>();
        u64::from(rows) * row as u64
    }

    /// What was found last.
    pub(crate) fn spans(&self) -> SharedSpans<'_> {
        SharedSpans { spans: &self.spans, members: &self.members }
    }

    /// Whether what was found holds for this batch.
    pub(crate) fn is_of(
        &self,
        tree: &PrefixTree,
        batch: impl ExactSizeIterator<Item = SeqKey>,
    ) -> bool {
        self.branches == tree.branches
            && batch.len() == self.batch.len()
            && batch.eq(self.batch.iter().copied())
    }

    /// Finds the spans of a batch: of each row its sequence, its lock and its published pages.
    /// O(rows and nodes passed, of which there are at most 8 a row).
    pub(crate) fn find<'a>(
        &mut self,
        tree: &mut PrefixTree,
        rows: impl ExactSizeIterator<Item = (SeqKey, &'a PrefixLock, u32)>,
    ) {
        self.nodes.clear();
        self.leaves.clear();
        self.spans.clear();
        self.members.clear();
        self.batch.clear();
        if rows.len() > self.most_rows as usize {
            return;
        }
        let most = rows.len() * NODES_PER_ROW as usize;
        for (seq, lock, published) in rows {
            self.batch.push(seq);
            let leaf = self.walk(tree, lock.node(), published, most);
            self.leaves.push(leaf);
        }
        self.branches = tree.branches;
        self.count_rows();
        let member_count = self.lay_out(tree.page_size);
        self.members.resize(member_count as usize, NONE);
        for (row, &leaf) in self.leaves.iter().enumerate() {
            if leaf != NONE && self.nodes[leaf as usize].place != NONE {
                let place = &mut self.nodes[leaf as usize].place;
                self.members[*place as usize] = row as u32;
                *place += 1;
            }
        }
        self.spans.sort_unstable_by_key(|span| (span.member_start, u32::MAX - span.member_count));
    }

    /// Adds the nodes from a lock's up to one that is known, parents first; gives the lock's own. `NONE` where the
    /// prefix is empty, or more than `most` nodes would be passed.
    fn walk(
        &mut self,
        tree: &mut PrefixTree,
        lock: Option<NodeKey>,
        pages: u32,
        most: usize,
    ) -> u32 {
        let first_new = self.nodes.len();
        let (mut at, mut end) = (lock, pages);
        let mut parent = NONE;
        while let Some(node) = at {
            if let Some(known) = self.place_of(tree, node) {
                assert!(self.nodes[known as usize].end == end, "W2: equal paths have equal pages");
                parent = known;
                break;
            }
            if self.nodes.len() == most {
                self.nodes.truncate(first_new);
                return NONE;
            }
            let link = &tree.link[node];
            let begin = end - link.span.pages();
            self.nodes.push(Passed { node, parent, begin, end, rows: 0, place: NONE, span: NONE });
            (at, end) = (link.parent, begin);
        }
        assert!(at.is_some() || end == 0, "W2: a path begins at the prefix's begin");
        self.nodes[first_new..].reverse();
        for (i, passed) in self.nodes.iter_mut().enumerate().skip(first_new) {
            passed.parent = parent;
            parent = i as u32;
            tree.passed[passed.node] = parent;
        }
        parent
    }

    /// Where a node stands in the list, if it does.
    fn place_of(&self, tree: &PrefixTree, node: NodeKey) -> Option<u32> {
        let place = tree.passed[node];
        let passed = self.nodes.get(place as usize)?;
        (passed.node == node).then_some(place)
    }

    /// Counts the rows that pass each node.
    fn count_rows(&mut self) {
        for &leaf in self.leaves.iter().filter(|&&leaf| leaf != NONE) {
            self.nodes[leaf as usize].rows += 1;
        }
        for i in (0..self.nodes.len()).rev() {
            let Passed { parent, rows, .. } = self.nodes[i];
            if parent != NONE {
                self.nodes[parent as usize].rows += rows;
            }
        }
    }

    /// Makes the spans of nodes that several rows pass, and gives each node its place among the members; returns their
    /// number.
    fn lay_out(&mut self, page_size: u32) -> u32 {
        let mut member_count = 0;
        for i in 0..self.nodes.len() {
            let Passed { parent, rows, begin, end, .. } = self.nodes[i];
            let (place, around) = match self.nodes.get_mut(parent as usize) {
                None if rows < 2 => continue,
                None => {
                    member_count += rows;
                    (member_count - rows, NONE)
                }
                Some(parent) if parent.place == NONE => continue,
                Some(parent) => {
                    parent.place += rows;
                    (parent.place - rows, parent.span)
                }
            };
            let of = self.spans.get(around as usize).map(|span| span.member_count);
            let span = if rows < 2 {
                around
            } else if of == Some(rows) {
                self.spans[around as usize].end = end * page_size;
                around
            } else {
                let (begin, end) = (begin * page_size, end * page_size);
                self.spans.push(SharedSpan { member_start: place, member_count: rows, begin, end });
                self.spans.len() as u32 - 1
            };
            (self.nodes[i].place, self.nodes[i].span) = (place, span);
        }
        member_count
    }
}
