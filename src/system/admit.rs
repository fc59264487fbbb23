//! A sequence enters: match all but the last token, lock, check that the rest can fit. Takes no pages, but may be
//! promised some.

use crate::config::EngineShape;
use crate::error::Error;
use crate::fence::Fence;
use crate::id::{Namespace, PageId, PrefixLock, SeqKey, StepId, TokenId};
use crate::page::PagePool;
use crate::prefix::{PrefixMatch, PrefixTree};
use crate::sequence::{Entered, SequenceTable};
use crate::stats::Stats;
use crate::system::append::check_known;
use crate::system::promise::check_promise;
use crate::system::room::Room;
use crate::world::Buffers;

/// What admitting a prompt, or resuming a sequence, would take: the answer to [`Engine::admission`].
///
/// [`Engine::admission`]: crate::Engine::admission
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
#[non_exhaustive]
pub struct Admission {
    /// Tokens that have K and V already, in whole pages.
    pub cached_len: u32,
    /// Pages of those that nobody uses now: they would not be evictable any more.
    pub idle_pages: u32,
    /// Pages that the rest needs: that of the prompt, or that of the promise if it goes further.
    pub lacking_pages: u32,
    /// Pages that could be had for that now, once what is cached is in use.
    pub available_pages: u32,
    /// Where they are too few: the first unfinished step after which they are enough, if nothing else happens.
    pub after: Option<StepId>,
}

impl Admission {
    /// Whether there are enough pages now.
    pub fn fits(&self) -> bool {
        self.lacking_pages <= self.available_pages
    }

    /// The answer of an admission: nothing, if it fits.
    fn check(&self) -> Result<(), Error> {
        if self.fits() {
            return Ok(());
        }
        let (wanted, available) = (self.lacking_pages.into(), self.available_pages.into());
        Err(Error::OutOfPages { wanted, available, after: self.after })
    }
}

/// What admitting a prompt would take; changes nothing. O(prompt), and where it does not fit O(unfinished steps and
/// idle nodes of the match).
///
/// # Errors
/// As [`admit`], but for [`Error::OutOfPages`].
#[expect(clippy::too_many_arguments, reason = "a system's arguments are its access list")]
pub(crate) fn admission(
    shape: &EngineShape,
    pages: &PagePool,
    prefixes: &PrefixTree,
    sequences: &SequenceTable,
    fence: &Fence,
    namespace: Namespace,
    prompt: &[TokenId],
    promise: u32,
) -> Result<Admission, Error> {
    check_prompt(shape, sequences, prompt, promise)?;
    let found = shape
        .shares_prefixes()
        .then(|| prefixes.match_prefix(namespace, &prompt[..prompt.len() - 1]));
    let room = Room::new(pages, prefixes, sequences.promised(), fence);
    Ok(ask(shape, prefixes, &room, found.as_ref(), prompt.len() as u32, promise))
}

/// Admits a prompt as a new sequence, which is promised the pages of `promise` tokens in all. O(prompt); all its page
/// table words are to be sent.
///
/// # Errors
/// [`Error::EmptyPrompt`], [`Error::TooLong`], [`Error::PendingToken`], [`Error::OutOfSequences`],
/// [`Error::OutOfTokens`], [`Error::OutOfPages`] if the tokens that are not cached, or those promised, cannot fit now.
/// Nothing changes then.
#[expect(clippy::too_many_arguments, reason = "a system's arguments are its access list")]
pub(crate) fn admit(
    shape: &EngineShape,
    pages: &PagePool,
    prefixes: &mut PrefixTree,
    sequences: &mut SequenceTable,
    fence: &mut Fence,
    counters: &mut Stats,
    buffers: &mut Buffers,
    namespace: Namespace,
    prompt: &[TokenId],
    promise: u32,
) -> Result<SeqKey, Error> {
    check_prompt(shape, sequences, prompt, promise)?;
    let found = find(shape, prefixes, namespace, prompt, &mut buffers.pages);
    let room = Room::new(pages, prefixes, sequences.promised(), fence);
    ask(shape, prefixes, &room, found.as_ref(), prompt.len() as u32, promise).check()?;
    let lock = lock(prefixes, fence, found.as_ref(), namespace);
    let seq = sequences.spawn(namespace, prompt, lock);
    enter(shape, sequences, buffers, seq, promise, Entered::admitted(prompt.len() as u32));
    counters.admissions += 1;
    Ok(seq)
}

