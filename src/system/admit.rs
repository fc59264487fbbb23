//! Admits sequences: matches all tokens but the last, checks that the rest fits, and locks the match. Admission takes
//! no pages, but it may promise some.

use crate::bitmap::Bits;
use crate::config::EngineShape;
use crate::error::Error;
use crate::fence::Fence;
use crate::id::{Namespace, PageId, PrefixLock, SeqKey, StepId, TokenId};
use crate::layout::saturated;
use crate::page::PagePool;
use crate::plan::{Admission, Admit, Admitted, Leader, Prompt};
use crate::prefix::{PrefixMatch, PrefixTree};
use crate::sequence::{AdmissionKind, RowMut, SequenceTable};
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
    struct Admitting of &mut World {
        shape: &EngineShape,
        pages: &PagePool,
        prefixes: &mut PrefixTree,
        sequences: &mut SequenceTable,
        fence: &mut Fence,
        counters: &mut Stats,
        buffers: &mut Buffers,
    }
}

impl<'w> Estimate<'w> {
    fn budget(&self) -> PageBudget<'w> {
        PageBudget::new(self.pages, self.prefixes, self.sequences, self.fence)
    }
}

impl Admitting<'_> {
    /// Borrows the tables that an estimate reads, and the buffers.
    fn split(&mut self) -> (Estimate<'_>, &mut Buffers) {
        let Self { shape, pages, prefixes, sequences, fence, buffers, .. } = self;
        (Estimate { shape, pages, prefixes, sequences, fence }, buffers)
    }
}

/// Implements [`Engine::admission`](crate::Engine::admission). O(prompt); if it does not fit also O(unfinished steps,
/// times the idle nodes and the tails of the match).
///
/// # Errors
/// As [`admit`], except [`Error::OutOfPages`].
pub(crate) fn admission(world: &Estimate<'_>, prompt: &Prompt<'_>) -> Result<Admission, Error> {
    let Estimate { shape, prefixes, sequences, .. } = *world;
    let Prompt { namespace, tokens, .. } = *prompt;
    check_prompt(world, prompt)?;
    let found = shape.shares_prefixes().then(|| prefixes.match_prefix(namespace, prompt.matchable()));
    check_rest(shape, found.as_ref(), tokens)?;
    sequences.check_room(1, tokens.len() as u32)?;
    let (found, cost) = cost(world, found, tokens.len() as u32, prompt.admit.promise)?;
    let leader = find_leader(prefixes, sequences, found.as_ref(), prompt);
    Ok(Admission { leader, ..cost })
}

/// Implements [`Engine::admit`](crate::Engine::admit). As expensive as [`admission`].
///
/// # Errors
/// [`Error::EmptyPrompt`], [`Error::TooLong`], [`Error::UnnamedNamespace`], [`Error::PendingToken`],
/// [`Error::OutOfSequences`], [`Error::OutOfTokens`], [`Error::OutOfPages`]. Nothing changes then.
pub(crate) fn admit(mut world: Admitting<'_>, prompt: &Prompt<'_>) -> Result<SeqKey, Error> {
    let Prompt { tokens, .. } = *prompt;
    let (tables, buffers) = world.split();
    check_prompt(&tables, prompt)?;
    let found = find(&tables, prompt, &mut buffers.pages);
    check_rest(tables.shape, found.as_ref(), tokens)?;
    tables.sequences.check_room(1, tokens.len() as u32)?;
    let (found, cost) = cost(&tables, found, tokens.len() as u32, prompt.admit.promise)?;
    cost.check()?;
    let seq = spawn(&mut world, prompt, found.as_ref());
    world.counters.admissions += 1;
    Ok(seq)
}

