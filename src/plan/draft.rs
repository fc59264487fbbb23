//! Drafts of speculative decoding: new tokens that one step verifies. Then the host accepts one branch of them.
//!
//! ```text
//!   slots     .. 5 6 7 | 8 9 10 11 12     new tokens 0 to 4: a root (the last sampled token) and drafts
//!   parents              -  0  0  1  2        0 - 1 - 3
//!   positions            8  9  9 10 10          \ 2 - 4
//!   mask of token 4, from the last slot back: 1 0 1 0 1 | 1 1 1 1 ..
//! ```
//!
//! Bit `i` of a mask represents slot `last - i` of the row. A token sees all slots before the row's last 64. A token's
//! mask has the token's own bit and no bit of a later slot.
//!
//! `system/accept.rs` accepts a branch.

use bytemuck::{Pod, Zeroable};

use super::BatchPlan;
use crate::error::Error;
use crate::id::{RowId, SeqKey};

/// Maximum number of new tokens of a draft: the bits of a mask.
pub const DRAFT_MAX: u32 = u64::BITS;

/// Marks an item's new tokens as drafts, of which [`accept`](crate::Engine::accept) keeps one branch.
///
/// The sequence already contains these tokens, at most [`DRAFT_MAX`]. Each token comes after its parent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Draft<'a> {
    /// The item's sequence.
    pub seq: SeqKey,
    /// Mask of each new token over the row's last 64 slots: bit `i` is slot `last - i`. Empty for a chain, in which
    /// each token sees all tokens before it.
    pub masks: &'a [u64],
    /// Position of each new token. In a tree, the position of a child is its parent's plus 1. Empty for a chain.
    pub positions: &'a [u32],
}

impl Draft<'_> {
    /// Creates a draft in which each token follows the one before it.
    pub const fn chain(seq: SeqKey) -> Self {
        Self { seq, masks: &[], positions: &[] }
    }
}

/// Masks and positions of a tree of drafts, computed from parents, in reusable memory.
///
/// ```
/// use kvarena::Error;
/// use kvarena::plan::DraftTree;
/// let mut tree = DraftTree::new();
/// tree.set(8, &[0, 0, 0, 1, 2])?; // 8 tokens precede it
/// assert_eq!(tree.positions(), [8, 9, 9, 10, 10]);
/// assert_eq!(tree.masks()[4], 0b1111_1111_10101);
/// assert_eq!(tree.set(8, &[0, 2, 0]), Err(Error::DraftParent { token: 1, parent: 2 }));
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct DraftTree {
    masks: Vec<u64>,
    positions: Vec<u32>,
}

impl DraftTree {
    /// Creates a tree without tokens.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the tree: token `i` follows the earlier token `parents[i]`. It is a root if `parents[i]` is `i`. O(tokens).
    ///
    /// `start` is the number of tokens before the tree: the sequence's [`planned_len`](crate::Engine::planned_len).
    ///
    /// # Errors
    /// [`Error::DraftLen`], [`Error::DraftParent`], [`Error::TooLong`] if `start` and the tokens exceed `u32::MAX`. The
    /// tree is unchanged.
    pub fn set(&mut self, start: u32, parents: &[u32]) -> Result<(), Error> {
        check_len(parents.len() as u64)?;
        let (len, max) = (u64::from(start) + parents.len() as u64, u64::from(u32::MAX));
        if len > max {
            return Err(Error::TooLong { len, max });
        }
        let misplaced = (0..).zip(parents).find(|&(token, &parent)| parent > token);
        if let Some((token, &parent)) = misplaced {
            return Err(Error::DraftParent { token, parent });
        }
        self.masks.clear();
        self.positions.clear();
        let row = MaskRow::new(len as u32, parents.len() as u32);
        for (token, &parent) in (0..).zip(parents) {
            let (seen, position) = if parent == token {
                (row.before(), start)
            } else {
                (self.masks[parent as usize], self.positions[parent as usize] + 1)
            };
            self.masks.push(seen | row.own(token));
            self.positions.push(position);
        }
        Ok(())
    }

    /// Returns the tree as the draft of a sequence.
    ///
    /// Plans reject a tree without tokens ([`Error::DraftArrays`]).
    pub fn draft(&self, seq: SeqKey) -> Draft<'_> {
        // Empty masks and positions would describe a chain.
        let positions = if self.positions.is_empty() { &[0] } else { &self.positions[..] };
        Draft { seq, masks: &self.masks, positions }
    }

    /// Returns the masks of the tokens ([`Draft::masks`]).
    pub fn masks(&self) -> &[u64] {
        &self.masks
    }

    /// Returns the positions of the tokens.
    pub fn positions(&self) -> &[u32] {
        &self.positions
    }
}

