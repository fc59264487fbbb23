//! Admits sequences: matches all tokens but the last, checks that the rest fits, and locks the match. Admission takes
//! no pages, but it may promise some.

use crate::bitmap::Bits;
use crate::config::EngineShape;
use crate::error::Error;
use crate::fence::Fence;
use crate::id::{CellId, Namespace, PageId, PrefixLock, SeqKey, TokenId};
use crate::layout::Limits;
use crate::page::PagePool;
use crate::plan::{Admission, Admitted, Leader, Prompt};
use crate::prefix::{PrefixMatch, PrefixTree};
use crate::sequence::{AdmissionKind, SequenceTable};
use crate::stats::Stats;
use crate::system::access::access;
use crate::system::append::check_known;
use crate::system::leader::leader as leader_of;
use crate::system::page_budget::PageBudget;
use crate::system::promise::check_promise;
use crate::system::tails::name_tails;
use crate::world::{Buffers, World};

access! {
    /// Tables of [`admission`].
    struct Estimate of &World {
        shape: &EngineShape,
        pages: &PagePool,
        prefixes: &PrefixTree,
        sequences: &SequenceTable,
        fence: &Fence,
    }
}

access! {
    /// Tables of [`admit`], [`admit_batch`] and [`resume`].
    struct Admit of &mut World {
        shape: &EngineShape,
        pages: &PagePool,
        prefixes: &mut PrefixTree,
        sequences: &mut SequenceTable,
        fence: &mut Fence,
        counters: &mut Stats,
        buffers: &mut Buffers,
    }
}

/// Implements [`Engine::admission`](crate::Engine::admission). O(prompt); if it does not fit also O(unfinished steps
/// and idle nodes of the match).
///
/// # Errors
/// As [`admit`], except [`Error::OutOfPages`].
pub(crate) fn admission(
    world: &Estimate<'_>,
    namespace: Namespace,
    prompt: &[TokenId],
    promise: u32,
) -> Result<Admission, Error> {
    let Estimate { shape, pages, prefixes, sequences, fence } = *world;
    check_prompt(shape, prefixes, namespace, prompt, promise)?;
    let mut found =
        shape.shares_prefixes().then(|| prefixes.match_prefix(namespace, matchable(prompt)));
    check_rest(shape, found.as_ref(), prompt)?;
    sequences.check_room(1, prompt.len() as u32)?;
    let budget = PageBudget::new(pages, prefixes, sequences, fence);
    let len = prompt.len() as u32;
    let limits = sequences.limits();
    let cost = cost(shape, prefixes, limits, &budget, found.as_mut(), len, promise);
    let leader = find_leader(prefixes, sequences, found.as_ref(), prompt);
    Ok(Admission { leader, ..cost })
}

/// Implements [`Engine::admit`](crate::Engine::admit). O(prompt).
///
/// # Errors
/// [`Error::EmptyPrompt`], [`Error::TooLong`], [`Error::UnnamedNamespace`], [`Error::PendingToken`],
/// [`Error::OutOfSequences`], [`Error::OutOfTokens`], [`Error::OutOfPages`]. Nothing changes then.
pub(crate) fn admit(
    world: Admit<'_>,
    namespace: Namespace,
    prompt: &[TokenId],
    promise: u32,
) -> Result<SeqKey, Error> {
    let Admit { shape, pages, prefixes, sequences, fence, counters, buffers } = world;
    check_prompt(shape, prefixes, namespace, prompt, promise)?;
    let mut found = find(shape, prefixes, namespace, prompt, &mut buffers.pages);
    check_rest(shape, found.as_ref(), prompt)?;
    sequences.check_room(1, prompt.len() as u32)?;
    let budget = PageBudget::new(pages, prefixes, sequences, fence);
    let len = prompt.len() as u32;
    let limits = sequences.limits();
    cost(shape, prefixes, limits, &budget, found.as_mut(), len, promise).check()?;
    let lock = lock(prefixes, fence, found.as_ref(), namespace);
    let seq = sequences.spawn(namespace, prompt, lock);
    prefixes.hold_names(namespace);
    attach_prefix(
        shape,
        sequences,
        buffers,
        seq,
        found.as_ref(),
        promise,
        AdmissionKind::admitted(prompt.len() as u32),
    );
    attach_tails(prefixes, sequences, fence, counters, seq, found.as_ref());
    counters.admissions += 1;
    Ok(seq)
}

