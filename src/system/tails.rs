//! Tails of a row: its held pages of groups that do not keep everything become cells at a mark, and are given back once
//! no later token reads them.
//!
//! Not here: which places are held (`layout/limits.rs`), the cells (`prefix/cells.rs`).

use crate::fence::Fence;
use crate::id::PageId;
use crate::prefix::PrefixTree;
use crate::sequence::RowMut;

/// Turns the private pages of a row's tails at a mark, one of its `published` pages, into cells that the row uses.
/// Where the tree has a cell, the row takes it, and its own pages are appended to `freed`. Pages of new cells are
/// appended to `kept`. O(published pages behind the tails, and the tails).
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
        let mut path = prefixes.path_of(lock, published);
        for place in (held.first..mark).rev() {
            if row.cell(held.group, place).is_some() {
                continue;
            }
            let entry = prefixes.entry_at(&mut path, place);
            let own = (held.track..held.track + held.tracks).map(|t| row.track_page(t, place));
            let cell = prefixes.cell_at(held.group, entry);
            if cell.is_some() {
                freed.extend(own);
                prefixes.gain_cell(cell, fence);
                row.name_cell(&held, place, cell, prefixes.cell_pages(cell));
                row.sequence.dirty_from = row.sequence.dirty_from.min(place);
            } else {
                let cell = prefixes.create_cell(held.group, entry, own);
                kept.extend_from_slice(prefixes.cell_pages(cell));
                row.set_cell(held.group, place, cell);
            }
        }
    }
}

/// Takes the places from those that a row of `from` published pages holds up to those that one of `to` holds, or all
/// of them. Private pages are appended to `freed`, cells lose a user. O(places).
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
                prefixes.lose_cell(cell, last_step, fence);
            } else {
                let own = held.track..held.track + held.tracks;
                freed.extend(own.map(|track| row.track_page(track, place)));
            }
        }
    }
}
