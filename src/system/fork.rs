//! Forks a sequence. Children share its whole pages; those of groups other than group 0 become cells. The partly filled
//! last page of each track is copied.

use crate::config::EngineShape;
use crate::error::Error;
use crate::fence::Fence;
use crate::id::{PageId, SeqKey, StepId};
use crate::page::PagePool;
use crate::plan::PageCopy;
use crate::prefix::PrefixTree;
use crate::sequence::{Current, Sequence, SequenceTable, StateOwner, StatePlace};
use crate::stats::Stats;
use crate::step::StepLog;
use crate::system::access::access;
use crate::system::page_budget::PageBudget;
use crate::system::promise::check_promise;
use crate::system::publish::{keep, publish};
use crate::system::reclaim::reclaim;
use crate::world::{Buffers, World};

access! {
    /// Tables of [`begin_fork`] and [`end_fork`].
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

/// The number of children, and the parts of the parent that each child gets.
#[derive(Clone, Copy)]
pub(crate) struct Parts {
    count: u32,
    token_len: u32,
    cached_len: u32,
    /// Number of whole computed pages, which the children share.
    shared: u32,
    /// Number of computed pages, including a partly filled one.
    page_len: u32,
    /// Number of pages that each child copies: the partly filled page of each track, and the pages of a state.
    copied: u32,
    /// Number of these pages that are of a state.
    of_state: u32,
    /// Number of promised places.
    promised: u32,
}

impl Parts {
    fn new(parent: &Sequence, shape: &EngineShape, of_state: u32, promise: u32, count: u32) -> Self {
        let (token_len, cached_len) = (parent.token_len, parent.cached_len.min(parent.token_len));
        let page_size = shape.layout.page_size();
        let (shared, page_len) = (cached_len / page_size, cached_len.div_ceil(page_size));
        let copied = (page_len - shared) * shape.table.tracks + of_state;
        let promised = promise.div_ceil(page_size);
        Self { count, token_len, cached_len, shared, page_len, copied, of_state, promised }
    }
}

/// Begins [`Engine::fork`](crate::Engine::fork): checks the call and takes the targets of its copies. The backend then
/// receives the saves of evicted pages, before [`end_fork`] publishes pages that the tree may have in swap memory
/// alone. Returns `None` without children. O(pages evicted, and copies).
///
/// # Errors
/// [`Error::UnknownSequence`], [`Error::Preempted`], [`Error::NotAccepted`], [`Error::TooLong`],
/// [`Error::OutOfSequences`], [`Error::OutOfTokens`], [`Error::OutOfSteps`], [`Error::OutOfPages`]. If layers keep a
/// state, also [`Error::StateLost`] and [`Error::StateAhead`]. Nothing changes then.
pub(crate) fn begin_fork(mut world: Fork<'_>, seq: SeqKey, count: u32, promise: u32) -> Result<Option<Parts>, Error> {
    let parent = world.sequences.running(seq)?;
    world.sequences.check_accepted(seq)?;
    check_promise(world.shape, promise)?;
    let of_state = copied_state(world.sequences, seq, parent)?;
    let parts = Parts::new(parent, world.shape, of_state, promise, count);
    world.sequences.check_room(count, parts.token_len)?;
    world.buffers.children.clear();
    world.buffers.copies.clear();
    if count == 0 {
        return Ok(None);
    }
    if parts.copied > 0 {
        world.steps.check_room()?;
    }
    check_pages(&mut world, seq, &parts)?;
    // Publishing may turn evictable pages into protected ones, so eviction comes first. Nothing fails after this.
    take_targets(&mut world, u64::from(count) * u64::from(parts.copied));
    Ok(Some(parts))
}

/// Returns the number of pages of the parent's state that each child copies: none if the state is a cell, which they
/// share.
///
/// # Errors
/// [`Error::StateLost`], [`Error::StateAhead`].
fn copied_state(sequences: &SequenceTable, seq: SeqKey, parent: &Sequence) -> Result<u32, Error> {
    if !sequences.has_states() {
        return Ok(0);
    }
    if parent.planned_len > parent.cached_len.min(parent.token_len) {
        return Err(Error::StateAhead { seq });
    }
    let states = sequences.states(parent);
    match states.current {
        Current::Fresh => Ok(0),
        Current::Lost => Err(Error::StateLost { seq }),
        Current::At(at) if states.places[usize::from(at)].owner == StateOwner::Row => {
            Ok(sequences.state_pages(parent, at).len() as u32)
        }
        Current::At(_) => Ok(0),
    }
}

/// Ends a fork: writes the children and their copies into the buffers, and returns the step of the copies. O(tokens)
/// for each child.
///
/// Publishes the parent's whole computed pages. Without prefix reuse no prompt matches these pages, but the children
/// share them.
pub(crate) fn end_fork(mut world: Fork<'_>, seq: SeqKey, parts: &Parts) -> Option<StepId> {
    let Fork { pages, prefixes, sequences, fence, buffers, .. } = &mut world;
    publish(pages, prefixes, sequences, fence, buffers, seq);
    keep(pages, prefixes, sequences, fence, buffers, seq);
    let has_copies = parts.copied > 0;
    if has_copies {
        name_sources(&mut world, seq, parts);
    }
    let parent = world.sequences.running(seq).expect("the caller checked it");
    let sent = world.steps.sent_for_good(parent.last_item, parent.dirty_from.page()).max(parent.inherited);
    for _ in 0..parts.count {
        let child = make_child(&mut world, seq, parts, sent);
        world.buffers.children.push(child);
    }
    has_copies.then(|| begin_copies(&mut world, seq))
}

/// Checks that there are pages for the copies, for the promises of the children, and for the tails that the parent
/// keeps.
fn check_pages(world: &mut Fork<'_>, seq: SeqKey, parts: &Parts) -> Result<(), Error> {
    let Fork { pages, prefixes, sequences, fence, .. } = world;
    let &Parts { count, shared, page_len, copied, promised, .. } = parts;
    let outstanding = sequences.limits().outstanding(promised, page_len, shared, shared);
    let lacks_state = promised > 0 && parts.of_state == 0;
    let outstanding = outstanding + if lacks_state { sequences.limits().state_pages() } else { 0 };
    let of_children = u64::from(count) * (u64::from(copied) + u64::from(outstanding));
    let of_parent = u64::from(sequences.row_mut(seq)?.keep_cost(shared, shared));
    PageBudget::new(pages, prefixes, sequences, fence).check(of_children + of_parent, 0)
}

/// Takes the targets of `count` copies.
fn take_targets(world: &mut Fork<'_>, count: u64) {
    let Fork { pages, prefixes, counters, buffers, .. } = world;
    let evicted = reclaim(pages, prefixes, count, &mut buffers.pool_pages);
    counters.evicted_pages += u64::from(evicted);
    for _ in 0..count {
        let mut target = [PageId::default()];
        assert!(pages.alloc(&mut target), "a page was reclaimed");
        buffers.copies.push(PageCopy { source: target[0], target: target[0] });
    }
}

/// Writes the sources of the copies: for each child, the partly filled page of each track.
fn name_sources(world: &mut Fork<'_>, seq: SeqKey, parts: &Parts) {
    let Fork { shape, sequences, buffers, .. } = world;
    let parent = sequences.running(seq).expect("the caller checked it");
    for copies in buffers.copies.chunks_exact_mut(parts.copied as usize) {
        let tails = (0..shape.table.tracks)
            .flat_map(|track| sequences.page_pieces(parent, track, parts.shared, parts.page_len).flatten());
        let state = (parts.of_state > 0).then(|| current_state(sequences, parent));
        let tails = tails.chain(state.into_iter().flatten());
        copies.iter_mut().zip(tails).for_each(|(copy, source)| copy.source = *source);
    }
}

/// Returns the pages of a sequence's current state.
fn current_state<'a>(sequences: &'a SequenceTable, sequence: &Sequence) -> &'a [PageId] {
    match sequences.states(sequence).current {
        Current::At(at) => sequences.state_pages(sequence, at),
        _ => &[],
    }
}

