//! States of the model: the pages of the layers that keep a state, and the cells that sequences make of them at marks.

use std::collections::{BTreeMap, BTreeSet};

use super::open_moves::CellKey;
use super::step::{Item, Used};
use super::tree::{CellHeld, Tree};
use super::{Model, PageIs, Sequence};
use crate::error::Error;
use crate::id::{PageId, Scope, SeqKey, TokenId};
use crate::plan::Extend;

/// Maximum number of states that a sequence uses at a time.
const MOST: usize = 3;

/// One state that a sequence uses.
#[derive(Clone, PartialEq, Eq, Debug)]
struct State {
    pages: Vec<PageId>,
    /// The cell that owns the pages; `None` if they are the sequence's own.
    cell: Option<CellKey>,
    /// Number of tokens behind which the state is.
    len: usize,
    /// Whether an item that is not committed has ended here, at a mark, and whether the mark is a junction.
    waits: Option<bool>,
}

/// The state behind the last planned token.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Current {
    #[default]
    Fresh,
    Held(u64),
    Lost,
}

/// The states of a sequence.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct States {
    held: BTreeMap<u64, State>,
    current: Current,
    /// Whether the sequence supersedes the cell of its hit.
    supersedes: bool,
    /// Computed tokens behind which an abort lost the state, until the resume.
    lost_at: usize,
    /// Plans that begin before this number of tokens update no state in place, if pages are left.
    careful_until: usize,
    /// The marks that are more than the mark at the prompt's end.
    pub(super) junctions: BTreeSet<usize>,
    /// The last number in `held`.
    last: u64,
}

impl States {
    fn owned(&self) -> usize {
        self.held.values().filter(|state| state.cell.is_none()).count()
    }
}

/// The pages that an item needs for its state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Need {
    InPlace,
    Pages,
    Optional,
}

impl Tree {
    /// Returns the key of the state's cell behind the first `pages` pages of a text, at least one.
    pub(super) fn state_key(&self, scope: Scope, tokens: &[TokenId], pages: usize) -> CellKey {
        (self.limited.len(), self.path(scope, tokens, pages))
    }

    /// Returns whether pages are cached that follow the first `pages` pages of a text.
    fn branches(&self, scope: Scope, tokens: &[TokenId], pages: usize) -> bool {
        let path = self.path(scope, tokens, pages);
        pages > 0 && !self.children(&path).is_empty()
    }

    /// Removes a user of a state's cell. Returns whether the cell is superseded now.
    fn release_state(&mut self, key: &CellKey, last_step: u64, completed: u64, superseded: bool) -> bool {
        self.release_cell(key, last_step, completed, superseded);
        let cell = &self.cells[key];
        cell.users == 0 && cell.superseded && !cell.junction
    }
}

impl Model {
    /// Returns the number of pages of a state; 0 if no group keeps one.
    pub(super) fn state_size(&self) -> usize {
        self.shape.layout.state().map_or(0, |state| state.pages as usize)
    }

    /// Returns the outstanding pages of a promise for a sequence's state.
    pub(super) fn outstanding_state(&self, sequence: &Sequence, promised: usize) -> usize {
        if promised > 0 && sequence.states.owned() == 0 { self.state_size() } else { 0 }
    }

    /// Returns the marks of a sequence that begins with `pages` pages of its full match, and sets its junctions.
    pub(super) fn begin_states(&mut self, seq: SeqKey, pages: usize, full: usize) -> Vec<usize> {
        let page_size = self.page_size();
        let shape = self.shape;
        let sequence = &self.sequences[&seq];
        let (scope, len) = (sequence.scope, sequence.tokens.len());
        let end = (len - 1).saturating_sub(shape.state_margin as usize) / page_size;
        let gap = end.saturating_sub(pages) * page_size;
        let ends = end > pages && (pages == 0 || gap >= shape.state_gap as usize);
        let branches = self.shares() && self.tree.branches(scope, &sequence.tokens, full);
        let states = &mut self.sequences.get_mut(&seq).expect("just seen").states;
        let mut careful_until = states.careful_until;
        if states.lost_at > 0 {
            careful_until = states.lost_at + states.lost_at.saturating_sub(pages * page_size);
        }
        let supersedes = ends && pages > 0 && !shape.keep_used_states;
        *states = States { supersedes, careful_until, ..States::default() };
        let mut marks: Vec<_> = ends.then_some(end).into_iter().collect();
        if branches && full > pages {
            states.junctions.insert(full);
            marks.push(full);
        }
        marks
    }

