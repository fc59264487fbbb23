//! Puts: records of cached pages that a store outside the engine reads. They are selected in the order in which their
//! last pages were published and their cells were made.
//!
//! A record that a store has is not put again. The store reads the swap pages of entries and cells that have some. The
//! other device pages are first copied to pages of the *stage*, a reserved part of swap memory. If an entry or a cell
//! is freed during the put, its swap pages stay until the put is done.
//!
//! * M1. No writer touches a page that a put reads: the store receives the put after the last save to each page. A page
//!   that a fetch writes has no other user, and no unfinished save or load.
//! * M3. `stored` is set only for an entry whose hash is that of its page in the store, and for a cell of the record's
//!   group at such an entry, also if the cell was made again during the put.
//!
//! Not here: which pages a record has (`records.rs`), fetches (`fetches.rs`), the states of swap pages (`swap/`).

use std::collections::{HashSet, VecDeque};

use crate::bitmap::{Bitmap, Bits};
use crate::hash::{Names, PageHash};
use crate::id::{MoveId, NodeKey, PageId, SwapPageId, TokenId};
use crate::memory::{Memory, OutOfMemory};
use crate::moves::{Put, PutId};
use crate::plan::PageMove;
use crate::swap::SwapPool;

use super::TreeShape;
use super::chain::Chain;
use super::entry_list::EntryLists;
use super::hashes::named;
use super::nodes::{NO_SWAP_PAGE, Nodes};

/// Maximum number of open puts.
const PUTS_MAX: usize = 1024;
/// No entry.
const NONE: u32 = u32::MAX;

/// A record: its group and the entry of its last page. `version` is the number of times that the entry was freed
/// before. While it is current, the entry has the same page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Record {
    pub group: u32,
    pub entry: u32,
    version: u32,
}

#[derive(Clone, Copy, Debug)]
struct OpenPut {
    id: PutId,
    /// The record; `None` once its generation has ended.
    record: Option<Record>,
    key: PageHash,
    /// Number of its pages in [`Puts::pages`].
    len: u32,
    /// The last save to one of the pages.
    save: MoveId,
    is_staged: bool,
    /// Whether the store has received the put.
    is_given: bool,
}

/// The open puts, and the records that stores have or will get.
pub(super) struct Puts {
    /// Entries whose pages a store has.
    stored: Bitmap,
    /// How often each entry was freed.
    versions: Vec<u32>,
    /// By entry, the entry of the page before it, and the place of its page.
    before: Vec<u32>,
    places: Vec<u32>,
    /// By entry, the entry of the first page of its prefix. The path to the root would lead there as well, but takes
    /// a step for each page.
    firsts: Vec<u32>,
    /// Number of pages of a record of group 0.
    record_pages: u32,
    /// For each group other than group 0, the entries whose record of the group is queued or open.
    waiting: Vec<Bitmap>,
    /// Records to put, in the order of publishing. Records whose put failed are queued again.
    queue: VecDeque<Record>,
    queue_max: usize,
    /// Number of records at the front of the queue that belong to the present round. A record that a store refused
    /// belongs to the next round, which begins after a call that selected nothing. So a loop over a store that refuses
    /// all records ends.
    round: usize,
    /// The open puts, by rising ids, and their pages, in the same order.
    open: VecDeque<OpenPut>,
    pages: Vec<SwapPageId>,
    last: u64,
    /// Free pages of the stage, once they are ready, and the first page of the stage.
    stage: Vec<SwapPageId>,
    stage_start: u32,
    stage_pages: u32,
    /// Saves to the stage.
    pub staged: Vec<PageMove>,
    /// Buffers for the pages and the tokens of one record.
    parts: Vec<(PageId, SwapPageId)>,
    tokens: Vec<TokenId>,
    /// Number of pages that stores have taken.
    pub done: u64,
}