/// The branch of a sequence's drafts to accept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Branch<'a> {
    /// The sequence whose drafts wait.
    pub seq: SeqKey,
    /// Ascending indices of the branch's tokens within the item: a root, a token that follows it, and so on. If empty,
    /// all drafts are dropped.
    pub tokens: &'a [u32],
}

/// The slots of one row that an accepted branch keeps, 16 bytes. A backend makes them contiguous, as if it read all of
/// them before it wrote one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct Compaction {
    /// The row in the page tables.
    pub row: RowId,
    /// Place in the row that receives the first kept slot; the others follow it.
    pub first: u32,
    /// Bit `i` is set if the branch keeps place `first + i`.
    pub keep: u64,
}

impl Compaction {
    /// Returns the source and target of each place that moves, in ascending order. In this order, no move reads a place
    /// that an earlier move wrote. Places beyond `u32::MAX` are omitted.
    pub fn moves(self) -> impl Iterator<Item = (u32, u32)> {
        let mut rest = self.keep;
        let next = move || {
            let bit = rest.trailing_zeros();
            let some = rest != 0;
            rest &= rest.wrapping_sub(1);
            some.then_some(bit)
        };
        let kept = std::iter::from_fn(next).zip(0..);
        kept.filter(|(from, to)| from != to)
            .filter_map(move |(from, to)| Some((self.first.checked_add(from)?, self.first.checked_add(to)?)))
    }

    /// Returns the place after the last kept one.
    pub(crate) fn end(self) -> u64 {
        u64::from(self.first) + u64::from(u64::BITS - self.keep.leading_zeros())
    }
}

pub(crate) fn check_len(len: u64) -> Result<(), Error> {
    let max = u64::from(DRAFT_MAX);
    if len > max { Err(Error::DraftLen { len, max }) } else { Ok(()) }
}

/// Bits of the masks of a row of `kv_len` slots. The last `extend_len` slots, at most 64, belong to new tokens.
#[derive(Clone, Copy)]
pub(crate) struct MaskRow {
    kv_len: u32,
    extend_len: u32,
}

impl MaskRow {
    pub fn new(kv_len: u32, extend_len: u32) -> Self {
        Self { kv_len, extend_len }
    }

    /// Returns the bit of a new token's own slot.
    pub fn own(self, token: u32) -> u64 {
        1 << (self.extend_len - 1 - token)
    }

    /// Returns the bits of the row's last 64 slots, fewer if the row is shorter.
    fn slots(self) -> u64 {
        u64::MAX.checked_shr(64_u32.saturating_sub(self.kv_len)).unwrap_or(0)
    }

    /// Returns the bits of the slots before the new tokens.
    pub fn before(self) -> u64 {
        self.slots() & u64::MAX.checked_shl(self.extend_len).unwrap_or(0)
    }

    /// Returns all bits that a new token may have: the slots up to its own.
    pub fn most(self, token: u32) -> u64 {
        self.slots() & !(self.own(token) - 1)
    }

    /// Returns whether a new token's mask has its own bit, and only allowed bits.
    pub fn allows(self, token: u32, mask: u64) -> bool {
        mask & self.own(token) != 0 && mask & !self.most(token) == 0
    }
}

