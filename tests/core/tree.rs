//! Tests of the tree alone: random programs against a naive map, and the rules of handles one by one.
//!
//! `KVARENA_SEEDS=1000..2000 cargo test --test core tree` runs other seeds; `KVARENA_OPS=5000` runs longer programs.

use std::env;

use super::{is_range, seeds};
use kvarena::testkit::rng::Rng;
use kvarena::testkit::tree::{Counts, run};
use kvarena::tree::{Handle, Tree, TreeConfig, TreeError};
use kvarena::{ConfigError, Namespace, PageId, TokenId};

/// Results that the seeds of the test must reach, and how often.
const REACHED: [(&str, u64); 25] = [
    ("match", 500),
    ("match none", 100),
    ("insert", 500),
    ("insert none", 100),
    ("insert unnamed", 20),
    ("no page is free", 100),
    ("lock", 500),
    ("lock gone", 50),
    ("unlock", 500),
    ("unlock rejected", 100),
    ("unlock after a reset", 20),
    ("extend", 100),
    ("extend in place", 50),
    ("extend unlocked", 50),
    ("evict", 200),
    ("evict node", 100),
    ("reset", 10),
    ("reset under locks", 20),
    ("drain", 50),
    ("drain restated", 20),
    ("gone", 100),
    ("length", 50),
    ("page", 100),
    ("pending token", 20),
    ("not evictable", 20),
];

#[test]
fn random_programs_agree_with_a_naive_map() {
    let ops = env::var("KVARENA_OPS").map_or(500, |ops| ops.parse().expect("KVARENA_OPS is a number"));
    let mut all = Counts::new();
    for seed in seeds(40, 200) {
        for (result, count) in run(Rng::new(seed), ops) {
            *all.entry(result).or_default() += count;
        }
    }
    println!("{all:#?}");
    for (result, least) in REACHED.into_iter().filter(|_| !is_range()) {
        let count = all.get(result).copied().unwrap_or(0);
        assert!(count >= least, "seldom reached: {result}, {count}");
    }
}

fn pages(numbers: std::ops::Range<u32>) -> Vec<PageId> {
    numbers.map(PageId::new).collect()
}

fn text(numbers: std::ops::Range<u32>) -> Vec<TokenId> {
    numbers.map(TokenId::new).collect()
}

const NAMESPACE: Namespace = Namespace::new(0);

/// Returns a tree with a prefix of pages 0 to 3, and the handle to its end.
fn tree_of_four() -> (Tree, Handle) {
    let mut tree = Tree::new(TreeConfig::new(20, 1)).expect("a valid config");
    let inserted = tree.insert(NAMESPACE, &text(0..4), &pages(0..4)).expect("new pages");
    assert_eq!(inserted.known, 0);
    (tree, inserted.handle)
}

#[test]
fn a_handle_survives_splits_continuations_and_other_evictions() {
    let (mut tree, end) = tree_of_four();
    tree.lock(end).expect("it is cached");
    let mut matched = Vec::new();
    let middle = tree.match_prefix(NAMESPACE, &text(0..2), &mut matched);
    assert_eq!((middle.pages, &matched), (2, &pages(0..2)));
    assert_ne!(middle.handle, end, "a split");
    let longer = tree.insert(NAMESPACE, &text(0..6), &pages(0..6)).expect("two new pages");
    assert_eq!(longer.known, 4);
    tree.evict(2, &mut Vec::new()).expect("the last two are idle");
    assert_eq!(tree.lock(longer.handle), Err(TreeError::Gone { handle: longer.handle }));
    for (handle, count) in [(middle.handle, 2), (end, 4)] {
        let mut found = Vec::new();
        assert_eq!(tree.pages_of(handle, &mut found), Ok(count));
        assert_eq!(found, pages(0..count));
    }
    tree.verify().expect("all invariants hold");
}

