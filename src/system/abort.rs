//! Undoes plans: lengths return to their earlier values, pages go through the fence, and nothing is published.

use crate::config::EngineShape;
use crate::error::Error;
use crate::fence::Fence;
use crate::id::StepId;
use crate::page::PagePool;
use crate::sequence::SequenceTable;
use crate::stats::Stats;
use crate::step::StepLog;
use crate::system::access::access;
use crate::system::release::release_pages;
use crate::system::states::undo_state;
use crate::world::{Buffers, World};

access! {
    /// Tables of [`abort`].
    struct Abort of &mut World {
        shape: &EngineShape,
        pages: &mut PagePool,
        sequences: &mut SequenceTable,
        steps: &mut StepLog,
        fence: &mut Fence,
        counters: &mut Stats,
        buffers: &mut Buffers,
    }
}

/// Implements [`Engine::abort`](crate::Engine::abort). O(items undone and pages released). If the steps `may_have_run`,
/// states that they update in place are lost.
///
/// Appended tokens stay, including drafts. The host rolls them back if the aborted steps sampled them.
///
/// # Errors
/// [`Error::UnknownStep`] for a step that is not open.
pub(crate) fn abort(mut world: Abort<'_>, step: StepId, may_have_run: bool) -> Result<(), Error> {
    world.steps.check_abort(step)?;
    for raw in (step.raw()..=world.steps.newest().raw()).rev() {
        let step = StepId::new(raw);
        if !world.steps.is_open(step) {
            continue; // Page copies contain committed tokens, so they stay.
        }
        for number in world.steps.items_of(step).rev() {
            undo(&mut world, number, may_have_run);
        }
        world.steps.close(step);
        world.counters.aborts += 1;
    }
    Ok(())
}

fn undo(world: &mut Abort<'_>, number: u64, may_have_run: bool) {
    let Abort { shape, pages, sequences, steps, fence, buffers, .. } = world;
    let item = steps.item(number);
    let Ok(sequence) = sequences.get_mut(item.seq) else { return };
    if sequence.preemption_epoch != item.preemption_epoch {
        return;
    }
    if sequence.is_drafted() {
        sequence.end_draft(); // No later plan exists while drafts wait, so the drafts belong to this item.
    }
    sequence.planned_len = sequence.planned_len.min(item.start);
    // The words of the aborted plan must be sent again.
    sequence.dirty_from.lower(item.dirty_from);
    sequence.last_item = item.previous;
    let page_len = sequence.planned_len.div_ceil(shape.layout.page_size());
    let last_step = sequence.last_step;
    buffers.pool_pages.clear();
    sequences.truncate_pages(item.seq, page_len, &mut buffers.pool_pages);
    if sequences.has_states() {
        let mut row = sequences.row_mut(item.seq).expect("just seen");
        undo_state(&mut row, &item, may_have_run, &mut buffers.pool_pages);
    }
    release_pages(pages, fence, last_step, &buffers.pool_pages);
}
