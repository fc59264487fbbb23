//! Loads the pages of swap memory that admitted sequences wait for: takes device pages for them, and completes the page
//! tables once the backend has accepted the load. `engine/tiers.rs` orders the calls.

use crate::error::Error;
use crate::fence::Fence;
use crate::id::SeqKey;
use crate::page::PagePool;
use crate::prefix::{LoadBatch, PrefixTree};
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
        load: &mut LoadBatch,
        buffers: &mut Buffers,
    }
}

/// Builds the load of the pages that these sequences wait for, and takes device pages for it. Skips sequences that wait
/// for none. A page that several sequences wait for is loaded once. O(sequences, nodes in swap memory on their paths,
/// tails, and pages taken).
///
/// # Errors
/// [`Error::OutOfPages`]. Nothing changes then.
pub(crate) fn begin_load(world: Load<'_>, seqs: impl Iterator<Item = SeqKey>) -> Result<(), Error> {
    let Load { pages, prefixes, sequences, fence, counters, load, buffers } = world;
    prefixes.begin_load(load);
    // A sequence that waits is in no open plan, so the number of its last plan can mark it.
    let number = sequences.next_plan();
    let (mut wanted, mut promised) = (0, 0);
    for seq in seqs {
        let Ok(row) = sequences.row_mut(seq) else { continue };
        if row.pending() == 0 || std::mem::replace(&mut row.sequence.last_plan, number) == number {
            continue;
        }
        let sequence = sequences.get(seq)?;
        let lock = sequence.lock.as_ref().expect("only a running sequence waits");
        let count = prefixes.claim(lock, sequences.prefix_pages(sequence), load);
        load.push_sequence(seq);
        wanted += u64::from(count);
        promised += u64::from(sequences.promised_to_load(sequence).min(count));
    }
    if load.is_empty() {
        return Ok(());
    }
    PageBudget::new(pages, prefixes, sequences, fence).check(wanted, promised)?;
    let evicted = reclaim(pages, prefixes, wanted, &mut buffers.pool_pages);
    counters.evicted_pages += u64::from(evicted);
    buffers.pool_pages.clear();
    buffers.pool_pages.resize(wanted as usize, Default::default());
    assert!(pages.alloc(&mut buffers.pool_pages), "the pages were reclaimed");
    prefixes.assign(load, &buffers.pool_pages);
    Ok(())
}

/// Ends the load that [`begin_load`] built: completes the page tables of its sequences, or returns the pages if the
/// load failed. O(pending pages, and tails).
pub(crate) fn end_load(world: Load<'_>, failed: bool) {
    let Load { pages, prefixes, sequences, counters, load, buffers, .. } = world;
    buffers.pool_pages.clear();
    buffers.pool_pages.extend(load.device_pages());
    if failed {
        pages.free_private(&buffers.pool_pages);
    } else {
        pages.publish(&buffers.pool_pages);
    }
    for (seq, parts) in load.sequences() {
        let mut row = sequences.row_mut(seq).expect("checked before the load");
        let lock = row.sequence.lock.as_ref().expect("only a running sequence waits");
        prefixes.end_load(lock, parts, failed);
        if failed {
            continue;
        }
        buffers.pages.clear();
        prefixes.nodes().last_pages(lock.node(), row.pending(), &mut buffers.pages);
        let loaded = row.complete_pending(&buffers.pages);
        counters.swap_hit_tokens += u64::from(loaded * prefixes.page_size());
        name_tails(&mut row, prefixes);
        row.begin_front(seq);
    }
}