    /// Makes the state of a cell current, which the sequence already uses.
    pub(super) fn take_state(&mut self, seq: SeqKey, pages: usize) {
        if self.state_size() == 0 || pages == 0 {
            return;
        }
        let page_size = self.page_size();
        let sequence = self.sequences.get_mut(&seq).expect("the caller has checked");
        let key = self.tree.state_key(sequence.scope, &sequence.tokens, pages);
        let pages_of = self.tree.cells[&key].pages.clone();
        sequence.states.hold(State { pages: pages_of, cell: Some(key), len: pages * page_size, waits: None });
    }

    /// Checks the items of a plan. Returns the pages that their states cannot do without, how many of these are
    /// promised, and the number of items that could take another state.
    pub(super) fn check_states(&self, items: &[Extend]) -> Result<(usize, usize, usize), Error> {
        let (size, mut needed, mut drawn, mut optional) = (self.state_size(), 0, 0, 0);
        for item in items.iter().filter(|_| size > 0) {
            let sequence = &self.sequences[&item.seq];
            let end = sequence.planned_len + item.len as usize;
            if let Some(mark) = self.next_mark(sequence).filter(|&mark| mark < end) {
                return Err(Error::CrossesMark { seq: item.seq, mark: mark as u32 });
            }
            match sequence.need().ok_or(Error::StateLost { seq: item.seq })? {
                Need::InPlace => {}
                Need::Optional => optional += 1,
                Need::Pages => {
                    needed += size;
                    drawn += self.outstanding_state(sequence, sequence.promised);
                }
            }
        }
        Ok((needed, drawn, optional))
    }

    /// Returns the first mark after a sequence's planned tokens, in tokens.
    fn next_mark(&self, sequence: &Sequence) -> Option<usize> {
        let marks = sequence.marks.iter().map(|mark| mark * self.page_size());
        marks.into_iter().find(|&mark| mark > sequence.planned_len)
    }

    /// `Engine::next_len`
    pub fn next_len(&self, seq: SeqKey, most: u32) -> u32 {
        let Ok(max) = self.extend_max(seq) else { return 0 };
        let sequence = &self.sequences[&seq];
        let mark = self.next_mark(sequence).filter(|_| self.state_size() > 0);
        let to_mark = mark.map_or(u32::MAX, |mark| (mark - sequence.planned_len) as u32);
        most.min(max).min(to_mark)
    }

    /// `Engine::is_state_lost`
    pub fn is_state_lost(&self, seq: SeqKey) -> bool {
        self.sequences.get(&seq).is_some_and(|sequence| sequence.states.current == Current::Lost)
    }

    /// Decides how many items take another state if `spare` pages are left: the first ones. Returns the pages of all
    /// states that the items take.
    pub(super) fn grant_states(&mut self, items: &[Extend], spare: usize) -> Vec<bool> {
        let size = self.state_size();
        let mut left = spare / size.max(1);
        let takes = items.iter().map(|item| match self.sequences[&item.seq].need() {
            Some(Need::Pages) => true,
            Some(Need::Optional) if left > 0 => {
                left -= 1;
                true
            }
            _ => false,
        });
        takes.filter(|_| size > 0).collect()
    }

    /// Performs the use of states by the items of a step. `takes`: whether each item takes pages. Returns for each item
    /// the pages that it reads, if any, and those that it writes.
    pub(super) fn plan_states(
        &mut self,
        step: u64,
        items: &[Extend],
        takes: &[bool],
        mut pages: impl Iterator<Item = PageId>,
    ) -> Vec<[Vec<PageId>; 2]> {
        let (size, page_size) = (self.state_size(), self.page_size());
        let mut want = Vec::new();
        for (index, (item, &takes)) in items.iter().zip(takes).enumerate() {
            let sequence = self.sequences.get_mut(&item.seq).expect("checked");
            let (len, marks) = (sequence.planned_len, &mut sequence.marks);
            let states = &mut sequence.states;
            let reads = if let Current::Held(id) = states.current { Some(id) } else { None };
            let is_spared = |id| states.held[&id].cell.is_none() && states.held[&id].waits.is_none();
            self.careful_items += u64::from(takes && reads.is_some_and(is_spared));
            let read = reads.map_or(vec![PageId::default(); size], |id| states.held[&id].pages.clone());
            let writes = if takes {
                let own = pages.by_ref().take(size).collect();
                states.hold(State { pages: own, cell: None, len, waits: None })
            } else {
                let state = states.held.get_mut(&reads.expect("it updates a state")).expect("it is held");
                if state.waits.is_some() {
                    // The mark is given up.
                    let mark = state.len / page_size;
                    marks.remove(&mark);
                    sequence.host_marks.remove(&mark);
                    states.junctions.remove(&mark);
                    self.counters.given_up_marks += 1;
                }
                reads.expect("seen above")
            };
            let mark = len / page_size;
            let waits =
                (len.is_multiple_of(page_size) && marks.contains(&mark)).then(|| states.junctions.contains(&mark));
            let state = states.held.get_mut(&writes).expect("it is held");
            (state.len, state.waits) = (len, waits);
            want.push([read, state.pages.clone()]);
            let state = Used { reads, writes };
            self.steps.get_mut(&step).expect("just made").items[index].state = Some(state);
        }
        want
    }

