//! The log of the tree: a follower that reads only the log has the pages of the tree.

use std::collections::HashMap;

use crate::backend::Null;
use crate::id::{Namespace, PageId};
use crate::prefix::{CachedPage, LogEntry};
use crate::testkit::replay::replay_each;
use crate::testkit::{Family, SmallConfig, Workload};

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
    fn follow(&mut self, LogEntry { added, present, pages }: LogEntry) {
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
    for seed in 0..5000 {
        let mut workload = Workload::new(Family::Any, seed);
        // The pool is so small that most pages are evicted.
        let small = SmallConfig { pages: 12, page_size: 1, tokens: 1 << 12, ..SmallConfig::default() };
        let config = SmallConfig { hashing: workload.config().hashing, ..small };
        let (mut follower, mut generation) = (None::<Follower>, 0);
        let replayed = replay_each(&config, Null, &workload.take_ops(200), |engine| {
            let tree = &mut engine.world.prefixes;
            let Some(follower) = &mut follower else {
                follower = Some(Follower::default());
                return tree.keep_log();
            };
            let present = tree.match_prefix(Namespace::default(), &[]).scope().generation;
            if std::mem::replace(&mut generation, present) != present {
                follower.present.clear();
            }
            tree.take_log().into_iter().for_each(|entry| follower.follow(entry));
            let mut held = tree.held();
            assert_eq!(follower.all, held, "seed {seed}");
            held.retain(|_, cached| cached.scope.generation == present);
            assert_eq!(follower.present, held, "seed {seed}");
        });
        replayed.expect("engine and model agree");
        let gone = follower.map_or([0; 2], |follower| follower.detached);
        (0..2).for_each(|i| detached[i] += gone[i]);
    }
    assert!(detached.iter().all(|&pages| pages > 1000), "old and present pages: {detached:?}");
}
