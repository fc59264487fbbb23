//! The order of eviction: doubly linked lists of the idle nodes, oldest first. The tree's column of `Usage` stores
//! the links. All nodes of a list are evicted before those of the next list. The tree uses one list.
//!
//! A new node goes to the young end of a list. A split creates a node for the prefix and inserts it directly after the
//! split node. So the order of both relative to all other nodes stays the same.
//!
//! Not here: when a node becomes idle, and which list it enters (`lock.rs`). `lock.rs` puts parents after their
//! children (T4), so the first node is always a leaf.

use slotmap::SecondaryMap;

use crate::id::NodeKey;

use super::Usage;

/// The links of a node in an order.
#[derive(Clone, Copy, Default)]
pub(super) struct Neighbours {
    older: Option<NodeKey>,
    younger: Option<NodeKey>,
}

type Column = SecondaryMap<NodeKey, Usage>;

/// The ends of each list.
pub(super) struct Order<const LISTS: usize> {
    lists: [Ends; LISTS],
}

#[derive(Clone, Copy)]
struct Ends {
    oldest: Option<NodeKey>,
    youngest: Option<NodeKey>,
}

impl<const LISTS: usize> Order<LISTS> {
    pub fn new() -> Self {
        Self { lists: [Ends { oldest: None, youngest: None }; LISTS] }
    }

    /// Returns the node to evict next.
    pub fn next(&self) -> Option<NodeKey> {
        self.first_of(0)
    }

    /// Returns the node to evict after another.
    pub fn after(&self, column: &Column, node: NodeKey) -> Option<NodeKey> {
        let younger = column[node].neighbours.younger;
        younger.or_else(|| self.first_of(self.list_where(|list| list.youngest == Some(node)) + 1))
    }

    /// Returns the node of the same list to evict before another.
    pub fn before(&self, column: &Column, node: NodeKey) -> Option<NodeKey> {
        column[node].neighbours.older
    }

    /// Returns all nodes, in the order of eviction.
    pub fn iter<'a>(&'a self, column: &'a Column) -> impl Iterator<Item = NodeKey> + 'a {
        std::iter::successors(self.next(), |&node| self.after(column, node))
    }

    /// Appends a node to the young end of a list.
    pub fn enter(&mut self, column: &mut Column, list: usize, node: NodeKey) {
        let older = self.lists[list].youngest;
        column[node].neighbours = Neighbours { older, younger: None };
        self.lists[list].youngest = Some(node);
        match older {
            Some(older) => column[older].neighbours.younger = Some(node),
            None => self.lists[list].oldest = Some(node),
        }
    }

    /// Inserts `prefix`, which was split off `node`, into the list directly after `node`.
    pub fn split(&mut self, column: &mut Column, node: NodeKey, prefix: NodeKey) {
        let younger = column[node].neighbours.younger.replace(prefix);
        column[prefix].neighbours = Neighbours { older: Some(node), younger };
        match younger {
            Some(younger) => column[younger].neighbours.older = Some(prefix),
            None => {
                let list = self.list_where(|list| list.youngest == Some(node));
                self.lists[list].youngest = Some(prefix);
            }
        }
    }

    /// Removes a node from its list.
    pub fn leave(&mut self, column: &mut Column, node: NodeKey) {
        let Neighbours { older, younger } = column[node].neighbours;
        match older {
            Some(older) => column[older].neighbours.younger = younger,
            None => {
                let list = self.list_where(|list| list.oldest == Some(node));
                self.lists[list].oldest = younger;
            }
        }
        match younger {
            Some(younger) => column[younger].neighbours.older = older,
            None => {
                let list = self.list_where(|list| list.youngest == Some(node));
                self.lists[list].youngest = older;
            }
        }
    }

    /// Returns the first node of this list; if the list is empty, the first node of the next list with nodes.
    fn first_of(&self, list: usize) -> Option<NodeKey> {
        self.lists[list..].iter().find_map(|list| list.oldest)
    }

    /// Returns the list for which `is` holds. It holds for one of the lists, so the last list need not be checked.
    fn list_where(&self, is: impl Fn(&Ends) -> bool) -> usize {
        (0..LISTS - 1).find(|&list| is(&self.lists[list])).unwrap_or(LISTS - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::{Column, Order};
    use crate::id::NodeKey;
    use crate::prefix::Usage;
    use slotmap::SlotMap;

    impl Order<1> {
        /// Makes `younger` the younger neighbour of `older`, without the link back; for tests of the audit.
        pub(in crate::prefix) fn bend(column: &mut Column, older: NodeKey, younger: NodeKey) {
            column[older].neighbours.younger = Some(younger);
        }
    }

    /// Two lists, each compared with a vector.
    struct Both {
        order: Order<2>,
        column: Column,
        naive: [Vec<NodeKey>; 2],
    }

    impl Both {
        fn agree(&self) {
            let want: Vec<NodeKey> = self.naive.iter().flatten().copied().collect();
            assert_eq!(self.order.next(), want.first().copied());
            assert!(self.order.iter(&self.column).eq(want.iter().copied()));
            // `iter` reads only the links to younger nodes, so check the links to older ones.
            for pair in self.naive.iter().flat_map(|list| list.windows(2)) {
                assert_eq!(self.column[pair[1]].neighbours.older, Some(pair[0]));
            }
        }

        fn index(&self, node: NodeKey) -> Option<(usize, usize)> {
            let index =
                |list: usize| Some((list, self.naive[list].iter().position(|&n| n == node)?));
            index(0).or_else(|| index(1))
        }

        /// Makes the change that a random number selects.
        fn turn(&mut self, node: NodeKey, other: NodeKey, number: usize) {
            match (self.index(node), self.index(other)) {
                (None, _) => {
                    self.order.enter(&mut self.column, number % 2, node);
                    self.naive[number % 2].push(node);
                }
                (Some((list, at)), None) if number.is_multiple_of(2) => {
                    self.order.split(&mut self.column, node, other);
                    self.naive[list].insert(at + 1, other);
                }
                (Some((list, at)), _) => {
                    self.order.leave(&mut self.column, node);
                    self.naive[list].remove(at);
                }
            }
        }
    }

    #[test]
    fn two_lists_are_one_order() {
        let mut keys = SlotMap::<NodeKey, ()>::with_key();
        let nodes: Vec<NodeKey> = (0..6).map(|_| keys.insert(())).collect();
        let column = nodes.iter().map(|&node| (node, Usage::new(0))).collect();
        let mut both = Both { order: Order::new(), column, naive: [Vec::new(), Vec::new()] };
        let mut number: usize = 1;
        let (mut emptied, mut filled) = ([0; 2], [0; 2]);
        for _ in 0..20_000 {
            // A linear congruential generator; its high bits are the good ones.
            number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let [node, other] = [number >> 40, number >> 50].map(|at| nodes[at % nodes.len()]);
            both.turn(node, other, number >> 35);
            both.agree();
            for list in 0..2 {
                emptied[list] += usize::from(both.naive[list].is_empty());
                filled[list] += usize::from(both.naive[list].len() > 3);
            }
        }
        assert!(emptied.iter().chain(&filled).all(|&count| count > 100), "{emptied:?} {filled:?}");
    }
}