#[test]
fn an_evicted_end_is_gone_for_ever() {
    let (mut tree, end) = tree_of_four();
    let mut freed = Vec::new();
    tree.evict(1, &mut freed).expect("all are idle");
    assert_eq!(freed, pages(3..4));
    let gone = TreeError::Gone { handle: end };
    assert_eq!(tree.lock(end), Err(gone));
    // The prefix is cached again, by the same page, in the same node.
    let again = tree.insert(NAMESPACE, &text(0..4), &pages(0..4)).expect("page 3 is new");
    assert_eq!(again.known, 3);
    assert_ne!(again.handle, end);
    assert_eq!(tree.unlock(end, &mut freed), Err(gone));
    assert_eq!(tree.extend(end, &text(0..0), &[]), Err(gone));
    assert_eq!(tree.pages_of(end, &mut freed), Err(gone));
}

#[test]
fn the_only_holder_of_a_leaf_extends_it_in_place() {
    let (mut tree, end) = tree_of_four();
    assert_eq!(tree.extend(end, &text(4..5), &pages(4..5)), Err(TreeError::NotLocked { handle: end }));
    tree.lock(end).expect("it is cached");
    let grown = tree.extend(end, &text(4..5), &pages(4..5)).expect("it is locked").handle;
    assert_eq!(tree.lock(end), Err(TreeError::Gone { handle: end }), "it is replaced");
    // Another call returns the same end, so the handle must stay.
    let found = tree.match_prefix(NAMESPACE, &text(0..5), &mut Vec::new());
    assert_eq!(found.handle, grown);
    let child = tree.extend(grown, &text(5..6), &pages(5..6)).expect("it is locked").handle;
    assert_eq!(tree.unlock(grown, &mut Vec::new()), Err(TreeError::NotLocked { handle: grown }), "its lock moved");
    assert_eq!(tree.lock(grown), Ok(()));
    assert_eq!(tree.unlock(child, &mut Vec::new()), Ok(()));
    assert_eq!((tree.size().protected, tree.size().evictable), (5, 1));
}

#[test]
fn a_locked_prefix_outlives_a_reset() {
    let (mut tree, end) = tree_of_four();
    let idle = tree.insert(NAMESPACE, &text(10..12), &pages(10..12)).expect("new pages").handle;
    tree.lock(end).expect("it is cached");
    let mut freed = Vec::new();
    tree.reset(&mut freed);
    freed.sort_unstable();
    assert_eq!(freed, pages(10..12));
    assert_eq!(tree.lock(idle), Err(TreeError::Gone { handle: idle }));
    assert_eq!(tree.find(NAMESPACE, &text(0..4)), 0);
    let end = tree.extend(end, &text(4..6), &pages(4..6)).expect("it is locked").handle;
    tree.lock(end).expect("it is cached");
    assert_eq!(tree.to_string(), "0 pages evictable, 6 protected\nns0, reset\n  6 pages, locked: t0 t1 t2 t3 t4 t5\n");
    freed.clear();
    tree.unlock(end, &mut freed).expect("it has two locks");
    assert!(freed.is_empty());
    tree.unlock(end, &mut freed).expect("it has one lock");
    freed.sort_unstable();
    assert_eq!(freed, pages(0..6));
    assert_eq!(tree.unlock(end, &mut freed), Err(TreeError::Gone { handle: end }));
    tree.verify().expect("all invariants hold");
}

#[test]
fn find_changes_no_recency_and_match_prefix_does() {
    let (mut tree, _) = tree_of_four();
    let _ = tree.insert(NAMESPACE, &text(10..12), &pages(10..12)).expect("new pages");
    let mut freed = Vec::new();
    assert_eq!(tree.find(NAMESPACE, &text(0..4)), 4);
    tree.evict(1, &mut freed).expect("all are idle");
    assert_eq!(freed, pages(3..4), "the older prefix, its last page first");
    tree.match_prefix(NAMESPACE, &text(0..2), &mut Vec::new());
    freed.clear();
    tree.evict(3, &mut freed).expect("all are idle");
    freed.sort_unstable();
    assert_eq!(freed, [2, 10, 11].map(PageId::new), "the match ended before page 2");
}

#[test]
fn an_eviction_by_node_returns_the_handle_of_the_end() {
    let (mut tree, end) = tree_of_four();
    let middle = tree.match_prefix(NAMESPACE, &text(0..1), &mut Vec::new()).handle;
    let mut freed = Vec::new();
    assert_eq!(tree.evict_node(&mut freed), Some(end));
    freed.sort_unstable();
    assert_eq!(freed, pages(1..4));
    assert_eq!(tree.evict_node(&mut freed), Some(middle));
    assert_eq!(tree.evict_node(&mut freed), None);
    assert_eq!(tree.size().total(), 0);
}