/// Implements [`Engine::resume`](crate::Engine::resume). O(tokens).
///
/// # Errors
/// [`Error::UnknownSequence`], [`Error::NotPreempted`], [`Error::TooLong`], [`Error::OutOfPages`]. Nothing changes
/// then.
pub(crate) fn resume(world: Admit<'_>, seq: SeqKey, promise: u32) -> Result<(), Error> {
    let Admit { shape, pages, prefixes, sequences, fence, counters, buffers } = world;
    let sequence = sequences.get(seq)?;
    if !sequence.is_preempted() {
        return Err(Error::NotPreempted { seq });
    }
    check_promise(shape, promise)?;
    let (namespace, len) = (sequence.namespace, sequence.token_len);
    // A prompt without a committed step is not yet counted.
    let kind = match sequence.admission_kind {
        AdmissionKind::COUNTED => AdmissionKind::RESUMED,
        uncounted => uncounted,
    };
    buffers.tokens.clear();
    for piece in sequences.token_pieces(sequence, 0, len) {
        buffers.tokens.extend_from_slice(piece);
    }
    let mut found = find(shape, prefixes, namespace, &buffers.tokens, &mut buffers.pages);
    let budget = PageBudget::new(pages, prefixes, sequences, fence);
    let limits = sequences.limits();
    cost(shape, prefixes, limits, &budget, found.as_mut(), len, promise).check()?;
    let lock = lock(prefixes, fence, found.as_ref(), namespace);
    sequences.get_mut(seq)?.lock = Some(lock);
    attach_prefix(shape, sequences, buffers, seq, found.as_ref(), promise, kind);
    attach_tails(prefixes, sequences, fence, counters, seq, found.as_ref());
    counters.resumes += 1;
    Ok(())
}

/// Implements [`Engine::admit_batch`](crate::Engine::admit_batch), and writes the results into the buffers. O(all
/// prompts), times the unfinished steps if they do not fit.
///
/// # Errors
/// As [`admit`]: for the first invalid prompt, or for all prompts together. Nothing changes then.
pub(crate) fn admit_batch(world: Admit<'_>, prompts: &[Prompt<'_>]) -> Result<(), Error> {
    let Admit { shape, pages, prefixes, sequences, fence, counters, buffers } = world;
    let mut chunks = 0;
    for prompt in prompts {
        check_prompt(shape, prefixes, prompt.namespace, prompt.tokens, prompt.promise)?;
        check_known(0, prompt.tokens)?;
        chunks += u64::from(sequences.chunks_for(prompt.tokens.len() as u32));
    }
    sequences.check_rows(prompts.len())?;
    sequences.check_chunks(chunks)?;
    let budget = PageBudget::new(pages, prefixes, sequences, fence);
    let now = |found: &PrefixMatch| prefixes.idle_node_pages(found);
    let (lacking, idle) = estimate_all(shape, prefixes, sequences, buffers, prompts, now, |cell| {
        prefixes.is_idle_cell(cell)
    });
    let fits = lacking + idle <= budget.unpromised();
    let hits = fits || !fit_without_hits(shape, sequences.limits(), &budget, prompts);
    if !fits && hits {
        let after = budget.after(0, |step| {
            let idle_then = |found: &PrefixMatch| prefixes.node_pages_after(found, step);
            let cell_then = |cell| prefixes.is_idle_cell_after(cell, step);
            let (lacking, idle) =
                estimate_all(shape, prefixes, sequences, buffers, prompts, idle_then, cell_then);
            lacking + idle
        });
        let available = budget.unpromised().saturating_sub(idle);
        return Err(Error::OutOfPages { wanted: lacking, available, after });
    }
    buffers.admitted.clear();
    for &Prompt { namespace, tokens, promise } in prompts {
        let found = find(shape, prefixes, namespace, tokens, &mut buffers.pages);
        let found = if hits { found } else { found.map(PrefixMatch::without_hit) };
        let leader = find_leader(prefixes, sequences, found.as_ref(), tokens);
        let lock = lock(prefixes, fence, found.as_ref(), namespace);
        let seq = sequences.spawn(namespace, tokens, lock);
        prefixes.hold_names(namespace);
        attach_prefix(
            shape,
            sequences,
            buffers,
            seq,
            found.as_ref(),
            promise,
            AdmissionKind::admitted(tokens.len() as u32),
        );
        attach_tails(prefixes, sequences, fence, counters, seq, found.as_ref());
        buffers.admitted.push(Admitted { seq, leader });
    }
    counters.admissions += prompts.len() as u64;
    Ok(())
}

