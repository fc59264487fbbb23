//! A sequence leaves for good, or until it is resumed: publish what is computed, give up the rest through the fence.

use crate::error::Error;
use crate::id::SeqKey;
use crate::page::PagePool;
use crate::prefix::PrefixTree;
use crate::sequence::SequenceTable;
use crate::step::StepLog;
use crate::system::give_up::{give_up_lock, give_up_pages};
use crate::system::publish::publish;
use crate::world::Buffers;

/// Finishes a sequence; `keep`: its whole computed pages stay matchable. Legal while an unfinished step includes it:
/// that step's commit skips it. O(pages given up).
///
/// # Errors
/// [`Error::UnknownSequence`].
pub(crate) fn finish(
    pages: &mut PagePool,
    prefixes: &mut PrefixTree,
    sequences: &mut SequenceTable,
    steps: &mut StepLog,
    buffers: &mut Buffers,
    seq: SeqKey,
    keep: bool,
) -> Result<(), Error> {
    if !sequences.get(seq)?.is_preempted() {
        leave(pages, prefixes, sequences, steps, buffers, seq, keep);
    }
    sequences.despawn(seq);
    Ok(())
}

/// Preempts a sequence: it keeps its tokens and its row, and nothing else. O(pages given up).
///
/// # Errors
/// [`Error::UnknownSequence`], [`Error::Preempted`].
pub(crate) fn preempt(
    pages: &mut PagePool,
    prefixes: &mut PrefixTree,
    sequences: &mut SequenceTable,
    steps: &mut StepLog,
    buffers: &mut Buffers,
    seq: SeqKey,
    keep: bool,
) -> Result<(), Error> {
    sequences.running(seq)?;
    leave(pages, prefixes, sequences, steps, buffers, seq, keep);
    sequences.clear_pages(seq);
    Ok(())
}

/// Gives up a running sequence's pages and prefix.
fn leave(
    pages: &mut PagePool,
    prefixes: &mut PrefixTree,
    sequences: &mut SequenceTable,
    steps: &mut StepLog,
    buffers: &mut Buffers,
    seq: SeqKey,
    keep: bool,
) {
    if keep {
        publish(pages, prefixes, sequences, steps, buffers, seq);
    }
    let sequence = sequences.get_mut(seq).expect("the caller looked it up");
    let (published, last_step) = (sequence.published, sequence.last_step);
    let lock = sequence.lock.take().expect("a running sequence holds its prefix");
    buffers.freed.clear();
    sequences.truncate_pages(seq, published, &mut buffers.freed);
    give_up_pages(pages, steps, last_step, &buffers.freed);
    give_up_lock(pages, prefixes, steps, last_step, lock, &mut buffers.freed);
}