    /// Commits the states of a step's items.
    pub(super) fn commit_states(&mut self, items: &[Item]) {
        for item in items.iter().filter(|item| item.state.is_some()) {
            if !self.alive(item) {
                continue;
            }
            let Used { reads, writes } = item.state.expect("seen");
            let mut freed = Vec::new();
            if let Some(reads) = reads.filter(|&reads| reads != writes) {
                let superseded = std::mem::take(&mut self.states(item.seq).supersedes);
                let state = self.states(item.seq).held.remove(&reads).expect("it is held");
                self.counters.superseded_states += u64::from(self.leave(item.seq, state, superseded, &mut freed));
            }
            let page_size = self.page_size();
            let state = self.states(item.seq).held.get_mut(&writes).expect("it is held");
            let is_at_item = state.len == item.end && !item.cut;
            if let Some(junction) = state.waits.take_if(|_| is_at_item) {
                let mark = state.len / page_size;
                self.keep_state(item.seq, writes, mark, junction, &mut freed);
            }
            let last_step = self.sequences[&item.seq].last_step;
            self.release_pages_after(last_step, freed);
        }
    }

    fn states(&mut self, seq: SeqKey) -> &mut States {
        &mut self.sequences.get_mut(&seq).expect("it is live").states
    }

    /// Makes a cell of a sequence's state, unless promises need the pages. Appends duplicate pages to `freed`.
    fn keep_state(&mut self, seq: SeqKey, id: u64, mark: usize, junction: bool, freed: &mut Vec<PageId>) {
        let sequence = &self.sequences[&seq];
        let is_last = sequence.states.owned() == 1 && sequence.promised > 0;
        let more = if is_last { self.state_size() as u32 } else { 0 };
        let backing = self.reclaimable() + self.pages.count(PageIs::Fenced) + freed.len() as u32;
        if sequence.published < mark || self.outstanding_pages() + more > backing {
            return;
        }
        let key = self.tree.state_key(sequence.scope, &sequence.tokens, mark);
        let mut own = sequence.states.held[&id].pages.clone();
        match self.tree.cells.get_mut(&key) {
            None => {
                self.pages.turn(&own, PageIs::Private, PageIs::Cached);
                let pages = own.clone();
                let cell = CellHeld { pages, users: 1, ..CellHeld::default() };
                self.tree.cells.insert(key.clone(), cell);
                self.tree.queue_put(key.0 + 1, &key.1);
            }
            Some(cell) if cell.pages.is_empty() => {
                self.pages.turn(&own, PageIs::Private, PageIs::Cached);
                cell.pages = own.clone();
                self.tree.acquire_cell(&key);
            }
            Some(_) => {
                self.tree.acquire_cell(&key);
                freed.append(&mut own);
                own = self.tree.cells[&key].pages.clone();
            }
        }
        self.tree.cells.get_mut(&key).expect("it is used").junction |= junction;
        let state = self.states(seq).held.get_mut(&id).expect("it is held");
        (state.pages, state.cell) = (own, Some(key));
        self.counters.kept_states += 1;
    }

    /// Releases a state that a sequence no longer holds. Returns whether its cell is superseded.
    fn leave(&mut self, seq: SeqKey, state: State, superseded: bool, freed: &mut Vec<PageId>) -> bool {
        let last_step = self.sequences[&seq].last_step;
        match state.cell {
            Some(key) => self.tree.release_state(&key, last_step, self.completed, superseded),
            None => {
                freed.extend(state.pages);
                false
            }
        }
    }

    /// Releases all states of a sequence. Returns its own pages.
    pub(super) fn leave_states(&mut self, seq: SeqKey) -> Vec<PageId> {
        let mut freed = Vec::new();
        let States { lost_at, careful_until, .. } = *self.states(seq);
        let left = std::mem::replace(self.states(seq), States { lost_at, careful_until, ..States::default() });
        for state in left.held.into_values() {
            self.leave(seq, state, false, &mut freed);
        }
        freed
    }

