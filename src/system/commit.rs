//! Commits steps: `cached_len` advances, and whole pages become matchable.

use crate::config::EngineShape;
use crate::error::Error;
use crate::fence::Fence;
use crate::id::StepId;
use crate::page::PagePool;
use crate::prefix::PrefixTree;
use crate::sequence::{AdmissionKind, Sequence, SequenceTable};
use crate::stats::Stats;
use crate::step::StepLog;
use crate::system::access::access;
use crate::system::publish::Publisher;
use crate::system::states::commit_states;
use crate::world::{Buffers, World};

access! {
    /// Tables of [`commit`].
    struct Commit of &mut World {
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

/// Implements [`Engine::commit`](crate::Engine::commit). O(batch and pages published).
///
/// # Errors
/// [`Error::UnknownStep`] for a step that is not open, [`Error::StepOrder`] if an earlier step is open,
/// [`Error::NotAccepted`] for drafts without an accepted branch.
pub(crate) fn commit(world: Commit<'_>, step: StepId) -> Result<(), Error> {
    let Commit { shape, pages, prefixes, sequences, steps, fence, counters, buffers } = world;
    steps.check_commit(step)?;
    if steps.has_drafts(step) {
        check_accepted(sequences, steps, step)?;
    }
    prefixes.events().into_iter().for_each(|events| events.publish_as_of(step));
    buffers.pages.clear();
    let mut publisher = Publisher { pages, prefixes, fence, buffers };
    let publisher = shape.publishes().then_some(&mut publisher);
    commit_items(sequences, steps, counters, publisher, step);
    pages.publish(&buffers.pages);
    if sequences.has_states() {
        commit_states((pages, prefixes, fence), sequences, steps, (counters, buffers), step);
    }
    steps.close(step);
    Ok(())
}

/// Commits the items of a step. The publisher, if there is one, publishes their whole pages.
fn commit_items(
    sequences: &mut SequenceTable,
    steps: &StepLog,
    counters: &mut Stats,
    mut publisher: Option<&mut Publisher<'_>>,
    step: StepId,
) {
    for number in steps.items_of(step) {
        let item = steps.item(number);
        let Ok(row) = sequences.row_mut(item.seq) else { continue };
        if row.sequence.preemption_epoch != item.preemption_epoch {
            continue;
        }
        row.sequence.cached_len = row.sequence.cached_len.max(item.end);
        if row.sequence.admission_kind != AdmissionKind::COUNTED {
            count_admission(row.sequence, item.start, counters);
        }
        counters.computed_tokens += u64::from(item.end - item.start);
        if let Some(publisher) = &mut publisher {
            publisher.insert(row);
        }
    }
}

/// Rejects a step with drafts that wait for `accept`, unless their sequence is finished.
#[cold]
fn check_accepted(sequences: &SequenceTable, steps: &StepLog, step: StepId) -> Result<(), Error> {
    for number in steps.items_of(step) {
        let seq = steps.item(number).seq;
        // A sequence with waiting drafts is not planned again, so the drafts are its last item.
        let waits = |sequence: &Sequence| sequence.is_drafted() && sequence.last_item == number;
        if sequences.get(seq).is_ok_and(waits) {
            return Err(Error::NotAccepted { seq, step });
        }
    }
    Ok(())
}

/// Counts a prompt or a resumed sequence at its first commit. `start` is the length of its hit.
#[cold]
fn count_admission(sequence: &mut Sequence, start: u32, counters: &mut Stats) {
    let kind = std::mem::replace(&mut sequence.admission_kind, AdmissionKind::COUNTED);
    let mut prompt_hit = 0;
    if kind != AdmissionKind::RESUMED {
        // A prompt that was preempted before its first commit may have more tokens by now.
        prompt_hit = start.min(kind.prompt_len());
        counters.prompts += 1;
        counters.prompt_tokens += u64::from(kind.prompt_len());
        counters.hit_tokens += u64::from(prompt_hit);
    }
    counters.resume_hit_tokens += u64::from(start - prompt_hit);
}
