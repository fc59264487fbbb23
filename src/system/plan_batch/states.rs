//! The states of a plan's rows that are not steady: which pages their layers read and write.

use crate::error::Error;
use crate::id::{PageId, SeqKey, StepId};
use crate::plan::{Extend, TableWrite};
use crate::sequence::{RowMut, SequenceTable, StateNeed};
use crate::step::StepLog;

use super::Needs;

/// Returns the row of a checked item, unless its state is steady.
fn undecided(sequences: &mut SequenceTable, seq: SeqKey) -> Option<RowMut<'_>> {
    let row = sequences.row_mut(seq).expect("checked");
    (!row.sequence.dirty_from.is_steady()).then_some(row)
}

/// Decides the states that items read and write, and adds the pages of those that rows cannot do without to the needs.
/// Returns the number of rows that could take another state, to keep the current one.
///
/// # Errors
/// [`Error::StateLost`], [`Error::CrossesMark`].
#[cold]
pub(super) fn check(sequences: &mut SequenceTable, items: &[Extend], needs: &mut Needs) -> Result<u32, Error> {
    let mut optional = 0;
    for &Extend { seq, len } in items {
        let Some(mut row) = undecided(sequences, seq) else { continue };
        let pages = u64::from(row.limits().state_pages());
        let end = row.sequence.planned_len + len;
        match row.next_mark() {
            Some(mark) if end > mark => return Err(Error::CrossesMark { seq, mark }),
            _ => {}
        }
        match row.begin_state() {
            None => return Err(Error::StateLost { seq }),
            Some(StateNeed::InPlace) => {}
            Some(StateNeed::Optional) => optional += 1,
            Some(StateNeed::Pages) => {
                needs.pages += pages;
                let is_promised = row.sequence.promised > 0 && row.owns_no_state();
                needs.promised += if is_promised { pages } else { 0 };
            }
        }
    }
    Ok(optional)
}

/// Lets the first `granted` rows that could take another state take it; the others update theirs in place, and give up
/// the marks at which these wait. Adds the pages and the page table words of all states to the needs. Returns the
/// number of marks given up.
pub(super) fn grant(sequences: &mut SequenceTable, items: &[Extend], mut granted: u32, needs: &mut Needs) -> u32 {
    let mut given_up = 0;
    for item in items {
        let Some(mut row) = undecided(sequences, item.seq) else { continue };
        if row.begin_state() == Some(StateNeed::Optional) {
            if granted > 0 {
                granted -= 1;
                needs.pages += u64::from(row.limits().state_pages());
            } else {
                row.give_up_mark();
            }
        }
        given_up += u32::from(row.gives_up_mark());
        needs.table_writes += row.state_writes() as usize;
    }
    given_up
}

/// Takes the pages of the states of a step's items, whose other tables are written, and writes the changed words to
/// `writes`.
pub(super) fn write(
    sequences: &mut SequenceTable,
    steps: &mut StepLog,
    (step, items): (StepId, &[Extend]),
    new_pages: &mut &[PageId],
    writes: &mut &mut [TableWrite],
) {
    for (number, item) in steps.items_of(step).zip(items) {
        let Some(mut row) = undecided(sequences, item.seq) else { continue };
        let used = row.plan_state(item.len, new_pages, writes);
        steps.set_state(number, used);
    }
}
