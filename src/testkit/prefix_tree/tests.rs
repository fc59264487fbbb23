//! Checks that the tree's log of attached and detached pages reproduces its contents.

use super::*;
use crate::prefix::{CachedPage, LogEntry};

/// Contents of a tree, from its log alone.
#[derive(Default)]
struct Follower {
    all: HashMap<PageId, CachedPage>,
    /// Pages that can match.
    present: HashMap<PageId, CachedPage>,
    /// Number of detached pages of old generations, and of the present one.
    detached: [usize; 2],
}

impl Follower {
    fn follow(&mut self, entry: LogEntry) {
        let LogEntry { added, present, pages } = entry;
        if added {
            for (page, cached) in pages {
                let parent = cached.parent.is_none_or(|parent| self.all.contains_key(&parent));
                assert!(parent, "a parent is attached first");
                assert_eq!(cached.parent.is_none(), cached.position == 0);
                if present {
                    self.present.insert(page, cached.clone());
                }
                assert_eq!(self.all.insert(page, cached), None, "a page is attached once");
            }
            return;
        }
        self.detached[usize::from(present)] += pages.len();
        for (page, cached) in pages.into_iter().rev() {
            assert_eq!(self.all.remove(&page), Some(cached), "the attached page is detached");
            assert_eq!(self.present.remove(&page).is_some(), present);
            let parent = |cached: &CachedPage| cached.parent == Some(page);
            assert!(!self.all.values().any(parent), "children are detached first");
        }
    }
}

#[test]
fn the_log_reproduces_the_pages_of_the_tree() {
    let mut detached = [0; 2];
    for seed in 0..60 {
        let (config, ops) = prefix_ops(seed, 250);
        let mut both = Both::new(config);
        both.tree.keep_log();
        let mut follower = Follower::default();
        for op in ops {
            both.apply(op).expect("tree and model agree");
            if op == PrefixOp::Reset {
                follower.present.clear();
            }
            both.tree.take_log().into_iter().for_each(|entry| follower.follow(entry));
            let held = both.tree.held();
            assert_eq!(follower.all, held, "seed {seed}, {op:?}");
            let mut present = held;
            present.retain(|_, cached| cached.scope.generation == both.generation);
            assert_eq!(follower.present, present, "seed {seed}, {op:?}");
        }
        (0..2).for_each(|i| detached[i] += follower.detached[i]);
    }
    assert!(detached.iter().all(|&pages| pages > 1000), "old and present pages: {detached:?}");
}
