//! A sequence enters: match all but the last token, lock, check that the rest can fit. Takes no pages.

use crate::config::EngineShape;
use crate::error::Error;
use crate::fence::Fence;
use crate::id::{Namespace, PageId, PrefixLock, SeqKey, TokenId};
use crate::page::PagePool;
use crate::prefix::{PrefixMatch, PrefixTree};
use crate::sequence::SequenceTable;
use crate::system::append::check_known;
use crate::system::reclaim;
use crate::world::{Buffers, Counters};

/// Admits a prompt as a new sequence. O(prompt); all its page table words are to be sent.
///
/// # Errors
/// [`Error::EmptyPrompt`], [`Error::TooLong`], [`Error::PendingToken`], [`Error::OutOfSequences`],
/// [`Error::OutOfTokens`], [`Error::OutOfPages`] if the tokens that are not cached cannot fit now. Nothing changes
/// then.
#[expect(clippy::too_many_arguments, reason = "a system's arguments are its access list")]
pub(crate) fn admit(
    shape: &EngineShape,
    pages: &PagePool,
    prefixes: &mut PrefixTree,
    sequences: &mut SequenceTable,
    fence: &mut Fence,
    counters: &mut Counters,
    buffers: &mut Buffers,
    namespace: Namespace,
    prompt: &[TokenId],
) -> Result<SeqKey, Error> {
    if prompt.is_empty() {
        return Err(Error::EmptyPrompt);
    }
    let (len, max) = (prompt.len() as u64, u64::from(shape.max_sequence_len));
    if len > max {
        return Err(Error::TooLong { len, max });
    }
    check_known(0, prompt)?;
    sequences.check_room(prompt.len() as u32)?;
    let found = find(shape, prefixes, namespace, prompt, &mut buffers.pages);
    check_fit(shape, pages, prefixes, found.as_ref(), prompt.len() as u32)?;
    let lock = lock(prefixes, fence, found.as_ref(), namespace);
    let seq = sequences.spawn(namespace, prompt, lock);
    enter(shape, sequences, counters, buffers, seq);
    Ok(seq)
}

/// Admits a preempted sequence again, with all the tokens it has. O(tokens); all its page table words are to be sent.
///
/// # Errors
/// [`Error::UnknownSequence`], [`Error::NotPreempted`], [`Error::OutOfPages`]. Nothing changes then.
#[expect(clippy::too_many_arguments, reason = "a system's arguments are its access list")]
pub(crate) fn resume(
    shape: &EngineShape,
    pages: &PagePool,
    prefixes: &mut PrefixTree,
    sequences: &mut SequenceTable,
    fence: &mut Fence,
    counters: &mut Counters,
    buffers: &mut Buffers,
    seq: SeqKey,
) -> Result<(), Error> {
    let sequence = sequences.get(seq)?;
    if !sequence.is_preempted() {
        return Err(Error::NotPreempted { seq });
    }
    let (namespace, len) = (sequence.namespace, sequence.token_len);
    buffers.tokens.clear();
    for piece in sequences.token_pieces(sequence, 0, len) {
        buffers.tokens.extend_from_slice(piece);
    }
    let found = find(shape, prefixes, namespace, &buffers.tokens, &mut buffers.pages);
    check_fit(shape, pages, prefixes, found.as_ref(), len)?;
    let lock = lock(prefixes, fence, found.as_ref(), namespace);
    sequences.get_mut(seq)?.lock = Some(lock);
    enter(shape, sequences, counters, buffers, seq);
    Ok(())
}

/// The prefix that a sequence of these tokens can use, and its pages: whole pages of all but the last token, since one
/// token must be computed to sample the next.
fn find(
    shape: &EngineShape,
    prefixes: &PrefixTree,
    namespace: Namespace,
    tokens: &[TokenId],
    pages: &mut Vec<PageId>,
) -> Option<PrefixMatch> {
    pages.clear();
    shape.shares_prefixes().then(|| {
        let tokens = &tokens[..tokens.len() - 1];
        prefixes.match_pages(namespace, tokens, |found| pages.extend_from_slice(found))
    })
}

/// Checks that the pages which `len` tokens lack could be had, once the match is locked.
fn check_fit(
    shape: &EngineShape,
    pages: &PagePool,
    prefixes: &PrefixTree,
    found: Option<&PrefixMatch>,
    len: u32,
) -> Result<(), Error> {
    let (matched, idle) = found.map_or((0, 0), |m| (m.pages(), prefixes.idle_pages(m)));
    let lacking = len.div_ceil(shape.layout.page_size()) - matched;
    let fit = reclaim::check(pages, prefixes, u64::from(lacking) + u64::from(idle));
    fit.map_err(|error| match error {
        Error::OutOfPages { available, .. } => {
            let available = available - u64::from(idle);
            Error::OutOfPages { wanted: u64::from(lacking), available }
        }
        other => other,
    })
}

fn lock(
    prefixes: &mut PrefixTree,
    fence: &mut Fence,
    found: Option<&PrefixMatch>,
    namespace: Namespace,
) -> PrefixLock {
    match found {
        Some(found) => prefixes.lock(found, fence).expect("nothing changed since the match"),
        None => prefixes.lock_private(namespace),
    }
}

/// The matched pages become the sequence's first.
fn enter(
    shape: &EngineShape,
    sequences: &mut SequenceTable,
    counters: &mut Counters,
    buffers: &mut Buffers,
    seq: SeqKey,
) {
    let mut row = sequences.row_mut(seq).expect("just looked up");
    row.append_pages(&buffers.pages);
    let sequence = row.sequence;
    sequence.published = buffers.pages.len() as u32;
    sequence.cached_len = sequence.published * shape.layout.page_size();
    sequence.planned_len = sequence.cached_len;
    counters.hit_tokens += u64::from(sequence.cached_len);
}
