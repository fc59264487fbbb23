//! Forks a sequence. Children share its whole pages; those of groups other than group 0 become cells. The partly filled
//! last page of each track is copied.

use crate::config::EngineShape;
use crate::error::Error;
use crate::fence::Fence;
use crate::id::{PageId, SeqKey, StepId};
use crate::page::PagePool;
use crate::plan::PageCopy;
use crate::prefix::PrefixTree;
use crate::sequence::SequenceTable;
use crate::stats::Stats;
use crate::step::StepLog;
use crate::system::access::access;
use crate::system::page_budget::PageBudget;
use crate::system::promise::check_promise;
use crate::system::publish::{keep, publish};
use crate::system::reclaim::reclaim;
use crate::world::{Buffers, World};

access! {
    /// Tables of [`fork`].
    struct Fork of &mut World {
        shape: &EngineShape,
        pages: &mut PagePool,
        prefixes: &mut PrefixTree,
        sequences: &mut SequenceTable,
        steps: &mut StepLog,
        fence: &mut Fence,
        counters: &mut Stats,
        buffers: &mut Buffers,
    }
}

/// Implements [`Engine::fork`](crate::Engine::fork): writes the children and their copies into the buffers, and returns
/// the step of the copies. O(tokens) for each child.
///
/// Publishes the parent's whole computed pages. Without prefix reuse no prompt matches these pages, but the children
/// share them.
///
/// # Errors
/// [`Error::UnknownSequence`], [`Error::Preempted`], [`Error::NotAccepted`], [`Error::TooLong`],
/// [`Error::OutOfSequences`], [`Error::OutOfTokens`], [`Error::OutOfSteps`], [`Error::OutOfPages`]. Nothing changes
/// then.
pub(crate) fn fork(
    world: Fork<'_>,
    seq: SeqKey,
    count: u32,
    promise: u32,
) -> Result<Option<StepId>, Error> {
    let Fork { shape, pages, prefixes, sequences, steps, fence, counters, buffers } = world;
    let parent = sequences.running(seq)?;
    sequences.check_accepted(seq)?;
    check_promise(shape, promise)?;
    let (token_len, cached_len) = (parent.token_len, parent.cached_len.min(parent.token_len));
    let page_size = shape.layout.page_size();
    let (shared, page_len) = (cached_len / page_size, cached_len.div_ceil(page_size));
    let promised = promise.div_ceil(page_size);
    sequences.check_room(count, token_len)?;
    buffers.children.clear();
    buffers.copies.clear();
    if count == 0 {
        return Ok(None);
    }
    let limits = *sequences.limits();
    // Each child gets a copy of the partly filled page of each track.
    let copied = u64::from(page_len - shared) * u64::from(shape.table.tracks);
    let has_copies = copied > 0;
    if has_copies {
        steps.check_room()?;
    }
    let wanted = u64::from(count) * copied;
    let of_child = limits.outstanding(promised, page_len, shared, shared);
    let outstanding = u64::from(count) * u64::from(of_child);
    let of_parent = u64::from(sequences.row_mut(seq)?.keep_cost(shared, shared));
    let budget = PageBudget::new(pages, prefixes, sequences, fence);
    budget.check(wanted + outstanding + of_parent, 0)?;
    // Publishing may turn evictable pages into protected ones, so eviction comes first. Nothing fails after this.
    let evicted = reclaim(pages, prefixes, wanted, &mut buffers.freed);
    counters.evicted_pages += u64::from(evicted);
    for _ in 0..wanted {
        let mut target = [PageId::default()];
        assert!(pages.alloc(&mut target), "a page was reclaimed");
        buffers.copies.push(PageCopy { source: target[0], target: target[0] });
    }
    publish(pages, prefixes, sequences, fence, buffers, seq);
    keep(pages, prefixes, sequences, fence, buffers, seq);
    let parent = sequences.running(seq)?;
    let sent = steps.sent_for_good(parent.last_item, parent.dirty_from).max(parent.inherited);
    if has_copies {
        for copies in buffers.copies.chunks_exact_mut(copied as usize) {
            let tails = (0..shape.table.tracks)
                .flat_map(|track| sequences.page_pieces(parent, track, shared, page_len).flatten());
            let copies = copies.iter_mut().zip(tails);
            copies.for_each(|(copy, source)| copy.source = *source);
        }
    }
    for index in 0..count as usize {
        let parent = sequences.running(seq)?;
        let lock = parent.lock.as_ref().expect("a running sequence holds its prefix");
        let lock = prefixes.lock_again(lock, fence);
        let child = sequences.spawn_copy(seq, token_len, lock);
        prefixes.hold_names(sequences.get(child)?.namespace);
        let inherited = sequences.inherit(seq, child, shared.min(sent));
        buffers.pages.clear();
        let parent = sequences.running(seq)?;
        for piece in sequences.page_pieces(parent, 0, inherited, shared) {
            buffers.pages.extend_from_slice(piece);
        }
        let mut row = sequences.row_mut(child).expect("just made");
        row.sequence.published = shared;
        row.begin_marks(shared, shared);
        row.append_published(&buffers.pages);
        for held in limits.held_groups(shared) {
            for place in held.first..shared {
                let parent = sequences.running(seq)?;
                let cell = sequences.cell(parent, held.group, place);
                prefixes.acquire_cell(cell, fence);
                if place >= inherited {
                    let mut row = sequences.row_mut(child).expect("just made");
                    row.name_cell(&held, place, cell, prefixes.cell_pages(cell));
                }
            }
        }
        buffers.pages.clear();
        let own = index * copied as usize..(index + 1) * copied as usize;
        buffers.pages.extend(buffers.copies[own].iter().map(|copy| copy.target));
        let mut row = sequences.row_mut(child).expect("just made");
        row.append_pages(page_len - shared, &buffers.pages);
        (row.sequence.cached_len, row.sequence.planned_len) = (cached_len, cached_len);
        row.begin_front(child);
        sequences.promise(child, promised);
        buffers.children.push(child);
    }
    let step = has_copies.then(|| steps.begin(false, 0));
    if let Some(step) = step {
        // The copies read the parent's tail and write the children's.
        for &key in buffers.children.iter().chain([&seq]) {
            sequences.get_mut(key).expect("it is live").last_step = step;
        }
    }
    Ok(step)
}
