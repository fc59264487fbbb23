//! The audit of all tables: the numbered invariants, and the owner of every page.

use std::collections::HashMap;
use std::fmt;

use crate::id::{CellId, NodeKey, PageId, PrefixLock, SeqKey, StepId};
use crate::layout::HeldGroup;
use crate::page::PageState;
use crate::sequence::{Current, RowStates, Sequence, StateOwner, StatePlace};
use crate::step::StepItem;

use super::World;

impl World {
    /// Checks the numbered invariants of all tables (L2 only in part), for tests and debugging. O(whole state).
    ///
    /// # Errors
    /// The first broken invariant. If a page shows the violation, also this page and its owner.
    pub fn verify(&self) -> Result<(), Broken> {
        let broken = |(invariant, page)| Broken { invariant, page, owner: page.and_then(|page| self.owner(page)) };
        self.pages.check().map_err(broken)?;
        self.steps.check().map_err(|invariant| broken((invariant, None)))?;
        let fence = self.fence.check(self.steps.newest(), self.pages.fenced_count());
        fence.map_err(|invariant| broken((invariant, None)))?;
        let all = self.count_locks(|_| true);
        let fenced = self.count_locks(|holder| holder == LockHolder::Fence);
        self.prefixes.check(&all, &fenced, &self.fence).map_err(broken)?;
        self.prefixes.check_swap().map_err(broken)?;
        // The audits of cells follow the paths of sequences, so the sequences are checked first.
        self.check_sequences().map_err(broken)?;
        self.prefixes.check_cells(&self.count_cells(), &self.fence).map_err(broken)?;
        self.check_tails().map_err(|invariant| broken((invariant, None)))?;
        self.check_states().map_err(|invariant| broken((invariant, None)))?;
        let fetches = self.fetch_locks().map(|lock| lock.scope().namespace);
        let namespaces = self.sequences.iter().map(|(_, s)| s.namespace).chain(fetches);
        if !self.prefixes.names_are_counted(namespaces) {
            return Err(broken(("T11: names stay while they have users; users are counted", None)));
        }
        self.check_drafts().map_err(|invariant| broken((invariant, None)))?;
        self.check_promises().map_err(|invariant| broken((invariant, None)))?;
        self.check_owners().map_err(broken)
    }

    /// Returns every lock with its holder. The audit of T3 counts these locks.
    fn lock_holders(&self) -> impl Iterator<Item = (LockHolder, &PrefixLock)> {
        let sequences = self.sequences.iter().filter_map(|(_, sequence)| sequence.lock.as_ref());
        let sequences = sequences.map(|lock| (LockHolder::Sequence, lock));
        let fence = self.fence.locks().map(|(_, lock)| (LockHolder::Fence, lock));
        let fetches = self.fetch_locks().map(|lock| (LockHolder::Fetch, lock));
        sequences.chain(fence).chain(fetches)
    }

    fn fetch_locks(&self) -> impl Iterator<Item = &PrefixLock> {
        let swap = self.prefixes.has_swap().then(|| self.prefixes.swap());
        swap.into_iter().flat_map(|swap| swap.fetch_locks())
    }

    /// Counts the locks that end at each node, of the holders that `counted` selects.
    fn count_locks(&self, counted: impl Fn(LockHolder) -> bool) -> HashMap<NodeKey, u32> {
        let mut counts = HashMap::new();
        let locks = self.lock_holders().filter(|(holder, _)| counted(*holder));
        for node in locks.filter_map(|(_, lock)| lock.node()) {
            *counts.entry(node).or_default() += 1;
        }
        counts
    }

