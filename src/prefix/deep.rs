//! A very deep chain of nodes: costs that grow with the number of nodes must not also grow with their depth.

use std::collections::HashMap;

use super::PrefixTree;
use crate::fence::Fence;
use crate::id::{Namespace, PageId, TokenId};

/// Returns a chain of idle nodes, a page each.
fn chain(depth: u32) -> PrefixTree {
    let mut fence = Fence::new(0, 1, 0).expect("memory");
    let mut tree = PrefixTree::new(depth, 1, 32, false).expect("memory");
    let found = tree.match_prefix(Namespace::default(), &[]);
    let mut lock = tree.lock(&found, &mut fence).expect("the match is fresh");
    let (mut others, mut freed) = (Vec::new(), Vec::new());
    for i in 0..depth {
        // The second user prevents the leaf from growing, so that each page becomes a node.
        others.push(tree.lock_again(&lock, &mut fence));
        let inserted = tree.insert(&mut lock, &[TokenId::new(i)], &mut [PageId::new(i)], &mut freed, &mut fence);
        assert_eq!(inserted.duplicates, 0);
    }
    for other in others.into_iter().chain([lock]) {
        tree.unlock(other, &mut fence, &mut freed);
    }
    assert!(freed.is_empty());
    assert_eq!(tree.node_count(), depth as usize);
    tree
}

#[test]
fn the_audit_does_not_grow_with_depth() {
    // A walk to the root from each node would take 10^11 steps: hours.
    let tree = chain(500_000);
    tree.check(&HashMap::new(), &HashMap::new(), &Fence::new(0, 1, 0).expect("memory")).expect("all invariants hold");
}
