//! The bytes that an engine takes, and its plans.

use crate::bitmap::Bitmap;
use crate::config::{EngineConfig, EngineShape};
use crate::error::ConfigError;
use crate::fence::Fence;
use crate::id::{PageId, SeqKey, TokenId};
use crate::page::PagePool;
use crate::plan::{
    Admitted, BatchRow, Compaction, PageCopy, STEP_TOKENS_MAX, SharedSpan, TableWrite,
};
use crate::prefix::{PrefixTree, SharedPrefixFinder};
use crate::sequence::SequenceTable;
use crate::step::StepLog;

/// Bytes that an engine takes, all of them at the start.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct EngineBytes {
    /// K and V, from the backend.
    pub kv: u64,
    /// The page tables' mirror, from the backend.
    pub kv_tables: u64,
    /// States of pages.
    pub pages: u64,
    /// The prefix tree.
    pub prefixes: u64,
    /// Hashes of its pages; what namespaces are called comes on top, when they are named.
    pub hashes: u64,
    /// Events that wait to be told.
    pub events: u64,
    /// Tokens and page tables of sequences.
    pub sequences: u64,
    /// Steps in flight, what waits for them, and the systems' buffers.
    pub steps: u64,
}

impl EngineBytes {
    /// Bytes on the host, the backend's left out.
    pub fn host(&self) -> u64 {
        self.pages + self.prefixes + self.hashes + self.events + self.sequences + self.steps
    }
}

impl EngineConfig {
    /// Every byte that an engine of this config will take. Beside it are the host's
    /// [`StepScratch`](crate::StepScratch)es, one for each step in flight, of up to [`EngineShape::plan_bytes`] each.
    ///
    /// # Errors
    /// As [`EngineConfig::shape`].
    pub fn bytes(&self) -> Result<EngineBytes, ConfigError> {
        Ok(self.shape()?.bytes())
    }
}

impl EngineShape {
    /// [`EngineConfig::bytes`] of a checked config. No number overflows.
    pub fn bytes(&self) -> EngineBytes {
        let (page_count, page_size) = (self.layout.page_count(), self.layout.page_size());
        let rows = size_of::<SeqKey>() + size_of::<Compaction>() + size_of::<Admitted>();
        let buffers = 4 * (u64::from(page_count) + row_pages_all(self))
            + copy_count(self) * size_of::<PageCopy>() as u64
            + 4 * u64::from(self.max_sequence_len)
            + u64::from(self.table.rows) * rows as u64
            + Bitmap::bytes(page_count);
        EngineBytes {
            kv: self.layout.total_bytes(),
            kv_tables: 4 * self.table.words() as u64,
            pages: PagePool::bytes(page_count),
            prefixes: PrefixTree::bytes(page_count, page_size),
            hashes: self.hashing.map_or(0, |hashing| PrefixTree::hash_bytes(page_count, hashing)),
            events: self.hashing.map_or(0, |hashing| {
                PrefixTree::event_bytes(page_count, page_size, hashing, self.event_pages)
            }),
            sequences: SequenceTable::bytes(&self.table, page_size),
            steps: StepLog::bytes(self.max_steps, self.table.rows)
                + Fence::bytes(page_count, self.max_steps, lock_count(self))
                + SharedPrefixFinder::bytes(self.table.rows)
                + buffers,
        }
    }

    /// Bytes of the largest plan of at most `rows` sequences and `tokens` new tokens together: a
    /// [`StepScratch::with_capacity`] of them is not grown by any such plan. O(1).
    ///
    /// Most of it are page table words, 8 bytes each: the first plan of a sequence since it was admitted or resumed
    /// sends all its pages, the shared ones too. At page_size 1 that is 800 kB for a prompt of 100,000 tokens. A fork
    /// sends a word for each chunk that it shares, unless what its parent sent may still be undone.
    ///
    /// ```
    /// # use kvarena::*;
    /// let shape = EngineConfig::from(PoolConfig::default()).shape()?;
    /// let scratch = StepScratch::with_capacity(shape.plan_bytes(64, 2048) as usize);
    /// # assert!(scratch.bytes() as u64 >= shape.plan_bytes(64, 2048));
    /// # Ok::<(), ConfigError>(())
    /// ```
    pub fn plan_bytes(&self, rows: u32, tokens: u32) -> u64 {
        let rows = u64::from(rows.min(self.table.rows));
        let tokens = u64::from(tokens.min(STEP_TOKENS_MAX));
        let page_size = u64::from(self.layout.page_size());
        let row_pages = u64::from(self.max_sequence_len).div_ceil(page_size);
        let tracks = u64::from(self.table.tracks);
        let row_words = row_pages * tracks + u64::from(self.table.chunks_per_row);
        // A chunk's pages, and the word that names it.
        let chunk_words = u64::from(self.table.chunk_pages) * tracks + 1;
        let words = u64::from(self.table.chunk_count) * chunk_words;
        let writes = words.min(rows * row_words);
        let places = tokens.min(tokens / page_size + rows);
        let new_pages = (places * tracks).min(self.layout.page_count().into());
        let slot = if self.layout.slots_fit_i32() { size_of::<i32>() } else { size_of::<i64>() };
        let slots = slot * self.table.tracks as usize;
        let token = size_of::<TokenId>() + size_of::<u32>() + slots + size_of::<u64>();
        new_pages * size_of::<PageId>() as u64
            + rows * size_of::<BatchRow>() as u64
            + tokens * token as u64
            + writes * size_of::<TableWrite>() as u64
            + rows * (size_of::<SharedSpan>() + size_of::<u32>()) as u64
            + ARRAYS * align_of::<u64>() as u64
    }
}

/// Arrays of a plan, and the new pages; each may begin at the next multiple of its alignment.
const ARRAYS: u64 = 10;

/// Most locks that wait in the fence: a planned item releases at most one, since a sequence that comes back has no step
/// until it is planned; a copy's step one more.
pub(super) fn lock_count(shape: &EngineShape) -> u64 {
    u64::from(shape.max_steps) * (u64::from(shape.table.rows) + 1)
}

/// Most pages of a sequence, and one more, in all tracks.
pub(super) fn row_pages_all(shape: &EngineShape) -> u64 {
    let row_pages = shape.max_sequence_len.div_ceil(shape.layout.page_size());
    (u64::from(row_pages) + 1) * u64::from(shape.table.tracks)
}

/// Most copies of a fork: a page for each child, and where there are several tracks as many as the pool has.
pub(super) fn copy_count(shape: &EngineShape) -> u64 {
    let pages = if shape.table.tracks > 1 { shape.layout.page_count() } else { 0 };
    pages.max(shape.table.rows).into()
}