impl Puts {
    /// Creates the records of puts; without stores, nothing is put.
    pub fn new(shape: &TreeShape, memory: &mut Memory) -> Result<Self, OutOfMemory> {
        let nodes = u64::from(shape.nodes());
        let is_on = u64::from(shape.has_stores());
        let entries = is_on * u64::from(EntryLists::entry_count(shape.nodes()));
        let cells: u64 = shape.limits.tails(0).map(|held| held.cells_in(nodes)).sum();
        let stage_pages = is_on * u64::from(shape.stage_pages);
        let most = is_on * u64::from(shape.most_record_pages());
        let open = is_on * PUTS_MAX as u64;
        let mut waiting = memory.reserved(u64::from(shape.limits.count()))?;
        for _ in 0..shape.limits.count() {
            waiting.push(Bitmap::new(entries as u32, false, memory)?);
        }
        Ok(Self {
            stored: Bitmap::new(entries as u32, false, memory)?,
            versions: memory.zeroed(entries)?,
            before: memory.zeroed(entries)?,
            places: memory.zeroed(entries)?,
            firsts: memory.zeroed(entries)?,
            record_pages: shape.record_pages,
            waiting,
            queue: memory.queue(entries + is_on * cells)?,
            queue_max: (entries + is_on * cells) as usize,
            round: 0,
            open: memory.queue(open)?,
            pages: memory.reserved(open * most)?,
            last: 0,
            stage: memory.reserved(stage_pages)?,
            stage_start: u32::MAX,
            stage_pages: stage_pages as u32,
            staged: memory.reserved(stage_pages)?,
            parts: memory.reserved(most)?,
            tokens: memory.reserved(is_on * u64::from(shape.record_pages) * u64::from(shape.page_size))?,
            done: 0,
        })
    }

    /// Makes the stage usable. Its first page is `first`.
    pub fn set_ready(&mut self, first: u32) {
        let pages = std::mem::take(&mut self.stage_pages);
        self.stage.extend((first..first + pages).rev().map(SwapPageId::new));
        self.stage_start = first;
    }

    /// Returns the number of pages of a record of group 0.
    pub fn record_pages(&self) -> u32 {
        self.record_pages
    }

    /// Returns whether nothing is put, because pages have no hashes.
    pub fn is_off(&self) -> bool {
        self.versions.is_empty()
    }

    /// Records that an entry was freed, so that an open put of its old page does not concern its next page.
    pub fn forget(&mut self, entry: u32) {
        let Some(version) = self.versions.get_mut(entry as usize) else { return };
        *version += 1;
        for set in [&mut self.stored].into_iter().chain(&mut self.waiting) {
            set_bit(set, entry, false);
        }
    }

    pub fn is_stored(&self, entry: u32) -> bool {
        !self.is_off() && self.stored.contains(entry)
    }

    /// Records that a store has an entry's page.
    pub fn set_stored(&mut self, entry: u32) {
        set_bit(&mut self.stored, entry, true);
    }

    /// Records whether a store has the pages of the record of group 0 that ends with an entry.
    pub fn set_record_stored(&mut self, entry: u32, is_stored: bool) {
        let mut at = entry;
        for _ in 0..self.record_pages {
            set_bit(&mut self.stored, at, is_stored);
            at = self.before[at as usize];
        }
    }

    /// Records the entry before each of the last `count` entries of a node, unless nothing is put. If `are_new`, queues
    /// the records that end with one of them.
    pub fn attach(&mut self, nodes: &Nodes, node: NodeKey, count: u32, are_new: bool) {
        if self.is_off() {
            return;
        }
        let mut before = nodes.entry_before(node, count);
        for (start, len) in nodes.lists.last_runs(&nodes.link[node].list, count) {
            for entry in start..start + len {
                self.attach_entry(entry, before, are_new);
                before = Some(entry);
            }
        }
    }