/// Admits a preempted sequence again, with all the tokens it has, and promises it the pages of `promise` tokens in all.
/// O(tokens); all its page table words are to be sent.
///
/// # Errors
/// [`Error::UnknownSequence`], [`Error::NotPreempted`], [`Error::TooLong`], [`Error::OutOfPages`]. Nothing changes
/// then.
#[expect(clippy::too_many_arguments, reason = "a system's arguments are its access list")]
pub(crate) fn resume(
    shape: &EngineShape,
    pages: &PagePool,
    prefixes: &mut PrefixTree,
    sequences: &mut SequenceTable,
    fence: &mut Fence,
    counters: &mut Stats,
    buffers: &mut Buffers,
    seq: SeqKey,
    promise: u32,
) -> Result<(), Error> {
    let sequence = sequences.get(seq)?;
    if !sequence.is_preempted() {
        return Err(Error::NotPreempted { seq });
    }
    check_promise(shape, promise)?;
    let (namespace, len) = (sequence.namespace, sequence.token_len);
    buffers.tokens.clear();
    for piece in sequences.token_pieces(sequence, 0, len) {
        buffers.tokens.extend_from_slice(piece);
    }
    let found = find(shape, prefixes, namespace, &buffers.tokens, &mut buffers.pages);
    let room = Room::new(pages, prefixes, sequences.promised(), fence);
    ask(shape, prefixes, &room, found.as_ref(), len, promise).check()?;
    let lock = lock(prefixes, fence, found.as_ref(), namespace);
    sequences.get_mut(seq)?.lock = Some(lock);
    enter(shape, sequences, buffers, seq, promise, Entered::RESUMED);
    counters.resumes += 1;
    Ok(())
}

/// Checks a prompt, and that there is a row for it.
fn check_prompt(
    shape: &EngineShape,
    sequences: &SequenceTable,
    prompt: &[TokenId],
    promise: u32,
) -> Result<(), Error> {
    if prompt.is_empty() {
        return Err(Error::EmptyPrompt);
    }
    let (len, max) = (prompt.len() as u64, u64::from(shape.max_sequence_len));
    if len > max {
        return Err(Error::TooLong { len, max });
    }
    check_promise(shape, promise)?;
    check_known(0, prompt)?;
    sequences.check_room(1, prompt.len() as u32)
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

/// What a sequence of `len` tokens takes that is promised `promise` of them, once the match is locked: the pages that
/// it lacks, and those idle now, which back no promise any more.
fn ask(
    shape: &EngineShape,
    prefixes: &PrefixTree,
    room: &Room<'_>,
    found: Option<&PrefixMatch>,
    len: u32,
    promise: u32,
) -> Admission {
    let page_size = shape.layout.page_size();
    let (matched, idle) = found.map_or((0, 0), |m| (m.pages(), prefixes.idle_pages(m)));
    let lacking = len.max(promise).div_ceil(page_size) - matched;
    let mut admission = Admission {
        cached_len: matched * page_size,
        idle_pages: idle,
        lacking_pages: lacking,
        available_pages: room.unpromised().saturating_sub(idle.into()) as u32,
        after: None,
    };
    if !admission.fits() {
        let idle_after = |step| found.map_or(0, |m| prefixes.idle_pages_after(m, step));
        admission.after = room.after(0, |step| u64::from(lacking) + u64::from(idle_after(step)));
    }
    admission
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

/// The matched pages become the sequence's first, and the rest of what it is promised is set aside.
fn enter(
    shape: &EngineShape,
    sequences: &mut SequenceTable,
    buffers: &mut Buffers,
    seq: SeqKey,
    promise: u32,
    entered: Entered,
) {
    let mut row = sequences.row_mut(seq).expect("just looked up");
    row.append_pages(&buffers.pages);
    let sequence = row.sequence;
    sequence.published = buffers.pages.len() as u32;
    sequence.cached_len = sequence.published * shape.layout.page_size();
    sequence.planned_len = sequence.cached_len;
    sequence.entered = entered;
    sequences.promise(seq, promise.div_ceil(shape.layout.page_size()));
}