/// Implements [`Engine::resume`](crate::Engine::resume). As expensive as [`admission`] of the sequence's tokens.
///
/// # Errors
/// [`Error::UnknownSequence`], [`Error::NotPreempted`], [`Error::TooLong`], [`Error::OutOfPages`]. Nothing changes
/// then.
pub(crate) fn resume(mut world: Admitting<'_>, seq: SeqKey, admit: Admit) -> Result<(), Error> {
    let (tables, buffers) = world.split();
    let sequence = tables.sequences.get(seq)?;
    if !sequence.is_preempted() {
        return Err(Error::NotPreempted { seq });
    }
    let promise = admit.promise;
    check_promise(tables.shape, promise)?;
    let (namespace, len) = (sequence.namespace, sequence.token_len);
    // A prompt without a committed step is not yet counted.
    let kind = match sequence.admission_kind {
        AdmissionKind::COUNTED => AdmissionKind::RESUMED,
        uncounted => uncounted,
    };
    buffers.tokens.clear();
    for piece in tables.sequences.token_pieces(sequence, 0, len) {
        buffers.tokens.extend_from_slice(piece);
    }
    let found = find(&tables, &Prompt { namespace, tokens: &buffers.tokens, admit }, &mut buffers.pages);
    let (found, cost) = cost(&tables, found, len, promise)?;
    cost.check()?;
    let lock = lock(&mut world, found.as_ref(), namespace);
    world.sequences.get_mut(seq)?.lock = Some(lock);
    attach(&mut world, seq, found.as_ref(), promise, kind);
    world.counters.resumes += 1;
    Ok(())
}

/// Implements [`Engine::admit_batch`](crate::Engine::admit_batch), and writes the results into the buffers. O(all
/// prompts), times the unfinished steps if they do not fit.
///
/// # Errors
/// As [`admit`]: for the first invalid prompt, or for all prompts together. Nothing changes then.
pub(crate) fn admit_batch(mut world: Admitting<'_>, prompts: &[Prompt<'_>]) -> Result<(), Error> {
    let (tables, buffers) = world.split();
    let mut leaves = 0;
    for prompt in prompts {
        check_prompt(&tables, prompt)?;
        check_known(0, prompt.tokens)?;
        leaves += u64::from(tables.sequences.leaves_for(prompt.tokens.len() as u32));
    }
    tables.sequences.check_rows(prompts.len())?;
    tables.sequences.check_leaves(leaves)?;
    let hits = check_fit(&tables, buffers, prompts)?;
    buffers.admitted.clear();
    for prompt in prompts {
        let (tables, buffers) = world.split();
        let found = find(&tables, prompt, &mut buffers.pages);
        let found = if hits { found } else { found.map(PrefixMatch::without_hit) };
        let leader = find_leader(tables.prefixes, tables.sequences, found.as_ref(), prompt);
        let seq = spawn(&mut world, prompt, found.as_ref());
        world.buffers.admitted.push(Admitted { seq, leader });
    }
    world.counters.admissions += prompts.len() as u64;
    Ok(())
}

/// Checks that prompts fit together. Returns whether they fit with their hits; otherwise they fit only without them.
///
/// # Errors
/// [`Error::OutOfPages`].
fn check_fit(world: &Estimate<'_>, buffers: &mut Buffers, prompts: &[Prompt<'_>]) -> Result<bool, Error> {
    let budget = world.budget();
    let (lacking, idle) = estimate_all(world, buffers, prompts, None);
    if lacking + idle <= budget.unpromised() {
        return Ok(true);
    }
    for prompt in prompts {
        check_fits_alone(world, prompt.tokens.len() as u32, prompt.admit.promise)?;
    }
    let alone = lacking_without_hits(world, prompts);
    if fit_alone(world, alone, budget.unpromised()) {
        return Ok(false);
    }
    let after = budget.after(0, |step, available| {
        let (lacking, idle) = estimate_all(world, buffers, prompts, Some(step));
        lacking + idle <= available || fit_alone(world, alone, available)
    });
    let available = budget.unpromised().saturating_sub(idle);
    Err(Error::OutOfPages { wanted: lacking, available, after })
}

/// Returns the number of pages that prompts lack without their hits.
fn lacking_without_hits(world: &Estimate<'_>, prompts: &[Prompt<'_>]) -> u64 {
    let lacking =
        |prompt: &Prompt<'_>| u64::from(pages_lacking(world, None, prompt.tokens.len() as u32, prompt.admit.promise));
    prompts.iter().map(lacking).sum()
}

