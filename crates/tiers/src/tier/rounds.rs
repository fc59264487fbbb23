//! The rounds in which a store is asked for the records of a prompt.

use std::collections::{HashMap, HashSet};

use kvarena::moves::Lookup;

/// Group and place of a record.
type At = (u32, u32);

/// The records that a store is still to be asked for. Most stores are asked for all at once. A store that makes a
/// request for each name is asked for group 0, then for the cells of the longest prefix, then for those of shorter
/// ones, until a prefix has all of its cells. Each round of cells is twice as long as the one before, so that few
/// rounds are enough if most cells are absent.
pub(super) struct Rounds {
    /// Records that are asked for at once.
    first: Vec<At>,
    /// Cells that have not been asked for, the deepest place last.
    cells: Vec<At>,
    /// Number of cells of the last round.
    asked: usize,
}

impl Rounds {
    /// `missing` has group 0 first.
    pub fn new(mut missing: Vec<At>, is_one_by_one: bool) -> Self {
        let pages = if is_one_by_one { missing.partition_point(|at| at.0 == 0) } else { missing.len() };
        let mut cells = missing.split_off(pages);
        cells.sort_by_key(|&(_, place)| place);
        Self { first: missing, cells, asked: 0 }
    }

    /// Returns the records of the next round, with the deepest cells first. Empty at the end.
    pub fn next(&mut self, lookup: &Lookup, located: &HashMap<At, usize>) -> Vec<At> {
        if !self.first.is_empty() || self.cells.is_empty() {
            return std::mem::take(&mut self.first);
        }
        // The longest prefix if the store had all cells that it was not asked for.
        let unknown: HashSet<_> = self.cells.iter().copied().collect();
        let mut tail = HashSet::new();
        lookup.target(|group, place| {
            let at = (group, place);
            let has = unknown.contains(&at) || located.contains_key(&at);
            if !has {
                // The prefix ends here, and needs no cells behind it.
                tail.retain(|&(_, other)| other < place);
            } else if unknown.contains(&at) {
                tail.insert(at);
            }
            has
        });
        let Some(top) = tail.iter().map(|at| at.1).max() else { return Vec::new() };
        let mut more = (2 * self.asked).saturating_sub(tail.len());
        let mut round = Vec::new();
        for at in std::mem::take(&mut self.cells).into_iter().rev().filter(|at| at.1 <= top) {
            let is_needed = tail.contains(&at);
            if is_needed || more > 0 {
                more -= usize::from(!is_needed);
                round.push(at);
            } else {
                self.cells.push(at);
            }
        }
        self.cells.reverse();
        self.asked = round.len();
        round
    }
}
