//! The shape of the page tables: directory words, which name leaves, and the page words in leaves.

use super::groups::Reach;
use super::pool::PoolLayout;
use crate::error::ConfigError;
use crate::id::{PageId, RowId};

/// Number of tokens of a leaf, if the page size divides it.
const LEAF_TOKENS: u32 = 1024;

/// Shape of the page tables: one flat array of 32-bit words, the same on the host and on every backend.
///
/// A lookup of a page takes two steps, so rows of any length need no contiguous memory and never move:
///
/// ```text
/// words = [ directory: rows x leaves_per_row | leaves: leaf_count x tracks x leaf_pages
///           | states: rows x 2 x state_pages ]
/// block = words[row * leaves_per_row + page_index / leaf_pages]
/// page  = words[rows * leaves_per_row + (block + track) * leaf_pages + page_index % leaf_pages]
/// ```
///
/// A leaf has one block of `leaf_pages` words for each track. The directory contains the number of a leaf's first
/// block, a multiple of `tracks`. If layers keep a state, a row has the pages of the state that its items read, then of
/// the one that they write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct TableShape {
    /// Number of rows: the maximum number of sequences.
    pub rows: u32,
    /// Number of directory words of a row.
    pub leaves_per_row: u32,
    /// Number of words of a block, which is the number of places of a leaf: a power of two.
    pub leaf_pages: u32,
    /// Number of leaves of all rows together.
    pub leaf_count: u32,
    /// Number of page tables of a row, over all groups of layers
    /// ([`PoolLayout::tracks`](crate::layout::PoolLayout::tracks)).
    pub tracks: u32,
    /// Number of pages of a sequence's state ([`PoolLayout::state_pages`](crate::layout::PoolLayout::state_pages)).
    pub state_pages: u32,
}

impl TableShape {
    /// Returns the shape for `rows` sequences of at most `len_max` tokens each, and `tokens` tokens together.
    ///
    /// # Errors
    /// [`ConfigError::Overflow`] if the number of words exceeds 32 bits; [`ConfigError::Zero`] if `page_size` is 0.
    pub fn new(page_size: u32, rows: u32, len_max: u32, tokens: u64) -> Result<Self, ConfigError> {
        Self::in_leaves(LEAF_TOKENS, page_size, rows, len_max, tokens)
    }

    /// Returns the shape of a pool's page tables, with the pool's tracks. A leaf has no more tokens than the smallest
    /// [`Reach::Chunk`] of the groups, but at least one page. O(groups).
    ///
    /// # Errors
    /// As [`TableShape::new`].
    pub fn of(layout: &PoolLayout, rows: u32, len_max: u32, tokens: u64) -> Result<Self, ConfigError> {
        let leaves = layout.groups().limited().filter_map(|(_, reach)| match reach {
            Reach::Chunk(size) => Some(size),
            _ => None,
        });
        let leaf_tokens = leaves.fold(LEAF_TOKENS, u32::min);
        let shape = Self::in_leaves(leaf_tokens, layout.page_size(), rows, len_max, tokens)?;
        shape.with(layout.tracks(), layout.state_pages())
    }

    fn in_leaves(leaf_tokens: u32, page_size: u32, rows: u32, len_max: u32, tokens: u64) -> Result<Self, ConfigError> {
        if page_size == 0 {
            return Err(ConfigError::Zero { name: "page_size" });
        }
        // A power of two, so that finding a page takes no division.
        let leaf_pages = 1 << (leaf_tokens / page_size).max(1).ilog2();
        let leaf_tokens = leaf_pages * page_size;
        // The last leaf of every row may be partly empty.
        let leaf_count = (tokens / u64::from(leaf_tokens)).saturating_add(rows.into());
        let leaves_per_row = len_max.div_ceil(leaf_tokens);
        let overflow = ConfigError::Overflow { name: "page table words" };
        let shape = Self {
            rows,
            leaves_per_row,
            leaf_pages,
            leaf_count: u32::try_from(leaf_count).map_err(|_| overflow)?,
            tracks: 1,
            state_pages: 0,
        };
        shape.with(1, 0)
    }

    fn with(self, tracks: u32, state_pages: u32) -> Result<Self, ConfigError> {
        let leaf_words = u128::from(tracks) * u128::from(self.leaf_pages);
        let words = u128::from(self.rows) * u128::from(self.leaves_per_row) + u128::from(self.leaf_count) * leaf_words;
        let words = words + 2 * u128::from(self.rows) * u128::from(state_pages);
        if words > u128::from(u32::MAX) {
            return Err(ConfigError::Overflow { name: "page table words" });
        }
        Ok(Self { tracks, state_pages, ..self })
    }

    /// Returns the number of tokens whose pages the tables have room for.
    pub(crate) fn tokens(&self, page_size: u32) -> u64 {
        u64::from(self.leaf_count) * u64::from(self.leaf_pages) * u64::from(page_size)
    }

    pub(crate) const fn directory_words(&self) -> u64 {
        self.rows as u64 * self.leaves_per_row as u64
    }

    /// Returns the number of words of the array.
    pub const fn words(&self) -> usize {
        self.first_state_word() + 2 * self.rows as usize * self.state_pages as usize
    }

    const fn first_state_word(&self) -> usize {
        self.directory_words() as usize + self.leaf_count as usize * self.tracks as usize * self.leaf_pages as usize
    }

    /// Returns the index of the word with the first page of the state that a row's items read (`part` 0) or write (1).
    /// The words of the other pages follow.
    pub const fn state_word(&self, row: RowId, part: u32) -> u32 {
        self.first_state_word() as u32 + (2 * row.raw() + part) * self.state_pages
    }

    /// Returns the exclusive maximum of the block numbers in the directory.
    pub(crate) const fn blocks(&self) -> u32 {
        // The other tracks of the last leaf follow its first block.
        self.leaf_count.saturating_sub(1) * self.tracks + 1
    }

    /// Returns the index of the directory word for a page of a row.
    pub const fn directory_word(&self, row: RowId, page_index: u32) -> u32 {
        row.raw() * self.leaves_per_row + (page_index >> self.leaf_pages.trailing_zeros())
    }

    /// Returns the index of the word that contains a page, given the page's block.
    pub const fn page_word(&self, block: u32, page_index: u32) -> u32 {
        let in_leaf = page_index & (self.leaf_pages - 1);
        self.rows * self.leaves_per_row + block * self.leaf_pages + in_leaf
    }

    /// Looks up a page of group 0 in the array.
    pub fn page(&self, words: &[u32], row: RowId, page_index: u32) -> PageId {
        self.track_page(words, row, 0, page_index)
    }

    /// Looks up a page of a track in the array.
    pub fn track_page(&self, words: &[u32], row: RowId, track: u32, page_index: u32) -> PageId {
        let block = words[self.directory_word(row, page_index) as usize] + track;
        PageId::new(words[self.page_word(block, page_index) as usize])
    }
}