/// Creates the next child, which shares the parent's whole pages and owns the targets of its copies. Plans that can no
/// longer be aborted have sent the words of the parent's first `sent` pages.
fn make_child(world: &mut Fork<'_>, seq: SeqKey, parts: &Parts, sent: u32) -> SeqKey {
    let Fork { prefixes, sequences, fence, .. } = world;
    let parent = sequences.running(seq).expect("the caller checked it");
    let lock = parent.lock.as_ref().expect("a running sequence holds its prefix");
    let lock = prefixes.lock_again(lock, fence);
    prefixes.names.hold(parent.namespace);
    let child = sequences.spawn_copy(seq, parts.token_len, lock);
    share_pages(world, seq, child, parts.shared, sent);
    let Fork { sequences, buffers, .. } = world;
    let copies = buffers.copies.iter().skip(buffers.children.len() * parts.copied as usize);
    buffers.pages.clear();
    buffers.pages.extend(copies.take(parts.copied as usize).map(|copy| copy.target));
    let mut row = sequences.row_mut(child).expect("just made");
    let (pages, state) = buffers.pages.split_at((parts.copied - parts.of_state) as usize);
    row.append_pages(parts.page_len - parts.shared, pages);
    (row.sequence.cached_len, row.sequence.planned_len) = (parts.cached_len, parts.cached_len);
    if !state.is_empty() {
        let place = StatePlace { owner: StateOwner::Row, len: parts.cached_len, ..StatePlace::default() };
        row.put_current(place, state);
    }
    row.begin_front(child);
    if parts.of_state == 0 && sequences.has_states() {
        share_state(world, seq, child);
    }
    let Fork { sequences, .. } = world;
    sequences.promise(child, parts.promised);
    child
}

