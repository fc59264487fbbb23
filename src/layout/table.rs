//! The shape of the page tables: the words that name the chunk of a page, and the page itself.
//!
//! Not here: the words (`sequence/page_table.rs`, the backends).

use super::groups::Reach;
use super::pool::PoolLayout;
use crate::error::ConfigError;
use crate::id::{PageId, RowId};

/// Tokens that one chunk of a sequence holds, where the page size divides it.
const CHUNK_TOKENS: u32 = 1024;

/// Shape of the page tables: one flat array of 32-bit words, the same on the host and on every backend.
///
/// A row is found in two steps, so that rows of any length need no contiguous memory and none is ever moved:
///
/// ```text
/// words = [ directory: rows x chunks_per_row | chunks: chunk_count x tracks x chunk_pages ]
/// block = words[row * chunks_per_row + page_index / chunk_pages]
/// page  = words[rows * chunks_per_row + (block + track) * chunk_pages + page_index % chunk_pages]
/// ```
///
/// A chunk is a block of `chunk_pages` words for each track, and its first block's number is what the directory names:
/// a multiple of `tracks`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct TableShape {
    /// Rows: the most sequences at a time.
    pub rows: u32,
    /// Words of one row's directory.
    pub chunks_per_row: u32,
    /// Pages of one chunk: a power of two.
    pub chunk_pages: u32,
    /// Chunks of all rows together.
    pub chunk_count: u32,
    /// Page tables of a row: those of all groups of layers ([`PoolLayout::tracks`](crate::PoolLayout::tracks)).
    pub tracks: u32,
}

impl TableShape {
    /// Returns the shape for `rows` sequences of at most `len_max` tokens each and `tokens` together.
    ///
    /// # Errors
    /// [`ConfigError::Overflow`] where a word's index would not fit 32 bits, [`ConfigError::Zero`] for a page of no
    /// tokens.
    pub fn new(page_size: u32, rows: u32, len_max: u32, tokens: u64) -> Result<Self, ConfigError> {
        Self::in_chunks(CHUNK_TOKENS, page_size, rows, len_max, tokens)
    }

    /// Returns the shape of a pool's page tables for as many sequences and tokens: as many tracks as it has, and chunks
    /// that are no larger than those that its groups read. O(groups).
    ///
    /// # Errors
    /// As [`TableShape::new`].
    pub fn of(
        layout: &PoolLayout,
        rows: u32,
        len_max: u32,
        tokens: u64,
    ) -> Result<Self, ConfigError> {
        let chunks = layout.groups().limited().filter_map(|(_, reach)| match reach {
            Reach::Chunk(size) => Some(size),
            _ => None,
        });
        let chunk_tokens = chunks.fold(CHUNK_TOKENS, u32::min);
        let shape = Self::in_chunks(chunk_tokens, layout.page_size(), rows, len_max, tokens)?;
        shape.with_tracks(layout.tracks())
    }

    fn in_chunks(
        chunk_tokens: u32,
        page_size: u32,
        rows: u32,
        len_max: u32,
        tokens: u64,
    ) -> Result<Self, ConfigError> {
        if page_size == 0 {
            return Err(ConfigError::Zero { name: "page_size" });
        }
        // A power of two, so that finding a page takes no division.
        let chunk_pages = 1 << (chunk_tokens / page_size).max(1).ilog2();
        let chunk_tokens = chunk_pages * page_size;
        // Every row may leave its last chunk partly empty.
        let chunk_count = tokens / u64::from(chunk_tokens) + u64::from(rows);
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
        let words = u128::from(self.rows) * u128::from(self.chunks_per_row)
            + u128::from(self.chunk_count) * chunk_words;
        if words > u128::from(u32::MAX) {
            return Err(ConfigError::Overflow { name: "page table words" });
        }
        Ok(Self { tracks, ..self })
    }

    /// Returns the words of all directories.
    pub(crate) const fn directory_words(&self) -> u64 {
        self.rows as u64 * self.chunks_per_row as u64
    }

    /// Returns the words of the whole array.
    pub const fn words(&self) -> usize {
        self.directory_words() as usize
            + self.chunk_count as usize * self.tracks as usize * self.chunk_pages as usize
    }

    /// Returns the number of blocks, which every word of a directory is below.
    pub(crate) const fn blocks(&self) -> u32 {
        // From each all tracks are words of the array.
        self.chunk_count.saturating_sub(1) * self.tracks + 1
    }

    /// Returns the index of the word that names the chunk of a row's page.
    pub const fn directory_word(&self, row: RowId, page_index: u32) -> u32 {
        row.raw() * self.chunks_per_row + (page_index >> self.chunk_pages.trailing_zeros())
    }

    /// Returns the index of the word that names a page, given its block.
    pub const fn page_word(&self, block: u32, page_index: u32) -> u32 {
        let in_chunk = page_index & (self.chunk_pages - 1);
        self.rows * self.chunks_per_row + block * self.chunk_pages + in_chunk
    }

    /// Looks a page of group 0 up in the array.
    pub fn page(&self, words: &[u32], row: RowId, page_index: u32) -> PageId {
        self.track_page(words, row, 0, page_index)
    }

    /// Looks a page of a track up in the array.
    pub fn track_page(&self, words: &[u32], row: RowId, track: u32, page_index: u32) -> PageId {
        let block = words[self.directory_word(row, page_index) as usize] + track;
        PageId::new(words[self.page_word(block, page_index) as usize])
    }
}
