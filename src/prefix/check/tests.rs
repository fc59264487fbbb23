//! Breaks each of T1 to T9 by hand, and checks that the audit reports it.

use std::collections::HashMap;

use crate::fence::Fence;
use crate::hash::Hashing;
use crate::id::{Namespace, NodeKey, PageId, PrefixLock, Scope, StepId, TokenId};
use crate::memory::Memory;
use crate::prefix::ages::Ages;
use crate::prefix::deferred::Deferred;
use crate::prefix::entry_list::EntryList;
use crate::prefix::nodes::Link;
use crate::prefix::{Order, PrefixTree, TreeShape, Usage};

const NAMESPACE: Namespace = Namespace::new(0);

/// A tree with one token a page, whose invariants all hold before a test breaks one.
///
/// ```text
///   trunk [0 1] locked, by the lock `held` and its child ----- deferred [2 3] locked, by a fenced lock
///        |
///   idle parent [4 5] ------ idle child [6 7]
///
///   other [8 9] idle, a root of its own: page 9 lies apart from page 8
/// ```
struct Sound {
    tree: PrefixTree,
    fence: Fence,
    locks: HashMap<NodeKey, u32>,
    fenced: HashMap<NodeKey, u32>,
    trunk: NodeKey,
    deferred: NodeKey,
    idle: NodeKey,
    child: NodeKey,
    other: NodeKey,
}

fn tokens(numbers: &[u32]) -> Vec<TokenId> {
    numbers.iter().copied().map(TokenId::new).collect()
}

/// Inserts a text and returns a lock on it. Page `n` contains token `n`.
fn lock(tree: &mut PrefixTree, text: &[u32]) -> PrefixLock {
    let found = tree.match_prefix(NAMESPACE, &tokens(text));
    let mut fence = Fence::new(0, 1, 0).expect("memory");
    let mut lock = tree.lock(&found, &mut fence).expect("nothing changed since the match");
    let new = &text[found.pages() as usize..];
    let mut pages: Vec<PageId> = new.iter().copied().map(PageId::new).collect();
    let inserted = tree.insert(&mut lock, &tokens(new), &mut pages, &mut Vec::new(), &mut fence);
    assert_eq!(inserted.duplicates, 0);
    lock
}

impl Sound {
    fn new() -> Self {
        let shape = TreeShape { hashing: Hashing::ALL.first().copied(), ..TreeShape::new(20, 1, 31) };
        let mut tree = PrefixTree::of_shape(&shape, &mut Memory::new(false)).expect("memory").0;
        let mut fence = Fence::new(0, 4, 1).expect("memory");
        let held = lock(&mut tree, &[0, 1]);
        let other = lock(&mut tree, &[8]);
        let deferred = lock(&mut tree, &[0, 1, 2, 3]);
        let parent = lock(&mut tree, &[0, 1, 4, 5]);
        let child = lock(&mut tree, &[0, 1, 4, 5, 6, 7]);
        // The list grows, but the next entries belong to other lists, so it gets a second extent.
        let mut other = other;
        let page = &mut [PageId::new(9)];
        assert_eq!(tree.insert(&mut other, &tokens(&[9]), page, &mut Vec::new(), &mut fence).duplicates, 0);
        let [trunk, deferred_node, idle, child_node, other_node] =
            [&held, &deferred, &parent, &child, &other].map(|lock| lock.node().expect("not empty"));
        for lock in [parent, child, other] {
            tree.unlock(lock, &mut fence, &mut Vec::new());
        }
        fence.push_lock(deferred, StepId::new(3));
        tree.defer_unlock(Some(deferred_node), StepId::new(3), &mut fence);
        assert_eq!(tree.nodes.lists.extents_of(&tree.nodes.link[other_node].list), 1);
        let sound = Self {
            tree,
            fence,
            locks: HashMap::from([(trunk, 1), (deferred_node, 1)]),
            fenced: HashMap::from([(deferred_node, 1)]),
            trunk,
            deferred: deferred_node,
            idle,
            child: child_node,
            other: other_node,
        };
        assert_eq!(sound.check(), Ok(()));
        sound
    }

    fn check(&self) -> Result<(), &'static str> {
        self.tree.check(&self.locks, &self.fenced, &self.fence).map_err(|(what, _)| what)
    }

    /// Moves a node to another hash in the child table.
    fn rehash(&mut self, node: NodeKey, hash: u32) {
        self.tree.nodes.children.remove(self.tree.usage[node].hash, node);
        self.tree.nodes.children.insert(hash, node);
        self.tree.usage[node].hash = hash;
    }
}

/// Returns the error of the audit after `spoil`.
fn broken<T>(spoil: impl FnOnce(&mut Sound) -> T) -> &'static str {
    let mut sound = Sound::new();
    spoil(&mut sound);
    sound.check().expect_err("the audit finds it")
}

