//! The shape of the page tables: which word names the chunk of a row's page, and which the page.
//!
//! Not here: who owns the words (`sequence/page_table.rs`, the backends).

use crate::error::ConfigError;
use crate::id::{PageId, RowId};

/// Tokens that one chunk of a sequence holds, where the page size divides it.
const CHUNK_TOKENS: u32 = 1024;

/// Shape of the page tables: one flat array of 32-bit words, the same on the host and on every backend.
///
/// A row is found in two steps, so that rows of any length need no contiguous memory and none is ever moved:
///
/// ```text
/// words = [ directory: rows x chunks_per_row | chunks: chunk_count x chunk_pages ]
/// chunk = words[row * chunks_per_row + page_index / chunk_pages]
/// page  = words[rows * chunks_per_row + chunk * chunk_pages + page_index % chunk_pages]
/// ```
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
}

impl TableShape {
    /// The shape for `rows` sequences of at most `len_max` tokens each and `tokens` together.
    ///
    /// # Errors
    /// [`ConfigError::Overflow`] where a word's index would not fit 32 bits, [`ConfigError::Zero`] for a page of no
    /// tokens.
    pub fn new(page_size: u32, rows: u32, len_max: u32, tokens: u64) -> Result<Self, ConfigError> {
        if page_size == 0 {
            return Err(ConfigError::Zero { name: "page_size" });
        }
        // A power of two, so that finding a page takes no division.
        let chunk_pages = 1 << (CHUNK_TOKENS / page_size).max(1).ilog2();
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
        };
        let words = u64::from(rows) * u64::from(chunks_per_row)
            + u64::from(shape.chunk_count) * u64::from(chunk_pages);
        if words > u64::from(u32::MAX) { Err(overflow) } else { Ok(shape) }
    }

    /// Words of the whole array.
    pub const fn words(&self) -> usize {
        self.rows as usize * self.chunks_per_row as usize
            + self.chunk_count as usize * self.chunk_pages as usize
    }

    /// Index of the word that names the chunk of a row's page.
    pub const fn directory_word(&self, row: RowId, page_index: u32) -> u32 {
        row.raw() * self.chunks_per_row + (page_index >> self.chunk_pages.trailing_zeros())
    }

    /// Index of the word that names a page, given its chunk.
    pub const fn page_word(&self, chunk: u32, page_index: u32) -> u32 {
        let in_chunk = page_index & (self.chunk_pages - 1);
        self.rows * self.chunks_per_row + chunk * self.chunk_pages + in_chunk
    }

    /// Looks a page up in the array.
    pub fn page(&self, words: &[u32], row: RowId, page_index: u32) -> PageId {
        let chunk = words[self.directory_word(row, page_index) as usize];
        PageId::new(words[self.page_word(chunk, page_index) as usize])
    }
}