/// Returns the number of pages that all prompts lack, and the number of idle pages in their matches, now or as of the
/// completion of a step. An idle page of several matches counts once.
fn estimate_all(
    world: &Estimate<'_>,
    buffers: &mut Buffers,
    prompts: &[Prompt<'_>],
    after: Option<StepId>,
) -> (u64, u64) {
    let prefixes = world.prefixes;
    let Buffers { pages, pool_pages: idle, counted, .. } = buffers;
    let mut lacking = 0;
    idle.clear();
    for prompt in prompts {
        let found = find(world, prompt, pages);
        let len = prompt.tokens.len() as u32;
        lacking += u64::from(pages_lacking(world, found.as_ref(), len, prompt.admit.promise));
        let Some(found) = found else { continue };
        let mut count = |list: &[PageId]| {
            for page in list {
                if !counted.contains(page.raw()) {
                    counted.insert(Bits::one(page.index()));
                    idle.push(*page);
                }
            }
        };
        let of_nodes = prefixes.idle_node_pages(&found, after);
        count(&pages[pages.len() - of_nodes as usize..]);
        for cell in prefixes.tails(found.end(), found.pages()) {
            let cells = prefixes.cells();
            if cells.is_on_device(cell) && cells.is_idle(cell, after) {
                count(cells.pages(cell));
            }
        }
    }
    idle.iter().for_each(|page| counted.remove(Bits::one(page.index())));
    (lacking, idle.len() as u64)
}

/// Checks a prompt and its promise, but not its tokens.
fn check_prompt(world: &Estimate<'_>, prompt: &Prompt<'_>) -> Result<(), Error> {
    let Prompt { namespace, tokens, admit } = *prompt;
    if tokens.is_empty() {
        return Err(Error::EmptyPrompt);
    }
    let (len, max) = (tokens.len() as u64, u64::from(world.shape.max_sequence_len));
    if len > max {
        return Err(Error::TooLong { len, max });
    }
    check_promise(world.shape, admit.promise)?;
    if !world.prefixes.names.is_named(namespace) {
        return Err(Error::UnnamedNamespace { namespace });
    }
    Ok(())
}

/// Checks the tokens of a prompt that are not cached. Cached tokens were checked when they were admitted or appended.
#[inline]
fn check_rest(shape: &EngineShape, found: Option<&PrefixMatch>, prompt: &[TokenId]) -> Result<(), Error> {
    let cached = found.map_or(0, |found| found.pages() * shape.layout.page_size());
    check_known(cached, &prompt[cached as usize..])
}

/// Returns the prefix that a prompt's sequence can use, in whole pages, and writes its device pages into `pages`.
fn find(world: &Estimate<'_>, prompt: &Prompt<'_>, pages: &mut Vec<PageId>) -> Option<PrefixMatch> {
    pages.clear();
    world.shape.shares_prefixes().then(|| {
        let each = |found: &[_]| pages.extend_from_slice(found);
        let found = world.prefixes.match_pages(prompt.namespace, prompt.matchable(), each);
        pages.truncate(found.device_pages() as usize);
        found
    })
}

/// Returns the number of pages that a sequence of `len` tokens lacks after its match, including the pages to load; at
/// least the outstanding pages of its promise. At most `u32::MAX`, which is more than any pool has.
#[inline]
fn pages_lacking(world: &Estimate<'_>, found: Option<&PrefixMatch>, len: u32, promise: u32) -> u32 {
    let (page_size, limits) = (world.shape.layout.page_size(), world.sequences.limits());
    let matched = found.map_or(0, PrefixMatch::device_pages);
    if limits.is_none() {
        return len.max(promise).div_ceil(page_size) - matched;
    }
    let [len, promised] = [len, promise].map(|tokens| tokens.div_ceil(page_size));
    let (pages, cells) = found.map_or((0, 0), |found| (found.pages(), found.swap_cell_pages()));
    let state = limits.state_pages();
    let used = if pages > 0 { state } else { 0 };
    let held = limits.held(0, pages, pages) + used - (pages - matched) - cells;
    let outstanding = u64::from(limits.outstanding(promised, matched, matched, matched));
    let promised = outstanding + u64::from(if promised > 0 { state + cells } else { 0 });
    saturated((limits.most(len) - u64::from(held)).max(promised))
}

/// Returns the cost of a sequence of `len` tokens once its match is locked. The cost is the pages that the sequence
/// lacks, and the idle pages of the match, which then back no promise.
fn estimate(world: &Estimate<'_>, found: Option<&PrefixMatch>, len: u32, promise: u32) -> Admission {
    let (prefixes, budget) = (world.prefixes, world.budget());
    let (matched, idle) = found.map_or((0, 0), |m| (m.device_pages(), prefixes.idle_pages(m, None)));
    let (swap_pages, cell_pages) = found.map_or((0, 0), |found| (found.swap_pages(), found.swap_cell_pages()));
    let lacking = pages_lacking(world, found, len, promise);
    let mut admission = Admission {
        cached_len: (matched + swap_pages) * world.shape.layout.page_size(),
        swap_pages: swap_pages + cell_pages,
        idle_pages: idle,
        lacking_pages: lacking,
        available_pages: budget.unpromised().saturating_sub(idle.into()) as u32,
        after: None,
        leader: None,
    };
    if !admission.fits() {
        let alone = u64::from(pages_lacking(world, None, len, promise));
        admission.after = budget.after(0, |step, available| {
            let idle = found.map_or(0, |m| prefixes.idle_pages(m, Some(step)));
            u64::from(lacking) + u64::from(idle) <= available || fit_alone(world, alone, available)
        });
    }
    admission
}

/// Returns the match that a sequence of `len` tokens uses, and its cost: `found`, or `found` without its pages if the
/// sequence fits only without them.
///
/// # Errors
/// [`Error::TooLong`] if the sequence does not fit an empty pool.
#[inline]
fn cost(
    world: &Estimate<'_>,
    found: Option<PrefixMatch>,
    len: u32,
    promise: u32,
) -> Result<(Option<PrefixMatch>, Admission), Error> {
    let cost = estimate(world, found.as_ref(), len, promise);
    if cost.fits() {
        return Ok((found, cost));
    }
    check_fits_alone(world, len, promise)?;
    Ok(cost_without_hit(world, found, len, promise).unwrap_or((found, cost)))
}

/// Checks that a sequence of `len` tokens and its promise fit an empty pool. Only with groups of layers can a sequence
/// of an allowed length need more than all pages. O(log of the length).
///
/// # Errors
/// [`Error::TooLong`] with the longest sequence that fits.
#[cold]
fn check_fits_alone(world: &Estimate<'_>, len: u32, promise: u32) -> Result<(), Error> {
    let fits = |len, promise| pages_lacking(world, None, len, promise) <= world.shape.usable_pages();
    if fits(len, promise) {
        return Ok(());
    }
    // A longer sequence needs no fewer pages.
    let (mut max, mut over) = (0, len.max(promise));
    while over - max > 1 {
        let middle = max + (over - max) / 2;
        *(if fits(middle, middle) { &mut max } else { &mut over }) = middle;
    }
    Err(Error::TooLong { len: len.max(promise).into(), max: max.into() })
}

/// Returns [`cost`] without the hit, if the hit may be ignored and the sequence then fits.
fn cost_without_hit(
    world: &Estimate<'_>,
    found: Option<PrefixMatch>,
    len: u32,
    promise: u32,
) -> Option<(Option<PrefixMatch>, Admission)> {
    let lacking = u64::from(pages_lacking(world, None, len, promise));
    let found = found.filter(|_| fit_alone(world, lacking, world.budget().unpromised()))?;
    let found = found.without_hit();
    let cost = estimate(world, Some(&found), len, promise);
    Some((Some(found), cost))
}

/// Returns whether prompts that lack `lacking` pages without their hits are admitted without them if they do not fit
/// otherwise: there are groups, and the pool is idle, because all pages are available. While sequences run, such
/// prompts wait instead.
fn fit_alone(world: &Estimate<'_>, lacking: u64, available: u64) -> bool {
    let pages = u64::from(world.shape.usable_pages());
    !world.sequences.limits().is_none() && available == pages && lacking <= pages
}

/// Returns the leader of a prompt whose cached prefix is `found`, if there is one.
fn find_leader(
    prefixes: &PrefixTree,
    sequences: &SequenceTable,
    found: Option<&PrefixMatch>,
    prompt: &Prompt<'_>,
) -> Option<Leader> {
    let (found, tokens) = (found?, prompt.matchable());
    if prefixes.has_cells() {
        // A leader computes more than group 0 has cached.
        let full = prefixes.match_full(found.scope().namespace, tokens);
        return leader_of(prefixes, sequences, &full, tokens);
    }
    leader_of(prefixes, sequences, found, tokens)
}

/// Creates the sequence of a prompt that fits.
fn spawn(world: &mut Admitting<'_>, prompt: &Prompt<'_>, found: Option<&PrefixMatch>) -> SeqKey {
    let Prompt { namespace, tokens, admit } = *prompt;
    let lock = lock(world, found, namespace);
    let seq = world.sequences.spawn(namespace, tokens, lock);
    world.prefixes.names.hold(namespace);
    attach(world, seq, found, admit.promise, AdmissionKind::admitted(tokens.len() as u32));
    seq
}

fn lock(world: &mut Admitting<'_>, found: Option<&PrefixMatch>, namespace: Namespace) -> PrefixLock {
    let Admitting { prefixes, fence, .. } = world;
    match found {
        Some(found) => prefixes.lock(found, fence).expect("nothing changed since the match"),
        None => prefixes.lock_private(namespace),
    }
}

/// Writes the matched pages into the sequence's page table, and reserves the rest of its promise. If some pages must be
/// loaded, the page table gets only the pages before the first of these; with groups, it gets no page.
fn attach(world: &mut Admitting<'_>, seq: SeqKey, found: Option<&PrefixMatch>, promise: u32, kind: AdmissionKind) {
    let page_size = world.shape.layout.page_size();
    let mut row = world.sequences.row_mut(seq).expect("just looked up");
    let on_device = found.map_or(0, PrefixMatch::device_pages);
    let (pages, cells) = found.map_or((0, 0), |found| (found.pages(), found.swap_cell_pages()));
    let waits = pages > on_device || cells > 0;
    let published = if waits && !row.limits().is_none() { 0 } else { on_device };
    row.sequence.published = published;
    row.append_published(&world.buffers.pages[..published as usize]);
    let sequence = &mut *row.sequence;
    sequence.cached_len = pages * page_size;
    sequence.planned_len = sequence.cached_len;
    sequence.admission_kind = kind;
    if waits {
        row.begin_pending(pages - published, on_device - published, cells);
    }
    if row.has_state() {
        row.states_mut().resume(pages * page_size);
    }
    match found.filter(|_| world.prefixes.has_cells()) {
        Some(found) => attach_tails(world.shape, world.prefixes, world.fence, world.counters, &mut row, found),
        None => row.begin_marks(0, 0),
    }
    row.begin_front(seq);
    world.sequences.promise(seq, promise.div_ceil(page_size));
}

/// Makes a sequence a user of the cells in its prefix's tails, and sets its marks. A sequence that waits for a load
/// names no cell until the load. O(tails).
fn attach_tails(
    shape: &EngineShape,
    prefixes: &mut PrefixTree,
    fence: &mut Fence,
    counters: &mut Stats,
    row: &mut RowMut<'_>,
    found: &PrefixMatch,
) {
    let page_size = prefixes.page_size();
    let (full, last) = if row.has_state() {
        state_marks(shape, found, row)
    } else {
        (found.full_pages(), (row.sequence.token_len - 1) / page_size)
    };
    row.begin_marks(full, last);
    let tokens = |pages: u32| u64::from(pages) * u64::from(page_size);
    let [ignored, superseded, evicted] = found.lost_pages().map(tokens);
    counters.lost_hit_tokens += tokens(found.full_pages() - found.pages());
    counters.ignored_hit_tokens += ignored;
    counters.superseded_hit_tokens += superseded;
    counters.evicted_hit_tokens += evicted;
    let lock = row.sequence.lock.as_ref().expect("it is admitted");
    prefixes.acquire_tails(lock, found.pages(), fence);
    if row.pending() == 0 {
        name_tails(row, prefixes);
    }
}

/// Returns the marks of a sequence whose layers keep a state, in pages, or 0: the end of its full match if prompts part
/// there, and the last whole page before the margin at its end. In the second case, the sequence supersedes the state
/// of its hit.
fn state_marks(shape: &EngineShape, found: &PrefixMatch, row: &mut RowMut<'_>) -> (u32, u32) {
    let EngineShape { state_margin, state_gap, keep_used_states, .. } = *shape;
    let (page_size, hit) = (shape.layout.page_size(), found.pages());
    let end = (row.sequence.token_len - 1).saturating_sub(state_margin) / page_size;
    let ends = end > hit && (hit == 0 || (end - hit) * page_size >= state_gap);
    row.states_mut().supersedes = ends && hit > 0 && !keep_used_states;
    let branch = if found.branches() { found.full_pages() } else { 0 };
    (branch, if ends { end } else { 0 })
}
