//! The drafts of a batch: checks them, and writes their masks and positions into the plan.

use bumpalo::Bump;

use crate::error::Error;
use crate::plan::{BatchRow, Draft, Extend, MaskRow, check_len};
use crate::sequence::SequenceTable;
use crate::step::StepLog;

/// Checks the drafts of a checked batch. They must be in the order of the batch's items.
#[inline] // Most batches have none.
pub(crate) fn check_drafts(sequences: &SequenceTable, items: &[Extend], drafts: &[Draft<'_>]) -> Result<(), Error> {
    let mut items = items.iter();
    for draft in drafts {
        let seq = draft.seq;
        if sequences.has_states() {
            return Err(Error::StateDraft { seq });
        }
        let item = items.find(|item| item.seq == seq).ok_or(Error::DraftOrder { seq })?;
        let sequence = sequences.get(seq)?;
        let (start, len) = (sequence.planned_len, item.len);
        let max = sequence.token_len.saturating_sub(start);
        if len > max {
            return Err(Error::ExtendLen { seq, len, max }); // A token of the draft is not known.
        }
        check_len(len.into())?;
        check_tree(draft, start, len)?;
    }
    Ok(())
}

/// Checks a draft of `len` tokens that follow `start` others.
fn check_tree(draft: &Draft<'_>, start: u32, len: u32) -> Result<(), Error> {
    let Draft { seq, masks, positions } = *draft;
    if masks.is_empty() && positions.is_empty() {
        return Ok(());
    }
    if masks.len() != len as usize || positions.len() != len as usize {
        let (masks, positions) = (masks.len(), positions.len());
        return Err(Error::DraftArrays { seq, masks, positions, len });
    }
    let row = MaskRow::new(start + len, len);
    for (token, (&mask, &position)) in (0..).zip(masks.iter().zip(positions)) {
        if !row.allows(token, mask) {
            let (own, most) = (row.own(token), row.most(token));
            return Err(Error::DraftMask { seq, token, mask, own, most });
        }
        let (min, max) = (start, start + token);
        if !(min..=max).contains(&position) {
            return Err(Error::DraftPosition { seq, token, position, min, max });
        }
    }
    Ok(())
}

/// Marks the drafts as waiting for `accept`, and writes the positions of trees. Returns the masks of all tokens; none
/// if no draft is a tree.
pub(crate) fn begin_drafts<'step>(
    sequences: &mut SequenceTable,
    steps: &mut StepLog,
    items: &[Extend],
    drafts: &[Draft<'_>],
    rows: &[BatchRow],
    positions: &mut [u32],
    bump: &'step Bump,
) -> &'step [u64] {
    let has_trees = drafts.iter().any(|draft| !draft.masks.is_empty());
    let masks = bump.alloc_slice_fill_copy(if has_trees { positions.len() } else { 0 }, 0_u64);
    let mut rows = items.iter().zip(rows);
    for draft in drafts {
        let (_, row) = rows.find(|(item, _)| item.seq == draft.seq).expect("checked");
        sequences.begin_draft(draft, row.extend_len);
        steps.add_draft();
        let start = row.qo_start as usize;
        if !draft.masks.is_empty() {
            let new = start..start + row.extend_len as usize;
            masks[new.clone()].copy_from_slice(draft.masks);
            positions[new].copy_from_slice(draft.positions);
        }
    }
    masks
}
