//! Finishes or preempts a sequence: publishes its computed pages unless the caller drops them or prompts share no
//! prefixes, releases the rest through the fence, and ends its promise.

use crate::config::EngineShape;
use crate::error::Error;
use crate::fence::Fence;
use crate::id::SeqKey;
use crate::page::PagePool;
use crate::plan::Keep;
use crate::prefix::PrefixTree;
use crate::sequence::SequenceTable;
use crate::stats::Stats;
use crate::system::access::access;
use crate::system::publish::{keep as keep_at_end, publish};
use crate::system::release::{release_lock, release_pages};
use crate::system::states::leave_states;
use crate::system::tails::give_back;
use crate::world::{Buffers, World};

access! {
    /// Tables of [`finish`] and [`preempt`].
    struct Finish of &mut World {
        shape: &EngineShape,
        pages: &mut PagePool,
        prefixes: &mut PrefixTree,
        sequences: &mut SequenceTable,
        fence: &mut Fence,
        counters: &mut Stats,
        buffers: &mut Buffers,
    }
}

/// Implements [`Engine::finish_with`](crate::Engine::finish_with). O(pages published or released, and nodes that become
/// idle or deferred).
///
/// # Errors
/// [`Error::UnknownSequence`].
pub(crate) fn finish(mut world: Finish<'_>, seq: SeqKey, keep: Keep) -> Result<(), Error> {
    let sequence = world.sequences.get(seq)?;
    let namespace = sequence.namespace;
    if !sequence.is_preempted() {
        release(&mut world, seq, keep);
    }
    world.sequences.despawn(seq);
    world.prefixes.names.release(namespace);
    Ok(())
}

/// Implements [`Engine::preempt`](crate::Engine::preempt). As expensive as [`finish`].
///
/// # Errors
/// [`Error::UnknownSequence`], [`Error::Preempted`], [`Error::NotAccepted`].
pub(crate) fn preempt(mut world: Finish<'_>, seq: SeqKey, keep: Keep) -> Result<(), Error> {
    world.sequences.running(seq)?;
    world.sequences.check_accepted(seq)?;
    release(&mut world, seq, keep);
    world.sequences.clear_pages(seq);
    world.counters.preemptions += 1;
    Ok(())
}

fn release(world: &mut Finish<'_>, seq: SeqKey, keep: Keep) {
    let Finish { shape, pages, prefixes, sequences, fence, buffers, .. } = world;
    sequences.promise(seq, 0);
    if keep == Keep::Publish && shape.shares_prefixes() {
        publish(pages, prefixes, sequences, fence, buffers, seq);
        if !sequences.has_states() {
            keep_at_end(pages, prefixes, sequences, fence, buffers, seq);
        }
    }
    let pending = sequences.pending(sequences.get(seq).expect("the caller looked it up"));
    let sequence = sequences.get_mut(seq).expect("the caller looked it up");
    let (published, last_step) = (sequence.published, sequence.last_step);
    let lock = sequence.lock.take().expect("a running sequence holds its prefix");
    sequences.row_mut(seq).expect("just seen").drop_front();
    buffers.pool_pages.clear();
    sequences.truncate_pages(seq, published, &mut buffers.pool_pages);
    if pending > 0 {
        // No step reads the cells: a sequence with pending pages is in no plan.
        prefixes.release_tails(&lock, published + pending, fence);
    } else if prefixes.has_cells() {
        let mut row = sequences.row_mut(seq).expect("just seen");
        give_back(&mut row, prefixes, fence, published, None, &mut buffers.pool_pages);
        if row.has_state() {
            leave_states(&mut row, prefixes, fence, &mut buffers.pool_pages);
        }
    }
    release_pages(pages, fence, last_step, &buffers.pool_pages);
    release_lock(pages, prefixes, fence, last_step, lock, &mut buffers.pool_pages);
}
