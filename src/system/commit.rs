//! A step's tokens have K and V: `cached_len` advances, and whole pages become matchable.

use crate::config::PrefixMode;
use crate::error::Error;
use crate::id::StepId;
use crate::system::publish::insert;
use crate::world::World;

/// Commits a planned step. Sequences that were finished or preempted since are skipped. O(batch and pages published).
///
/// # Errors
/// [`Error::UnknownStep`] for a step that is not open, [`Error::StepOrder`] if an earlier one is.
pub(crate) fn commit(world: &mut World, prefix: PrefixMode, step: StepId) -> Result<(), Error> {
    let World { pages, prefixes, sequences, steps, counters, buffers } = world;
    steps.check_commit(step)?;
    buffers.pages.clear();
    for number in steps.items_of(step) {
        let item = steps.item(number);
        let Ok(mut row) = sequences.row_mut(item.seq) else { continue };
        if row.sequence.life != item.life {
            continue;
        }
        row.sequence.cached_len = row.sequence.cached_len.max(item.end);
        counters.computed_tokens += u64::from(item.end - item.start);
        if prefix == PrefixMode::Radix {
            insert(pages, prefixes, &mut row, steps, buffers);
        }
    }
    pages.publish(&buffers.pages);
    steps.close(step);
    Ok(())
}
