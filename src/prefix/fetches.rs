//! Fetches: a store outside the engine writes records of a prompt to swap pages. These records make the prompt's cached
//! prefix longer.
//!
//! * M2. With one group, fetched pages match up to the first record that failed. With groups, all records of a fetch
//!   match, or none.
//! * M4. An open fetch is a user of its prefix's node, and of the cells in the tails of its target that were cached
//!   when it began.
//!
//! The tokens of an open fetch are in a list without a node. Each page of group 0 that a fetch writes has one entry, so
//! there are still enough entries for all pages.
//!
//! Not here: puts, and the rules for pages that stores touch (`puts.rs`).

use std::mem::take;
use std::ops::Range;

use crate::event::Medium;
use crate::fence::Fence;
use crate::id::{CellId, MoveId, Namespace, PageId, PrefixLock, StepId, SwapPageId, TokenId};
use crate::layout::{HeldGroup, saturated};
use crate::memory::{Memory, OutOfMemory};
use crate::moves::{Fetch, FetchId, FetchedRecord};

use super::cursors::Seek;
use super::entry_list::EntryList;
use super::evict::Oldest;
use super::nodes::{Cursor, Link, NO_PAGE, Sides};
use super::{PrefixMatch, PrefixTree};

/// Maximum number of open fetches.
const FETCHES_MAX: usize = 256;

struct OpenFetch {
    id: FetchId,
    /// The lock of the target's cached prefix in group 0, and the number of its pages.
    lock: PrefixLock,
    locked: u32,
    /// Number of pages of the target.
    target: u32,
    /// Entries with the tokens of the fetched pages of group 0. They become entries of the tree once the pages have
    /// arrived.
    list: EntryList,
    /// Number of its records and of their pages.
    records: usize,
    pages: usize,
}

/// The open fetches.
pub(super) struct Fetches {
    open: Vec<OpenFetch>,
    /// Records of the open fetches, and the pages that the fetches write, both in the order of the fetches.
    records: Vec<FetchedRecord>,
    pub pages: Vec<SwapPageId>,
    last: u64,
    pub fetched: u64,
}

impl Fetches {
    /// Creates the records of fetches; with 0 pages, nothing is fetched.
    pub fn new(swap_pages: u32, memory: &mut Memory) -> Result<Self, OutOfMemory> {
        Ok(Self {
            open: memory.reserved(if swap_pages > 0 { FETCHES_MAX as u64 } else { 0 })?,
            records: memory.reserved(swap_pages.into())?,
            pages: memory.reserved(swap_pages.into())?,
            last: 0,
            fetched: 0,
        })
    }

    /// Returns the locks of fetches, for audits.
    pub fn locks(&self) -> impl Iterator<Item = &PrefixLock> {
        self.open.iter().map(|fetch| &fetch.lock)
    }

    /// Returns the lists of fetches, for audits.
    pub fn lists(&self) -> impl Iterator<Item = &EntryList> {
        self.open.iter().map(|fetch| &fetch.list)
    }

    /// Returns the indices of the records and of the pages of an open fetch.
    fn ranges(&self, index: usize) -> (Range<usize>, Range<usize>) {
        let before = self.open[..index].iter();
        let (records, pages) =
            before.fold((0, 0), |(records, pages), fetch| (records + fetch.records, pages + fetch.pages));
        let fetch = &self.open[index];
        (records..records + fetch.records, pages..pages + fetch.pages)
    }

    /// Checks a part of M2: each open fetch has the pages of its records, and an entry for each page of group 0. O(open
    /// fetches and their records).
    pub fn check(&self) -> Result<(), &'static str> {
        let all = self.open.iter().fold([0, 0], |[records, pages], f| [records + f.records, pages + f.pages]);
        let whole = |index: usize| {
            let (records, pages) = self.ranges(index);
            let of_group = |is_one: fn(&FetchedRecord) -> bool| {
                self.records[records.clone()].iter().filter(|r| is_one(r)).map(|r| r.pages as usize).sum::<usize>()
            };
            let own = self.open[index].list.pages() as usize;
            of_group(|_| true) == pages.len() && of_group(|record| record.group == 0) == own
        };
        if all == [self.records.len(), self.pages.len()] && (0..self.open.len()).all(whole) {
            Ok(())
        } else {
            Err("M2: a fetched page waits with its record until all have arrived")
        }
    }
}

