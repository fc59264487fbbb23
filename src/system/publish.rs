//! Whole computed pages of a sequence go into the tree; what the tree had already comes out as duplicates.

use crate::id::SeqKey;
use crate::page::PagePool;
use crate::prefix::PrefixTree;
use crate::sequence::SequenceTable;
use crate::step::StepLog;
use crate::system::give_up::give_up_pages;
use crate::world::Buffers;

/// Publishes a running sequence's whole pages of known, computed tokens. Where another sequence published the same
/// prefix meanwhile, the page table is rewritten to the tree's pages first, and then the sequence's own are given up.
/// O(pages published).
pub(crate) fn publish(
    pages: &mut PagePool,
    prefixes: &mut PrefixTree,
    sequences: &mut SequenceTable,
    steps: &mut StepLog,
    buffers: &mut Buffers,
    seq: SeqKey,
) {
    let page_size = prefixes.page_size();
    let mut row = sequences.row_mut(seq).expect("the caller looked it up");
    let (start, end) =
        (row.sequence.published, row.sequence.cached_len.min(row.sequence.token_len) / page_size);
    if start >= end {
        return;
    }
    let mut lock = row.sequence.lock.take().expect("a running sequence holds its prefix");
    let mut at = start;
    buffers.freed.clear();
    while at < end {
        let (tokens, own) = row.piece_mut(at, end);
        let inserted = prefixes.insert(&mut lock, tokens, own, &mut buffers.freed);
        pages.publish(&own[inserted.duplicates as usize..]);
        let len = own.len() as u32;
        if inserted.duplicates > 0 {
            row.sequence.dirty_from = row.sequence.dirty_from.min(at);
        }
        at += len;
    }
    row.sequence.lock = Some(lock);
    row.sequence.published = end;
    give_up_pages(pages, steps, row.sequence.last_step, &buffers.freed);
}