    fn check_sequences(&self) -> Result<(), (&'static str, Option<PageId>)> {
        let page_size = self.prefixes.page_size();
        for (_, s) in self.sequences.iter() {
            let first = (s.page_len > 0).then(|| self.sequences.page(s, 0));
            let ensure = |holds: bool, what| if holds { Ok(()) } else { Err((what, first)) };
            ensure(s.cached_len <= s.planned_len, "S1: cached_len <= planned_len")?;
            let (pages, pending) = (s.planned_len.div_ceil(page_size), self.sequences.pending(s));
            let what = "S1: page_len = ceil(planned_len / page_size), less pending pages";
            ensure(s.page_len + pending == pages, what)?;
            let waits = self.steps.open_item(s.last_item).is_none() && s.published == s.page_len;
            ensure(pending == 0 || waits, "H5: a sequence that waits is in no open plan")?;
            let listed = pending == 0 || s.page_len == 0 || self.sequences.limits().is_none();
            ensure(listed, "H5: with groups, a sequence that waits lists no page")?;
            let published = self.sequences.prefix_pages(s) * page_size;
            ensure(published <= s.cached_len.min(s.token_len), "S2: published pages are computed")?;
            ensure(s.dirty_from.page() <= s.page_len, "S4: dirty_from lies within the pages")?;
            ensure(s.inherited <= s.published, "S4: inherited pages are published")?;
            match &s.lock {
                Some(lock) => {
                    let path = self.prefixes.nodes().path(lock);
                    let own = self.sequences.pages(s).take(s.published as usize);
                    let same = path.len() == self.sequences.prefix_pages(s) as usize;
                    let same = same && path.into_iter().take(s.published as usize).eq(own);
                    ensure(same, "W2: published and pending pages are the lock's path")?;
                }
                None => {
                    ensure(s.page_len == 0, "S3: a preempted sequence has no pages")?;
                    ensure(s.promised == 0, "S3: a preempted sequence is promised nothing")?;
                }
            }
            let known = self.sequences.last_entry_is_consistent(s);
            ensure(known, "S6: a row stores the entry of its last page and its last token")?;
        }
        if !self.sequences.leaves_are_counted() {
            return Err(("S5: a leaf's user count is the number of rows that use it", None));
        }
        if !self.sequences.fronts_are_indexed() {
            return Err(("S8: each sequence in the index runs and is found by its front", None));
        }
        Ok(())
    }

    /// Returns the places that a sequence holds in groups other than group 0.
    fn held_places<'a>(&'a self, s: &'a Sequence) -> impl Iterator<Item = (HeldGroup, u32)> + 'a {
        let held = self.sequences.limits().held_groups(s.published);
        held.flat_map(|held| (held.first..s.page_len).map(move |place| (held, place)))
    }

    /// Returns the cells in the tails of a sequence with pending pages.
    fn awaited_cells(&self, s: &Sequence) -> Vec<CellId> {
        let Some(lock) = s.lock.as_ref().filter(|_| self.sequences.pending(s) > 0) else {
            return Vec::new();
        };
        let end = self.prefixes.nodes().end_of(lock.node());
        self.prefixes.tails(end, self.sequences.prefix_pages(s)).collect()
    }

    /// Returns the cells in the places of a sequence's states.
    fn state_cells<'a>(&'a self, s: &'a Sequence) -> impl Iterator<Item = (StatePlace, CellId)> + 'a {
        self.sequences.state_places(s).filter_map(|(_, place)| match place.owner {
            StateOwner::Cell(cell) => Some((place, cell)),
            _ => None,
        })
    }

    /// Counts, for each cell, the places that name it, and the waiting sequences and the fetches whose tails contain
    /// it.
    fn count_cells(&self) -> HashMap<CellId, u32> {
        let mut counts = HashMap::new();
        for (_, s) in self.sequences.iter() {
            for (held, place) in self.held_places(s) {
                let cell = self.sequences.cell(s, held.group, place);
                if cell.is_some() {
                    *counts.entry(cell).or_default() += 1;
                }
            }
            for cell in self.awaited_cells(s).into_iter().chain(self.state_cells(s).map(|(_, cell)| cell)) {
                *counts.entry(cell).or_default() += 1;
            }
        }
        for cell in self.prefixes.cells_of_fetches() {
            *counts.entry(cell).or_default() += 1;
        }
        counts
    }

