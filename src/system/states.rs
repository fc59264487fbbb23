//! States of rows: at a mark, a row's state becomes a cell, which the next item reads. A row leaves the places that it
//! no longer reads.
//!
//! No state is copied: an item that reads a cell writes pages of its row. `sequence/states.rs` has the places of a row.

use crate::fence::Fence;
use crate::id::{PageId, StateUse, StepId};
use crate::page::PagePool;
use crate::prefix::PrefixTree;
use crate::sequence::{Current, RowMut, Sequence, SequenceTable, StateOwner, StatePlace};
use crate::stats::Stats;
use crate::step::{StepItem, StepLog};
use crate::system::release::release_pages;
use crate::world::Buffers;

/// Commits the states of a step's items, whose whole pages are published: rows leave the places that the items read and
/// did not write, and states at marks become cells. O(items, and pages of states kept or left).
#[cold]
pub(crate) fn commit_states(
    (pages, prefixes, fence): (&mut PagePool, &mut PrefixTree, &mut Fence),
    sequences: &mut SequenceTable,
    steps: &StepLog,
    (counters, buffers): (&mut Stats, &mut Buffers),
    step: StepId,
) {
    for number in steps.items_of(step) {
        let item = steps.item(number);
        if item.state == StateUse::default() {
            continue; // A steady row leaves no place, and meets no mark.
        }
        let Ok(mut row) = sequences.row_mut(item.seq) else { continue };
        if row.sequence.preemption_epoch != item.preemption_epoch {
            continue;
        }
        let before = row.outstanding();
        let freed = &mut buffers.pool_pages;
        freed.clear();
        if item.state.reads > 0 && item.state.reads != item.state.writes {
            let superseded = std::mem::take(&mut row.states_mut().supersedes);
            let is_last = leave(&mut row, prefixes, fence, item.state.reads - 1, superseded, freed);
            counters.superseded_states += u64::from(is_last);
        }
        counters.kept_states += u64::from(keep_item(&mut row, pages, prefixes, fence, &item, freed));
        row.recount_outstanding(before);
        release_pages(pages, fence, row.sequence.last_step, freed);
    }
}

/// Keeps the state that an item wrote, if the item ended at a mark. Returns whether the state is a cell now.
fn keep_item(
    row: &mut RowMut<'_>,
    pages: &mut PagePool,
    prefixes: &mut PrefixTree,
    fence: &mut Fence,
    item: &StepItem,
    freed: &mut Vec<PageId>,
) -> bool {
    let at = item.state.writes - 1;
    let StatePlace { mark, is_junction, .. } = row.states().places[usize::from(at)];
    if mark == 0 || mark * prefixes.page_size() != item.end || item.cut {
        return false;
    }
    let place = &mut row.states_mut().places[usize::from(at)];
    (place.len, place.mark, place.is_junction) = (item.end, 0, false);
    keep_state(row, pages, prefixes, fence, (at, mark, is_junction), freed)
}

/// Makes a cell of the row's own state in a place, which is behind `mark` pages. At an entry with a cell, the row uses
/// that cell instead, and its own pages are appended to `freed`. Returns false if a promise needs the pages, or if the
/// pages before the mark are not published, because their tokens are unknown.
fn keep_state(
    row: &mut RowMut<'_>,
    pages: &mut PagePool,
    prefixes: &mut PrefixTree,
    fence: &mut Fence,
    (at, mark, is_junction): (u8, u32, bool),
    freed: &mut Vec<PageId>,
) -> bool {
    let backing = pages.free_count() + pages.fenced_count() + prefixes.size_info().evictable + freed.len() as u32;
    let published = row.sequence.published;
    if published < mark || row.all_outstanding() + row.state_cost() > backing {
        return false;
    }
    let state = row.limits().state().expect("a group keeps a state");
    let lock = row.sequence.lock.as_ref().expect("a running sequence holds its prefix");
    let (scope, nodes) = (lock.scope(), prefixes.nodes());
    let entry = nodes.entry_at(&mut nodes.path_of(lock, published), mark - 1);
    let mut cell = prefixes.cells().at(state.group, entry);
    let own = row.state_pages(at);
    if cell.is_some() && prefixes.cells().is_on_device(cell) {
        freed.extend_from_slice(own);
        prefixes.acquire_cell(cell, fence);
        let place = StatePlace { owner: StateOwner::Cell(cell), ..row.states().places[usize::from(at)] };
        row.put_state(at, place, prefixes.cells().pages(cell));
    } else {
        pages.publish(own);
        if cell.is_some() {
            prefixes.acquire_cell(cell, fence);
            prefixes.restore_cell(cell, own.iter().copied());
        } else {
            cell = prefixes.create_cell(scope, state.group, entry, own.iter().copied());
        }
        row.states_mut().places[usize::from(at)].owner = StateOwner::Cell(cell);
    }
    if is_junction {
        prefixes.cells_mut().keep_age(cell);
    }
    true
}