impl PrefixTree {
    /// Begins a fetch of the records that the first `target` pages of these tokens lack: locks their cached prefix in
    /// group 0, uses the cells in their tails, and takes swap pages. `moved` contains the last completed save and load.
    /// O(prompt + pages + free swap pages with unfinished moves), and O(idle nodes) if only pages of the prefix could
    /// make room. With groups, each page may cost O(free swap pages with unfinished moves).
    ///
    /// Returns `None` without any change in these cases: there is no hashing, too many fetches are open, the tokens hit
    /// `target` pages, or the prefix and the cells have more than `available` idle pages (W4). With one group, also if
    /// no swap page without unfinished moves can be taken; if only some can, the fetch has fewer pages. With groups,
    /// the result is `None` if not all can be taken, but the prefix and the cells are then the last used ones, and
    /// other pages may be gone. Device pages of cells whose entries are dropped are appended to `freed`.
    pub(crate) fn begin_fetch(
        &mut self,
        (namespace, tokens): (Namespace, &[TokenId]),
        target: u32,
        available: u32,
        moved: [MoveId; 2],
        fence: &mut Fence,
        freed: &mut Vec<PageId>,
    ) -> Option<Fetch<'_>> {
        if self.swap().fetches.open.len() == FETCHES_MAX || self.chain.is_none() {
            return None;
        }
        let page_size = self.nodes.page_size as usize;
        let target = target.min(saturated((tokens.len() / page_size) as u64));
        let scope = self.present_scope(namespace);
        let (end, full) = self.nodes.walk_from(Cursor::START, scope, tokens);
        let hit = if self.has_cells() { self.hit(scope, end, full).pages() } else { full };
        let locked = full.min(target);
        let found = self.match_at(scope, self.nodes.cursor_at(end, full, locked), locked);
        if target <= hit || self.idle_pages_before(&found, target) > available {
            return None;
        }
        if !self.has_cells() && !self.can_fill(&found, moved) {
            return None;
        }
        let lock = self.lock(&found, fence).expect("nothing changed since the match");
        self.names.hold(namespace);
        let (records, wanted) = self.begin_records(&lock, locked, target, fence);
        let fetches = &mut self.swap_mut().fetches;
        fetches.last += 1;
        let id = FetchId(fetches.last);
        fetches.open.push(OpenFetch { id, lock, locked, target, list: EntryList::EMPTY, records, pages: 0 });
        let taken = self.take_pages(wanted, moved, freed);
        if self.has_cells() && taken < wanted {
            self.end_fetch(id, 0, fence, freed, &mut Vec::new());
            return None;
        }
        self.list_tokens(&tokens[locked as usize * page_size..], taken);
        let fetches = &self.swap().fetches;
        let (records, pages) = fetches.ranges(fetches.open.len() - 1);
        Some(Fetch { id, cached_pages: locked, records: &fetches.records[records], pages: &fetches.pages[pages] })
    }

    /// Returns the number of idle pages of a match and of the cells in the tails of `target` pages.
    fn idle_pages_before(&self, found: &PrefixMatch, target: u32) -> u32 {
        let of_nodes = self.idle_node_pages(found, None);
        let Some(cells) = &self.cells else { return of_nodes };
        let tails = self.nodes.tails_to(cells.limits(), found.end(), found.pages(), target);
        let cells_here = tails.filter_map(|(held, _, entry)| Some(cells.at(held.group, entry?)));
        let idle = cells_here.filter(|&cell| cell.is_some() && cells.is_idle(cell, None));
        of_nodes + idle.map(|cell| cells.device_tracks(cell)).sum::<u32>()
    }

    /// Adds the records that a target lacks, whose first `locked` pages group 0 has: those of group 0, then those of
    /// cells in the order of [`Nodes::tails_to`](super::nodes::Nodes::tails_to). Uses the present cells. Returns the
    /// numbers of records and of their pages. More records than swap pages are only counted, because no fetch gets
    /// pages for them.
    fn begin_records(&mut self, lock: &PrefixLock, locked: u32, target: u32, fence: &mut Fence) -> (usize, usize) {
        let Self { nodes, cells, swap: Some(swap), .. } = self else { return (0, 0) };
        let (start, mut wanted) = (swap.fetches.records.len(), 0);
        let mut push = |records: &mut Vec<FetchedRecord>, record: FetchedRecord| {
            wanted += record.pages as usize;
            if records.len() < records.capacity() {
                records.push(record);
            }
        };
        let (unit, mut first) = (swap.puts.record_pages(), locked);
        while first < target {
            let end = (first / unit + 1) * unit;
            let pages = end.min(target) - first;
            push(&mut swap.fetches.records, FetchedRecord { group: 0, place: end - 1, first, pages });
            first = end;
        }
        if let Some(cells) = cells {
            let limits = *cells.limits();
            for (held, place, entry) in nodes.tails_to(&limits, nodes.end_of(lock.node()), locked, target) {
                let cell = entry.map_or(CellId::NONE, |entry| cells.at(held.group, entry));
                if cell.is_some() {
                    cells.acquire(cell, Some(swap), fence);
                } else {
                    let record = FetchedRecord { group: held.group + 1, place, first: place, pages: held.tracks };
                    push(&mut swap.fetches.records, record);
                }
            }
        }
        (swap.fetches.records.len() - start, wanted)
    }

    /// Takes at most `wanted` swap pages for the last open fetch. Returns their number. O(pages + free swap pages with
    /// unfinished moves); with groups, the latter for each dropped entry or cell.
    fn take_pages(&mut self, wanted: usize, moved: [MoveId; 2], freed: &mut Vec<PageId>) -> usize {
        let (mut taken, mut may_be_idle) = (0, true);
        while taken < wanted {
            let idle = if may_be_idle { self.swap().pool.next_idle(moved) } else { None };
            // A dropped entry frees one page, and with groups also those of its cells.
            may_be_idle = idle.is_some() || self.has_cells();
            let Some(page) = idle.or_else(|| self.drop_for_page(moved, freed)) else { break };
            let swap = self.swap_mut();
            swap.pool.begin_fill(page);
            swap.fetches.pages.push(page);
            taken += 1;
        }
        let fetch = self.swap_mut().fetches.open.last_mut().expect("the caller added it");
        fetch.pages = taken;
        taken
    }

    /// Cuts the records of the last open fetch to `pages` pages, and lists the tokens of those of group 0, which begin
    /// `tokens`.
    fn list_tokens(&mut self, tokens: &[TokenId], pages: usize) {
        let Self { nodes, swap: Some(swap), .. } = self else { return };
        let Fetches { open, records, .. } = &mut swap.fetches;
        let fetch = open.last_mut().expect("the caller added it");
        let start = records.len() - fetch.records;
        let (mut left, mut of_entries) = (pages as u32, 0);
        for record in &mut records[start..] {
            record.pages = record.pages.min(left);
            left -= record.pages;
            of_entries += if record.group == 0 { record.pages } else { 0 };
        }
        let count = records[start..].iter().take_while(|record| record.pages > 0).count();
        records.truncate(start + count);
        fetch.records = count;
        if of_entries > 0 {
            let tokens = &tokens[..(of_entries * nodes.page_size) as usize];
            fetch.list = nodes.lists.create_equal(tokens, NO_PAGE);
        }
    }

    /// Returns whether a page is left for a fetch once `found` is locked: a free swap page, the page of a clean entry
    /// that the lock frees, or the page of the oldest swap-only entry that is not locked.
    fn can_fill(&mut self, found: &PrefixMatch, moved: [MoveId; 2]) -> bool {
        if self.swap().pool.next_idle(moved).is_some() {
            return true;
        }
        let mut at = found.end();
        while let Some(node) = at.node.filter(|&node| self.usage[node].lock_count == 0) {
            let Sides { device, swap_start } = self.nodes.sides_of(node);
            let clean = swap_start.min(at.pages_in_node)..device.min(at.pages_in_node);
            let mut frees = false;
            let Self { nodes, swap: Some(swap), .. } = self else { return false };
            nodes.each_entry_back(node, clean, |entry, _| {
                frees |= swap.is_droppable(swap.of_entry[entry as usize], moved)
            });
            if frees {
                return true;
            }
            at = nodes.end_of(nodes.link[node].parent);
        }
        let Some(Oldest::Node(first)) = self.oldest(Seek::SwapOnly) else { return false };
        let mut next = Some(first);
        while let Some(node) = next {
            let (entries, is_leaf) = (self.nodes.entries(node), self.usage[node].child_count == 0);
            let stays = found.node == Some(node) && found.pages_in_node == entries;
            if is_leaf && !stays && Seek::SwapOnly.finds(self.nodes.sides_of(node), entries) {
                let swap = self.swap();
                return swap.is_droppable(swap.of_entry[self.nodes.last_entry(node) as usize], moved);
            }
            next = self.order.after(&self.usage, node);
        }
        false
    }

    /// Drops the oldest entry or cell that is in swap memory alone for a swap page, which a fetch takes; `None` if
    /// there is none, or if its pages have unfinished moves or a put reads them. Device pages of the cells of the entry
    /// are appended to `freed`.
    fn drop_for_page(&mut self, moved: [MoveId; 2], freed: &mut Vec<PageId>) -> Option<SwapPageId> {
        let oldest = self.oldest(Seek::SwapOnly)?;
        let swap = self.swap();
        let pages = match oldest {
            Oldest::Node(node) => &swap.of_entry[self.nodes.last_entry(node) as usize..][..1],
            Oldest::Cell(cell) => self.cells().swap_pages(cell),
        };
        let page = pages[0];
        if !pages.iter().all(|&page| swap.is_droppable(page, moved)) {
            return None;
        }
        self.drop_oldest(oldest, freed);
        Some(page)
    }

    /// Ends a fetch. Its first `count` records have arrived; they match from now on, unless the tree was reset since
    /// the fetch began. With groups, no record matches if one has not arrived. Returns whether the fetch was open.
    /// `tokens` is a buffer. O(pages of open fetches).
    pub(crate) fn end_fetch(
        &mut self,
        id: FetchId,
        count: usize,
        fence: &mut Fence,
        freed: &mut Vec<PageId>,
        tokens: &mut Vec<TokenId>,
    ) -> bool {
        let fetches = &mut self.swap_mut().fetches;
        let Some(index) = fetches.open.iter().position(|fetch| fetch.id == id) else {
            return false;
        };
        let (own_records, own_pages) = fetches.ranges(index);
        let OpenFetch { mut lock, locked, target, mut list, .. } = fetches.open.remove(index);
        let (mut records, mut pages) = (take(&mut fetches.records), take(&mut fetches.pages));
        let is_present = lock.scope().generation == self.generation;
        let own = &records[own_records.clone()];
        let count = if is_present && !(self.has_cells() && count < own.len()) { count.min(own.len()) } else { 0 };
        let [of_entries, of_cells] = [false, true].map(|of_cells| {
            let records = own[..count].iter().filter(|record| (record.group > 0) == of_cells);
            records.map(|record| record.pages as usize).sum::<usize>()
        });
        let lacking = list.pages() - of_entries as u32;
        self.nodes.lists.trim(&mut list, lacking, None);
        tokens.clear();
        self.nodes.lists.pieces(&list).for_each(|(piece, _)| tokens.extend_from_slice(piece));
        let (arrived, others) = pages[own_pages.clone()].split_at(of_entries + of_cells);
        let (arrived, cell_pages) = arrived.split_at(of_entries);
        let known = self.insert_fetched(&mut lock, tokens, list, arrived, fence);
        let swap = self.swap_mut();
        let unused = arrived[..known].iter().chain(others);
        unused.for_each(|page| swap.pool.end_fill(*page, false));
        swap.fetches.fetched += (arrived.len() - known) as u64;
        if self.has_cells() {
            let cells = own.iter().filter(|record| record.group > 0);
            let path_pages = if count > 0 { target } else { locked };
            self.end_cells(&lock, path_pages, target, cells, cell_pages, fence);
        }
        records.drain(own_records);
        pages.drain(own_pages);
        let swap = self.swap_mut();
        (swap.fetches.records, swap.fetches.pages) = (records, pages);
        let namespace = lock.scope().namespace;
        self.unlock(lock, fence, freed);
        self.names.release(namespace);
        true
    }

    /// Makes cells of the fetched pages in the tails of a target, if there are any, unless there are cells by now.
    /// Leaves the cells that the fetch uses. `records` are those of its cells.
    fn end_cells<'a>(
        &mut self,
        lock: &PrefixLock,
        path_pages: u32,
        target: u32,
        records: impl Iterator<Item = &'a FetchedRecord>,
        mut pages: &[SwapPageId],
        fence: &mut Fence,
    ) {
        let Self { nodes, cells: Some(cells), swap: Some(swap), ages: Some(ages), .. } = self else { return };
        let (limits, end) = (*cells.limits(), nodes.end_of(lock.node()));
        let has_arrived = !pages.is_empty();
        for (tail, entry, record) in places(nodes.tails_to(&limits, end, path_pages, target), records) {
            let Some(entry) = entry else { continue };
            let cell = cells.at(tail.group, entry);
            let Some(record) = record else {
                // The list of records may end early, and then no cell was present here.
                if cell.is_some() {
                    cells.release(cell, StepId::default(), false, fence, ages);
                }
                continue;
            };
            if has_arrived {
                let own = pages.split_off(..record.pages as usize).expect("all have arrived");
                own.iter().for_each(|page| swap.pool.end_fill(*page, !cell.is_some()));
                if !cell.is_some() {
                    let cell = cells.create_fetched(tail.group, entry, own);
                    swap.fetches.fetched += own.len() as u64;
                    cells.release(cell, StepId::default(), false, fence, ages);
                }
            }
        }
    }

    /// Returns the cells that the open fetches use, for audits.
    pub(crate) fn cells_of_fetches(&self) -> Vec<CellId> {
        let Self { nodes, cells: Some(cells), swap: Some(swap), .. } = self else { return Vec::new() };
        let fetches = &swap.fetches;
        let mut used = Vec::new();
        for (index, fetch) in fetches.open.iter().enumerate() {
            let records = fetches.records[fetches.ranges(index).0].iter().filter(|record| record.group > 0);
            let tails = nodes.tails_to(cells.limits(), nodes.end_of(fetch.lock.node()), fetch.locked, fetch.target);
            let own = places(tails, records).filter(|(_, _, record)| record.is_none());
            used.extend(own.filter_map(|(tail, entry, _)| Some(cells.at(tail.group, entry?))));
        }
        used
    }

    /// Inserts fetched pages after a lock's prefix. Skips the first ones, if the tree has received them since the fetch
    /// began. Returns the number of skipped pages. `list` contains the `tokens`, and has an entry for each page.
    fn insert_fetched(
        &mut self,
        lock: &mut PrefixLock,
        tokens: &[TokenId],
        mut list: EntryList,
        pages: &[SwapPageId],
        fence: &mut Fence,
    ) -> usize {
        let start = Cursor { node: lock.node(), pages_in_node: 0 };
        let (cursor, known) = self.nodes.walk_from(start, lock.scope(), tokens);
        if known > 0
            && let Some(node) = cursor.node
        {
            let node = self.split(node, cursor.pages_in_node);
            self.move_lock(lock, node, fence);
        }
        if known == list.pages() {
            self.nodes.lists.trim(&mut list, known, None);
            return known as usize;
        }
        if known > 0 {
            let rest = self.nodes.lists.split(&mut list, known);
            self.nodes.lists.trim(&mut list, known, None);
            list = rest;
        }
        let (known, pages) = (known as usize, &pages[known as usize..]);
        let mut before = lock.node().map(|node| self.nodes.last_entry(node));
        let node = self.spawn(Link { parent: lock.node(), list }, lock.scope());
        self.adopt(lock, node);
        let Self { nodes, swap: Some(swap), .. } = self else { return known };
        *nodes.sides_mut(node) = Sides::default();
        let mut rest = pages.iter();
        for (start, len) in nodes.lists.runs(&list) {
            for entry in start..start + len {
                let page = *rest.next().expect("an entry for each page");
                swap.of_entry[entry as usize] = page;
                swap.pool.end_fill(page, true);
                swap.puts.attach_entry(entry, before, false);
                swap.puts.set_stored(entry);
                before = Some(entry);
            }
        }
        self.chain_attached(lock, Medium::Swap, pages.len() as u32);
        known
    }
}

/// Adds to each place of a target's tails the record of the fetch that lacked its cell, if there is one.
fn places<'a>(
    tails: impl Iterator<Item = (HeldGroup, u32, Option<u32>)>,
    records: impl Iterator<Item = &'a FetchedRecord>,
) -> impl Iterator<Item = (HeldGroup, Option<u32>, Option<&'a FetchedRecord>)> {
    let mut records = records.peekable();
    tails.map(move |(tail, place, entry)| {
        let record = records.next_if(|record| (record.group, record.place) == (tail.group + 1, place));
        (tail, entry, record)
    })
}
