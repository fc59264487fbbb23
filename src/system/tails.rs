//! Tails: the pages that the next token reads in the groups of limited reach. A row's tails become cells at a mark, and
//! the row gives their places back once no later token reads them.
//!
//! `layout/limits.rs` computes the places, and `prefix/cells.rs` stores the cells.

use crate::fence::Fence;
use crate::id::PageId;
use crate::prefix::PrefixTree;
use crate::sequence::RowMut;

/// Makes cells of a row's private tail pages at a mark, which is within its `published` pages. The row becomes a user
/// of these cells; their pages are appended to `kept`. At an entry with a cell, the row takes that cell instead, and
/// its own pages are appended to `freed`. A cell in swap memory alone takes the row's pages. O(published pages after
/// the mark, and the tails).
pub(crate) fn keep_tails(
    row: &mut RowMut<'_>,
    prefixes: &mut PrefixTree,
    fence: &mut Fence,
    published: u32,
    mark: u32,
    kept: &mut Vec<PageId>,
    freed: &mut Vec<PageId>,
) {
    let limits = *row.limits();
    row.set_kept(mark);
    for held in limits.held_groups(mark) {
        let lock = row.sequence.lock.as_ref().expect("a running sequence holds its prefix");
        let (scope, mut path) = (lock.scope(), prefixes.nodes().path_of(lock, published));
        for place in (held.first..mark).rev() {
            if row.cell(held.group, place).is_some() {
                continue;
            }
            let entry = prefixes.nodes().entry_at(&mut path, place);
            let own = (held.track..held.track + held.tracks).map(|t| row.track_page(t, place));
            let cell = prefixes.cells().at(held.group, entry);
            if cell.is_some() && !prefixes.cells().is_on_device(cell) {
                prefixes.acquire_cell(cell, fence);
                prefixes.restore_cell(cell, own);
                kept.extend_from_slice(prefixes.cells().pages(cell));
                row.set_cell(held.group, place, cell);
            } else if cell.is_some() {
                freed.extend(own);
                prefixes.acquire_cell(cell, fence);
                row.name_cell(&held, place, cell, prefixes.cells().pages(cell));
                row.sequence.dirty_from.lower(place);
            } else {
                let cell = prefixes.create_cell(scope, held.group, entry, own);
                kept.extend_from_slice(prefixes.cells().pages(cell));
                row.set_cell(held.group, place, cell);
            }
        }
    }
}

/// Writes the cells of a row's tails, which end at its last published page, into the row's places. The row already uses
/// the cells. O(tails).
pub(crate) fn name_tails(row: &mut RowMut<'_>, prefixes: &PrefixTree) {
    let (limits, pages) = (*row.limits(), row.sequence.published);
    let lock = row.sequence.lock.as_ref().expect("a running sequence holds its prefix");
    for tail in prefixes.nodes().lock_tails(&limits, lock, pages) {
        let cell = prefixes.cells().at(tail.held.group, tail.entry);
        if limits.state().is_some_and(|state| state.group == tail.held.group) {
            row.name_state(cell, prefixes.cells().pages(cell));
        } else {
            row.name_cell(&tail.held, tail.place, cell, prefixes.cells().pages(cell));
        }
    }
}

/// Gives back the places that a row keeps with `from` published pages but not with `to`; all its places if `to` is
/// `None`. Private pages are appended to `freed`; cells lose a user. O(places).
pub(crate) fn give_back(
    row: &mut RowMut<'_>,
    prefixes: &mut PrefixTree,
    fence: &mut Fence,
    from: u32,
    to: Option<u32>,
    freed: &mut Vec<PageId>,
) {
    let limits = *row.limits();
    let last_step = row.sequence.last_step;
    let ends = limits.held_groups(to.unwrap_or(from));
    for (held, end) in limits.held_groups(from).zip(ends) {
        let end = if to.is_some() { end.first } else { row.sequence.page_len };
        for place in held.first..end {
            let cell = row.cell(held.group, place);
            if cell.is_some() {
                prefixes.release_cell(cell, last_step, fence);
            } else {
                let own = held.track..held.track + held.tracks;
                freed.extend(own.map(|track| row.track_page(track, place)));
            }
        }
    }
}
