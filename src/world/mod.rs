//! All tables together; `bytes` computes their size, and `audit` checks them. `system/` changes them.
//!
//! * W1. Every page has exactly one owner or none, and its state matches the owner: Private for a sequence, Cached for
//!   a tree node or one of its cells, Fenced for the fence, Free for none.
//! * W2. A sequence's published pages, followed by its pending ones, are the path of its lock.
//! * W3. Every lock that the tree counts is held by a sequence, a fetch or the fence. T3 is audited with these locks.
//! * W4. Outstanding pages <= free + evictable + fenced pages. ARCHITECTURE.md proves it.

mod audit;
mod bytes;

use crate::bitmap::Bitmap;
use crate::config::EngineShape;
use crate::error::ConfigError;
use crate::fence::Fence;
use crate::id::{PageId, SeqKey, StepId, TokenId};
use crate::memory::{self, Memory, OutOfMemory};
use crate::page::PagePool;
use crate::plan::{Admitted, Compaction, PageCopy};
use crate::prefix::{LoadBatch, PrefixTree, SharedPrefixFinder};
use crate::sequence::SequenceTable;
use crate::stats::Stats;
use crate::step::StepLog;

pub use audit::{Broken, Owner};
pub use bytes::EngineBytes;
use bytes::{copy_count, lock_count, row_pages_all, tree_shape};

/// The tables, and the limits from which they are created.
pub struct World {
    /// Limits of the tables.
    pub shape: EngineShape,
    /// States of pages.
    pub pages: PagePool,
    /// Cached prefixes.
    pub prefixes: PrefixTree,
    /// Sequences.
    pub sequences: SequenceTable,
    /// Unfinished steps.
    pub steps: StepLog,
    /// Pages and locks that wait for unfinished steps.
    pub fence: Fence,
    /// The shared spans of the last batch.
    pub finder: SharedPrefixFinder,
    /// Counters. [`Engine::stats`](crate::Engine::stats) reads the levels from the tables.
    pub counters: Stats,
    /// The last load from swap memory.
    pub(crate) load: LoadBatch,
    /// Buffers of the systems, reserved at their largest size.
    pub(crate) buffers: Buffers,
}

/// Buffers of the systems. Each system clears a buffer before it fills it.
pub(crate) struct Buffers {
    /// Up to all pages of the pool: released ones, those that a load takes, or the idle ones in the matches of prompts.
    pub pool_pages: Vec<PageId>,
    /// Pages of a match or of a sequence, or new pages of the tree.
    pub pages: Vec<PageId>,
    /// Tokens of one sequence.
    pub tokens: Vec<TokenId>,
    /// Children of a fork.
    pub children: Vec<SeqKey>,
    /// Copies of a fork.
    pub copies: Vec<PageCopy>,
    /// Moves of accepted drafts, for the backend.
    pub compactions: Vec<Compaction>,
    /// Results of a batch of admissions.
    pub admitted: Vec<Admitted>,
    /// Pages that a batch of admissions has already counted.
    pub counted: Bitmap,
}

impl World {
    /// Creates empty tables for a checked config; `hash_bits` as in [`PrefixTree::new`].
    ///
    /// # Errors
    /// [`ConfigError::OutOfMemory`] with the bytes of all tables, if the host cannot allocate some of them.
    pub fn new(shape: &EngineShape, hash_bits: u32) -> Result<Self, ConfigError> {
        let bytes = shape.bytes().host();
        let checked = if shape.prefault { memory::check(bytes) } else { Ok(()) };
        let made = checked.and_then(|()| Self::new_in(shape, hash_bits, &mut Memory::new(shape.prefault)));
        let (mut world, _) = made.map_err(|_| ConfigError::OutOfMemory { bytes })?;
        world.pages.reserve(shape.reserved_pages);
        Ok(world)
    }

    /// Creates the tables in `memory`. Also returns their bytes.
    fn new_in(shape: &EngineShape, hash_bits: u32, memory: &mut Memory) -> Result<(Self, EngineBytes), OutOfMemory> {
        let EngineShape { layout, table, max_steps, .. } = shape;
        let (page_count, rows, tree) = (layout.page_count(), table.rows, tree_shape(shape, hash_bits));
        let mut bytes = EngineBytes::of_backend(shape);
        let pages = PagePool::new_in(page_count, memory)?;
        bytes.pages = memory.take_bytes();
        let (prefixes, of_tree) = PrefixTree::of_shape(&tree, memory)?;
        (bytes.prefixes, bytes.hashes, bytes.events) = (of_tree.tree, of_tree.hashes, of_tree.events);
        let mut sequences = SequenceTable::new(table, layout.page_size(), hash_bits, memory)?;
        if !tree.limits.is_none() {
            sequences.set_limits(tree.limits, memory)?;
        }
        bytes.sequences = memory.take_bytes();
        let mut load = LoadBatch::new(0, 0, memory)?;
        if tree.swap_pages > 0 {
            sequences.keep_loads(memory)?;
            load = LoadBatch::new(page_count, rows, memory)?;
            bytes.swap = of_tree.swap + memory.take_bytes();
        }
        let world = Self {
            shape: *shape,
            pages,
            prefixes,
            sequences,
            steps: StepLog::new(*max_steps, rows, memory)?,
            fence: Fence::new_in(page_count, *max_steps, lock_count(shape), memory)?,
            finder: SharedPrefixFinder::new(rows, memory)?,
            counters: Stats::default(),
            load,
            buffers: Buffers {
                pool_pages: memory.reserved(page_count.into())?,
                pages: memory.reserved(row_pages_all(shape))?,
                tokens: memory.reserved(shape.max_sequence_len.into())?,
                children: memory.reserved(rows.into())?,
                copies: memory.reserved(copy_count(shape))?,
                compactions: memory.reserved(rows.into())?,
                admitted: memory.reserved(rows.into())?,
                counted: Bitmap::new(page_count, false, memory)?,
            },
        };
        bytes.steps = memory.take_bytes();
        Ok((world, bytes))
    }

    fn reclaimable(&self) -> u32 {
        self.pages.free_count() + self.prefixes.size_info().evictable
    }

    /// Returns the number of free and evictable pages that are not promised.
    pub fn available(&self) -> u32 {
        self.reclaimable().saturating_sub(self.sequences.all_outstanding())
    }

    /// Returns [`World::available`] after the completion of `step`, if no other call comes first. O(unfinished steps).
    pub fn available_after(&self, step: StepId) -> u32 {
        let reclaimable = self.reclaimable() + self.fence.pages_until(step);
        reclaimable.saturating_sub(self.sequences.all_outstanding())
    }
}
