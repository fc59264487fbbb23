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
    let sequence = sequences.get_mut(seq).expect("the caller looked it up");
    let end = sequence.cached_len.min(sequence.token_len) / page_size;
    if sequence.published >= end {
        return;
    }
    let (row, last_step) = (sequence.row, sequence.last_step);
    let mut lock = sequence.lock.take().expect("a running sequence holds its prefix");
    let (mut at, mut dirty_from) = (sequence.published, sequence.dirty_from);
    buffers.freed.clear();
    while at < end {
        let (tokens, own) = sequences.piece_mut(row, at, end);
        let inserted = prefixes.insert(&mut lock, tokens, own, &mut buffers.freed);
        pages.publish(&own[inserted.duplicates as usize..]);
        if inserted.duplicates > 0 {
            dirty_from = dirty_from.min(at);
        }
        at += own.len() as u32;
    }
    let sequence = sequences.get_mut(seq).expect("the caller looked it up");
    sequence.lock = Some(lock);
    sequence.published = end;
    sequence.dirty_from = dirty_from;
    give_up_pages(pages, steps, last_step, &buffers.freed);
}