    /// Undoes an item's use of states. Returns the pages that the item took. `may_have_run`: whether a state that the
    /// item updates in place is lost.
    pub(super) fn undo_state(&mut self, item: &Item, may_have_run: bool) -> Vec<PageId> {
        let Some(Used { reads, writes }) = item.state else { return Vec::new() };
        let planned_len = self.sequences[&item.seq].planned_len;
        let states = self.states(item.seq);
        if reads == Some(writes) {
            let state = states.held.get_mut(&writes).expect("it is held");
            (state.len, state.waits) = (planned_len, None);
            if may_have_run {
                (states.current, states.lost_at) = (Current::Lost, planned_len);
            }
            return Vec::new();
        }
        let state = states.held.remove(&writes).expect("it is held");
        // A rollback may have removed tokens before the item.
        states.current = match reads {
            None if planned_len == 0 => Current::Fresh,
            Some(reads) if states.held[&reads].len == planned_len => Current::Held(reads),
            _ => Current::Lost,
        };
        states.lost_at = if states.current == Current::Lost { planned_len } else { 0 };
        state.pages
    }

    /// Records that a rollback has removed planned tokens.
    pub(super) fn lose_state(&mut self, seq: SeqKey) {
        if self.state_size() > 0 {
            self.states(seq).current = Current::Lost;
        }
    }

    /// Returns the pages of its state that each child of a fork copies.
    pub(super) fn state_to_copy(&self, seq: SeqKey) -> Result<Vec<PageId>, Error> {
        let parent = &self.sequences[&seq];
        if self.state_size() == 0 {
            return Ok(Vec::new());
        }
        if parent.planned_len > parent.cached_len.min(parent.tokens.len()) {
            return Err(Error::StateAhead { seq });
        }
        match parent.states.current {
            Current::Fresh => Ok(Vec::new()),
            Current::Lost => Err(Error::StateLost { seq }),
            Current::Held(id) => {
                let state = &parent.states.held[&id];
                Ok(if state.cell.is_none() { state.pages.clone() } else { Vec::new() })
            }
        }
    }

    /// Gives a child of a fork a copy of its parent's state in `own`, or makes it a user of the parent's cell.
    pub(super) fn inherit_state(&mut self, parent: &States, child: SeqKey, own: Vec<PageId>) {
        *self.states(child) = States::default();
        let Current::Held(id) = parent.current else { return };
        let state = parent.held[&id].clone();
        match &state.cell {
            Some(key) => self.tree.acquire_cell(key),
            None => assert_eq!(own.len(), state.pages.len(), "a state is copied whole"),
        }
        let pages = if own.is_empty() { state.pages } else { own };
        self.states(child).hold(State { pages, waits: None, ..state });
    }

    /// `Engine::mark` for a place behind the planned tokens. Returns false if the mark waits like others.
    pub(super) fn mark_state(&mut self, seq: SeqKey, mark: usize) -> bool {
        let page_size = self.page_size();
        let sequence = &self.sequences[&seq];
        if mark * page_size > sequence.planned_len {
            return false;
        }
        let (cached_len, last_step) = (sequence.cached_len, sequence.last_step);
        let Current::Held(id) = sequence.states.current else { return true };
        let state = self.states(seq).held.get_mut(&id).expect("it is held");
        match state.cell.clone() {
            Some(key) => self.tree.cells.get_mut(&key).expect("it is used").junction = true,
            None if state.len > cached_len => state.waits = Some(true),
            None => {
                let mut freed = Vec::new();
                self.keep_state(seq, id, mark, true, &mut freed);
                self.release_pages_after(last_step, freed);
            }
        }
        true
    }
}

impl Sequence {
    /// Returns what the next plan needs for its state; `None` if it is lost.
    fn need(&self) -> Option<Need> {
        self.states.need(self.planned_len)
    }
}

impl States {
    /// Holds a state, and makes it current. Returns its number.
    fn hold(&mut self, state: State) -> u64 {
        self.last += 1;
        self.held.insert(self.last, state);
        self.current = Current::Held(self.last);
        self.last
    }

    /// Returns what the next plan after `planned_len` tokens needs; `None` if the state is lost.
    fn need(&self, planned_len: usize) -> Option<Need> {
        match self.current {
            Current::Lost => None,
            Current::Fresh => Some(Need::Pages),
            Current::Held(id) => {
                let state = &self.held[&id];
                Some(match state.waits {
                    _ if state.cell.is_some() => Need::Pages,
                    Some(_) if self.held.len() < MOST && self.owned() < 2 => Need::Optional,
                    _ if self.held.len() < MOST && planned_len < self.careful_until => Need::Optional,
                    _ => Need::InPlace,
                })
            }
        }
    }
}