/// Returns whether there are groups, the pool is idle, and the prompts fit together without their hits.
#[cold]
fn fit_without_hits(
    shape: &EngineShape,
    limits: &Limits,
    budget: &PageBudget<'_>,
    prompts: &[Prompt<'_>],
) -> bool {
    let lacking = prompts.iter().map(|prompt| {
        u64::from(pages_lacking(shape, limits, None, prompt.tokens.len() as u32, prompt.promise))
    });
    !limits.is_none() && budget.is_idle(shape) && lacking.sum::<u64>() <= budget.unpromised()
}

/// Returns the number of pages that all prompts lack, and the number of idle pages in their matches. An idle page of
/// several matches counts once. `idle_pages` returns the number of idle pages at the end of a match, and `idle_cell`
/// whether a cell is idle.
fn estimate_all(
    shape: &EngineShape,
    prefixes: &PrefixTree,
    sequences: &SequenceTable,
    buffers: &mut Buffers,
    prompts: &[Prompt<'_>],
    idle_pages: impl Fn(&PrefixMatch) -> u32,
    idle_cell: impl Fn(CellId) -> bool,
) -> (u64, u64) {
    let Buffers { pages, freed: idle, counted, .. } = buffers;
    let mut lacking = 0;
    idle.clear();
    for &Prompt { namespace, tokens, promise } in prompts {
        let found = find(shape, prefixes, namespace, tokens, pages);
        let (limits, len) = (sequences.limits(), tokens.len() as u32);
        lacking += u64::from(pages_lacking(shape, limits, found.as_ref(), len, promise));
        let Some(found) = found else { continue };
        let mut count = |list: &[PageId]| {
            for page in list {
                if !counted.contains(page.raw()) {
                    counted.insert(Bits::one(page.index()));
                    idle.push(*page);
                }
            }
        };
        count(&pages[pages.len() - idle_pages(&found) as usize..]);
        prefixes.each_tail_cell(&found, |cell| {
            if idle_cell(cell) {
                count(prefixes.cell_pages(cell));
            }
        });
    }
    idle.iter().for_each(|page| counted.remove(Bits::one(page.index())));
    (lacking, idle.len() as u64)
}

/// Checks a prompt and its promise, but not its tokens.
fn check_prompt(
    shape: &EngineShape,
    prefixes: &PrefixTree,
    namespace: Namespace,
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
    if !prefixes.is_named(namespace) {
        return Err(Error::UnnamedNamespace { namespace });
    }
    Ok(())
}

/// Checks the tokens of a prompt that are not cached. Cached tokens were checked when they were admitted or appended.
#[inline]
fn check_rest(
    shape: &EngineShape,
    found: Option<&PrefixMatch>,
    prompt: &[TokenId],
) -> Result<(), Error> {
    let cached = found.map_or(0, |found| found.pages() * shape.layout.page_size());
    check_known(cached, &prompt[cached as usize..])
}

/// Returns the prefix that a sequence of these tokens can use, and writes its device pages into `pages`. It consists of
/// whole pages without the last token, because at least one token must be computed to sample the next.
fn find(
    shape: &EngineShape,
    prefixes: &PrefixTree,
    namespace: Namespace,
    tokens: &[TokenId],
    pages: &mut Vec<PageId>,
) -> Option<PrefixMatch> {
    pages.clear();
    shape.shares_prefixes().then(|| {
        let tokens = matchable(tokens);
        let found = prefixes.match_pages(namespace, tokens, |found| pages.extend_from_slice(found));
        pages.truncate(found.device_pages() as usize);
        found
    })
}

/// Returns the tokens that can match cached prefixes.
fn matchable(tokens: &[TokenId]) -> &[TokenId] {
    &tokens[..tokens.len() - 1]
}

/// Returns the number of pages that a sequence of `len` tokens lacks after its match, including the pages to load; at
/// least the outstanding pages of its promise.
#[inline]
fn pages_lacking(
    shape: &EngineShape,
    limits: &Limits,
    found: Option<&PrefixMatch>,
    len: u32,
    promise: u32,
) -> u32 {
    let (page_size, matched) =
        (shape.layout.page_size(), found.map_or(0, PrefixMatch::device_pages));
    if limits.is_none() {
        return len.max(promise).div_ceil(page_size) - matched;
    }
    let [len, promised] = [len, promise].map(|tokens| tokens.div_ceil(page_size));
    let (pages, cells) = found.map_or((0, 0), |found| (found.pages(), found.host_cell_pages()));
    let held = limits.held(0, pages, pages) - (pages - matched) - cells;
    let outstanding = limits.outstanding(promised, matched, matched, matched);
    (limits.most(len) - held).max(outstanding + if promised > 0 { cells } else { 0 })
}

/// Returns the cost of a sequence of `len` tokens once its match is locked. The cost is the pages that the sequence
/// lacks, and the idle pages of the match, which then back no promise.
fn estimate(
    shape: &EngineShape,
    prefixes: &PrefixTree,
    limits: &Limits,
    budget: &PageBudget<'_>,
    found: Option<&PrefixMatch>,
    len: u32,
    promise: u32,
) -> Admission {
    let page_size = shape.layout.page_size();
    let (matched, idle) = found.map_or((0, 0), |m| (m.device_pages(), prefixes.idle_pages(m)));
    let (host_pages, cell_pages) =
        found.map_or((0, 0), |found| (found.host_pages(), found.host_cell_pages()));
    let lacking = pages_lacking(shape, limits, found, len, promise);
    let mut admission = Admission {
        cached_len: (matched + host_pages) * page_size,
        host_pages: host_pages + cell_pages,
        idle_pages: idle,
        lacking_pages: lacking,
        available_pages: budget.unpromised().saturating_sub(idle.into()) as u32,
        after: None,
        leader: None,
    };
    if !admission.fits() {
        let idle_after = |step| found.map_or(0, |m| prefixes.idle_pages_after(m, step));
        admission.after = budget.after(0, |step| u64::from(lacking) + u64::from(idle_after(step)));
    }
    admission
}

/// Returns the cost of a sequence of `len` tokens with its match `found`. If the sequence fits only without the match,
/// clears the match, and returns the cost without it.
#[inline]
fn cost(
    shape: &EngineShape,
    prefixes: &PrefixTree,
    limits: &Limits,
    budget: &PageBudget<'_>,
    found: Option<&mut PrefixMatch>,
    len: u32,
    promise: u32,
) -> Admission {
    let cost = estimate(shape, prefixes, limits, budget, found.as_deref(), len, promise);
    if cost.fits() {
        return cost;
    }
    let other = cost_without_hit(shape, prefixes, limits, budget, found, len, promise);
    other.unwrap_or(cost)
}

/// Returns the cost of a sequence of `len` tokens without its hit; `None` unless there are groups, the pool is idle and
/// the sequence fits. While sequences run, the prompt waits instead.
#[cold]
#[inline(never)]
fn cost_without_hit(
    shape: &EngineShape,
    prefixes: &PrefixTree,
    limits: &Limits,
    budget: &PageBudget<'_>,
    found: Option<&mut PrefixMatch>,
    len: u32,
    promise: u32,
) -> Option<Admission> {
    let found = found.filter(|_| !limits.is_none() && budget.is_idle(shape))?;
    let without = found.without_hit();
    let cost = estimate(shape, prefixes, limits, budget, Some(&without), len, promise);
    if !cost.fits() {
        return None;
    }
    *found = without;
    Some(cost)
}

/// Returns the leader of a prompt whose cached prefix is `found`, if there is one.
fn find_leader(
    prefixes: &PrefixTree,
    sequences: &SequenceTable,
    found: Option<&PrefixMatch>,
    prompt: &[TokenId],
) -> Option<Leader> {
    let found = found?;
    if prefixes.has_cells() {
        // A leader computes more than group 0 has cached.
        let full = prefixes.match_full(found.scope().namespace, matchable(prompt));
        return leader_of(prefixes, sequences, &full, prompt);
    }
    leader_of(prefixes, sequences, found, prompt)
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

/// Writes the matched pages into the sequence's page table, and reserves the rest of its promise. If some pages must be
/// loaded, the page table gets only the pages before the first of these; with groups, it gets no page.
fn attach_prefix(
    shape: &EngineShape,
    sequences: &mut SequenceTable,
    buffers: &mut Buffers,
    seq: SeqKey,
    found: Option<&PrefixMatch>,
    promise: u32,
    kind: AdmissionKind,
) {
    let mut row = sequences.row_mut(seq).expect("just looked up");
    let on_device = found.map_or(0, PrefixMatch::device_pages);
    let (pages, cells) = found.map_or((0, 0), |found| (found.pages(), found.host_cell_pages()));
    let waits = pages > on_device || cells > 0;
    let published = if waits && !row.limits().is_none() { 0 } else { on_device };
    row.sequence.published = published;
    row.append_published(&buffers.pages[..published as usize]);
    row.begin_marks(0, 0);
    let sequence = &mut *row.sequence;
    sequence.cached_len = pages * shape.layout.page_size();
    sequence.planned_len = sequence.cached_len;
    sequence.admission_kind = kind;
    if waits {
        row.begin_pending(pages - published, on_device - published, cells);
    }
    sequences.row_mut(seq).expect("just looked up").begin_front(seq);
    sequences.promise(seq, promise.div_ceil(shape.layout.page_size()));
}

/// Makes a sequence a user of the cells in its prefix's tails, and sets its marks. A sequence that waits for a load
/// names no cell until the load. O(tails).
fn attach_tails(
    prefixes: &mut PrefixTree,
    sequences: &mut SequenceTable,
    fence: &mut Fence,
    counters: &mut Stats,
    seq: SeqKey,
    found: Option<&PrefixMatch>,
) {
    if !prefixes.has_cells() {
        return;
    }
    let Some(found) = found else { return };
    let mut row = sequences.row_mut(seq).expect("just looked up");
    row.begin_marks(found.full_pages(), (row.sequence.token_len - 1) / prefixes.page_size());
    counters.lost_hit_tokens +=
        u64::from(found.full_pages() - found.pages()) * u64::from(prefixes.page_size());
    let lock = row.sequence.lock.as_ref().expect("it is admitted");
    prefixes.acquire_tails(lock, found.pages(), fence);
    if row.pending() == 0 {
        name_tails(&mut row, prefixes);
    }
}