/// Checks the masks of a plan. The caller has checked the plan's rows.
///
/// # Errors
/// The first token with a wrong mask; the number of tokens if the number of masks is wrong.
pub(crate) fn check_masks(plan: &BatchPlan<'_>) -> Result<(), usize> {
    if plan.masks.is_empty() {
        return Ok(());
    }
    if plan.masks.len() != plan.token_count() {
        return Err(plan.token_count());
    }
    for row in plan.rows {
        let start = row.qo_start as usize;
        let masks = &plan.masks[start..start + row.extend_len as usize];
        let Some(first) = masks.iter().position(|&mask| mask != 0) else { continue };
        if row.extend_len > DRAFT_MAX {
            return Err(start + first);
        }
        let bits = MaskRow::new(row.kv_len, row.extend_len);
        let off = (0..).zip(masks).find(|&(token, &mask)| !bits.allows(token, mask));
        if let Some((token, _)) = off {
            return Err(start + token as usize);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_is_made_from_its_parents() {
        let mut tree = DraftTree::new();
        tree.set(2, &[0, 0, 0, 1, 3]).expect("parents precede children");
        assert_eq!(tree.masks(), [0b11_10000, 0b11_11000, 0b11_10100, 0b11_11010, 0b11_11011]);
        assert_eq!(tree.positions(), [2, 3, 3, 4, 5]);
        // Two roots without earlier tokens.
        tree.set(0, &[0, 1, 1]).expect("parents precede children");
        assert_eq!((tree.masks(), tree.positions()), (&[4, 2, 3][..], &[0, 0, 1][..]));
        // The maximum number of tokens: first only roots, then one chain.
        let own: Vec<u32> = (0..64).collect();
        tree.set(1000, &own).expect("64 tokens");
        assert_eq!((tree.masks()[0], tree.masks()[63]), (1 << 63, 1));
        let chain: Vec<u32> = (0..64_u32).map(|i| i.saturating_sub(1)).collect();
        tree.set(1000, &chain).expect("64 tokens");
        assert_eq!((tree.masks()[0], tree.masks()[63]), (1 << 63, u64::MAX));
        assert_eq!(tree.positions()[63], 1063);
        let long = tree.set(0, &[0; 65]);
        assert_eq!(long, Err(Error::DraftLen { len: 65, max: 64 }));
        assert_eq!(tree.masks().len(), 64, "an error leaves it as it was");
        let max = u64::from(u32::MAX);
        for (start, len) in [(u32::MAX, 1_u32), (u32::MAX, 2), (u32::MAX - 63, 64)] {
            let refused = Error::TooLong { len: u64::from(start) + u64::from(len), max };
            assert_eq!(tree.set(start, &chain[..len as usize]), Err(refused));
            assert_eq!(tree.positions()[63], 1063, "an error leaves it as it was");
        }
        tree.set(u32::MAX - 64, &chain).expect("the text ends at u32::MAX");
        assert_eq!((tree.positions()[0], tree.positions()[63]), (u32::MAX - 64, u32::MAX - 1));
        assert_eq!((tree.masks()[0], tree.masks()[63]), (1 << 63, u64::MAX));
        tree.set(u32::MAX, &[]).expect("no token is past the end");
    }

    #[test]
    fn kept_slots_move_together() {
        let moves = |keep| Compaction { row: RowId::new(0), first: 7, keep }.moves().collect();
        let (none, some): (Vec<_>, Vec<_>) = (moves(0b111), moves(0b1011_0101));
        assert_eq!((none, some), (vec![], vec![(9, 8), (11, 9), (12, 10), (14, 11)]));
        let all: Vec<_> = moves(u64::MAX);
        assert!(all.is_empty());
        assert_eq!(moves(1 << 63), [(70, 7)]);
        for first in [u32::MAX, u32::MAX - 1, u32::MAX - 62] {
            let far = |keep| Compaction { row: RowId::new(0), first, keep };
            assert!(far(1 << 63).moves().next().is_none(), "there is no such place");
            assert_eq!(far(1 << 63).end(), u64::from(first) + 64);
            assert!(far(u64::MAX).moves().next().is_none());
        }
        let last = Compaction { row: RowId::new(0), first: u32::MAX - 2, keep: 0b1110 };
        let last: Vec<_> = last.moves().collect();
        assert_eq!(last, [(u32::MAX - 1, u32::MAX - 2), (u32::MAX, u32::MAX - 1)]);
        assert_eq!(Compaction { first: 7, keep: 0b101, ..Compaction::default() }.end(), 10);
    }

    #[test]
    fn masks_have_bits_of_slots_up_to_their_own() {
        let row = MaskRow::new(5, 3);
        assert_eq!([0, 1, 2].map(|token| row.own(token)), [4, 2, 1]);
        assert_eq!([0, 1, 2].map(|token| row.most(token)), [0b11100, 0b11110, 0b11111]);
        assert_eq!(row.before(), 0b11000);
        assert!(row.allows(1, 0b10) && row.allows(1, 0b11110));
        assert!(!row.allows(1, 0b11100), "the own bit is missing");
        assert!(!row.allows(1, 0b11), "the mask has a later slot");
        assert!(!row.allows(1, 0b100010), "there is no such slot");
        let long = MaskRow::new(100, 64);
        assert_eq!((long.before(), long.most(0), long.most(63)), (0, 1 << 63, u64::MAX));
        assert_eq!(MaskRow::new(0, 3).most(0), 0, "padding sees nothing");
    }
}
