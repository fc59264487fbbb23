//! The index of fronts: finds the running sequences that compute a given page.
//!
//! The front of a sequence is its first unpublished page, if all tokens of the page and one more are known. The
//! sequence will publish this page, and another sequence may need it. The key of a front is its tokens, and the page of
//! the tree before it, or the scope at the start of a prefix.
//!
//! ```text
//! heads    by hash      row 3          -         row 0                the sequence that was added first
//! entries  by row       3 <-> 5 <-> 1            0                    rings, oldest first
//! ```
//!
//! * S8. Every sequence of the index runs and has a front, and is found once, by the hash of its front.
//!
//! A sequence is added when it begins to run, when its pages are loaded, or when it receives several tokens at once.
//! Its front moves as it publishes pages. Pages that are decoded token by token are not added, so decoding pays
//! nothing.
//!
//! Fronts with equal hashes are in one ring, so the caller confirms every candidate. `row.rs` computes fronts;
//! `system/leader.rs` compares tokens.

use std::hash::{BuildHasher, Hasher};

use ahash::RandomState;
use bytemuck::{Pod, Zeroable};

use crate::id::{PageId, RowId, Scope, SeqKey, TokenId};
use crate::memory::{Memory, OutOfMemory};

use super::SequenceTable;

/// The front of one sequence; all zero for none.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Entry {
    hash: u32,
    /// Neighbours in the ring, as rows.
    next: u32,
    before: u32,
    is_held: u32,
}

/// Index of fronts.
pub(super) struct InflightIndex {
    /// The first row of each ring plus 1; 0 for an empty ring. The length is a power of two.
    heads: Vec<u32>,
    entries: Vec<Entry>,
    keys: Vec<SeqKey>,
    count: u32,
    hasher: RandomState,
    hash_mask: u32,
}

impl InflightIndex {
    /// Creates an index of at most `rows` sequences. Tests use a `hash_bits` below 32 to force collisions.
    pub fn new(rows: u32, hash_bits: u32, memory: &mut Memory) -> Result<Self, OutOfMemory> {
        let is_test = hash_bits < u32::BITS;
        Ok(Self {
            heads: memory.zeroed(u64::from(rows).next_power_of_two())?,
            entries: memory.zeroed(rows.into())?,
            keys: memory.filled(rows.into(), SeqKey::default())?,
            count: 0,
            hasher: if is_test { RandomState::with_seeds(5, 6, 7, 8) } else { RandomState::new() },
            hash_mask: if is_test { (1 << hash_bits) - 1 } else { u32::MAX },
        })
    }

    /// Returns the hash of a page with these tokens after page `before`, or at the start of a scope.
    pub fn hash(&self, before: Option<PageId>, scope: Scope, tokens: &[TokenId]) -> u32 {
        let mut hasher = self.hasher.build_hasher();
        match before {
            Some(page) => hasher.write_u32(page.raw()),
            None => {
                hasher.write_u64(scope.namespace.raw());
                hasher.write_u64(scope.generation);
            }
        }
        hasher.write(bytemuck::cast_slice(tokens));
        hasher.finish() as u32 & self.hash_mask
    }

    fn head(&self, hash: u32) -> usize {
        hash as usize & (self.heads.len() - 1)
    }

    /// Returns whether the index is empty.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns whether the index contains a row's sequence.
    pub fn holds(&self, row: RowId) -> bool {
        self.entries[row.index()].is_held != 0
    }

    /// Adds the front of a sequence. O(1).
    pub fn enter(&mut self, row: RowId, seq: SeqKey, hash: u32) {
        assert!(!self.holds(row), "S8: a sequence has one front");
        let (head, own) = (self.head(hash), row.raw());
        let first = self.heads[head].checked_sub(1).unwrap_or(own);
        let mut entry = Entry { hash, next: first, before: own, is_held: 1 };
        if first == own {
            self.heads[head] = own + 1;
        } else {
            entry.before = self.entries[first as usize].before;
            self.entries[entry.before as usize].next = own;
            self.entries[first as usize].before = own;
        }
        self.entries[row.index()] = entry;
        self.keys[row.index()] = seq;
        self.count += 1;
    }

    /// Removes the front of a row's sequence and returns the sequence. O(1).
    pub fn leave(&mut self, row: RowId) -> SeqKey {
        assert!(self.holds(row), "S8: a sequence that leaves has a front");
        let Entry { hash, next, before, .. } = self.entries[row.index()];
        let (head, own) = (self.head(hash), row.raw());
        if self.heads[head] == own + 1 {
            self.heads[head] = if next == own { 0 } else { next + 1 };
        }
        self.entries[before as usize].next = next;
        self.entries[next as usize].before = before;
        self.entries[row.index()] = Entry::zeroed();
        self.count -= 1;
        self.keys[row.index()]
    }

    /// Returns the sequences with a front of this hash, oldest first.
    pub fn candidates(&self, hash: u32) -> impl Iterator<Item = SeqKey> + '_ {
        let head = self.heads[self.head(hash)];
        let mut at = head.checked_sub(1);
        std::iter::from_fn(move || {
            let row = at?;
            let next = self.entries[row as usize].next;
            at = (next + 1 != head).then_some(next);
            Some(row)
        })
        .filter(move |&row| self.entries[row as usize].hash == hash)
        .map(|row| self.keys[row as usize])
    }

    /// Returns whether S8 holds; `fronts` contains the hash of each running sequence's front.
    pub fn check(&self, fronts: impl Iterator<Item = (RowId, SeqKey, u32)>) -> bool {
        let held = fronts.filter(|&(row, ..)| self.holds(row));
        let found =
            held.map(|(_, seq, hash)| u32::from(self.candidates(hash).filter(|&held| held == seq).count() == 1));
        found.sum::<u32>() == self.count
    }
}

impl SequenceTable {
    /// Returns whether no sequence has a front.
    pub(crate) fn has_no_fronts(&self) -> bool {
        self.stores.inflight.is_empty()
    }

    /// Returns the sequences whose front is page `at` with these tokens, after the page `before` or at the start of a
    /// scope, oldest first. O(page) for each, unless hashes collide.
    pub(crate) fn with_front(
        &self,
        scope: Scope,
        before: Option<PageId>,
        at: u32,
        tokens: &[TokenId],
    ) -> impl Iterator<Item = SeqKey> {
        let hash = self.stores.inflight.hash(before, scope, tokens);
        self.stores.inflight.candidates(hash).filter(move |&seq| {
            let sequence = &self.rows[seq];
            let begins = match before {
                Some(page) => at == sequence.published && self.page(sequence, at - 1) == page,
                None => at == sequence.published && sequence.scope() == Some(scope),
            };
            begins && self.stores.tokens.pages(sequence.row, at, 1) == tokens
        })
    }
}
