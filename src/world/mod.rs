//! All tables together; their `bytes`, and the `audit` over them.
//!
//! * W1. Every page has exactly one owner, and its state says which kind: a sequence (Private), a tree node (Cached),
//!   the fence (Fenced), nobody (Free).
//! * W2. A sequence's published pages are the path of its lock.
//! * W3. Every lock that the tree counts is a sequence's or waits in the fence. T3 is audited with these locks.
//! * W4. Outstanding pages of promises <= free + evictable + fenced pages: `system/page_budget.rs` gives the reason.
//!
//! Not here: what changes them (`system/`).

mod audit;
mod bytes;

use bytemuck::Zeroable;

use crate::bitmap::Bitmap;
use crate::config::EngineShape;
use crate::error::ConfigError;
use crate::fence::Fence;
use crate::id::{PageId, SeqKey, StepId, TokenId};
use crate::layout::Limits;
use crate::memory::{self, OutOfMemory, touch_reserved};
use crate::page::PagePool;
use crate::plan::{Admitted, Compaction, PageCopy};
use crate::prefix::{PrefixTree, SharedPrefixFinder};
use crate::sequence::SequenceTable;
use crate::stats::Stats;
use crate::step::StepLog;

pub use audit::{Broken, Owner};
pub use bytes::EngineBytes;
use bytes::{copy_count, lock_count, row_pages_all};

/// The tables, and the limits that they are made with.
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
    /// What waits for them.
    pub fence: Fence,
    /// The shared spans of the last batch.
    pub finder: SharedPrefixFinder,
    /// What has happened so far; its levels are not kept.
    pub counters: Stats,
    /// Buffers of the systems: each empties one before it fills it. Made at capacity, so that none ever grows.
    pub(crate) buffers: Buffers,
}

/// Buffers that systems fill, none of them from one call to the next.
pub(crate) struct Buffers {
    /// Pages released.
    pub freed: Vec<PageId>,
    /// Pages of a match, of a sequence, or that the tree has just got.
    pub pages: Vec<PageId>,
    /// Tokens of one sequence.
    pub tokens: Vec<TokenId>,
    /// Children that a fork made.
    pub children: Vec<SeqKey>,
    /// Copies that a fork made.
    pub copies: Vec<PageCopy>,
    /// What backends have to move of drafts that are accepted.
    pub compactions: Vec<Compaction>,
    /// What a batch's admission answered.
    pub admitted: Vec<Admitted>,
    /// Pages that a batch's admission has counted.
    pub counted: Bitmap,
}

impl World {
    /// Empty tables for a checked config; `hash_bits` as in [`PrefixTree::new`].
    ///
    /// # Errors
    /// [`ConfigError::OutOfMemory`] with the bytes of all tables, where the system refuses some of them.
    pub fn new(shape: &EngineShape, hash_bits: u32) -> Result<Self, ConfigError> {
        let refused = |_| ConfigError::OutOfMemory { bytes: shape.bytes().host() };
        Self::try_new(shape, hash_bits).map_err(refused)
    }

    fn try_new(shape: &EngineShape, hash_bits: u32) -> Result<Self, OutOfMemory> {
        let (page_count, page_size) = (shape.layout.page_count(), shape.layout.page_size());
        if shape.prefault {
            memory::check(shape.bytes().host())?;
        }
        let mut world = Self {
            shape: *shape,
            pages: PagePool::try_new(page_count)?,
            prefixes: PrefixTree::try_new(page_count, page_size, hash_bits)?,
            sequences: SequenceTable::try_new(&shape.table, page_size, hash_bits)?,
            steps: StepLog::try_new(shape.max_steps, shape.table.rows)?,
            fence: Fence::try_new(page_count, shape.max_steps, lock_count(shape))?,
            finder: SharedPrefixFinder::try_new(shape.table.rows)?,
            counters: Stats::default(),
            buffers: Buffers {
                freed: memory::reserved(page_count.into())?,
                pages: memory::reserved(row_pages_all(shape))?,
                tokens: memory::reserved(shape.max_sequence_len.into())?,
                children: memory::reserved(shape.table.rows.into())?,
                copies: memory::reserved(copy_count(shape))?,
                compactions: memory::reserved(shape.table.rows.into())?,
                admitted: memory::reserved(shape.table.rows.into())?,
                counted: Bitmap::new(page_count, false)?,
            },
        };
        if shape.table.tracks > 1 {
            world.sequences.set_limits(Limits::new(&shape.layout, shape.promise_ahead));
        }
        if let Some(hashing) = shape.hashing {
            world.prefixes.keep_hashes(hashing, hash_bits)?;
            if shape.event_pages > 0 {
                world.prefixes.keep_events(shape.event_pages)?;
            }
        }
        if shape.prefault {
            world.fence.prefault();
            world.prefixes.try_prefault()?;
            world.sequences.prefault();
            world.finder.prefault();
            touch_reserved(&mut world.buffers.freed, PageId::default());
            touch_reserved(&mut world.buffers.pages, PageId::default());
            touch_reserved(&mut world.buffers.tokens, TokenId::default());
            touch_reserved(&mut world.buffers.children, SeqKey::default());
            touch_reserved(&mut world.buffers.copies, PageCopy::zeroed());
            touch_reserved(&mut world.buffers.compactions, Compaction::default());
            touch_reserved(&mut world.buffers.admitted, Admitted::default());
        }
        Ok(world)
    }

    /// Returns the free and evictable pages.
    fn reclaimable(&self) -> u32 {
        self.pages.free_count() + self.prefixes.size_info().evictable
    }

    /// Pages that a plan could take now that nobody is promised.
    pub fn available(&self) -> u32 {
        self.reclaimable().saturating_sub(self.sequences.promised())
    }

    /// Pages that a plan could take that nobody is promised once `step` is complete, if nothing else happens.
    /// O(unfinished steps).
    pub fn available_after(&self, step: StepId) -> u32 {
        let reclaimable = self.reclaimable() + self.fence.pages_until(step);
        reclaimable.saturating_sub(self.sequences.promised())
    }
}
