//! Accepts a branch of a sequence's verified drafts, and drops the other drafts.
//!
//! Drafts of other branches may lie between the tokens of the branch. A token's slot follows from its place in the
//! sequence, so backends move K and V of the branch to consecutive places before the commit.

use crate::config::EngineShape;
use crate::error::Error;
use crate::fence::Fence;
use crate::id::StepId;
use crate::page::PagePool;
use crate::plan::{Branch, Compaction};
use crate::sequence::SequenceTable;
use crate::stats::Stats;
use crate::step::{StepItem, StepLog};
use crate::system::access::access;
use crate::system::release::release_pages;
use crate::world::{Buffers, World};

access! {
    /// Tables of [`check_branches`] and [`accept`].
    struct Accept of &mut World {
        shape: &EngineShape,
        pages: &mut PagePool,
        sequences: &mut SequenceTable,
        steps: &mut StepLog,
        fence: &mut Fence,
        counters: &mut Stats,
        buffers: &mut Buffers,
    }
}

/// Checks the branches of a step's drafts, and writes the moves for backends into the buffers. O(tokens kept).
///
/// # Errors
/// [`Error::UnknownStep`]. For a branch [`Error::UnknownSequence`], [`Error::Preempted`], [`Error::NotDrafted`],
/// [`Error::RepeatedSequence`] if it is repeated or out of order, [`Error::NotABranch`], [`Error::RollbackLen`] if no
/// token would be left.
pub(crate) fn check_branches(world: &mut Accept<'_>, step: StepId, branches: &[Branch<'_>]) -> Result<(), Error> {
    let Accept { sequences, steps, buffers, .. } = world;
    steps.check_abort(step)?;
    buffers.compactions.clear();
    let mut before = 0;
    for &Branch { seq, tokens } in branches {
        let sequence = sequences.running(seq)?;
        let number = sequence.last_item;
        if !sequence.is_drafted() || !steps.items_of(step).contains(&number) {
            return Err(Error::NotDrafted { seq, step });
        }
        if number <= before {
            return Err(Error::RepeatedSequence { seq });
        }
        before = number;
        if let Some(place) = sequences.first_invalid(sequence, tokens) {
            return Err(Error::NotABranch { seq, place, token: tokens[place] });
        }
        let (first, max) = (steps.item(number).start, sequence.token_len);
        if first == 0 && tokens.is_empty() {
            return Err(Error::RollbackLen { len: 0, min: 1, max });
        }
        let keep = tokens.iter().fold(0, |keep, token| keep | 1_u64 << token);
        // A kept prefix of the drafts does not move.
        if keep & keep.wrapping_add(1) != 0 {
            buffers.compactions.push(Compaction { row: sequence.row, first, keep });
        }
    }
    Ok(())
}

/// Accepts checked branches, whose K and V the backend has moved. O(drafts, and pages released).
pub(crate) fn accept(world: Accept<'_>, step: StepId, branches: &[Branch<'_>]) {
    let Accept { shape, pages, sequences, steps, fence, counters, buffers } = world;
    let page_size = shape.layout.page_size();
    for &Branch { seq, tokens } in branches {
        let sequence = sequences.get(seq).expect("checked");
        let (number, last_step) = (sequence.last_item, sequence.last_step);
        let StepItem { start, end: drafted, .. } = steps.item(number);
        let sampled = u64::from(sequences.has_one_root(sequence, drafted - start));
        counters.drafts += 1;
        counters.draft_tokens += u64::from(drafted - start) - sampled;
        counters.accepted_tokens += (tokens.len() as u64).saturating_sub(sampled);
        let end = start + tokens.len() as u32;
        let in_place = (0..).zip(tokens).take_while(|(place, token)| place == *token).count();
        sequences.cut(seq, start + in_place as u32);
        let mut row = sequences.row_mut(seq).expect("checked");
        row.keep_tokens(start, tokens);
        row.sequence.end_draft();
        row.sequence.planned_len = end;
        steps.accept(step, number, end);
        buffers.pool_pages.clear();
        sequences.truncate_pages(seq, end.div_ceil(page_size), &mut buffers.pool_pages);
        sequences.truncate_tokens(seq, end);
        sequences.row_mut(seq).expect("checked").advance_front();
        release_pages(pages, fence, last_step, &buffers.pool_pages);
    }
}
