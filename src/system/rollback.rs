//! Drops a sequence's last tokens.

use crate::config::EngineShape;
use crate::error::Error;
use crate::fence::Fence;
use crate::id::SeqKey;
use crate::page::PagePool;
use crate::sequence::{Current, SequenceTable};
use crate::stats::Stats;
use crate::step::StepLog;
use crate::system::access::access;
use crate::system::release::release_pages;
use crate::world::{Buffers, World};

access! {
    /// Tables of [`rollback`].
    struct Rollback of &mut World {
        shape: &EngineShape,
        pages: &mut PagePool,
        sequences: &mut SequenceTable,
        steps: &mut StepLog,
        fence: &mut Fence,
        counters: &mut Stats,
        buffers: &mut Buffers,
    }
}

/// Implements [`Engine::rollback`](crate::Engine::rollback). O(pages released and unfinished steps).
///
/// # Errors
/// [`Error::UnknownSequence`], [`Error::NotAccepted`], [`Error::RollbackLen`].
pub(crate) fn rollback(world: Rollback<'_>, seq: SeqKey, len: u32) -> Result<(), Error> {
    let Rollback { shape, pages, sequences, steps, fence, counters, buffers } = world;
    let page_size = shape.layout.page_size();
    sequences.check_accepted(seq)?;
    let pending = sequences.pending(sequences.get(seq)?);
    let sequence = sequences.get_mut(seq)?;
    let (min, max) = (((sequence.published + pending) * page_size).max(1), sequence.token_len);
    if len < min || len > max {
        return Err(Error::RollbackLen { len, min, max });
    }
    let is_lost = len < sequence.planned_len;
    sequence.cached_len = sequence.cached_len.min(len);
    sequence.planned_len = sequence.planned_len.min(len);
    steps.cap(sequence.last_item, len);
    let page_len = sequence.planned_len.div_ceil(page_size) - pending;
    let last_step = sequence.last_step;
    buffers.pool_pages.clear();
    sequences.truncate_pages(seq, page_len, &mut buffers.pool_pages);
    sequences.cut(seq, len);
    sequences.truncate_tokens(seq, len);
    let mut row = sequences.row_mut(seq)?;
    if is_lost && row.has_state() {
        row.states_mut().current = Current::Lost;
    }
    row.drop_front();
    release_pages(pages, fence, last_step, &buffers.pool_pages);
    counters.rollbacks += 1;
    Ok(())
}