#[test]
fn the_empty_prefix_has_the_default_handle() {
    let (mut tree, end) = tree_of_four();
    let empty = Handle::default();
    assert_eq!(tree.match_prefix(NAMESPACE, &text(7..9), &mut Vec::new()).handle, empty);
    assert_eq!(tree.insert(NAMESPACE, &[], &[]).expect("no pages").handle, empty);
    assert_eq!((tree.lock(empty), tree.unlock(empty, &mut Vec::new())), (Ok(()), Ok(())));
    assert_eq!(tree.pages_of(empty, &mut Vec::new()), Ok(0));
    assert_eq!(tree.extend(empty, &text(0..1), &pages(9..10)), Err(TreeError::NotLocked { handle: empty }));
    assert_eq!(empty.to_raw(), [0, 0]);
    assert_eq!(Handle::from_raw([0, 0]), empty);
    // The number of a missing key, and a handle whose key has another number.
    let (missing, [serial, node]) = (1 << 32 | u64::from(u32::MAX), end.to_raw());
    assert_eq!(tree.lock(Handle::from_raw([serial, node])), Ok(()));
    for raw in [[0, 1], [1, 0], [0, u64::MAX], [u64::MAX, u64::MAX], [0, missing], [serial, node ^ 1 << 32]] {
        let handle = Handle::from_raw(raw);
        assert_eq!(tree.lock(handle), Err(TreeError::Gone { handle }), "{raw:?}");
    }
}

#[test]
fn a_config_is_checked() {
    let new = |config| Tree::new(config).map(|_| ());
    let plain = TreeConfig::new(8, 4);
    assert_eq!(new(TreeConfig { pages: 0, ..plain }), Err(ConfigError::Zero { name: "pages" }));
    assert_eq!(new(TreeConfig { page_size: 0, ..plain }), Err(ConfigError::Zero { name: "page_size" }));
    let wide = TreeConfig { page_size: 1025, ..plain };
    assert_eq!(new(wide), Err(ConfigError::PageSize { page_size: 1025, max: 1024 }));
    let many = TreeConfig { pages: u32::MAX, ..plain };
    assert_eq!(new(many), Err(ConfigError::PageCount { page_count: u32::MAX.into() }));
    let events = TreeConfig { event_pages: 9, ..plain };
    assert_eq!(new(events), Err(ConfigError::EventsWithoutHashes { event_pages: 9 }));
}

#[test]
fn errors_of_a_tree_are_in_plain_words() {
    let (mut tree, handle) = tree_of_four();
    let shown = |error: TreeError| error.to_string();
    let mut freed = Vec::new();
    assert_eq!(shown(tree.unlock(handle, &mut freed).unwrap_err()), "handle2 has no lock");
    assert_eq!(shown(tree.evict(5, &mut freed).unwrap_err()), "5 pages cannot be evicted, 4 can");
    let short = tree.insert(NAMESPACE, &text(0..3), &pages(5..6)).unwrap_err();
    assert_eq!(shown(short), "3 tokens cannot fill 1 page of 1");
    let page = tree.insert(NAMESPACE, &text(9..10), &pages(1..2)).unwrap_err();
    assert_eq!(shown(page), "page 1 is out of range or already cached");
    let pending = tree.insert(NAMESPACE, &[TokenId::new(0), TokenId::PENDING], &pages(0..2)).unwrap_err();
    assert_eq!(shown(pending), "token 1 is the placeholder for unknown tokens");
    tree.evict(4, &mut freed).expect("all are idle");
    assert_eq!(shown(tree.lock(handle).unwrap_err()), "handle2 names no cached prefix");
    let full = TreeError::Locks { handle, max: 7 };
    assert_eq!(shown(full), "handle2 has 7 locks already");
    let unnamed = TreeError::UnnamedNamespace { namespace: Namespace::new(3) };
    assert_eq!(shown(unnamed), "pages are hashed, but ns3 has no names");
}

#[test]
fn threads_can_share_a_tree() {
    fn check<T: Send + Sync>() {}
    check::<Tree>();
}