/// Marks the place behind the planned tokens of a row, `mark` pages: a state that is committed becomes a cell now,
/// another one when its item commits.
pub(crate) fn mark_state(
    row: &mut RowMut<'_>,
    (pages, prefixes, fence): (&mut PagePool, &mut PrefixTree, &mut Fence),
    steps: &mut StepLog,
    (counters, buffers): (&mut Stats, &mut Buffers),
    mark: u32,
) {
    let Current::At(at) = row.states().current else { return };
    let Sequence { cached_len, planned_len, last_item, .. } = *row.sequence;
    let place = &mut row.states_mut().places[usize::from(at)];
    match place.owner {
        StateOwner::Cell(cell) => prefixes.cells_mut().keep_age(cell),
        _ if planned_len > cached_len => {
            (place.mark, place.is_junction) = (mark, true);
            if steps.item(last_item).state == StateUse::default() {
                steps.set_state(last_item, StateUse { reads: at + 1, writes: at + 1 });
            }
        }
        _ => {
            place.len = planned_len;
            let before = row.outstanding();
            buffers.pool_pages.clear();
            let kept = keep_state(row, pages, prefixes, fence, (at, mark, true), &mut buffers.pool_pages);
            counters.kept_states += u64::from(kept);
            row.recount_outstanding(before);
            release_pages(pages, fence, row.sequence.last_step, &buffers.pool_pages);
        }
    }
}

/// Undoes the use of a state by an item, whose sequence has its earlier lengths again. A state that the item updates in
/// place is lost if the item `may_have_run`. Pages that the item took are appended to `freed`.
pub(crate) fn undo_state(row: &mut RowMut<'_>, item: &StepItem, may_have_run: bool, freed: &mut Vec<PageId>) {
    let before = row.outstanding();
    row.resend_state();
    let StepItem { state, .. } = *item;
    let planned_len = row.sequence.planned_len;
    if state.reads == state.writes {
        let states = row.states_mut();
        if let Some(at) = state.writes.checked_sub(1) {
            let place = &mut states.places[usize::from(at)];
            (place.mark, place.is_junction) = (0, false);
        }
        if may_have_run {
            (states.current, states.lost_at) = (Current::Lost, planned_len);
        }
        return;
    }
    let at = state.writes - 1;
    freed.extend_from_slice(row.state_pages(at));
    row.leave_state(at);
    // A rollback may have removed tokens before the item.
    let states = row.states_mut();
    states.current = match state.reads.checked_sub(1) {
        None if planned_len == 0 => Current::Fresh,
        Some(place) if states.places[usize::from(place)].len == planned_len => Current::At(place),
        _ => Current::Lost,
    };
    states.lost_at = if states.current == Current::Lost { planned_len } else { 0 };
    row.recount_outstanding(before);
}

/// Leaves all places of a row. Its own pages are appended to `freed`; cells lose a user. O(pages of its states).
pub(crate) fn leave_states(
    row: &mut RowMut<'_>,
    prefixes: &mut PrefixTree,
    fence: &mut Fence,
    freed: &mut Vec<PageId>,
) {
    for at in 0..row.states().places.len() as u8 {
        leave(row, prefixes, fence, at, false, freed);
    }
    row.states_mut().current = Current::Fresh;
}

/// Leaves a place of a row. Returns whether the row was the last user of a cell that is superseded now.
fn leave(
    row: &mut RowMut<'_>,
    prefixes: &mut PrefixTree,
    fence: &mut Fence,
    at: u8,
    superseded: bool,
    freed: &mut Vec<PageId>,
) -> bool {
    if row.states().places[usize::from(at)].owner == StateOwner::Row {
        freed.extend_from_slice(row.state_pages(at));
    }
    match row.leave_state(at) {
        StateOwner::Cell(cell) => prefixes.release_state(cell, row.sequence.last_step, superseded, fence),
        _ => false,
    }
}
