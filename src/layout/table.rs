//! The shape of the page tables: directory words, which name chunks, and the page words in chunks.

use super::groups::Reach;
use super::pool::PoolLayout;
use crate::error::ConfigError;
use crate::id::{PageId, RowId};

/// Number of tokens of a chunk, if the page size divides it.
const CHUNK_TOKENS: u32 = 1024;

/// Shape of the page tables: one flat array of 32-bit words, the same on the host and on every backend.
///
/// A lookup of a page takes two steps, so rows of any length need no contiguous memory and never move:
///
/// ```text
/// words = [ directory: rows x chunks_per_row | chunks: chunk_count x tracks x chunk_pages ]
/// block = words[row * chunks_per_row + page_index / chunk_pages]
/// page  = words[rows * chunks_per_row + (block + track) * chunk_pages + page_index % chunk_pages]
/// ```
///
/// A chunk has one block of `chunk_pages` words for each track. The directory contains the number of a chunk's first
/// block, a multiple of `tracks`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct TableShape {
    /// Number of rows: the maximum number of sequences.
    pub rows: u32,
    /// Number of directory words of a row.
    pub chunks_per_row: u32,
    /// Number of words of a block, which is the number of places of a chunk: a power of two.
    pub chunk_pages: u32,
    /// Number of chunks of all rows together.
    pub chunk_count: u32,
    /// Number of page tables of a row, over all groups of layers ([`PoolLayout::tracks`](crate::PoolLayout::tracks)).
    pub tracks: u32,
}

impl TableShape {
    /// Returns the shape for `rows` sequences of at most `len_max` tokens each, and `tokens` tokens together.
    ///
    /// # Errors
    /// [`ConfigError::Overflow`] if the number of words exceeds 32 bits; [`ConfigError::Zero`] if `page_size` is 0.
    pub fn new(page_size: u32, rows: u32, len_max: u32, tokens: u64) -> Result<Self, ConfigError> {
        Self::in_chunks(CHUNK_TOKENS, page_size, rows, len_max, tokens)
    }

    /// Returns the shape of a pool's page tables, with the pool's tracks. A chunk has no more tokens than the smallest
    /// [`Reach::Chunk`] of the groups, but at least one page. O(groups).
    ///
    /// # Errors
    /// As [`TableShape::new`].
    pub fn of(layout: &PoolLayout, rows: u32, len_max: u32, tokens: u64) -> Result<Self, ConfigError> {
        let chunks = layout.groups().limited().filter_map(|(_, reach)| match reach {
            Reach::Chunk(size) => Some(size),
            _ => None,
        });
        let chunk_tokens = chunks.fold(CHUNK_TOKENS, u32::min);
        let shape = Self::in_chunks(chunk_tokens, layout.page_size(), rows, len_max, tokens)?;
        shape.with_tracks(layout.tracks())
    }

    fn in_chunks(chunk_tokens: u32, page_size: u32, rows: u32, len_max: u32, tokens: u64) -> Result<Self, ConfigError> {
        if page_size == 0 {
            return Err(ConfigError::Zero { name: "page_size" });
        }
        // A power of two, so that finding a page takes no division.
        let chunk_pages = 1 << (chunk_tokens / page_size).max(1).ilog2();
        let chunk_tokens = chunk_pages * page_size;
        // The last chunk of every row may be partly empty.
        let chunk_count = (tokens / u64::from(chunk_tokens)).saturating_add(rows.into());
        let chunks_per_row = len_max.div_ceil(chunk_tokens);
        let overflow = ConfigError::Overflow { name: "page table words" };
        let shape = Self {
            rows,
            chunks_per_row,
            chunk_pages,
            chunk_count: u32::try_from(chunk_count).map_err(|_| overflow)?,
            tracks: 1,
        };
        shape.with_tracks(1)
    }

    fn with_tracks(self, tracks: u32) -> Result<Self, ConfigError> {
        let chunk_words = u128::from(tracks) * u128::from(self.chunk_pages);
        let words =
            u128::from(self.rows) * u128::from(self.chunks_per_row) + u128::from(self.chunk_count) * chunk_words;
        if words > u128::from(u32::MAX) {
            return Err(ConfigError::Overflow { name: "page table words" });
        }
        Ok(Self { tracks, ..self })
    }

    /// Returns the number of tokens whose pages the tables have room for.
    pub(crate) fn tokens(&self, page_size: u32) -> u64 {
        u64::from(self.chunk_count) * u64::from(self.chunk_pages) * u64::from(page_size)
    }

    pub(crate) const fn directory_words(&self) -> u64 {
        self.rows as u64 * self.chunks_per_row as u64
    }

    /// Returns the number of words of the array.
    pub const fn words(&self) -> usize {
        self.directory_words() as usize + self.chunk_count as usize * self.tracks as usize * self.chunk_pages as usize
    }

    /// Returns the exclusive maximum of the block numbers in the directory.
    pub(crate) const fn blocks(&self) -> u32 {
        // The other tracks of the last chunk follow its first block.
        self.chunk_count.saturating_sub(1) * self.tracks + 1
    }

    /// Returns the index of the directory word for a page of a row.
    pub const fn directory_word(&self, row: RowId, page_index: u32) -> u32 {
        row.raw() * self.chunks_per_row + (page_index >> self.chunk_pages.trailing_zeros())
    }

    /// Returns the index of the word that contains a page, given the page's block.
    pub const fn page_word(&self, block: u32, page_index: u32) -> u32 {
        let in_chunk = page_index & (self.chunk_pages - 1);
        self.rows * self.chunks_per_row + block * self.chunk_pages + in_chunk
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
