//! The memory of an engine, and the size of its largest plan.

use crate::config::{EngineConfig, EngineShape};
use crate::error::ConfigError;
use crate::id::{PageId, TokenId};
use crate::memory::Memory;
use crate::plan::{BatchRow, STEP_TOKENS_MAX, SharedSpan, TableWrite};
use crate::prefix::TreeShape;

use super::World;

/// The bytes that an engine allocates when it is created. Does not include K and V in swap memory, which backends
/// allocate: [`PoolLayout::swap_region_pages`](crate::layout::PoolLayout::swap_region_pages) times
/// [`PoolLayout::page_bytes`](crate::layout::PoolLayout::page_bytes). Does not include other memory of backends either.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct EngineBytes {
    /// K and V of the pool, in the backend.
    pub kv: u64,
    /// The mirror of the page tables, in the backend.
    pub kv_tables: u64,
    /// States of pages.
    pub pages: u64,
    /// The prefix tree.
    pub prefixes: u64,
    /// States of the swap pages, and records of their saves, loads, puts and fetches.
    pub swap: u64,
    /// Hashes of cached pages. Does not include names of namespaces, which
    /// [`name_namespace`](crate::Engine::name_namespace) allocates.
    pub hashes: u64,
    /// The event buffer.
    pub events: u64,
    /// Tokens and page tables of sequences.
    pub sequences: u64,
    /// Unfinished steps, the fence, the search for shared spans, and the systems' buffers.
    pub steps: u64,
}

impl EngineBytes {
    /// Returns the bytes of an engine without tables.
    pub(super) fn of_backend(shape: &EngineShape) -> Self {
        let (kv, kv_tables) = (shape.layout.total_bytes(), 4 * shape.table.words() as u64);
        Self { kv, kv_tables, pages: 0, prefixes: 0, swap: 0, hashes: 0, events: 0, sequences: 0, steps: 0 }
    }

    /// Returns the bytes on the host, without those of the backend.
    pub fn host(&self) -> u64 {
        self.pages + self.prefixes + self.swap + self.hashes + self.events + self.sequences + self.steps
    }
}

impl EngineConfig {
    /// Returns the [`EngineBytes`] of an engine with this config.
    ///
    /// Each step in flight also needs a [`StepScratch`](crate::StepScratch) of up to [`EngineShape::plan_bytes`].
    ///
    /// # Errors
    /// As [`EngineConfig::shape`].
    pub fn bytes(&self) -> Result<EngineBytes, ConfigError> {
        Ok(self.shape()?.bytes())
    }
}

impl EngineShape {
    /// Returns [`EngineConfig::bytes`] of a checked config. No number overflows.
    pub fn bytes(&self) -> EngineBytes {
        World::new_in(self, u32::BITS, &mut Memory::counting()).expect("nothing is allocated").1
    }

    /// Returns the bytes of the largest plan of at most `rows` sequences and `tokens` new tokens. O(1).
    ///
    /// A scratch that [`StepScratch::with_capacity`](crate::StepScratch::with_capacity) creates with this size does not
    /// grow for such a plan. A page table word takes 8 bytes: the words of the first plan of a prompt of 100,000 tokens
    /// at page_size 1 take 800 kB. The documentation of [`Engine::plan_batch`](crate::Engine::plan_batch) lists the
    /// plans that send many words.
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
        let row_words = row_pages * tracks + u64::from(self.table.leaves_per_row);
        let leaf_words = u64::from(self.table.leaf_pages) * tracks + 1;
        let words = u64::from(self.table.leaf_count) * leaf_words;
        let writes = words.min(rows * row_words);
        let places = tokens.min(tokens / page_size + rows);
        let state = u64::from(self.table.state_pages);
        let writes = writes + rows * 2 * state;
        let new_pages = (places * tracks + rows * state).min(self.layout.page_count().into());
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

/// Number of arrays of a plan, including the new pages. Each begins at a multiple of its alignment.
const ARRAYS: u64 = 10;

/// Returns the maximum number of locks in the fence. Each item of an unfinished step releases at most one lock into the
/// fence: a resumed sequence belongs to no step until it is planned again. The parent and the children of a fork also
/// release at most one lock each.
pub(super) fn lock_count(shape: &EngineShape) -> u64 {
    u64::from(shape.max_steps) * (u64::from(shape.table.rows) + 1)
}

/// Returns the maximum number of pages of a sequence in all tracks, with one spare place in each track, and of its
/// state.
pub(super) fn row_pages_all(shape: &EngineShape) -> u64 {
    let row_pages = shape.max_sequence_len.div_ceil(shape.layout.page_size());
    (u64::from(row_pages) + 1) * u64::from(shape.table.tracks) + u64::from(shape.table.state_pages)
}

/// Returns the shape of an engine's tree, without swap memory if sequences do not share prefixes.
pub(super) fn tree_shape(shape: &EngineShape, hash_bits: u32) -> TreeShape {
    let layout = &shape.layout;
    TreeShape {
        swap_pages: if shape.shares_prefixes() { layout.swap_pages() } else { 0 },
        stage_pages: layout.stage_pages(),
        record_pages: shape.record_pages,
        hashing: shape.hashing,
        event_pages: shape.event_pages,
        event_cells: shape.event_cells,
        limits: shape.limits(),
        max_steps: shape.max_steps,
        ..TreeShape::new(layout.page_count(), layout.page_size(), hash_bits)
    }
}

/// Returns the maximum number of copies of a fork: one page for each child, or with several tracks or states all pages
/// of the pool.
pub(super) fn copy_count(shape: &EngineShape) -> u64 {
    let pages = if shape.table.tracks > 1 || shape.table.state_pages > 0 { shape.layout.page_count() } else { 0 };
    pages.max(shape.table.rows).into()
}
