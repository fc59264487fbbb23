//! Changes the pages that a running sequence is promised.

use crate::config::EngineShape;
use crate::error::Error;
use crate::fence::Fence;
use crate::id::SeqKey;
use crate::page::PagePool;
use crate::prefix::PrefixTree;
use crate::sequence::SequenceTable;
use crate::system::access::access;
use crate::system::page_budget::PageBudget;
use crate::world::World;

access! {
    /// Tables of [`promise`].
    struct Promise of &mut World {
        shape: &EngineShape,
        pages: &PagePool,
        prefixes: &PrefixTree,
        sequences: &mut SequenceTable,
        fence: &Fence,
    }
}

/// Implements [`Engine::promise`](crate::Engine::promise). O(1), or O(unfinished steps) if the pages do not fit.
///
/// # Errors
/// [`Error::UnknownSequence`], [`Error::Preempted`], [`Error::TooLong`], [`Error::OutOfPages`]. Nothing changes then.
pub(crate) fn promise(world: Promise<'_>, seq: SeqKey, len: u32) -> Result<(), Error> {
    let Promise { shape, pages, prefixes, sequences, fence } = world;
    let sequence = sequences.running(seq)?;
    check_promise(shape, len)?;
    let promised = len.div_ceil(shape.layout.page_size());
    let before = sequences.outstanding(sequence);
    let after = sequences.outstanding_of(sequence, promised);
    if after > before {
        let budget = PageBudget::new(pages, prefixes, sequences, fence);
        budget.check(u64::from(after - before), 0)?;
    }
    sequences.promise(seq, promised);
    Ok(())
}

/// Checks that a sequence can have as many tokens as it is promised.
///
/// # Errors
/// [`Error::TooLong`].
pub(crate) fn check_promise(shape: &EngineShape, len: u32) -> Result<(), Error> {
    let (len, max) = (u64::from(len), u64::from(shape.max_sequence_len));
    if len > max { Err(Error::TooLong { len, max }) } else { Ok(()) }
}