    /// Checks S10, S11 and G7.
    fn check_states(&self) -> Result<(), &'static str> {
        let running = self.sequences.iter().filter(|(_, s)| self.sequences.has_states() && s.lock.is_some());
        for (_, s) in running {
            let states = self.sequences.states(s);
            let is_current = match states.current {
                Current::Fresh => s.planned_len == 0 || self.sequences.pending(s) > 0,
                Current::At(at) => {
                    let place = states.places[usize::from(at)];
                    place.owner == StateOwner::Row || place.owner != StateOwner::Nobody && place.len == s.planned_len
                }
                Current::Lost => true,
            };
            if !is_current {
                return Err("S10: the current state is behind the last planned token");
            }
            if s.dirty_from.is_steady() && !self.sequences.can_be_steady(s) {
                return Err("S10: a steady row updates its state in place");
            }
            let open: Vec<_> = self.steps.open_items(s.last_item).collect();
            let owned = self.sequences.state_places(s).filter(|(_, place)| place.owner == StateOwner::Row).count();
            let others = open.iter().filter(|item| item.state.reads != item.state.writes).count();
            if owned > 1 + others.min(if states.careful_until > 0 { 2 } else { 1 }) {
                return Err("S11: a row owns one state, and more only while open items read others");
            }
            check_uses(states, &open)?;
            let limits = self.sequences.limits();
            let (group, lock) = (limits.state().expect("there are states").group, s.lock.as_ref().expect("it runs"));
            for (place, cell) in self.state_cells(s) {
                let (pages, nodes) = (place.len / self.prefixes.page_size(), self.prefixes.nodes());
                let is_at_page = place.len.is_multiple_of(self.prefixes.page_size()) && pages <= s.published;
                let entry = |pages| nodes.entry_at(&mut nodes.path_of(lock, s.published), pages - 1);
                if !is_at_page || self.prefixes.cells().at(group, entry(pages)) != cell {
                    return Err("G7: a row's cell is the state behind its entry's last token");
                }
            }
        }
        Ok(())
    }

    /// Checks G4 and G6.
    fn check_tails(&self) -> Result<(), &'static str> {
        for (_, s) in self.sequences.iter() {
            let Some(lock) = &s.lock else { continue };
            for (held, place) in self.held_places(s) {
                let cell = self.sequences.cell(s, held.group, place);
                if !cell.is_some() {
                    continue; // The pages are the row's own (W1).
                }
                let nodes = self.prefixes.nodes();
                let mut path = nodes.path_of(lock, s.published);
                if place >= s.published
                    || self.prefixes.cells().at(held.group, nodes.entry_at(&mut path, place)) != cell
                {
                    return Err("G4: a held place names the cell at its entry of the lock's path");
                }
                let tracks = held.track..held.track + held.tracks;
                let own =
                    tracks.flat_map(|track| self.sequences.track_pages(s, track, place).flatten().copied().next());
                if !own.eq(self.prefixes.cells().pages(cell).iter().copied()) {
                    return Err("G4: a held place that names a cell has its pages");
                }
            }
            if self.sequences.marks(s).any(|mark| mark <= s.published) {
                return Err("G6: waiting marks are above the published pages");
            }
        }
        Ok(())
    }

    fn check_drafts(&self) -> Result<(), &'static str> {
        let waits = |s: &Sequence| {
            let item = self.steps.open_item(s.last_item);
            item.is_some_and(|item| {
                s.cached_len <= item.start && item.end == s.planned_len && s.planned_len <= s.token_len
            })
        };
        let mut drafted = self.sequences.iter().filter(|(_, s)| s.is_drafted());
        if drafted.all(|(_, s)| waits(s)) {
            Ok(())
        } else {
            Err("S9: drafts that wait are the last item of their sequence, in an open step")
        }
    }

    fn check_promises(&self) -> Result<(), &'static str> {
        if !self.sequences.promises_are_counted() {
            return Err("S7: the total of outstanding pages is the sum over all sequences");
        }
        let fenced = self.pages.fenced_count();
        if self.sequences.all_outstanding() <= self.reclaimable() + fenced {
            Ok(())
        } else {
            Err("W4: promised <= free + evictable + fenced")
        }
    }

    fn check_owners(&self) -> Result<(), (&'static str, Option<PageId>)> {
        let mut owners = HashMap::new();
        for (page, owner) in self.owners() {
            if owners.insert(page, owner).is_some() {
                return Err(("W1: a page has one owner", Some(page)));
            }
            let state = match owner {
                Owner::Sequence(_) => PageState::Private,
                Owner::Node(_) => PageState::Cached,
                Owner::Fence(_) => PageState::Fenced,
            };
            if self.pages.state(page) != state {
                return Err(("W1: a page's state is that of its owner", Some(page)));
            }
        }
        let free = self.pages.free_count() as usize;
        if owners.len() + free == self.shape.usable_pages() as usize {
            return Ok(());
        }
        let pages = (self.shape.reserved_pages..self.pages.page_count()).map(PageId::new);
        let lost =
            pages.filter(|page| self.pages.state(*page) != PageState::Free).find(|page| !owners.contains_key(page));
        Err(("W1: a page that is not free has an owner", lost))
    }

    /// Returns each page that has an owner, with this owner.
    fn owners(&self) -> impl Iterator<Item = (PageId, Owner)> + '_ {
        let private = self.sequences.iter().flat_map(move |(seq, s)| {
            let first = self.sequences.track_pages(s, 0, s.published).flatten().copied();
            let private = |&(held, place): &(HeldGroup, u32)| !self.sequences.cell(s, held.group, place).is_some();
            let others = self.held_places(s).filter(private).flat_map(move |(held, place)| {
                (held.track..held.track + held.tracks)
                    .flat_map(move |track| self.sequences.track_pages(s, track, place).flatten().copied().next())
            });
            let own = self.sequences.state_places(s).filter(|(_, place)| place.owner == StateOwner::Row);
            let states = own.flat_map(move |(at, _)| self.sequences.state_pages(s, at).iter().copied());
            first.chain(others).chain(states).map(move |page| (page, Owner::Sequence(seq)))
        });
        let cached = self.prefixes.pages().map(|(node, page)| (page, Owner::Node(node)));
        let fenced = self.fence.pages().map(|(page, step)| (page, Owner::Fence(step)));
        private.chain(cached).chain(fenced)
    }

    fn owner(&self, page: PageId) -> Option<Owner> {
        self.owners().find(|(owned, _)| *owned == page).map(|(_, owner)| owner)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum LockHolder {
    /// A running sequence.
    Sequence,
    /// A fetch: a store writes the pages that follow the prefix.
    Fetch,
    /// The fence, until a step is complete.
    Fence,
}

/// The owner of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Owner {
    /// A sequence.
    Sequence(SeqKey),
    /// A node of the prefix tree. It also owns the pages of the cells at its entries.
    Node(NodeKey),
    /// The fence, until this step is complete.
    Fence(StepId),
}

