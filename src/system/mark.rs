//! Marks a place of a sequence where prompts can match: its tails at the place are kept as cells.

use crate::config::EngineShape;
use crate::error::Error;
use crate::fence::Fence;
use crate::id::SeqKey;
use crate::page::PagePool;
use crate::prefix::PrefixTree;
use crate::sequence::SequenceTable;
use crate::stats::Stats;
use crate::step::StepLog;
use crate::system::access::access;
use crate::system::publish::{keep, may_keep};
use crate::system::states::mark_state;
use crate::world::{Buffers, World};

access! {
    /// Tables of [`mark`].
    struct Mark of &mut World {
        shape: &EngineShape,
        pages: &mut PagePool,
        prefixes: &mut PrefixTree,
        sequences: &mut SequenceTable,
        steps: &mut StepLog,
        fence: &mut Fence,
        counters: &mut Stats,
        buffers: &mut Buffers,
    }
}

/// Implements [`Engine::mark`](crate::Engine::mark). O(tails).
///
/// A mark at the end of the published pages takes effect now, any other mark when the last of its pages is published.
/// Neither has an effect if promises need the pages.
///
/// If layers keep a state, a mark at the end of the planned tokens takes effect when these are committed. Nothing later
/// supersedes the state that the mark keeps.
///
/// # Errors
/// [`Error::UnknownSequence`], [`Error::Preempted`], [`Error::MarkLen`] below the tokens of the published and
/// pending pages, [`Error::OutOfMarks`]. Nothing changes then.
pub(crate) fn mark(world: Mark<'_>, seq: SeqKey, len: u32) -> Result<(), Error> {
    let Mark { shape, pages, prefixes, sequences, steps, fence, counters, buffers } = world;
    let published = sequences.prefix_pages(sequences.running(seq)?);
    if !shape.shares_prefixes() || !prefixes.has_cells() {
        return Ok(()); // Prompts match at every page, or at none.
    }
    let page_size = shape.layout.page_size();
    let mark = len / page_size;
    if sequences.has_states() {
        let planned_len = sequences.get(seq)?.planned_len;
        if mark * page_size < planned_len {
            return Err(Error::MarkLen { len, min: planned_len.next_multiple_of(page_size) });
        }
    }
    if mark < published {
        return Err(Error::MarkLen { len, min: published * page_size });
    }
    let mut row = sequences.row_mut(seq)?;
    if mark > published {
        row.add_mark(mark)?;
    } else if row.pending() == 0 && may_keep(&row, prefixes, pages, mark, published) {
        keep(pages, prefixes, sequences, fence, buffers, seq);
    }
    let mut row = sequences.row_mut(seq)?;
    if row.has_state() && mark * page_size == row.sequence.planned_len {
        mark_state(&mut row, (pages, prefixes, fence), steps, (counters, buffers), mark);
    }
    Ok(())
}
