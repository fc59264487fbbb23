//! Publishes whole computed pages of a sequence: adds them to the tree, and releases duplicates of the tree's pages.

use crate::fence::Fence;
use crate::id::SeqKey;
use crate::page::PagePool;
use crate::prefix::PrefixTree;
use crate::sequence::{RowMut, SequenceTable};
use crate::system::release::release_pages;
use crate::system::tails::{give_back, keep_tails};
use crate::world::Buffers;

/// Publishes a running sequence's whole pages of known, computed tokens. If the tree already has some of these pages,
/// the row switches to the tree's pages and releases its own. With groups, it also keeps the tails at the marks that it
/// reaches, and releases the pages that no later token reads. O(pages published, and tails kept).
pub(crate) fn publish(
    pages: &mut PagePool,
    prefixes: &mut PrefixTree,
    sequences: &mut SequenceTable,
    fence: &mut Fence,
    buffers: &mut Buffers,
    seq: SeqKey,
) {
    let row = sequences.row_mut(seq).expect("the caller looked it up");
    if row.pending() > 0 {
        return; // The sequence has computed no page.
    }
    prefixes.events().into_iter().for_each(|events| events.publish_as_of(row.sequence.last_step));
    buffers.pages.clear();
    Publisher { pages, prefixes, fence, buffers }.insert(row);
    pages.publish(&buffers.pages);
}

/// Keeps the tails at the end of a running sequence's published pages. The caller ensures that this breaks no promise.
/// O(tails).
pub(crate) fn keep(
    pages: &mut PagePool,
    prefixes: &mut PrefixTree,
    sequences: &mut SequenceTable,
    fence: &mut Fence,
    buffers: &mut Buffers,
    seq: SeqKey,
) {
    if !prefixes.has_cells() {
        return;
    }
    let mut row = sequences.row_mut(seq).expect("the caller looked it up");
    if row.pending() > 0 {
        return; // The tails already are cells, and the row waits for their load.
    }
    let Buffers { pages: kept, pool_pages: freed, .. } = buffers;
    kept.clear();
    freed.clear();
    let mark = row.sequence.published;
    keep_tails(&mut row, prefixes, fence, mark, mark, kept, freed);
    pages.publish(kept);
    release_pages(pages, fence, row.sequence.last_step, freed);
}

pub(crate) struct Publisher<'a> {
    pub pages: &'a mut PagePool,
    pub prefixes: &'a mut PrefixTree,
    pub fence: &'a mut Fence,
    pub buffers: &'a mut Buffers,
}

impl Publisher<'_> {
    /// Publishes a row as [`publish`] does, but only appends the pages that now belong to the tree to `buffers.pages`.
    /// The caller then changes the states of several sequences' pages together. Most commits of a decoding sequence
    /// publish no page: the check before the call saves 8 % of a step's instructions at page_size 16.
    #[inline]
    pub fn insert(&mut self, row: RowMut<'_>) {
        if computed(&row) >= (row.sequence.published + 1) * self.prefixes.page_size() {
            self.insert_pages(row);
        }
    }

    /// Inserts at least one whole page.
    #[inline(never)] // Saves 5 % of a step at page_size 16.
    fn insert_pages(&mut self, mut row: RowMut<'_>) {
        let Self { pages, prefixes, fence, buffers } = self;
        let (mut at, end) = (row.sequence.published, computed(&row) / prefixes.page_size());
        // The buffer has space for one row's pages, and must not grow.
        if buffers.pages.len() + (end - at) as usize > buffers.pages.capacity() {
            pages.publish(&buffers.pages);
            buffers.pages.clear();
        }
        let mut lock = row.sequence.lock.take().expect("a running sequence holds its prefix");
        buffers.pool_pages.clear();
        while at < end {
            let (tokens, own) = row.piece_mut(at, end);
            let inserted = prefixes.insert(&mut lock, tokens, own, &mut buffers.pool_pages, fence);
            buffers.pages.extend_from_slice(&own[inserted.duplicates as usize..]);
            let len = own.len() as u32;
            if inserted.duplicates > 0 {
                row.sequence.dirty_from.lower(at);
            }
            at += len;
        }
        row.sequence.lock = Some(lock);
        if prefixes.has_cells() {
            self.publish_tails(&mut row, end);
        } else {
            row.sequence.published = end;
        }
        row.advance_front();
        release_pages(self.pages, self.fence, row.sequence.last_step, &self.buffers.pool_pages);
    }

    /// Keeps the tails at the marks within `end` published pages, and gives back the pages that no later token reads.
    fn publish_tails(&mut self, row: &mut RowMut<'_>, end: u32) {
        let Self { pages, prefixes, fence, buffers } = self;
        let Buffers { pages: kept, pool_pages: freed, .. } = &mut **buffers;
        let before = row.sequence.published;
        while let Some(mark) = row.take_mark(end) {
            if kept.len() as u64 + row.most_kept() > kept.capacity() as u64 {
                pages.publish(kept);
                kept.clear();
            }
            if may_keep(row, prefixes, pages, mark, before) {
                keep_tails(row, prefixes, fence, end, mark, kept, freed);
            }
        }
        row.publish_to(end);
        give_back(row, prefixes, fence, before, Some(end), freed);
    }
}

/// Returns whether a row of `published` pages may keep its tails at a mark. A cell backs no promise, so tails that
/// would break W4 are not kept.
pub(crate) fn may_keep(row: &RowMut<'_>, prefixes: &PrefixTree, pages: &PagePool, mark: u32, published: u32) -> bool {
    let evictable = prefixes.size_info().evictable;
    let backing = pages.free_count() + pages.fenced_count() + evictable;
    row.all_outstanding() + row.keep_cost(mark, published) <= backing
}

/// Returns the number of known tokens that have K and V.
fn computed(row: &RowMut<'_>) -> u32 {
    row.sequence.cached_len.min(row.sequence.token_len)
}
