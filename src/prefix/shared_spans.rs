//! Finds the spans of pages that several rows of a batch read ([`SharedSpans`]), from the nodes above the rows' locks.
//!
//! The walk of a row goes up from its lock to the first node that the walk of an earlier row has passed. The tree
//! stores the index of each node in the list of passed nodes. An index is valid only if the list has the same node at
//! this index, so the column need not be cleared between batches.
//!
//! The spans stay valid until a lock changes, the tree gets a node, or another batch is planned. A sequence that
//! decodes and grows its own leaf changes no lock and adds no node.
//!
//! Not here: which sequence holds which lock.

use crate::id::{NodeKey, PrefixLock, SeqKey};
use crate::memory::{Memory, OutOfMemory};
use crate::plan::{SharedSpan, SharedSpans};

use super::PrefixTree;

/// The walks of a batch pass at most this number of nodes, times the number of rows. A row whose walk would exceed the
/// limit shares nothing.
const NODES_PER_ROW: u32 = 8;
/// Stands for no node, no place and no span.
const NONE: u32 = u32::MAX;

/// A node on the path of a row's lock.
#[derive(Clone, Copy)]
struct Passed {
    node: NodeKey,
    /// Index of the parent in the list. The parent comes before the node.
    parent: u32,
    /// The node's range of pages, counted from the start of the prefix.
    begin: u32,
    end: u32,
    /// Number of rows with a lock at this node or below it.
    rows: u32,
    /// Index among the members where the next of these rows is written; `NONE` if these rows are in no span.
    place: u32,
    /// Index of the innermost span that contains these rows; `NONE` without a span.
    span: u32,
}

const _: () = assert!(size_of::<Passed>() == 32);

/// The shared spans of the last batch, and the buffers of the search.
#[derive(Default)]
pub struct SharedPrefixFinder {
    most_rows: u32,
    nodes: Vec<Passed>,
    /// By row, the index of its lock's node.
    leaves: Vec<u32>,
    spans: Vec<SharedSpan>,
    members: Vec<u32>,
    /// The sequences of the last batch; empty if there are no valid spans.
    batch: Vec<SeqKey>,
    /// The tree's `branches` when the spans were found.
    branches: u64,
}

impl SharedPrefixFinder {
    /// Reserves memory for batches of at most `rows` rows. Larger batches share nothing.
    pub(crate) fn new(rows: u32, memory: &mut Memory) -> Result<Self, OutOfMemory> {
        Ok(Self {
            most_rows: rows,
            nodes: memory.reserved(u64::from(rows) * u64::from(NODES_PER_ROW))?,
            leaves: memory.reserved(rows.into())?,
            spans: memory.reserved(rows.into())?,
            members: memory.reserved(rows.into())?,
            batch: memory.reserved(rows.into())?,
            branches: 0,
        })
    }

    /// Returns the spans of the last batch.
    pub(crate) fn spans(&self) -> SharedSpans<'_> {
        SharedSpans { spans: &self.spans, members: &self.members }
    }

    /// Returns whether the spans are valid for this batch.
    pub(crate) fn is_of(&self, tree: &PrefixTree, batch: impl ExactSizeIterator<Item = SeqKey>) -> bool {
        self.branches == tree.branches && batch.len() == self.batch.len() && batch.eq(self.batch.iter().copied())
    }

    /// Finds the spans of a batch. Each of `rows` is a sequence, its lock and the number of its published pages.
    /// O(rows + nodes walked), plus the sort of the spans. One walk visits at most 8 nodes times the number of rows.
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
        let member_count = self.lay_out(tree.page_size());
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

    /// Appends the nodes from a lock's node up to the first one in the list, parents first. Returns the index of the
    /// lock's node, or `NONE` if the prefix is empty or the list would exceed `most` nodes.
    fn walk(&mut self, tree: &mut PrefixTree, lock: Option<NodeKey>, pages: u32, most: usize) -> u32 {
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
            let link = &tree.nodes.link[node];
            let begin = end - link.list.pages();
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

    /// Returns the index of a node in the list, if it is there.
    fn place_of(&self, tree: &PrefixTree, node: NodeKey) -> Option<u32> {
        let place = tree.passed[node];
        let passed = self.nodes.get(place as usize)?;
        (passed.node == node).then_some(place)
    }

    /// Counts the rows at or below each node.
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

    /// Creates a span for each run of nodes that the same rows pass, if these are two rows or more. Sets each node's
    /// place among the members. Returns the number of members.
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
            let members = self.spans.get(around as usize).map(|span| span.member_count);
            let span = if rows < 2 {
                around
            } else if members == Some(rows) {
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