/// Writes the parent's first `shared` pages into a child's page table, and makes the child a user of their cells.
fn share_pages(world: &mut Fork<'_>, seq: SeqKey, child: SeqKey, shared: u32, sent: u32) {
    let Fork { prefixes, sequences, fence, buffers, .. } = world;
    let limits = *sequences.limits();
    let inherited = sequences.inherit(seq, child, shared.min(sent));
    let parent = sequences.running(seq).expect("the caller checked it");
    buffers.pages.clear();
    for piece in sequences.page_pieces(parent, 0, inherited, shared) {
        buffers.pages.extend_from_slice(piece);
    }
    let mut row = sequences.row_mut(child).expect("just made");
    row.sequence.published = shared;
    row.begin_marks(shared, shared);
    row.append_published(&buffers.pages);
    for held in limits.held_groups(shared) {
        for place in held.first..shared {
            let parent = sequences.running(seq).expect("the caller checked it");
            let cell = sequences.cell(parent, held.group, place);
            prefixes.acquire_cell(cell, fence);
            if place >= inherited {
                let mut row = sequences.row_mut(child).expect("just made");
                row.name_cell(&held, place, cell, prefixes.cells().pages(cell));
            }
        }
    }
}

/// Makes a child a user of the cell with its parent's state, if the parent has a state.
fn share_state(world: &mut Fork<'_>, seq: SeqKey, child: SeqKey) {
    let Fork { prefixes, sequences, fence, .. } = world;
    let parent = sequences.running(seq).expect("the caller checked it");
    let states = sequences.states(parent);
    let Current::At(at) = states.current else { return };
    let place = states.places[usize::from(at)];
    let StateOwner::Cell(cell) = place.owner else { return };
    prefixes.acquire_cell(cell, fence);
    let mut row = sequences.row_mut(child).expect("just made");
    row.put_current(place, prefixes.cells().pages(cell));
}

/// Begins the step of the copies, which read the parent's last page of each track and write those of the children.
fn begin_copies(world: &mut Fork<'_>, seq: SeqKey) -> StepId {
    let step = world.steps.begin(false, 0);
    for &key in world.buffers.children.iter().chain([&seq]) {
        world.sequences.get_mut(key).expect("it is live").last_step = step;
    }
    step
}
