//! Loads the pages of swap memory that admitted sequences wait for: takes device pages for them, and completes the page
//! tables once the backend has accepted the load. `engine/tiers.rs` orders the calls.

use crate::error::Error;
use crate::fence::Fence;
use crate::id::SeqKey;
use crate::page::PagePool;
use crate::prefix::PrefixTree;
use crate::sequence::SequenceTable;
use crate::stats::Stats;
use crate::system::access::access;
use crate::system::page_budget::PageBudget;
use crate::system::reclaim::reclaim;
use crate::system::tails::name_tails;
use crate::world::{Buffers, World};

access! {
    /// Tables of [`begin_load`] and [`end_load`].
    struct Load of &mut World {
        pages: &mut PagePool,
        prefixes: &mut PrefixTree,
        sequences: &mut SequenceTable,
        fence: &Fence,
        counters: &mut Stats,
        buffers: &mut Buffers,
    }
}

/// Takes device pages for the pending pages of running sequences, and writes the loads into the buffers. A page that
/// several sequences wait for is loaded once. O(nodes in swap memory on their paths, tails, and pages taken).
///
/// # Errors
/// [`Error::UnknownSequence`], [`Error::Preempted`], [`Error::OutOfPages`]. Nothing changes then.
pub(crate) fn begin_load(world: Load<'_>, seqs: impl Iterator<Item = SeqKey> + Clone) -> Result<(), Error> {
    let Load { pages, prefixes, sequences, fence, counters, buffers } = world;
    buffers.loads.clear();
    let (mut wanted, mut promised) = (0, 0);
    let load = prefixes.begin_load();
    for seq in seqs.clone() {
        let sequence = sequences.running(seq)?;
        if sequences.pending(sequence) > 0 {
            let lock = sequence.lock.as_ref().expect("a running sequence holds its prefix");
            let count = prefixes.claim(lock, sequences.prefix_pages(sequence), load);
            wanted += u64::from(count);
            promised += u64::from(sequences.promised_to_load(sequence).min(count));
        }
    }
    PageBudget::new(pages, prefixes, sequences, fence).check(wanted, promised)?;
    let evicted = reclaim(pages, prefixes, wanted, &mut buffers.freed);
    counters.evicted_pages += u64::from(evicted);
    // The evicted pages are in the pool; the buffer now receives the pages for the load.
    buffers.freed.clear();
    buffers.freed.resize(wanted as usize, Default::default());
    assert!(pages.alloc(&mut buffers.freed), "the pages were reclaimed");
    let mut free = &buffers.freed[..];
    for seq in seqs {
        let sequence = sequences.running(seq)?;
        if sequences.pending(sequence) > 0 {
            let lock = sequence.lock.as_ref().expect("a running sequence holds its prefix");
            let pages = sequences.prefix_pages(sequence);
            prefixes.assign(lock, pages, &mut free, &mut buffers.loads);
        }
    }
    Ok(())
}

/// Ends a load that [`begin_load`] began for the same sequences: completes their page tables, or returns the pages if
/// the load failed. O(pending pages, and tails).
pub(crate) fn end_load(world: Load<'_>, seqs: impl Iterator<Item = SeqKey>, failed: bool) {
    let Load { pages, prefixes, sequences, counters, buffers, .. } = world;
    if failed {
        pages.free_private(&buffers.freed);
    } else {
        pages.publish(&buffers.freed);
    }
    for seq in seqs {
        let sequence = sequences.running(seq).expect("checked before the load");
        let pending = sequences.pending(sequence);
        let Some(lock) = sequence.lock.as_ref().filter(|_| pending > 0) else { continue };
        prefixes.end_load(lock, sequences.prefix_pages(sequence), failed);
        if failed {
            continue;
        }
        buffers.pages.clear();
        prefixes.last_pages(lock, pending, &mut buffers.pages);
        let mut row = sequences.row_mut(seq).expect("checked before the load");
        let loaded = row.complete_pending(&buffers.pages);
        counters.swap_hit_tokens += u64::from(loaded * prefixes.page_size());
        name_tails(&mut row, prefixes);
        row.begin_front(seq);
    }
}