#[test]
fn t1_columns_hold_the_same_nodes() {
    let same = "T1: all columns hold the same nodes";
    assert_eq!(broken(|s| s.tree.usage.remove(s.child)), same);
    assert_eq!(broken(|s| s.tree.nodes.children.remove(s.tree.usage[s.child].hash, s.child)), same);
    let another = |s: &mut Sound| {
        let gone = s.tree.nodes.link.insert(s.tree.nodes.link[s.child]);
        s.tree.usage.insert(gone, Usage::new(0));
        s.tree.nodes.link.remove(gone);
        s.tree.usage.remove(s.child);
    };
    assert_eq!(broken(another), "T1: every node has its usage");
    let empty = |s: &mut Sound| s.tree.nodes.link[s.child].list = EntryList::EMPTY;
    assert_eq!(broken(empty), "T1: no node is empty");
}

#[test]
fn t2_the_child_table_finds_each_node() {
    let found = "T2: the child table finds each node";
    assert_eq!(broken(|s| s.rehash(s.child, s.tree.usage[s.child].hash ^ 1)), found);
    // The table lists the node under its former parent.
    assert_eq!(broken(|s| s.tree.nodes.link[s.child].parent = Some(s.trunk)), found);
    assert_eq!(broken(|s| s.tree.nodes.scope[s.other].generation = 7), found);
    // Add a sibling with the same first page of tokens.
    let twins = |s: &mut Sound| {
        let list = s.tree.nodes.lists.create(&tokens(&[8]), &[PageId::new(10)]);
        let scope = s.tree.nodes.scope[s.other];
        s.tree.spawn(Link { parent: None, list }, scope);
    };
    assert_eq!(broken(twins), found);
    let orphan = |s: &mut Sound| {
        let gone = s.tree.nodes.link.insert(s.tree.nodes.link[s.child]);
        s.tree.nodes.link.remove(gone);
        s.tree.nodes.link[s.child].parent = Some(gone);
        let first = tokens(&[6]);
        s.rehash(s.child, s.tree.nodes.children.hash(Some(gone), Scope::default(), &first));
    };
    assert_eq!(broken(orphan), "T2: a parent is a node");
    let counts = "T2: child_count counts the children";
    assert_eq!(broken(|s| s.tree.usage[s.trunk].child_count += 1), counts);
    assert_eq!(broken(|s| s.tree.usage[s.child].child_count += 1), counts);
}

#[test]
fn t3_lock_count_counts_locks_and_locked_children() {
    let counts = "T3: lock_count counts locks that end here and locked children";
    assert_eq!(broken(|s| s.tree.usage[s.trunk].lock_count += 1), counts);
    assert_eq!(broken(|s| s.tree.usage[s.trunk].lock_count -= 1), counts);
    assert_eq!(broken(|s| s.tree.usage[s.idle].lock_count += 1), counts);
    assert_eq!(broken(|s| s.locks.insert(s.idle, 1)), counts);
    assert_eq!(broken(|s| s.locks.remove(&s.trunk)), counts);
    let nowhere = |s: &mut Sound| {
        let gone = s.tree.nodes.link.insert(s.tree.nodes.link[s.child]);
        s.tree.nodes.link.remove(gone);
        s.locks.insert(gone, 1);
    };
    assert_eq!(broken(nowhere), "T3: the node of each lock exists");
}

#[test]
fn t4_the_eviction_list_holds_the_idle_nodes_children_first() {
    let loops = |s: &mut Sound| {
        let oldest = s.tree.order.next().expect("there are idle nodes");
        Order::bend(&mut s.tree.usage, s.other, oldest);
    };
    assert_eq!(broken(loops), "T4: the eviction list has no loop");
    let locked = |s: &mut Sound| s.tree.order.enter(&mut s.tree.usage, s.trunk);
    assert_eq!(broken(locked), "T4: listed nodes are idle");
    let later = |s: &mut Sound| {
        s.tree.order.leave(&mut s.tree.usage, s.child);
        s.tree.order.enter(&mut s.tree.usage, s.child);
    };
    assert_eq!(broken(later), "T4: a parent is younger than its children");
    let left_out = |s: &mut Sound| s.tree.order.leave(&mut s.tree.usage, s.other);
    assert_eq!(broken(left_out), "T4: idle nodes are listed");
    // The idle nodes have no ages yet.
    let ages = |s: &mut Sound| s.tree.ages = Some(Box::new(Ages::new(8, &mut Memory::new(false)).expect("memory")));
    assert_eq!(broken(ages), "T4: ages rise along the eviction list");
}