    /// Records the entry before an entry. If `is_new`, queues the record that ends with the entry, if there is one.
    pub fn attach_entry(&mut self, entry: u32, before: Option<u32>, is_new: bool) {
        let place = before.map_or(0, |before| self.places[before as usize] + 1);
        self.before[entry as usize] = before.unwrap_or(NONE);
        self.places[entry as usize] = place;
        self.firsts[entry as usize] = before.map_or(entry, |before| self.firsts[before as usize]);
        if is_new && (place + 1).is_multiple_of(self.record_pages) {
            self.add(0, entry);
        }
    }

    /// Queues a record, unless nothing is put, or the record of this cell is queued or open.
    pub fn add(&mut self, group: u32, entry: u32) {
        if self.is_off() {
            return;
        }
        if let Some(index) = group.checked_sub(1) {
            let waiting = &mut self.waiting[index as usize];
            if waiting.contains(entry) {
                return;
            }
            set_bit(waiting, entry, true);
        }
        let is_one_round = self.round == self.queue.len();
        self.push(Record { group, entry, version: self.versions[entry as usize] });
        if is_one_round {
            self.round = self.queue.len();
        }
    }

    /// Queues a record for the next round.
    fn push(&mut self, record: Record) {
        if self.queue.len() == self.queue_max {
            let dropped = self.queue.pop_front().expect("the queue is full");
            self.stop_waiting(dropped);
            self.round = self.round.saturating_sub(1);
        }
        self.queue.push_back(record);
    }

    /// Returns the next record of the round, and removes it from the queue.
    fn pop(&mut self) -> Option<Record> {
        self.round = self.round.checked_sub(1)?;
        self.queue.pop_front()
    }

    /// Records that a record is neither queued nor open.
    fn stop_waiting(&mut self, record: Record) {
        if self.is_present(record)
            && let Some(index) = record.group.checked_sub(1)
        {
            set_bit(&mut self.waiting[index as usize], record.entry, false);
        }
    }

    fn is_present(&self, record: Record) -> bool {
        self.versions[record.entry as usize] == record.version
    }

    /// Returns the record of an open put, if its entry still has the same page and its generation has not ended.
    fn present(&self, put: &OpenPut) -> Option<Record> {
        put.record.filter(|&record| self.is_present(record))
    }

    /// Ends the generation of all pages. No store receives them from now on, and no record is queued again.
    pub fn end_generation(&mut self) {
        while let Some(record) = self.queue.pop_front() {
            self.stop_waiting(record);
        }
        self.round = 0;
        for index in 0..self.open.len() {
            self.open[index].record.take().into_iter().for_each(|record| self.stop_waiting(record));
        }
    }

    /// Opens puts of the next records of the round, at most `max`. `find` writes the pages of a record to a buffer;
    /// false if the record's cell is gone or a store has the record. Saves to the stage, in the batch `save`, are
    /// collected in `staged`. If the round has no record to put, begins the next round.
    pub fn begin(
        &mut self,
        max: usize,
        (chain, pool, save): (&Chain, &mut SwapPool, MoveId),
        find: impl Fn(&Self, Record, &mut Vec<(PageId, SwapPageId)>) -> bool,
    ) {
        self.staged.clear();
        let (before, end) = (self.open.len(), PUTS_MAX.min(self.open.len().saturating_add(max)));
        let mut parts = std::mem::take(&mut self.parts);
        while self.open.len() < end {
            let Some(record) = self.pop() else { break };
            parts.clear();
            if !self.is_present(record) || !find(self, record, &mut parts) {
                self.stop_waiting(record);
                continue;
            }
            if parts.iter().filter(|part| part.1 == NO_SWAP_PAGE).count() > self.stage.len() {
                self.queue.push_front(record);
                self.round += 1;
                self.parts = parts;
                return;
            }
            self.open(record, chain.of(record.entry), &parts, pool, save);
        }
        self.parts = parts;
        if self.round == 0 && self.open.len() == before {
            self.round = self.queue.len();
        }
    }

