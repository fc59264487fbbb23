//! Finds the shared spans of a batch.

use bumpalo::Bump;

use crate::config::EngineShape;
use crate::plan::{Extend, SharedSpans};
use crate::prefix::{PrefixTree, SharedPrefixFinder};
use crate::sequence::SequenceTable;

/// Returns the shared spans of a batch of running sequences, in the plan's memory; none without prefix reuse. O(rows)
/// if the last batch had the same sequences, no lock has changed since, and the tree has no new node. Otherwise as
/// expensive as [`SharedPrefixFinder::find`].
pub(crate) fn find_spans<'step>(
    shape: &EngineShape,
    prefixes: &mut PrefixTree,
    sequences: &SequenceTable,
    finder: &mut SharedPrefixFinder,
    items: &[Extend],
    bump: &'step Bump,
) -> SharedSpans<'step> {
    if items.len() < 2 || !shape.shares_prefixes() {
        return SharedSpans::default();
    }
    if !finder.is_of(prefixes, items.iter().map(|item| item.seq)) {
        let rows = items.iter().map(|item| {
            let sequence = sequences.get(item.seq).expect("the batch was checked");
            let lock = sequence.lock.as_ref().expect("a running sequence holds its prefix");
            (item.seq, lock, sequence.published)
        });
        finder.find(prefixes, rows);
    }
    let SharedSpans { spans, members } = finder.spans();
    SharedSpans { spans: bump.alloc_slice_copy(spans), members: bump.alloc_slice_copy(members) }
}