#[test]
fn t5_pages_are_counted() {
    let counts = "T5: evictable and protected count the pages of idle and locked nodes";
    assert_eq!(broken(|s| s.tree.size.evictable += 1), counts);
    assert_eq!(broken(|s| s.tree.size.protected -= 1), counts);
    let swapped = |s: &mut Sound| (s.tree.size.evictable, s.tree.size.protected) = (4, 6);
    assert_eq!(broken(swapped), counts);
}

#[test]
fn t6_every_entry_belongs_to_one_span_or_is_free() {
    // The second entry of one node also becomes the list of a new node. Then no list has the new node's own entry.
    let shared = |s: &mut Sound| {
        let mut first = s.tree.nodes.link[s.idle].list;
        let second = s.tree.nodes.lists.split(&mut first, 1);
        let own = s.tree.nodes.lists.create(&tokens(&[5]), &[PageId::new(10)]);
        let node = s.tree.spawn(Link { parent: None, list: own }, Scope::default());
        s.tree.nodes.link[node].list = second;
        s.tree.order.enter(&mut s.tree.usage, node);
        s.tree.size.evictable += 1;
    };
    assert_eq!(broken(shared), "T6: an entry belongs to one list");
    let freed = |s: &mut Sound| {
        let mut copy = s.tree.nodes.link[s.idle].list;
        s.tree.nodes.lists.trim(&mut copy, 1, None);
    };
    assert_eq!(broken(freed), "T6: the entries of a list are taken");
    let emptied = |s: &mut Sound| {
        let mut copy = s.tree.nodes.link[s.other].list;
        s.tree.nodes.lists.trim(&mut copy, 1, None);
    };
    assert_eq!(broken(emptied), "T6: no run of a list is empty");
    let short = |s: &mut Sound| {
        let mut list = s.tree.nodes.link[s.other].list;
        s.tree.nodes.lists.grow(&mut list, &tokens(&[10]), &[PageId::new(10)]);
        s.tree.nodes.link[s.other].list = list;
        s.tree.size.evictable += 1;
        s.tree.nodes.lists.trim(&mut list, 1, None);
    };
    assert_eq!(broken(short), "T6: a list has an entry for each page");
    let lost = |s: &mut Sound| s.tree.nodes.lists.create(&tokens(&[10]), &[PageId::new(10)]);
    assert_eq!(broken(lost), "T6: an entry is taken by a list or free");
    let lost = |s: &mut Sound| s.tree.nodes.lists.lose_an_extent();
    assert_eq!(broken(lost), "T6: every extent belongs to a list");
}

#[test]
fn t7_deferred_nodes_are_counted_by_step() {
    let counts = "T7: a node counts fenced locks that end here and deferred children";
    assert_eq!(broken(|s| s.tree.deferred[s.deferred] = Deferred::default()), counts);
    assert_eq!(broken(|s| s.tree.deferred[s.trunk].count += 1), counts);
    let step = StepId::new(3);
    assert_eq!(broken(|s| s.tree.deferred[s.idle] = Deferred { count: 1, step }), counts);
    assert_eq!(broken(|s| s.fenced.insert(s.trunk, 1)), counts);
    let nodes = "T7: nodes that have fenced locks or deferred children are counted";
    assert_eq!(broken(|s| s.tree.deferred_nodes += 1), nodes);
    let pages = "T7: the fence counts the pages of deferred nodes by step";
    assert_eq!(broken(|s| s.tree.deferred[s.deferred].step = StepId::new(2)), pages);
    assert_eq!(broken(|s| s.fence.add_idle(step, 1)), pages);
    assert_eq!(broken(|s| s.fence.remove_idle(step, 2)), pages);
}

#[test]
fn t8_idle_nodes_are_of_the_present_generation() {
    assert_eq!(broken(|s| s.tree.generation += 1), "T8: idle nodes are of the present generation");
}

#[test]
#[cfg(any(feature = "sha256", feature = "xxhash"))]
fn t9_pages_have_the_hashes_of_their_prefixes() {
    let found = "T9: each matchable page has its hash; the hash of a node's first page finds the node";
    let chain = |s: &mut Sound| s.tree.chain.take().expect("it keeps hashes");
    for node in [|s: &Sound| s.trunk, |s: &Sound| s.child, |s: &Sound| s.other] {
        let spoil = |s: &mut Sound| {
            let mut column = chain(s);
            column.spoil(s.tree.nodes.last_entry(node(s)));
            s.tree.chain = Some(column);
        };
        assert_eq!(broken(spoil), found);
        let unlist = |s: &mut Sound| {
            let mut column = chain(s);
            column.unlist(node(s));
            s.tree.chain = Some(column);
        };
        assert_eq!(broken(unlist), found);
    }
}
