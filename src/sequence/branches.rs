//! The parent of each draft of a row, while the drafts wait for `accept`.

use crate::id::RowId;
use crate::memory::{Memory, OutOfMemory};
use crate::plan::{DRAFT_MAX, Draft, MaskRow};

/// Parent of a root.
const ROOT: u8 = DRAFT_MAX as u8;
/// Parent of a token that cannot be accepted.
const NONE: u8 = u8::MAX;

/// Parents of the drafts of each row. A draft is identified by its index.
pub(super) struct Branches {
    parents: Vec<[u8; DRAFT_MAX as usize]>,
}

impl Branches {
    pub fn new(rows: u32, memory: &mut Memory) -> Result<Self, OutOfMemory> {
        Ok(Self { parents: memory.filled(rows.into(), [NONE; DRAFT_MAX as usize])? })
    }

    /// Stores the parents of a valid draft of `len` tokens after `start` tokens. O(`len`).
    pub fn set(&mut self, row: RowId, draft: &Draft<'_>, start: u32, len: u32) {
        let parents = &mut self.parents[row.index()];
        parents.fill(NONE);
        for token in 0..len {
            parents[token as usize] = match draft.masks {
                [] => token.checked_sub(1).map_or(ROOT, |before| before as u8),
                _ => parent(draft, start, len, token, parents),
            };
        }
    }

    /// Returns whether `len` drafts form one chain from a root. O(`len`).
    pub fn is_chain(&self, row: RowId, len: u32) -> bool {
        let befores = [ROOT].into_iter().chain(0..);
        befores.zip(&self.parents[row.index()]).take(len as usize).all(|(before, &parent)| before == parent)
    }

    /// Returns whether exactly one of `len` drafts is a root. O(`len`).
    pub fn has_one_root(&self, row: RowId, len: u32) -> bool {
        let parents = &self.parents[row.index()][..len as usize];
        parents.iter().filter(|&&parent| parent == ROOT).count() == 1
    }

    /// Returns the index of the first of `tokens` that does not follow its predecessor, if any.
    pub fn first_invalid(&self, row: RowId, tokens: &[u32]) -> Option<usize> {
        let parents = &self.parents[row.index()];
        let mut before = ROOT;
        tokens.iter().position(|&token| {
            let follows = parents.get(token as usize).is_some_and(|&parent| parent == before);
            before = token as u8;
            !follows
        })
    }
}

/// Returns the parent of a token, given the parents of all earlier tokens.
fn parent(draft: &Draft<'_>, start: u32, len: u32, token: u32, parents: &[u8]) -> u8 {
    let row = MaskRow::new(start + len, len);
    let (mask, position) = (draft.masks[token as usize], draft.positions[token as usize]);
    let others = mask ^ row.own(token);
    if others == row.before() {
        return if position == start { ROOT } else { NONE };
    }
    let before = (len - 1).checked_sub(others.trailing_zeros());
    match before.map(|before| before as usize) {
        Some(before)
            if draft.masks[before] == others && draft.positions[before] + 1 == position && parents[before] != NONE =>
        {
            before as u8
        }
        _ => NONE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::SeqKey;
    use crate::plan::DraftTree;

    fn branches(draft: &Draft<'_>, start: u32, len: u32) -> impl Fn(&[u32]) -> Option<usize> + use<> {
        let mut branches = Branches::new(3, &mut Memory::new(false)).expect("small");
        branches.set(RowId::new(1), draft, start, len);
        move |tokens| branches.first_invalid(RowId::new(1), tokens)
    }

    #[test]
    fn branches_of_a_tree_begin_at_a_root() {
        for start in [0, 5, 1000] {
            let mut tree = DraftTree::new();
            tree.set(start, &[0, 0, 0, 1, 2, 3, 6]).expect("parents precede children");
            let off = branches(&tree.draft(SeqKey::default()), start, 7);
            for branch in [&[][..], &[0], &[0, 1, 3, 5], &[0, 2, 4], &[6]] {
                assert_eq!(off(branch), None, "{branch:?}");
            }
            assert_eq!(off(&[1]), Some(0));
            assert_eq!(off(&[0, 0]), Some(1));
            assert_eq!(off(&[0, 1, 4]), Some(2));
            assert_eq!(off(&[0, 6]), Some(1));
            assert_eq!(off(&[0, 7]), Some(1), "the token does not exist");
            assert_eq!(off(&[u32::MAX]), Some(0));
            assert_eq!(off(&[256]), Some(0));
        }
    }

    #[test]
    fn a_chain_is_a_tree_whose_masks_are_causal() {
        for len in [1, 5, 64] {
            let parents: Vec<u32> = (0..len).map(|i: u32| i.saturating_sub(1)).collect();
            let mut tree = DraftTree::new();
            tree.set(7, &parents).expect("parents precede children");
            let chain = Draft::chain(SeqKey::default());
            for draft in [tree.draft(SeqKey::default()), chain] {
                let off = branches(&draft, 7, len);
                let all: Vec<u32> = (0..len).collect();
                assert_eq!(off(&all), None);
                let mut branches = Branches::new(1, &mut Memory::new(false)).expect("small");
                branches.set(RowId::new(0), &draft, 7, len);
                assert!(branches.is_chain(RowId::new(0), len));
                assert_eq!(off(&[&all[..], &[len]].concat()), Some(len as usize));
            }
        }
    }

    #[test]
    fn a_token_is_accepted_only_if_its_mask_is_exactly_its_branch() {
        // Three known tokens precede three drafts: a root, its child, which does not see slot 1, and a grandchild.
        let masks = [0b111_100, 0b101_110, 0b101_111];
        let off = |positions: [u32; 3]| {
            let draft = Draft { seq: SeqKey::default(), masks: &masks, positions: &positions };
            branches(&draft, 3, 3)
        };
        assert_eq!(off([3, 4, 5])(&[0]), None);
        assert_eq!(off([3, 4, 5])(&[0, 1]), Some(1));
        assert_eq!(off([3, 4, 5])(&[1, 2]), Some(0));
        assert_eq!(off([3, 4, 5])(&[0, 1, 2]), Some(1));
        // A second root; it is a root only at the first position.
        let roots = [0b11110, 0b11101];
        for (position, want) in [(3, None), (4, Some(0))] {
            let draft = Draft { seq: SeqKey::default(), masks: &roots, positions: &[3, position] };
            assert_eq!(branches(&draft, 3, 2)(&[1]), want);
        }
        // The position of the second token differs from its depth.
        let masks = [0b111_100, 0b111_110, 0b111_111];
        let draft = Draft { seq: SeqKey::default(), masks: &masks, positions: &[3, 3, 5] };
        assert_eq!(branches(&draft, 3, 3)(&[0, 1]), Some(1));
        assert_eq!(branches(&draft, 3, 3)(&[0, 1, 2]), Some(1));
    }
}
