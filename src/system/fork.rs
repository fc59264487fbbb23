//! A second sequence with the same past: whole pages are shared, the partly filled tail page is copied.

use crate::error::Error;
use crate::fence::Fence;
use crate::id::{PageId, SeqKey, StepId};
use crate::page::PagePool;
use crate::plan::PageCopy;
use crate::prefix::PrefixTree;
use crate::sequence::SequenceTable;
use crate::step::StepLog;
use crate::system::publish::publish;
use crate::system::reclaim::reclaim;
use crate::world::{Buffers, Counters};

/// A child that a fork made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
#[non_exhaustive]
pub struct Forked {
    /// The new sequence: all known tokens of its parent, and K and V of those that are computed.
    pub child: SeqKey,
    /// The copy of the tail page, if part of a page is computed. The engine has told its own backend; other ranks'
    /// backends need `copy_pages` too, ordered after the steps committed so far.
    pub copy: Option<PageCopy>,
    /// The step of that copy, to be completed like any other; it counts as committed.
    pub step: Option<StepId>,
}

/// Forks a running sequence. Its whole computed pages are published first, in prefix mode None for the family alone.
/// The child shares chunks of the page table, so its first plan sends a word a chunk for them instead of one a page.
/// O(tokens).
///
/// # Errors
/// [`Error::UnknownSequence`], [`Error::Preempted`], [`Error::OutOfSequences`], [`Error::OutOfTokens`], and where a
/// tail is to be copied [`Error::OutOfSteps`], [`Error::OutOfPages`]. Nothing changes then.
#[expect(clippy::too_many_arguments, reason = "a system's arguments are its access list")]
pub(crate) fn fork(
    pages: &mut PagePool,
    prefixes: &mut PrefixTree,
    sequences: &mut SequenceTable,
    steps: &mut StepLog,
    fence: &mut Fence,
    counters: &mut Counters,
    buffers: &mut Buffers,
    seq: SeqKey,
) -> Result<Forked, Error> {
    let parent = sequences.running(seq)?;
    let (token_len, cached_len) = (parent.token_len, parent.cached_len.min(parent.token_len));
    let page_size = prefixes.page_size();
    let has_tail = !cached_len.is_multiple_of(page_size);
    sequences.check_room(token_len)?;
    let mut tail = [PageId::default()];
    if has_tail {
        // Before publishing, which may turn evictable pages into protected ones: nothing fails after this.
        steps.check_room()?;
        let evicted = reclaim(pages, prefixes, 1, &mut buffers.freed)?;
        counters.evicted_pages += u64::from(evicted);
        assert!(pages.alloc(&mut tail), "a page was reclaimed");
    }
    publish(pages, prefixes, sequences, fence, buffers, seq);
    let parent = sequences.running(seq)?;
    let lock = parent.lock.as_ref().expect("a running sequence holds its prefix");
    let lock = prefixes.lock_again(lock, fence);
    let shared = cached_len / page_size;
    let sent = steps.sent_for_good(parent.last_item, parent.dirty_from).max(parent.inherited);
    let source = has_tail.then(|| sequences.page(parent, shared));
    let copy = source.map(|source| PageCopy { source, target: tail[0] });
    let child = sequences.spawn_copy(seq, token_len, lock);
    let inherited = sequences.inherit(seq, child, shared.min(sent));
    buffers.pages.clear();
    let parent = sequences.running(seq)?;
    for piece in sequences.page_pieces(parent, inherited, shared) {
        buffers.pages.extend_from_slice(piece);
    }
    buffers.pages.extend(copy.map(|copy| copy.target));
    let step = copy.map(|_| steps.begin(false, 0));
    let mut row = sequences.row_mut(child).expect("just made");
    row.append_pages(&buffers.pages);
    row.sequence.published = shared;
    (row.sequence.cached_len, row.sequence.planned_len) = (cached_len, cached_len);
    if let Some(step) = step {
        // The copy reads the parent's tail and writes the child's.
        for key in [seq, child] {
            sequences.get_mut(key).expect("alive").last_step = step;
        }
    }
    Ok(Forked { child, copy, step })
}