    /// Opens the put of a record with these pages.
    fn open(
        &mut self,
        record: Record,
        key: PageHash,
        parts: &[(PageId, SwapPageId)],
        pool: &mut SwapPool,
        next_save: MoveId,
    ) {
        let (mut save, mut is_staged) = (MoveId::default(), false);
        for &(device, mut swap) in parts {
            if swap == NO_SWAP_PAGE {
                swap = self.stage.pop().expect("the stage has enough pages");
                self.staged.push(PageMove { device, swap });
                (save, is_staged) = (next_save, true);
            } else {
                pool.begin_read(swap);
                save = save.max(pool.last_save(swap));
            }
            self.pages.push(swap);
        }
        self.last += 1;
        let (id, len) = (PutId(self.last), parts.len() as u32);
        self.open.push_back(OpenPut { id, record: Some(record), key, len, save, is_staged, is_given: false });
    }

    /// Calls `sink` with the puts whose pages the store can read. All saves up to `saved` are done. Returns the number
    /// of calls.
    pub fn give(
        &mut self,
        (nodes, chain, names): (&Nodes, &Chain, &Names),
        pool: &mut SwapPool,
        saved: MoveId,
        mut sink: impl FnMut(Put<'_>),
    ) -> usize {
        let (mut given, mut end) = (0, 0);
        let mut tokens = std::mem::take(&mut self.tokens);
        for index in 0..self.open.len() {
            let put = self.open[index];
            let start = end;
            end += put.len as usize;
            // If the entry has been freed, the put's bytes are still valid, but the entry may have other tokens.
            let Some(record) = self.present(&put).filter(|_| !put.is_given && put.save <= saved) else {
                continue;
            };
            self.open[index].is_given = true;
            given += 1;
            let (first, before) = self.write_tokens(record, &nodes.lists, &mut tokens);
            let parent = (before != NONE).then(|| chain.of(before));
            let namespace = chain.namespace_of(nodes, self.firsts[record.entry as usize]);
            let names = &named(names, namespace).names;
            let (OpenPut { id, key, .. }, group, pages) = (put, record.group, &self.pages[start..end]);
            sink(Put { id, namespace, names, group, key, parent, first, tokens: &tokens, pages });
        }
        self.tokens = tokens;
        // Ends the puts that the store has not received and whose entries were freed or are of an earlier generation.
        while let Some(gone) = self.open.iter().find(|put| !put.is_given && self.present(put).is_none()) {
            self.end(pool, gone.id, false);
        }
        given
    }

    /// Writes the tokens of a record to `tokens`. Returns the place of its first page, and the entry before this page.
    fn write_tokens(&self, record: Record, lists: &EntryLists, tokens: &mut Vec<TokenId>) -> (u32, u32) {
        let count = if record.group == 0 { self.record_pages } else { 1 };
        let page_size = lists.tokens_of(record.entry).len();
        let mut entry = record.entry;
        tokens.resize(page_size * count as usize, TokenId::default());
        for page in tokens.chunks_exact_mut(page_size).rev() {
            page.copy_from_slice(lists.tokens_of(entry));
            entry = self.before[entry as usize];
        }
        (self.places[record.entry as usize] + 1 - count, entry)
    }

    /// Returns the entries of the record of group 0 that ends with an entry, the last one first.
    pub fn entries_back(&self, entry: u32) -> impl Iterator<Item = u32> {
        std::iter::successors(Some(entry), |&at| Some(self.before[at as usize])).take(self.record_pages as usize)
    }

    /// Ends the puts whose saves to the stage, in the batch `save`, failed. Queues their records again.
    pub fn fail_staged(&mut self, pool: &mut SwapPool, save: MoveId) {
        while let Some(index) = self.open.iter().rposition(|put| put.is_staged && put.save == save) {
            let put = self.remove(index, pool);
            self.queue.push_front(put.record.expect("this call opened the put"));
            self.round += 1;
        }
        self.staged.clear();
    }

    /// Removes an open put, and gives up its pages.
    fn remove(&mut self, index: usize, pool: &mut SwapPool) -> OpenPut {
        let start: usize = self.open.iter().take(index).map(|put| put.len as usize).sum();
        let put = self.open.remove(index).expect("it was found");
        for page in self.pages.drain(start..start + put.len as usize) {
            if page.raw() >= self.stage_start {
                self.stage.push(page);
            } else {
                pool.end_read(page);
            }
        }
        put
    }

    /// Ends a put, as [`Engine::put_done`](crate::Engine::put_done). Returns `None` if the put was not open. Returns
    /// the record that a store has from now on, if there is one; the caller marks it.
    pub fn end(&mut self, pool: &mut SwapPool, id: PutId, ok: bool) -> Option<Option<Record>> {
        let index = self.open.binary_search_by_key(&id, |put| put.id).ok()?;
        let put = self.remove(index, pool);
        let record = self.present(&put);
        match record {
            Some(record) if ok => self.stop_waiting(record),
            Some(record) => self.push(record),
            None => {}
        }
        self.done += if ok { u64::from(put.len) } else { 0 };
        Some(record.filter(|_| ok))
    }

    /// Checks a part of M1, for the pages that puts read, and parts of M3. O(entries and open puts).
    pub fn check(
        &self,
        pool: &SwapPool,
        lists: &EntryLists,
        key_of: impl Fn(u32) -> Option<PageHash>,
    ) -> Result<(), &'static str> {
        let mut apart: HashSet<&SwapPageId> = self.stage.iter().collect();
        let mut count = self.stage.len();
        let mut rest = &self.pages[..];
        let mut is_unwritten = true;
        for put in &self.open {
            let own = rest.split_off(..put.len as usize).ok_or("M1: open puts have their pages")?;
            let (staged, read): (Vec<_>, Vec<_>) = own.iter().partition(|page| page.raw() >= self.stage_start);
            count += staged.len();
            apart.extend(staged);
            is_unwritten &= read.iter().all(|&&page| pool.is_read(page) && pool.last_save(page) <= put.save);
        }
        if apart.len() < count || !rest.is_empty() || !is_unwritten {
            return Err("M1: no writer touches a page that a put reads");
        }
        let keeps = |put| self.present(put).is_none_or(|record| key_of(record.entry) == Some(put.key));
        if !self.open.iter().all(keeps) {
            return Err("M3: an entry has the hash that its put has");
        }
        let mut entries = 0..self.versions.len() as u32;
        if entries.any(|entry| self.is_stored(entry) && lists.is_free(entry)) {
            return Err("M3: a stored entry has a page");
        }
        self.check_waiting()
    }

    /// Checks that each record of a cell is queued or open at most once.
    fn check_waiting(&self) -> Result<(), &'static str> {
        let open = self.open.iter().filter_map(|put| put.record);
        let records = self.queue.iter().copied().chain(open).filter(|record| self.is_present(*record));
        let cells: Vec<_> = records.filter(|record| record.group > 0).map(|r| (r.group, r.entry)).collect();
        let once = cells.iter().collect::<HashSet<_>>().len() == cells.len();
        let listed = cells.iter().all(|&(group, entry)| self.waiting[group as usize - 1].contains(entry));
        let count: u32 = self.waiting.iter().map(Bitmap::count).sum();
        if once && listed && count as usize == cells.len() {
            Ok(())
        } else {
            Err("M3: the record of a cell is queued or open once")
        }
    }
}

fn set_bit(set: &mut Bitmap, number: u32, is_set: bool) {
    match (set.contains(number), is_set) {
        (false, true) => set.insert(Bits::one(number as usize)),
        (true, false) => set.remove(Bits::one(number as usize)),
        _ => {}
    }
}