/// A broken invariant: a bug of this crate, or memory that other code has overwritten.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Broken {
    /// The invariant, by number and sentence.
    pub invariant: &'static str,
    /// A page that shows the violation, if there is one.
    pub page: Option<PageId>,
    /// Owner of that page.
    pub owner: Option<Owner>,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "broken invariant {}", self.invariant)?;
        if let Some(page) = self.page {
            write!(f, ", seen at page {page:?}")?;
        }
        match self.owner {
            Some(Owner::Sequence(seq)) => write!(f, " of sequence {seq:?}"),
            Some(Owner::Node(node)) => write!(f, " of tree node {node:?}"),
            Some(Owner::Fence(step)) => write!(f, " fenced until step {step:?}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Broken {}

/// Checks the places that the open items of a row read and write (S10, G7), last to first. The last item wrote the
/// current place; each earlier one wrote the place that the next one read.
fn check_uses(states: &RowStates, open: &[StepItem]) -> Result<(), &'static str> {
    let mut current = match states.current {
        Current::At(at) => Some(at),
        _ => None,
    };
    for StepItem { state, start, .. } in open.iter().copied() {
        let written = state.writes.checked_sub(1).or(current);
        let read = state.reads.checked_sub(1).filter(|_| state.reads != state.writes);
        let is_behind = read.is_none_or(|at| states.places[usize::from(at)].len >= start);
        if current.is_some_and(|at| written != Some(at)) || !is_behind {
            return Err("S10: items read and write the states behind their tokens");
        }
        if written.is_some_and(|at| states.places[usize::from(at)].owner != StateOwner::Row) {
            return Err("G7: an open item writes a state of its row");
        }
        current = if state.reads == state.writes { written } else { read };
    }
    Ok(())
}
